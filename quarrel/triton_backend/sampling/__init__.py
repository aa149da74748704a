"""The next token, and log probabilities."""
