"""Sentences a second of an encoder: Quarrel, sentence-transformers and llama.cpp, in turns on the same texts.

    python -m bench.engine.embed MODEL.gguf TEXTS [--sentences 512] [--rounds 3] [--threads 2] [--backend B]
        [--peer-python PYTHON] [--llama-python PYTHON]

TEXTS is a plain text; sentences of 16 to 128 tokens are cut from it. The peers run in Pythons of their own:
sentence-transformers with the GGUF file's own weights, so that both compute the same (it needs numpy and gguf there as
well), llama.cpp with the file itself, through llama-cpp-python, in batches of the size that it is fastest with. On a CUDA
device the share of the FLOP floor is printed: the matrices' products alone at the rate of a product of 8192 by 8192 in the
same run. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import quarrel
from quarrel.gguf import GGUFFile
from quarrel.tokenizer import Tokenizer

NAMES = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}

PEER = """
import json, sys, time
import numpy, torch, transformers
from sentence_transformers import SentenceTransformer
from transformers import BertConfig, BertModel, BertTokenizerFast

folder, threads = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(threads)
facts = json.load(open(folder + "/facts.json"))
model = BertModel(BertConfig(**facts["config"]))
arrays = numpy.load(folder + "/weights.npz")
missing = model.load_state_dict({n: torch.from_numpy(arrays[n]) for n in arrays.files}, strict=False)
assert not missing.unexpected_keys and all(n.startswith("pooler") for n in missing.missing_keys), missing
model.save_pretrained(folder + "/hf")
words = folder + "/vocab.txt"
if int(transformers.__version__.split(".")[0]) >= 5:  # these take the words themselves
    words = {word: i for i, word in enumerate(open(words, encoding="utf-8").read().split("\\n")[:-1])}
tokenizer = BertTokenizerFast(words, do_lower_case=True)
tokenizer.model_max_length = facts["config"]["max_position_embeddings"]
tokenizer.save_pretrained(folder + "/hf")
try:
    from sentence_transformers.models import Normalize, Pooling, Transformer
except ImportError:
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
parts = [Transformer(folder + "/hf"), Pooling(facts["config"]["hidden_size"], "mean"), Normalize()]
st = SentenceTransformer(modules=parts, device="cpu")
if facts["dtype"] == "bfloat16":
    st = st.bfloat16()
texts = json.load(open(folder + "/texts.json"))
numpy.save(folder + "/vectors.npy", st.encode(texts[:64]))
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    st.encode(texts, batch_size=int(line))
    print(time.perf_counter() - began, flush=True)
"""


LLAMA = """
import json, sys, time
import numpy
import llama_cpp
from llama_cpp import Llama

folder, threads, model = sys.argv[1], int(sys.argv[2]), sys.argv[3]
plain = llama_cpp.llama_cpp.llama_context_default_params
def several():
    params = plain()
    params.n_seq_max = 64  # texts of one batch
    return params
llama_cpp.llama_cpp.llama_context_default_params = several
texts = json.load(open(folder + "/texts.json"))
# Each token is compared with all of its batch, of whichever text: small ones are faster, until the products are too small.
best = None
for size in (128, 256, 512, 2048):
    llm = Llama(model, embedding=True, n_ctx=2048, n_batch=size, n_ubatch=size, n_threads=threads,
                n_threads_batch=threads, verbose=False)
    llm.embed(texts[:8])
    began = time.perf_counter()
    vectors = llm.embed(texts[:64], normalize=True)
    took = time.perf_counter() - began
    if best is None or took < best[0]:
        best = took, llm, vectors
llm = best[1]
numpy.save(folder + "/vectors.npy", numpy.array(best[2], numpy.float32))
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    llm.embed(texts, normalize=True)
    print(time.perf_counter() - began, flush=True)
"""


def cut(text: str, tokenizer: Tokenizer, count: int) -> list[str]:
    """Sentences of 16 to 128 tokens, as many of each length as chance has it."""
    words, rng, at, made = text.split(), np.random.default_rng(0), 0, []
    each = {word: len(tokenizer.encode(word)) - 2 for word in set(words)}  # without the two at the ends
    for length in rng.integers(16, 129, count):
        taken, left = [], int(length) - 2
        for word in words[at : at + int(length)]:
            left -= each[word]
            if left < 0:
                break
            taken.append(word)
        at = (at + len(taken)) % (len(words) - 200)
        made.append(" ".join(taken))
    return made


class Peer:
    """Another library in a process that waits for rounds: llama.cpp where `dtype` is "gguf", else sentence-transformers."""

    def __init__(self, python: str, model: Path, texts: list[str], threads: int, dtype: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        (folder / "texts.json").write_text(json.dumps(texts))
        if dtype == "gguf":
            command = [python, "-c", LLAMA, str(folder), str(threads), str(model)]
        else:
            _export(model, folder, dtype)
            command = [python, "-c", PEER, str(folder), str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        while (line := self._process.stdout.readline()).strip() != "ready":  # type: ignore[union-attr]
            if not line:
                raise SystemExit(f"the peer ended: are the packages that it needs installed for {python}?")
        self.vectors = np.load(folder / "vectors.npy")

    def seconds(self, batch: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{batch}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait()
        self._folder.cleanup()


def _export(model: Path, folder: Path, dtype: str) -> None:
    """The file's weights, dequantised, under the names that the peer knows."""
    with GGUFFile.open([model]) as file:
        meta = file.metadata
        layers = meta.int("bert.block_count")
        arrays = {
            "embeddings.word_embeddings.weight": file.array("token_embd.weight"),
            "embeddings.position_embeddings.weight": file.array("position_embd.weight"),
            "embeddings.token_type_embeddings.weight": file.array("token_types.weight"),
            "embeddings.LayerNorm.weight": file.array("token_embd_norm.weight"),
            "embeddings.LayerNorm.bias": file.array("token_embd_norm.bias"),
        }
        for il in range(layers):
            for ours, theirs in NAMES.items():
                for part in ("weight", "bias"):
                    arrays[f"encoder.layer.{il}.{theirs}.{part}"] = file.array(f"blk.{il}.{ours}.{part}")
        np.savez(folder / "weights.npz", **{n: np.ascontiguousarray(a, np.float32) for n, a in arrays.items()})
        config: dict[str, Any] = {
            "vocab_size": len(arrays["embeddings.word_embeddings.weight"]),
            "hidden_size": meta.int("bert.embedding_length"),
            "num_hidden_layers": layers,
            "num_attention_heads": meta.int("bert.attention.head_count"),
            "intermediate_size": meta.int("bert.feed_forward_length"),
            "max_position_embeddings": meta.int("bert.context_length"),
            "layer_norm_eps": meta.float("bert.attention.layer_norm_epsilon"),
        }
        pieces = [str(t) for t in meta.strs("tokenizer.ggml.tokens")]
    words = [p[1:] if p.startswith("▁") else p if p.startswith("[") and p.endswith("]") else f"##{p}" for p in pieces]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", "utf-8")
    (folder / "facts.json").write_text(json.dumps({"config": config, "dtype": dtype}))


def _floor(model: Path, tokens_s: float) -> dict[str, Any]:
    """The matrices' products a second, and a large product's, both in TFLOP/s."""
    import torch

    with GGUFFile.open([model]) as file:
        kept = [t for n, t in file.tensors.items() if n.startswith("blk.") and len(t.dims) > 1]
        work = 2 * sum(t.dims[0] * t.dims[1] for t in kept)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
    took = []
    for _ in range(8):
        torch.cuda.synchronize()
        began = time.perf_counter()
        a @ a
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    peak = 2 * 8192**3 / statistics.median(took)
    return {
        "tflop_s": round(tokens_s * work / 1e12, 1),
        "peak_tflop_s": round(peak / 1e12),
        "share": tokens_s * work / peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--sentences", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32, help="the peer's batch size")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--compute", action="append", help="by default auto and float32")
    parser.add_argument("--peer-python", help="a Python that has sentence-transformers")
    parser.add_argument("--llama-python", help="a Python that has llama-cpp-python")
    args = parser.parse_args()
    models = {
        c: quarrel.load(args.model, backend=args.backend, compute=c, threads=args.threads)
        for c in args.compute or ("auto", "float32")
    }
    first = next(iter(models.values()))
    texts = cut(args.texts.read_text("utf-8"), first.tokenizer, args.sentences)
    tokens = int(first.embed(texts).tokens.sum())
    peers = {}
    if args.peer_python:
        for dtype in ("float32", "bfloat16"):
            peers[f"sentence-transformers {dtype}"] = Peer(args.peer_python, args.model, texts, args.threads, dtype)
    if args.llama_python:
        peers["llama.cpp"] = Peer(args.llama_python, args.model, texts, args.threads, "gguf")
    taken: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for llm in models.values():
            began = time.perf_counter()
            llm.embed(texts)
            taken.setdefault(f"quarrel {llm.explain().compute}", []).append(time.perf_counter() - began)
        for name, peer in peers.items():
            taken.setdefault(name, []).append(peer.seconds(args.batch))
    rows = [
        {
            "who": name,
            "sentences_s": round(args.sentences / statistics.median(seconds), 1),
            "tokens_s": round(tokens / statistics.median(seconds)),
            "spread": [round(args.sentences / s, 1) for s in (max(seconds), min(seconds))],
        }
        for name, seconds in taken.items()
    ]
    nearness = {}
    for name, peer in peers.items():
        for llm in models.values():
            cosines = (llm.embed(texts[:64]).vectors * peer.vectors).sum(1)
            nearness[f"quarrel {llm.explain().compute} to {name}"] = round(float(cosines.min()), 6)
        peer.close()
    for row in rows:
        print(f"{row['who']:36} {row['sentences_s']:8.1f} sentences/s", file=sys.stderr)
    facts = {"device": first.explain().device, "sentences": args.sentences, "tokens": tokens, "rounds": args.rounds}
    if args.backend == "triton":
        facts |= _floor(args.model, rows[0]["tokens_s"])
    print(json.dumps(facts | {"model": args.model.name, "rows": rows, "smallest_cosine": nearness}))


if __name__ == "__main__":
    main()
