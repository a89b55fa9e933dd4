"""Ways to do a workload, one module each. A module imports its library when asked to prepare or load, never before.

What a module has is written down in :class:`benchmarks.harness.work.Subject`; subjects of one ``FORMAT`` share prepared files.
"""
