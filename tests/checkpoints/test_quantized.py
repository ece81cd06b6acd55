"""Quantised checkpoints in the layout that is shipped, against the dequantised model."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from moe_typed import Fp8Block128ExpertWeights, MxFp8ExpertWeights
from moe_typed.checkpoints import CheckpointError, LayerWeights, open_checkpoint
from moe_typed.formats import e8m0

WriteModel = Callable[..., nn.Module]
EditTensors = Callable[[Path, Callable[[dict[str, Tensor]], None]], None]
EditConfig = Callable[..., None]
BlockOutput = Callable[[nn.Module, int, Tensor], Tensor]
TypedOutput = Callable[[LayerWeights, Tensor], Tensor]

SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
MXFP8 = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]}


def _blocks(weight: Tensor, rows: int, columns: int) -> Tensor:
    return weight.to(torch.float32).view(weight.shape[0] // rows, rows, weight.shape[1] // columns, columns)


def _quantize(weight: Tensor, rows: int, columns: int, *, powers: bool) -> tuple[Tensor, Tensor]:
    """Return float8 data and the float32 scale of each block."""
    blocks = _blocks(weight, rows, columns)
    scale = blocks.abs().amax(dim=(1, 3)) / 448.0
    if powers:
        scale = e8m0.decode(e8m0.encode_up(scale))
    return (blocks / scale[:, None, :, None]).view(weight.shape).to(torch.float8_e4m3fn), scale


def _is_expert(name: str) -> bool:
    return name.startswith("model.layers.1.mlp.") and "expert" in name and name.endswith("_proj.weight")


def _dequantized(model: nn.Module, tensors: dict[str, Tensor], suffix: str, rows: int, columns: int) -> nn.Module:
    """Return the model with what the checkpoint holds in its layer 1."""
    model = copy.deepcopy(model)
    block = model.get_submodule("model.layers.1.mlp")
    inter = 128

    def value(name: str) -> Tensor:
        weight, scale = tensors[f"model.layers.1.mlp.{name}.weight"], tensors[f"model.layers.1.mlp.{name}.weight{suffix}"]
        scale = e8m0.decode(scale) if scale.element_size() == 1 else scale.to(torch.float32)
        return (_blocks(weight, rows, columns) * scale[:, None, :, None]).view(weight.shape)

    with torch.no_grad():
        gate_up, down = block.get_parameter("experts.gate_up_proj"), block.get_parameter("experts.down_proj")
        for expert in range(gate_up.shape[0]):
            gate_up[expert, :inter] = value(f"experts.{expert}.gate_proj")
            gate_up[expert, inter:] = value(f"experts.{expert}.up_proj")
            down[expert] = value(f"experts.{expert}.down_proj")
        for name, parameter in block.named_parameters():
            if name.startswith("shared_expert") and name.endswith("_proj.weight"):
                parameter.copy_(value(name.removesuffix(".weight")))
    return model


def _write(tensors: dict[str, Tensor], rows: int, columns: int, suffix: str, *, scale_as: Callable[[Tensor], Tensor], powers: bool) -> None:
    for name in [name for name in tensors if _is_expert(name)]:
        tensors[name], scale = _quantize(tensors[name], rows, columns, powers=powers)
        tensors[name + suffix] = scale_as(scale)


def _bytes(scale: Tensor) -> Tensor:
    return e8m0.encode_up(scale).view(torch.uint8)


def _float32(scale: Tensor) -> Tensor:
    return scale


def _bfloat16(scale: Tensor) -> Tensor:
    return scale.to(torch.bfloat16)


CASES: dict[str, tuple[str, object, int, int, str, Callable[[Tensor], Tensor], bool]] = {
    "fp8 as DeepSeek-V3": ("deepseek_v3", FP8, 128, 128, "_scale_inv", _float32, False),
    "fp8 as Qwen3, bf16 scales": ("qwen3_moe", FP8, 128, 128, "_scale_inv", _bfloat16, False),
    "fp8 with e8m0 scales": ("deepseek_v3", {**FP8, "scale_fmt": "ue8m0"}, 128, 128, "_scale_inv", e8m0.encode_up, True),
    "mxfp8 with e8m0 scales": ("qwen3_moe", MXFP8, 1, 32, "_scale", e8m0.encode_up, True),
    "mxfp8 with bytes": ("deepseek_v3", MXFP8, 1, 32, "_scale_inv", _bytes, True),
    "mxfp8 of ModelOpt": ("qwen3_moe", MODELOPT, 1, 32, "_scale", _bytes, True),
}


@pytest.mark.parametrize("case", CASES)
def test_block_output_is_that_of_the_dequantized_model(
    case: str,
    tmp_path: Path,
    write_model: WriteModel,
    edit_tensors: EditTensors,
    edit_config: EditConfig,
    block_output: BlockOutput,
    typed_output: TypedOutput,
) -> None:
    family, quantization, rows, columns, suffix, scale_as, powers = CASES[case]
    model = write_model(family, tmp_path, **SIZES)
    written: dict[str, Tensor] = {}

    def quantize(tensors: dict[str, Tensor]) -> None:
        _write(tensors, rows, columns, suffix, scale_as=scale_as, powers=powers)
        written.update(tensors)

    edit_tensors(tmp_path, quantize)
    edit_config(tmp_path, quantization_config=quantization, dtype="bfloat16")
    weights = open_checkpoint(tmp_path).load_layer(1)
    assert isinstance(weights.experts, Fp8Block128ExpertWeights if rows == 128 else MxFp8ExpertWeights)
    assert weights.model_dtype == torch.bfloat16
    model = _dequantized(model, written, suffix, rows, columns)
    hidden_states = torch.randn(6, 128, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(torch.float32)
    expected = block_output(model, 1, hidden_states)
    # The reference runner of quantised weights rounds its sum to bfloat16.
    torch.testing.assert_close(typed_output(weights, hidden_states).to(torch.float32), expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))
    torch.testing.assert_close(
        weights.experts.dequantize_w2(3), model.get_parameter("model.layers.1.mlp.experts.down_proj")[3].detach(), rtol=0, atol=0
    )


def test_skipped_modules_are_plain(tmp_path: Path, write_model: WriteModel, edit_tensors: EditTensors, edit_config: EditConfig) -> None:
    """The shared expert of this checkpoint is left in bf16, and its quantization_config says so."""
    write_model("deepseek_v3", tmp_path, torch.bfloat16, **SIZES)

    def quantize(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if _is_expert(name) and "shared" not in name]:
            tensors[name], tensors[f"{name}_scale_inv"] = _quantize(tensors[name], 128, 128, powers=False)

    edit_tensors(tmp_path, quantize)
    edit_config(tmp_path, quantization_config={**FP8, "modules_to_not_convert": ["gate", "shared_experts"]})
    weights = open_checkpoint(tmp_path).load_layer(1)
    assert weights.shared is not None
    assert weights.shared.weights.w13.dtype == torch.bfloat16
    assert weights.experts.w13.dtype == torch.float8_e4m3fn
    edit_config(tmp_path, quantization_config=FP8)
    with pytest.raises(CheckpointError, match="shared_experts") as caught:
        open_checkpoint(tmp_path).load_layer(1)
    assert caught.value.expected == "float8_e4m3fn[256, 128]"


REFUSED: dict[str, tuple[object, str]] = {
    "quant_method": ({"quant_method": "mxfp4"}, "mxfp4"),
    "awq": ({"quant_method": "awq", "bits": 4}, "awq"),
    "gptq": ({"quant_method": "gptq"}, "gptq"),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
    "no method": ({}, "quant_method"),
    "method of another type": ({"quant_method": 8}, "quant_method"),
    "block": ({**FP8, "weight_block_size": [64, 128]}, "weight_block_size"),
    "no block": ({"quant_method": "fp8"}, "weight_block_size"),
    "block of another type": ({**FP8, "weight_block_size": "128"}, "weight_block_size"),
    "mx block": ({**MXFP8, "weight_block_size": [1, 16]}, "weight_block_size"),
    "static": ({**FP8, "activation_scheme": "static"}, "activation_scheme"),
    "e5m2": ({**FP8, "fmt": "e5m2"}, "fmt"),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo"),
    "not an object": ("fp8", "quantization_config"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_quantizations_are_refused_by_name(case: str, tmp_path: Path, write_model: WriteModel, edit_config: EditConfig) -> None:
    quantization, named = REFUSED[case]
    write_model("qwen3_moe", tmp_path)
    edit_config(tmp_path, quantization_config=quantization)
    with pytest.raises(CheckpointError, match=named) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.file == tmp_path / "config.json"


def test_quantized_gpt_oss_is_refused(tmp_path: Path, write_model: WriteModel, edit_config: EditConfig) -> None:
    write_model("gpt_oss", tmp_path)
    edit_config(tmp_path, quantization_config=FP8)
    with pytest.raises(CheckpointError, match="gpt-oss"):
        open_checkpoint(tmp_path)


def _drop_scale(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"]


def _shorten_scale(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"] = torch.ones(2, 1)


def _half_scale(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"] = torch.ones(1, 1, dtype=torch.float16)


def _mixed_scale(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"] = torch.ones(1, 1, dtype=torch.bfloat16)


def _static_scale(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.experts.2.up_proj.input_scale"] = torch.ones(1)


@pytest.mark.parametrize("damage", [_drop_scale, _shorten_scale, _half_scale, _mixed_scale, _static_scale])
def test_damaged_scales_are_refused(
    damage: Callable[[dict[str, Tensor]], None], tmp_path: Path, write_model: WriteModel, edit_tensors: EditTensors, edit_config: EditConfig
) -> None:
    write_model("qwen3_moe", tmp_path, **SIZES)

    def quantize(tensors: dict[str, Tensor]) -> None:
        _write(tensors, 128, 128, "_scale_inv", scale_as=_float32, powers=False)
        damage(tensors)

    edit_tensors(tmp_path, quantize)
    edit_config(tmp_path, quantization_config=FP8)
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj\.\w*scale"):
        open_checkpoint(tmp_path).load_layer(1)


def test_sizes_that_no_block_fits_are_refused(tmp_path: Path, write_model: WriteModel, edit_config: EditConfig) -> None:
    write_model("qwen3_moe", tmp_path)
    edit_config(tmp_path, quantization_config=FP8)
    with pytest.raises(CheckpointError, match="whole blocks of 128"):
        open_checkpoint(tmp_path).load_layer(1)


def test_a_quantized_model_must_say_its_dtype(tmp_path: Path, write_model: WriteModel, edit_config: EditConfig) -> None:
    write_model("qwen3_moe", tmp_path)
    edit_config(tmp_path, "dtype", quantization_config=FP8)
    with pytest.raises(CheckpointError, match="dtype"):
        open_checkpoint(tmp_path)
    assert "dtype" not in json.loads((tmp_path / "config.json").read_text())
