"""Scripts that set up and look after the repository; not part of the package."""
