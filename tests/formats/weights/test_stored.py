"""Weights as they are stored elsewhere, with the reduction first or without a gate: they mean what the plain classes mean."""

import pytest
import torch
from torch import Tensor

from moe_typed import BoundaryError, Fp32ExpertWeights, GateUp, Interleaved, debug
from moe_typed.formats import (
    Bf16TransposedExpertWeights,
    Bf16UngatedExpertWeights,
    ExpertWeights,
    Fp16TransposedExpertWeights,
    Fp16UngatedExpertWeights,
    Fp32TransposedExpertWeights,
    Fp32UngatedExpertWeights,
    GateUpOrder,
    Ungated,
    UpGate,
    shard_inter,
)
from moe_typed.runners import Relu2, SiluAndMul, UnsupportedError, prepare_reference, reference_experts
from moe_typed.runners.activations import Activation

EXPERTS, HIDDEN, INTER, ROWS, RANKS = 3, 6, 8, 5, 2
Transposed = type[Bf16TransposedExpertWeights[GateUpOrder] | Fp16TransposedExpertWeights[GateUpOrder] | Fp32TransposedExpertWeights[GateUpOrder]]
TRANSPOSED: dict[torch.dtype, Transposed] = {
    torch.bfloat16: Bf16TransposedExpertWeights,
    torch.float16: Fp16TransposedExpertWeights,
    torch.float32: Fp32TransposedExpertWeights,
}
UNGATED = {torch.bfloat16: Bf16UngatedExpertWeights, torch.float16: Fp16UngatedExpertWeights, torch.float32: Fp32UngatedExpertWeights}
every_dtype = pytest.mark.parametrize("dtype", TRANSPOSED, ids=str)
every_order = pytest.mark.parametrize("order", [GateUp, UpGate, Interleaved], ids=lambda order: order.__name__)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def transposed(order: type[GateUpOrder], dtype: torch.dtype = torch.float32) -> ExpertWeights[GateUpOrder]:
    w13, w2 = randn(EXPERTS, HIDDEN, 2 * INTER, seed=0, dtype=dtype), randn(EXPERTS, INTER, HIDDEN, seed=1, dtype=dtype)
    return TRANSPOSED[dtype](w13, w2, order, randn(EXPERTS, 2 * INTER, seed=2, dtype=dtype), randn(EXPERTS, HIDDEN, seed=3, dtype=dtype))


def ungated(dtype: torch.dtype = torch.float32) -> ExpertWeights[Ungated]:
    w13, w2 = randn(EXPERTS, INTER, HIDDEN, seed=0, dtype=dtype), randn(EXPERTS, HIDDEN, INTER, seed=1, dtype=dtype)
    return UNGATED[dtype](w13, w2, Ungated, randn(EXPERTS, INTER, seed=2, dtype=dtype), randn(EXPERTS, HIDDEN, seed=3, dtype=dtype))


def run(weights: ExpertWeights[GateUpOrder], activation: Activation) -> Tensor:
    ids = torch.tensor([[0, 2], [1, -1], [2, 1], [-1, -1], [0, 1]], dtype=torch.int32)
    return reference_experts(randn(ROWS, HIDDEN, seed=4), ids, randn(ROWS, 2, seed=5), weights, activation)


@every_dtype
@every_order
def test_transposed_weights_are_the_transposed_of_plain_ones(order: type[GateUpOrder], dtype: torch.dtype) -> None:
    stored = transposed(order, dtype)
    plain = Fp32ExpertWeights(
        stored.w13.mT.float().contiguous(),
        stored.w2.mT.float().contiguous(),
        order,
        None if stored.b13 is None else stored.b13.float(),
        None if stored.b2 is None else stored.b2.float(),
    )
    assert (stored.hidden, stored.inter, stored.num_experts) == (HIDDEN, INTER, EXPERTS)
    torch.testing.assert_close(run(stored, SiluAndMul()), run(plain, SiluAndMul()))


@every_dtype
def test_experts_without_a_gate_square_what_is_positive(dtype: torch.dtype) -> None:
    stored = ungated(dtype)
    assert (stored.hidden, stored.inter, stored.num_experts) == (HIDDEN, INTER, EXPERTS)
    rows, total = randn(ROWS, HIDDEN, seed=4), run(stored, Relu2())
    assert stored.b13 is not None
    assert stored.b2 is not None
    inner = (stored.w13[1].float() @ rows[1] + stored.b13[1].float()).clamp(min=0) ** 2
    expected = randn(ROWS, 2, seed=5)[1, 0] * (stored.w2[1].float() @ inner + stored.b2[1].float())
    torch.testing.assert_close(total[1], expected)


@pytest.mark.parametrize(
    ("weights", "activation"), [(transposed(Interleaved), SiluAndMul()), (transposed(UpGate), SiluAndMul()), (ungated(), Relu2())]
)
def test_parts_of_the_width_add_up(weights: ExpertWeights[GateUpOrder], activation: Activation) -> None:
    whole = run(weights, activation)
    parts = [run(shard_inter(weights, rank, RANKS), activation) for rank in range(RANKS)]
    torch.testing.assert_close(torch.stack(parts).sum(0), whole, rtol=1e-4, atol=1e-4)


def test_rows_that_do_not_fit_the_class_are_refused() -> None:
    with debug("layout"), pytest.raises(BoundaryError, match="w13"):
        Fp32UngatedExpertWeights(randn(EXPERTS, 2 * INTER, HIDDEN, seed=0), randn(EXPERTS, HIDDEN, INTER, seed=1), Ungated)
    with debug("layout"), pytest.raises(BoundaryError):
        Fp32TransposedExpertWeights(randn(EXPERTS, 2 * INTER, HIDDEN, seed=0), randn(EXPERTS, INTER, HIDDEN, seed=1), GateUp)


def test_an_activation_of_another_order_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="'relu2' does not take rows in the order 'gate, then up'"):
        prepare_reference(Fp32TransposedExpertWeights(randn(1, 4, 8, seed=0), randn(1, 4, 4, seed=1), GateUp)).runner(Relu2())
    with pytest.raises(UnsupportedError, match="'silu' does not take rows in the order 'no gate'"):
        prepare_reference(Fp32UngatedExpertWeights(randn(1, 4, 4, seed=0), randn(1, 4, 4, seed=1), Ungated)).runner(SiluAndMul())


def test_what_has_no_gate_cannot_be_split() -> None:
    with pytest.raises(TypeError, match="no gate"):
        Ungated.split(torch.ones(4), 0)
    with pytest.raises(TypeError, match="no gate"):
        Ungated.join(torch.ones(4), torch.ones(4), 0)
