"""What every launcher speaks of: the device, buffers, weights, inputs of a step."""
