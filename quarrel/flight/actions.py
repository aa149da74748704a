"""The local server's actions."""

from __future__ import annotations

import json

from quarrel.errors import RequestError
from quarrel.flight.store import Missing, Store
from quarrel.flight.tickets import json_body, text_of


class Unknown(RequestError):
    """There is no such action."""


def act(store: Store, action: str, raw: bytes) -> bytes:
    """What a store answers to an action: a JSON object, or, of what it deleted, bare text unless it is kind."""
    body = json_body(raw)
    name = text_of(body, "dataset")
    if action == "check_readiness":
        return json.dumps(store.readiness(name)).encode()
    if action == "VectorSearchByID":
        found = store.search_by_id(name, text_of(body, "id"), body.get("k"))
        return json.dumps({"ids": found["id"].to_pylist(), "scores": found["score"].to_pylist()}).encode()
    if action == "DeleteNamespace":
        # Namespaces are made by no call that a client of ours has, so there is none to delete.
        raise Missing(f"namespace not found: {text_of(body, 'name')}")
    if action in ("cluster-status", "snapshot"):
        return json.dumps({"status": "ok"}).encode()
    if action == "delete-dataset":
        if not name:
            raise RequestError("missing dataset name")
        store.drop(name)
    elif action in ("delete", "Delete"):
        store.delete(name, text_of(body, "id"))
    else:
        raise Unknown(f"unknown action type {action}")
    return json.dumps({"status": "ok"}).encode() if store.kind else b"deleted"
