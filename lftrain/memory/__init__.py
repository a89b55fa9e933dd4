"""Memory of a step: which blocks keep their activations, and who owns what.

May import options and errors only.
"""
