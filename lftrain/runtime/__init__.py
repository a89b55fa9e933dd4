"""The loop and what one step does, precision, checkpoints, seeds, the environment.

May import comm, compute, memory, health, tune, options and errors; no model, and nothing that reads configurations.
"""
