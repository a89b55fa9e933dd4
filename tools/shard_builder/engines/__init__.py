"""Ways to run the tasks of a conversion elsewhere than in this process. May import ``convert`` and ``finish``; only ``verbs`` imports it."""
