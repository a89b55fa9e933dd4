"""What ranks do together: the process group, agreement on small facts, DDP and its hooks, the checksum, who is alive.

May import options and errors; knows nothing of models, loaders or records.
"""
