"""Append the shared experts' columns to a routing, and move its ids into a numbering that leaves room for them."""
