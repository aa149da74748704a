"""The rooms of the package: what each speaks of, what it may import, and what it must never name.

`tests/test_rooms.py` checks every import against this table, `python -m tools.docs` writes it into docs/structure.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "quarrel"


@dataclass(frozen=True)
class Room:
    """A folder or a module of the package.

    `own`: modules of this package that it may import, `""` for the public package itself; `outside`: other packages;
    `nouns`: whether its code may name an architecture.
    """

    speaks_of: str
    never: str
    own: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    nouns: bool = False


ROOMS: Mapping[str, Room] = {
    "errors": Room("every deliberate error", "anything else"),
    "env": Room("the `QUARREL_*` variables", "anything else", ("errors",)),
    "gguf": Room(
        "bytes on disk, block formats, where a model's file lies", "an op, an architecture, a device",
        ("errors", "env"), ("numpy", "gguf", "huggingface_hub", "tqdm"),
    ),
    "convert": Room(
        "models in safetensors: a Hugging Face folder read as a GGUF file", "an array of a model that runs, a device",
        ("errors", "gguf", "tokenizer"), ("numpy", "gguf", "sentencepiece"), nouns=True,
    ),
    "child": Room("child processes: spawning, frames of messages, errors by name, heartbeats with a phase", "what they run",
        ("errors",)),
    "tokenizer": Room(
        "text and ids, chat templates", "arrays, models",
        ("errors", "gguf", "child"), ("sentencepiece", "tokenizers", "jinja2"), nouns=True,
    ),
    "ops": Room("what a result must be", "a framework, an architecture", ("errors", "env", "gguf"), ("numpy",)),
    "cpu_backend": Room(
        "how a CPU computes it", "another backend, an architecture, a request",
        ("errors", "env", "gguf", "ops", "child.phase"), ("numpy", "llvmlite"),
    ),
    "triton_backend": Room(
        "how CUDA computes it", "another backend, an architecture, a request",
        ("errors", "env", "gguf", "ops", "child.phase"), ("numpy", "torch", "triton"),
    ),
    "mlx_backend": Room(
        "how Metal computes it", "another backend, an architecture, a request",
        ("errors", "env", "gguf", "ops"), ("numpy", "mlx"),
    ),
    "models": Room(
        "which blocks, in which order", "a backend, a method of an array", ("errors", "gguf", "ops"), ("numpy",), nouns=True
    ),
    "vision": Room(
        "pictures from strangers, as patches", "a model that runs, a device", ("errors", "child"), ("numpy", "PIL")
    ),
    "engine": Room(
        "requests, cache blocks, time", "a framework, an op family, HTTP",
        ("errors", "env", "ops.step", "ops.adjust", "ops.sample", "ops.profile", "ops.transfer", "child.phase"),
        ("numpy",),
    ),
    "demo": Room("the bundled models (data)", "anything else", ("errors",)),
    "interop": Room(
        "the kernels as PyTorch operators, `torch.ops.quarrel`", "a model, a request",
        ("errors", "gguf", "ops", "triton_backend"), ("numpy", "torch"),
    ),
    "parallel": Room(
        "devices that share a model: processes, hosts, links, sums", "a request, a kernel",
        ("errors", "gguf", "convert", "models", "ops", "child"), ("numpy", "torch", "ray"),
    ),
    "llm": Room(
        "a loaded model: the glue", "a framework",
        ("errors", "env", "gguf", "convert", "tokenizer", "models", "ops", "vision", "engine", "parallel", "demo",
         "child.phase", "flight.handover", "flight.segments"),
        ("numpy", "tqdm", "llguidance"),
    ),
    "toolbox": Room("tools of MCP servers", "a model", ("errors",), ("mcp",)),
    "doctor": Room(
        "what a machine can run", "a kernel", ("", "errors", "env", "gguf", "llm", "models", "ops.registry", "ops.step")
    ),
    "metrics": Room("the names that Prometheus knows", "a count of its own", ("engine",), ("prometheus_client",)),
    "process": Room("a model in a process of its own", "HTTP", ("errors", "llm", "engine", "child"), ("numpy",)),
    "server": Room(
        "HTTP: OpenAI's and Ollama's protocols, the web page, keys, limits", "a backend, an op, a cache block",
        ("", "errors", "gguf.digest", "gguf.resolve", "llm", "engine", "metrics", "process",
         "toolbox"),
        ("numpy", "fastapi", "pydantic", "starlette", "uvicorn", "h11", "opentelemetry", "redis", "prometheus_client"),
    ),
    "flight": Room("a vector store, and bytes from process to process, by Arrow Flight", "a model", ("errors",),
        ("numpy", "pyarrow")),
    "embed": Room("files of texts to files or stores of vectors", "HTTP, an op", ("errors", "gguf.lock", "llm", "flight"),
        ("numpy", "pyarrow")),
    "launch": Room(
        "what launchers such as Ollama start: llama-server's command line and log", "an op, a route",
        ("", "errors", "gguf", "tokenizer", "llm", "server"),
    ),
    "cli": Room(
        "people at a terminal", "an op, a kernel",
        ("", "errors", "env", "gguf", "convert", "tokenizer", "llm", "engine", "doctor", "process", "server", "embed",
         "flight", "launch", "quality", "toolbox", "bench"),
        ("tqdm", "prompt_toolkit", "rich", "markdown_it", "shtab", "mcp"),
    ),
    "bench": Room(
        "speed, and the bandwidth it is compared with", "a request",
        ("", "errors", "env", "gguf", "models", "ops", "llm", "cpu_backend", "triton_backend"),
        ("numpy", "torch", "triton", "mlx", "pynvml"),
    ),
    "quality": Room("how good answers are", "a framework", ("", "errors", "gguf", "models", "ops", "llm"), ("numpy",)),
    "perplexity": Room("perplexity and KL divergence of a text", "a framework", ("", "errors", "env", "llm", "quality")),
    "regress": Room("whether answers have changed", "a framework", ("errors", "env", "llm", "ops.registry", "quality")),
    "__main__": Room("the start of the process", "anything else", ("cli", "launch")),
    "__init__": Room("the public names", "anything else", ("errors", "llm", "engine", "gguf")),
}  # fmt: skip

TEST_ONLY = {"ops": "hypothesis"}
"""What a room may import inside a function only: strategies are made when a test asks for them."""


def table() -> str:
    """The rooms as a Markdown table, those that import nothing of the package first."""
    lines = ["| room | speaks of | may import | must never name |", "|---|---|---|---|"]
    for name, room in ROOMS.items():
        shown = f"{name}/" if (PACKAGE / name).is_dir() else f"{name}.py"
        own = [f"`{module}`" if module else "`quarrel`" for module in room.own if module != "errors"]
        lines.append(f"| `{shown}` | {room.speaks_of} | {', '.join((*own, *room.outside)) or 'nothing'} | {room.never} |")
    return "\n".join(lines)
