"""What the library is called with: exactly the contract, by version, with nothing made anew that does not change."""

import inspect
from collections.abc import Callable
from typing import cast, final

import attrs
import pytest
import torch
from torch import Tensor

from moe_typed import DeviceCount, SwigluOai, UnsupportedError
from moe_typed.formats import (
    Bf16ExpertWeights,
    Bf16Rows,
    Fp8TensorExpertWeights,
    Fp8TensorRows,
    Fp8TokenRows,
    MxFp8Rows,
    Payload,
    ScaledRows,
    head,
)
from moe_typed.runners.aiter import AiterLibrary, AiterOptions, FusedMoe, prepare_aiter
from moe_typed.stages import RouteRowsOutput
from tests.emulation.aiter.library import VersionName
from tests.ops.support import ints
from tests.runners.aiter.support import (
    HIDDEN,
    OAI,
    SILU,
    SLOTS,
    Form,
    L,
    distance,
    localized,
    make_library,
    make_rows,
    make_runner,
    make_weights,
    prepare,
    random_ids,
    reference,
    sink_input,
    slot_input,
    static_scales,
)


@final
class Recorder:
    """The emulated library with a list of what it was called with."""

    def __init__(self, version: VersionName = "later") -> None:
        library, _ = make_library(version)
        self.calls: list[dict[str, object]] = []
        inner: Callable[..., Tensor] = library.fused_moe

        def fused_moe(hidden_states: Tensor, **arguments: object) -> Tensor:
            self.calls.append({"hidden_states": hidden_states, **arguments})
            return inner(hidden_states, **arguments)

        self.library: AiterLibrary = attrs.evolve(library, fused_moe=cast("FusedMoe", fused_moe))

    def tensor(self, name: str) -> Tensor:
        found = self.calls[-1][name]
        assert isinstance(found, Tensor)
        return found


def run_sink(recorder: Recorder, form: Form, payload: type[Payload] = Bf16Rows, rows: int = 5) -> Payload:
    data, ids = make_rows(payload, rows), random_ids(rows, L)
    ids[0] = -1
    make_runner(form, make_weights(form), recorder.library).run(sink_input(data, ids, form))
    return data


@pytest.mark.parametrize("version", ["0.1.7", "head", "later", "no_combine"])
def test_each_version_is_given_parameters_that_it_has(version: VersionName) -> None:
    recorder = Recorder(version)
    run_sink(recorder, "a4w4")
    _, emulated = make_library(version)
    given = recorder.calls[-1].keys()
    assert given <= inspect.signature(emulated.fused_moe).parameters.keys()
    assert ("gate_mode" in given) == (version != "0.1.7")
    assert not {"swiglu_limit", "output", "no_combine", "quant_dtype_a", "splitk"} & given


def test_ids_weights_mask_and_dtype_are_what_the_library_reads() -> None:
    recorder = Recorder()
    run_sink(recorder, "bf16")
    assert recorder.tensor("topk_ids").dtype == torch.int32
    assert ints(recorder.tensor("topk_ids")[0]) == [L, L, L]
    assert recorder.tensor("topk_weight").dtype == torch.float32
    mask = recorder.tensor("expert_mask")
    assert (mask.dtype, ints(mask)) == (torch.int32, [1] * L + [0])
    assert recorder.calls[-1]["num_local_tokens"] is None
    assert recorder.calls[-1]["dtype"] is torch.bfloat16
    assert recorder.calls[-1]["a1_scale"] is None


def test_slots_bring_their_own_mask_and_the_count_of_the_device() -> None:
    recorder, data, ids = Recorder(), make_rows(Bf16Rows, 5), random_ids(5, SLOTS)
    count = torch.tensor([3], dtype=torch.int32)
    runner_input = slot_input(data, ids, DeviceCount(count), torch.bfloat16)
    make_runner("bf16", make_weights("bf16"), recorder.library).run(runner_input)
    assert recorder.tensor("expert_mask") is runner_input.mask.mask
    assert recorder.tensor("num_local_tokens") is count
    assert recorder.tensor("topk_ids") is ids


def test_nothing_that_does_not_change_is_made_anew() -> None:
    recorder = Recorder()
    weights = make_weights("a8w4", biased=True)
    runner = make_runner("a8w4", weights, recorder.library)
    for _ in range(2):
        runner.run(sink_input(make_rows(Bf16Rows, 5), random_ids(5, L), "a8w4"))
    first, second = recorder.calls
    assert first.keys() == second.keys()
    changed = {name for name, value in first.items() if value is not second[name]}
    assert changed <= {"hidden_states", "topk_weight", "topk_ids"}


@pytest.mark.parametrize("form", ["bf16", "fp8-channel", "a4w4", "a16w4", "a8w4", "mxfp8"])
def test_the_weights_are_marked_on_the_tensors_that_are_given(form: Form) -> None:
    recorder = Recorder()
    run_sink(recorder, form)
    assert all(vars(recorder.tensor(name)) == {"is_shuffled": True} for name in ("w1", "w2"))


@pytest.mark.parametrize(("form", "gate_mode"), [("a4w4", "separated"), ("a16w4", "separated"), ("a8w4", "interleave"), ("mxfp8", "interleave")])
def test_the_gate_mode_is_that_of_the_shuffle(form: Form, gate_mode: str) -> None:
    recorder = Recorder("head")
    run_sink(recorder, form)
    assert recorder.calls[-1]["gate_mode"] == gate_mode


def test_fp8_rows_are_asked_for_where_they_can_be() -> None:
    later, head = Recorder(), Recorder("head")
    for recorder in (later, head):
        run_sink(recorder, "a8w4")
    assert later.calls[-1]["quant_dtype_a"] is torch.float8_e4m3fn
    assert "quant_dtype_a" not in head.calls[-1]


@pytest.mark.parametrize(("form", "payload"), [("mxfp8", MxFp8Rows), ("a8w4", MxFp8Rows)])
def test_scales_of_microscaled_rows_are_handed_over_as_they_are(form: Form, payload: type[Payload]) -> None:
    recorder = Recorder()
    data = run_sink(recorder, form, payload)
    assert isinstance(data, ScaledRows)
    assert recorder.tensor("a1_scale") is data.scale
    assert recorder.tensor("hidden_states") is data.data


def test_scales_of_tokens_are_a_column_of_the_same_memory() -> None:
    recorder = Recorder()
    data = run_sink(recorder, "fp8-channel", Fp8TokenRows)
    assert isinstance(data, Fp8TokenRows)
    scale = recorder.tensor("a1_scale")
    assert (scale.shape, scale.data_ptr()) == ((5, 1), data.scale.data_ptr())


def test_the_scale_that_comes_with_the_rows_wins_over_the_static_one() -> None:
    recorder, weights = Recorder(), make_weights("fp8-tensor")
    assert isinstance(weights, Fp8TensorExpertWeights)
    static = static_scales(0.01, 0.02)
    runner = prepare_aiter(weights, recorder.library, static=static).runner(SILU)
    assert static.w13_input is not None
    data = make_rows(Fp8TensorRows, 5)
    assert isinstance(data, Fp8TensorRows)
    for rows, scale in ((make_rows(Bf16Rows, 5), static.w13_input.factor), (data, data.scale)):
        runner.run(sink_input(rows, random_ids(5, L), "fp8-tensor"))
        assert recorder.tensor("a1_scale") is scale
        assert recorder.tensor("a2_scale") is static.w2_input.factor


def test_options_are_passed_on() -> None:
    recorder = Recorder()
    weights = make_weights("bf16", hidden=HIDDEN)
    weights.w13[:, :, -64:] = 0
    prepare("bf16", weights, recorder.library, AiterOptions(doweight_stage1=True, hidden_pad=64)).runner(SILU).run(
        sink_input(make_rows(Bf16Rows, 2), random_ids(2, L), "bf16")
    )
    assert [recorder.calls[-1][name] for name in ("doweight_stage1", "hidden_pad", "intermediate_pad")] == [True, 64, 0]


def test_biases_are_float32() -> None:
    recorder, weights = Recorder(), make_weights("a8w4", biased=True)
    make_runner("a8w4", weights, recorder.library).run(sink_input(make_rows(Bf16Rows, 2), random_ids(2, L), "a8w4"))
    assert weights.b13 is not None
    assert torch.equal(recorder.tensor("bias1"), weights.b13.float())
    assert recorder.tensor("bias2").dtype == torch.float32


@pytest.mark.parametrize(("limit", "given"), [(7.0, None), (3.0, 3.0)])
def test_a_limit_is_given_where_it_is_not_the_kernels_own(limit: float, given: float | None) -> None:
    recorder, weights, ids = Recorder(), make_weights("a8w4"), random_ids(5, L)
    activation, data = SwigluOai(limit=limit), make_rows(Bf16Rows, 5)
    runner_input = sink_input(data, ids, "a8w4")
    found = prepare("a8w4", weights, recorder.library).runner(activation).run(runner_input).hidden_states
    assert recorder.calls[-1].get("swiglu_limit") == given
    assert distance(found, reference(data, ids, runner_input.routing.topk_weights, weights, activation)) < 0.15


def test_strided_rows_are_made_contiguous() -> None:
    recorder, data, ids = Recorder(), make_rows(Bf16Rows, 6), random_ids(6, L)
    strided = Bf16Rows(data.data.T.contiguous().T)
    weights = make_weights("bf16")
    runner_input = sink_input(strided, ids.T.contiguous().T, "bf16")
    routing = attrs.evolve(runner_input.routing, topk_weights=runner_input.routing.topk_weights.T.contiguous().T)
    found = make_runner("bf16", weights, recorder.library).run(attrs.evolve(runner_input, routing=routing)).hidden_states
    assert all(recorder.tensor(name).is_contiguous() for name in ("hidden_states", "topk_ids", "topk_weight"))
    assert distance(found, reference(data, ids, runner_input.routing.topk_weights, weights, SILU)) < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("form", "payload"), [("bf16", Bf16Rows), ("fp8-channel", Fp8TokenRows), ("mxfp8", MxFp8Rows)])
def test_no_rows_do_not_reach_the_library(form: Form, payload: type[Payload], dtype: torch.dtype) -> None:
    recorder = Recorder()
    runner = make_runner(form, make_weights(form), recorder.library)
    data = make_rows(payload, 1)
    empty = head(data, 0)
    ids = torch.empty(0, 3, dtype=torch.int32)
    results = (runner.run(attrs.evolve(sink_input(empty, ids, form), out_dtype=dtype)), runner.run(slot_input(empty, ids, 0, dtype)))
    assert [(result.hidden_states.dtype, tuple(result.hidden_states.shape)) for result in results] == [(dtype, (0, HIDDEN))] * 2
    assert recorder.calls == []


# ---- where to write ------------------------------------------------------------------------------------------------------------------------


def test_the_result_is_written_where_it_is_wanted_if_the_library_can() -> None:
    recorder, data, ids = Recorder(), make_rows(Bf16Rows, 5), random_ids(5, SLOTS)
    weights, output = make_weights("bf16"), torch.full((5, HIDDEN), 9.0, dtype=torch.bfloat16)
    runner_input = slot_input(data, ids, 5, torch.bfloat16, output)
    found = make_runner("bf16", weights, recorder.library).run(runner_input).hidden_states
    assert found.data_ptr() == output.data_ptr()
    assert distance(output, reference(data, localized(ids), runner_input.routing.topk_weights, weights, SILU)) < 0.02


def test_where_it_cannot_the_result_is_fresh() -> None:
    recorder, data, ids = Recorder("head"), make_rows(Bf16Rows, 5), random_ids(5, SLOTS)
    output = torch.full((5, HIDDEN), 9.0, dtype=torch.bfloat16)
    assert not recorder.library.facts.takes("output")
    found = make_runner("bf16", make_weights("bf16"), recorder.library).run(slot_input(data, ids, 5, torch.bfloat16, output)).hidden_states
    assert found.data_ptr() != output.data_ptr()
    assert bool((output == 9.0).all())


# ---- single routes ---------------------------------------------------------------------------------------------------------------------------


def test_single_routes_have_their_weights_pending() -> None:
    recorder, data, ids = Recorder("no_combine"), make_rows(Bf16Rows, 5), random_ids(5, SLOTS)
    weights, local = make_weights("bf16"), localized(ids)
    output = make_runner("bf16", weights, recorder.library).run_routes(slot_input(data, ids, 5, torch.bfloat16))
    assert isinstance(output, RouteRowsOutput)
    assert output.hidden_states.shape == (5, 3, HIDDEN)
    for column in range(3):
        here = local[:, column] >= 0
        expected = reference(data, local[:, column : column + 1], torch.ones(5, 1), weights, SILU)
        assert distance(output.hidden_states[here, column], expected[here]) < 0.02
    empty = make_runner("bf16", weights, recorder.library).run_routes(sink_input(Bf16Rows(torch.empty(0, HIDDEN).bfloat16()), ids[:0], "bf16"))
    assert empty.hidden_states.shape == (0, 3, HIDDEN)


@pytest.mark.parametrize(
    ("version", "form", "options", "fragment"),
    [
        ("later", "bf16", AiterOptions(), "fused_moe of AITER later has no no_combine"),
        ("no_combine", "a4w4", AiterOptions(), "with bf16 weights alone"),
        ("no_combine", "fp16", AiterOptions(), "with bf16 weights alone"),
        ("no_combine", "bf16", AiterOptions(doweight_stage1=True), "doweight_stage1 applies them"),
    ],
)
def test_single_routes_are_refused_where_they_cannot_be_had(version: VersionName, form: Form, options: AiterOptions, fragment: str) -> None:
    recorder = Recorder(version)
    runner = make_runner(form, make_weights(form), recorder.library, options)
    with pytest.raises(UnsupportedError, match=fragment):
        runner.run_routes(sink_input(make_rows(runner.dense.payload, 2), random_ids(2, L), form))
    assert recorder.calls == []


def test_single_routes_come_in_bf16() -> None:
    recorder, weights = Recorder("no_combine"), make_weights("bf16")
    assert isinstance(weights, Bf16ExpertWeights)
    runner_input = attrs.evolve(sink_input(make_rows(Bf16Rows, 2), random_ids(2, L), "bf16"), out_dtype=torch.float16)
    with pytest.raises(UnsupportedError, match=r"in bf16 alone; torch\.float16"):
        prepare_aiter(weights, recorder.library).runner(OAI).run_routes(runner_input)
