"""Damaged and foreign checkpoints: each is one CheckpointError that names the file and what is wrong in it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from moe_typed.checkpoints import CheckpointError, open_checkpoint

WriteModel = Callable[..., nn.Module]
EditTensors = Callable[[Path, Callable[[dict[str, Tensor]], None]], None]
EditConfig = Callable[..., None]

ROOT = "model.layers.1.mlp"


def _refused(directory: Path, layer: int = 1) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory).load_layer(layer)
    return caught.value


# ---- config.json ------------------------------------------------------------------------------------------------------------------

BAD_JSON = {
    "empty": b"",
    "not json": b"{hidden_size: 64",
    "not text": b"\xff\xfe\x00\xd8",
    "a list": b"[1, 2]",
    "null": b"null",
    "key twice": b'{"hidden_size": 64, "hidden_size": 128}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("case", BAD_JSON)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_bad_json(name: str, case: str, tmp_path: Path, write_model: WriteModel) -> None:
    write_model("qwen3_moe", tmp_path, shard="60KB")
    (tmp_path / name).write_bytes(BAD_JSON[case])
    assert _refused(tmp_path).file == tmp_path / name


def test_a_config_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    error = _refused(tmp_path)
    assert (error.file, error.reason) == (tmp_path / "config.json", "is not a file")


OPTIONS: dict[str, tuple[str, dict[str, object], str]] = {
    "sizes of the wrong type": ("qwen3_moe", {"hidden_size": "64"}, "hidden_size"),
    "a fraction": ("qwen3_moe", {"hidden_size": 64.0}, "hidden_size"),
    "a truth value": ("qwen3_moe", {"hidden_size": True}, "hidden_size"),
    "negative": ("qwen3_moe", {"moe_intermediate_size": -32}, "moe_intermediate_size"),
    "zero": ("qwen3_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok"),
    "NaN": ("qwen3_moe", {"num_local_experts": float("nan")}, "num_local_experts"),
    "no experts": ("qwen3_moe", {"num_local_experts": 0}, "num_local_experts"),
    "a number that no float holds": ("deepseek_v3", {"routed_scaling_factor": 10**400}, "routed_scaling_factor"),
    "huge": ("qwen3_moe", {"num_local_experts": 10**30}, "num_local_experts"),
    "more experts than there are": ("qwen3_moe", {"num_local_experts": 10**9}, f"{ROOT}.gate.weight"),
    "more layers than there are": ("qwen3_moe", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    "top_k above experts": ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
    "two counts": ("qwen3_moe", {"num_experts": 4}, "num_local_experts"),
    "two dtypes": ("qwen3_moe", {"torch_dtype": "bfloat16"}, "torch_dtype"),
    "unknown dtype": ("qwen3_moe", {"dtype": "float64"}, "dtype"),
    "dtype of another type": ("qwen3_moe", {"dtype": 32}, "dtype"),
    "another dtype": ("qwen3_moe", {"dtype": "bfloat16"}, "gate_proj.weight"),
    "norm_topk_prob as a number": ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob"),
    "mlp_only_layers": ("qwen3_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers"),
    "decoder_sparse_step": ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    "activation": ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act"),
    "activation of mixtral": ("mixtral", {"hidden_act": "relu"}, "hidden_act"),
    "odd n_group": ("deepseek_v3", {"n_group": 5}, "n_group"),
    "groups of one": ("deepseek_v3", {"n_group": 12}, "n_group"),
    "topk_group above n_group": ("deepseek_v3", {"topk_group": 5}, "topk_group"),
    "too few in the groups": ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 4}, "topk_group"),
    "scoring": ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
    "method": ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
    "frequency": ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
    "scaling factor": ("deepseek_v3", {"routed_scaling_factor": float("inf")}, "routed_scaling_factor"),
    "first dense layers": ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace"),
    "limit": ("gpt_oss", {"swiglu_limit": float("nan")}, "swiglu_limit"),
    "alpha": ("gpt_oss", {"swiglu_alpha": "1.702"}, "swiglu_alpha"),
    "shared width": ("qwen2_moe", {"shared_expert_intermediate_size": 41}, "shared_expert.gate_proj"),
    "architecture": ("mixtral", {"architectures": ["FooForCausalLM"]}, "architectures"),
    "model_type": ("mixtral", {"model_type": "foo"}, "model_type"),
    "two families": ("mixtral", {"model_type": "olmoe"}, "architectures"),
    "architectures of another type": ("mixtral", {"architectures": "MixtralForCausalLM"}, "architectures"),
    "text_config": ("mixtral", {"text_config": [1]}, "text_config"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_bad_options(case: str, tmp_path: Path, write_model: WriteModel, edit_config: EditConfig) -> None:
    family, changes, subject = OPTIONS[case]
    write_model(family, tmp_path)
    edit_config(tmp_path, **changes)
    error = _refused(tmp_path)
    assert subject in error.subject
    assert error.expected
    assert str(error.file) in str(error)


@pytest.mark.parametrize(
    ("family", "option"),
    [
        *(("qwen3_moe", option) for option in ("hidden_size", "moe_intermediate_size", "num_local_experts", "num_experts_per_tok", "hidden_act")),
        *(("qwen2_moe", option) for option in ("shared_expert_intermediate_size", "norm_topk_prob", "num_hidden_layers")),
        *(("deepseek_v3", option) for option in ("n_group", "topk_group", "routed_scaling_factor", "n_shared_experts", "first_k_dense_replace")),
        ("gpt_oss", "swiglu_limit"),
        ("mixtral", "intermediate_size"),
    ],
)
@pytest.mark.parametrize("null", [True, False], ids=["null", "absent"])
def test_missing_options(family: str, option: str, null: bool, tmp_path: Path, write_model: WriteModel, edit_config: EditConfig) -> None:
    write_model(family, tmp_path)
    edit_config(tmp_path, *(() if null else (option,)), **({option: None} if null else {}))
    error = _refused(tmp_path)
    assert (option in error.subject, error.reason) == (True, "is missing")


def test_an_unknown_architecture_is_told_the_known_ones(tmp_path: Path, write_model: WriteModel, edit_config: EditConfig) -> None:
    write_model("mixtral", tmp_path)
    edit_config(tmp_path, architectures=["FooForCausalLM"])
    message = str(_refused(tmp_path))
    assert "unknown architecture 'FooForCausalLM'" in message
    for known in (
        "MixtralForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "OlmoeForCausalLM",
        "DeepseekV3ForCausalLM",
        "GptOssForCausalLM",
    ):
        assert known in message
    edit_config(tmp_path, "architectures", "model_type")
    assert _refused(tmp_path).subject == "architectures"


# ---- files ------------------------------------------------------------------------------------------------------------------------


def _cut(file: Path, keep: int) -> None:
    file.write_bytes(file.read_bytes()[:keep])


def _corrupt(directory: Path) -> None:
    data = bytearray((directory / "model.safetensors").read_bytes())
    data[8:40] = b"\xff" * 32
    (directory / "model.safetensors").write_bytes(data)


def _to_pickle(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def _to_directory(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").mkdir()


def _dangle(directory: Path) -> None:
    _to_pickle(directory)
    (directory / "model.safetensors").symlink_to("nowhere")


def _lengthen(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes() + b"more")


def _no_tensors(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda directory: (directory / "config.json").unlink(), "config.json"),
    "no tensors": (lambda directory: (directory / "model.safetensors").unlink(), "holds no checkpoint"),
    "pickles": (_to_pickle, "PyTorch pickles are not read"),
    "a lone shard": (lambda directory: (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors"), "index file"),
    "a directory for a file": (_to_directory, "is not a file"),
    "a dangling link": (_dangle, "is missing"),
    "empty": (lambda directory: _cut(directory / "model.safetensors", 0), "0 bytes"),
    "cut in the length": (lambda directory: _cut(directory / "model.safetensors", 5), "5 bytes"),
    "cut in the header": (lambda directory: _cut(directory / "model.safetensors", 100), "100 bytes"),
    "cut in the data": (lambda directory: _cut(directory / "model.safetensors", -64), "not a valid safetensors file"),
    "too long": (_lengthen, "not a valid safetensors file"),
    "corrupt header": (_corrupt, "not a valid safetensors file"),
    "no entries": (_no_tensors, "holds no tensors"),
    "no directory": (shutil.rmtree, "does not exist"),
}


@pytest.mark.parametrize("case", FILES)
def test_bad_files(case: str, tmp_path: Path, write_model: WriteModel) -> None:
    damage, named = FILES[case]
    directory = tmp_path / "model"
    write_model("qwen3_moe", directory)
    damage(directory)
    assert named in str(_refused(directory))


def test_a_file_is_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("")
    assert _refused(tmp_path / "model").reason == "is not a directory"


def test_a_name_that_no_file_can_have() -> None:
    assert _refused(Path("x" * 5000)).reason.startswith("cannot be read")


# ---- the index --------------------------------------------------------------------------------------------------------------------

GATE = f"{ROOT}.gate.weight"
INDEXES: dict[str, tuple[Callable[[dict[str, object]], object], str]] = {
    "a shard that is missing": (lambda placed: placed.update({GATE: "model-00099-of-00099.safetensors"}), "is missing"),
    "another shard": (lambda placed: placed.update({GATE: placed["lm_head.weight"]}), "where the index places it"),
    "a tensor that is not there": (lambda placed: placed.update({"model.more": placed[GATE]}), "model.more"),
    "upwards": (lambda placed: placed.update({GATE: "../model.safetensors"}), "outside of the checkpoint"),
    "upwards within": (lambda placed: placed.update({GATE: "a/../../model.safetensors"}), "outside of the checkpoint"),
    "absolute": (lambda placed: placed.update({GATE: "/tmp/model.safetensors"}), "outside of the checkpoint"),
    "of another system": (lambda placed: placed.update({GATE: "C:\\model.safetensors"}), "outside of the checkpoint"),
    "a pickle": (lambda placed: placed.update({GATE: "pytorch_model.bin"}), "no usable file"),
    "a number": (lambda placed: placed.update({GATE: 1}), "no usable file"),
    "a NUL": (lambda placed: placed.update({GATE: "a\0.safetensors"}), "no usable file"),
    "nothing": (lambda placed: placed.clear(), "weight_map"),
    "without the gate": (lambda placed: placed.pop(GATE), "the tensor is missing"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_bad_indexes(case: str, tmp_path: Path, write_model: WriteModel) -> None:
    damage, named = INDEXES[case]
    write_model("qwen3_moe", tmp_path, shard="60KB")
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    damage(index["weight_map"])
    file.write_text(json.dumps(index))
    assert named in str(_refused(tmp_path))


@pytest.mark.parametrize("index", [{}, {"weight_map": None}, {"weight_map": []}, {"weight_map": "all"}])
def test_an_index_without_a_map(index: object, tmp_path: Path, write_model: WriteModel) -> None:
    write_model("qwen3_moe", tmp_path, shard="60KB")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert _refused(tmp_path).subject == "weight_map"


def test_one_tensor_in_two_shards(tmp_path: Path, write_model: WriteModel) -> None:
    write_model("qwen3_moe", tmp_path, shard="60KB")
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    shutil.copy(first, second)
    assert _refused(tmp_path).reason == "is in two shards"


def test_a_single_file_beside_an_index(tmp_path: Path, write_model: WriteModel) -> None:
    write_model("qwen3_moe", tmp_path, shard="60KB")
    write_model("qwen3_moe", tmp_path)
    assert "either could be meant" in str(_refused(tmp_path))


# ---- tensors ----------------------------------------------------------------------------------------------------------------------


def _set(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({f"{ROOT}.{name}": tensor})


def _drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(f"{ROOT}.{name}")


def _drop_block(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith(f"{ROOT}.")]:
        del tensors[name]


UP = "experts.3.up_proj.weight"
TENSORS: dict[str, tuple[str, Callable[[dict[str, Tensor]], object], str]] = {
    "no gate": ("qwen3_moe", _drop("gate.weight"), "gate.weight"),
    "no expert tensor": ("qwen3_moe", _drop(UP), UP),
    "no first expert tensor": ("qwen3_moe", _drop("experts.0.gate_proj.weight"), "experts.0.gate_proj.weight"),
    "no block": ("qwen3_moe", _drop_block, ""),
    "shape": ("qwen3_moe", _set(UP, torch.zeros(31, 64)), UP),
    "transposed": ("qwen3_moe", _set(UP, torch.zeros(64, 32)), UP),
    "more dims": ("qwen3_moe", _set(UP, torch.zeros(1, 32, 64)), UP),
    "scalar": ("qwen3_moe", _set(UP, torch.zeros(())), UP),
    "gate of another width": ("qwen3_moe", _set("gate.weight", torch.zeros(8, 65)), "gate.weight"),
    "mixed dtypes": ("qwen3_moe", _set(UP, torch.zeros(32, 64, dtype=torch.bfloat16)), UP),
    "double": ("qwen3_moe", _set(UP, torch.zeros(32, 64, dtype=torch.float64)), UP),
    "integers": ("qwen3_moe", _set(UP, torch.zeros(32, 64, dtype=torch.int8)), UP),
    "fp8 unannounced": ("qwen3_moe", _set(UP, torch.zeros(32, 64).to(torch.float8_e4m3fn)), UP),
    "integer gate": ("qwen3_moe", _set("gate.weight", torch.zeros(8, 64, dtype=torch.int64)), "gate.weight"),
    "an expert too many": ("qwen3_moe", _set("experts.8.up_proj.weight", torch.zeros(32, 64)), "experts.8.up_proj.weight"),
    "a bias": ("qwen3_moe", _set("experts.0.up_proj.bias", torch.zeros(32)), "experts.0.up_proj.bias"),
    "a correction bias": ("qwen3_moe", _set("gate.e_score_correction_bias", torch.zeros(8)), "gate.e_score_correction_bias"),
    "a shared expert": ("qwen3_moe", _set("shared_expert.up_proj.weight", torch.zeros(32, 64)), "shared_expert.up_proj.weight"),
    "stacked and single": ("qwen3_moe", _set("experts.gate_up_proj", torch.zeros(8, 64, 64)), "experts"),
    "no shared gate": ("qwen2_moe", _drop("shared_expert_gate.weight"), "shared_expert_gate.weight"),
    "no correction bias": ("deepseek_v3", _drop("gate.e_score_correction_bias"), "e_score_correction_bias"),
    "short correction bias": ("deepseek_v3", _set("gate.e_score_correction_bias", torch.zeros(11)), "e_score_correction_bias"),
    "no bias": ("gpt_oss", _drop("experts.down_proj_bias"), "experts.down_proj_bias"),
    "no router bias": ("gpt_oss", _drop("router.bias"), "router.bias"),
    "fewer stacked": ("gpt_oss", _set("experts.down_proj", torch.zeros(7, 32, 64)), "experts.down_proj"),
    "not stacked": ("gpt_oss", _drop("experts.gate_up_proj"), "experts.gate_up_proj"),
    "mxfp4": ("gpt_oss", _set("experts.gate_up_proj_blocks", torch.zeros(8, 64, 2, 16, dtype=torch.uint8)), "experts.gate_up_proj_blocks"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_bad_tensors(case: str, tmp_path: Path, write_model: WriteModel, edit_tensors: EditTensors) -> None:
    family, damage, subject = TENSORS[case]
    write_model(family, tmp_path)

    def change(tensors: dict[str, Tensor]) -> None:
        damage(tensors)

    edit_tensors(tmp_path, change)
    error = _refused(tmp_path)
    assert error.subject.endswith(subject)
    assert error.file == tmp_path / "model.safetensors"
    assert error.got


def test_two_models_in_one_file(tmp_path: Path, write_model: WriteModel, edit_tensors: EditTensors) -> None:
    write_model("qwen3_moe", tmp_path)

    def double(tensors: dict[str, Tensor]) -> None:
        tensors.update({f"draft.{name}": tensor for name, tensor in tensors.items()})

    edit_tensors(tmp_path, double)
    assert "two MoE blocks" in str(_refused(tmp_path))


@pytest.mark.parametrize("layer", [0, 2, -1, 10**6])
def test_layers_that_are_not_moe(layer: int, tmp_path: Path, write_model: WriteModel) -> None:
    write_model("deepseek_v3", tmp_path, num_hidden_layers=2)
    error = _refused(tmp_path, layer)
    assert error.reason == f"layer {layer} is not a MoE layer"
    assert error.expected == "one of 1"


def test_nothing_is_read_before_all_is_checked(tmp_path: Path, write_model: WriteModel, edit_tensors: EditTensors) -> None:
    write_model("qwen3_moe", tmp_path)

    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{ROOT}.experts.7.down_proj.weight"]

    edit_tensors(tmp_path, drop)
    steps: list[object] = []
    with pytest.raises(CheckpointError, match="down_proj"):
        open_checkpoint(tmp_path).load_layer(1, steps.append)
    assert steps == []
