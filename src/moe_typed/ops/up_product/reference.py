"""The first product in torch operations; float32 throughout."""

import torch
from torch import Tensor

from ..activation.reference import activate
from ..activation.spec import GROUP, Gate, Split


def up_product(
    rows: Tensor,
    rows_scale: Tensor | None,
    weights: Tensor,
    weights_scale: Tensor | None,
    bias: Tensor | None,
    source: Tensor,
    expert: Tensor,
    split: Split,
    gate: Gate,
) -> Tensor:
    """Return (n, inter): the activated rows of gate and up of row source[i] times the transposed weights of expert[i], plus its bias.

    ``rows`` (rows, K) and ``weights`` (experts, 2 * inter, K), both of one dtype; for float8_e4m3fn with float32 scales (rows, K / 128) and
    (experts, 2 * inter / 128, K / 128). ``bias``: (experts, 2 * inter).
    """
    return activate(products(scaled(rows, rows_scale, 1)[source.long()], weights, weights_scale, bias, expert), split, gate)


def products(rows: Tensor, weights: Tensor, scale: Tensor | None, bias: Tensor | None, expert: Tensor) -> Tensor:
    """Return (n, N): row i times the transposed weights of expert[i], plus its bias."""
    out = rows.new_zeros(rows.shape[0], weights.shape[1])
    for row, chosen in enumerate(int(one) for one in expert):
        out[row] = scaled(weights[chosen], None if scale is None else scale[chosen], GROUP) @ rows[row]
        if bias is not None:
            out[row] += bias[chosen].to(torch.float32)
    return out


def scaled(data: Tensor, scale: Tensor | None, block_rows: int) -> Tensor:
    """Return data in float32, times the scale of each block of ``block_rows`` rows by 128 columns."""
    values = data.to(torch.float32)
    return values if scale is None else values * scale.repeat_interleave(block_rows, 0).repeat_interleave(GROUP, 1)
