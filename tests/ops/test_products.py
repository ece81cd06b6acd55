"""Both products, by each kind of kernel: each must give what the reference gives, whatever the plan."""

from typing import NamedTuple

import pytest
import torch

from moe_typed.ops.activation.spec import Gate, Split
from moe_typed.ops.align.triton import align
from moe_typed.ops.down_product import reference as down_reference
from moe_typed.ops.down_product.triton import down_product
from moe_typed.ops.down_product.vector import down_product_summed
from moe_typed.ops.product_plans.spec import Tile
from moe_typed.ops.stream_product import triton as stream
from moe_typed.ops.up_product import reference as up_reference
from moe_typed.ops.up_product import vector
from moe_typed.ops.up_product.triton import up_product
from moe_typed.ops.wide_product import triton as wide
from tests.ops.support import devices, dtypes

NAN = float("nan")
SILU, OAI = Gate(1.0, float("inf"), 0.0), Gate(1.702, 7.0, 1.0)
# Rounding of the result, and of what is summed: bf16 keeps 8 bits, and the interpreter accumulates fp16 in fp16.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 1e-2}

_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = (pytest.mark.cuda, pytest.mark.skipif(not _HOPPER, reason="needs compute capability 9.x"))


def splits(inter: int) -> list[Split]:
    return [Split(0, inter, 1), Split(inter, 0, 1), Split(0, 1, 2)]


class Layer(NamedTuple):
    rows: torch.Tensor
    ids: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    b13: torch.Tensor
    b2: torch.Tensor


def layer(device: str, dtype: torch.dtype, rows: int, k: int, experts: int, hidden: int, inter: int) -> Layer:
    generator = torch.Generator().manual_seed(rows)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    ids = torch.randint(-1, experts + 1, (rows, k), generator=generator, dtype=torch.int32)
    weights = randn(experts, 2 * inter, hidden) / hidden**0.5, randn(experts, hidden, inter) / inter**0.5
    data = (randn(rows, hidden), *weights, randn(experts, 2 * inter), randn(experts, hidden))
    x, w13, w2, b13, b2 = (tensor.to(device, dtype) for tensor in data)
    return Layer(x, ids.to(device), w13, w2, b13, b2)


def kept(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Return the routes that count."""
    flat = ids.flatten()
    return ((flat >= 0) & (flat < experts)).nonzero().squeeze(1)


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert float((found.float() - wanted).square().sum() / wanted.square().sum()) < tolerance**2
    assert not bool(found.isnan().any())


def check_up(found: torch.Tensor, made: Layer, split: Split, gate: Gate) -> None:
    routes = kept(made.ids, made.w13.shape[0])
    source, expert = routes // made.ids.shape[1], made.ids.flatten()[routes]
    wanted = up_reference.up_product(made.rows, None, made.w13, None, made.b13, source, expert, split, gate)
    close(found[routes], wanted, TOLERANCE[made.rows.dtype])


def by_route(rows: torch.Tensor, slots: torch.Tensor, routes: int) -> torch.Tensor:
    found = rows.new_full((routes + 1, rows.shape[1]), NAN)
    found[slots.long()] = rows
    return found[:routes]


TILES = [Tile(16, 32, 32, 4, 2), Tile(64, 16, 64, 4, 3, 3), Tile(32, 64, 32, 4, 2, 2)]


@dtypes("float32", "float16", "bfloat16")
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("sorts", [False, True])
def test_tiles(device: str, dtype: torch.dtype, tile: Tile, order: int, sorts: bool) -> None:
    made = layer(device, dtype, 33, 3, 4, 72, 40)
    split, routes = splits(40)[order], made.ids.numel()
    slots, block_expert = align(made.ids, None, 4, tile.rows) if sorts else (made.ids, None)
    inner, scale = up_product(made.rows, None, made.w13, None, made.b13, slots, block_expert, None, 3, split, OAI, dtype, tile)
    assert scale is None
    check_up(by_route(inner, slots, routes) if sorts else inner, made, split, OAI)
    found = down_product(inner, None, made.w2, None, made.b2, slots, block_expert, None, routes, 3, dtype, tile)
    check_down(found, by_route(inner, slots, routes) if sorts else inner, made)


def check_down(found: torch.Tensor, inner: torch.Tensor, made: Layer) -> None:
    routes = kept(made.ids, made.w2.shape[0])
    wanted = down_reference.down_product(inner[routes], None, made.w2, None, made.b2, made.ids.flatten()[routes])
    close(found[routes], wanted, TOLERANCE[made.rows.dtype])


@dtypes("float32", "float16", "bfloat16")
@pytest.mark.parametrize("tile", [Tile(1, 8, 32, 4, 1), Tile(1, 4, 128, 4, 3)])
@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("live", [None, 3])
def test_vectors(device: str, dtype: torch.dtype, tile: Tile, order: int, live: int | None) -> None:
    made = layer(device, dtype, 5, 3, 4, 72, 40)
    split = splits(40)[order]
    count = None if live is None else torch.tensor([live], dtype=torch.int32, device=device)
    if live is not None:
        made.rows[live:] = NAN
    counted = made._replace(ids=made.ids[:live])
    inner = vector.up_product(made.rows, None, made.w13, None, made.b13, made.ids, count, split, SILU, dtype, tile)
    check_up(inner, counted, split, SILU)
    router = torch.rand(5, 3, generator=torch.Generator().manual_seed(2)).to(device)
    found = down_product_summed(inner, made.w2, None, made.b2, made.ids, router, count, dtype, tile)
    routes = kept(counted.ids, 4)
    products = down_reference.down_product(inner[routes], None, made.w2, None, made.b2, made.ids.flatten()[routes])
    wanted = torch.zeros(5, 72, device=device).index_add_(0, routes // 3, products * router.flatten()[routes].unsqueeze(1))
    close(found, wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=on_hopper) for dtype in (torch.float16, torch.bfloat16)])
@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize(("hidden", "inter"), [(256, 128), (320, 192)])
@pytest.mark.parametrize("group", [1, 3])
def test_wide(dtype: torch.dtype, order: int, hidden: int, inter: int, group: int) -> None:
    made = layer("cuda", dtype, 400, 3, 4, hidden, inter)
    split, routes = splits(inter)[order], made.ids.numel()
    slots, block_expert = align(made.ids, None, 4, 128)
    inner, _ = wide.up_product(made.rows, None, made.w13, None, made.b13, slots, block_expert, 3, split, OAI, dtype, group)
    check_up(by_route(inner, slots, routes), made, split, OAI)
    found = wide.down_product(inner, None, made.w2, None, made.b2, slots, block_expert, routes, dtype, group)
    check_down(found, by_route(inner, slots, routes), made)


class Streamed(NamedTuple):
    """Shapes of a layer, rows and stages of a block, how many programs a multiprocessor has, and the columns of a piece of the second product."""

    tokens: int
    k: int
    experts: int
    hidden: int
    inter: int
    rows: int
    stages: int = 4
    programs: int = 1
    columns: int = 128

    def tiles(self) -> tuple[Tile, Tile]:
        return Tile(self.rows, 64, 128, 4, self.stages, self.programs), Tile(self.rows, self.columns, 128, 4, self.stages, self.programs)


STREAMED = [
    Streamed(1, 1, 3, 256, 128, 8),
    Streamed(5, 3, 4, 320, 192, 8, programs=2),  # hidden is not whole pieces
    Streamed(70, 2, 4, 1024, 128, 16, columns=512),  # several blocks an expert, and a sum by itself
    Streamed(64, 8, 300, 512, 192, 8, 11),
    Streamed(60, 5, 8, 256, 1024, 32),
    Streamed(40, 3, 2, 2048, 64, 64, 3, columns=256),
]


def sums(products: torch.Tensor, routes: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    tokens, k = router.shape
    return torch.zeros(tokens, products.shape[1], device=router.device).index_add_(0, routes // k, products * router.flatten()[routes].unsqueeze(1))


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=on_hopper) for dtype in (torch.float16, torch.bfloat16)])
@pytest.mark.parametrize("sizes", STREAMED)
@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("live", [None, 0.6])
def test_streamed(dtype: torch.dtype, sizes: Streamed, order: int, live: float | None) -> None:
    made = layer("cuda", dtype, sizes.tokens, sizes.k, sizes.experts, sizes.hidden, sizes.inter)
    count = None if live is None else int(live * sizes.tokens)
    if count is not None:
        made.rows[count:] = NAN
    counted = made.ids.clone()
    counted[count if count is not None else sizes.tokens :] = -1
    router = torch.rand(sizes.tokens, sizes.k, generator=torch.Generator().manual_seed(2)).to("cuda")
    router[counted < 0] = NAN
    split, routes = splits(sizes.inter)[order], kept(counted, sizes.experts)
    on_device = None if count is None else torch.tensor([count], dtype=torch.int32, device="cuda")
    operands = stream.Operands(made.rows, None, made.w13, None, made.b13, made.w2, None, made.b2, made.ids, on_device)
    expert = made.ids.flatten()[routes]
    inner = up_reference.up_product(made.rows, None, made.w13, None, made.b13, routes // sizes.k, expert, split, OAI)
    wanted = down_reference.down_product(inner, None, made.w2, None, made.b2, expert)
    summed = sums(wanted, routes, torch.where(counted < 0, 0.0, router))
    for _ in range(2):  # what stands in memory from the first time is not taken for done
        found = stream.layer(operands, router, split, OAI, dtype, *sizes.tiles())
        if routes.numel():
            close(found, summed, TOLERANCE[dtype])
            close(stream.products(operands, split, OAI, dtype, *sizes.tiles())[routes], wanted, TOLERANCE[dtype])
        assert not bool(found[counted.lt(0).logical_or(counted.ge(sizes.experts)).all(1)].any())


@devices
def test_a_streamed_layer_without_columns_is_zero(device: str) -> None:
    made = layer(device, torch.float16, 5, 0, 3, 256, 128)
    operands = stream.Operands(made.rows, None, made.w13, None, made.b13, made.w2, None, made.b2, made.ids, None)
    found = stream.layer(operands, torch.zeros(5, 0, device=device), splits(128)[0], OAI, torch.float16, *Streamed(5, 0, 3, 256, 128, 8).tiles())
    assert found.shape == (5, 256)
    assert not bool(found.any())


@devices
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (Streamed(5, 2, 3, 256, 128, 24), "got 24 and 1"),
        (Streamed(5, 2, 3, 256, 128, 8, programs=3), "got 8 and 3"),
        (Streamed(5, 2, 3, 256, 128, 8, columns=192), "pieces of 192 columns are no multiple of 128"),
        (Streamed(5, 2, 3, 320, 128, 8, columns=256), "divides hidden = 320"),
    ],
)
def test_tiles_that_the_streaming_kernel_does_not_take_are_refused(device: str, sizes: Streamed, message: str) -> None:
    made = layer(device, torch.float16, sizes.tokens, sizes.k, sizes.experts, sizes.hidden, sizes.inter)
    operands = stream.Operands(made.rows, None, made.w13, None, made.b13, made.w2, None, made.b2, made.ids, None)
    with pytest.raises(ValueError, match=message):
        stream.products(operands, splits(sizes.inter)[0], OAI, torch.float16, *sizes.tiles())


def blocks128(seed: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random e4m3 weights, a scale for each 128 x 128 of them, and what they stand for."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(*shape, generator=generator).to(torch.float8_e4m3fn)
    scale = (torch.rand(shape[0], shape[1] // 128, shape[2] // 128, generator=generator) + 0.5) / shape[2] ** 0.5
    wide_scale = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    return weights.cuda(), scale.cuda(), (weights.float() * wide_scale).cuda()


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(sizes, marks=on_hopper)
        for sizes in [
            Streamed(3, 2, 3, 256, 128, 8),
            Streamed(7, 8, 20, 1024, 256, 8, programs=2, columns=512),
            Streamed(70, 2, 4, 1024, 128, 16, columns=256),
            Streamed(64, 8, 300, 512, 384, 16, 9),
            Streamed(60, 5, 8, 256, 1024, 32),
        ]
    ],
)
def test_streamed_fp8(sizes: Streamed) -> None:
    made = layer("cuda", torch.float32, sizes.tokens, sizes.k, sizes.experts, sizes.hidden, sizes.inter)
    (w13, s13, d13), (w2, s2, d2) = (
        blocks128(seed, sizes.experts, *shape) for seed, shape in enumerate([(2 * sizes.inter, sizes.hidden), (sizes.hidden, sizes.inter)])
    )
    groups = made.rows.view(sizes.tokens, -1, 128)
    scale = groups.abs().amax(2) / 448
    rows = (groups / scale.unsqueeze(2)).to(torch.float8_e4m3fn)
    known = (rows.float() * scale.unsqueeze(2)).view_as(made.rows)
    split, routes = splits(sizes.inter)[0], kept(made.ids, sizes.experts)
    expert = made.ids.flatten()[routes]
    b13, b2 = made.b13.bfloat16(), made.b2.bfloat16()
    operands = stream.Operands(rows.view_as(made.rows), scale, w13, s13, b13, w2, s2, b2, made.ids, None)
    inner = up_reference.up_product(known, None, d13, None, b13.float(), routes // sizes.k, expert, split, SILU)
    parts = inner.view(len(inner), -1, 64)  # rounded as the kernel does, so that what is left is rounding of the result
    by = parts.abs().amax(2, keepdim=True) / 448
    inner = ((parts / by).to(torch.float8_e4m3fn).float() * by).view_as(inner)
    wanted = down_reference.down_product(inner, None, d2, None, b2.float(), expert)
    close(stream.products(operands, split, SILU, torch.bfloat16, *sizes.tiles())[routes], wanted, 1e-2)
    router = torch.rand(sizes.tokens, sizes.k, generator=torch.Generator().manual_seed(2)).to("cuda")
    close(stream.layer(operands, router, split, SILU, torch.bfloat16, *sizes.tiles()), sums(wanted, routes, router), 1e-2)


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=on_hopper)])
def test_a_streamed_layer_in_a_graph_gives_the_same_each_time(dtype: torch.dtype) -> None:
    sizes = Streamed(8, 8, 64, 512, 256, 8)
    made = layer("cuda", dtype, sizes.tokens, sizes.k, sizes.experts, sizes.hidden, sizes.inter)
    operands = stream.Operands(made.rows, None, made.w13, None, None, made.w2, None, None, made.ids, None)
    router = torch.rand(sizes.tokens, sizes.k, generator=torch.Generator().manual_seed(2)).to("cuda")

    def run() -> torch.Tensor:
        return stream.layer(operands, router, splits(sizes.inter)[0], SILU, dtype, *sizes.tiles())

    wanted = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [run(), run()]
    for _ in range(20):
        for one in found:
            one.fill_(NAN)
        graph.replay()
        assert all(torch.equal(one, wanted) for one in found)


def test_operands_that_do_not_fit_are_refused() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made, split, tile = layer(device, torch.float32, 3, 2, 2, 64, 32), Split(0, 32, 1), Tile(1, 8, 64, 4, 1)
    for rows, scale, message in [
        (made.rows[:, :32], None, "of width 32, but the weights take torch.float32 of width 64"),
        (made.rows.half(), None, "rows are torch.float16"),
        (made.rows, made.rows, r"scales of the rows: \[3, 64\]; torch.float32 takes none"),
    ]:
        with pytest.raises(ValueError, match=message):
            vector.up_product(rows, scale, made.w13, None, None, made.ids, None, split, SILU, torch.float32, tile)
    with pytest.raises(ValueError, match=r"bias is \[2, 32\], expected \[2, 64\]"):
        vector.up_product(made.rows, None, made.w13, None, made.b13[:, :32], made.ids, None, split, SILU, torch.float32, tile)
    huge = torch.empty(1, 2**17, 2**14, device="meta")
    with pytest.raises(ValueError, match="131072 x 16384, and places in them are counted in 32 bits"):
        down_product_summed(made.rows, huge, None, None, made.ids, torch.rand(3, 2), None, torch.float32, tile)
    with pytest.raises(ValueError, match="must be contiguous"):
        down_product_summed(made.rows, made.w2.transpose(1, 2), None, None, made.ids, torch.rand(3, 2), None, torch.float32, tile)
