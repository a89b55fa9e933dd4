"""One verb of the command line a file; each has plain functions and a click ``command``."""
