"""From ids over all experts to those over the experts here: a route to any other, or of a padding row, becomes -1."""
