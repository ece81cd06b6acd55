"""Whole models: the tokens, logits and gradients of their own experts; compiled, saved and loaded."""

import importlib
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, cast

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe_typed.integrations.transformers import NAME, configure, layer_reports, prepare, register, registration, report
from moe_typed.integrations.transformers.adapt import adapt
from moe_typed.integrations.transformers.implementation import held_by
from moe_typed.integrations.transformers.modules import read_stored
from moe_typed.runners import UnsupportedError
from tests.integrations.transformers.support import TOLERANCE, error

SMALL: Final = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 63,
    "max_position_embeddings": 64,
}
LATENT: Final = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_group": 2, "topk_group": 1}
MODELS: Final[dict[str, dict[str, object]]] = {
    "Qwen3Moe": {"moe_intermediate_size": 16, "intermediate_size": 32, "num_experts": 6, "head_dim": 16},
    "Mixtral": {"intermediate_size": 16, "num_local_experts": 4},
    "GptOss": {"intermediate_size": 16, "num_local_experts": 4, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "DeepseekV3": {"moe_intermediate_size": 16, "intermediate_size": 32, "n_routed_experts": 8, "first_k_dense_replace": 1, **LATENT},
    "Olmoe": {"intermediate_size": 16, "num_experts": 4},
}
every_model = pytest.mark.parametrize("name", MODELS)


def mappings() -> list[dict[str, object]]:
    """Return where transformers keeps its implementations, for dense and for fp8 experts."""
    places = (("moe", "ExpertsInterface"), ("finegrained_fp8", "FP8ExpertsInterface"))
    return [getattr(importlib.import_module(f"transformers.integrations.{module}"), name)._global_mapping for module, name in places]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Register for one test, and leave nothing behind."""
    register()
    yield
    for mapping in mappings():
        mapping.pop(NAME, None)


def make(name: str, experts: str = "eager", dtype: torch.dtype = torch.float32) -> Any:
    """Return a model of random weights; it is untyped, as the library's stubs here are the few that the package needs."""
    package = importlib.import_module("transformers")
    config = getattr(package, f"{name}Config")(**SMALL, **MODELS[name])
    generator = torch.Generator().manual_seed(0)
    model = getattr(package, f"{name}ForCausalLM")(config).eval().to(dtype)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" not in key:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.set_experts_implementation(experts)
    return model


def tokens() -> Tensor:
    return torch.randint(2, 60, (2, 7), generator=torch.Generator().manual_seed(3))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return cast("Tensor", model(tokens(), use_cache=False).logits)


def generate(model: Any, **options: object) -> Tensor:
    return cast("Tensor", model.generate(tokens(), attention_mask=torch.ones_like(tokens()), max_new_tokens=8, do_sample=False, **options))


@every_model
def test_generates_the_tokens_of_its_own_experts(name: str) -> None:
    model = make(name)
    own, own_logits = generate(model), logits(model)
    model.set_experts_implementation(NAME)
    assert torch.equal(generate(model), own)
    assert torch.equal(generate(model, cache_implementation="static"), own)
    assert error(logits(model), own_logits) < TOLERANCE[torch.float32]
    assert all(not row.refusal for row in layer_reports(model))
    assert len({int(token) for token in own.flatten()}) > 4  # the models say something


@every_model
def test_bf16_logits_are_as_near_to_the_truth_as_its_own(name: str) -> None:
    truth = logits(make(name).to(torch.bfloat16).to(torch.float32))
    own = error(logits(make(name, dtype=torch.bfloat16)).float(), truth)
    assert error(logits(make(name, NAME, torch.bfloat16)).float(), truth) < max(1.5 * own, TOLERANCE[torch.bfloat16])


@every_model
def test_gradients_are_those_of_its_own_experts(name: str) -> None:
    model = make(name)
    found: list[dict[str, Tensor]] = []
    for experts in ("eager", NAME):
        model.set_experts_implementation(experts)
        model.zero_grad()
        model(tokens(), labels=tokens()).loss.backward()
        found.append({key: parameter.grad.clone() for key, parameter in model.named_parameters() if parameter.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert any("experts" in key for key in found[0])
    for key, expected in found[0].items():
        torch.testing.assert_close(found[1][key], expected, rtol=1e-3, atol=1e-5)


def compile_model(model: Any, *, fullgraph: bool, backend: str = "eager") -> Any:
    compiler: Any = vars(torch)["compile"]  # torch types it by halves
    return compiler(model, backend=backend, fullgraph=fullgraph)


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_compiles_whole_once_it_is_prepared(name: str) -> None:
    model = make(name)
    own = logits(model)
    model.set_experts_implementation(NAME)
    torch.compiler.reset()
    with torch.no_grad():
        prepare(model)
        compiled = compile_model(model, fullgraph=True)
        assert error(logits(compiled), own) < TOLERANCE[torch.float32]
        for parameter in model.parameters():
            parameter.mul_(0.9)
        changed = logits(compiled)
        model.set_experts_implementation("eager")
        assert error(changed, logits(model)) < TOLERANCE[torch.float32]
    torch.compiler.reset()


def change_limit(experts: Any) -> None:
    experts.limit = 0.05


def replace_weights(experts: Any) -> None:
    experts.down_proj = nn.Parameter(experts.down_proj * 1.5)


def turn_weights(experts: Any) -> None:
    experts.down_proj.data = 1.5 * experts.down_proj.data.mT.contiguous().mT


@pytest.mark.parametrize("change", [change_limit, replace_weights, turn_weights], ids=lambda change: change.__name__)
def test_compiled_code_asks_for_another_layer_where_the_module_has_changed(change: Callable[[Any], None]) -> None:
    model = make("GptOss", NAME)
    torch.compiler.reset()
    with torch.no_grad():
        prepare(model)
        compiled = compile_model(model, fullgraph=True)
        logits(compiled)
        for _, module in registration.experts_of(model):
            change(module)
        with pytest.raises(RuntimeError, match=r"call moe_typed.integrations.transformers.prepare\(model\) before torch.compile\(fullgraph=True\)"):
            logits(compiled)
        prepare(model)
        changed = logits(compiled)
        model.set_experts_implementation("eager")
        assert error(changed, logits(model)) < TOLERANCE[torch.float32]
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
def test_compiled_code_asks_for_another_layer_where_weights_are_frozen_no_longer() -> None:
    """Views of frozen weights, which they are where they were laid out anew, have no gradients."""
    model = make("GptOss", NAME)
    model.requires_grad_(False)
    for _, module in registration.experts_of(model):
        adapt(read_stored(module), row_major=True)
    prepare(model)
    torch.compiler.reset()
    compiled = compile_model(model, fullgraph=True)
    compiled(tokens(), use_cache=False)
    model.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"call moe_typed.integrations.transformers.prepare\(model\)"):
        compiled(tokens(), use_cache=False)
    prepare(model)
    compiled(tokens(), use_cache=False).logits.sum().backward()
    assert all(module.get_parameter("gate_up_proj").grad is not None for _, module in registration.experts_of(model))
    torch.compiler.reset()


def test_compiles_with_a_break_where_it_is_not_prepared() -> None:
    model = make("Qwen3Moe")
    own = logits(model)
    model.set_experts_implementation(NAME)
    torch.compiler.reset()
    with torch.no_grad():
        compiled = compile_model(model, fullgraph=False)
        assert error(logits(compiled), own) < TOLERANCE[torch.float32]
        assert error(logits(compiled), own) < TOLERANCE[torch.float32]
    torch.compiler.reset()


def test_is_chosen_when_a_model_is_loaded(tmp_path: Path) -> None:
    model = make("Qwen3Moe")
    model.save_pretrained(tmp_path)
    loaded: Any = model.from_pretrained(tmp_path, experts_implementation=NAME).eval()
    assert loaded.config._experts_implementation == NAME
    assert error(logits(loaded), logits(model)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("wire", "conversions"), [("bf16", ()), ("mxfp8", ("quantize to mxfp8", "upscale"))])
def test_a_wire_that_is_asked_for_is_taken(wire: Any, conversions: tuple[str, ...]) -> None:
    model = make("Qwen3Moe", NAME, torch.bfloat16)
    own = logits(model)
    configure(model, wire=wire)
    assert {held.found.report.wire for held in prepare(model)} == {wire}
    assert all(len(row.conversions) == len(conversions) for row in layer_reports(model))
    assert torch.equal(logits(model), own) is not bool(conversions)


def test_a_wire_that_cannot_be_is_refused_and_the_report_says_so() -> None:
    model = make("Qwen3Moe", NAME, torch.bfloat16)
    configure(model, wire="fp8-block128")
    with pytest.raises(UnsupportedError, match=r"Qwen3MoeExperts: no runner can do this: .*hidden = 32 is not a multiple of 128"):
        prepare(model)
    with pytest.raises(UnsupportedError, match="hidden = 32 is not a multiple of 128"):
        logits(model)
    assert all("hidden = 32 is not a multiple of 128" in row.refusal for row in layer_reports(model))


def test_debug_changes_no_result() -> None:
    model = make("Qwen3Moe", NAME)
    own = logits(model)
    configure(model, debug="strict")
    assert torch.equal(logits(model), own)


def test_the_report_is_one_table_of_all_layers() -> None:
    model = make("DeepseekV3", NAME)
    console = Console(record=True, width=240)
    rows = report(model, console)
    text = console.export_text()
    assert [row.layer for row in rows] == ["model.layers.1.mlp.experts"]
    assert "DeepseekV3Experts" in text
    assert "Fp32ExpertWeights, silu: reference > combine" in text
    assert rows[0].conversions == ()
    assert rows[0].bytes_moved == 0
    configure(model, wire="bf16")
    (row,) = report(model, console)
    assert row.conversions
    # One row of 32 channels is read in float32 and written in bfloat16.
    assert row.bytes_moved == 32 * (4 + 2) + 32 * (2 + 4) * (len(row.conversions) - 1)


def test_a_refused_layer_is_a_row_of_the_report() -> None:
    model = make("Qwen3Moe", NAME)
    configure(model, runner="triton")
    console = Console(record=True, width=240)
    rows = report(model, console)
    assert all(row.refusal.startswith("no runner can do this: triton") for row in rows)
    assert "refused: no runner can do this" in console.export_text()


def test_nothing_is_done_before_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    model: PreTrainedModel = make("Olmoe")
    for mapping in mappings():
        monkeypatch.delitem(mapping, NAME)
    with pytest.raises(RuntimeError, match=r"call moe_typed\.integrations\.transformers\.register"):
        prepare(model)
    with pytest.raises(ValueError, match="moe_typed"):
        model.set_experts_implementation(NAME)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(ImportError, match=r"pip install 'moe-typed\[transformers\]'"):
        registration.register()


class Offload:
    """What accelerate's hooks do for a module whose weights are kept elsewhere: they come before its forward and go after it."""

    offload = True

    def __init__(self, module: nn.Module) -> None:
        self.away = {name: parameter.detach().clone() for name, parameter in module.named_parameters(recurse=False)}
        self.brought: list[weakref.ref[Tensor]] = []
        module.register_forward_pre_hook(self.bring)
        module.register_forward_hook(self.take)
        self.take(module)

    def bring(self, module: nn.Module, *_: object) -> None:
        assert all(tensor() is None for tensor in self.brought), "weights of the last forward are still held"
        self.brought = []
        for name, tensor in self.away.items():
            here = nn.Parameter(tensor.clone(), requires_grad=False)
            self.brought.append(weakref.ref(here))
            setattr(module, name, here)

    def take(self, module: nn.Module, *_: object) -> None:
        for name, tensor in self.away.items():
            setattr(module, name, nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=False))


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_offloaded_weights_are_prepared_when_they_come_and_let_go(name: str) -> None:
    model = make(name)
    own = generate(model)
    model.set_experts_implementation(NAME)
    for _, module in registration.experts_of(model):
        vars(module)["_hf_hook"] = Offload(module)
    assert prepare(model) == ()
    assert all("meta device" in row.refusal for row in layer_reports(model))
    assert torch.equal(generate(model), own)
    assert all(held_by(module) is None for _, module in registration.experts_of(model))
    assert all(row.plan is not None for row in layer_reports(model))
