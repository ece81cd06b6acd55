"""Quantise rows: value = data * scale, with a scale for each group of a row, each row, or all."""
