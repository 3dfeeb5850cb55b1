"""Device kernels. Imported on use, never by ``import mlacast``."""
