"""How a step is computed: compiled blocks, and a CUDA graph of the whole of it. Both say when they cannot, and why.

May import options and errors only; what is captured is handed in.
"""
