"""Kernels for Hopper (sm_90a): warp-specialised, wgmma."""
