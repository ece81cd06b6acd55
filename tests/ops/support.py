"""The devices that kernels are tested on (the GPU where there is one, else Triton's interpreter), and tensors as lists."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import pytest
import torch
import triton
from packaging.version import Version

P = ParamSpec("P")
R = TypeVar("R")

_HAS_CUDA = torch.cuda.is_available()

# Relative error of a router weight. Before 3.9, Triton's interpreter rounds an fma twice, which loses what the kernels put back into an exponential.
WEIGHT_RTOL = 1e-6 if _HAS_CUDA or Version(triton.__version__) >= Version("3.9") else 1e-5

on_cuda = (pytest.mark.cuda, pytest.mark.skipif(not _HAS_CUDA, reason="needs a CUDA device"))
on_cpu = (pytest.mark.skipif(_HAS_CUDA, reason="kernels are compiled for the CUDA device, not interpreted"),)

devices = pytest.mark.parametrize("device", [pytest.param("cpu", marks=on_cpu), pytest.param("cuda", marks=on_cuda)])


def dtypes(*names: str) -> pytest.MarkDecorator:
    """Parametrise over (device, dtype). The interpreter multiplies bf16 and rounds to bf16 and fp8 wrongly, so those need the GPU."""
    interpreted = [name for name in names if name in ("float32", "float16")]
    cases = [("cpu", name, on_cpu) for name in interpreted] + [("cuda", name, on_cuda) for name in names]
    return pytest.mark.parametrize(("device", "dtype"), [pytest.param(device, getattr(torch, name), marks=marks) for device, name, marks in cases])


def ints(tensor: torch.Tensor) -> list[int]:
    """Return a vector as a list."""
    return [int(value) for value in tensor.cpu().unbind()]


def int_rows(tensor: torch.Tensor) -> list[list[int]]:
    """Return a matrix as a list of rows."""
    return [ints(row) for row in tensor.unbind()]


def floats(tensor: torch.Tensor) -> list[float]:
    """Return a vector as a list."""
    return [float(value) for value in tensor.cpu().unbind()]


def in_one_graph(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function as torch.compile traces it, without a break; Triton's interpreter runs under it, too."""
    return torch.compile(function, fullgraph=True, backend="aot_eager")  # pyright: ignore[reportUnknownMemberType]
