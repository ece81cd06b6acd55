"""The second product in torch operations; float32 throughout."""

from torch import Tensor

from ..up_product.reference import products, scaled


def down_product(
    rows: Tensor, rows_scale: Tensor | None, weights: Tensor, weights_scale: Tensor | None, bias: Tensor | None, expert: Tensor
) -> Tensor:
    """Return (n, N): row i times the transposed weights (experts, N, K) of expert[i], plus its bias (experts, N).

    For float8_e4m3fn weights with float32 scales (experts, N / 128, K / 128); ``rows_scale`` is (K / 128, n), by column,
    or None for rows that are not quantised.
    """
    return products(scaled(rows, None if rows_scale is None else rows_scale.T, 1), weights, weights_scale, bias, expert)
