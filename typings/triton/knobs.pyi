class _Runtime:
    interpret: bool

runtime: _Runtime
