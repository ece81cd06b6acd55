"""Expert layers and whole models of transformers on a GPU: moe_typed (Triton) beside the package's own grouped_mm and batched_mm.

Models have the widths of Qwen3-30B-A3B and of gpt-oss-20b, few layers, a small vocabulary and random bf16 weights. Before anything is timed, every
implementation's experts are compared with the package's eager ones in float32: moe_typed may be no farther from them than 1.5 times eager in bf16.
Where an implementation cannot be captured in a CUDA graph, its graph time is missing; the loop of calls from Python is timed all the same.

    python -m benchmarks.transformers_cuda [--results FOLDER] [--quick]
"""

import copy
import importlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks import _measure as measure
from moe_typed.integrations.transformers import NAME, layer_reports, prepare, register
from moe_typed.plan import relative_error

IMPLEMENTATIONS: Final = (NAME, "grouped_mm", "batched_mm")
TOKENS: Final = (1, 16, 256, 2048)
_SETS: Final = 4  # of inputs that a cell rotates through
_MAX_GATHERED: Final = 32 * 2**30  # bytes of weights that batched_mm may copy: it has those of each route apart
_CHECKED: Final = 64  # tokens that implementations are compared on
_ROOM: Final = 1.5  # how much farther from the truth than eager in bf16 an implementation may be
_FLOOR: Final = 2.0**-8  # and what is no fault in any case: one rounding to bf16

_SHARED: Final[dict[str, object]] = {"vocab_size": 1024, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS: Final[dict[str, dict[str, object]]] = {
    # https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
    "Qwen3Moe": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
    # https://huggingface.co/openai/gpt-oss-20b/blob/main/config.json
    "GptOss": {
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
}

Forward: TypeAlias = partial[object]


class Config(Protocol):
    """What is read of a config."""

    hidden_size: int
    num_local_experts: int
    num_experts_per_tok: int


class Model(Protocol):
    """What is asked of a model: its classes have no stubs here."""

    config: Config

    def set_experts_implementation(self, experts_implementation: str) -> None: ...
    def get_submodule(self, target: str) -> nn.Module: ...
    def __call__(self, input_ids: Tensor, *, use_cache: bool) -> object: ...


class Row(NamedTuple):
    """One measured cell: ``what`` is "experts" (one layer's) or "model"; microseconds of one call, NaN where it cannot be captured."""

    model: str
    what: str
    tokens: int
    implementation: str
    graph_us: float
    p10_us: float
    p90_us: float
    python_us: float
    error: float
    eager_error: float


def make(name: str) -> Model:
    """Return a model of random weights in bf16."""
    package = importlib.import_module("transformers")
    config = getattr(package, f"{name}Config")(**_SHARED, **MODELS[name])
    with torch.device("cuda"):
        model: Any = getattr(package, f"{name}ForCausalLM")(config).to(torch.bfloat16).eval()
        generator = torch.Generator("cuda").manual_seed(0)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "norm" not in key:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * parameter.shape[-1] ** -0.5)
    return cast("Model", model)


def experts_of(model: Model) -> nn.Module:
    """Return the experts of the first layer."""
    return model.get_submodule("model.layers.0.mlp.experts")


def routed(model: Model, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows with random routes, and weights that add up to 1."""
    config = model.config
    generator = torch.Generator("cuda").manual_seed(seed)
    rows = torch.randn(tokens, config.hidden_size, generator=generator, device="cuda").to(torch.bfloat16)
    ids = torch.rand(tokens, config.num_local_experts, generator=generator, device="cuda").argsort(1)[:, : config.num_experts_per_tok]
    weights = torch.rand(ids.shape, generator=generator, device="cuda")
    return rows, ids, (weights / weights.sum(1, keepdim=True)).to(torch.bfloat16)


def errors(model: Model) -> dict[str, float]:
    """Return each implementation's distance from the eager experts in float32. Raises: RuntimeError where moe_typed's is too large."""
    experts, inputs = experts_of(model), routed(model, _CHECKED, seed=9)
    rows, ids, weights = inputs
    found: dict[str, float] = {}
    model.set_experts_implementation("eager")
    with torch.no_grad():
        truth = copy.deepcopy(experts).float()(rows.float(), ids, weights.float())
        for implementation in ("eager", *IMPLEMENTATIONS):
            model.set_experts_implementation(implementation)
            found[implementation] = relative_error(experts(rows, ids, weights), truth)
    if found[NAME] > max(_ROOM * found["eager"], _FLOOR):
        raise RuntimeError(f"{NAME} is {found[NAME]:.2e} from the truth, eager {found['eager']:.2e}")
    return found


def calls_of(model: Model, what: str, tokens: int) -> list[Forward]:
    """Return one call for each set of inputs."""
    if what == "experts":
        return [partial(experts_of(model), *routed(model, tokens, seed)) for seed in range(_SETS)]
    ids = [torch.randint(3, 1000, (1, tokens), device="cuda", generator=torch.Generator("cuda").manual_seed(seed)) for seed in range(_SETS)]
    return [partial(model, each, use_cache=False) for each in ids]


def fits(model: Model, implementation: str, tokens: int) -> bool:
    """Say whether an implementation has the memory for a cell."""
    if implementation != "batched_mm":
        return True
    of_expert = sum(parameter[0].numel() * parameter.element_size() for parameter in experts_of(model).parameters() if parameter.dim() == 3)
    return tokens * model.config.num_experts_per_tok * of_expert <= _MAX_GATHERED


def captured(calls: Sequence[Forward]) -> measure.Timing:
    """Return the time in a graph; none where a call waits for the device, which capture forbids."""
    try:
        return measure.in_graph(calls)
    except RuntimeError as error:
        torch.cuda.synchronize()
        Console().print(f"not captured: {str(error).splitlines()[0]}")
        return measure.NOT_TIMED


def measured(name: str, model: Model, distance: dict[str, float], sizes: Sequence[int]) -> Iterator[Row]:
    """Yield the cells of a model."""
    for what in ("experts", "model"):
        for tokens in sizes:
            for implementation in IMPLEMENTATIONS:
                if not fits(model, implementation, tokens):
                    continue
                model.set_experts_implementation(implementation)
                calls = calls_of(model, what, tokens)
                python_us = measure.from_python(calls)
                yield Row(name, what, tokens, implementation, *captured(calls), python_us, distance[implementation], distance["eager"])


def compiled(name: str, model: Model, distance: dict[str, float], sizes: Sequence[int]) -> Iterator[Row]:
    """Yield the whole model under torch.compile, of the implementations that it takes whole."""
    compiler: Any = vars(torch)["compile"]  # torch types it by halves
    for implementation in (NAME, "grouped_mm"):
        model.set_experts_implementation(implementation)
        if implementation == NAME:
            prepare(cast("nn.Module", model))
        for tokens in sizes:
            torch.compiler.reset()
            whole = compiler(model, fullgraph=True, dynamic=False)
            calls = [partial(whole, *call.args, **call.keywords) for call in calls_of(model, "model", tokens)]
            python_us = measure.from_python(calls)
            yield Row(name, "model, compiled", tokens, implementation, *captured(calls), python_us, distance[implementation], distance["eager"])


def show(rows: Sequence[Row]) -> Table:
    """Return the cells as a table."""
    table = Table("model", "what", "tokens", "by", "graph us", "x ours", "python us", "x ours", "error", title="Experts of transformers")
    ours = {(row.model, row.what, row.tokens): row for row in rows if row.implementation == NAME}
    for row in rows:
        mine = ours[row.model, row.what, row.tokens]
        table.add_row(
            row.model,
            row.what,
            str(row.tokens),
            row.implementation,
            f"{row.graph_us:.1f}",
            f"{row.graph_us / mine.graph_us:.2f}",
            f"{row.python_us:.0f}",
            f"{row.python_us / mine.python_us:.2f}",
            f"{row.error:.1e}",
        )
    return table


def main() -> None:
    """Measure, print, and write the JSON that was asked for."""
    parser = measure.arguments_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="two sizes, and nothing compiled")
    arguments = parser.parse_args()
    register()
    sizes = TOKENS[1:3] if arguments.quick else TOKENS
    rows: list[Row] = []
    with torch.no_grad():
        for name in MODELS:
            model = make(name)
            distance = errors(model)
            model.set_experts_implementation(NAME)
            runners = {row.plan.runner if row.plan is not None else row.refusal for row in layer_reports(cast("nn.Module", model))}
            if runners != {"triton"}:
                raise RuntimeError(f"{name} is to be run by the Triton runner; it would be run by {', '.join(sorted(runners))}")
            rows += measured(name, model, distance, sizes)
            if not arguments.quick:
                rows += compiled(name, model, distance, sizes)
            del model
            torch.cuda.empty_cache()
    Console(width=160).print(show(rows))
    measure.save(arguments.results, "transformers", [one._asdict() for one in rows], transformers=importlib.import_module("transformers").__version__)


if __name__ == "__main__":
    main()
