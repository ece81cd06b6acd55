"""Which kernels multiply, and with which tiles."""
