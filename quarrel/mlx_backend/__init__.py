"""Ops on Metal: MLX's own operations and Metal kernels of ours, packed weights, and the step that mx.compile traces.

A family is one file that ends in `IMPLEMENTATIONS` and stands in `registry.FAMILIES`. Its builders are `build(site, node)`
-> `launch(batch, *operands)` -> arrays (`runtime/launch.py`): at build time the site hands out weights, vectors and
constants; at each call the launch gets MLX arrays of the shapes in the contract and returns arrays of the shapes and types
in the contract. Keys and values are written where the cache lies (`runtime/cache.py`), all else is returned.

Our own Metal text goes through one class, `runtime.kernel.Kernel`; see `elementwise.py`, a short family. What varies from
call to call must reach a kernel as an array or a shape (`x_shape[0]`), never as a template constant, and a launch must not
look at an array's values: on a Mac decode steps are traced by mx.compile.
"""
