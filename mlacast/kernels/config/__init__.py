"""Tile sizes and heuristics: pure functions of shape and device."""
