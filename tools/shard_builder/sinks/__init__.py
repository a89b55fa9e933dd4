"""Where samples go: one module a format, behind ``base``. Exports read shards and write files of other formats.

Sinks may import ``lfdata`` and ``shard_builder.operations``; they know nothing of sources, of conversion or of the command line.
"""
