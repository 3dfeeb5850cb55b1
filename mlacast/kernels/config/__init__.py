"""Tile sizes and heuristics: pure functions of shapes and of numbers read off the device."""
