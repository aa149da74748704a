"""Tools of MCP servers in a conversation, each call allowed by a person; and the engine as such a server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import mcp
import pytest
from mcp.server import MCPServer

import quarrel
from quarrel.cli import chat, main
from quarrel.cli.mcp import server_for
from quarrel.cli.parser import make_parser, parse
from quarrel.cli.prompt import model_of
from quarrel.engine import Chunk, Request, Result, Timings, Usage
from quarrel.errors import QuarrelError
from quarrel.llm import LLM
from quarrel.toolbox import Toolbox, ToolResult, names
from tests.cli.support import GREEDY
from tests.cli.test_chat import keyboard


def toys(log: list[object]) -> Any:
    server: Any = MCPServer("toys")

    def add(a: int, b: int) -> int:
        """The sum."""
        log.append((a, b))
        return a + b

    def fail() -> str:
        """Always fails."""
        raise ValueError("out of order")

    for tool in (add, fail):
        server.add_tool(tool)
    return server


def test_tools_of_several_servers_are_called_by_name() -> None:
    log: list[object] = []
    with Toolbox({"one": toys(log), "two": toys(log)}) as box:
        assert names(box.tools) == ["add", "fail", "add_2", "fail_2"]
        assert box.tools[0]["function"]["parameters"]["required"] == ["a", "b"]
        assert box.call("add", {"a": 2, "b": 3}) == ToolResult("5")
        assert box.call("add_2", {"a": 4, "b": 3}).text == "7"
        assert box.call("fail", {}).text.startswith("The tool failed: ")
        assert box.call("add", {"a": "x"}).failed
        assert box.call("nothing", {}) == ToolResult("There is no tool 'nothing'.", failed=True)
    assert log == [(2, 3), (4, 3)]


def test_a_server_that_does_not_start_is_one_sentence() -> None:
    gone = mcp.StdioServerParameters(command=sys.executable, args=["-c", "raise SystemExit(1)"])
    with pytest.raises(QuarrelError, match="the MCP server 'gone' does not answer"), Toolbox({"gone": gone}):
        pass


MORTAL = """
import json, os, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    method, params = asked["method"], asked.get("params", {})
    if method == "tools/call" and params["name"] == "die":
        os._exit(1)
    made = {
        "initialize": {"protocolVersion": params.get("protocolVersion"), "capabilities": {"tools": {}},
                       "serverInfo": {"name": "mortal", "version": "1"}},
        "tools/list": {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in ("die", "process")]},
        "tools/call": {"content": [{"type": "text", "text": str(os.getpid())}]},
    }
    answer = {"result": made[method]} if method in made else {"error": {"code": -32601, "message": "no such method"}}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
"""


def test_a_server_that_dies_is_named_and_the_next_call_starts_it_again() -> None:
    log: list[object] = []
    mortal = mcp.StdioServerParameters(command=sys.executable, args=["-c", MORTAL])
    with Toolbox({"mortal.py": mortal, "toys": toys(log)}) as box:
        first = box.call("process", {})
        assert not first.failed
        for tool in ("die", "kill"):
            if tool == "die":
                found = box.call("die", {})
            else:  # between two calls
                os.kill(int(box.call("process", {}).text), signal.SIGKILL)
                while not (found := box.call("process", {})).failed:
                    continue
            assert found.failed
            assert "the MCP server 'mortal.py' has ended" in found.text
            assert found.text.endswith("the next call starts it again.")
            assert box.call("add", {"a": 2, "b": 3}).text == "5"
            again = box.call("process", {})
            assert not again.failed
            assert again.text != first.text


class Said:
    """A stream of one text."""

    prompt_tokens = 3

    def __init__(self, text: str) -> None:
        self.result = Result(text, (), "stop", Usage(3, 1), Timings(0, 0, 0, 0, 0, 0), 1)

    def __iter__(self) -> Iterator[Chunk]:
        text = self.result.text
        yield Chunk(text[:9], 1)
        yield Chunk(text[9:], 1, result=self.result)

    def __enter__(self) -> Said:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def cancel(self) -> None:
        pass


WIDE = ("--ctx", "4096", "--rope-scaling", "yarn")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": %d}}\n</tool_call>'


@pytest.fixture(name="said")
def _said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the model says, in turn; the prompts that it gets are put in the place of what was said."""
    texts: list[str] = []

    def start(self: LLM, request: Request) -> Any:
        return Said(texts.pop(0))

    monkeypatch.setattr(LLM, "start", start)
    return texts


def test_each_call_is_shown_and_allowed_first(
    chatty: str, said: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    log: list[object] = []
    monkeypatch.setattr(chat, "server_of", lambda words: toys(log))
    said += ["One moment. " + CALL % 1, "It is 3.", CALL % 5, "As you like.", CALL % 6, CALL % 7, "Done."]
    saved = tmp_path / "talk.json"
    keyboard(monkeypatch, "2 + 1?", "what?", "yes", "2 + 5?", "no", "2 + 6?", "always", f"/save {saved}", "/tools")
    assert main(["chat", chatty, *GREEDY, "--mcp", "toys", "--quiet", *WIDE]) == 0
    streams = capsys.readouterr()
    assert log == [(2, 1), (2, 6), (2, 7)]
    assert streams.err.count("the model calls add with") == 4
    assert "tool_call" not in streams.out
    assert "add: The sum.\nfail: Always fails." in streams.err
    for text in ("One moment.", "It is 3.", "As you like.", "Done."):
        assert text in streams.out
    kept = json.loads(saved.read_text())
    assert [m["role"] for m in kept][:4] == ["user", "assistant", "tool", "assistant"]
    assert [m["content"] for m in kept if m["role"] == "tool"] == ["3", "The user did not allow this call.", "8", "9"]


def test_nobody_there_allows_nothing(
    chatty: str, said: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log: list[object] = []
    monkeypatch.setattr(chat, "server_of", lambda words: toys(log))
    said += [CALL % 1, "I may not."]
    assert main(["chat", chatty, *GREEDY, "--mcp", "toys", "--quiet", *WIDE, "-p", "2 + 1?"]) == 0
    assert log == []
    assert "I may not." in capsys.readouterr().out


def test_the_engine_is_a_server(chatty: str) -> None:
    async def ask(server: Any) -> tuple[set[str], list[str]]:
        async with mcp.Client(server) as client:
            tools = {tool.name for tool in (await client.list_tools()).tools}
            calls = (("generate", {"prompt": "hello"}), ("chat", {"message": "hello", "system": "brief"}))
            found = [await client.call_tool(n, {**a, "max_tokens": 4, "temperature": 0}) for n, a in calls]
            counted = await client.call_tool("count_tokens", {"text": "hello"})
            return tools, [r.model_dump()["content"][0]["text"] for r in (*found, counted)]

    with quarrel.load(chatty, backend="cpu") as llm:
        tools, (continued, answered, counted) = asyncio.run(ask(server_for(llm)))
        assert tools == {"generate", "chat", "count_tokens"}
        assert continued == llm.generate("hello", max_tokens=4, temperature=0).text
        messages = [{"role": "system", "content": "brief"}, {"role": "user", "content": "hello"}]
        assert answered == llm.chat(messages, max_tokens=4, temperature=0).text
        assert int(counted) == len(llm.tokenize("hello"))


@pytest.mark.parametrize(("command", "model"), [("mcp", "demo-chat"), ("chat", "demo-chat"), ("explain", "demo")])
def test_what_converses_takes_the_model_that_talks_by_default(command: str, model: str) -> None:
    args, _ = parse(make_parser(), [command])
    assert model_of(args) == model
