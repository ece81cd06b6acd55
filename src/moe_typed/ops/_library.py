"""torch.library.custom_op with the types of the function kept, and the guard that every launch needs."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, cast

import torch
from torch import Tensor

P = ParamSpec("P")


def custom_op(name: str, *, writes: tuple[str, ...]) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Register a function as the operator ``moe_typed::name``, which torch.compile does not look into, and which writes to the named arguments.

    Such a function allocates nothing and returns nothing. So it needs no second implementation for shapes, and torch.compile plans the memory.
    Outside torch.compile the function is called as it is: torch's dispatcher would cost as much host time as the launch.
    """

    def register(function: Callable[P, None]) -> Callable[P, None]:
        op = cast("Callable[P, None]", torch.library.custom_op(f"moe_typed::{name}", function, mutates_args=writes))

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> None:
            (op if torch.compiler.is_compiling() else function)(*args, **kwargs)

        return call

    return register


def device_of(tensor: Tensor) -> torch.cuda.device:
    """Return a context in which Triton, which launches on the current device, launches on the tensor's; it does nothing for a CPU tensor."""
    return torch.cuda.device(tensor.get_device())
