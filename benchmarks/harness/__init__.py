"""The harness behind ``lfbench run``: see docs/benchmarks.md."""
