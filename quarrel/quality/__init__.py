"""How good a model's answers are, in numbers: perplexity, divergence from a reference, and a regression suite."""
