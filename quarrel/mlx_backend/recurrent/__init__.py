"""Recurrent layers: causal convolution and the selective scans of Mamba-1 and Mamba-2."""
