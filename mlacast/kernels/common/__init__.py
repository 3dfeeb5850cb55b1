"""Device helpers shared by two or more kernels, and their host side."""
