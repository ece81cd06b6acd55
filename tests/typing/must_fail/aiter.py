"""Rows, ids, masks and weights that AITER would misread."""

import torch
from torch import Tensor

from moe_typed import (
    Bf16ExpertWeights,
    Bf16Rows,
    Experts,
    Fp8Block128Rows,
    GateUp,
    LocalIds,
    LocalSinkIds,
    MxFp4Layout,
    PhysicalIds,
    Routing,
    prepare_aiter,
)
from moe_typed.formats import Fp8ChannelExpertWeights, Fp8TensorExpertWeights, Fp32ExpertWeights, MxFp4ExpertWeights, MxFp8Rows
from moe_typed.routing import ExpertMask, SinkMask
from moe_typed.runners import AiterLibrary, AiterRunner, prepare_aiter_fnuz
from moe_typed.runners.aiter import AiterFp8TokenWeights
from moe_typed.stages import (
    AiterSinkInput,
    AiterSlotInput,
    DeepEPNormalDispatchOutput,
    FlatRowsInput,
    LiveRowsOutput,
    MoriEPNormalDispatchOutput,
    SummedRowsOutput,
)

BF16 = torch.bfloat16


def block_rows_into_mxfp4_weights(
    weights: MxFp4ExpertWeights[GateUp], library: AiterLibrary, rows: DeepEPNormalDispatchOutput[Fp8Block128Rows]
) -> None:
    experts = Experts(prepare_aiter(weights, library, layout=MxFp4Layout.A8W4))
    experts(rows)
    # E: Argument 1 to "__call__" of "ExpertStage" has incompatible type "DeepEPNormalDispatchOutput[Fp8Block128Rows]"
    # E: expected "DispatchOutput[Bf16Rows | MxFp8Rows, DeepEPNormalCombineInput]"
    # P: "DeepEPNormalDispatchOutput[Fp8Block128Rows]" cannot be assigned to parameter "dispatched" of type "DispatchOutput[Bf16Rows | MxFp8Rows,


def mxfp8_rows_into_the_layout_of_fp4_rows(weights: MxFp4ExpertWeights[GateUp], rows: MoriEPNormalDispatchOutput[MxFp8Rows]) -> None:
    experts = Experts(prepare_aiter(weights, layout=MxFp4Layout.A4W4))
    experts(rows)
    # E: Argument 1 to "__call__" of "ExpertStage" has incompatible type "MoriEPNormalDispatchOutput[MxFp8Rows]"
    # E: expected "DispatchOutput[Bf16Rows | MxFp4Rows, MoriEPNormalCombineInput]"
    # P: "MoriEPNormalDispatchOutput[MxFp8Rows]" cannot be assigned to parameter "dispatched" of type "DispatchOutput[Bf16Rows | MxFp4Rows,


def one_scale_for_all_rows_without_it(weights: Fp8TensorExpertWeights[GateUp]) -> None:
    prepare_aiter(weights)
    # E: No overload variant of "prepare_aiter" matches argument type "Fp8TensorExpertWeights[GateUp]"
    # P: No overloads for "prepare_aiter" match the provided arguments
    # P: Argument of type "Fp8TensorExpertWeights[GateUp]" cannot be assigned to parameter "weights"


def prepared_twice(weights: Bf16ExpertWeights[GateUp]) -> None:
    prepare_aiter(prepare_aiter(weights))
    # E: No overload variant of "prepare_aiter" matches argument type "AiterBf16Weights"
    # P: No overloads for "prepare_aiter" match the provided arguments
    # P: "AiterBf16Weights" cannot be assigned to parameter "weights"


def without_a_layout(weights: MxFp4ExpertWeights[GateUp]) -> None:
    prepare_aiter(weights)
    # E: No overload variant of "prepare_aiter" matches argument type "MxFp4ExpertWeights[GateUp]"
    # P: No overloads for "prepare_aiter" match the provided arguments
    # P: "MxFp4ExpertWeights[GateUp]" cannot be assigned to parameter "weights"


def weights_that_it_does_not_multiply(weights: Fp32ExpertWeights[GateUp]) -> None:
    prepare_aiter(weights)
    # E: No overload variant of "prepare_aiter" matches argument type "Fp32ExpertWeights[GateUp]"
    # P: No overloads for "prepare_aiter" match the provided arguments
    # P: "Fp32ExpertWeights[GateUp]" cannot be assigned to parameter "weights"


def the_fp8_of_another_device(weights: Fp8ChannelExpertWeights[GateUp]) -> AiterFp8TokenWeights:
    return prepare_aiter_fnuz(weights)
    # E: Incompatible return value type (got "AiterFp8FnuzTokenWeights", expected "AiterFp8TokenWeights")
    # P: Type "AiterFp8FnuzTokenWeights" is not assignable to return type "AiterFp8TokenWeights"


def ids_with_minus_one(rows: Bf16Rows, routing: Routing[LocalIds]) -> None:
    AiterSinkInput(rows, routing, BF16)
    # E: Argument 2 to "AiterSinkInput" has incompatible type "Routing[LocalIds, RoutedScaling]"; expected "Routing[LocalSinkIds, RoutedScaling]"
    # P: "Routing[LocalIds, RoutedScaling]" cannot be assigned to parameter "routing" of type "Routing[LocalSinkIds, RoutedScaling]"


def slots_as_local_ids(rows: Bf16Rows, routing: Routing[PhysicalIds]) -> None:
    AiterSinkInput(rows, routing, BF16)
    # E: Argument 2 to "AiterSinkInput" has incompatible type "Routing[PhysicalIds, RoutedScaling]"; expected "Routing[LocalSinkIds, RoutedScaling]"
    # P: "Routing[PhysicalIds, RoutedScaling]" cannot be assigned to parameter "routing" of type "Routing[LocalSinkIds, RoutedScaling]"


def local_ids_as_slots(rows: Bf16Rows, routing: Routing[LocalSinkIds], mask: ExpertMask[PhysicalIds]) -> None:
    AiterSlotInput(rows, routing, mask, BF16)
    # E: Argument 2 to "AiterSlotInput" has incompatible type "Routing[LocalSinkIds, RoutedScaling]"; expected "Routing[PhysicalIds, RoutedScaling]"
    # P: "Routing[LocalSinkIds, RoutedScaling]" cannot be assigned to parameter "routing" of type "Routing[PhysicalIds, RoutedScaling]"


def mask_of_another_id_space(rows: Bf16Rows, routing: Routing[PhysicalIds], mask: ExpertMask[LocalSinkIds]) -> None:
    AiterSlotInput(rows, routing, mask, BF16)
    # E: Argument 3 to "AiterSlotInput" has incompatible type "ExpertMask[LocalSinkIds]"; expected "ExpertMask[PhysicalIds]"
    # P: "ExpertMask[LocalSinkIds]" cannot be assigned to parameter "mask" of type "ExpertMask[PhysicalIds]"


def mask_of_the_sink(rows: Bf16Rows, routing: Routing[PhysicalIds], mask: SinkMask) -> None:
    AiterSlotInput(rows, routing, mask, BF16)
    # E: Argument 3 to "AiterSlotInput" has incompatible type "SinkMask"; expected "ExpertMask[PhysicalIds]"
    # P: "SinkMask" cannot be assigned to parameter "mask" of type "ExpertMask[PhysicalIds]"


def mask_that_is_a_tensor(rows: Bf16Rows, routing: Routing[PhysicalIds], mask: Tensor) -> None:
    AiterSlotInput(rows, routing, mask, BF16)
    # E: Argument 3 to "AiterSlotInput" has incompatible type "Tensor"; expected "ExpertMask[PhysicalIds]"
    # P: "Tensor" cannot be assigned to parameter "mask" of type "ExpertMask[PhysicalIds]"


def rows_of_another_runner(runner: AiterRunner, runner_input: FlatRowsInput) -> None:
    runner.run(runner_input)
    # E: No overload variant of "run" of "AiterRunner" matches argument type "FlatRowsInput"
    # P: No overloads for "run" match the provided arguments
    # P: "FlatRowsInput" cannot be assigned to parameter "runner_input"


def summed_where_only_live_rows_are(runner: AiterRunner, runner_input: AiterSlotInput) -> SummedRowsOutput:
    return runner.run(runner_input)
    # E: Incompatible return value type (got "LiveRowsOutput", expected "SummedRowsOutput")
    # P: Type "LiveRowsOutput" is not assignable to return type "SummedRowsOutput"


def live_rows_where_all_are_summed(runner: AiterRunner, runner_input: AiterSinkInput) -> LiveRowsOutput:
    return runner.run(runner_input)
    # E: Incompatible return value type (got "SummedRowsOutput", expected "LiveRowsOutput")
    # P: Type "SummedRowsOutput" is not assignable to return type "LiveRowsOutput"
