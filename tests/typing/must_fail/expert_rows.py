"""Rows that lie by expert where other rows belong, and the reverse: what a runner takes in place is of one layout."""

from torch import Tensor

from moe_typed.formats import Bf16Rows, Payload
from moe_typed.runners.expert_rows import deepep_ll_in_place, deepep_v2_masked_in_place, nixl_in_place
from moe_typed.runners.posts import deepep_ll_post, deepep_normal_post, standard_post
from moe_typed.runners.reference import ReferenceRunner
from moe_typed.runners.triton.runner import TritonRunner
from moe_typed.stages import (
    DeepEPLLCombineInput,
    DeepEPLLDispatchOutput,
    DeepEPNormalCarry,
    DeepEPNormalCombineInput,
    DeepEPNormalDispatchOutput,
    DeepEPv2ExpandedDispatchOutput,
    FlatRowsInput,
    PaddedPrefixSum,
    ReceivedPerExpert,
    SegmentEnds,
    SegmentRowsInput,
    SlabRowsInput,
    StandardCarry,
    StandardCombineInput,
    SummedRowsOutput,
)
from moe_typed.table import Edge


def ends_are_no_counts(rows: Bf16Rows, ends: SegmentEnds) -> None:
    SlabRowsInput(rows, ends, 4, 8, 2)
    # E: Argument 2 to "SlabRowsInput" has incompatible type "SegmentEnds"; expected "ReceivedPerExpert"
    # P: "SegmentEnds" cannot be assigned to parameter "received" of type "ReceivedPerExpert"


def counts_are_no_ends(rows: Bf16Rows, counts: ReceivedPerExpert, weights: Tensor) -> None:
    SegmentRowsInput(rows, counts, weights, 2)
    # E: Argument 2 to "SegmentRowsInput" has incompatible type "ReceivedPerExpert"; expected "SegmentEnds"
    # P: "ReceivedPerExpert" cannot be assigned to parameter "segments" of type "SegmentEnds"


def padded_sums_are_no_ends(rows: Bf16Rows, sums: PaddedPrefixSum, weights: Tensor) -> None:
    SegmentRowsInput(rows, sums, weights, 2)
    # E: Argument 2 to "SegmentRowsInput" has incompatible type "PaddedPrefixSum"; expected "SegmentEnds"
    # P: "PaddedPrefixSum" cannot be assigned to parameter "segments" of type "SegmentEnds"


def a_slab_of_another_library(dispatched: DeepEPLLDispatchOutput[Bf16Rows]) -> None:
    nixl_in_place(dispatched)
    # E: Argument 1 to "nixl_in_place" has incompatible type "DeepEPLLDispatchOutput[Bf16Rows]"; expected "NixlDispatchOutput[Payload]"
    # P: "DeepEPLLDispatchOutput[Bf16Rows]" cannot be assigned to parameter "dispatched" of type "NixlDispatchOutput[Payload]"


def segments_that_end_where_the_host_knows(dispatched: DeepEPv2ExpandedDispatchOutput[Bf16Rows]) -> None:
    deepep_v2_masked_in_place(dispatched)
    # E: Argument 1 to "deepep_v2_masked_in_place" has incompatible type "DeepEPv2ExpandedDispatchOutput[Bf16Rows]"
    # P: "DeepEPv2ExpandedDispatchOutput[Bf16Rows]" cannot be assigned to parameter "dispatched"


def flat_rows_are_no_slab(dispatched: DeepEPNormalDispatchOutput[Bf16Rows]) -> None:
    deepep_ll_in_place(dispatched)
    # E: Argument 1 to "deepep_ll_in_place" has incompatible type "DeepEPNormalDispatchOutput[Bf16Rows]"; expected "DeepEPLLDispatchOutput[Payload]"
    # P: "DeepEPNormalDispatchOutput[Bf16Rows]" cannot be assigned to parameter "dispatched" of type "DeepEPLLDispatchOutput[Payload]"


def a_row_that_says_another_input() -> None:
    Edge(DeepEPLLDispatchOutput[Payload], DeepEPLLCombineInput, SegmentRowsInput).pre(deepep_ll_in_place).post(deepep_ll_post)
    # E: incompatible type "Callable[[DeepEPLLDispatchOutput[Payload]], tuple[SlabRowsInput, SlabCarry[DeepEPLLHandle]]]"
    # E: expected "Callable[[DeepEPLLDispatchOutput[Payload]], tuple[SegmentRowsInput, SlabCarry[DeepEPLLHandle]]]"
    # P: Type of "post" is partially unknown
    # P: "SlabRowsInput" is not assignable to "SegmentRowsInput"


def the_reference_takes_flat_rows_alone(runner: ReferenceRunner, runner_input: SlabRowsInput) -> None:
    runner.run(runner_input)
    # E: Argument 1 to "run" of "ReferenceRunner" has incompatible type "SlabRowsInput"; expected "FlatRowsInput"
    # P: "SlabRowsInput" cannot be assigned to parameter "runner_input" of type "FlatRowsInput"


def summed_where_only_live_rows_are(runner: TritonRunner, runner_input: SlabRowsInput) -> SummedRowsOutput:
    return runner.run(runner_input)
    # E: Incompatible return value type (got "LiveRowsOutput", expected "SummedRowsOutput")
    # P: Type "LiveRowsOutput" is not assignable to return type "SummedRowsOutput"


def live_rows_where_combine_reads_all(runner: TritonRunner, runner_input: SegmentRowsInput, carry: StandardCarry) -> StandardCombineInput:
    return standard_post(runner.run(runner_input), carry)
    # E: Argument 1 to "standard_post" has incompatible type "LiveRowsOutput"; expected "SummedRowsOutput"
    # P: "LiveRowsOutput" cannot be assigned to parameter "output" of type "SummedRowsOutput"


def undefined_rows_for_deepep(runner: TritonRunner, runner_input: SlabRowsInput, carry: DeepEPNormalCarry) -> DeepEPNormalCombineInput:
    return deepep_normal_post(runner.run(runner_input), carry)
    # E: Argument 1 to "deepep_normal_post" has incompatible type "LiveRowsOutput"; expected "SummedRowsOutput"
    # P: "LiveRowsOutput" cannot be assigned to parameter "output" of type "SummedRowsOutput"


def no_single_routes_of_a_slab(runner: TritonRunner, runner_input: SlabRowsInput) -> None:
    runner.run_routes(runner_input)
    # E: Argument 1 to "run_routes" of "TritonRunner" has incompatible type "SlabRowsInput"; expected "FlatRowsInput"
    # P: "SlabRowsInput" cannot be assigned to parameter "runner_input" of type "FlatRowsInput"


def flat_rows_as_segments(rows: Bf16Rows, runner_input: FlatRowsInput) -> SegmentRowsInput:
    return runner_input
    # E: Incompatible return value type (got "FlatRowsInput", expected "SegmentRowsInput")
    # P: Type "FlatRowsInput" is not assignable to return type "SegmentRowsInput"
