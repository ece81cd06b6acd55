"""Launches without the work that Triton does before each: it looks at every argument to find the variant to run.

That takes longer than a small kernel runs. A Launcher is told which arguments can make another variant, and when it has met them before, it calls the
compiled kernel itself.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor
from triton import JITFunction
from triton.compiler import CompiledKernel

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_ALIGNMENT = 16  # bytes; Triton compiles another variant for a pointer that is no multiple of it


@final
class Launcher:
    """A jitted kernel whose parameters are tensors or their descriptors, then scalars under ``do_not_specialize``, then constants."""

    def __init__(self, kernel: "JITFunction[..., None]") -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[object, ...], CompiledKernel] = {}

    def __call__(
        self,
        programs: int,
        tensors: Sequence["Tensor | TensorDescriptor | None"],
        scalars: Sequence[float],
        constants: Mapping[str, int],
        *,
        num_warps: int,
        num_stages: int = 3,
        **options: int,
    ) -> None:
        """Launch ``programs`` programs on the device of the tensors, the first of which is there. Integers fit 32 bits.

        ``options`` are Triton's, and the same for the same constants. Over tensors on the meta device, which have no memory, it compiles for the
        current device and launches nothing.
        """
        device = -1
        bits = 0
        key: list[object] = [num_warps, num_stages]
        for tensor in tensors:
            if tensor is None:
                key.append(None)
            else:
                base = tensor if isinstance(tensor, Tensor) else tensor.base
                device = base.get_device()
                bits |= base.data_ptr()
                key.append(base.dtype)
        variant = (device, bits % _ALIGNMENT == 0, *key, *constants.values())
        with torch.cuda.device(device):  # Triton launches on the current device; for CPU tensors this does nothing
            compiled = self._compiled.get(variant)
            if compiled is not None:
                compiled[programs, 1, 1](*tensors, *scalars, *constants.values())
                return
            first = tensors[0]
            if isinstance(first, Tensor) and first.is_meta:
                grid = (programs,)
                self._kernel.warmup(*tensors, *scalars, grid=grid, **constants, num_warps=num_warps, num_stages=num_stages, **options)
                return
            compiled = self._kernel[programs,](*tensors, *scalars, **constants, num_warps=num_warps, num_stages=num_stages, **options)
            # Which of several pointers is not aligned makes different variants; those, and what is interpreted, stay Triton's to find.
            if compiled is not None and variant[1]:
                self._compiled[variant] = compiled
