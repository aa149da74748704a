"""What a model is loaded with. An option is one field here: `load` takes it, the command line derives its flag from it, and
it travels to a model's process, without being named again.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from quarrel.env import ATTENTION, BACKENDS, COMPUTE, KV_CACHE, MAX_DEVICES, MAX_THREADS, Environment
from quarrel.errors import RequestError

if TYPE_CHECKING:
    from quarrel.models import RopeScaling
    from quarrel.ops.kv import KVType
    from quarrel.ops.step import AttentionChoice, Backend, ComputeChoice

MAX_SEQS = 256
MAX_ADAPTERS = 64
MTP = "mtp"
"""In place of a draft model: the model's own block that predicts further tokens."""
SCALINGS = ("none", "linear", "yarn")
WEIGHTS = (
    *("q4_k_m", "q4_k_s", "q5_k_m", "q5_k_s", "q6_k", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"),
    *("q3_k_m", "q3_k_s", "q3_k_l", "q2_k", "iq4_nl", "iq4_xs", "iq3_m", "iq3_s"),
    *("f16", "bf16", "f32"),
)
"""What weights can be made into."""
Progress = Callable[[int, int], None]
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class Whole:
    """A whole number from `low` to `high`, in `unit`."""

    low: int
    high: int
    unit: str = ""
    optional: bool = True

    def wanted(self, value: object) -> str | None:
        """What is wanted in place of the value; None if it is right."""
        if value is None and self.optional:
            return None
        if isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high:
            return None
        return f"a whole number{self.unit} from {self.low}" + ("" if self.high >= 1 << 60 else f" to {self.high}")


@dataclass(frozen=True)
class OneOf:
    """One of some words. `strict`: nothing else; otherwise other values are checked where they are used."""

    words: tuple[str, ...]
    strict: bool = True

    def wanted(self, value: object) -> str | None:
        return None if value in self.words or not self.strict else f"one of {', '.join(self.words)}"


@dataclass(frozen=True)
class Value:
    """Any value that `test` accepts; `words` say what is wanted."""

    words: str
    test: Callable[[Any], bool]

    def wanted(self, value: object) -> str | None:
        return None if self.test(value) else self.words


def _is_memory(value: object) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 1 << 60
    return value is None or whole or (isinstance(value, float) and 0 < value <= 1)


def _is_layers(value: object) -> bool:
    return value in (None, "auto") or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1 << 20)


LAYERS = Value("auto or a whole number of layers from 0", _is_layers)
SWITCH = Value("True or False", lambda value: isinstance(value, bool))
MEMORY = Value("a whole number of bytes, or a share up to 1.0 as a float", _is_memory)
FILE_NAME = Value("a path or a name", lambda value: value is None or isinstance(value, str | os.PathLike))
ADDRESS = Value("an address", lambda value: value is None or (isinstance(value, str) and value.strip() != ""))
FUNCTION = Value("a function", lambda value: value is None or callable(value))
NUMBER = Value("a number", lambda value: True)
"""Checked by `RopeScaling`."""
ADAPTERS = Value("names and files", lambda value: True)
"""Checked by `_check_adapters`."""

Kind = Whole | OneOf | Value


def _about(kind: Kind, doc: str, help: str = "") -> dict[str, Any]:
    """doc: for Python. help: for the command line, which has no flag for an option without it."""
    return {"kind": kind, "doc": doc, "help": help}


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The keyword arguments of `load`. Raises RequestError, whose `field` names the option, for a value out of range."""

    backend: str | Backend = field(
        default="auto",
        metadata=_about(
            OneOf(BACKENDS, strict=False),
            '"triton" (CUDA), "mlx" (Metal), "cpu", or "auto", which is `QUARREL_BACKEND` or the first that can run'
            " here; a named one is used or raises BackendUnavailable.",
            "what computes: triton on NVIDIA GPUs, mlx on Apple's; auto is the best that is ready",
        ),
    )
    compute: ComputeChoice = field(
        default="auto",
        metadata=_about(
            OneOf(COMPUTE),
            'the arithmetic of activations; "float32" is exact, and "fp8" is float16 with coarse products (E4M3) for long'
            " prompts on an H100 or H200; by default `QUARREL_COMPUTE`, or the backend's own.",
            "the arithmetic; float32 is exact, fp8 coarse",
        ),
    )
    quantize: str | None = field(
        default=None,
        metadata=_about(
            OneOf(WEIGHTS, strict=False),
            'what the weights of a model in safetensors become on the way, such as "q8_0" or "q4_k_m"; by default they stay'
            " as they are. The K types take minutes for large models: `quarrel convert` makes a file of them once.",
            "what the weights of a model in safetensors become while it is loaded; by default nothing else",
        ),
    )
    n_ctx: int | None = field(
        default=None,
        metadata=_about(
            Whole(1, 1 << 30),
            "tokens of prompt and continuation together; by default the model's own, at most 8192, and fewer (with a"
            " warning) where memory ends.",
            "context in tokens; by default the model's, but at most 8192",
        ),
    )
    max_seqs: int = field(default=8, metadata=_about(Whole(1, MAX_SEQS, optional=False), "sequences that run at once."))
    memory: int | float | None = field(
        default=None,
        metadata=_about(
            MEMORY,
            "bytes that everything may take together, or a share of what is free as a float up to 1.0; by default"
            " `QUARREL_MEMORY`, or what is free.",
            "what a model may take: bytes (512MiB, 16GB) or a share of what is free (80%%)",
        ),
    )
    kv_cache: KVType = field(
        default="auto",
        metadata=_about(
            OneOf(KV_CACHE),
            'how keys and values are stored: "float16", "bfloat16", or "int8", "fp8" or "fp8_e5m2" in half the memory; by'
            " default `QUARREL_KV_CACHE`, or what the backend computes in (on a CPU float16, except in float32).",
            "how keys and values are stored; int8, fp8 (E4M3) and fp8_e5m2 take half the memory",
        ),
    )
    prefix_cache: bool = field(
        default=True,
        metadata=_about(SWITCH, "keep what finished sequences computed, for prompts that begin alike."),
    )
    prefix_cache_bytes: int | None = field(
        default=None,
        metadata=_about(
            Whole(0, (1 << 60) - 1, " of bytes"),
            "at most so much of it where no sequence uses it; by default what there is room for.",
            "what finished texts may keep of the cache, for prompts that begin alike (512MiB); by default what is free",
        ),
    )
    max_waiting: int = field(
        default=1024,
        metadata=_about(
            Whole(1, 1 << 20, optional=False),
            "requests that may wait beside those that run; a further one raises QueueFull.",
        ),
    )
    attention: AttentionChoice = field(
        default="auto",
        metadata=_about(
            OneOf(ATTENTION),
            'the attention kernels for long prompts on CUDA: "own", "cudnn" where that applies from 2048 tokens on, or'
            ' "auto" for that from 4096 on; by default `QUARREL_ATTENTION`, or "auto".',
            "the attention kernels for long prompts on CUDA; auto is cuDNN where that applies to 4096 tokens, else our own",
        ),
    )
    decoded_weights: Literal["auto", "never"] = field(
        default="auto",
        metadata=_about(
            OneOf(("auto", "never")),
            'whether quantised weights are also kept in 16 bits on CUDA (with fp8 in E4M3), for prompts: "auto", in most of'
            ' the memory that would be left over, or "never".',
            "whether most of the memory left over on CUDA may hold weights in 16 bits, for faster prompts",
        ),
    )
    deterministic: bool = field(
        default=False,
        metadata=_about(
            SWITCH,
            "a request's tokens have the same bits whatever runs beside it and however its prompt is cut, which costs speed"
            " on a GPU; the CPU backend always does so.",
            "the same bits whatever runs beside a request, at a cost on a GPU",
        ),
    )
    threads: int | None = field(
        default=None,
        metadata=_about(
            Whole(1, MAX_THREADS),
            "of the CPU backend; by default `QUARREL_THREADS`, or one for each core.",
            "CPU threads; by default one for each core",
        ),
    )
    tensor_parallel: int | None = field(
        default=None,
        metadata=_about(
            Whole(1, MAX_DEVICES),
            "devices that share the model, with a process each: GPUs of this machine (or processes on the CPU, to try it"
            " out); by default `QUARREL_TENSOR_PARALLEL`, or 1. Needs PyTorch.",
            "how many GPUs share the model; by default 1",
        ),
    )
    pipeline_parallel: int | None = field(
        default=None,
        metadata=_about(
            Whole(1, MAX_DEVICES),
            "processes that hold consecutive layers each, and hand on what theirs gave: a model then needs that much less"
            " memory in each of them. With `tensor_parallel` each of them is so many devices. Needs PyTorch.",
            "how many stages share the model, whole layers each; by default 1",
        ),
    )
    hosts: str | None = field(
        default=None,
        metadata=_about(
            ADDRESS,
            "a Ray cluster whose hosts share the model, a stage of `pipeline_parallel` each, the last one on this machine:"
            ' "ray://HOST:10001", or "auto" for the cluster that this machine is part of. Needs Ray on all of them.',
            "a Ray cluster whose hosts have a stage each: ray://HOST:10001, or auto for that of this machine",
        ),
    )
    prefill: str | None = field(
        default=None,
        metadata=_about(
            ADDRESS,
            "processes (`quarrel prefill`, on other GPUs or hosts) that read prompts of 256 tokens or more for this one,"
            " and hand over what their cache then holds: grpc://HOST:PORT, with commas between several. Where none answers,"
            " a prompt is read here. Needs the extra `flight`.",
            "processes that read long prompts for this one (quarrel prefill): grpc://HOST:PORT, or several with commas",
        ),
    )
    gpu_layers: int | Literal["auto"] | None = field(
        default=None,
        metadata=_about(
            LAYERS,
            "layers, counted from the last, that are on the device, and the output with them; the CPU backend computes"
            ' those before. "auto" leaves as few to it as make the rest fit a GPU, experts before whole layers. By default'
            " all are on the device. Not with several devices.",
            "how many layers are on the GPU, the others computed by the CPU; auto is as many as fit; by default all",
        ),
    )
    experts_on_cpu: int | None = field(
        default=None,
        metadata=_about(
            Whole(0, 1 << 20, " of layers"),
            "layers, from the first, whose experts stay in host memory and are computed there, beside a GPU; by default as"
            " few as make the rest fit.",
            "how many layers' experts stay in host memory; by default as few as needed",
        ),
    )
    expert_memory: int | None = field(
        default=None,
        metadata=_about(
            Whole(1, (1 << 60) - 1, " of bytes"),
            "of a GPU for experts in all: those used most are there, and move as their use changes; the others stay in host"
            " memory and are computed there. By default all are on the GPU. Not with experts_on_cpu or deterministic.",
            "what experts may take of a GPU's memory (20GiB): those used most; the rest stays in host memory",
        ),
    )
    rope_scaling: Literal["none", "linear", "yarn"] | None = field(
        default=None,
        metadata=_about(
            OneOf(SCALINGS, strict=False),
            'a longer context than the model was trained on: "linear" or "yarn"; "none" ignores the scaling in the file.',
            "for a longer context than the model was made for; none ignores the file's own",
        ),
    )
    rope_scale: float | None = field(
        default=None,
        metadata=_about(
            NUMBER,
            "how many times longer; by default as much as n_ctx needs.",
            "how many times the context; by default as much as --ctx needs",
        ),
    )
    yarn_orig_ctx: int | None = field(
        default=None,
        metadata=_about(
            Whole(1, 1 << 30),
            'tokens that the model was trained on, for "yarn" where the file does not say.',
            "tokens that the model was trained on, for yarn",
        ),
    )
    draft: str | os.PathLike[str] | None = field(
        default=None,
        metadata=_about(
            FILE_NAME,
            'a smaller model of the same vocabulary, which proposes tokens (`Service.draft`), or "mtp": the block that the'
            " model itself brings to predict further tokens; the text stays the same.",
        ),
    )
    mmproj: str | os.PathLike[str] | None = field(
        default=None,
        metadata=_about(
            FILE_NAME,
            "the projector file (mmproj-*.gguf) by which a model sees images; by default the one beside the model's file,"
            ' "none" for none. Images want Pillow (`pip install longbow-quarrel[images]`), texts do not.',
            "the projector file (mmproj-*.gguf) of a model that sees; by default the one beside it, none for none",
        ),
    )
    allow_image_urls: bool = field(
        default=False,
        metadata=_about(
            SWITCH,
            "images in messages may be addresses of http and https, which are fetched: from public addresses only, for each"
            " request 32 MiB in 10 seconds at most.",
            "fetch images that messages name by http or https, from public addresses only",
        ),
    )
    adapters: Mapping[str, str | os.PathLike[str]] | None = field(
        default=None,
        metadata=_about(
            ADAPTERS,
            "LoRA adapters by name: GGUF files as llama.cpp writes them; a request names one by `adapter=`, or none.",
        ),
    )
    profile_steps: int | None = field(
        default=None,
        metadata=_about(
            Whole(0, 1 << 20),
            "one step in so many has its expert and recurrent layers timed, for `quarrel.metrics`; 0 is none."
            " By default 16 on a CPU, and none on CUDA, where a timed step takes several times as long.",
        ),
    )
    beside_tokens: int | None = field(
        default=None,
        metadata=_about(
            Whole(1, 1 << 20),
            "tokens of prompts in one step at most where other sequences decode, who wait for it: fewer make the longest"
            " gap between two tokens shorter, and all together a little slower. By default as many as fit a step, 4096 on"
            " CUDA.",
            "tokens of prompts in one step at most where other sequences decode; by default as many as fit, 4096 on CUDA",
        ),
    )
    progress: Progress | None = field(
        default=None,
        metadata=_about(
            FUNCTION, "called with bytes of the file done and in all while weights are packed, on another thread."
        ),
    )

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if (wanted := entry.metadata["kind"].wanted(value)) is not None:
                raise RequestError(f"{entry.name} is {value!r}, wanted {wanted}", entry.name)
        _check_adapters(self.adapters)
        if self.hosts is not None and (self.pipeline_parallel or 1) == 1:
            message = "hosts share a model by its layers, and pipeline_parallel says how many do: 2 or more are wanted"
            raise RequestError(message, "hosts", "pipeline_parallel")
        if (self.rope_scaling, self.rope_scale, self.yarn_orig_ctx) != (None, None, None):
            _ = self.scaling

    @property
    def scaling(self) -> RopeScaling:
        """The three options of rope, which check each other."""
        from quarrel.models import RopeScaling  # only here: a command line that prints its help needs no NumPy

        return RopeScaling(self.rope_scaling, self.rope_scale, self.yarn_orig_ctx)

    def resolved(self, environment: Environment) -> LoadOptions:
        """With the environment's values for options that are None or "auto". threads: those of one process of several."""
        names = ("backend", "compute", "kv_cache", "attention", "memory", "threads")
        made = replace(self, **{n: getattr(environment, n) for n in names if getattr(self, n) in (None, "auto")})
        devices = self.devices(environment)
        if self.hosts is not None:
            devices //= self.pipeline_parallel or 1
        if devices == 1:
            return made
        return replace(made, threads=max(1, (made.threads or os.cpu_count() or 1) // devices))

    def devices(self, environment: Environment) -> int:
        """How many share the model."""
        each = environment.tensor_parallel if self.tensor_parallel is None else self.tensor_parallel
        return (self.pipeline_parallel or 1) * each

    def wire(self) -> dict[str, Any]:
        """What differs from the defaults, as JSON, for the process that will load the model."""
        changed = {e.name: v for e in fields(self) if (v := getattr(self, e.name)) != e.default}
        if not isinstance(self.backend, str) or self.progress is not None:
            raise RequestError("a model in another process is loaded with the name of a backend, and without progress")
        if self.draft is not None:
            changed["draft"] = os.fspath(self.draft)
        if self.mmproj is not None:
            changed["mmproj"] = os.fspath(self.mmproj)
        if self.adapters is not None:
            changed["adapters"] = {name: os.fspath(path) for name, path in self.adapters.items()}
        return changed


def described() -> str:
    """The options and what they mean, for the documentation of `load`."""
    texts = (f"{entry.name}: {entry.metadata['doc']}" for entry in fields(LoadOptions))
    return "\n".join(textwrap.fill(text, 120, initial_indent="    ", subsequent_indent="        ") for text in texts)


def _check_adapters(adapters: object) -> None:
    if adapters is None:
        return
    if not isinstance(adapters, Mapping) or len(adapters) > MAX_ADAPTERS:
        message = f"adapters is {_short(adapters)}, wanted names and files of at most {MAX_ADAPTERS} adapters"
        raise RequestError(message, "adapters")
    for name in adapters:
        if not isinstance(name, str) or not _ADAPTER_NAME.fullmatch(name):
            message = f"an adapter is called {_short(name)}, wanted 1 to 64 letters, digits, dots, dashes and _"
            raise RequestError(message, "adapters")


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
