"""Perplexity and divergence as llama-perplexity defines them, and its files, read and written."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

import quarrel
from quarrel.errors import RequestError
from quarrel.perplexity import main
from quarrel.quality.base_file import BaseFile, BaseWriter, log_softmax, pack, unpack, width
from quarrel.quality.chunks import chunks, scored
from quarrel.quality.divergence import Score
from quarrel.quality.suite import PASSAGE

COMMON = ["-m", "demo", "--backend", "cpu", "--threads", "2", "-c", "64"]


def test_chunks_begin_with_bos_and_drop_the_rest() -> None:
    assert list(chunks(range(11), 5, None)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert list(chunks(range(11), 5, 99, 1)) == [[99, 1, 2, 3, 4]]
    assert (scored(512).start, scored(512).stop) == (256, 511)
    with pytest.raises(RequestError, match="the text has 3 tokens"):
        list(chunks(range(3), 5, None))


def test_the_16_bit_form_is_within_half_a_step_and_floored() -> None:
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((7, 301)) * 6).astype(np.float32)
    rows = pack(logits)
    assert rows.shape == (7, width(301)) == (7, 302 + 4)
    exact, read = log_softmax(logits), unpack(rows, 301)
    near = exact > exact.max(-1, keepdims=True) - 16
    step = rows[:, :2].copy().view(np.float32)
    assert np.abs(np.where(near, read - exact, 0)).max() <= 0.51 * step.max()
    assert not near.all()
    flat = pack(np.zeros((1, 5), np.float32))
    assert np.allclose(unpack(flat, 5), -np.log(5))


def test_perplexity_is_the_exponential_of_the_mean() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]))
    score = Score()
    score.add(logits, [0, 1])
    assert score.perplexity().value == pytest.approx((0.5 * 0.1) ** -0.5)
    assert score.divergence() is None


def test_divergence_of_known_distributions() -> None:
    p, q = np.array([[0.5, 0.5], [0.9, 0.1]]), np.array([[0.25, 0.75], [0.4, 0.6]])
    score = Score()
    score.add(np.log(q), [0, 0], np.log(p))
    d = score.divergence()
    assert d is not None
    assert d.kld.value == pytest.approx(float((p * np.log(p / q)).sum(-1).mean()))
    assert d.same_top.value == 0.0
    assert d.delta_p.value == pytest.approx(-0.375)
    assert d.delta_p_rms == pytest.approx(((0.25**2 + 0.5**2) / 2) ** 0.5)
    assert d.ratio.value == pytest.approx((0.5 * 0.9 / (0.25 * 0.4)) ** 0.5)


def test_a_file_is_laid_out_as_llama_perplexity_lays_it_out(tmp_path: Path) -> None:
    path, logits = tmp_path / "base.kld", np.arange(15, dtype=np.float32).reshape(3, 5)
    writer = BaseWriter(path, [[1, 2, 3, 4, 5, 6, 7, 8]], 5)
    assert not path.exists()
    writer.add(logits)
    writer.finish()
    raw = path.read_bytes()
    assert raw[:20] == b"_logits_" + struct.pack("<Iii", 8, 5, 1)
    assert raw[20:52] == np.arange(1, 9, dtype="<i4").tobytes()
    assert len(raw) == 52 + 3 * 2 * (6 + 4)
    step, low = struct.unpack("<2f", raw[52:60])
    assert step == pytest.approx(4 / 65535)
    assert low == pytest.approx(float(log_softmax(logits)[0, 0]))
    file = BaseFile(path)
    (rows,) = file.rows()
    assert np.allclose(rows, log_softmax(logits), atol=1e-4)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda raw: b"x" + raw[1:], "no file of reference logits"),
        (lambda raw: raw[:-1], "is damaged"),
        (lambda raw: raw[:12] + struct.pack("<i", -5) + raw[16:], "is damaged"),
        (lambda raw: raw[:8] + struct.pack("<I", 0) + raw[12:], "is damaged"),
        (lambda raw: raw[:10], "no file of reference logits"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, spoil: object, said: str) -> None:
    writer = BaseWriter(tmp_path / "base", [[1, 2, 3, 4, 5, 6, 7, 8]], 5)
    writer.add(np.zeros((3, 5), np.float32))
    writer.finish()
    bad = tmp_path / "bad"
    bad.write_bytes(spoil((tmp_path / "base").read_bytes()))  # type: ignore[operator]
    with pytest.raises(RequestError, match=said):
        BaseFile(bad)


def test_the_command_writes_a_reference_and_compares_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, base = tmp_path / "text", tmp_path / "base.kld"
    text.write_text(PASSAGE)
    exact = [*COMMON, "--compute", "float32", "--kl-divergence-base", str(base)]
    assert main([*exact, "-f", str(text), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["perplexity"]["value"] == pytest.approx(_by_hand(), rel=1e-4)
    assert main([*exact, "--kl-divergence", "--json"]) == 0
    same = json.loads(capsys.readouterr().out)
    assert same["perplexity"] == first["perplexity"]
    assert abs(same["divergence"]["kld"]["value"]) < 1e-4
    assert same["divergence"]["same_top"]["value"] == 1.0
    assert main([*COMMON, "--kl-divergence-base", str(base), "--kl-divergence"]) == 0
    assert "same likeliest token" in capsys.readouterr().out


def _by_hand() -> float:
    with quarrel.load("demo", backend="cpu", compute="float32", n_ctx=64) as llm:
        ids = llm.tokenize(PASSAGE.removesuffix("\n"))
        nll = []
        for i in range(len(ids) // 64):
            piece = ids[64 * i : 64 * i + 64]
            if llm.tokenizer.add_bos:
                piece[0] = llm.tokenizer.bos_id
            p = np.exp(log_softmax(llm.logits(piece)))
            nll += [-np.log(p[t, piece[t + 1]]) for t in range(32, 63)]
    return float(np.exp(np.mean(nll)))


def test_errors_are_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(COMMON) == 1
    assert "no text" in capsys.readouterr().err
    assert main([*COMMON, "--kl-divergence"]) == 1
    assert "--kl-divergence-base" in capsys.readouterr().err
    assert main([*COMMON, "-f", str(tmp_path / "none")]) == 1
    assert "cannot be read" in capsys.readouterr().err
    writer = BaseWriter(tmp_path / "base", [list(range(8))], 5)
    writer.add(np.zeros((3, 5), np.float32))
    writer.finish()
    assert main([*COMMON, "--kl-divergence-base", str(tmp_path / "base"), "--kl-divergence"]) == 1
    assert "vocabulary of 5 tokens" in capsys.readouterr().err


def test_what_cannot_be_read_or_written_is_told_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bytes").write_bytes(b"a\xff")
    for line, said in (
        (["-f", "none.txt"], "none.txt cannot be read: No such file"),
        (["-f", str(tmp_path / "bytes")], "is no UTF-8 text (invalid start byte at byte 1)"),
        (["-f", "none.txt", "-c", "0"], "--ctx-size is 0, wanted 4 or more"),
        (["-f", "none.txt", "--kl-divergence-base", "nowhere/b.kld"], "there is no folder nowhere"),
    ):
        assert main(line) == 1
        (sentence,) = capsys.readouterr().err.splitlines()
        assert said in sentence


def test_ctrl_c_ends_it_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quarrel.perplexity.load_with", load)
    assert main(["-f", __file__]) == 130
