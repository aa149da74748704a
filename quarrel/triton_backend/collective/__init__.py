"""Sums and gathers over the devices that share a model."""
