"""Kernels in Gluon, one folder per architecture."""
