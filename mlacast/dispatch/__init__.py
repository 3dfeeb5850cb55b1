"""Which backend runs a call: features, a table of implementations, a pure selection."""
