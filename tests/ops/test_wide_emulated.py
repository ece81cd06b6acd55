"""The wide kernel where there is no GPU for it: what its warpgroups do, in which order, and what they wait for."""

from pathlib import Path
from typing import Final

import pytest
import torch
from torch import Tensor

import moe_typed.ops.wide_product
from moe_typed.ops.activation.spec import E4M3_MAX, GROUP, Gate, Split
from moe_typed.ops.align.reference import align
from moe_typed.ops.down_product import reference as down_reference
from moe_typed.ops.up_product import reference as up_reference
from tests.emulation.gluon import Descriptor, bring, gather, kernel
from tests.emulation.gluon_memory import Pointer

_ROOM: Final = Path(next(iter(moe_typed.ops.wide_product.__path__)))
_FILES: Final = [_ROOM / f"{name}.py" for name in ("schedule", "multiply", "finish", "produce", "consume", "kernel")]
_WIDE: Final = kernel("wide", _FILES, {"GROUP": GROUP, "E4M3_MAX": E4M3_MAX, "bring_piece": bring, "gather": gather})
NAN: Final = float("nan")
SILU, OAI = Gate(1.0, float("inf"), 0.0), Gate(1.702, 7.0, 1.0)


def _pointer(data: Tensor | None) -> Pointer | None:
    return None if data is None else Pointer(data.view(-1))


def run(
    programs: int,
    group: int,
    rows: Tensor,
    rows_scale: Tensor | None,
    weights: Tensor,
    weights_scale: Tensor | None,
    bias: Tensor | None,
    sorted_: tuple[Tensor, Tensor],
    by: Tensor | None,
    out: Tensor,
    out_scale: Tensor | None,
    routes: int,
    gate: Gate,
    up: tuple[int, Split] | None,
) -> None:
    """Run one product; ``up``: top-k and where gate and up lie, for the first."""
    depth = weights.shape[2]
    step = 128 // weights.element_size()
    top_k, split = up or (1, Split(0, 0, 1))
    columns = 128 * split.step if up else 256
    tensors = (
        None if up else Descriptor(rows, 64, step),
        _pointer(rows) if up else None,
        _pointer(rows_scale),
        Descriptor(weights.view(-1, depth), columns, step),
        *map(_pointer, (weights_scale, bias, *sorted_, by, out, out_scale)),
    )
    named: dict[str, object] = {
        "UP": up is not None,
        "FP8": rows_scale is not None,
        "TOP_K": top_k,
        "N": out.shape[1],
        "K": depth,
        "ROW_STRIDE": depth,
        "GATE": split.gate,
        "BESIDE": split.up,
        "STEP": split.step,
        "BLOCK_N": 128 if up else 256,
        "BLOCK_K": step,
        "STAGES": 4,
        "MULTIPLYING": 232,
        "COPYING": 40,
    }
    _WIDE(programs, (*tensors, routes, sorted_[1].shape[0], group, *gate), named)


def _distance(found: Tensor, wanted: Tensor) -> float:
    return float(((found.float() - wanted.float()).square().sum() / wanted.float().square().sum()).sqrt())


# One program has all turns; of 20, some have none, and those of the last turn have halves.
@pytest.mark.parametrize(("programs", "group"), [(1, 8), (20, 2)])
@pytest.mark.parametrize(
    ("dtype", "hidden", "inter", "split", "gate"),
    [
        (torch.bfloat16, 256, 128, Split(0, 128, 1), SILU),
        (torch.float16, 320, 192, Split(0, 1, 2), OAI),
        (torch.float8_e4m3fn, 256, 128, Split(0, 128, 1), SILU),
        (torch.float8_e4m3fn, 256, 256, Split(256, 0, 1), OAI),
    ],
)
def test_both_products(dtype: torch.dtype, hidden: int, inter: int, split: Split, gate: Gate, programs: int, group: int) -> None:
    generator = torch.Generator().manual_seed(programs)
    experts, count, top_k, is_fp8 = 3, 150, 2, dtype == torch.float8_e4m3fn

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    ids = torch.randint(-1, experts + 1, (count, top_k), generator=generator, dtype=torch.int32)
    ids[:90] = 1  # more than a block, so that some blocks are full and some are half empty
    routes = count * top_k
    rows, w13 = randn(count, hidden).to(dtype), randn(experts, 2 * inter, hidden).to(dtype)
    w2 = randn(experts, hidden, inter).to(dtype)
    kept = torch.bfloat16 if is_fp8 else dtype
    b13, b2, by = randn(experts, 2 * inter).to(kept), randn(experts, hidden).to(kept), randn(routes)
    rows_scale = s13 = s2 = inner_scale = None
    slots, block_expert = align(ids, None, experts, 128)
    inner = torch.full((slots.shape[0], inter), NAN).to(dtype)
    if is_fp8:
        rows_scale, s13, s2 = (
            (randn(*shape).abs() + 0.5) / hidden**0.5
            for shape in ((count, hidden // GROUP), (experts, 2 * inter // GROUP, hidden // GROUP), (experts, hidden // GROUP, inter // GROUP))
        )
        inner_scale = torch.full((inter // GROUP, slots.shape[0]), NAN)
    run(programs, group, rows, rows_scale, w13, s13, b13, (slots, block_expert), None, inner, inner_scale, routes, gate, (top_k, split))
    real = slots < routes
    route = slots[real].long()
    expert = ids.flatten()[route]
    wanted = up_reference.up_product(rows, rows_scale, w13, s13, b13, route // top_k, expert, split, gate)
    scale = None if inner_scale is None else inner_scale[:, real]
    found = inner[real].float() if scale is None else inner[real].float() * scale.T.repeat_interleave(GROUP, 1)
    assert _distance(found, wanted) < (0.04 if is_fp8 else 5e-3)

    out = torch.full((routes, hidden), NAN, dtype=kept)
    run(programs, group, inner, inner_scale, w2, s2, b2, (slots, block_expert), by, out, None, routes, SILU, None)
    wanted = down_reference.down_product(inner[real], scale, w2, s2, b2, expert) * by[route].unsqueeze(1)
    assert _distance(out[route], wanted) < 5e-3
    dropped = torch.ones(routes, dtype=torch.bool).index_fill(0, route, value=False)
    assert bool(out[dropped].isnan().all())
