"""A tensor of a module as it was when a layer was made of it."""

from typing import final

import attrs
import torch
from torch import Tensor


@final
@attrs.frozen(eq=False)
class Seen:
    """A tensor as it was when a layer was prepared of it.

    ``address``: None for a tensor that has none, as in the transforms of torch.func: it is never taken for another. ``kept``: its memory, where a
    copy was made of it: nothing else can then come to lie there.
    """

    name: str
    tensor: Tensor
    address: int | None
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    version: int | None
    with_grad: bool
    kept: Tensor | None

    def same_memory(self, now: Tensor) -> bool:
        """Say whether ``now`` lies where this tensor lay, as it lay."""
        if self.address is None or _address(now) != self.address or (now is not self.tensor and _address(self.tensor) != self.address):
            return False
        return self.lies_so(now)

    def lies_so(self, now: Tensor) -> bool:
        """Say whether ``now`` has the dtype, strides and shape that this tensor had."""
        return now.dtype is self.dtype and now.stride() == self.strides and now.shape == self.shape


def see(name: str, tensor: Tensor, *, copied: bool) -> Seen:
    """Return a tensor as it is now. ``copied``: whether a copy was made of it."""
    shape, strides, kept = tensor.shape, tensor.stride(), tensor.detach() if copied else None
    return Seen(name, tensor, _address(tensor), tensor.dtype, shape, strides, version_of(tensor), tensor.requires_grad, kept)


def _address(tensor: Tensor) -> int | None:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a tensor that stands for others has no memory of its own
        return None


def version_of(tensor: Tensor) -> int | None:
    """Return how often a tensor was written in place; None for inference tensors, which do not count."""
    return None if tensor.is_inference() else tensor._version  # noqa: SLF001  torch has no other name for it
