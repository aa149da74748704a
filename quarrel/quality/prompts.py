"""What the regression suite asks of every model, always the same."""

from __future__ import annotations

LOGITS = ("The quick brown fox", "Hello, my name is", "In a hole in the ground there lived a hobbit.")
"""Prompts whose last logits are kept and compared."""

COHERENCE = (("The capital of France is", 5), ("Once upon a time", 10), ("What is 2+2?", 3), ("Once upon a time", 64))
"""Prompts to continue greedily, and by how many tokens."""

PASSAGE = """\
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or twice she
had peeped into the book her sister was reading, but it had no pictures or conversations in it, and what is the use of a
book, thought Alice, without pictures or conversations? So she was considering in her own mind, as well as she could, for
the hot day made her feel very sleepy and stupid, whether the pleasure of making a daisy-chain would be worth the trouble
of getting up and picking the daisies, when suddenly a White Rabbit with pink eyes ran close by her. There was nothing so
very remarkable in that; nor did Alice think it so very much out of the way to hear the Rabbit say to itself, Oh dear! Oh
dear! I shall be late! But when the Rabbit actually took a watch out of its waistcoat-pocket, and looked at it, and then
hurried on, Alice started to her feet, for it flashed across her mind that she had never before seen a rabbit with either
a waistcoat-pocket, or a watch to take out of it, and burning with curiosity, she ran across the field after it, and
fortunately was just in time to see it pop down a large rabbit-hole under the hedge.
"""
"""Lewis Carroll, Alice's Adventures in Wonderland, 1865: what perplexity is measured on where no text is given."""
