"""Numbers of a byte or less: rounding to them, and reading them. The kernels' halves are functions that other kernels call."""
