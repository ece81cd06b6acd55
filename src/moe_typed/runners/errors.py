"""What runners and plans raise where types and layouts are right, and there is no way all the same."""


class UnsupportedError(ValueError):
    """Say that a combination is well typed but cannot be run, and why."""
