"""Operators that torch.compile does not look into, with the types of their functions kept, and the guard that every launch needs."""

from collections.abc import Callable
from functools import wraps
from typing import Final, ParamSpec, Protocol, cast

import torch
from torch import Tensor

P = ParamSpec("P")


class _Library(Protocol):
    """What is asked of torch.library.Library, which has no types."""

    def define(self, schema: str) -> str: ...
    def impl(self, op_name: str, fn: Callable[P, None], dispatch_key: str) -> None: ...


class _Module(Protocol):
    """What is asked of torch.library, whose types are partly unknown."""

    def Library(self, ns: str, kind: str) -> _Library: ...  # noqa: N802
    def infer_schema(self, prototype_function: Callable[P, None], /, *, mutates_args: tuple[str, ...]) -> str: ...
    def register_fake(self, op: str, func: Callable[..., None], /, *, lib: _Library) -> object: ...


_TORCH: Final = cast("_Module", torch.library)
_LIBRARY: Final = _TORCH.Library("moe_typed", "FRAGMENT")
_DEVICES: Final = ("CPU", "CUDA")  # torch's names of what the kernels run on; ROCm is CUDA to torch


def custom_op(name: str, *, writes: tuple[str, ...]) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Register a function as the operator ``moe_typed::name``, which torch.compile does not look into, and which writes to the named arguments.

    Such a function allocates nothing and returns nothing, and torch.compile plans the memory. It has no gradient. Outside torch.compile the function
    is called as it is: torch's dispatcher would cost as much host time as the launch. It is not torch.library.custom_op, whose layers around each
    call take ten times as long as the dispatcher.
    """

    def register(function: Callable[P, None]) -> Callable[P, None]:
        _LIBRARY.define(name + _TORCH.infer_schema(function, mutates_args=writes))
        for device in _DEVICES:
            _LIBRARY.impl(name, function, device)
        _TORCH.register_fake(f"moe_typed::{name}", _nothing, lib=_LIBRARY)
        op = cast("Callable[P, None]", getattr(torch.ops.moe_typed, name).default)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> None:
            (op if torch.compiler.is_compiling() else function)(*args, **kwargs)

        return call

    return register


def _nothing(*_args: object, **_kwargs: object) -> None:
    """Stand for an operator where there is no data: it has nothing to return."""


def device_of(tensor: Tensor) -> torch.cuda.device:
    """Return a context in which Triton, which launches on the current device, launches on the tensor's; it does nothing for a CPU tensor."""
    return torch.cuda.device(tensor.get_device())
