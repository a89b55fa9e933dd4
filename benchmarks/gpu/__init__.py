"""What only a GPU shows: how it is fed (``python -m benchmarks.gpu.feed``), and what it trains in how many milliseconds (``.ladder``)."""
