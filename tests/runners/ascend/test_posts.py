"""The ways home to DeepEP on the NPU, which combines bf16 alone."""

import torch

from moe_typed import PhysicalIds
from moe_typed.routing import Routing, Settled
from moe_typed.runners.ascend.posts import deepep_ll_npu_post, deepep_normal_npu_post
from moe_typed.stages import DeepEPLLNpuCarry, DeepEPLLNpuHandle, DeepEPNormalNpuCarry, DeepEPNormalNpuHandle, LiveRowsOutput

OUTPUT = LiveRowsOutput(torch.ones(2, 8))


def test_results_in_float32_are_rounded_to_bf16() -> None:
    normal, low_latency = DeepEPNormalNpuHandle(None, OUTPUT), DeepEPLLNpuHandle(None, OUTPUT)
    origin = Routing(torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1), PhysicalIds, 2, Settled(), True, 2)
    assert deepep_normal_npu_post(OUTPUT, DeepEPNormalNpuCarry(Settled(), normal)).hidden_states.dtype == torch.bfloat16
    assert deepep_ll_npu_post(OUTPUT, DeepEPLLNpuCarry(origin, low_latency)).hidden_states.dtype == torch.bfloat16
    for handle in (normal, low_latency):
        handle.discard("the test ends")
