"""Linear maps: matvec, mma, wgmma, tiles, and dequantize with a library product."""
