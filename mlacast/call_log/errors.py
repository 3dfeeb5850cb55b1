"""The error of a dump that cannot be read or replayed."""

from __future__ import annotations


class DumpError(ValueError):
    """A dump is damaged, was edited, or holds something that cannot be rebuilt."""
