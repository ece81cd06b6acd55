from collections.abc import Callable

class CompiledKernel:
    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]: ...
