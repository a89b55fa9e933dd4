"""How a step is computed: compiled blocks, a CUDA graph of the whole of it, frozen layers in fp8. They say when they cannot, and why.

May import options and errors only; what is captured is handed in.
"""
