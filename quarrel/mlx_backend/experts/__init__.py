"""Mixture of experts: routing, products with the chosen experts, adapters, and how often each was chosen."""
