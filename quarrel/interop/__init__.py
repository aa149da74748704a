"""Quarrel's kernels for other programs: importing `quarrel.interop.torch_ops` makes them `torch.ops.quarrel.*`."""
