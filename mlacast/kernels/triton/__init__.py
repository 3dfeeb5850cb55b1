"""Portable kernels in plain Triton, one file per operation."""
