"""What the wide kernel does with products before it writes them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..activation.spec import E4M3_MAX

_E4M3_MAX = gl.constexpr(E4M3_MAX)


@gluon.jit
def _of_both(amax: gl.tensor, amax_bufs: gl.tensor, told: gl.tensor, heard: gl.tensor, shared: gl.tensor, W: gl.constexpr) -> gl.tensor:
    """Return the larger of this warpgroup's and the other's; ``shared``: how often they have done that before."""
    mbarrier.wait(heard.index(W), (shared & 1) ^ 1)
    amax_bufs.index(W).store(amax)
    mbarrier.arrive(told.index(W), count=1)
    mbarrier.wait(told.index(1 - W), shared & 1)
    others = amax_bufs.index(1 - W).load(amax.type.layout)
    mbarrier.arrive(heard.index(1 - W), count=1)
    return gl.maximum(amax, others)


@gluon.jit
def activate(
    left: gl.tensor,
    right: gl.tensor,
    bias_ptr: gl.tensor | None,
    out_ptr: gl.tensor,
    out_scale_ptr: gl.tensor | None,
    amax_bufs: gl.tensor | None,  # None where this warpgroup has all columns
    told: gl.tensor | None,
    heard: gl.tensor | None,
    shared: gl.tensor,
    begin: gl.tensor,
    tile: gl.tensor,
    first_column: gl.tensor,
    expert: gl.tensor,
    padded: gl.tensor,
    alpha: gl.tensor,
    limit: gl.tensor,
    shift: gl.tensor,
    W: gl.constexpr,
    N: gl.constexpr,
    GATE: gl.constexpr,
    BESIDE: gl.constexpr,
    STEP: gl.constexpr,
    BLOCK_N: gl.constexpr,
) -> None:
    """Activate gate and up, quantise where there is a scale to write, and write."""
    COLUMNS: gl.constexpr = left.shape[1]
    VEC: gl.constexpr = 16 if out_scale_ptr is not None else 8
    stored: gl.constexpr = gl.BlockedLayout([1, VEC], [32 * VEC // COLUMNS, COLUMNS // VEC], [4, 1], [1, 0])
    column = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, left.type.layout))
    if bias_ptr is not None:
        left += gl.load(bias_ptr + expert * (2 * N) + GATE + STEP * column, mask=column < N, other=0.0).to(gl.float32)[None, :]
        right += gl.load(bias_ptr + expert * (2 * N) + BESIDE + STEP * column, mask=column < N, other=0.0).to(gl.float32)[None, :]
    gate = gl.where(left > limit, limit, left)  # comparisons, so that NaN stays NaN
    up = gl.where(right > limit, limit, gl.where(right < -limit, -limit, right))
    value = gate / (1.0 + gl.exp(-alpha * gate)) * (up + shift)
    if out_scale_ptr is not None:
        amax = gl.max(gl.where(value == value, gl.abs(value), float("inf")), 1)
        if amax_bufs is not None and told is not None and heard is not None:
            amax = _of_both(amax, amax_bufs, told, heard, shared, W)
        scale = amax / _E4M3_MAX
        scale = gl.where(scale == 0.0, 1.0, gl.where(amax == float("inf"), float("nan"), scale))
        if W == 0 or amax_bufs is None:
            row = gl.arange(0, 64, gl.SliceLayout(1, left.type.layout))
            gl.store(out_scale_ptr + tile.to(gl.int64) * padded + begin + row, scale)
        value = value / scale[:, None]
    out_row = gl.arange(0, 64, gl.SliceLayout(1, stored))
    out_column = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, stored))
    out = out_ptr + (begin + out_row).to(gl.int64)[:, None] * N + out_column[None, :]
    rounded = gl.convert_layout(value.to(out_ptr.dtype.element_ty), stored)
    if N % BLOCK_N == 0:
        gl.store(out, rounded)
    else:
        gl.store(out, rounded, mask=(out_column < N)[None, :])


@gluon.jit
def place(
    left: gl.tensor,
    right: gl.tensor,
    bias_ptr: gl.tensor | None,
    slots_ptr: gl.tensor,
    by_ptr: gl.tensor | None,
    out_ptr: gl.tensor,
    begin: gl.tensor,
    first_column: gl.tensor,
    expert: gl.tensor,
    routes: gl.tensor,
    N: gl.constexpr,
    APART: gl.constexpr,
) -> None:
    """Write each row's columns to its route, times its router weight if there is one.

    ``left`` are those from ``first_column`` on, and ``right`` those ``APART`` columns further.
    """
    COLUMNS: gl.constexpr = left.shape[1]
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    if bias_ptr is not None:
        column = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, left.type.layout))
        left += gl.load(bias_ptr + expert * N + column, mask=column < N, other=0.0).to(gl.float32)[None, :]
        right += gl.load(bias_ptr + expert * N + APART + column, mask=column + APART < N, other=0.0).to(gl.float32)[None, :]
    if by_ptr is not None:
        of_row = gl.load(slots_ptr + begin + gl.arange(0, 64, gl.SliceLayout(1, left.type.layout)))
        by = gl.load(by_ptr + of_row, mask=of_row < routes, other=0.0)
        left *= by[:, None]
        right *= by[:, None]
    route = gl.load(slots_ptr + begin + gl.arange(0, 64, gl.SliceLayout(1, stored)))
    is_route = (route < routes)[:, None]
    out_column = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, stored))
    to = out_ptr + route.to(gl.int64)[:, None] * N + out_column[None, :]
    gl.store(to, gl.convert_layout(left.to(out_ptr.dtype.element_ty), stored), mask=is_route & (out_column < N)[None, :])
    gl.store(to + APART, gl.convert_layout(right.to(out_ptr.dtype.element_ty), stored), mask=is_route & (out_column + APART < N)[None, :])
