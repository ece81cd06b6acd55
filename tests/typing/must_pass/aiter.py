"""What AITER takes, in both checkers: each format with the payloads of its kernels, each input with its output."""

from typing import assert_type

from moe_typed import Experts, GateUp, MxFp4Layout, Routing, prepare_aiter, prepare_aiter_fnuz
from moe_typed.formats import (
    Bf16ExpertWeights,
    Bf16Rows,
    Fp8Block128ExpertWeights,
    Fp8Block128Rows,
    Fp8FnuzBlock128Rows,
    Interleaved,
    MxFp4ExpertWeights,
    MxFp8Rows,
    upscale_bf16,
)
from moe_typed.routing import LocalIds, to_sink
from moe_typed.runners import AiterRunner
from moe_typed.stages import (
    AiterSinkInput,
    AiterSlotInput,
    DeepEPNormalCombineInput,
    DeepEPNormalDispatchOutput,
    LiveRowsOutput,
    MoriEPNormalCombineInput,
    MoriEPNormalDispatchOutput,
    RouteRowsOutput,
    SummedRowsOutput,
)


def each_format_has_its_payloads(
    dense: Bf16ExpertWeights[Interleaved], block: Fp8Block128ExpertWeights[GateUp], mxfp4: MxFp4ExpertWeights[GateUp]
) -> None:
    assert_type(Experts(prepare_aiter(dense)), Experts[Bf16Rows])
    assert_type(Experts(prepare_aiter(block)), Experts[Bf16Rows | Fp8Block128Rows])
    assert_type(Experts(prepare_aiter_fnuz(block)), Experts[Bf16Rows | Fp8FnuzBlock128Rows])
    assert_type(Experts(prepare_aiter(mxfp4, layout=MxFp4Layout.A16W4)), Experts[Bf16Rows])
    assert_type(Experts(prepare_aiter(mxfp4, layout=MxFp4Layout.A8W4)), Experts[Bf16Rows | MxFp8Rows])


def each_dispatcher_gets_its_own_combine_input(
    mxfp4: MxFp4ExpertWeights[GateUp],
    from_mori: MoriEPNormalDispatchOutput[MxFp8Rows],
    from_deepep: DeepEPNormalDispatchOutput[Fp8Block128Rows],
) -> None:
    experts = Experts(prepare_aiter(mxfp4, layout=MxFp4Layout.A8W4))
    assert_type(experts(from_mori), MoriEPNormalCombineInput)
    assert_type(experts.accepting(upscale_bf16)(from_deepep), DeepEPNormalCombineInput)


def each_input_has_its_output(runner: AiterRunner, local: AiterSinkInput, slots: AiterSlotInput) -> None:
    assert_type(runner.run(local), SummedRowsOutput)
    assert_type(runner.run(slots), LiveRowsOutput)
    assert_type(runner.run_routes(local), RouteRowsOutput)
    assert_type(runner.run_routes(slots), RouteRowsOutput)


def the_sink_takes_the_routes_to_nowhere(rows: Bf16Rows, routing: Routing[LocalIds]) -> AiterSinkInput:
    return AiterSinkInput(rows, to_sink(routing), rows.data.dtype)
