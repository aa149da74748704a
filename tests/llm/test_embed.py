"""Embeddings: the reference's vectors, pooling, prefixes, truncation, chunks, order, and every refusal."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quarrel
from quarrel.errors import ContextOverflow, ModelError, OutOfMemory, QuarrelError, QueueFull, RequestError, UnsupportedModel
from quarrel.gguf import GGUFFile, GGUFWriter
from quarrel.llm import LLM, Chunking
from quarrel.llm.pooling import STEPS_AHEAD
from tests.paths import need_cases
from tests.tiny_model import write_tiny_model

MINILM = ("minilm", "all-MiniLM-L6-v2-q8_0.gguf")


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


@pytest.fixture(scope="module")
def minilm() -> Iterator[LLM]:
    with quarrel.load(need_cases(*MINILM), backend="cpu", compute="float32") as llm:
        yield llm


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    read: list[str] = json.loads(need_cases("minilm", "meta.json").read_text())["sentences"]
    return read


@pytest.fixture(scope="module")
def nomic() -> Iterator[LLM]:
    with quarrel.load(need_cases("nomic_bert", "model-q4_0x.gguf"), backend="cpu", compute="float32") as llm:
        yield llm


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_tiny_model(tmp_path_factory.mktemp("m") / "tiny.gguf")
    with quarrel.load(path, backend="cpu", compute="float32", max_seqs=2) as llm:
        yield llm


def test_minilm_gives_the_vectors_of_sentence_transformers(minilm: LLM, sentences: list[str]) -> None:
    assert [minilm.tokenize(s) for s in sentences] == json.loads(need_cases("minilm", "meta.json").read_text())["ids"]
    made = minilm.embed(sentences)
    assert (made.pooling, made.normalized, made.dimensions, made.full) == ("mean", True, 384, 384)
    assert (made.vectors.dtype, made.vectors.shape) == (np.float32, (len(sentences), minilm.embedding_dim))
    assert made.texts.tolist() == list(range(len(sentences)))
    assert made.tokens.tolist() == [len(minilm.tokenize(s)) for s in sentences]
    # The file's Q8_0 weights are what separates them: llama.cpp's own float32 run of the original differs by 1e-6.
    assert cosines(made.vectors, np.load(need_cases("minilm", "embeddings_hf.npy"))).min() > 0.999


def test_rounded_activations_stay_near_those_of_llama_cpp(sentences: list[str]) -> None:
    with quarrel.load(need_cases(*MINILM), backend="cpu", compute="auto") as llm:
        got = llm.embed(sentences).vectors
    assert cosines(got, np.load(need_cases("minilm", "embeddings_llamacpp_q8_0.npy"))).min() > 0.999
    # llama.cpp's own Q8_0 run lies at 0.99843.
    assert cosines(got, np.load(need_cases("minilm", "embeddings_hf.npy"))).min() > 0.998


def test_every_text_gets_what_it_gets_alone_whatever_the_order(minilm: LLM, sentences: list[str]) -> None:
    together = minilm.embed(sentences * 30).vectors  # more than are queued at a time
    alone = np.concatenate([minilm.embed(s).vectors for s in sentences])
    assert np.array_equal(together, np.tile(alone, (30, 1)))


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_pooling_is_of_the_token_embeddings(minilm: LLM, pooling: Any) -> None:
    rows = minilm.token_embeddings("A fast auburn fox")
    assert rows.shape == (len(minilm.tokenize("A fast auburn fox")), 384)
    wanted = {"mean": rows.mean(0), "cls": rows[0], "last": rows[-1]}[pooling]
    made = minilm.embed("A fast auburn fox", pooling=pooling, normalize=False)
    assert (made.pooling, made.normalized) == (pooling, False)
    assert np.allclose(made.vectors[0], wanted, atol=1e-6)


def test_dimensions_cut_and_normalise_again(minilm: LLM, nomic: LLM) -> None:
    whole = minilm.embed("short", normalize=False).vectors[0]
    cut = minilm.embed("short", dimensions=100)
    assert (cut.dimensions, cut.full) == (100, 384)
    assert np.allclose(cut.vectors[0], whole[:100] / np.linalg.norm(whole[:100]), atol=1e-6)
    whole = nomic.embed("a b c", normalize=False).vectors[0]
    centred = (whole - whole.mean()) / np.sqrt(whole.var() + 1e-5)
    cut = nomic.embed("a b c", dimensions=16)
    assert np.allclose(cut.vectors[0], centred[:16] / np.linalg.norm(centred[:16]), atol=1e-5)


def test_tasks_are_prefixes_where_the_model_knows_them(minilm: LLM, nomic: LLM) -> None:
    made = nomic.embed("a b", prefix="search_query")
    assert made.prefix == "search_query: "
    assert np.array_equal(made.vectors, nomic.embed("search_query: a b").vectors)
    assert np.array_equal(minilm.embed("y", prefix="x ").vectors, minilm.embed("x y").vectors)
    assert minilm.embed("y", prefix="search_query").prefix == "search_query"


def test_ids_are_taken_as_they_are(minilm: LLM) -> None:
    ids = minilm.tokenize("a dog")
    assert np.array_equal(minilm.embed(ids).vectors, minilm.embed("a dog").vectors)
    assert np.array_equal(minilm.embed([ids, "a dog"]).vectors, minilm.embed(["a dog"] * 2).vectors)
    assert len(minilm.embed([])) == 0
    assert minilm.embed([]).vectors.shape == (0, 384)


def test_a_long_text_is_an_error_or_chunks_and_never_cut(minilm: LLM) -> None:
    long = "word " * 700
    with pytest.raises(ContextOverflow, match=r"text 1 is too large: 702 tokens, and the context holds 512: .*chunk=512"):
        minilm.embed(["fits", long])
    made = minilm.embed(["fits", long], chunk=Chunking(102, 20))
    # 100 words a piece beside the special tokens, 80 of them new.
    assert made.texts.tolist() == [0] + [1] * 9
    assert made.tokens.tolist() == [3, *[102] * 8, 62]
    assert made.total_tokens == 3 + 8 * 102 + 62
    words = minilm.tokenize(long)[1:-1]
    piece = [minilm.tokenizer.bos_id, *words[80:180], minilm.tokenize("")[-1]]
    assert np.array_equal(made.vectors[2], minilm.embed(piece).vectors[0])


@pytest.mark.parametrize("length", [1, 98, 100, 101, 179, 180, 181, 260, 340])
def test_chunks_cover_each_token_and_hold_nothing_that_the_one_before_has(minilm: LLM, length: int) -> None:
    made = minilm.embed("word " * length, chunk=Chunking(102, 20))
    inner = made.tokens - 2
    assert inner.sum() - 20 * (len(inner) - 1) == length
    assert (inner[1:] > 20).all()


def test_a_decoder_is_read_at_its_last_token_unless_told_otherwise(decoder: LLM) -> None:
    rows = decoder.token_embeddings("abc def")
    made = decoder.embed("abc def", normalize=False)
    assert made.pooling == "last"
    assert np.allclose(made.vectors[0], rows[-1], atol=1e-6)
    long = "abc " * 100
    mean = decoder.embed(long, pooling="mean", normalize=False).vectors[0]
    assert np.allclose(mean, decoder.token_embeddings(long).mean(0), atol=1e-5)


def with_keys(source: Path, to: Path, keys: dict[str, object], tensors: dict[str, np.ndarray]) -> Path:
    """The same model, but for some keys and further tensors."""
    writer = GGUFWriter()
    with GGUFFile.open([source]) as file:
        for key, value in ({k: file.metadata[k] for k in file.metadata} | keys).items():
            writer.add(key, value)
        for name in file.tensors:
            writer.add_tensor(name, np.array(file.array(name), np.float32))
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write(to)
    return to


@pytest.fixture(scope="module")
def heads() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return {"size": draw(1)} | {"dense": draw(4096, 4096), "bias": draw(4096), "out": draw(1, 4096), "out_bias": draw(1)}


def test_a_reranker_gives_scores_of_its_head(tmp_path: Path, heads: dict[str, np.ndarray]) -> None:
    source = need_cases("bert", "model-q4_0x.gguf")
    with quarrel.load(source, backend="cpu", compute="float32") as plain:
        n, row = plain.spec.n_embd, plain.embed("a b", pooling="cls", normalize=False).vectors[0]
        with pytest.raises(UnsupportedModel, match="no reranker"):
            plain.embed("a b", pooling="rank")
    tensors = {
        "cls.weight": heads["dense"][:n, :n].copy(),
        "cls.bias": heads["bias"][:n],
        "cls.output.weight": heads["out"][:, :n].copy(),
        "cls.output.bias": heads["out_bias"],
    }
    path = with_keys(source, tmp_path / "rank.gguf", {"bert.pooling_type": 4}, tensors)
    with quarrel.load(path, backend="cpu", compute="float32") as llm:
        made = llm.embed(["a b", "c"])
        assert (made.pooling, made.normalized, llm.embedding_dim, made.vectors.shape) == ("rank", False, 1, (2, 1))
        inner = np.tanh(tensors["cls.weight"] @ row + tensors["cls.bias"])
        assert np.allclose(made.vectors[0], tensors["cls.output.weight"] @ inner + heads["out_bias"], rtol=1e-4, atol=1e-4)
    for bad, said in (({}, "neither cls.weight nor"), ({"cls.weight": heads["dense"][:3, :3].copy()}, "wanted rows of")):
        with pytest.raises(ModelError, match=said):
            quarrel.load(with_keys(source, tmp_path / "bad.gguf", {"bert.pooling_type": 4}, bad), backend="cpu")


def test_bge_m3_s_reranker_reads_the_first_token(tmp_path: Path, heads: dict[str, np.ndarray]) -> None:
    """score = out(tanh(dense h + b)) + b, of the hidden state that transformers has there."""
    folder = need_cases("xlm_roberta")
    ids, row = np.load(folder / "tokens.npy").reshape(-1), np.load(folder / "hidden_hf.npy")[0]
    n = len(row)
    names = {"cls.weight": "dense", "cls.bias": "bias", "cls.output.weight": "out", "cls.output.bias": "out_bias"}
    head = heads | {"dense": heads["dense"][:n, :n] / 14, "bias": heads["bias"][:n], "out": heads["out"][:, :n]}
    tensors = {name: np.ascontiguousarray(head[of]) for name, of in names.items()}
    path = with_keys(folder / "model-q4_0x.gguf", tmp_path / "bge.gguf", {"bert.pooling_type": 4}, tensors)
    with quarrel.load(path, backend="cpu", compute="float32") as llm:
        inner = np.tanh(head["dense"] @ row + head["bias"])
        made = llm.embed([ids.tolist()])
        assert (made.pooling, made.vectors.shape) == ("rank", (1, 1))
        assert made.vectors[0] == pytest.approx(head["out"] @ inner + head["out_bias"], rel=1e-3, abs=1e-3)
        pair = llm.tokenizer.encode_pair("a b", "c")
        q, d = llm.tokenizer.encode("a b"), llm.tokenizer.encode("c")
        assert pair == [*q, llm.tokenizer.eos_id, *d[1:]]  # <s> q </s></s> d </s>


RERANK = "<|im_start|>system\nJudge.<|im_end|>\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"


def test_qwen3_s_reranker_says_how_likely_yes_is(tmp_path: Path, heads: dict[str, np.ndarray]) -> None:
    source = need_cases("qwen3", "model-q4_0x.gguf")
    with quarrel.load(source, backend="cpu", compute="float32") as plain:
        n, tokenizer = plain.spec.n_embd, plain.tokenizer
        row = plain.token_embeddings("which of them")[-1]
    out = np.ascontiguousarray(heads["dense"][:2, :n] / 16)
    keys: dict[str, object] = {"qwen3.pooling_type": 4, "tokenizer.chat_template.rerank": RERANK}
    path = with_keys(source, tmp_path / "r.gguf", keys, {"cls.output.weight": out})
    with quarrel.load(path, backend="cpu", compute="float32") as llm:
        logits = out @ row
        made = llm.embed("which of them")
        assert (made.pooling, made.normalized, made.vectors.shape) == ("rank", False, (1, 2))
        assert made.vectors[0] == pytest.approx(np.exp(logits) / np.exp(logits).sum(), rel=1e-4)
        written = RERANK.replace("{query}", "a {document}").replace("{document}<", "b c<")
        ids = llm.tokenizer.encode_pair("a {document}", "b c")
        assert ids == tokenizer.encode(written, add_special=False, parse_special=True)
        # No text names a control token.
        hostile = llm.tokenizer.encode_pair("a", "b<|im_end|>")
        end = tokenizer.token_id("<|im_end|>")
        assert hostile.count(end) == llm.tokenizer.encode_pair("a", "b").count(end)


def test_qwen3_s_embedding_is_its_hidden_state_at_the_eos_that_is_added(tmp_path: Path) -> None:
    source = need_cases("qwen3", "model-q4_0x.gguf")
    keys: dict[str, object] = {"qwen3.pooling_type": 3, "tokenizer.ggml.add_eos_token": True}
    with (
        quarrel.load(source, backend="cpu", compute="float32") as plain,
        quarrel.load(with_keys(source, tmp_path / "e.gguf", keys, {}), backend="cpu", compute="float32") as llm,
    ):
        ids = [*plain.tokenize("some words"), plain.tokenizer.eos_id]
        row = plain.token_embeddings(ids)[-1]
        made = llm.embed("some words")
        assert (made.pooling, made.tokens.tolist()) == ("last", [len(ids)])
        assert made.vectors[0] == pytest.approx(row / np.linalg.norm(row), abs=1e-5)


def test_a_reranker_of_modernbert_reads_the_mean(tmp_path: Path, heads: dict[str, np.ndarray]) -> None:
    folder = need_cases("modern_bert")
    ids, row = np.load(folder / "tokens.npy").reshape(-1), np.load(folder / "hidden_hf.npy").mean(0)
    n = len(row)
    gain = 1 + heads["bias"][:n] / 8
    dense, out = np.ascontiguousarray(heads["dense"][:n, :n] / 14), np.ascontiguousarray(heads["out"][:, :n])
    tensors = {"cls.weight": dense, "cls.norm.weight": gain, "cls.output.weight": out}
    source = folder / "model-q4_0x.gguf"
    path = with_keys(source, tmp_path / "m.gguf", {"modern-bert.pooling_type": 4}, tensors)
    with quarrel.load(path, backend="cpu", compute="float32") as llm:
        x = dense @ row
        x = x * 0.5 * (1 + np.array([math.erf(v / math.sqrt(2)) for v in x]))
        inner = (x - x.mean()) / np.sqrt(x.var() + llm.spec.norm_eps) * gain
        assert llm.embed([ids.tolist()]).vectors[0] == pytest.approx(out @ inner, rel=1e-3, abs=1e-3)
        first, second = llm.tokenizer.encode("a b"), llm.tokenizer.encode("c")
        assert llm.tokenizer.encode_pair("a b", "c") == [*first, *second[1:]]
    bad = with_keys(source, tmp_path / "b.gguf", {"modern-bert.pooling_type": 4}, tensors | {"cls.norm.weight": gain[:3]})
    with pytest.raises(ModelError, match=r"cls.norm.weight is \[3\], wanted"):
        quarrel.load(bad, backend="cpu")


def test_a_model_that_pools_nothing_asks_for_a_pooling(tmp_path: Path) -> None:
    path = with_keys(need_cases("bert", "model-q4_0x.gguf"), tmp_path / "none.gguf", {"bert.pooling_type": 0}, {})
    with quarrel.load(path, backend="cpu") as llm:
        with pytest.raises(UnsupportedModel, match="choose one of pooling='mean'"):
            llm.embed("a")
        assert llm.embed("a", pooling="mean").pooling == "mean"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pooling": "max"}, "pooling is 'max', wanted one of mean, cls, last, rank"),
        ({"dimensions": 0}, "dimensions is 0, wanted a whole number from 1 to 384"),
        ({"dimensions": 385}, "from 1 to 384"),
        ({"dimensions": True}, "from 1 to 384"),
        ({"dimensions": 1.5}, "from 1 to 384"),
        ({"prefix": 3}, "prefix is a int, wanted a text"),
        ({"chunk": 0}, "chunks are 0 tokens long, wanted 1 to 512"),
        ({"chunk": 513}, "chunks are 513 tokens long"),
        ({"chunk": -1}, "size is -1"),
        ({"chunk": "8"}, "size is '8'"),
        ({"chunk": Chunking(4, 2)}, "leave no room beside 2 special ones and an overlap of 2"),
    ],
)
def test_options_out_of_range_are_refused(minilm: LLM, options: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        minilm.embed("the quick brown fox jumps", **options)


@pytest.mark.parametrize(
    "bad", [None, 5, b"x", {"a": 1}, [None], [b"x"], [["a"]], [[-1]], [[10**9]], [1.5], ["\ud800"], iter("ab")]
)
def test_what_are_no_texts_is_refused(minilm: LLM, bad: Any) -> None:
    with pytest.raises(RequestError):
        minilm.embed(bad)


def test_ids_take_no_prefix(minilm: LLM) -> None:
    with pytest.raises(RequestError, match="token ids, which take no prefix"):
        minilm.embed([[101, 102]], prefix="x")


def test_progress_counts_to_the_end(minilm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[int, int]] = []
    minilm.embed(["a", "b", "c"], progress=lambda done, total: seen.append((done, total)))
    assert seen == [(3, 3)]  # one step
    seen.clear()
    minilm.embed(["word " * 300] * 4, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    seen.clear()
    minilm.embed(["word " * 300] * 12, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i, 12) for i in range(1, 13)], "more than are queued at a time"
    minilm.embed(["a", "b", "c"], progress=True)
    assert "3/3" in capsys.readouterr().err


def test_a_failing_callback_cancels_the_rest(minilm: LLM) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        minilm.embed(["some words here"] * 600, progress=stop)
    assert len(minilm.embed("again")) == 1


@pytest.mark.parametrize("kind", ["minilm", "decoder"])
def test_texts_that_are_not_taken_are_not_counted_as_ended(kind: str, request: pytest.FixtureRequest) -> None:
    llm: LLM = request.getfixturevalue(kind)
    loop = llm._loop
    size, loop.places.size = loop.places.size, 0
    try:
        with pytest.raises(QueueFull):
            llm.embed(["a", "b"])
    finally:
        loop.places.size = size
    assert len(llm.embed(["a", "b"])) == 2
    assert loop.run(lambda: loop.places.used) == 0


@pytest.mark.parametrize("kind", ["minilm", "decoder"])
def test_a_list_may_be_longer_than_the_queue(kind: str, request: pytest.FixtureRequest) -> None:
    """It is fed in as there is room, as prompts are."""
    llm: LLM = request.getfixturevalue(kind)
    texts = [f"text {i} " + "word " * (300 if kind == "minilm" else i % 7) for i in range(20)]
    wanted = llm.embed(texts).vectors
    loop = llm._loop
    size, loop.places.size = loop.places.size, 3
    try:
        assert np.array_equal(llm.embed(texts).vectors, wanted)
    finally:
        loop.places.size = size


def test_the_async_twin_gives_the_same_and_stops_when_cancelled(minilm: LLM) -> None:
    async def both() -> tuple[np.ndarray, np.ndarray]:
        made = await asyncio.gather(minilm.aembed(["one", "two"]), minilm.aembed("three"))
        return made[0].vectors, made[1].vectors

    first, second = asyncio.run(both())
    assert np.array_equal(np.concatenate([first, second]), minilm.embed(["one", "two", "three"]).vectors)

    async def cancelled() -> None:
        task = asyncio.create_task(minilm.aembed(["many words in a row"] * 3000))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert minilm.activity().waiting <= STEPS_AHEAD


def test_steps_that_find_too_little_memory_are_made_smaller(
    minilm: LLM, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = minilm._loop.engine
    assert engine is not None
    launch, sizes = engine.step.launch, []

    def short(inputs: Any, want: Any) -> Any:
        sizes.append(len(inputs.ids))
        if len(inputs.ids) > 200:
            raise MemoryError("no room")
        return launch(inputs, want)

    texts = sentences * 10
    wanted = minilm.embed(texts).vectors
    monkeypatch.setattr(engine.step, "launch", short)
    assert np.array_equal(minilm.embed(texts).vectors, wanted)
    assert sum(size > 200 for size in sizes) < len(sizes) // 2
    with pytest.raises(OutOfMemory):
        minilm.embed("word " * 400)


def test_threads_may_embed_at_once(minilm: LLM, sentences: list[str]) -> None:
    got: dict[int, np.ndarray] = {}
    threads = [threading.Thread(target=lambda i=i: got.__setitem__(i, minilm.embed(sentences).vectors)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(got[i], got[0]) for i in range(4))


def test_a_row_that_is_not_finite_is_an_error(minilm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from quarrel.llm import pooling

    lost = lambda self, start, rows: setattr(self, "out", np.full_like(rows, np.nan))  # noqa: E731
    monkeypatch.setattr(pooling._Parcel, "rows", lost)
    with pytest.raises(QuarrelError, match="row 0 is not finite"):
        minilm.embed("x")


def test_a_closed_model_says_so(tmp_path: Path) -> None:
    path = shutil.copy(need_cases("bert", "model-q4_0x.gguf"), tmp_path / "b.gguf")
    llm = quarrel.load(path, backend="cpu")
    llm.close()
    with pytest.raises(QuarrelError, match="closed"):
        llm.embed("a")
