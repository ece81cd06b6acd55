from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar, overload

from triton import JITFunction

_P = ParamSpec("_P")
_R = TypeVar("_R")

@overload
def jit(fn: Callable[_P, _R]) -> JITFunction[_P, _R]: ...
@overload
def jit(*, do_not_specialize: Sequence[str]) -> Callable[[Callable[_P, _R]], JITFunction[_P, _R]]: ...
