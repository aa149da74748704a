"""The OpenAPI document: what FastAPI finds, and what it cannot know: bodies that are read by hand, streams, refusals."""

from __future__ import annotations

import json
import re
from typing import Any

from fastapi import FastAPI

from quarrel.server.errors import Refused, anthropic_body, is_ollama, openai_body, plain_body

Json = dict[str, Any]
METHODS = frozenset({"get", "post", "delete", "put", "patch"})
STREAMS = {
    "/v1/chat/completions": "text/event-stream",
    "/v1/completions": "text/event-stream",
    "/v1/messages": "text/event-stream",
    "/v1/responses": "text/event-stream",
    "/api/stream": "text/event-stream",
    "/api/generate": "application/x-ndjson",
    "/api/chat": "application/x-ndjson",
}
TEXTS = frozenset({"/metrics"})
_WORD: Json = {"type": "string"}
_OPENAI: Json = {
    "type": "object",
    "properties": {"message": _WORD, "type": _WORD, "param": {"type": ["string", "null"]}, "code": _WORD},
}
_ANTHROPIC: Json = {"type": "object", "properties": {"type": _WORD, "message": _WORD}}
_PLAIN: Json = {"type": "object", "properties": {"code": _WORD, "message": _WORD}}
_EXAMPLE = Refused(400, "invalid_request", "temperature: Input should be greater than or equal to 0", param="temperature")


def document(api: FastAPI) -> Json:
    """The whole document, made once."""
    if api.openapi_schema is None:
        made = FastAPI.openapi(api)
        parts: Json = made.setdefault("components", {}).setdefault("schemas", {})
        for unused in ("HTTPValidationError", "ValidationError"):
            parts.pop(unused, None)
        parts["OpenAIError"], parts["PlainError"] = _error(_OPENAI), _error(_PLAIN)
        parts["AnthropicError"] = {**_error(_ANTHROPIC), "example": anthropic_body(_EXAMPLE)}
        parts["OpenAIError"]["example"], parts["PlainError"]["example"] = openai_body(_EXAMPLE), plain_body(_EXAMPLE)
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"key": []}, {}]
        for path, item in made["paths"].items():
            for method in METHODS & set(item):
                _complete(path, item[method], parts, ollama="/api/tags" in made["paths"])
        api.openapi_schema = made
    return api.openapi_schema


def as_yaml(value: object, indent: str = "") -> str:
    """JSON's values as YAML: blocks of lines, with scalars as JSON writes them."""
    if isinstance(value, dict) and value:
        rows = [(f"{json.dumps(key)}:", inner) for key, inner in value.items()]
    elif isinstance(value, list) and value:
        rows = [("-", inner) for inner in value]
    else:
        text = json.dumps(value)
        # Without a point, an exponent is a text to some readers of YAML.
        return f" {text.replace('e', '.0e') if isinstance(value, float) and '.' not in text else text}\n"
    return "\n" * bool(indent) + "".join(f"{indent}{head}{as_yaml(inner, indent + '  ')}" for head, inner in rows)


def methods_of(api: FastAPI, path: str) -> list[str]:
    """Those that some route has for this path."""
    found: set[str] = set()
    for template, item in document(api)["paths"].items():
        # A name may have slashes in it.
        if re.fullmatch("[^{}]+".join(re.escape(part) for part in re.split(r"{\w+}", template)), path):
            found |= {method.upper() for method in METHODS & set(item)}
    return sorted(found)


def _complete(path: str, operation: Json, parts: Json, *, ollama: bool) -> None:
    for content in operation.get("requestBody", {}).get("content", {}).values():
        # What a body is made of stands beside it; references lead to the document's own list.
        parts.update(content["schema"].pop("$defs", {}))
    answers: Json = operation["responses"]
    answers.pop("422", None)
    kind = "OpenAIError" if path.startswith("/v1") else "PlainError"
    kind = "AnthropicError" if path.startswith("/v1/messages") else kind
    schema: Json = {"$ref": f"#/components/schemas/{kind}"}
    if ollama and is_ollama(path):
        schema = {"anyOf": [_error(_WORD), schema]} if path == "/api/generate" else _error(_WORD)
    body = {"application/json": {"schema": schema}}
    after = {"Retry-After": {"schema": {"type": "integer"}, "description": "seconds, with 429 and 503"}}
    answers["4XX"] = {"description": "Refused: the body says why", "content": body, "headers": after}
    answers["5XX"] = {"description": "Not possible now", "content": body, "headers": after}
    if path in ("/readyz", "/health"):
        answers["503"] = {"description": "Not ready", "content": {"application/json": {"schema": {"type": "object"}}}}
    if path in STREAMS:
        answers["200"]["content"][STREAMS[path]] = {}
    if path == "/api/metrics":
        answers["200"]["content"]["text/plain"] = {"schema": {"type": "string"}}
    if path in TEXTS:
        answers["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}


def _error(inner: Json) -> Json:
    return {"type": "object", "required": ["error"], "properties": {"error": inner}}
