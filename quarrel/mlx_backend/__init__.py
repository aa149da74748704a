"""How on Metal: MLX's own operations and Metal kernels of ours, packed weights, and the step that mx.compile traces.

A family is one file that ends in `IMPLEMENTATIONS` and stands in `registry.FAMILIES`. Its builders are `build(site, node)`
-> `launch(live, *operands)` -> arrays (`runtime.py`): at build time the site hands out weights, vectors and constants; at
each call the launch gets MLX arrays of the shapes in the contract and returns arrays of the shapes and types in the
contract. Nothing is written in place: a launch that consumes a cache returns the new one (`new = k[...]; new[slots] = rows`
makes a new handle first; the scatter is done in the old buffer, since nothing else holds it by then).

Our own Metal text goes through one class, `kernel.Kernel`; `elementwise.py` shows a whole family in few lines. What varies
from call to call must reach a kernel as an array or a shape (`x_shape[0]`), never as a template constant, and a launch must
not look at an array's values: on a Mac decode steps are traced by mx.compile.
"""
