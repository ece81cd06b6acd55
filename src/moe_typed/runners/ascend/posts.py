"""The ways home to the NPU's dispatchers. DeepEP combines bf16 alone, so results of another dtype are rounded to it here."""

import torch

from ...stages import (
    AscendTPCarry,
    AscendTPCombineInput,
    DeepEPLLNpuCarry,
    DeepEPLLNpuCombineInput,
    DeepEPNormalNpuCarry,
    DeepEPNormalNpuCombineInput,
    RowsOutput,
    SlicedRows,
    SlicedRowsOutput,
    SummandRows,
)


def ascend_tp_post(output: RowsOutput, carry: AscendTPCarry) -> AscendTPCombineInput:
    """Bring the results together with what dispatch knows; each row had one route with weight 1, so that its sum is its result."""
    results = SummandRows(output.hidden_states.to(carry.out_dtype))
    return AscendTPCombineInput(results, carry.groups, carry.index, carry.origin, carry.out_dtype, carry.handle)


def ascend_tp_sliced_post(output: SlicedRowsOutput, carry: AscendTPCarry) -> AscendTPCombineInput:
    """Do the same for this rank's columns of whole results: nothing will be summed over the ranks."""
    results = SlicedRows(output.hidden_states.to(carry.out_dtype), output.ranks)
    return AscendTPCombineInput(results, carry.groups, carry.index, carry.origin, carry.out_dtype, carry.handle)


def deepep_normal_npu_post(output: RowsOutput, carry: DeepEPNormalNpuCarry) -> DeepEPNormalNpuCombineInput:
    """Bring the results together with the handle, in which the router weights are."""
    return DeepEPNormalNpuCombineInput(output.hidden_states.to(torch.bfloat16), carry.scaling, carry.handle)


def deepep_ll_npu_post(output: RowsOutput, carry: DeepEPLLNpuCarry) -> DeepEPLLNpuCombineInput:
    """Bring the results together with this rank's routing."""
    return DeepEPLLNpuCombineInput(output.hidden_states.to(torch.bfloat16), carry.origin, carry.handle)
