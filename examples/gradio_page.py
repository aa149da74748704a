"""A page of Gradio whose answers come as they are written. (`quarrel serve` has a page of its own.)"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import quarrel

try:
    import gradio
except ImportError:
    sys.exit("needs Gradio: pip install gradio")

llm = quarrel.load(sys.argv[1] if len(sys.argv) > 1 else "demo")
# The bundled model brings no template of chats.
template = None if llm.tokenizer.chat_template else "chatml"


def answer(message: str, history: list[dict[str, Any]]) -> Iterator[str]:
    messages = [{"role": turn["role"], "content": turn["content"]} for turn in history]
    text = ""
    for chunk in llm.chat(
        [*messages, {"role": "user", "content": message}], stream=True, template=template, max_tokens=100
    ):
        text += chunk.text
        yield text


page = gradio.ChatInterface(answer, title="Quarrel")
if __name__ == "__main__":
    page.launch()
