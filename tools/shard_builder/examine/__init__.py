"""Looking at finished shards: what ``inspect``, ``show``, ``verify`` and ``stats`` are made of.

Reads data sets through lfdata's reader, never writes to one. May import lfdata and :mod:`shard_builder.report`; knows nothing
of sources or
of how shards are made.
"""
