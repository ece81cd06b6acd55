"""Each family against the library's own MoE block, over checkpoints that the library wrote."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from moe_typed import Interleaved, SwigluOai
from moe_typed.checkpoints import LayerWeights, Progress, open_checkpoint

WriteModel = Callable[..., nn.Module]
EditTensors = Callable[[Path, Callable[[dict[str, Tensor]], None]], None]
BlockOutput = Callable[[nn.Module, int, Tensor], Tensor]
TypedOutput = Callable[[LayerWeights, Tensor], Tensor]

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def _assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare within a tolerance relative to each value, and to the largest where values cancel."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def _rows(rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(rows)).to(dtype)


@pytest.mark.parametrize("shard", ["1GB", "60KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_block_output_is_the_library_s(
    family: str, dtype: torch.dtype, shard: str, tmp_path: Path, write_model: WriteModel, block_output: BlockOutput, typed_output: TypedOutput
) -> None:
    model = write_model(family, tmp_path, dtype, shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "60KB")
    weights = open_checkpoint(tmp_path).load_layer(1)
    assert weights.model_dtype == weights.experts.w13.dtype == dtype
    for rows in (0, 1, 5, 33):
        hidden_states = _rows(rows, weights.hidden, dtype)
        actual = typed_output(weights, hidden_states)
        assert actual.dtype == dtype
        assert actual.shape == (rows, weights.hidden)
        if rows:
            _assert_close(actual, block_output(model, 1, hidden_states), TOLERANCE[dtype])


@pytest.mark.parametrize("family", FAMILIES)
def test_stacked_experts_mean_the_same(
    family: str, tmp_path: Path, write_model: WriteModel, block_output: BlockOutput, typed_output: TypedOutput, edit_tensors: EditTensors
) -> None:
    """The names of the modules of transformers 5, which its save_pretrained turns back into those of single experts."""
    model = write_model(family, tmp_path)
    state = {name: tensor for name, tensor in model.state_dict().items() if ".mlp." in name}

    def restack(tensors: dict[str, Tensor]) -> None:
        tensors.clear()
        tensors.update(state)

    edit_tensors(tmp_path, restack)
    weights = open_checkpoint(tmp_path).load_layer(1)
    hidden_states = _rows(9, weights.hidden, torch.float32)
    _assert_close(typed_output(weights, hidden_states), block_output(model, 1, hidden_states), 1e-5)


def test_gpt_oss_clamps(tmp_path: Path, write_model: WriteModel, block_output: BlockOutput, typed_output: TypedOutput) -> None:
    model = write_model("gpt_oss", tmp_path, swiglu_limit=2.5)
    weights = open_checkpoint(tmp_path).load_layer(0)
    assert weights.experts.order is Interleaved
    assert weights.activation == SwigluOai(limit=2.5)
    hidden_states = _rows(16, weights.hidden, torch.float32) * 4
    gate, up = Interleaved.split(hidden_states @ weights.experts.dequantize_w13(0).T, -1)
    assert (gate > 2.5).any()
    assert (up.abs() > 2.5).any()
    _assert_close(typed_output(weights, hidden_states), block_output(model, 0, hidden_states), 1e-5)


@pytest.mark.parametrize(
    ("family", "changes", "moe_layers"),
    [
        ("mixtral", {}, (0, 1)),
        ("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": []}, (1, 3)),
        ("qwen2_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1]}, (0, 2)),
        ("deepseek_v3", {"num_hidden_layers": 3}, (1, 2)),
    ],
)
def test_moe_layers_are_the_model_s(
    family: str, changes: dict[str, object], moe_layers: tuple[int, ...], tmp_path: Path, write_model: WriteModel
) -> None:
    model = write_model(family, tmp_path, **changes)
    assert open_checkpoint(tmp_path).moe_layers == moe_layers
    held = {name.split(".")[2] for name, _ in model.named_parameters() if ".mlp.experts." in name}
    assert moe_layers == tuple(sorted(map(int, held)))


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3"])
def test_norm_topk_prob_is_obeyed(
    family: str, norm: bool, tmp_path: Path, write_model: WriteModel, block_output: BlockOutput, typed_output: TypedOutput
) -> None:
    model = write_model(family, tmp_path, norm_topk_prob=norm)
    weights = open_checkpoint(tmp_path).load_layer(1)
    hidden_states = _rows(7, weights.hidden, torch.float32)
    assert weights.route(hidden_states).renormalized is norm
    _assert_close(typed_output(weights, hidden_states), block_output(model, 1, hidden_states), 1e-5)


def test_a_wrapped_text_model_is_found(tmp_path: Path, write_model: WriteModel, edit_tensors: EditTensors) -> None:
    write_model("qwen3_moe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["SomeVisionForConditionalGeneration"], "model_type": "some_vision", "text_config": config})
    )

    def wrap(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)

    edit_tensors(tmp_path, wrap)
    assert open_checkpoint(tmp_path).load_layer(1).num_experts == 8


@pytest.mark.parametrize(("old", "new"), [("dtype", "torch_dtype"), ("num_local_experts", "num_experts")])
def test_older_option_names_are_read(old: str, new: str, tmp_path: Path, write_model: WriteModel, edit_config: Callable[..., None]) -> None:
    write_model("qwen3_moe", tmp_path)
    value = json.loads((tmp_path / "config.json").read_text())[old]
    edit_config(tmp_path, old, **{new: value})
    weights = open_checkpoint(tmp_path).load_layer(1)
    assert (weights.num_experts, weights.model_dtype, weights.top_k, weights.inter) == (8, torch.float32, 3, 32)


def test_dtype_may_be_left_to_the_tensors(tmp_path: Path, write_model: WriteModel, edit_config: Callable[..., None]) -> None:
    write_model("olmoe", tmp_path, torch.bfloat16)
    edit_config(tmp_path, "dtype")
    assert open_checkpoint(tmp_path).load_layer(0).model_dtype == torch.bfloat16


def test_files_may_be_links(tmp_path: Path, write_model: WriteModel) -> None:
    write_model("mixtral", tmp_path / "blobs", shard="60KB")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (snapshot / file.name).symlink_to(Path("..") / "blobs" / file.name)
    assert open_checkpoint(snapshot).load_layer(0).num_experts == 8


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_progress_tells_of_every_tensor(family: str, tmp_path: Path, write_model: WriteModel) -> None:
    write_model(family, tmp_path)
    steps: list[Progress] = []
    open_checkpoint(tmp_path).load_layer(1, steps.append)
    assert [step.done for step in steps] == sorted(step.done for step in steps)
    assert steps[-1].done == steps[-1].total
    assert any("experts" in step.tensor for step in steps)


def test_rows_of_another_width_are_refused(tmp_path: Path, write_model: WriteModel) -> None:
    write_model("qwen2_moe", tmp_path)
    weights = open_checkpoint(tmp_path).load_layer(0)
    assert weights.shared is not None
    for route in (weights.route, weights.shared.route):
        with pytest.raises(ValueError, match=r"floating \(rows, 64\)"):
            route(torch.zeros(2, 65))
