"""Products that other libraries make, over our buffers as they are; one file per library."""
