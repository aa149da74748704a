"""Mixture of experts: routing, grouped products, matvecs of chosen experts, experts on the host."""
