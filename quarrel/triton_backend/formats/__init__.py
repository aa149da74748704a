"""Block formats on the device: how they are packed, and how kernels read them."""
