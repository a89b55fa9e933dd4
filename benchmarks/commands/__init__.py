"""One workload a file, each with a click ``command``; file names end in an underscore so that none hides a built-in module."""
