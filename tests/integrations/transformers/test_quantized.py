"""Weights that transformers holds quantised become weight classes as they are: nothing is dequantised on the way."""

import importlib
from typing import Any, Final, cast

import pytest
import torch
from torch import Tensor, nn

from moe_typed import Interleaved, SiluAndMul, SwigluOai
from moe_typed.formats import Fp8Block128ExpertWeights, MxFp4ExpertWeights
from moe_typed.integrations.transformers import NAME, MxFp4Experts, Options, configure, hold_mxfp4, layer_reports, prepare, register
from moe_typed.integrations.transformers.implementation import held_by
from moe_typed.integrations.transformers.survey import EXPERTS
from moe_typed.runners import SwigluClamped, UnsupportedError
from moe_typed.runners.activations import GatedActivation
from tests.integrations.transformers.support import error, random, typed

HIDDEN, INTER, ROWS = 256, 128, 6
FP8 = torch.float8_e4m3fn


def fp8(scale_fmt: str = "float", *, hidden: int = HIDDEN, expert_dtype: str = "fp8", **options: Any) -> nn.Module:
    """Return experts as transformers replaces those of a model that is loaded in fp8."""
    finegrained = importlib.import_module("transformers.integrations.finegrained_fp8")
    interface = finegrained.ALL_FP8_EXPERTS_FUNCTIONS
    decorated = importlib.import_module("transformers.integrations.moe").use_experts_implementation(
        type("FP8Experts", (finegrained.FP8Experts,), {}), experts_interface=interface
    )
    config = importlib.import_module("transformers").Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=INTER, num_experts=EXPERTS)
    config.num_local_experts = EXPERTS
    config.swiglu_limit = options.pop("swiglu_limit", None)
    config._experts_implementation = NAME
    module = cast("nn.Module", decorated(config, block_size=(128, 128), scale_fmt=scale_fmt, expert_dtype=expert_dtype, **options))
    with torch.no_grad():
        for number, (name, parameter) in enumerate(module.named_parameters()):
            values = random(*parameter.shape, seed=number)
            if name.endswith("scale_inv"):
                parameter.data = torch.exp2(values.round()).to(parameter.dtype) if scale_fmt == "ue8m0" else values.abs() / 16
            else:
                parameter.data = values.mul(32).to(torch.int8) if expert_dtype == "fp4" else values.to(FP8)
    return module.eval()


def blocks(data: Tensor, scale: Tensor) -> Tensor:
    return data.float() * scale.float().repeat_interleave(128, 1).repeat_interleave(128, 2)


def by_loop(
    w13: Tensor, w2: Tensor, activation: GatedActivation, rows: Tensor, ids: Tensor, weights: Tensor, biases: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Return the layer's output in float32, over dequantised weights, a route at a time."""
    out = torch.zeros_like(rows)
    for row in range(rows.shape[0]):
        for expert, weight in zip(ids[row], weights[row], strict=True):
            joined, result = w13[expert] @ rows[row], torch.zeros(0)
            if biases is None:
                result = w2[expert] @ activation.apply(*joined.chunk(2))
            else:
                joined = joined + biases[0][expert].float()
                result = w2[expert] @ activation.apply(joined[::2], joined[1::2]) + biases[1][expert].float()
            out[row] += weight * result
    return out


def routes() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(ROWS)]), torch.rand(ROWS, 2, generator=generator)


LAYER: Final = typed()  # one for all calls: with other options, each would prepare its own


def run(module: nn.Module, rows: Tensor) -> Tensor:
    with torch.no_grad():
        return LAYER(module, rows, *routes())


@pytest.mark.parametrize(("limit", "activation"), [(None, SiluAndMul()), (1.5, SwigluClamped(1.5))])
@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_fp8_blocks_are_taken_as_they_are(scale_fmt: str, limit: float | None, activation: GatedActivation) -> None:
    module, rows = fp8(scale_fmt, swiglu_limit=limit), random(ROWS, HIDDEN, seed=9)
    got = run(module, rows)
    tensors = {name: parameter.detach() for name, parameter in module.named_parameters()}
    dense = [blocks(tensors[name], tensors[f"{name}_scale_inv"]) for name in ("gate_up_proj", "down_proj")]
    expected = by_loop(dense[0], dense[1], activation, rows, *routes())
    assert error(got, expected) < 2.0**-8  # results are rounded to bf16, in which fp8 models compute
    held = held_by(module)
    assert held is not None
    assert held.found.activation == activation
    weights = held.adapted.weights
    assert isinstance(weights, Fp8Block128ExpertWeights)
    assert weights.w13 is module.get_parameter("gate_up_proj")
    assert weights.w2 is module.get_parameter("down_proj")
    scales = tensors["gate_up_proj_scale_inv"].numel() + tensors["down_proj_scale_inv"].numel()
    assert held.adapted.copied == (4 * scales if scale_fmt == "ue8m0" else 0)


def test_a_copied_scale_follows_the_module_s() -> None:
    module, rows = fp8("ue8m0"), random(ROWS, HIDDEN, seed=9)
    before = run(module, rows)
    with torch.no_grad():
        module.get_parameter("down_proj_scale_inv").copy_(module.get_parameter("down_proj_scale_inv").float() * 2)
    assert torch.equal(run(module, rows), before * 2)


def test_a_copy_whose_change_could_not_be_seen_is_refused() -> None:
    with torch.inference_mode():
        module = fp8("ue8m0")
    with pytest.raises(UnsupportedError, match=r"made under torch.inference_mode\(\), so that their changes cannot be seen, and must be copied"):
        run(module, random(ROWS, HIDDEN, seed=9))


def test_rows_of_another_dtype_are_taken_too() -> None:
    module, rows = fp8(), random(ROWS, HIDDEN, seed=9)
    full = run(module, rows)
    half = run(module, rows.to(torch.bfloat16))
    assert half.dtype is torch.bfloat16
    assert error(half.float(), full) < 2.0**-7
    held = held_by(module)
    assert held is not None
    assert held.found.compute is torch.bfloat16


def test_compiled_code_would_not_see_a_change_of_what_was_copied() -> None:
    module, rows, layer = fp8("ue8m0"), random(ROWS, HIDDEN, seed=9), typed()
    compiler: Any = vars(torch)["compile"]  # torch types it by halves
    torch.compiler.reset()
    with torch.no_grad():
        layer(module, rows, *routes())
        with pytest.raises(Exception, match="these weights were copied when they were prepared"):  # dynamo wraps it, in some versions
            compiler(layer, backend="eager", fullgraph=True)(module, rows, *routes())
    torch.compiler.reset()


def test_packed_fp4_is_mxfp4() -> None:
    module, rows = fp8("ue8m0", expert_dtype="fp4"), random(ROWS, HIDDEN, seed=9)
    got = run(module, rows)
    tensors = {name: parameter.detach() for name, parameter in module.named_parameters()}
    dense = [mx_values(tensors[name].view(torch.uint8), tensors[f"{name}_scale_inv"].view(torch.uint8)) for name in ("gate_up_proj", "down_proj")]
    assert error(got, by_loop(dense[0], dense[1], SiluAndMul(), rows, *routes())) < 2.0**-8
    held = held_by(module)
    assert held is not None
    assert isinstance(held.adapted.weights, MxFp4ExpertWeights)
    assert held.adapted.weights.w13.data_ptr() == tensors["gate_up_proj"].data_ptr()


@pytest.mark.parametrize(
    ("module", "fragment"),
    [
        (lambda: fp8(activation_scheme="static"), "static activation scales"),
        (lambda: fp8(hidden=192), "width 192 and 128: 128 must divide both"),
        (lambda: fp8(expert_dtype="fp4"), "fp4 weights whose scales are torch.float32"),
    ],
    ids=["static", "width", "fp4 scales"],
)
def test_what_no_class_holds_is_refused_by_its_name(module: Any, fragment: str) -> None:
    experts = module()
    with pytest.raises(UnsupportedError, match=fragment):
        typed()(experts, random(ROWS, experts.hidden_dim, seed=1), *routes())


def test_scales_of_other_blocks_are_refused() -> None:
    module = fp8()
    scale = module.get_parameter("gate_up_proj_scale_inv").detach()
    module.gate_up_proj_scale_inv = nn.Parameter(scale[:, :1].clone(), requires_grad=False)
    with pytest.raises(UnsupportedError, match="scales of fp8 weights are"):
        run(module, random(ROWS, HIDDEN, seed=1))


# Values of e2m1 by code (OCP Microscaling Formats, section 5.3.3).
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def mx_values(packed: Tensor, scales: Tensor) -> Tensor:
    """Return float32 of uint8 (experts, rows, bytes), the low nibble first, and e8m0 scales (experts, rows, groups)."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(2).long()
    values = E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    return values * torch.exp2(scales.float() - 127).repeat_interleave(32, 2)


class TestMxFp4:
    def model(self) -> Any:
        package = importlib.import_module("transformers")
        config = package.GptOssConfig(
            vocab_size=32,
            hidden_size=64,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            num_local_experts=EXPERTS,
            num_experts_per_tok=2,
            pad_token_id=0,
            eos_token_id=1,
        )
        return package.GptOssForCausalLM(config).eval()

    def state(self, model: Any) -> dict[str, Tensor]:
        """Return random tensors under the names of a checkpoint."""
        generator, found = torch.Generator().manual_seed(2), dict[str, Tensor]()
        for name, tensor in model.state_dict().items():
            if name.endswith("_blocks"):
                found[name] = torch.randint(0, 256, tensor.shape, generator=generator, dtype=torch.uint8)
            elif name.endswith("_scales"):
                found[name] = torch.randint(120, 126, tensor.shape, generator=generator, dtype=torch.uint8)
            elif "experts" in name:
                found[name] = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        return found

    def test_a_checkpoint_s_blocks_are_loaded_and_run(self) -> None:
        register()
        model = self.model()
        assert hold_mxfp4(model) == ("model.layers.0.mlp.experts",)
        model.set_experts_implementation(NAME)
        state = self.state(model)
        assert len(state) == 6
        model.load_state_dict(state, strict=False)
        experts = model.get_submodule("model.layers.0.mlp.experts")
        rows = random(ROWS, 64, seed=4)
        with torch.no_grad():
            got = experts(rows, *routes())
        place = "model.layers.0.mlp.experts."
        dense = [mx_values(state[f"{place}{name}_blocks"].flatten(2), state[f"{place}{name}_scales"]) for name in ("gate_up_proj", "down_proj")]
        biases = state[f"{place}gate_up_proj_bias"], state[f"{place}down_proj_bias"]
        assert error(got, by_loop(dense[0], dense[1], SwigluOai(), rows, *routes(), biases)) < 2.0**-8
        (held,) = prepare(model)
        assert isinstance(held.adapted.weights, MxFp4ExpertWeights)
        assert held.adapted.weights.order is Interleaved
        assert held.adapted.weights.w13.data_ptr() == experts.gate_up_proj_blocks.data_ptr()
        assert (held.adapted.copied, held.found.activation) == (0, SwigluOai())
        assert layer_reports(model)[0].weights == "MxFp4ExpertWeights"

    def test_a_new_state_is_followed(self) -> None:
        register()
        model = self.model()
        hold_mxfp4(model)
        model.set_experts_implementation(NAME)
        tokens = torch.tensor([[3, 4, 5]])
        with torch.no_grad():
            zero = model(tokens).logits
            model.load_state_dict(self.state(model), strict=False)
            assert not torch.allclose(model(tokens).logits, zero)

    def test_another_implementation_cannot_read_them(self) -> None:
        register()
        model = self.model()
        hold_mxfp4(model)
        model.set_experts_implementation("eager")
        with pytest.raises(RuntimeError, match="mxfp4 blocks are run by 'moe_typed' alone"):
            model(torch.tensor([[3, 4]]))

    def test_a_model_without_such_experts_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no experts of gpt-oss"):
            hold_mxfp4(nn.Linear(2, 2))

    def test_widths_that_have_no_whole_groups_are_refused(self) -> None:
        module = self.model().get_submodule("model.layers.0.mlp.experts")
        module.hidden_size = 48
        with pytest.raises(UnsupportedError, match="hidden = 48"):
            MxFp4Experts(module, {})

    def test_a_runner_that_takes_no_mxfp4_is_refused(self) -> None:
        register()
        model = self.model()
        hold_mxfp4(model)
        configure(model, runner="triton")
        with pytest.raises(UnsupportedError, match="triton"):
            prepare(model)
        assert Options().relay
