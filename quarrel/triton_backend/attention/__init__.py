"""Attention over the paged cache, rotation, append."""
