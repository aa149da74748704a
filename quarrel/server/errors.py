"""Errors as HTTP answers: which status, which code, in which protocol's words."""

from __future__ import annotations

import math

from quarrel.errors import (
    ContextOverflow,
    DeadlineExceeded,
    EngineFault,
    EngineLost,
    ModelError,
    ModelNotFound,
    OutOfMemory,
    QuarrelError,
    QueueFull,
    RequestError,
    UnsupportedModel,
)


class Refused(QuarrelError):
    """A request that gets an error status. `code` is a short word for programs, the text a sentence for people."""

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        # It may say what a caller sent, half a character among it, which no answer can hold.
        super().__init__(message.encode("utf-8", "backslashreplace").decode())
        self.status, self.code, self.param, self.retry_after = status, code, param, retry_after

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(max(1, math.ceil(self.retry_after)))}


_STATUS: tuple[tuple[type[QuarrelError], int, str], ...] = (
    (ContextOverflow, 400, "context_length_exceeded"),
    (RequestError, 400, "invalid_request"),
    (ModelNotFound, 404, "model_not_found"),
    (UnsupportedModel, 400, "unsupported_by_model"),
    (ModelError, 422, "model_unusable"),
    (OutOfMemory, 503, "out_of_memory"),
    (QueueFull, 503, "queue_full"),
    (DeadlineExceeded, 504, "timeout"),
    (EngineFault, 503, "engine_fault"),
    (EngineLost, 503, "engine_lost"),
)

# The words of the WebSocket and the /api routes.
_WORDS = {
    "invalid_request": "INVALID_REQUEST",
    "context_length_exceeded": "INVALID_REQUEST",
    "unsupported_by_model": "INVALID_REQUEST",
    "model_not_found": "MODEL_NOT_FOUND",
    "unauthorized": "UNAUTHORIZED",
    "not_found": "NOT_FOUND",
    "not_running": "NOT_RUNNING",
    "queue_full": "QUEUE_FULL",
    "rate_limited": "QUEUE_FULL",
    "unknown_type": "UNKNOWN_TYPE",
    "engine_error": "INFERENCE_ERROR",
    "engine_fault": "ENGINE_ERROR",
    "engine_lost": "ENGINE_ERROR",
    "engine_restarting": "ENGINE_ERROR",
    "timeout": "INFERENCE_ERROR",
    "server_shutdown": "CONNECTION_LOST",
}


def llama_body(error: Refused) -> dict[str, object]:
    """In llama-server's form, whose callers ask again with a shorter prompt where the last two are there."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 501: "not_supported_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    body: dict[str, object] = {"code": error.status, "message": str(error)}
    cause = error.__cause__
    if isinstance(cause, ContextOverflow) and cause.tokens:
        body |= {"message": llama_overflow(cause), "type": "exceed_context_size_error"}
        return {"error": body | {"n_prompt_tokens": cause.tokens, "n_ctx": cause.n_ctx}}
    return {"error": body | {"type": "unavailable_error" if error.status == 503 else kind}}


def llama_overflow(error: ContextOverflow) -> str:
    """What llama-server says, which its callers look for."""
    sizes = f"request ({error.tokens} tokens) exceeds the available context size ({error.n_ctx} tokens)"
    return f"{sizes}, try increasing it"


def refused(error: QuarrelError) -> Refused:
    """Any deliberate error as the answer that it gives."""
    if isinstance(error, Refused):
        return error
    for kind, status, code in _STATUS:
        if isinstance(error, kind):
            after = 1.0 if kind is EngineLost else None
            made = Refused(status, code, str(error), param=error.field, retry_after=getattr(error, "retry_after", after))
            made.__cause__ = error
            return made
    return Refused(500, "engine_error", str(error))


def openai_body(error: Refused) -> dict[str, object]:
    """In OpenAI's form."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    param = "response_format" if error.param == "structure" else error.param
    return {"error": {"message": str(error), "type": kind, "param": param, "code": error.code}}


def anthropic_body(error: Refused) -> dict[str, object]:
    """In Anthropic's form; agents shorten a conversation that is called too long in its words."""
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
    text, cause = str(error), error.__cause__
    if isinstance(cause, ContextOverflow) and cause.tokens:
        text = f"prompt is too long: {cause.tokens} tokens > {cause.n_ctx} maximum"
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": text}}


def error_body(path: str, error: Refused, *, ollama: bool, llama: bool = False) -> dict[str, object]:
    """In the words of the protocol that the path belongs to. ollama: whether Ollama's routes are served; llama: whether all
    of them are llama-server's."""
    if llama or is_llama(path):
        return llama_body(error)
    if path.startswith("/v1/messages"):
        return anthropic_body(error)
    if path.startswith("/v1"):
        return openai_body(error)
    return {"error": str(error)} if ollama and is_ollama(path) else plain_body(error)


_OWN = tuple(f"/api/{name}" for name in ("models", "stream", "tokenize", "detokenize", "metrics", "health"))


def is_ollama(path: str) -> bool:
    """Whether it is a path of Ollama's API, whose clients read an error as a text."""
    return path.startswith("/api/") and not path.startswith(_OWN)


_LLAMAS = frozenset({"/completion", "/infill", "/apply-template", "/embedding", "/props", "/slots"})


def is_llama(path: str) -> bool:
    """Whether it is a path that llama-server alone has."""
    return path in _LLAMAS or path.startswith("/slots/")


def word(error: Refused) -> str:
    """The error's code in the WebSocket's words."""
    default = "BAD_REQUEST" if error.status < 500 else "INTERNAL_ERROR"
    return _WORDS.get(error.code, default)


def plain_body(error: Refused) -> dict[str, object]:
    """In the words of the /api routes."""
    return {"error": {"code": word(error), "message": str(error)}}
