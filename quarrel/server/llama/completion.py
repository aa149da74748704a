"""/completion and /infill: events as llama-server sends them, with the figures of this engine."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quarrel.engine import Chunk, Result, Service, TokenLogprob
from quarrel.errors import ContextOverflow
from quarrel.llm import Model
from quarrel.server.body import read_body
from quarrel.server.dispatch import Dispatcher, Generation, answer_stream, bursts, cancel_on_disconnect, results
from quarrel.server.errors import Refused, llama_body
from quarrel.server.lines import SSE, event
from quarrel.server.llama.bodies import MOST_PROBS, CompletionBody, InfillBody, Samplers
from quarrel.server.llama.lora import Lora
from quarrel.server.llama.progress import Progress, drawn, timings
from quarrel.server.llama.slots import Slots, alone
from quarrel.server.llama.table import Routes
from quarrel.server.logprobs import chat_logprob
from quarrel.server.settings import Settings

Json = dict[str, Any]
STOPPED = {"length": "limit", "stop": "eos"}


def routes(dispatcher: Dispatcher, slots: Slots, lora: Lora) -> Routes:
    """Text in, text out."""
    router = Routes()

    async def complete(request: Request) -> Response:
        """The continuation of a text, of ids, or of both; of several, a list."""
        body, headers = await read_body(request, CompletionBody, dispatcher)
        prompts = body.prompts(dispatcher.settings.media_marker)
        return await _answer(dispatcher, slots, lora, request, body, prompts, headers)

    for path in ("/completion", "/completions"):
        router.post(path)(complete)

    @router.post("/infill")
    async def infill(request: Request) -> Response:
        """What lies between two texts, by a model that was made for that."""
        body, headers = await read_body(request, InfillBody, dispatcher)
        async with dispatcher.models.use(body.model) as (_, llm):
            prompt = infill_ids(llm, body)
        return await _answer(dispatcher, slots, lora, request, body, [prompt], headers)

    return router


def prompt_ids(llm: Model, given: Any) -> list[int]:
    """Ids of a text, or of a list of ids and texts; what the vocabulary puts in front comes first where a text does. Parts
    with images among them stay as they are."""
    if isinstance(given, str):
        return llm.tokenize(given, True, True)
    if given and isinstance(given[0], dict):
        return given  # type: ignore[no-any-return]
    ids: list[int] = []
    for at, entry in enumerate(given):
        ids += [entry] if isinstance(entry, int) else llm.tokenize(entry, at == 0, True)
    return ids


def infill_ids(llm: Model, body: InfillBody) -> list[int]:
    """PRE prefix SUF suffix MID, by the vocabulary's own tokens."""
    known = llm.tokenizer.fim_ids
    for name in ("prefix", "suffix", "middle"):
        if name not in known:
            message = f"Infill is not supported by this model: {name} token is missing"
            raise Refused(501, "not_supported", message)
    ids: list[int] = []
    for extra in body.input_extra or []:
        text, name = extra.get("text"), extra.get("filename") or "tmp"
        if not isinstance(text, str) or not isinstance(name, str):
            raise Refused(400, "invalid_request", 'extra_context chunk must contain a "text" field with a string value')
        if "separator" in known:
            ids += [known["separator"], *llm.tokenize(f"{name}\n", False)]
        ids += llm.tokenize(text, False)
    ids += [known["prefix"], *llm.tokenize(body.input_prefix, False)]
    for prompt in body.prompts():
        ids += [i for entry in ([prompt] if isinstance(prompt, str) else prompt) for i in _entry(llm, entry)]
    ids += [known["suffix"], *llm.tokenize(body.input_suffix, False), known["middle"]]
    begin = llm.tokenizer.bos_id
    return [begin, *ids] if llm.tokenizer.add_bos and begin is not None else ids


def _entry(llm: Model, entry: int | str | Json) -> list[int]:
    if isinstance(entry, dict):
        raise Refused(400, "unsupported", "/infill takes no images: leave multimodal_data out", param="prompt")
    return [entry] if isinstance(entry, int) else llm.tokenize(entry, False)


def service_of(service: Service, body: Samplers) -> Service:
    """Nothing that was computed before is used where the caller does not want it."""
    salt = alone(service.cache_salt) if body.cache_prompt is False else service.cache_salt
    return replace(service, cache_salt=salt, progress=bool(body.return_progress))


def keep_of(settings: Settings, n_keep: int | None) -> int | None:
    """How many first tokens stay where a text goes on past its context, the BOS counted; None where it ends there."""
    keep = settings.keep if n_keep is None else n_keep
    return (-1 if keep < 0 else keep + 1) if settings.context_shift else None


def check_room(count: int, n_ctx: int) -> None:
    """Raises ContextOverflow for a prompt that leaves no room for a token."""
    if count >= n_ctx:
        raise ContextOverflow(f"the prompt has {count} tokens and the context {n_ctx}", tokens=count, n_ctx=n_ctx)


async def _answer(
    dispatcher: Dispatcher,
    slots: Slots,
    lora: Lora,
    request: Request,
    body: CompletionBody,
    prompts: Sequence[Any],
    headers: dict[str, str],
) -> Response:
    options: Any = {"max_tokens": None, **(dispatcher.settings.sampling or {}), **body.shared()}
    form, settings = body.form(), dispatcher.settings
    if form is not None:
        options.pop("ignore_eos", None)  # the grammar says where the text may end
    adapter = lora.chosen(body.lora)
    if body.n_probs is not None and body.n_probs > 0:
        options["logprobs"] = min(body.n_probs, MOST_PROBS)

    def prepare(llm: Model, service: Service) -> Sequence[Any]:
        chosen = service_of(service, body)
        made = []
        for prompt in prompts:
            biased = {**options, "logit_bias": biases_of(llm, body.logit_bias)} if body.logit_bias else options
            more: Any = {"service": chosen, "structure": form, "adapter": adapter, "parse_special": True, **biased}
            more["keep"] = keep_of(settings, body.n_keep)
            made.append(llm.prepare(prompt_ids(llm, prompt), names=body.preserved_tokens or (), **more))
            check_room(len(made[-1].tokens), llm.n_ctx)
        return made

    stream = bool(body.stream)
    admission = dispatcher.admit(request.state.caller, body.model, prepare, request.url.path, stream=stream)
    if not stream:

        async def work() -> Response:
            async with admission as generation:
                with slots.taken(generation, body.id_slot) as ids:
                    found = await results(generation, settings.timeout)
                tokens, wanted = bool(body.return_tokens), body.response_fields
                made = [chosen(final(r, i, generation, ids[i], tokens=tokens), wanted) for i, r in enumerate(found)]
            return JSONResponse(made[0] if len(made) == 1 else made, headers=headers)

        return await cancel_on_disconnect(request, work())

    async def events(generation: Generation) -> AsyncIterator[str]:
        with slots.taken(generation, body.id_slot) as ids:
            for which in range(len(generation.streams)):
                partial = _Partial(which, generation, ids[which], body)
                async for burst in bursts(generation, which, settings.timeout):
                    yield "".join(event(row) for chunk in burst for row in partial.rows(chunk))

    def failure(error: Refused) -> str:
        return event(llama_body(error))

    return await answer_stream(admission, events, failure, "text/event-stream", {**SSE, **headers})


class _Partial:
    """The events of one stream: one for each token whose text is certain, and the last one."""

    def __init__(self, index: int, generation: Generation, slot: int, body: CompletionBody) -> None:
        self._index, self._generation, self._slot, self._fields = index, generation, slot, body.response_fields
        self._progress = Progress(generation, index, timed=bool(body.timings_per_token))
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._made = 0

    def rows(self, chunk: Chunk) -> list[Json]:
        if chunk.read:
            return [{**self._row(""), **report} for report in self._progress.reports(chunk)]
        rows, more = [], self._progress.with_token(chunk)
        if chunk.token_id is not None:
            self._made += 1
            self._tokens.append(chunk.token_id)
        if chunk.logprob is not None:
            self._logprobs.append(chunk.logprob)
        if chunk.text:  # an event without a text would look like a model that repeats itself
            rows.append({**self._row(chunk.text), **more})
        if chunk.result is not None:
            rows.append(chosen(final(chunk.result, self._index, self._generation, self._slot, whole=False), self._fields))
        return rows

    def _row(self, text: str) -> Json:
        row = {
            "index": self._index,
            "content": text,
            "tokens": self._tokens,
            "stop": False,
            "id_slot": self._slot,
            "tokens_predicted": self._made,
            "tokens_evaluated": len(self._generation.requests[self._index].tokens),
        }
        if self._logprobs:
            row["completion_probabilities"] = _probabilities(self._logprobs, self._generation.llm)
        self._tokens, self._logprobs = [], []
        return row


def final(
    result: Result, index: int, generation: Generation, slot: int, *, tokens: bool = True, whole: bool = True
) -> Json:
    """What a completion ends with. tokens, whole: with the ids, and with the text."""
    request = generation.requests[index]
    prompt, made = result.usage.prompt_tokens, drawn(result)
    row = {
        "index": index,
        "content": result.text if whole else "",
        "tokens": list(result.token_ids) if whole and tokens else [],
        "id_slot": slot,
        "stop": True,
        "model": generation.model,
        "tokens_predicted": made,
        "tokens_evaluated": prompt,
        "generation_settings": settings_of(request.params, request.seed, generation.llm.tokenizer.stop_ids),
        "prompt": generation.llm.detokenize(_without_images(request), False),
        "has_new_line": "\n" in result.text,
        "truncated": result.shifted > 0 or (result.finish_reason == "length" and prompt + made >= request.n_ctx),
        "stop_type": "word" if isinstance(result.stopped_by, str) else STOPPED.get(result.finish_reason, "none"),
        "stopping_word": result.stopped_by if isinstance(result.stopped_by, str) else "",
        "tokens_cached": prompt + max(0, made - 1),
        "timings": timings(result),
    }
    if whole and result.logprobs:
        row["completion_probabilities"] = _probabilities(result.logprobs, generation.llm)
    return row


def chosen(row: Json, fields: Sequence[str] | None) -> Json:
    """Those of an answer's fields that were wanted; a path such as generation_settings/seed is a name, too."""
    if not fields:
        return row
    made: Json = {}
    for path in fields:
        found: Any = row
        for name in path.split("/"):
            found = found.get(name, _MISSING) if isinstance(found, dict) else _MISSING
        if found is not _MISSING:
            made[path] = found
    return made


_MISSING = object()


def _without_images(request: Any) -> list[int]:
    """A prompt's tokens but those that stand for an image's rows."""
    if request.sight is None:
        return list(request.tokens)
    ends = [0, *(image.end for image in request.sight.images)]
    starts = [*(image.start for image in request.sight.images), len(request.tokens)]
    return [id for start, end in zip(ends, starts, strict=True) for id in request.tokens[start:end]]


def settings_of(params: Any, seed: int, stop_ids: Collection[int] = ()) -> Json:
    """The sampling parameters that were used, in llama-server's words. stop_ids: tokens that end a text."""
    same = (
        *("temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "top_n_sigma", "typical_p"),
        *("xtc_probability", "xtc_threshold", "presence_penalty", "frequency_penalty"),
        *("dry_multiplier", "dry_base", "dry_allowed_length", "mirostat", "mirostat_tau", "mirostat_eta", "ignore_eos"),
        *("adaptive_target", "adaptive_decay"),
    )
    row: Json = {"seed": seed, **{name: getattr(params, name) for name in same}}
    limit = -1 if params.max_tokens is None else params.max_tokens
    banned = dict.fromkeys(stop_ids, -math.inf) if params.ignore_eos else {}
    biases = {**params.logit_bias, **banned}
    return row | {
        "repeat_last_n": params.penalty_last_n,
        "repeat_penalty": params.repetition_penalty,
        "dry_penalty_last_n": params.dry_last_n,
        "dry_sequence_breakers": list(params.dry_sequence_breakers),
        "stop": list(params.stop),
        "max_tokens": limit,
        "n_predict": limit,
        "n_probs": params.logprobs or 0,
        "logit_bias": [{"token": id, "bias": b if math.isfinite(b) else None} for id, b in sorted(biases.items())],
        "samplers": list(params.samplers),
    }


def biases_of(llm: Model, given: dict[str, Any] | list[Any]) -> dict[int, float]:
    """By id; what is named by a text holds for each of its tokens, and false bans."""
    pairs = list(given.items()) if isinstance(given, dict) else given
    made: dict[int, float] = {}
    for pair in pairs[:1024]:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise Refused(400, "invalid_request", "logit_bias holds no pair of a token and a bias", param="logit_bias")
        what, bias = pair
        if bias is False:
            value = float("-inf")
        elif isinstance(bias, int | float) and bias is not True:
            value = float(min(max(bias, -100), 100))  # a whole number may be larger than any real one
        else:
            continue
        if isinstance(what, str) and isinstance(given, dict) and what.isascii() and what.isdigit():
            what = int(what) if len(what) < 12 else -1  # Python reads no number of thousands of digits
        for id in llm.tokenize(what, False) if isinstance(what, str) else [what]:
            if type(id) is int and 0 <= id < llm.tokenizer.n_vocab:
                made[id] = value
    return made


def _probabilities(entries: Sequence[TokenLogprob], llm: Model) -> list[Json]:
    return [probability(entry, llm) for entry in entries]


def probability(entry: TokenLogprob, llm: Model) -> Json:
    """One token with its alternatives, by id."""
    row = chat_logprob(entry, llm)
    top = [{"id": id, **one} for (id, _), one in zip(entry.top, row["top_logprobs"], strict=True)]
    return {"id": entry.token_id, **row, "top_logprobs": top}
