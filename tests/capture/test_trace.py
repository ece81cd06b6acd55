"""A trace runs a layer as the layer runs itself, and names what crossed."""

import pytest
import torch

from moe_typed import Bf16ExpertWeights, Bf16Rows, Experts, GateUp, SoftmaxTopK, StandardDispatcher, prepare_reference, quantize_mxfp8, upscale_bf16
from moe_typed.capture import trace


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_trace_returns_the_output_of_the_layer(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weights = Bf16ExpertWeights(random(4, 128, 64).to(torch.bfloat16), random(4, 64, 64).to(torch.bfloat16), GateUp)
    layer = StandardDispatcher(quantize_mxfp8).then(Experts(prepare_reference(weights)).accepting(upscale_bf16))
    batch = Bf16Rows(random(rows, 64).to(torch.bfloat16))
    routing = SoftmaxTopK(2, renormalize=True).route(random(rows, 4))

    traced = trace(layer, batch, routing)

    assert torch.equal(traced.output, layer(batch, routing))
    assert [crossing.stage for crossing in traced.crossings] == ["model", "route", "dispatch", "upscale_bf16", "pre", "carry", "run", "post"]
    dispatched = traced.crossings[2]
    assert dispatched.boundary == "StandardDispatchOutput"
    assert dict(dispatched.tensors)["payload.scale"] == f"float8_e8m0fnu[{rows}, 2] cpu"
    assert [time.stage for time in traced.times] == ["dispatch", "upscale_bf16", "pre", "run", "post", "combine"]
    assert all(time.seconds >= 0 for time in traced.times)
