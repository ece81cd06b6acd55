"""On a GPU: every class and whole models through the Triton runner, compiled, captured, with a static cache, and over quantised weights."""

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from moe_typed.integrations.transformers import NAME, hold_mxfp4, layer_reports, prepare, register
from moe_typed.integrations.transformers.implementation import held_by
from moe_typed.integrations.transformers.survey import ExpertsClass, find_experts_classes
from tests.integrations.transformers import test_quantized as quantized
from tests.integrations.transformers.support import TOLERANCE, eager, error, inputs, random, typed
from tests.integrations.transformers.test_models import compile_model, every_model, make, registered, tokens
from tests.ops.support import on_cuda

pytestmark = [*on_cuda, pytest.mark.usefixtures("registered")]
__all__ = ["registered"]  # the fixture, which this module shares
two_models = pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
torch_warns = pytest.mark.filterwarnings("default::UserWarning")  # of its own choices, while it compiles


def on_gpu(name: str, dtype: torch.dtype = torch.float32, experts: str = "eager") -> Any:
    return make(name, experts, dtype).cuda()


def logits(model: Any, ids: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return cast("Tensor", model(tokens().cuda() if ids is None else ids, use_cache=False).logits)


def generate(model: Any, **options: object) -> Tensor:
    ids = tokens().cuda()
    return cast("Tensor", model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, **options))


def runners(model: nn.Module) -> set[str]:
    return {row.plan.runner if row.plan is not None else row.refusal for row in layer_reports(model)}


@pytest.mark.parametrize("experts", find_experts_classes(), ids=lambda experts: experts.name)
def test_every_class_gives_what_its_own_forward_gives(experts: ExpertsClass) -> None:
    for dtype, tolerance in TOLERANCE.items():
        module, run = experts.small(dtype).cuda(), typed()
        own = copy.deepcopy(module)
        with torch.no_grad():
            for rows in (0, 1, 5, 64):
                given = [tensor.cuda() for tensor in inputs(rows, dtype, seed=rows)]
                assert error(run(module, *given), eager(own, *given)) <= tolerance
        held = held_by(module)
        assert held is not None
        assert held.found.report.runner == "triton"


@every_model
def test_generates_the_tokens_of_its_own_experts(name: str) -> None:
    model = on_gpu(name)
    own, own_logits = generate(model), logits(model)
    model.set_experts_implementation(NAME)
    assert torch.equal(generate(model), own)
    assert error(logits(model), own_logits) < TOLERANCE[torch.float32]
    assert runners(model) == {"triton"}


@torch_warns
@two_models
def test_generates_them_with_a_static_cache_too(name: str) -> None:
    """transformers compiles the model for that itself, and captures it in CUDA graphs."""
    model = on_gpu(name)
    own = generate(model)
    model.set_experts_implementation(NAME)
    torch.compiler.reset()
    prepare(model)
    assert torch.equal(generate(model, cache_implementation="static"), own)
    torch.compiler.reset()


@torch_warns
@two_models
def test_compiles_whole_by_inductor_and_follows_changes_in_place(name: str) -> None:
    model = on_gpu(name, torch.bfloat16, NAME)
    torch.compiler.reset()
    with torch.no_grad():
        prepare(model)
        compiled = compile_model(model, fullgraph=True, backend="inductor")
        for _ in range(2):
            truth = logits(copy.deepcopy(model).float())
            near = max(1.5 * error(logits(model).float(), truth), TOLERANCE[torch.bfloat16])
            assert error(logits(compiled).float(), truth) < near
            for parameter in model.parameters():
                parameter.mul_(0.9)
    torch.compiler.reset()


@two_models
def test_replays_of_a_graph_follow_tokens_and_weights(name: str) -> None:
    model = on_gpu(name, torch.bfloat16, NAME)
    ids = tokens().cuda()
    logits(model, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = logits(model, ids)
    for seed in range(3):
        ids.copy_(torch.randint(2, 60, ids.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(captured, logits(model, ids))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)


def test_fp8_blocks_run_without_dequantising() -> None:
    """Rows are quantised on the way: what that may cost is held to four roundings to e4m3, two of rows, each with what it multiplies."""
    module = quantized.fp8()
    rows = random(quantized.ROWS, quantized.HIDDEN, seed=9)
    with torch.no_grad():
        expected = typed()(copy.deepcopy(module), rows, *quantized.routes())
        got = typed()(module.cuda(), rows.cuda(), *(tensor.cuda() for tensor in quantized.routes()))
    held = held_by(module)
    assert held is not None
    assert held.found.report.runner == "triton"
    assert held.adapted.copied == 0
    assert error(got.cpu(), expected) < 4 * 2.0**-4


def test_mxfp4_blocks_run_without_dequantising() -> None:
    case = quantized.TestMxFp4()
    model = case.model()
    hold_mxfp4(model)
    model.set_experts_implementation(NAME)
    register()
    model.load_state_dict(case.state(model), strict=False)
    expected = logits(model, tokens() % 32)
    model.cuda()
    assert error(logits(model, (tokens() % 32).cuda()).cpu(), expected) < 2.0**-8
    assert runners(model) == {"triton"}
