"""Ways to do a workload, one module each. A module imports its library when asked to prepare or load, never before.

A module has ``TITLE``, ``IMPORTS`` (modules it needs), ``FORMAT`` (subjects of one format share prepared files), ``WORKLOADS``,
``workers(workload, cores)`` (counts to sweep), ``prepare(workload, source, target)`` and ``batches(workload, prepared, settings)``.
"""
