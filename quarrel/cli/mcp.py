"""`quarrel mcp`: the engine as an MCP server on standard input and output."""

from __future__ import annotations

import argparse
from typing import Any

from quarrel import __version__
from quarrel.cli.models import opened
from quarrel.cli.prompt import model_of
from quarrel.errors import QuarrelError, installing
from quarrel.llm import LLM


def run(args: argparse.Namespace) -> int:
    """Until the other program closes standard input."""
    try:
        import mcp  # noqa: F401
    except ImportError:
        raise QuarrelError(f"the protocol is spoken by mcp: {installing('mcp')}") from None
    with opened(args, model_of(args)) as llm:
        server_for(llm).run("stdio")
    return 0


def server_for(llm: LLM) -> Any:
    """An `mcp.server.MCPServer` whose tools continue texts, answer questions and count tokens by this model."""
    from mcp.server import MCPServer

    server: Any = MCPServer("quarrel", version=__version__, instructions=f"A language model: {llm.explain().model}.")

    async def generate(
        prompt: str, max_tokens: int = 256, temperature: float | None = None, seed: int | None = None
    ) -> str:
        """Continues a text."""
        return (await llm.agenerate(prompt, **_sampling(max_tokens, temperature, seed))).text

    async def chat(
        message: str,
        system: str | None = None,
        max_tokens: int = 512,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> str:
        """Answers a message, by the model's chat template."""
        before = [] if system is None else [{"role": "system", "content": system}]
        messages = [*before, {"role": "user", "content": message}]
        stream = llm.achat(messages, **_sampling(max_tokens, temperature, seed))
        result = await stream.wait()
        if result.failure is not None:
            raise result.failure
        return result.text

    def count_tokens(text: str) -> int:
        """How many tokens a text has for this model."""
        return len(llm.tokenize(text))

    for tool in (generate, count_tokens) if llm.tokenizer.chat_template is None else (generate, chat, count_tokens):
        server.add_tool(tool)
    return server


def _sampling(max_tokens: int, temperature: float | None, seed: int | None) -> Any:
    given = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    return {name: value for name, value in given.items() if value is not None}
