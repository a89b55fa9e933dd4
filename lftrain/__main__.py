"""``python -m lftrain``, which torchrun needs."""

from lftrain.cli import main

main()
