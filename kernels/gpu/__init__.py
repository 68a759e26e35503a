"""Triton kernels for NVIDIA GPUs, each the twin of a torch reference in `kernels/`."""
