"""Which classes of Hugging Face's transformers can be converted."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from quarrel.convert.config import Config
from quarrel.convert.decoders import DECODERS
from quarrel.convert.encoders import ENCODERS
from quarrel.convert.hybrids import HYBRIDS
from quarrel.convert.rules import Architecture
from quarrel.errors import UnsupportedModel


def _inner(c: Config) -> Architecture:
    """The text in a model whose class does not tell it."""
    text = c.get("text_config", default={})
    kind = text.get("model_type", "llama") if isinstance(text, dict) else None
    if kind not in _INNER:
        raise UnsupportedModel(f"the text of {c.path} is a {str(kind)[:40]!r}; this version converts {', '.join(_INNER)}")
    return architecture(Config({"architectures": [_INNER[kind]]}, c.path))


_INNER = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
CLASSES: Mapping[str, Architecture | Callable[[Config], Architecture]] = MappingProxyType(
    {
        **{
            name: arch for table in (DECODERS, ENCODERS, HYBRIDS) for names, arch in table.items() for name in names.split()
        },
        "LlavaForConditionalGeneration": _inner,
    }
)
"""By `architectures` of config.json."""


OTHERS: tuple[tuple[str, str], ...] = (
    ("Whisper|Wav2Vec2|Hubert|WavLM|Moonshine|Parakeet|SenseVoice|Speech2Text|SeamlessM4T|Qwen3ASR|Paraformer|Canary|SpeechLlama",
     "writes down speech"),
    ("Bark|Vits|Kokoro|SpeechT5|Csm|Dia|ParlerTTS|Qwen3TTS|FastSpeech2|Chatterbox|CosyVoice|MusicGen|Musicgen|Encodec|Mimi|Dac|Snac",
     "speaks or makes music"),
    ("CLIP|Clip|Siglip|ViT|Dinov|DINO|Swin|ResNet|ConvNext|Detr|Segformer|Sam|Blip|DPT|DepthAnything", "sees"),
    ("Flux|StableDiffusion|SD3|UNet|Autoencoder|Sana|HiDream|Wan|Hunyuan(?:Video|Image)|LTX|CogVideo|Mochi|QwenImage|ZImage",
     "makes images or videos"),
    ("T5|MT5|UMT5|Bart|MBart|Marian|M2M100|Pegasus|NllbMoe|LED|ProphetNet|Blenderbot",
     "reads a text into an encoder before it writes another"),
    ("LLaDA|Dream|RND1", "writes all words of a text at once, by diffusion"),
    ("TimesFm|Chronos|PatchTST|Informer", "continues rows of numbers"),
)  # fmt: skip
"""Models that are none of text, or write none word by word: how the names of their classes begin, and what they do."""


def architecture(config: Config) -> Architecture:
    """The architecture of a folder's model; raises UnsupportedModel for one that is not known."""
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if name is None:
        raise UnsupportedModel(f"{config.path} has no architectures, which names the model's class: download it again")
    if not isinstance(name, str) or name not in CLASSES:
        said = f"the architecture of {config.path} is {str(name)[:80]!r}"
        does = next((what for names, what in OTHERS if re.match(rf"({names})(?=[A-Z0-9]|$)", str(name))), None)
        if does is not None:
            wanted = "Quarrel runs language models and encoders of text: choose one of those"
            raise UnsupportedModel(f"{said}, a model that {does}; {wanted}")
        raise UnsupportedModel(f"{said}; this version converts {', '.join(sorted(CLASSES))}")
    found = CLASSES[name]
    return found if isinstance(found, Architecture) else found(config)
