"""Norms, activations, embeddings."""
