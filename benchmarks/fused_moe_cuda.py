"""The Triton runner on layers of known models: GPU time of one layer in a graph with a cold L2, against the floor, torch and the best known figure.

Every cell is checked against float32 before it is timed. The floor is the larger of the weights of the experts hit, at the bandwidth of a large copy,
and of the arithmetic, at the rate of a large product (fp8: twice that of bf16). Rows are normal; experts are drawn uniformly, or by Zipf's law.

    python -m benchmarks.fused_moe_cuda [--results FOLDER] [--shapes NAMES] [--tokens NUMBERS] [--loads NAMES]
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import _measure as measure
from moe_typed import Bf16ExpertWeights, Bf16Rows, LocalIds, Payload, Routing, Settled, quantize_fp8_block128
from moe_typed.ops.product_plans.files import LayerKey
from moe_typed.runners.triton.runner import TritonRunner
from moe_typed.stages import FlatRowsInput
from moe_typed.tuning.layers import random_weights, tuned_runner

TOKENS: Final = (1, 8, 64, 512, 4096, 16384)
_BANDWIDTH, _BF16_RATE = 4.3e6, 790e6  # bytes and operations in a microsecond: ceilings measured on an H200
_CHECKED: Final = 16  # tokens


class Shape(NamedTuple):
    """Experts here, experts routed to, top-k, and the widths."""

    experts: int
    routed: int
    top_k: int
    hidden: int
    inter: int


SHAPES: Final = {
    "qwen3-30b-a3b": Shape(128, 128, 8, 2048, 768),
    "mixtral-8x7b": Shape(8, 8, 2, 4096, 14336),
    "dsv3-ep8": Shape(32, 256, 8, 7168, 2048),
    "dsv3-tp8": Shape(256, 256, 8, 7168, 256),
    "gpt-oss-120b": Shape(128, 128, 4, 2880, 2880),
}

# The best of SGLang 0.5.23, vLLM 0.33.0, DeepGEMM, quack, triton_kernels and transformers, in microseconds by TOKENS, measured so on one H200.
PEERS: Final = {
    ("qwen3-30b-a3b", "bf16"): (32.3, 133.5, 300.4, 335.5, 780.5, 2204.0),
    ("qwen3-30b-a3b", "fp8"): (29.2, 87.2, 166.4, 211.0, 539.9, 1711.0),
    ("mixtral-8x7b", "bf16"): (186.5, 576.1, 667.1, 969.0, 4716.0, 17633.0),
    ("mixtral-8x7b", "fp8"): (118.0, 309.4, 360.5, 502.1, 2503.0, 10551.0),
    ("dsv3-ep8", "bf16"): (53.1, 163.5, 606.9, 735.6, 1106.0, 2812.0),
    ("dsv3-ep8", "fp8"): (43.0, 98.8, 320.9, 426.7, 635.5, 1804.0),
    ("dsv3-tp8", "bf16"): (45.7, 171.1, 607.7, 698.5, 1448.0, 3699.0),
    ("dsv3-tp8", "fp8"): (35.3, 99.2, 318.8, 407.1, 1016.0, 2926.0),
}
# And what share of its floor that was: another draw of experts hits another number of them, so that ratios are compared.
PEER_RATIOS: Final = {
    ("qwen3-30b-a3b", "bf16"): (1.84, 1.15, 1.09, 1.19, 1.99, 1.41),
    ("qwen3-30b-a3b", "fp8"): (3.32, 1.50, 1.21, 1.50, 2.76, 2.19),
    ("mixtral-8x7b", "bf16"): (1.14, 1.00, 1.02, 1.48, 1.29, 1.21),
    ("mixtral-8x7b", "fp8"): (1.44, 1.08, 1.10, 1.53, 1.37, 1.44),
    ("dsv3-ep8", "bf16"): (2.59, 1.09, 1.05, 1.12, 1.69, 1.55),
    ("dsv3-ep8", "fp8"): (4.20, 1.31, 1.11, 1.30, 1.94, 1.98),
    ("dsv3-tp8", "bf16"): (2.23, 1.13, 1.06, 1.07, 2.21, 2.02),
    ("dsv3-tp8", "fp8"): (3.45, 1.31, 1.11, 1.24, 3.10, 3.20),
}


class Row(NamedTuple):
    """What was measured of one layer at one number of tokens."""

    shape: str
    format: str
    load: str
    tokens: int
    routes: int
    experts_hit: int
    error: float
    graph_us: float
    p10_us: float
    p90_us: float
    floor_us: float
    torch_us: float | None
    peer_us: float | None
    peer_ratio: float | None


class Layer(NamedTuple):
    """Random weights of a shape; ``scales`` for fp8."""

    shape: Shape
    w13: Tensor
    w2: Tensor
    scales: tuple[Tensor, Tensor] | None
    runner: TritonRunner


def make_layer(shape: Shape, fmt: str) -> Layer:
    weights = random_weights(LayerKey(fmt, shape.experts, shape.top_k, shape.hidden, shape.inter))
    scales = None if isinstance(weights, Bf16ExpertWeights) else (weights.w13_scale, weights.w2_scale)
    return Layer(shape, weights.w13, weights.w2, scales, tuned_runner(weights))


def make_routing(shape: Shape, tokens: int, load: str) -> Routing[LocalIds]:
    generator = torch.Generator("cuda").manual_seed(tokens)
    noise = torch.rand(tokens, shape.routed, device="cuda", generator=generator).clamp(1e-7, 1 - 1e-7)
    logits = -torch.log(-torch.log(noise))  # Gumbel: the k largest are a draw without replacement
    if load == "zipf":
        logits -= torch.log(torch.randperm(shape.routed, device="cuda", generator=generator) + 1.0)
    chosen = logits.topk(shape.top_k, 1).indices.to(torch.int32)
    ids = torch.where(chosen < shape.experts, chosen, -1)
    ids[0, 0] = chosen[0, 0] % shape.experts  # one route at least
    weights = torch.rand(tokens, shape.top_k, device="cuda", generator=generator) + 0.1
    return Routing(ids, weights, LocalIds, shape.experts, Settled(), False, tokens)


def _matrix(weights: Tensor, scale: Tensor | None, expert: int) -> Tensor:
    values = weights[expert].float()
    return values if scale is None else values * scale[expert].repeat_interleave(128, 0).repeat_interleave(128, 1)


def reference(layer: Layer, payload: Payload, routing: Routing[LocalIds], tokens: Tensor) -> Tensor:
    """Return some rows of the layer in float32."""
    rows, (s13, s2) = payload.dequantize()[tokens], layer.scales or (None, None)
    out = torch.zeros_like(rows)
    for place, token in enumerate(int(one) for one in tokens):
        for expert, weight in zip(routing.topk_ids[token], routing.topk_weights[token], strict=True):
            if int(expert) >= 0:
                gate, up = (_matrix(layer.w13, s13, int(expert)) @ rows[place]).chunk(2)
                out[place] += weight * (_matrix(layer.w2, s2, int(expert)) @ (torch.nn.functional.silu(gate) * up))
    return out


def _norm(rows: Tensor) -> float:
    return float(rows.square().sum().sqrt())


def torch_grouped(layer: Layer, rows: Tensor, routing: Routing[LocalIds]) -> Tensor:
    """Do the same with torch's grouped product over sorted rows."""
    ids, top_k = routing.topk_ids.flatten(), routing.topk_ids.shape[1]
    by_expert, order = torch.where(ids < 0, layer.shape.experts, ids).sort()
    ends = torch.searchsorted(by_expert, torch.arange(layer.shape.experts, dtype=torch.int32, device="cuda"), right=True).to(torch.int32)
    source = order // top_k
    grouped = cast("Callable[..., Tensor]", getattr(torch, "_grouped_mm"))  # noqa: B009
    gate, up = grouped(rows[source], layer.w13.transpose(1, 2), offs=ends).chunk(2, 1)
    found = grouped(torch.nn.functional.silu(gate) * up, layer.w2.transpose(1, 2), offs=ends)
    weights = torch.where(ids < 0, 0.0, routing.topk_weights.flatten())[order]
    return torch.zeros_like(rows).index_add_(0, source, torch.where(weights[:, None] != 0, found * weights[:, None], 0.0).to(rows.dtype))


def cell(name: str, fmt: str, load: str, layer: Layer, tokens: int) -> Row:
    shape, runner = layer.shape, layer.runner
    data = torch.randn(tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
    payload: Payload = Bf16Rows(data) if fmt == "bf16" else quantize_fp8_block128.run(Bf16Rows(data))
    routing = make_routing(shape, tokens, load)
    runner_input = FlatRowsInput(payload, routing)
    some = torch.randperm(tokens, device="cuda")[:_CHECKED]
    wanted = reference(layer, payload, routing, some)
    error = _norm(runner.run(runner_input).hidden_states[some].float() - wanted) / max(_norm(wanted), 1e-30)
    if not error < (0.05 if fmt == "fp8" else 0.01) and bool(wanted.any()):
        raise RuntimeError(f"{name} {fmt} at {tokens} tokens is wrong: relative error {error}")
    replays = 12 if tokens > 512 else 30
    timing = measure.in_graph([partial(runner.run, runner_input)], replays)
    torch_us = None
    if fmt == "bf16" and load == "uniform":
        torch_us = measure.in_graph([partial(torch_grouped, layer, data, routing)], replays).median
    kept = routing.topk_ids[routing.topk_ids >= 0]
    hit = int((torch.bincount(kept.flatten()) > 0).sum())
    size = 1 if fmt == "fp8" else 2
    floor = max(hit * 3 * shape.hidden * shape.inter * size / _BANDWIDTH, 6 * kept.numel() * shape.hidden * shape.inter * size / 2 / _BF16_RATE)
    known = (name, fmt) in PEERS and load == "uniform" and tokens in TOKENS
    peer = (PEERS[name, fmt][TOKENS.index(tokens)], PEER_RATIOS[name, fmt][TOKENS.index(tokens)]) if known else (None, None)
    return Row(name, fmt, load, tokens, kept.numel(), hit, error, *timing, floor, torch_us, *peer)


def cells(shapes: Sequence[str], tokens: Sequence[int], loads: Sequence[str]) -> Iterator[Row]:
    for name in shapes:
        for fmt in ("bf16", "fp8"):
            if fmt == "fp8" and SHAPES[name].hidden % 128:
                continue
            layer = make_layer(SHAPES[name], fmt)
            for load in loads:
                for count in tokens:
                    yield cell(name, fmt, load, layer, count)
            del layer
            torch.cuda.empty_cache()


def show(rows: Sequence[Row]) -> Table:
    table = Table("shape", "format", "load", "tokens", "hit", "us", "x floor", "peer us", "peer x floor", "torch us", "error", title="One layer")
    for row in rows:
        peer = ("", "") if row.peer_us is None else (f"{row.peer_us:.1f}", f"{row.peer_ratio:.2f}")
        figures = (
            f"{row.graph_us:.1f}",
            f"{row.graph_us / row.floor_us:.2f}",
            *peer,
            "" if row.torch_us is None else f"{row.torch_us:.0f}",
            f"{row.error:.1e}",
        )
        table.add_row(row.shape, row.format, row.load, str(row.tokens), str(row.experts_hit), *figures)
    return table


def main() -> None:
    parser = measure.arguments_of(__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="names, by commas")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="numbers, by commas")
    parser.add_argument("--loads", default="uniform,zipf", help="how experts are drawn: names, by commas")
    arguments = parser.parse_args()

    torch.random.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    tokens = [int(one) for one in cast("str", arguments.tokens).split(",")]
    results: list[Row] = []
    for row in cells(cast("str", arguments.shapes).split(","), tokens, cast("str", arguments.loads).split(",")):
        results.append(row)
        measure.save(arguments.results, "fused_moe", [one._asdict() for one in results])
    Console(width=150).print(show(results), measure.environment())


if __name__ == "__main__":
    main()
