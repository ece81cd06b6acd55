"""Blocks of rows that lie by expert already: what align makes of routes, made of how many rows each expert has."""
