"""Which devices, and which Triton, the kernels need. Importing this does not import Triton."""

from typing import Final

TRITON_CAPABILITY: Final = (8, 0)
"""Ampere: the first that Triton compiles for (its README), and the first with bfloat16."""

FP8_CAPABILITY: Final = (8, 9)
"""Ada: the first with an e4m3 matrix instruction (CUDA programming guide, arithmetic by compute capability)."""

_HOPPER_TRITON: Final = (3, 6)  # the first with the gluon that the kernels for Hopper are written in; it is experimental, and changes


def hopper_fault(version: str) -> str:
    """Return why a version of Triton does not compile the wide and the streaming kernel; empty where it does."""
    if tuple(int(part) for part in version.split(".")[:2]) >= _HOPPER_TRITON:
        return ""
    return f"the wide and the streaming kernel need Triton 3.6 or later; this is {version}"
