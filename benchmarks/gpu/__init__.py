"""Measurements that need a GPU: ``python -m benchmarks.gpu.feed``. Over lfdata and lftrain; nothing imports them."""
