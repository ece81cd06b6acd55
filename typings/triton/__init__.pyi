from collections.abc import Callable, Sequence
from typing import Generic, ParamSpec, Protocol, TypeVar, overload

import torch

from . import knobs as knobs
from . import language as language
from .compiler import CompiledKernel
from .experimental.gluon.nvidia.hopper import TensorDescriptor

_P = ParamSpec("_P")
_R_co = TypeVar("_R_co", covariant=True)

class Launch(Protocol):
    def __call__(
        self,
        *args: torch.Tensor | TensorDescriptor | float | None,
        num_warps: int = ...,
        num_stages: int = ...,
        maxnreg: int = ...,
        **constexprs: torch.Tensor | float | None,
    ) -> CompiledKernel | None: ...

class JITFunction(Generic[_P, _R_co]):
    def __getitem__(self, grid: tuple[int, ...]) -> Launch: ...
    def warmup(
        self,
        *args: torch.Tensor | TensorDescriptor | float | None,
        grid: tuple[int, ...],
        num_warps: int = ...,
        num_stages: int = ...,
        **constexprs: torch.Tensor | float | None,
    ) -> CompiledKernel | None: ...
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R_co: ...

@overload
def jit(fn: Callable[_P, _R_co]) -> JITFunction[_P, _R_co]: ...
@overload
def jit(*, do_not_specialize: Sequence[str]) -> Callable[[Callable[_P, _R_co]], JITFunction[_P, _R_co]]: ...
def cdiv(x: int, y: int) -> int: ...
def next_power_of_2(n: int) -> int: ...

__version__: str
