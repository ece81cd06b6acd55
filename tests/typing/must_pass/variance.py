"""What may stand for what."""

from typing import assert_type

from moe_typed import (
    Bf16Rows,
    CombineInput,
    Conversion,
    DispatchOutput,
    Experts,
    ExpertStage,
    Fp8Block128Rows,
    LocalIds,
    MxFp8Rows,
    Payload,
    Pending,
    Routing,
    Settled,
    StandardCombineInput,
    StandardDispatchOutput,
)
from moe_typed.formats import AnyDenseRows, Bf16ExpertWeights, ExpertWeights, GateUp, GateUpOrder, ScaledRows
from moe_typed.routing import Ids, RoutedScaling
from moe_typed.runners import PreparedWeights, ReferenceFp8Block128Weights, ReferenceRunner, Runner
from moe_typed.runners.flat_rows import standard_pre
from moe_typed.runners.posts import standard_post
from moe_typed.stages import FlatRowsInput, RunnerOutput, StandardCarry, SummedRowsOutput
from moe_typed.table import Edge, HalfEdge, Transition


def dispatch_outputs_are_covariant(dispatched: StandardDispatchOutput[Fp8Block128Rows]) -> DispatchOutput[Payload, CombineInput]:
    wider: StandardDispatchOutput[Fp8Block128Rows | MxFp8Rows] = dispatched
    base: StandardDispatchOutput[ScaledRows] = wider
    return base


def experts_are_contravariant(experts: Experts[Bf16Rows | Fp8Block128Rows]) -> ExpertStage[Bf16Rows]:
    narrower: Experts[Fp8Block128Rows] = experts
    assert_type(narrower.accepts, tuple[type[Payload], ...])
    return experts


def accept_sets_are_contravariant(weights: ReferenceFp8Block128Weights) -> PreparedWeights[ReferenceRunner, Bf16Rows]:
    narrower: PreparedWeights[ReferenceRunner, Fp8Block128Rows] = weights
    wider_runner: PreparedWeights[Runner[FlatRowsInput, RunnerOutput], Fp8Block128Rows] = narrower
    assert_type(wider_runner.accepts(), tuple[type[Payload], ...])
    return weights


def conversions_go_both_ways(conversion: Conversion[AnyDenseRows, MxFp8Rows]) -> Conversion[Bf16Rows, ScaledRows]:
    return conversion


def routing_forgets(routing: Routing[LocalIds, Settled], pending: Routing[LocalIds, Pending]) -> tuple[Routing[LocalIds], Routing[Ids]]:
    return pending, routing


def scaling_defaults_to_any_state(routing: Routing[LocalIds]) -> None:
    assert_type(routing, Routing[LocalIds, RoutedScaling])
    assert_type(routing.scaling, RoutedScaling)


def orders_forget(weights: Bf16ExpertWeights[GateUp]) -> ExpertWeights[GateUpOrder]:
    same: Bf16ExpertWeights[GateUpOrder] = weights
    return same


def a_row(runner: ReferenceRunner, dispatched: StandardDispatchOutput[Bf16Rows]) -> None:
    edge = Edge(StandardDispatchOutput[Payload], StandardCombineInput, FlatRowsInput)
    assert_type(edge, Edge[StandardDispatchOutput[Payload], StandardCombineInput, FlatRowsInput])
    half = edge.pre(standard_pre)
    assert_type(half, HalfEdge[StandardDispatchOutput[Payload], StandardCombineInput, FlatRowsInput, StandardCarry])
    row = half.post(standard_post)
    assert_type(row, Transition[StandardDispatchOutput[Payload], StandardCombineInput, FlatRowsInput, StandardCarry, SummedRowsOutput])
    assert_type(row.using(runner)(dispatched), StandardCombineInput)
