"""How much memory `quarrel convert`, `quantize` and `imatrix` take, of models whose tensors have real sizes.

    python -m bench.check.convert_memory [SHAPE ...] --out FILE.jsonl [--threads 16] [--types f16,q8_0,q4_k_m]

SHAPES: gemma (a vocabulary of 262144 rows of 5376), mixtral (an expert a tensor), gpt-oss (stacks of 128 experts), fp8
(maps of 53248 x 16384 in 8-bit floats, with scales by row or by block) and mxfp4; `--layers` of each, in shards. Files
are sparse: zeros but for the beginning of each tensor. What is written takes room, and is removed; `--stop`
ends a run within a tensor that is larger than memory, where what it takes no longer changes.

A row for each run: the most anonymous memory at any time (RssAnon), the most of mapped files beside it (RssFile), and the
largest resident set that the system counted (ru_maxrss), in MiB, looked at every 10 ms. What a program needs is the first:
pages of mapped files are dropped where others need the room. `--data 2048` sets RLIMIT_DATA to so many MiB: then a process
that wants more ends with MemoryError. `--threads` is how many processors a process believes that it has.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.shared import Notes, command_line
from tests.convert.folders import write_byte_pairs

LLAMA = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "rope_theta": 1e4}
BITS = {"BF16": 2, "F8_E4M3": 1, "U8": 1, "F32": 4}
SHARD = 5_000_000_000
Tensors = Iterator[tuple[str, str, tuple[int, ...]]]
"""Names, types and shapes."""


def attention(at: str, width: int, heads: int, kv: int, dim: int, *, biased: bool = False, fp8: bool = False) -> Tensors:
    for part, rows, columns in (
        ("q", heads * dim, width),
        ("k", kv * dim, width),
        ("v", kv * dim, width),
        ("o", width, heads * dim),
    ):
        name = f"{at}.self_attn.{part}_proj"
        yield f"{name}.weight", "F8_E4M3" if fp8 else "BF16", (rows, columns)
        if fp8:
            yield f"{name}.weight_scale", "F32", (rows, 1)
        if biased:
            yield f"{name}.bias", "BF16", (rows,)
    for norm in ("input", "post_attention"):
        yield f"{at}.{norm}_layernorm.weight", "BF16", (width,)


def ends(width: int, rows: int, *, tied: bool = False) -> Tensors:
    yield "model.embed_tokens.weight", "BF16", (rows, width)
    yield "model.norm.weight", "BF16", (width,)
    if not tied:
        yield "lm_head.weight", "BF16", (rows, width)


def gemma(layers: int) -> tuple[dict[str, Any], Tensors]:
    width, ff, rows = 5376, 21504, 262144
    sizes = {"hidden_size": width, "intermediate_size": ff, "num_attention_heads": 42, "num_key_value_heads": 14}

    def tensors() -> Tensors:
        yield from ends(width, rows)
        for i in range(layers):
            yield from attention(f"model.layers.{i}", width, 42, 14, 128)
            for part in ("gate", "up", "down"):
                yield f"model.layers.{i}.mlp.{part}_proj.weight", "BF16", (width, ff) if part == "down" else (ff, width)

    return {**LLAMA, **sizes, "head_dim": 128, "vocab_size": rows, "tie_word_embeddings": False}, tensors()


def mixtral(layers: int) -> tuple[dict[str, Any], Tensors]:
    width, ff, rows = 4096, 14336, 4096
    sizes = {"hidden_size": width, "intermediate_size": ff, "num_attention_heads": 32, "num_key_value_heads": 8}
    experts = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}

    def tensors() -> Tensors:
        yield from ends(width, rows)
        for i in range(layers):
            yield from attention(f"model.layers.{i}", width, 32, 8, 128)
            at = f"model.layers.{i}.block_sparse_moe"
            yield f"{at}.gate.weight", "BF16", (8, width)
            for e in range(8):
                for n in (1, 2, 3):
                    yield f"{at}.experts.{e}.w{n}.weight", "BF16", (width, ff) if n == 2 else (ff, width)

    return {**LLAMA, **sizes, **experts, "vocab_size": rows, "tie_word_embeddings": False}, tensors()


def gpt_oss(layers: int, *, coded: bool = False) -> tuple[dict[str, Any], Tensors]:
    width, rows, count = 2880, 4096, 128
    config = {
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": width,
        "intermediate_size": width,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": rows,
        "num_local_experts": count,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * layers,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "rope_theta": 150000,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
    }

    def stack(name: str, rows: int) -> Tensors:
        if coded:
            yield f"{name}_blocks", "U8", (count, rows, width // 32, 16)
            yield f"{name}_scales", "U8", (count, rows, width // 32)
        else:
            yield name, "BF16", (count, width, rows)
        yield f"{name}_bias", "BF16", (count, rows)

    def tensors() -> Tensors:
        yield from ends(width, rows)
        for i in range(layers):
            at = f"model.layers.{i}"
            yield from attention(at, width, 64, 8, 64, biased=True)
            yield f"{at}.self_attn.o_proj.bias", "BF16", (width,)
            yield f"{at}.self_attn.sinks", "BF16", (64,)
            yield f"{at}.mlp.router.weight", "BF16", (count, width)
            yield f"{at}.mlp.router.bias", "BF16", (count,)
            yield from stack(f"{at}.mlp.experts.gate_up_proj", 2 * width)
            yield from stack(f"{at}.mlp.experts.down_proj", width)

    def once() -> Tensors:
        seen = set()
        for name, type, shape in tensors():
            if name not in seen:
                seen.add(name)
                yield name, type, shape

    return {**LLAMA, **config}, once()


def fp8(layers: int, *, blocks: bool = False) -> tuple[dict[str, Any], Tensors]:
    """As of Llama 3.1 405B: scales by row; or as DeepSeek has them."""
    width, ff, rows = 16384, 53248, 4096
    sizes = {"hidden_size": width, "intermediate_size": ff, "num_attention_heads": 128, "num_key_value_heads": 8}
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]} if blocks else {"quant_method": "fbgemm_fp8"}

    def tensors() -> Tensors:
        yield from ends(width, rows)
        for i in range(layers):
            yield from attention(f"model.layers.{i}", width, 128, 8, 128, fp8=True)
            for part in ("gate", "up", "down"):
                name, shape = (
                    f"model.layers.{i}.mlp.{part}_proj.weight",
                    ((width, ff) if part == "down" else (ff, width)),
                )
                yield name, "F8_E4M3", shape
                if blocks:
                    yield f"{name}_scale_inv", "F32", (shape[0] // 128, shape[1] // 128)
                else:
                    yield f"{name}_scale", "F32", (shape[0], 1)

    config = {**LLAMA, **sizes, "vocab_size": rows, "tie_word_embeddings": False, "quantization_config": said}
    return config, tensors()


SHAPES: Mapping[str, Any] = {
    "gemma": gemma,
    "mixtral": mixtral,
    "gpt-oss": gpt_oss,
    "mxfp4": lambda layers: gpt_oss(layers, coded=True),
    "fp8": fp8,
    "fp8-blocks": lambda layers: fp8(layers, blocks=True),
}


def write_folder(folder: Path, shape: str, layers: int) -> int:
    """Shards whose data is a hole but for the beginning of each tensor; returns the bytes that they claim."""
    config, tensors = SHAPES[shape](layers)
    folder.mkdir(parents=True)
    config = {**config, "num_hidden_layers": layers, "torch_dtype": "bfloat16"}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer(folder, config["vocab_size"])
    shards: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    held = total = 0
    for name, type, dims in tensors:
        size = BITS[type] * math.prod(dims)
        if held and held + size > SHARD:
            shards.append([])
            held = 0
        shards[-1].append((name, type, dims))
        held, total = held + size, total + size
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        places |= {name: file for name, *_ in shard}
        _write(folder / file, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return total


def _write(path: Path, shard: list[tuple[str, str, tuple[int, ...]]]) -> None:
    header: dict[str, Any] = {}
    at = 0
    for name, type, dims in shard:
        size = BITS[type] * math.prod(dims)
        header[name] = {"dtype": type, "shape": dims, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    floats = rng.standard_normal(1 << 18, np.float32) / 50
    wide = (floats.view(np.uint32) >> 16).astype("<u2").tobytes()
    data = {"BF16": wide, "F32": np.ones(1 << 18, np.float32).tobytes(), "U8": bytes([0x77]) * (1 << 18)}
    data["F8_E4M3"] = rng.integers(0, 120, 1 << 18, np.uint8).tobytes()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, type, _ in shard:
            start, end = header[name]["data_offsets"]
            file.seek(8 + len(text) + start)
            file.write(data[type][: end - start] if type != "F32" or end - start <= 1 << 20 else data[type])
        file.truncate(8 + len(text) + at)


def tokenizer(folder: Path, rows: int) -> None:
    """As many tokens as the model has, and twice as many merges, which is what Gemma's has."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [*letters, *(f"{a}{b}" for a in letters for b in letters)]
    merges = [f"{a} {b}" for a in letters for b in letters]
    for text in texts[256 : 256 + 65536]:
        if len(texts) >= rows - 1:
            break
        for a in letters[:8]:
            texts.append(text + a)
            merges.append(f"{text} {a}")
    texts = list(dict.fromkeys(texts))[: rows - 1]
    known = set(texts)
    merges = [pair for pair in merges if pair.replace(" ", "") in known]
    write_byte_pairs(folder, texts, merges)


def part(target: Path) -> Path:
    return target.with_name(f"{target.name}.part")


MAIN = """
import os, resource, sys
threads, data = int(sys.argv[1]), int(sys.argv[2])
if threads:
    os.cpu_count = lambda: threads
if data:
    resource.setrlimit(resource.RLIMIT_DATA, (data << 20, data << 20))
from quarrel.cli import main
status = main(sys.argv[3:])
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10, flush=True)
sys.exit(status)
"""


def watched(words: list[str], threads: int, data: int, part: Path, stop: float) -> dict[str, Any]:
    """Runs a command of quarrel and watches its memory; ends it when the file that it writes has `stop` gigabytes."""
    began = time.perf_counter()
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    line = [sys.executable, "-c", MAIN, str(threads), str(data), *words]
    child = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    most, stopped = {"RssAnon": 0, "RssFile": 0, "VmRSS": 0}, dict[str, float]()
    status = Path(f"/proc/{child.pid}/status")
    while child.poll() is None:
        try:
            text = status.read_text()
        except OSError:
            break
        for said in text.splitlines():
            name, _, value = said.partition(":")
            if name in most:
                most[name] = max(most[name], int(value.split()[0]) >> 10)
        time.sleep(0.01)
        if stop and part.exists() and part.stat().st_size > stop * 1e9:
            child.kill()
            stopped = {"stopped_at": stop}
    lines = child.communicate()[0].strip().splitlines()
    peak = next((int(said.split()[1]) for said in reversed(lines) if said.startswith("peak ")), None)
    found = {"anonymous": most["RssAnon"], "mapped": most["RssFile"], "resident": most["VmRSS"], "ru_maxrss": peak}
    row = {"status": child.returncode, **found, **stopped, "seconds": round(time.perf_counter() - began)}
    if stopped:
        return row
    last = next((said for said in reversed(lines) if not said.startswith("peak ")), "")
    return row if child.returncode == 0 else {**row, "said": last[-300:]}


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("shapes", nargs="*", default=["gemma", "gpt-oss", "mixtral", "mxfp4", "fp8", "fp8-blocks"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/quarrel-memory"))
    parser.add_argument("--types", default="f16,q8_0,q4_k_m")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--data", type=int, default=0)
    parser.add_argument("--stop", type=float, default=0, metavar="GB", help="end each run when so much is written")
    parser.add_argument("--then", default="", metavar="TYPE", help="also `quantize` the first type's file to this one")
    args = parser.parse_args()
    notes = Notes(args.out)
    for shape in args.shapes:
        shutil.rmtree(args.folder, ignore_errors=True)
        source, target = args.folder / shape, args.folder / "out.gguf"
        size = write_folder(source, shape, args.layers)
        facts = {"shape": shape, "layers": args.layers, "threads": args.threads or os.cpu_count(), "gigabytes": size / 1e9}
        for number, type in enumerate(args.types.split(",")):
            stop = 0 if number == 0 and args.then else args.stop  # what follows reads it
            run = watched(
                ["convert", str(source), "-o", str(target), "--type", type], args.threads, args.data, part(target), stop
            )
            notes.say(command="convert", type=type, **facts, **run)
            if number == 0 and args.then and run["status"] == 0:
                other = args.folder / "other.gguf"
                run = watched(
                    ["quantize", str(target), str(other), args.then], args.threads, args.data, part(other), args.stop
                )
                notes.say(command="quantize", type=f"{type} to {args.then}", **facts, **run)
            for left in (*args.folder.glob("out.gguf*"), *args.folder.glob("other.gguf*")):
                left.unlink()
        shutil.rmtree(args.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
