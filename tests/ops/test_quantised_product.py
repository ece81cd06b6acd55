"""The product that decodes weights in registers, held to its reference in every format, and its formulae."""

from typing import Final

import pytest
import torch
from torch import Tensor

from moe_typed.formats import GateUp, GateUpOrder, Interleaved, Ungated, UpGate
from moe_typed.ops.activation.spec import Split
from moe_typed.ops.align.triton import align
from moe_typed.ops.product_plans.spec import How
from moe_typed.ops.quantised_product import reference
from moe_typed.ops.quantised_product.decoded import decoded
from moe_typed.ops.quantised_product.plan import choose_how, choose_tile, fitting_depth
from moe_typed.ops.quantised_product.spec import NOTHING, Code, Epilogue, Formula, Matrix, Rows
from moe_typed.ops.quantised_product.triton import product
from moe_typed.ops.quantize import reference as quantize
from moe_typed.runners import Activation, GeluAndMul, GeluTanhAndMul, Relu2, SiluAndMul, SwigluClamped, SwigluOai, SwigluStep
from moe_typed.runners.triton.activations import epilogue_of, split_of
from tests.ops.support import devices, on_cpu, on_cuda

EXPERTS, N, K = 3, 96, 128
FP8: Final = torch.float8_e4m3fn
SMALL: Final = 1 / 256  # so that no result overflows an exponential, of which the interpreter warns


def rand(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uint8(seed: int, high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def scales(seed: int, *shape: int) -> Tensor:
    return rand(seed, *shape).abs() + 0.5


def e8m0(seed: int) -> Tensor:
    return (uint8(seed, 9, EXPERTS, N, K // 32) + 120).view(torch.float8_e8m0fnu)


def matrices() -> dict[str, Matrix]:
    """Return weights in every way that they can be held."""
    fp8, pairs, bias = rand(1, EXPERTS, N, K).to(FP8), uint8(2, 256, EXPERTS, N, K // 2), rand(3, EXPERTS, N)
    by_group = scales(4, EXPERTS, K // 32, N).transpose(1, 2)
    return {
        "dense": Matrix(rand(1, EXPERTS, N, K), None, None, bias),
        "transposed": Matrix(rand(1, EXPERTS, K, N).transpose(1, 2)),
        "fp8, a scale a row": Matrix(fp8, scales(4, EXPERTS, N, 1), None, bias),
        "fp8, a scale a matrix": Matrix(fp8, scales(4, EXPERTS, 1, 1).expand(EXPERTS, N, 1)),
        "fp8, a scale a block": Matrix(fp8, scales(4, EXPERTS, N // 32, K // 64)),
        "mxfp8": Matrix(fp8, e8m0(4), None, bias),
        "mxfp4": Matrix(pairs.view(torch.float4_e2m1fn_x2), e8m0(4)),
        "int8": Matrix(uint8(1, 255, EXPERTS, N, K).view(torch.int8), scales(4, EXPERTS, N, 1), None, bias),
        "int4": Matrix(pairs, by_group.half(), None, bias),
        "int4 with zeros": Matrix(pairs, by_group, uint8(5, 17, EXPERTS, K // 32, N).transpose(1, 2)),
        "int4 under one scale a row": Matrix(pairs, scales(4, EXPERTS, 1, N).transpose(1, 2), uint8(5, 17, EXPERTS, 1, N).transpose(1, 2)),
    }


def rows_of(kind: str, data: Tensor) -> Rows:
    match kind:
        case "fp32" | "fp16" | "bf16":
            return Rows(data.to({"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[kind]))
        case "mxfp8":
            return Rows(*quantize.quantize_mxfp8(data))
        case "token":
            codes, scale = quantize.quantize_fp8_rows(data)
        case "group":
            return Rows(*quantize.quantize_fp8_groups(data))
        case _:
            codes, scale = quantize.quantize_int8_rows(data)
    return Rows(codes, scale.unsqueeze(1))


def kinds(matrix: Matrix) -> tuple[str, ...]:
    """Return the rows that weights are multiplied with."""
    more = {Code.FP8: ("token", "group"), Code.INT8: ("int8",)}.get(matrix.code, ())
    return "fp32", "fp16", *(() if matrix.code is Code.DENSE else ("mxfp8",)), *more


CASES = [(name, kind) for name, matrix in matrices().items() for kind in kinds(matrix)]
EPILOGUES = {
    "nothing": (None, NOTHING),
    "relu2": (None, Epilogue(Formula.RELU2)),
    "gate, up": (Split(0, N // 2, 1), Epilogue(Formula.GATED)),
    "interleaved": (Split(0, 1, 2), Epilogue(Formula.GELU)),
}
IDS = torch.tensor([[0, 1], [-1, 2], [2, 2], [0, 5]], dtype=torch.int32)
# float16 rows are multiplied in it, and the reference in float32.
RTOL = {"fp32": 1e-5, "fp16": 1e-3, "bf16": 1e-2, "mxfp8": 1e-5, "token": 1e-4, "group": 1e-4, "int8": 1e-5}


def moved(matrix: Matrix, device: str) -> Matrix:
    return Matrix(*(None if part is None else part.to(device) for part in matrix))  # type: ignore[arg-type]


def distance(found: Tensor, expected: Tensor) -> float:
    """Return |found - expected| / |expected|."""
    return float((found - expected).square().sum().sqrt() / expected.square().sum().sqrt())


def run(rows: Rows, matrix: Matrix, ids: Tensor, live: Tensor | None, split: Split | None, epilogue: Epilogue, *, walk: bool = False) -> Tensor:
    tile = choose_tile(rows, matrix, ids.numel(), paired=split is not None)
    slots, block_expert = (ids, None) if walk else align(ids, live, EXPERTS, tile.rows)
    return product(rows, matrix, slots, block_expert, ids.numel(), ids.shape[1], torch.float32, tile, split, epilogue, live=live)


@devices
@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.parametrize(("split", "epilogue"), EPILOGUES.values(), ids=EPILOGUES.keys())
def test_matches_the_reference(device: str, name: str, kind: str, split: Split | None, epilogue: Epilogue) -> None:
    matrix, rows, ids = moved(matrices()[name], device), rows_of(kind, SMALL * rand(7, 4, K).to(device)), IDS.to(device)
    found = run(rows, matrix, ids, None, split, epilogue)
    expected = reference.product(rows, matrix, ids, None, 2, torch.float32, split, epilogue)
    kept = ((ids >= 0) & (ids < EXPERTS)).flatten()
    assert distance(found[kept], expected[kept]) <= RTOL[kind]


@devices
@pytest.mark.parametrize("name", matrices())
@pytest.mark.parametrize(("split", "epilogue"), [(None, NOTHING), (Split(0, 1, 2), Epilogue(Formula.GATED))], ids=["one", "pairs"])
def test_routes_that_are_not_sorted(device: str, name: str, split: Split | None, epilogue: Epilogue) -> None:
    matrix, ids = moved(matrices()[name], device), torch.cat([IDS, IDS.flip(0)]).to(device)
    kind = "fp32" if device == "cpu" or matrix.code is Code.DENSE else "bf16"
    rows = rows_of(kind, SMALL * rand(7, 8, K).to(device))
    found = run(rows, matrix, ids, None, split, epilogue, walk=True)
    kept = ((ids >= 0) & (ids < EXPERTS)).flatten()
    assert torch.equal(found[kept], run(rows, matrix, ids, None, split, epilogue)[kept])


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float32, marks=on_cpu),
        pytest.param("cuda", torch.float32, marks=on_cuda),
        pytest.param("cuda", torch.bfloat16, marks=on_cuda),
    ],
)
@pytest.mark.parametrize("name", [name for name, matrix in matrices().items() if matrix.code is not Code.DENSE])
def test_decoded_weights_are_their_values(device: str, dtype: torch.dtype, name: str) -> None:
    matrix = moved(matrices()[name], device)
    assert torch.equal(decoded(matrix, dtype), reference.matrix_values(matrix).to(dtype))


@devices
@pytest.mark.parametrize("byte", [0, 1, 251, 255])
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_the_smallest_and_largest_scales(device: str, name: str, byte: int) -> None:
    matrix = matrices()[name]
    matrix = moved(matrix._replace(scale=torch.full((EXPERTS, N, K // 32), byte, dtype=torch.uint8).view(torch.float8_e8m0fnu)), device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.testing.assert_close(decoded(matrix, dtype), reference.matrix_values(matrix).to(dtype), rtol=0, atol=0, equal_nan=True)


@devices
@pytest.mark.parametrize("walk", [False, True])
def test_live_rows_alone_are_multiplied(device: str, walk: bool) -> None:
    matrix, ids, live = moved(matrices()["int8"], device), IDS.to(device), torch.tensor([2], dtype=torch.int32, device=device)
    rows = Rows(rand(7, 4, K).to(device))
    found = run(rows, matrix, ids, live, None, NOTHING, walk=walk)
    expected = reference.product(rows, matrix, ids, live, 2, torch.float32)
    assert not bool(expected[4:].any())
    torch.testing.assert_close(found[[0, 1, 3]], expected[[0, 1, 3]], rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(
    ("activation", "order"),
    [(activation, order) for activation in (SiluAndMul(), SwigluOai(1.3, 2.0), SwigluStep(0.5), SwigluClamped(0.5), GeluAndMul(), GeluTanhAndMul())
     for order in (GateUp, UpGate, Interleaved)] + [(Relu2(), Ungated)],
)  # fmt: skip
def test_the_formula_of_an_activation_is_its_meaning(activation: Activation, order: type[GateUpOrder]) -> None:
    joined = 3 * rand(1, 5, 64)
    found = reference.activate(joined, split_of(order, 32), epilogue_of(activation))
    torch.testing.assert_close(found, activation.activate(joined, order))


@pytest.mark.parametrize("formula", Formula)
def test_what_is_paired(formula: Formula) -> None:
    assert formula.is_paired == (formula in (Formula.GATED, Formula.STEP, Formula.GELU, Formula.GELU_TANH))


class TestRefusals:
    def test_a_dtype_that_no_weights_have(self) -> None:
        with pytest.raises(ValueError, match=r"weights are torch\.int64; they must be one of torch\.bfloat16"):
            _ = Matrix(torch.zeros(1, 1, 1, dtype=torch.int64)).code

    @devices
    def test_rows_of_another_width(self, device: str) -> None:
        with pytest.raises(ValueError, match="of width 64, but the weights take rows of width 128"):
            run(Rows(rand(7, 4, 64).to(device)), moved(matrices()["int8"], device), IDS.to(device), None, None, NOTHING)

    @devices
    @pytest.mark.parametrize(("kind", "name"), [("token", "mxfp4"), ("int8", "fp8, a scale a row"), ("group", "int8"), ("token", "dense")])
    def test_quantised_rows_for_other_weights(self, device: str, kind: str, name: str) -> None:
        with pytest.raises(ValueError, match="rows with float32 scales are multiplied by weights of the same dtype"):
            run(rows_of(kind, rand(7, 4, K).to(device)), moved(matrices()[name], device), IDS.to(device), None, None, NOTHING)

    @devices
    def test_mxfp8_rows_for_dense_weights(self, device: str) -> None:
        with pytest.raises(ValueError, match="rows with e8m0 scales are multiplied by weights in at most eight bits"):
            run(rows_of("mxfp8", rand(7, 4, K).to(device)), moved(matrices()["dense"], device), IDS.to(device), None, None, NOTHING)

    @devices
    def test_quantised_rows_without_scales(self, device: str) -> None:
        with pytest.raises(ValueError, match=r"rows are torch\.int8 without scales"):
            run(Rows(torch.zeros(4, K, dtype=torch.int8, device=device)), moved(matrices()["int8"], device), IDS.to(device), None, None, NOTHING)

    @devices
    def test_zeros_that_lie_otherwise_than_scales(self, device: str) -> None:
        matrix = moved(matrices()["int4 with zeros"], device)
        assert matrix.zero is not None
        with pytest.raises(ValueError, match="zeros have the strides"):
            run(Rows(rand(7, 4, K).to(device)), matrix._replace(zero=matrix.zero.contiguous()), IDS.to(device), None, None, NOTHING)

    def test_dense_weights_are_not_decoded(self) -> None:
        with pytest.raises(ValueError, match="those with scales are decoded"):
            decoded(matrices()["dense"])

    @pytest.mark.parametrize(("group", "fits"), [(16, False), (48, False), (32, True), (96, True)])
    def test_groups_that_no_instruction_fits_into(self, group: int, fits: bool) -> None:
        depth = 2 * group
        rows, matrix = Rows(torch.zeros(1, depth)), Matrix(torch.zeros(1, 4, depth // 2, dtype=torch.uint8), torch.ones(1, 4, 2))
        if fits:
            assert fitting_depth(rows, matrix, 128) == 32
            return
        with pytest.raises(ValueError, match=f"groups of {group} along the depth; the Triton kernels take multiples of 32"):
            fitting_depth(rows, matrix, 128)


@pytest.mark.parametrize(("device", "kind"), [pytest.param("cpu", "fp16", marks=on_cpu), pytest.param("cuda", "bf16", marks=on_cuda)])
@pytest.mark.parametrize("name", ["mxfp4", "int4", "int8"])
@pytest.mark.parametrize("routes", [1, 17 * EXPERTS, 33 * EXPERTS, 65 * EXPERTS])
def test_every_height_of_tiles(device: str, kind: str, routes: int, name: str) -> None:
    matrix, ids = moved(matrices()[name], device), (torch.arange(routes, dtype=torch.int32, device=device) % EXPERTS).unsqueeze(1)
    rows = rows_of(kind, rand(7, routes, K).to(device))
    found = run(rows, matrix, ids, None, None, NOTHING)
    expected = reference.product(rows, matrix, ids, None, 1, torch.float32)
    assert distance(found, expected) <= RTOL[kind]


@pytest.mark.parametrize("name", matrices())
@pytest.mark.parametrize("routes", [1, 64, 65, 300, 10_000])
def test_both_products_have_tiles_of_one_height(name: str, routes: int) -> None:
    matrix = matrices()[name]
    heights = {choose_tile(rows_of(kind, rand(1, 1, K)), matrix, routes, paired=paired).rows for kind in kinds(matrix) for paired in (False, True)}
    assert len(heights) == 1  # routes are sorted once, in blocks of that height


class TestHow:
    def test_few_routes_are_not_sorted(self) -> None:
        matrix, rows = matrices()["int8"], Rows(rand(1, 1, K).bfloat16())
        hows = [choose_how(rows, matrix, routes, wide=True) for routes in (1, 16 * EXPERTS, 16 * EXPERTS + 1)]
        assert hows == [How.WALK, How.WALK, How.SORTED]

    @pytest.mark.parametrize("kind", ["bf16", "mxfp8", "fp16", "int8"])
    @pytest.mark.parametrize("wide", [False, True])
    def test_weights_are_decoded_once_for_many_rows_in_bf16_alone(self, kind: str, wide: bool) -> None:
        matrix = matrices()["mxfp8" if kind == "mxfp8" else "int8"]
        decoded_once = wide and kind in ("bf16", "mxfp8")
        assert choose_how(rows_of(kind, rand(1, 1, K)), matrix, 10_000, wide=wide) is (How.WIDE if decoded_once else How.SORTED)

    def test_dense_weights_are_never_decoded(self) -> None:
        assert choose_how(Rows(rand(1, 1, K).bfloat16()), matrices()["dense"], 10_000, wide=True) is How.SORTED

    def test_the_longer_tiles_decode_the_earlier_weights_are_decoded_once(self) -> None:
        """By the measurements that stand beside the rule: int4 first, then those with e8m0 scales, int8 last."""
        rows = Rows(rand(1, 1, K).bfloat16())
        names = ("int4 with zeros", "mxfp8", "int8")
        for each, begun in ((64, 0), (150, 1), (250, 2), (400, 3)):
            hows = [choose_how(rows, matrices()[name], each * EXPERTS, wide=True) for name in names]
            assert hows == [How.WIDE] * begun + [How.SORTED] * (3 - begun)
