"""Bytes on disk: layout, durable files, shard writer and reader, manifest, consolidated index.

May import ``lfdata.errors`` and nothing else of this project. Knows nothing of codecs: a payload is bytes.
"""
