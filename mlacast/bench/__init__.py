"""Benchmarks: cases with their targets, a correctness gate, timing protocols, roofs, one report.

``mlacast bench`` and ``benchmarks/run.py`` run what is registered here. Nothing else of the package
imports it.
"""
