"""Calls drawn at random, each compared with float64, on the CPU and on a GPU."""
