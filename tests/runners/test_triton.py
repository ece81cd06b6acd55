import subprocess
import sys
from collections.abc import Callable
from typing import cast

import pytest
import torch
from triton import knobs
from typing_extensions import override

from moe_typed import (
    Bf16ExpertWeights,
    Bf16Rows,
    DeviceCount,
    Experts,
    Fp8Block128ExpertWeights,
    Fp8Block128Rows,
    Fp16ExpertWeights,
    Fp16Rows,
    Fp32ExpertWeights,
    Fp32Rows,
    GateUp,
    Interleaved,
    LocalIds,
    Payload,
    Routing,
    Settled,
    SiluAndMul,
    StandardDispatchOutput,
    SwigluOai,
    UnsupportedError,
    UpGate,
    quantize_fp8_block128,
)
from moe_typed.formats import GateUpOrder
from moe_typed.runners import Activation, reference_experts
from moe_typed.runners.triton import TritonExpertWeights, TritonRunner, prepare_triton
from moe_typed.stages import FlatRowsInput
from tests.ops.support import ints, on_cpu, on_cuda

NAN = float("nan")
SILU = SiluAndMul()
HIDDEN, INTER = (256, 128) if torch.cuda.is_available() else (64, 32)  # fp8 needs multiples of 128; the interpreter takes its time

# Per row, |found - reference| / |reference|: rounding of the results and of two steps between (bf16 keeps 8 bits, fp16 11 but the interpreter
# accumulates in it), and for fp8 that of the activations to e4m3 (4 bits).
TOLERANCE = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 1.5e-2, "fp8-block128": 8e-2}
DTYPE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8-block128": torch.bfloat16}

_TARGETS = [("cpu", "fp32", on_cpu), ("cpu", "fp16", on_cpu)] + [("cuda", name, on_cuda) for name in TOLERANCE]
targets = pytest.mark.parametrize(("device", "fmt"), [pytest.param(device, name, marks=marks) for device, name, marks in _TARGETS])
one_target_a_device = pytest.mark.parametrize(
    ("device", "fmt"),
    [pytest.param("cpu", "fp32", marks=on_cpu), pytest.param("cuda", "bf16", marks=on_cuda), pytest.param("cuda", "fp8-block128", marks=on_cuda)],
)


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_weights(
    fmt: str,
    device: str,
    experts: int,
    order: type[GateUpOrder] = GateUp,
    *,
    hidden: int = HIDDEN,
    inter: int = INTER,
    biased: bool = False,
) -> TritonExpertWeights:
    w13, w2 = randn(1, experts, 2 * inter, hidden) / hidden**0.5, randn(2, experts, hidden, inter) / inter**0.5
    b13, b2 = (randn(3, experts, 2 * inter).to(device), randn(4, experts, hidden).to(device)) if biased else (None, None)

    def bias(dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return None if b13 is None else b13.to(dtype), None if b2 is None else b2.to(dtype)

    w13, w2 = w13.to(device), w2.to(device)
    match fmt:
        case "fp32":
            return Fp32ExpertWeights(w13, w2, order, b13, b2)
        case "fp16":
            return Fp16ExpertWeights(w13.half(), w2.half(), order, *bias(torch.float16))
        case "bf16":
            return Bf16ExpertWeights(w13.bfloat16(), w2.bfloat16(), order, *bias(torch.bfloat16))
        case _:
            s13 = (randn(5, experts, 2 * (inter // 128), hidden // 128).abs() + 0.5).to(device)
            s2 = (randn(6, experts, hidden // 128, inter // 128).abs() + 0.5).to(device)
            fp8 = torch.float8_e4m3fn
            return Fp8Block128ExpertWeights(w13.to(fp8), w2.to(fp8), s13, s2, order, *bias(torch.bfloat16))


def make_payload(fmt: str, data: torch.Tensor) -> Payload:
    match fmt:
        case "fp32":
            return Fp32Rows(data)
        case "fp16":
            return Fp16Rows(data.half())
        case "bf16":
            return Bf16Rows(data.bfloat16())
        case _:
            return quantize_fp8_block128.run(Fp32Rows(data))


def make_runner(weights: TritonExpertWeights, activation: Activation) -> TritonRunner:
    match weights:
        case Bf16ExpertWeights():
            return prepare_triton(weights).runner(activation)
        case Fp16ExpertWeights():
            return prepare_triton(weights).runner(activation)
        case Fp32ExpertWeights():
            return prepare_triton(weights).runner(activation)
        case Fp8Block128ExpertWeights():
            return prepare_triton(weights).runner(activation)


def make_routing(ids: torch.Tensor, experts: int, live: int | DeviceCount | None = None) -> Routing[LocalIds]:
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(8)).to(ids.device) + 0.1
    return Routing(ids.to(torch.int32), weights, LocalIds, experts, Settled(), False, ids.shape[0] if live is None else live)


def random_ids(rows: int, k: int, experts: int) -> torch.Tensor:
    return torch.rand(rows, experts, generator=torch.Generator().manual_seed(rows)).argsort(1)[:, :k]


def row_norms(rows: torch.Tensor) -> torch.Tensor:
    return rows.square().sum(1).sqrt()


def check(
    payload: Payload, routing: Routing[LocalIds], weights: TritonExpertWeights, fmt: str, activation: Activation = SILU, live: int | None = None
) -> None:
    """Run, compare the live rows with the reference, and demand zeros elsewhere."""
    found = make_runner(weights, activation).run(FlatRowsInput(payload, routing)).hidden_states
    assert found.dtype == DTYPE[fmt]
    assert found.shape == payload.data.shape
    live = found.shape[0] if live is None else live
    expected = reference_experts(payload.dequantize()[:live], routing.topk_ids[:live], routing.topk_weights[:live], weights, activation)
    error, norm = row_norms(found[:live].float() - expected), row_norms(expected)
    assert bool((error <= TOLERANCE[fmt] * norm).all()), f"largest error of a row: {float((error / norm).nan_to_num().max()):.2e}"
    assert not bool(found[live:].any())


# ---- what is computed -----------------------------------------------------------------------------------------------------------


@targets
@pytest.mark.parametrize("rows", [0, 1, 5, 64, 300])
def test_matches_the_reference(device: str, fmt: str, rows: int) -> None:
    weights = make_weights(fmt, device, 4)
    check(make_payload(fmt, randn(rows, rows, HIDDEN).to(device)), make_routing(random_ids(rows, 2, 4).to(device), 4), weights, fmt)


@targets
@pytest.mark.parametrize("order", [GateUp, UpGate, Interleaved])
@pytest.mark.parametrize("activation", [SiluAndMul(), SwigluOai(), SwigluOai(alpha=1.0, limit=0.5)])
@pytest.mark.parametrize("biased", [False, True])
def test_orders_activations_and_biases(device: str, fmt: str, order: type[GateUpOrder], activation: Activation, biased: bool) -> None:
    weights = make_weights(fmt, device, 3, order, biased=biased)
    check(make_payload(fmt, randn(9, 7, HIDDEN).to(device)), make_routing(random_ids(7, 2, 3).to(device), 3), weights, fmt, activation)


ROUTINGS = {
    "all rows to one expert": (4, torch.full((20, 1), 2)),
    "experts without rows": (7, torch.tensor([[1, 5], [5, 1], [1, 6]])),
    "routes to nowhere": (4, torch.tensor([[-1, 2], [-1, -1], [3, -1], [0, 1]])),
    "ids beyond the experts": (4, torch.tensor([[4, 2], [1000, 2**31 - 1], [3, -(2**31)], [0, 1]])),
    "no route at all": (4, torch.full((5, 2), -1)),
    "the same expert twice": (4, torch.tensor([[1, 1], [2, 2], [0, 3]])),
    "every expert": (5, random_ids(9, 5, 5)),
    "one expert": (1, torch.zeros(5, 1, dtype=torch.int64)),
    "more experts than routes": (33, random_ids(3, 2, 33)),
    "no columns": (4, torch.zeros(3, 0, dtype=torch.int64)),
}


@one_target_a_device
@pytest.mark.parametrize(("experts", "ids"), ROUTINGS.values(), ids=ROUTINGS.keys())
def test_routings(device: str, fmt: str, experts: int, ids: torch.Tensor) -> None:
    weights = make_weights(fmt, device, experts, biased=True)
    check(make_payload(fmt, randn(4, ids.shape[0], HIDDEN).to(device)), make_routing(ids.to(device), experts), weights, fmt)


@pytest.mark.parametrize(("device", "fmt"), [pytest.param("cpu", "fp32", marks=on_cpu), pytest.param("cuda", "bf16", marks=on_cuda)])
@pytest.mark.parametrize(("hidden", "inter"), [(72, 40), (200, 136), (33, 17)])
def test_widths_that_no_tile_divides(device: str, fmt: str, hidden: int, inter: int) -> None:
    weights = make_weights(fmt, device, 3, hidden=hidden, inter=inter, biased=True)
    check(make_payload(fmt, randn(5, 11, hidden).to(device)), make_routing(random_ids(11, 2, 3).to(device), 3), weights, fmt)


@pytest.mark.parametrize(("device", "fmt"), [pytest.param("cuda", name, marks=on_cuda) for name in TOLERANCE])
@pytest.mark.parametrize("rows", [1, 33, 1000])
def test_a_layer_of_a_real_size(device: str, fmt: str, rows: int) -> None:
    weights = make_weights(fmt, device, 16, hidden=2048, inter=768)
    check(make_payload(fmt, randn(6, rows, 2048).to(device)), make_routing(random_ids(rows, 4, 16).to(device), 16), weights, fmt)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
def test_weights_with_more_than_2_to_31_entries(device: str) -> None:
    experts, hidden, inter = 9, 16384, 8192
    w13 = torch.empty(experts, 2 * inter, hidden, dtype=torch.bfloat16, device=device).normal_(std=hidden**-0.5)
    w2 = torch.empty(experts, hidden, inter, dtype=torch.bfloat16, device=device).normal_(std=inter**-0.5)
    assert w13.numel() > 2**31
    payload = make_payload("bf16", randn(1, 2, hidden).to(device))
    check(payload, make_routing(torch.tensor([[8], [0]], device=device), experts), Bf16ExpertWeights(w13, w2, GateUp), "bf16")


# ---- what must not leak ---------------------------------------------------------------------------------------------------------


@one_target_a_device
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("live", [0, 3, 8])
def test_rows_beyond_the_live_count_are_never_read(device: str, fmt: str, live: int, on_device: bool) -> None:
    weights = make_weights(fmt, device, 4, biased=True)
    data = randn(2, 8, HIDDEN).to(device)
    data[live:] = NAN
    count = DeviceCount(torch.tensor([live], dtype=torch.int32, device=device)) if on_device else live
    routing = make_routing(random_ids(8, 2, 4).to(device), 4, count)
    routing.topk_weights[live:] = NAN
    check(make_payload(fmt, data), routing, weights, fmt, live=live)


@one_target_a_device
def test_nan_in_one_row_stays_in_that_row(device: str, fmt: str) -> None:
    weights = make_weights(fmt, device, 2)
    data = randn(2, 40, HIDDEN).to(device)
    routing = make_routing(random_ids(40, 1, 2).to(device), 2)
    clean = make_runner(weights, SILU).run(FlatRowsInput(make_payload(fmt, data), routing)).hidden_states
    data[7, 50] = NAN
    found = make_runner(weights, SILU).run(FlatRowsInput(make_payload(fmt, data), routing)).hidden_states
    assert bool(torch.isnan(found[7]).all())
    others = [row for row in range(40) if row != 7]
    assert torch.equal(found[others], clean[others])


@one_target_a_device
def test_nan_in_an_expert_stays_with_its_rows(device: str, fmt: str) -> None:
    weights = make_weights(fmt, device, 3)
    (weights.w13_scale if isinstance(weights, Fp8Block128ExpertWeights) else weights.w13)[1] = NAN
    routing = make_routing(torch.tensor([[0], [1], [2]], device=device), 3)
    found = make_runner(weights, SILU).run(FlatRowsInput(make_payload(fmt, randn(2, 3, HIDDEN).to(device)), routing)).hidden_states
    assert ints(torch.isnan(found).any(1)) == [0, 1, 0]


@pytest.mark.parametrize(("device", "fmt"), [pytest.param("cpu", "fp32", marks=on_cpu), pytest.param("cuda", "bf16", marks=on_cuda)])
def test_strided_rows(device: str, fmt: str) -> None:
    weights = make_weights(fmt, device, 3)
    routing = make_routing(random_ids(6, 2, 3).to(device), 3)
    wide = randn(3, 6, 300).to(device, DTYPE[fmt])
    transposed = randn(3, HIDDEN, 12).to(device, DTYPE[fmt]).T[::2]
    for data in (wide[:, :HIDDEN], transposed):
        check(Fp32Rows(data) if fmt == "fp32" else Bf16Rows(data), routing, weights, fmt)


@one_target_a_device
def test_two_runs_agree_to_the_bit(device: str, fmt: str) -> None:
    runner = make_runner(make_weights(fmt, device, 4), SILU)
    runner_input = FlatRowsInput(make_payload(fmt, randn(2, 64, HIDDEN).to(device)), make_routing(random_ids(64, 3, 4).to(device), 4))
    assert torch.equal(runner.run(runner_input).hidden_states, runner.run(runner_input).hidden_states)


# ---- compiled and captured ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "fmt", "backend"),
    [
        pytest.param("cpu", "fp32", "aot_eager", marks=on_cpu),
        pytest.param("cuda", "bf16", "inductor", marks=on_cuda),
        pytest.param("cuda", "fp8-block128", "inductor", marks=on_cuda),
    ],
)
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # torch's own, while it compiles
def test_compiles_as_one_graph(device: str, fmt: str, backend: str) -> None:
    runner = make_runner(make_weights(fmt, device, 4), SILU)
    payload, routing = make_payload(fmt, randn(2, 8, HIDDEN).to(device)), make_routing(random_ids(8, 2, 4).to(device), 4)

    def layer(payload: Payload, routing: Routing[LocalIds]) -> torch.Tensor:
        return runner.run(FlatRowsInput(payload, routing)).hidden_states

    compiled = cast("Callable[[Payload, Routing[LocalIds]], torch.Tensor]", torch.compile(layer, fullgraph=True, backend=backend))  # pyright: ignore[reportUnknownMemberType]
    assert torch.equal(compiled(payload, routing), layer(payload, routing))


@pytest.mark.parametrize(("device", "fmt"), [pytest.param("cuda", "bf16", marks=on_cuda), pytest.param("cuda", "fp8-block128", marks=on_cuda)])
def test_a_cuda_graph_follows_the_live_count(device: str, fmt: str) -> None:
    runner = make_runner(make_weights(fmt, device, 4), SILU)
    count = torch.tensor([16], dtype=torch.int32, device=device)
    payload = make_payload(fmt, randn(2, 16, HIDDEN).to(device))
    routing = make_routing(random_ids(16, 2, 4).to(device), 4, DeviceCount(count))
    runner_input = FlatRowsInput(payload, routing)
    runner.run(runner_input)  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = runner.run(runner_input).hidden_states
    for live in (16, 0, 5, 16):
        count.fill_(live)
        graph.replay()
        replayed = captured.clone()
        assert torch.equal(replayed, runner.run(runner_input).hidden_states)
        assert not bool(replayed[live:].any())
        assert live == 0 or bool(replayed[:live].any(1).all())


# ---- what is refused ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=on_cpu), pytest.param("cuda", marks=on_cuda)])
def test_prepared_weights_are_refused(device: str) -> None:
    weights = make_weights("fp32", device, 2)
    assert isinstance(weights, Fp32ExpertWeights)
    with pytest.raises(TypeError, match=r"prepare_triton takes .*; got TritonFp32Weights"):
        prepare_triton(prepare_triton(weights))  # type: ignore[call-overload]


@pytest.mark.parametrize("fmt", ["bf16", "fp8-block128"])
def test_what_the_interpreter_gets_wrong_is_refused(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UnsupportedError, match=f"{fmt} weights need a GPU"):
        make_runner(make_weights(fmt, "cpu", 2, hidden=128, inter=128), SILU)


def test_cpu_weights_are_refused_where_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not knobs.runtime.interpret
    with pytest.raises(UnsupportedError, match="the weights are on cpu, and Triton runs on GPUs"):
        make_runner(make_weights("fp32", "cpu", 2), SILU)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
def test_fp8_is_refused_on_a_device_without_it(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = make_weights("fp8-block128", device, 2)

    def ampere(_: torch.device) -> tuple[int, int]:
        return 8, 0

    monkeypatch.setattr(torch.cuda, "get_device_capability", ampere)
    with pytest.raises(UnsupportedError, match=r"compute capability 8\.9 or later; cuda:0 has 8\.0"):
        make_runner(weights, SILU)


@pytest.mark.parametrize(("device", "fmt"), [pytest.param("cpu", "fp32", marks=on_cpu), pytest.param("cuda", "bf16", marks=on_cuda)])
def test_unknown_activations_and_orders_are_refused(device: str, fmt: str) -> None:
    class Relu(Activation):
        name = "relu"

        @override
        def apply(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            return gate.relu() * up

    class Reversed(GateUpOrder):
        title = "reversed"

        @staticmethod
        @override
        def split(joined: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
            return GateUp.split(joined.flip(dim), dim)

        @staticmethod
        @override
        def join(gate: torch.Tensor, up: torch.Tensor, dim: int) -> torch.Tensor:
            return GateUp.join(gate, up, dim).flip(dim)

    with pytest.raises(UnsupportedError, match="does not know the activation 'relu'"):
        make_runner(make_weights(fmt, device, 2), Relu())
    with pytest.raises(UnsupportedError, match=r"does not know the gate/up order .*Reversed"):
        make_runner(make_weights(fmt, device, 2, Reversed), SILU)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=on_cpu), pytest.param("cuda", marks=on_cuda)])
def test_rows_that_do_not_fit_the_weights_are_refused(device: str) -> None:
    runner = make_runner(make_weights("fp32", device, 2), SILU)
    routing = make_routing(torch.zeros(3, 1, dtype=torch.int64, device=device), 2)
    with pytest.raises(ValueError, match=f"of width 128, but the weights take .* of width {HIDDEN}"):
        runner.run(FlatRowsInput(Fp32Rows(torch.zeros(3, 128, device=device)), routing))
    with pytest.raises(ValueError, match=r"rows are torch\.float8_e4m3fn"):
        runner.run(FlatRowsInput(quantize_fp8_block128.run(Fp32Rows(torch.zeros(3, 128, device=device))), routing))


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=on_cpu), pytest.param("cuda", marks=on_cuda)])
def test_experts_run_on_it_through_the_table(device: str) -> None:
    weights = make_weights("fp32", device, 4)
    assert isinstance(weights, Fp32ExpertWeights)
    experts = Experts(prepare_triton(weights))
    assert experts.accepts == (Fp32Rows,)
    payload, routing = Fp32Rows(randn(1, 5, HIDDEN).to(device)), make_routing(random_ids(5, 2, 4).to(device), 4)
    found = experts(StandardDispatchOutput(payload, routing)).hidden_states
    expected = reference_experts(payload.data, routing.topk_ids, routing.topk_weights, weights, SILU)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_accept_sets() -> None:
    from moe_typed.runners import triton as room

    prepared = (room.TritonBf16Weights, room.TritonFp16Weights, room.TritonFp32Weights, room.TritonFp8Block128Weights)
    assert [cls.accepts() for cls in prepared] == [(Bf16Rows,), (Fp16Rows,), (Fp32Rows,), (Fp8Block128Rows,)]


# ---- importing it ---------------------------------------------------------------------------------------------------------------


def python(source: str) -> str:
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_importing_the_package_does_not_import_triton() -> None:
    assert python("import sys, moe_typed; print('triton' in sys.modules)").strip() == "False"


def test_a_missing_triton_is_named_with_its_extra() -> None:
    source = "import sys; sys.modules['triton'] = None; import moe_typed.runners.triton"
    assert "ImportError: moe_typed.runners.triton needs Triton: pip install 'moe-typed[triton]'" in python(source)
