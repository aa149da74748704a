"""Rotary positions, and attention over the paged cache or over the sequence itself."""
