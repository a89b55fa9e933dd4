"""Training on several GPUs of one machine: ``python -m benchmarks.gpu.many --data FOLDER --output FILE.json`` (docs/benchmarks.md).

``__main__`` starts ranks (``launch``), which run ``rank``; one module a part (``order``, ``rates``, ``feeding``, ``overlap``, ``faults``) has
what ranks do and what is concluded from it.
"""
