"""Models in GGUF files that are no language models and no encoders of text, by architecture, and what they are."""

from __future__ import annotations

from collections.abc import Mapping

from quarrel.errors import UnsupportedModel
from quarrel.gguf import Metadata


def _named(what: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), what)


OTHERS: Mapping[str, str] = {
    **_named("writes down speech", "whisper parakeet canary moonshine sensevoice paraformer qwen3-asr conformer wav2vec2"),
    **_named(
        "speaks", "bark kokoro parler-tts dia csm chatterbox vits f5-tts cosyvoice qwen3-tts wavtokenizer-dec snac dac mimi"
    ),
    **_named(
        "makes images",
        "flux flux2 sd1 sd2 sd3 sdxl aura auraflow hidream lumina2 pig qwen_image z_image omnigen chroma vae",
    ),
    **_named("makes videos", "wan hyvid hunyuan_video ltxv cosmos mochi cogvideox"),
    **_named("encodes images or sound for a language model, which is in a file of its own", "clip"),
    **_named("reads a text into an encoder before it writes another", "t5 t5encoder bart madlad"),
    **_named("writes all words of a text at once, by diffusion", "dream llada llada-moe rnd1"),
}
"""What each does, as the end of a sentence."""

TYPES: Mapping[str, str] = {
    "adapter": "an adapter: give it with --lora beside the model it was made for",
    "mmproj": "the part of a model that sees or hears: give the file of the language model",
    "imatrix": "statistics for quantising a model: give the file of the model",
}
"""What a file is by its `general.type`, if it is no model."""


def check_text_model(metadata: Metadata) -> str:
    """The architecture of a model of text; raises UnsupportedModel, with what it is, for another."""
    kind, name = metadata.str("general.type", "model"), metadata.str("general.architecture")
    if kind in TYPES:
        raise UnsupportedModel(f"the file is no model but {TYPES[kind]}")
    if name in OTHERS:
        raise UnsupportedModel(
            f"the architecture is {name!r}, a model that {OTHERS[name]}; Quarrel runs language models and encoders of text:"
            " choose one of those"
        )
    return name
