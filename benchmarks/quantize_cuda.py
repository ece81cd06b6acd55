"""Quantising and upscaling kernels: GPU time in a graph against the floor of a copy, and host time; then what quantising before an all-to-all gains.

Every cell is checked against the reference, bit for bit, before it is timed. Rows are normal, bfloat16, of 7168 channels.

    python -m benchmarks.quantize_cuda [--results FOLDER] [--quick]
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, Final, NamedTuple, TypeAlias, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import _measure as measure
from moe_typed.ops.quantize import reference
from moe_typed.ops.quantize import triton as fast
from moe_typed.ops.scale_layout.spec import ScaleLayout
from moe_typed.ops.upscale import reference as upscale_reference
from moe_typed.ops.upscale import triton as upscale

HIDDEN: Final = 7168  # DeepSeek-V3
ROWS: Final = (1, 8, 64, 512, 4096, 16384)
PADDED, LIVE = 24576, 112  # a receive buffer of 8 ranks by 3072 tokens, and what was live in it
_MAX_BYTES: Final = 2**30  # of rows that a cell rotates through; and 16 sets at most
_COLUMN, _SWIZZLED = ScaleLayout.COLUMN_MAJOR, ScaleLayout.SWIZZLED

Scaled: TypeAlias = tuple[Tensor, ...]
Quantize: TypeAlias = Callable[..., Scaled]

# The best of SGLang 0.5.23, vLLM 0.33.0 and triton_kernels 3.6, microseconds in a graph by the number of rows, measured so on one H200.
PEERS: Final[dict[str, dict[int, float]]] = {
    "fp8 groups": dict(zip(ROWS, (1.6, 1.7, 1.9, 3.9, 22.2, 90.6), strict=True)),
    "mxfp8": dict(zip(ROWS, (2.0, 2.2, 2.6, 4.6, 23.7, 101.3), strict=True)),
}


class Format(NamedTuple):
    """One way to quantise, and back; both take ``live``."""

    quantize: Quantize
    upscale: Callable[..., Tensor]
    reference: Quantize
    upscale_reference: Callable[..., Tensor]


def _pair(name: str, back: str, layout: ScaleLayout | None = None) -> Format:
    order: dict[str, object] = {} if layout is None else {"layout": layout}
    modules = fast, upscale, reference, upscale_reference
    return Format(*(partial(_named(module, function), **order) for module, function in zip(modules, (name, back) * 2, strict=True)))


def _named(module: object, name: str) -> Callable[..., Any]:
    """Return a function of either implementation: both have the same."""
    return cast("Callable[..., Any]", getattr(module, name))


@cache
def _tensor_scale() -> Tensor:
    return torch.full((1,), 0.002, device="cuda")


def _with_tensor_scale(rows: Tensor, quantize: Callable[..., Scaled | Tensor], live: Tensor | None = None) -> Scaled:
    scale = _tensor_scale()
    found = quantize(rows, scale, live=live)
    return (found, scale) if isinstance(found, Tensor) else (*found, scale)


def _given(pair: Format) -> Format:
    """Return the format with a scale of all rows that is there already."""
    return pair._replace(quantize=partial(_with_tensor_scale, quantize=pair.quantize), reference=partial(_with_tensor_scale, quantize=pair.reference))


FORMATS: Final = {
    "fp8 groups": _pair("quantize_fp8_groups", "upscale_fp8_groups"),
    "fp8 groups, by column": _pair("quantize_fp8_groups", "upscale_fp8_groups", _COLUMN),
    "fp8 groups, words": _pair("quantize_fp8_groups_ue8m0", "upscale_fp8_groups_ue8m0"),
    "fp8 rows": _pair("quantize_fp8_rows", "upscale_rows"),
    "int8 rows": _pair("quantize_int8_rows", "upscale_rows"),
    "fp8 tensor": _given(_pair("quantize_fp8_tensor", "upscale_tensor")),
    "mxfp8": _pair("quantize_mxfp8", "upscale_mxfp8"),
    "mxfp8, swizzled": _pair("quantize_mxfp8", "upscale_mxfp8", _SWIZZLED),
    "mxfp4": _pair("quantize_mxfp4", "upscale_mxfp4"),
    "nvfp4": _given(_pair("quantize_nvfp4", "upscale_nvfp4")),
}


class Row(NamedTuple):
    """What was measured of one thing that is done to rows, of which the live ones count."""

    what: str
    rows: int
    live: int
    moved: int
    graph_us: float
    p10_us: float
    p90_us: float
    python_us: float
    floor_us: float
    peer_us: float | None
    wire_bytes: int | None = None


def _bits(tensor: Tensor) -> Tensor:
    return tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def check(found: Scaled, wanted: Scaled, live: int, what: str) -> None:
    """Raise RuntimeError unless all bits of live rows are as the reference has them."""
    for mine, other in zip(found, wanted, strict=True):
        count = live if mine.shape[0] == found[0].shape[0] else mine.shape[0]
        if not torch.equal(_bits(mine[:count]), _bits(other[:count])):
            raise RuntimeError(f"{what} is wrong")


def _inputs(rows: int) -> list[Tensor]:
    sets = max(2, min(16, _MAX_BYTES // (rows * HIDDEN * 2)))
    return [torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Ceilings(NamedTuple):
    """Bytes read plus written in a microsecond by a large copy, and the microseconds of an empty kernel."""

    bandwidth: float
    empty: float


def cells(rows: int, names: Sequence[str], ceilings: Ceilings) -> Iterator[Row]:
    inputs = _inputs(rows)
    for name in names:
        way = FORMATS[name]
        scaled = [way.quantize(x) for x in inputs]
        check(scaled[0], way.reference(inputs[0]), rows, f"{name} of {rows} rows")
        check((way.upscale(*scaled[0]),), (way.upscale_reference(*scaled[0]),), rows, f"{name} of {rows} rows back")
        moved = _size(inputs[:1]) + _size(scaled[0])
        floor = moved / ceilings.bandwidth + ceilings.empty
        there = [partial(way.quantize, x) for x in inputs]
        yield Row(name, rows, rows, moved, *measure.in_graph(there), measure.from_python(there), floor, PEERS.get(name, {}).get(rows))
        back = [partial(way.upscale, *x) for x in scaled]
        yield Row(f"{name}, back", rows, rows, moved, *measure.in_graph(back), measure.from_python(back), floor, None)


def wire(names: Sequence[str], ceilings: Ceilings) -> Iterator[Row]:
    """Quantise on the sending side, where only live rows are; or on the receiving side, the whole buffer, since nothing there says what is live."""
    inputs = _inputs(PADDED)
    for name in names:
        way = FORMATS[name]
        scaled = way.quantize(inputs[0])
        row_bytes = _size(scaled) // PADDED
        for live in (LIVE, PADDED):
            count = torch.tensor([live], dtype=torch.int32, device="cuda")
            check(way.quantize(inputs[0], live=count), scaled if live == PADDED else way.reference(inputs[0], live=count), live, name)
            for what, rows, calls, wire_bytes in (
                ("quantise, send", live, [partial(way.quantize, x, live=count) for x in inputs], row_bytes),
                ("send, quantise", PADDED, [partial(way.quantize, x) for x in inputs], HIDDEN * 2),
            ):
                moved = rows * (HIDDEN * 2 + row_bytes)
                floor = moved / ceilings.bandwidth + ceilings.empty
                yield Row(f"{name}: {what}", PADDED, live, moved, *measure.in_graph(calls), float("nan"), floor, None, live * wire_bytes)


def show(rows: Sequence[Row]) -> Table:
    table = Table("what", "rows", "live", "MB moved", "graph us", "x floor", "TB/s", "peer us", "python us", "MB sent", title="Quantising and back")
    for row in rows:
        table.add_row(
            row.what,
            str(row.rows),
            str(row.live),
            f"{row.moved / 1e6:.2f}",
            f"{row.graph_us:.1f}",
            f"{row.graph_us / row.floor_us:.2f}",
            f"{row.moved / row.graph_us / 1e6:.2f}",
            "" if row.peer_us is None else f"{row.peer_us:.1f}",
            "" if row.python_us != row.python_us else f"{row.python_us:.0f}",
            "" if row.wire_bytes is None else f"{row.wire_bytes / 1e6:.2f}",
        )
    return table


def main() -> None:
    parser = measure.arguments_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="only the cells that peers were measured in, and 16384 rows of the rest")
    arguments = parser.parse_args()

    torch.random.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    ceilings = Ceilings(measure.copy_bandwidth(), measure.empty_kernel())
    results: list[Row] = []
    for rows in ROWS:
        results += cells(rows, tuple(PEERS) if arguments.quick and rows < ROWS[-1] else tuple(FORMATS), ceilings)
    results += wire([name for name in FORMATS if "swizzled" not in name], ceilings)  # tiles cannot be split by rows
    Console(width=150).print(show(results), measure.environment(), ceilings._asdict())
    measure.save(arguments.results, "quantize", [one._asdict() for one in results], **ceilings._asdict())


if __name__ == "__main__":
    main()
