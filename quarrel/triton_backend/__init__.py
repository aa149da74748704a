"""How on CUDA: Triton kernels, their packed weights, and the step that a CUDA graph captures."""
