"""From the order to batches in reserved memory. See docs/loader.md; the public class is :class:`lfdata.Loader`."""
