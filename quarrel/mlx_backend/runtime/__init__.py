"""What every kernel needs: launches and batches, Metal kernels, the cache, shared Metal text."""
