"""From the NPU's dispatch outputs to runners: the pre functions of their rows of the table. Rows stay where they are."""

import torch

from ...formats import Payload
from ...routing import LocalIds, Routing, Settled
from ...stages import (
    AnyGroupList,
    AscendRowsInput,
    AscendSlicedRowsInput,
    AscendTPCarry,
    AscendTPDispatchOutput,
    DeepEPLLNpuCarry,
    DeepEPLLNpuDispatchOutput,
    DeepEPNormalNpuCarry,
    DeepEPNormalNpuDispatchOutput,
    FlatRowsInput,
)


def ascend_tp_pre(dispatched: AscendTPDispatchOutput[Payload]) -> tuple[AscendRowsInput, AscendTPCarry]:
    """Hand the rows over as they are."""
    return AscendRowsInput(dispatched.payload, dispatched.groups, dispatched.out_dtype), dispatched.carry


def ascend_tp_sliced_pre(dispatched: AscendTPDispatchOutput[Payload]) -> tuple[AscendSlicedRowsInput, AscendTPCarry]:
    """Hand the rows over as they are: every rank has sorted the same tokens alike."""
    return AscendSlicedRowsInput(dispatched.payload, dispatched.groups, dispatched.out_dtype), dispatched.carry


def deepep_normal_npu_pre(dispatched: DeepEPNormalNpuDispatchOutput[Payload]) -> tuple[AscendRowsInput, DeepEPNormalNpuCarry]:
    """Hand the rows over as they are."""
    runner_input = AscendRowsInput(dispatched.payload, dispatched.groups, dispatched.out_dtype)
    return runner_input, DeepEPNormalNpuCarry(dispatched.scaling, dispatched.handle)


def deepep_ll_npu_pre(dispatched: DeepEPLLNpuDispatchOutput[Payload]) -> tuple[AscendRowsInput, DeepEPLLNpuCarry]:
    """Hand the rows over as they are; the runner leaves undefined ones undefined."""
    runner_input = AscendRowsInput(dispatched.payload, dispatched.groups, dispatched.out_dtype)
    return runner_input, DeepEPLLNpuCarry(dispatched.origin, dispatched.handle)


def ascend_tp_flat_pre(dispatched: AscendTPDispatchOutput[Payload]) -> tuple[FlatRowsInput, AscendTPCarry]:
    """Give each row its one route, to the expert that it was sorted to, with weight 1: combine applies the router's."""
    return FlatRowsInput(dispatched.payload, unit_routing(dispatched.payload, dispatched.groups)), dispatched.carry


def deepep_normal_npu_flat_pre(dispatched: DeepEPNormalNpuDispatchOutput[Payload]) -> tuple[FlatRowsInput, DeepEPNormalNpuCarry]:
    """Do as for AscendTP; undefined rows go nowhere."""
    runner_input = FlatRowsInput(dispatched.payload, unit_routing(dispatched.payload, dispatched.groups))
    return runner_input, DeepEPNormalNpuCarry(dispatched.scaling, dispatched.handle)


def deepep_ll_npu_flat_pre(dispatched: DeepEPLLNpuDispatchOutput[Payload]) -> tuple[FlatRowsInput, DeepEPLLNpuCarry]:
    """Do as for AscendTP; undefined rows go nowhere."""
    runner_input = FlatRowsInput(dispatched.payload, unit_routing(dispatched.payload, dispatched.groups))
    return runner_input, DeepEPLLNpuCarry(dispatched.origin, dispatched.handle)


def unit_routing(payload: Payload, groups: AnyGroupList) -> Routing[LocalIds]:
    """Return the route of each sorted row to its expert, with weight 1; -1 for undefined rows."""
    ids = groups.experts_of_rows(payload.rows).unsqueeze(1)
    weights = torch.ones(ids.shape, dtype=torch.float32, device=ids.device)
    return Routing(ids, weights, LocalIds, groups.num_groups, Settled(), False, ids.shape[0])
