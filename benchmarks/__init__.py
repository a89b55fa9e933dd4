"""Benchmarks of lfdata and its peers, run by ``lfbench``; records lie in ``results/``.

May import everything; nothing imports this package. A benchmark is never a test.
"""
