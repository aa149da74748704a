"""Speculation: a draft model, or earlier places of the text, guess the next tokens. The text stays the same."""

from __future__ import annotations

import sys

import quarrel

MODEL = sys.argv[1] if len(sys.argv) > 1 else "demo"
DRAFT = sys.argv[2] if len(sys.argv) > 2 else "demo"  # the bundled model drafts for itself: every guess is right
PROMPT = "The wolf said: Open the door! The pig said: No! The wolf said: Open the door! The pig said:"

with quarrel.load(MODEL, n_ctx=256) as llm:
    plain = llm.generate(PROMPT, max_tokens=48, temperature=0)
    lookup = llm.generate(PROMPT, max_tokens=48, temperature=0, service=quarrel.Service(speculate=8))
    stats = llm.stats()
    print(f"prompt lookup: {stats.right_tokens} of {stats.guessed_tokens} guesses were right")
with quarrel.load(MODEL, n_ctx=256, draft=DRAFT) as llm:
    drafted = llm.generate(PROMPT, max_tokens=48, temperature=0)
    stats = llm.stats()
    print(f"draft model: {stats.right_tokens} of {stats.guessed_tokens} guesses were right")

assert plain.token_ids == lookup.token_ids == drafted.token_ids
print(plain.text)
