"""`quarrel ps`: what a running server has in memory."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import urllib.error
import urllib.request
from datetime import UTC, datetime
from typing import Any

from quarrel.cli.terminal import amount, line, note, table, visible, write_json
from quarrel.errors import QuarrelError

SECONDS = 10.0


def run(args: argparse.Namespace) -> int:
    models = _models(args.url.rstrip("/"))
    if args.json:
        write_json(models)
        return 0
    if not models:
        note("quarrel ps: nothing is loaded")
        return 0
    rows = [["name", "size", "context", "until"]]
    for m in models:
        rows.append([visible(m["name"]), amount(m["size"]), str(m.get("context_length", "")), _until(m.get("expires_at"))])
    for text in table(rows, right=(1, 2), indent=""):
        line(text)
    return 0


def _until(text: str | None) -> str:
    try:
        end = datetime.fromisoformat(text or "")
    except ValueError:
        return "unloaded by hand"
    minutes = (end - datetime.now(UTC)).total_seconds() / 60
    return "unloaded by hand" if minutes > 60 * 24 * 365 else f"{max(0.0, minutes):.0f} minutes without use"


def _models(url: str) -> list[dict[str, Any]]:
    key = os.environ.get("WEBUI_API_KEY")
    try:
        request = urllib.request.Request(f"{url}/api/ps", headers={"Authorization": f"Bearer {key}"} if key else {})
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            models: list[dict[str, Any]] = json.load(answer)["models"]
            for model in models:
                int(model["size"]), str(model["name"])  # of another program's answer
            return models
    except urllib.error.HTTPError as error:
        wanted = "it wants a key, which WEBUI_API_KEY gives" if error.code == 401 else f"it answers {error.code}"
        raise QuarrelError(f"{url} does not say what runs: {wanted}") from None
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = getattr(error, "reason", error)
        raise QuarrelError(
            f"there is no server at {url} ({reason}): start one with `quarrel serve`, or say --url"
        ) from None
