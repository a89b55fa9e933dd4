"""What a run tells about itself: time by part of a step, records, the terminal, traces, and `lftrain doctor`.

May import options and errors only; it watches and never steers.
"""
