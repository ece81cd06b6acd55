"""The operators that weights are prepared for and run with."""

from typing import final

import attrs

from .ops import AscendExtensionOps, AscendOps, load_ops


@final
@attrs.frozen(eq=False)
class AscendLibrary:
    """The operators of torch_npu, and those of sgl_kernel_npu where activations are to use them."""

    ops: AscendOps
    extension: AscendExtensionOps | None = None


def library_of(ops: AscendOps | None, extension: AscendExtensionOps | None) -> AscendLibrary:
    """Return the operators that are given, or else the installed ones. Raises: ImportError where torch_npu is not installed."""
    return AscendLibrary(load_ops() if ops is None else ops, extension)
