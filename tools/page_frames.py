"""How smoothly the page draws, in a Chromium: an answer of 50,000 letters while it is written, and 5,000 messages scrolled.

    QUARREL_CHROMIUM=/usr/bin/chromium python -m tools.page_frames

Needs the Python package playwright. One line of JSON for each: frames a second, the time between frames (ms), and what the
page's main thread computes for one (ms); first of an empty page, which shows what the machine leaves. What writes up to 400
pieces a second stands in for a model.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from quarrel.engine import Chunk
from quarrel.server import Rates, Settings
from quarrel.server import websocket as server_socket
from quarrel.server.dispatch import Generation, chunks
from tests.server.conftest import running
from tests.server.test_page import MARKDOWN, SIZES, imported, write

LETTERS, MESSAGES, PIECE, PAUSE = 50_000, 5_000, 5, 0.0025
WORDS = "The king rode out to the sea with **seven** men, and `none` of them came back before the winter.\n\n"
RECORD = """() => {
  const found = []; let last = performance.now(), on = true;
  const tick = (now) => { found.push(now - last); last = now; if (on) requestAnimationFrame(tick); };
  requestAnimationFrame(tick);
  window.recorded = () => { on = false; return found.slice(2); };
}"""
SCROLL = """async () => {
  const at = document.getElementById("scroll");
  for (let i = 0; i < 300; i++) { at.scrollTop -= 120; await new Promise(requestAnimationFrame); }
}"""


async def _told(generation: Generation, which: int, timeout: float) -> AsyncIterator[Chunk]:
    text = ((MARKDOWN + WORDS * 12) * (LETTERS // 1000))[:LETTERS]
    for i in range(0, LETTERS, PIECE):
        yield Chunk(text[i : i + PIECE], 1)
        await asyncio.sleep(PAUSE)
    end = [chunk async for chunk in chunks(generation, which, timeout)][-1]
    end.text = ""
    yield end


class Frames:
    """What one page draws, from its start to `end`."""

    def __init__(self, page: Any) -> None:
        self._page, self._tools = page, page.context.new_cdp_session(page)
        self._tools.send("Performance.enable")
        page.evaluate(RECORD)
        self._busy, self._began = self._thread(), time.monotonic()

    def _thread(self) -> float:
        rows = self._tools.send("Performance.getMetrics")["metrics"]
        return next(row["value"] for row in rows if row["name"] == "ThreadTime")

    def end(self) -> dict[str, float]:
        """The figures."""
        seconds, busy = time.monotonic() - self._began, self._thread() - self._busy
        gaps = sorted(self._page.evaluate("recorded()"))
        ranks = {f"ms_p{p}": round(gaps[len(gaps) * p // 100], 1) for p in (50, 95, 99)}
        return {"fps": round(len(gaps) / seconds, 1), **ranks, "thread_ms": round(1000 * busy / len(gaps), 1)}


def main() -> None:
    """Prints the figures."""
    from playwright.sync_api import sync_playwright

    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as p:
        settings = Settings(data_dir=Path(folder), rates=Rates(requests=0), chat_template="chatml")
        browser = p.chromium.launch(
            executable_path=os.environ["QUARREL_CHROMIUM"], args=["--no-sandbox", "--headless=shell"]
        )
        with running(settings) as live:
            for size, options in SIZES.items():
                page = browser.new_context(**options).new_page()
                page.set_default_timeout(600_000)
                page.add_init_script("localStorage.quarrelDefaults ??= JSON.stringify({options: {max_tokens: 8}})")
                page.goto(live.url)
                page.wait_for_selector("[data-state=connected]", state="attached")
                frames = Frames(page)
                page.wait_for_timeout(10_000)
                print(json.dumps({"page": size, "what": "nothing", **frames.end()}), flush=True)
                server_socket.chunks = _told
                write(page, "go on")
                page.wait_for_selector(".live .prose")
                frames = Frames(page)
                page.wait_for_selector(".message.assistant > .actions", state="attached")
                print(json.dumps({"page": size, "what": f"{LETTERS} letters written", **frames.end()}), flush=True)
                server_socket.chunks = chunks
                if size == "phone":
                    page.click("[aria-label='Open the sidebar']")
                imported(page, *(f"message {i}\n\n{WORDS}" for i in range(MESSAGES)))
                page.wait_for_selector(f"text=message {MESSAGES - 1}")
                frames = Frames(page)
                page.evaluate(SCROLL)
                print(json.dumps({"page": size, "what": f"{MESSAGES} messages scrolled", **frames.end()}), flush=True)
                page.context.close()
        browser.close()


if __name__ == "__main__":
    main()
