"""Products of rows, sorted by expert, with the weights of their experts."""
