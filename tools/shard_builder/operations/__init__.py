"""Verbs that make something new from finished data sets: merge, split, filter, fields added beside, salvage, reports.

Nothing here changes a shard that exists. May import ``lfdata``, ``shard_builder.sources`` and the parts that conversion shares; knows
nothing of the command line. docs/operations.md has the rules.
"""
