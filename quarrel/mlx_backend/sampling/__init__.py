"""The next token, and how likely it was."""
