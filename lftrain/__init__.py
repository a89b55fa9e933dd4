"""lftrain: the training runtime. Empty for now; it will import ``lfdata``, never the other way round."""
