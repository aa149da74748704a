"""From a model's name to an `LLM`: finds the file, picks a backend, plans memory, compiles."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from quarrel.engine import Loop
from quarrel.engine.draft import Drafter
from quarrel.engine.loop import MAX_WAITING
from quarrel.env import ATTENTION, COMPUTE, MAX_DEVICES, MAX_THREADS, Environment, read_environment
from quarrel.errors import BackendUnavailable, RequestError
from quarrel.gguf import GGUFFile, resolve
from quarrel.gguf.resolve import Resolved
from quarrel.llm.adapters import check_names, read_adapters
from quarrel.llm.caching import cache_rules, with_snapshots
from quarrel.llm.defaults import defaults_of
from quarrel.llm.draft import DraftModel, open_draft
from quarrel.llm.explain import DraftFacts, Explanation
from quarrel.llm.model import LLM, Loaded
from quarrel.llm.parallel import Parallel, threads_of
from quarrel.llm.placement import left_to_host, placed
from quarrel.llm.plan import DEFAULT_CONTEXT, Device, cache_tokens, context_of, plan_encoder, plan_limits
from quarrel.models import EncoderSpec, ModelSpec, RopeScaling, Tensors, assemble, read_spec
from quarrel.models.scaling import Scaling
from quarrel.ops.check import CheckedStep
from quarrel.ops.host import HostExperts, computing_parts
from quarrel.ops.kv import KV_TYPES, KVType
from quarrel.ops.registry import backend as backend_named
from quarrel.ops.registry import missing_driver
from quarrel.ops.step import AttentionChoice, Backend, ComputeChoice, Step, WeightSource
from quarrel.ops.windows import as_planned, worth
from quarrel.tokenizer import Tokenizer
from quarrel.tokenizer import load_tokenizer as read_tokenizer

AUTO = ("triton", "mlx", "cpu")
"""In which order `auto` asks."""
MAX_SEQS = 256

Progress = Callable[[int, int], None]
log = logging.getLogger("quarrel")


def load(
    name: str | os.PathLike[str],
    *,
    backend: str | Backend = "auto",
    compute: ComputeChoice = "auto",
    n_ctx: int | None = None,
    max_seqs: int = 8,
    memory: int | float | None = None,
    threads: int | None = None,
    prefix_cache: bool = True,
    prefix_cache_bytes: int | None = None,
    max_waiting: int = MAX_WAITING,
    kv_cache: KVType = "auto",
    attention: AttentionChoice = "auto",
    deterministic: bool = False,
    draft: str | os.PathLike[str] | None = None,
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    rope_scaling: Scaling | None = None,
    rope_scale: float | None = None,
    yarn_orig_ctx: int | None = None,
    tensor_parallel: int | None = None,
    experts_on_cpu: int | None = None,
    progress: Progress | None = None,
) -> LLM:
    """Loads a model.

    name: a GGUF file (any shard of a split one), a name in an Ollama store or the Hugging Face cache, `hf://owner/repo`,
    or `demo`. backend: "triton" (CUDA), "mlx" (Metal), "cpu", or "auto", which is `QUARREL_BACKEND` or the first of these
    that can run here; one asked for by name is taken or raises BackendUnavailable. compute: the arithmetic of
    activations; "float32" is exact, and "fp8" is float16 with coarse products (E4M3) for long prompts on CUDA. n_ctx:
    tokens of prompt and continuation together; by default the model's own, at most 8192, and less (with a warning) where
    memory ends. max_seqs: sequences that run at once. memory: bytes that all
    of it may take, or a share of what is free as a float up to 1.0; by default `QUARREL_MEMORY`, or what is free. threads:
    of the CPU backend, by default `QUARREL_THREADS` or one for each core. prefix_cache: keep what finished sequences
    computed, to continue from; prefix_cache_bytes: so much of it at most, where nobody is using it, or as much as there is
    room for. max_waiting: requests that may wait beyond those that run; a further one raises QueueFull.
    kv_cache: what is kept of keys and values: "float16", "bfloat16", or "int8" or "fp8", half as large; by default
    `QUARREL_KV_CACHE`, or what the backend computes in (float16 on a CPU, but for float32 arithmetic).
    attention: who attends to long prompts on CUDA: "own" kernels or "cudnn", where that applies; by default
    `QUARREL_ATTENTION`, or "own".
    deterministic: a request's tokens have the same bits whatever runs beside it and however its prompt is cut, which costs
    speed on a GPU; the CPU backend never does otherwise.
    draft: a smaller model of the same vocabulary, which guesses ahead (`Service.draft`); the text stays the same.
    adapters: LoRA adapters by name, GGUF files as llama.cpp writes them; a request takes one by `adapter=`, or none.
    rope_scaling, rope_scale, yarn_orig_ctx: a context of `rope_scale` times what the model was trained on, "linear" or by
    "yarn", which wants to know how long that was if the file does not say it; "none" leaves the file's own scaling out.
    Without rope_scale it is as much as n_ctx needs.
    tensor_parallel: devices that share the model, a process each: GPUs of this machine (or processes on the CPU, for trying
    it out); by default `QUARREL_TENSOR_PARALLEL`, or 1. Needs PyTorch.
    experts_on_cpu: of how many layers, from the first, the experts stay in host memory and are computed there, beside a
    GPU; by default of as few as make the rest fit.
    progress: called with work done and work in all while weights are packed, on another thread.

    Raises ModelNotFound, GGUFError, UnsupportedModel, TokenizerError, BackendUnavailable, UnsupportedOp, OutOfMemory.
    """
    began = time.perf_counter()
    environment = read_environment()
    _set_log(environment)
    ranks = environment.tensor_parallel if tensor_parallel is None else tensor_parallel
    _check_arguments(compute, n_ctx, max_seqs, threads, max_waiting, ranks)
    _check_memory(memory)
    _check_kept(prefix_cache_bytes)
    kv: KVType = environment.kv_cache if kv_cache == "auto" else kv_cache  # type: ignore[assignment]
    if kv not in KV_TYPES:
        raise RequestError(f"kv_cache is {kv!r}, wanted one of {', '.join(KV_TYPES)}")
    if attention not in ATTENTION:
        raise RequestError(f"attention is {attention!r}, wanted one of {', '.join(ATTENTION)}")
    attends: AttentionChoice = environment.attention if attention == "auto" else attention  # type: ignore[assignment]
    found = _find(name, environment)
    threads = threads_of(ranks, threads or environment.threads)
    chosen, skipped = _choose(backend, environment, threads)
    if attends == "cudnn" and chosen.name != "triton":
        raise RequestError(f"attention is 'cudnn', which the {chosen.name} backend has not: use auto, or backend triton")
    check_names(adapters or {})
    scaling = RopeScaling(rope_scaling, rope_scale, yarn_orig_ctx)
    files = ExitStack()
    file = files.enter_context(GGUFFile.open(found.paths))
    guessing: DraftModel | None = None
    shares: Parallel | None = None
    host: HostExperts | None = None
    try:
        tokenizer = read_tokenizer(file.metadata)
        choice: ComputeChoice = environment.compute if compute == "auto" else compute  # type: ignore[assignment]
        tensors, spec = Tensors(file), read_spec(file, scaling=scaling, asked=n_ctx)
        budget = environment.memory if memory is None else memory
        if isinstance(spec, EncoderSpec):
            if tensor_parallel is not None and ranks > 1:
                raise RequestError("an encoder runs on one device: leave tensor_parallel out")
            ranks = 1
        if ranks > 1:
            if draft is not None or adapters or scaling:
                raise RequestError("draft, adapters and rope_scaling want one device: leave them or tensor_parallel out")
            if environment.check:
                raise RequestError("QUARREL_CHECK looks at one process: unset it, or leave tensor_parallel out")
            shares = Parallel(found.paths, chosen, choice, ranks, threads)
            files.callback(shares.close)
        free = chosen.free_bytes() if shares is None else shares.free_bytes()
        device = Device.of(free, budget, chosen.step_tokens, captures=chosen.name == "triton")
        weights = sum(t.nbytes for t in file.tensors.values())
        if choice == "fp8":
            # Matrices are kept in E4M3 beside their own format.
            coarse = (t for t in file.tensors.values() if t.type.name in ("F16", "BF16", "Q8_0") and len(t.dims) == 2)
            weights += sum(math.prod(t.dims) for t in coarse)
        if adapters and isinstance(spec, EncoderSpec):
            raise RequestError("an encoder takes no adapters: leave them out")
        opened = {n: files.enter_context(GGUFFile.open(_find(p, environment).paths)) for n, p in (adapters or {}).items()}
        adapted = read_adapters(opened, file, tensors) if opened else None
        source: WeightSource = tensors if adapted is None else adapted.source(tensors)
        weights += 0 if adapted is None else adapted.nbytes
        if isinstance(spec, EncoderSpec):
            plan = plan_encoder(spec, device=device, weights=weights, n_ctx=n_ctx, max_seqs=max_seqs)
        else:
            program = assemble(spec, tensors)
            if draft is not None:
                guessing = open_draft(
                    os.fspath(draft),
                    files.enter_context(GGUFFile.open(_find(draft, environment).paths)),
                    tokenizer,
                    program,
                    backend=chosen,
                    compute=choice,
                    device=device,
                    weights=weights,
                    n_ctx=n_ctx,
                    max_seqs=max_seqs,
                )
                taken = guessing.plan.total
                device = replace(device, free=device.free - taken, budget=device.budget - taken)
            wanted = n_ctx or min(spec.context_length, DEFAULT_CONTEXT)
            held = worth(program, wanted)
            if shares is not None:
                held, weights = shares.neediest(spec, tensors, held.window_groups)
            make = partial(
                plan_limits,
                held,
                spec,
                compute=chosen.compute_of(choice),
                device=device,
                n_ctx=n_ctx,
                max_seqs=max_seqs,
                kv_cache=kv,
            )
            plan, host = placed(
                held,
                lambda size: make(weights=size),
                weights=weights,
                wanted=wanted,
                backend=None if shares is not None or environment.check else chosen,
                asked=experts_on_cpu,
                host=lambda: computing_parts(backend_named("cpu", threads)),
            )
        # Some rope scalings depend on the context that will be used.
        spec = read_spec(file, plan.n_ctx, scaling, n_ctx)
        program = assemble(spec, tensors) if adapted is None else adapted.applied(assemble(spec, tensors))
        program = as_planned(program, plan.limits.window_groups)
        limits = with_snapshots(plan.limits, program, plan.spare, prefix_cache, prefix_cache_bytes)
        kept = None if prefix_cache_bytes is None else prefix_cache_bytes * limits.n_blocks // max(1, plan.cache)
        limits = replace(limits, deterministic=deterministic, attention=attends, n_adapters=len(opened))
        plan = plan.with_limits(limits, program)
        limits = plan.limits

        def compiled() -> Step:
            if shares is not None:
                assert isinstance(spec, ModelSpec)
                return shares.compile(spec, file, limits, plan.n_ctx, progress)
            if environment.check:
                return CheckedStep(chosen, program, source, limits, choice)
            with left_to_host(chosen, host):
                return chosen.compile(program, source, limits, choice, progress)

        def drafter() -> Drafter:
            assert guessing is not None
            return guessing.drafter(chosen, choice, spec.n_vocab, prefix_cache)

        loop = Loop()
        width = int(program.outputs["logits" if "logits" in program.outputs else "hidden"].dims[-1])
        try:
            step = loop.serve(
                compiled,
                width,
                cache_rules(program, prefix_cache, kept),
                max_waiting=max_waiting,
                make_drafter=None if guessing is None else drafter,
            )
        except BaseException:
            loop.close(timeout=0.0)
            raise
    except BaseException:
        files.close()
        raise
    explanation = Explanation(
        model=str(name),
        architecture=spec.architecture,
        backend=chosen.name,
        device=chosen.device() if ranks == 1 else f"{ranks} x {chosen.device()}",
        compute=step.compute if choice != "fp8" else f"{step.compute}, products of many rows in E4M3",
        n_ctx=plan.n_ctx,
        max_seqs=limits.max_seqs,
        cache_tokens=cache_tokens(program, limits),
        plan=plan,
        memory=step.memory(),
        choices=tuple(step.explain()),
        skipped=skipped,
        draft=None if guessing is None else DraftFacts(guessing.name, guessing.spec.architecture, guessing.plan),
        parameters=sum(math.prod(t.dims) for t in file.tensors.values()),
        quantization=_most(file),
    )
    seconds = time.perf_counter() - began
    log.info("loaded %s on %s (%s) in %.2f s, n_ctx %d", name, chosen.name, chosen.device(), seconds, plan.n_ctx)
    return LLM(
        Loaded(
            loop, file, files, spec, tokenizer, explanation, seconds, defaults_of(found.params), found.system, tuple(opened)
        )
    )


def _most(file: GGUFFile) -> str:
    """The block format of most bytes."""
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        sizes[tensor.type.name] += tensor.nbytes
    return max(sizes, key=lambda name: sizes[name], default="")


def find(name: str | os.PathLike[str]) -> Resolved:
    """The files of a model, by the names that `load` takes. Raises ModelNotFound."""
    return _find(name, read_environment())


def check_context(
    name: str | os.PathLike[str],
    n_ctx: int,
    rope_scaling: Scaling | None = None,
    rope_scale: float | None = None,
    yarn_orig_ctx: int | None = None,
) -> None:
    """Raises RequestError where the model has no such context, whatever memory there is, before anything is loaded."""
    with GGUFFile.open(find(name).paths) as file:
        spec = read_spec(file, scaling=RopeScaling(rope_scaling, rope_scale, yarn_orig_ctx), asked=n_ctx)
    context_of(spec, n_ctx)


def load_tokenizer(name: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a model, by the names that `load` takes; a file that holds a vocabulary alone will do."""
    return read_tokenizer(find(name).paths[0])


def _set_log(environment: Environment) -> None:
    if environment.log is None:
        return
    log.setLevel(environment.log.upper())
    if not log.hasHandlers():
        log.addHandler(logging.StreamHandler())


def _check_arguments(
    compute: object, n_ctx: object, max_seqs: object, threads: object, max_waiting: object, ranks: object
) -> None:
    if compute not in COMPUTE:
        raise RequestError(f"compute is {compute!r}, wanted one of {', '.join(COMPUTE)}")
    limits = (
        ("n_ctx", n_ctx, 1 << 30),
        ("max_seqs", max_seqs, MAX_SEQS),
        ("threads", threads, MAX_THREADS),
        ("max_waiting", max_waiting, 1 << 20),
        ("tensor_parallel", ranks, MAX_DEVICES),
    )
    for name, value, high in limits:
        if value is None and name not in ("max_seqs", "max_waiting"):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
            raise RequestError(f"{name} is {value!r}, wanted a whole number from 1 to {high}")


def _check_memory(memory: object) -> None:
    if memory is None:
        return
    whole = isinstance(memory, int) and not isinstance(memory, bool) and 1 <= memory < 1 << 60
    if not whole and not (isinstance(memory, float) and 0 < memory <= 1):
        raise RequestError(f"memory is {memory!r}, wanted a whole number of bytes, or a share up to 1.0 as a float")


def _check_kept(count: object) -> None:
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 1 << 60):
        raise RequestError(f"prefix_cache_bytes is {count!r}, wanted a whole number of bytes from 0, or None")


def _find(name: str | os.PathLike[str], environment: Environment) -> Resolved:
    text = os.fspath(name)
    if not isinstance(text, str) or not text:
        raise RequestError(f"the model's name is {text!r}, wanted a path or a name")
    if environment.models is not None and not Path(text).is_absolute():
        for candidate in (environment.models / text, environment.models / f"{text}.gguf"):
            if candidate.is_file():
                return resolve(str(candidate))
    return resolve(text)


def _choose(backend: str | Backend, environment: Environment, threads: int | None) -> tuple[Backend, tuple[str, ...]]:
    """The backend, and why those before it were not taken."""
    if not isinstance(backend, str):
        if not isinstance(backend, Backend):
            raise RequestError(f"backend is a {type(backend).__name__}, wanted a name or a Backend")
        return _able(backend), ()
    name = environment.backend if backend == "auto" else backend
    if name != "auto":
        return _able(backend_named(name, threads)), ()
    skipped: list[str] = []
    for candidate in AUTO:
        try:
            if reason := missing_driver(candidate):
                raise BackendUnavailable(reason)
            return _able(backend_named(candidate, threads)), tuple(skipped)
        except BackendUnavailable as error:
            skipped.append(str(error))
    raise BackendUnavailable(f"no backend can run on this machine: {'; '.join(skipped)}")


def _able(backend: Backend) -> Backend:
    reason = backend.unavailable()
    if reason is not None:
        raise BackendUnavailable(f"backend {backend.name} cannot run on this machine: {reason}")
    return backend
