"""What every product asks of its operands."""

import torch
from torch import Tensor

from ..activation.spec import GROUP


def require_rows(rows: Tensor, rows_scale: Tensor | None, weights: Tensor) -> None:
    """Raise ValueError unless rows of the first product have the dtype and width of the weights, and for fp8 a scale for each 128 columns."""
    depth = weights.shape[2]
    if rows.dtype != weights.dtype or rows.shape[1] != depth:
        raise ValueError(f"rows are {rows.dtype} of width {rows.shape[1]}, but the weights take {weights.dtype} of width {depth}")
    _require_scale("rows", rows_scale, weights.dtype, (rows.shape[0], depth // GROUP))


def require_weights(weights: Tensor, weights_scale: Tensor | None, bias: Tensor | None) -> None:
    """Raise ValueError unless scales and biases fit the weights (experts, columns, depth), and all are contiguous and not too large."""
    experts, columns, depth = weights.shape
    if weights.dtype == torch.float8_e4m3fn and (columns % GROUP or depth % GROUP):
        raise ValueError(f"fp8 weights are {columns} x {depth}, and {GROUP} must divide both")
    if columns * depth >= 2**31:
        raise ValueError(f"weights of an expert are {columns} x {depth}, and places in them are counted in 32 bits")
    _require_scale("weights", weights_scale, weights.dtype, (experts, columns // GROUP, depth // GROUP))
    if bias is not None and bias.shape != (experts, columns):
        raise ValueError(f"bias is {list(bias.shape)}, expected {[experts, columns]}")
    if not all(tensor is None or tensor.is_contiguous() for tensor in (weights, weights_scale, bias)):
        raise ValueError("weights, scales and biases must be contiguous")


def _require_scale(name: str, scale: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    is_fp8 = dtype == torch.float8_e4m3fn
    if is_fp8 is (scale is None) or (scale is not None and (scale.shape != shape or not scale.is_contiguous())):
        found = "none" if scale is None else list(scale.shape)
        raise ValueError(f"scales of the {name}: {found}; {dtype} takes {list(shape) if is_fp8 else 'none'}, contiguous")
