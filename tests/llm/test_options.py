"""Options of `load`: each is one field, which reaches the signature, the command line and the model's process."""

from __future__ import annotations

import argparse
import inspect
import json
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest

import quarrel
from quarrel.cli import flags
from quarrel.env import Environment
from quarrel.errors import RequestError
from quarrel.llm import LoadOptions, options
from quarrel.llm.options import SCALINGS, Whole
from quarrel.models import SCALINGS as MODEL_SCALINGS

VALUES: dict[str, Any] = {
    "backend": "cpu", "compute": "float32", "n_ctx": 96, "max_seqs": 2, "memory": 0.5, "kv_cache": "int8",
    "prefix_cache": False, "prefix_cache_bytes": 1 << 20, "max_waiting": 7, "attention": "own", "deterministic": True,
    "decoded_weights": "never", "threads": 3, "tensor_parallel": 2, "pipeline_parallel": 2,
    "gpu_layers": "auto", "experts_on_cpu": 0, "expert_memory": 1 << 30,
    "rope_scaling": "yarn", "rope_scale": 2.0, "yarn_orig_ctx": 64, "draft": "small.gguf",
    "adapters": {"one": "one.gguf"}, "profile_steps": 4, "beside_tokens": 64, "quantize": "q8_0",
    "mmproj": "mmproj.gguf", "allow_image_urls": True, "hosts": "ray://head:10001", "prefill": "grpc://h:1",
}  # fmt: skip
"""A value of each that is not the default; all but `progress`, which stays in its process."""
NO_FLAG = {"max_seqs", "prefix_cache", "max_waiting", "draft", "adapters", "profile_steps", "progress"}
"""Options without a flag among those for loading: some have one that a command declares itself."""


def test_every_option_reaches_load_the_command_line_and_the_process() -> None:
    names = {option.name for option in fields(LoadOptions)}
    assert set(VALUES) == names - {"progress"}
    assert list(inspect.signature(quarrel.load).parameters) == ["name", *(option.name for option in fields(LoadOptions))]
    assert all(f"\n{name}: " in inspect.cleandoc(quarrel.load.__doc__ or "") for name in names)
    parser = argparse.ArgumentParser()
    flags.add_load_flags(parser)
    assert set(vars(parser.parse_args([]))) == names - NO_FLAG
    wired = json.loads(json.dumps(LoadOptions(**VALUES).wire()))
    assert wired == VALUES
    assert LoadOptions(**wired) == LoadOptions(**VALUES)
    assert LoadOptions().wire() == {}
    assert LoadOptions(draft=Path("a"), adapters={"b": Path("c")}).wire() == {"draft": "a", "adapters": {"b": "c"}}


def test_a_new_option_is_one_field(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True, kw_only=True)
    class More(LoadOptions):
        eagerness: int = field(default=1, metadata={"kind": Whole(0, 9), "doc": "how eager", "help": "how eager, 0 to 9"})

    monkeypatch.setattr(flags, "LoadOptions", More)
    monkeypatch.setattr(options, "LoadOptions", More)
    parser = argparse.ArgumentParser()
    flags.add_load_flags(parser)
    given = flags.load_options(parser.parse_args(["--eagerness", "3"]))
    assert given == More(eagerness=3)
    assert More(**given.wire()) == given
    assert "    eagerness: how eager" in options.described()
    with pytest.raises(RequestError, match="eagerness is 10, wanted a whole number from 0 to 9") as raised:
        More(eagerness=10)
    assert flags.in_flags(raised.value, ["--eagerness"]) == "--eagerness is 10, wanted a whole number from 0 to 9"


WRONG: dict[str, tuple[Any, ...]] = {
    "compute": ("int4", None, 3),
    "n_ctx": (0, True, "9", 1 << 31),
    "max_seqs": (0, 257, None),
    "memory": (0, 1.5, -1, "1GB", True),
    "kv_cache": ("int4",),
    "prefix_cache": (1, None),
    "prefix_cache_bytes": (-1, 0.5, True),
    "max_waiting": (0, None),
    "attention": ("flash",),
    "decoded_weights": ("always", None, True),
    "deterministic": ("yes",),
    "threads": (0, 1025),
    "tensor_parallel": (0, 17),
    "pipeline_parallel": (0, 17, True),
    "gpu_layers": (-1, True, 1.0, "all"),
    "hosts": ("", 5, "auto"),
    "prefill": ("", 5),
    "experts_on_cpu": (-1, True),
    "expert_memory": (0, -1, 0.5, True, "1GiB"),
    "rope_scaling": ("ntk",),
    "rope_scale": (0.5, float("nan"), "2"),
    "yarn_orig_ctx": (0, 1.5),
    "draft": (5,),
    "adapters": (5, ["a"], {"a:b": "file"}, {"": "file"}, {f"a{i}": "file" for i in range(65)}),
    "profile_steps": (-1, 0.5, True),
    "beside_tokens": (0, 0.5, True),
    "progress": (5,),
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in WRONG.items() for v in values], ids=repr)
def test_a_value_out_of_range_is_an_error_that_names_its_field(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as raised:
        LoadOptions(**{name: value})
    assert raised.value.field == name
    assert "wanted" in str(raised.value)


def test_the_environment_says_what_a_caller_leaves_open() -> None:
    environment = Environment(
        backend="cpu", compute="float32", threads=6, memory=0.5, kv_cache="int8", attention="own", tensor_parallel=2
    )
    made = LoadOptions(compute="float16").resolved(environment)
    assert (made.backend, made.compute, made.memory, made.kv_cache, made.attention) == (
        "cpu",
        "float16",
        0.5,
        "int8",
        "own",
    )
    assert (made.tensor_parallel, made.threads) == (None, 3)  # two processes share the threads
    assert LoadOptions(tensor_parallel=1, threads=5).resolved(environment).threads == 5
    assert LoadOptions(tensor_parallel=2).resolved(Environment()).threads == max(1, (os.cpu_count() or 1) // 2)
    assert LoadOptions().devices(environment) == 2
    assert LoadOptions().resolved(Environment()) == LoadOptions()


def test_what_cannot_travel_is_refused() -> None:
    for given in ({"progress": print}, {"backend": object()}):
        with pytest.raises(RequestError, match="in another process"):
            LoadOptions(**given).wire()


def test_the_words_are_those_of_the_rooms_that_read_them() -> None:
    assert SCALINGS == MODEL_SCALINGS
