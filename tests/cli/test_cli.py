"""The command line: what it prints, and its exit codes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_typed.cli import run
from moe_typed.cli.demo_checkpoint import write_demo_checkpoint
from moe_typed.cli.main import BAD_INPUT, GOOD, OUT_OF_TOLERANCE, main
from moe_typed.plan import PlanReport, from_json


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_demo_checkpoint(folder)
    return folder


def test_demo_prints_plan_boundaries_times_error_and_a_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "cpu"]) == GOOD
    printed = capsys.readouterr().out
    for fragment in (
        "Qwen3-MoE, layer 0",
        "quantize_mxfp8",
        "12.1 KiB",
        "StandardDispatchOutput",
        "float8_e8m0fnu[16, 8]",
        "Time per stage",
        "error against the float32 reference",
        "within the tolerance",
        "MxFp8Rows.scale: dtype is float32, expected float8_e8m0fnu",
        "these values do satisfy Fp8Block128Rows",
    ):
        assert fragment in printed


def test_demo_keeps_its_checkpoint_where_it_is_told_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "new" / "folder"
    assert main(["demo", "--device", "cpu", "--keep", str(kept)]) == GOOD
    assert main(["run", str(kept), "--device", "cpu", "--layer", "1"]) == GOOD
    assert "layer 1" in capsys.readouterr().out


@pytest.mark.parametrize("wire", ["auto", "bf16", "fp8-block128", "mxfp8"])
@pytest.mark.parametrize("tokens", ["0", "1", "33"])
def test_run_is_within_tolerance(checkpoint: Path, wire: str, tokens: str) -> None:
    assert main(["run", str(checkpoint), "--device", "cpu", "--wire", wire, "--tokens", tokens]) == GOOD


def test_a_path_is_printed_as_it_is(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoint / "a[" / "red] :smile:"  # a closing tag and an emoji to rich
    folder.mkdir(parents=True)
    write_demo_checkpoint(folder)
    assert main(["run", str(folder), "--device", "cpu"]) == GOOD
    assert capsys.readouterr().out.startswith(f"{folder}: Qwen3-MoE, layer 0\n")


def test_the_same_seed_gives_the_same_error(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(seed: str) -> str:
        assert main(["run", str(checkpoint), "--device", "cpu", "--seed", seed]) == GOOD
        return capsys.readouterr().out.splitlines()[-1]

    assert error("1") == error("1") != error("2")


def test_numbers_out_of_tolerance_exit_with_1(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def nothing_is_within(report: PlanReport) -> float:
        return 0.0

    monkeypatch.setattr(run, "tolerance", nothing_is_within)
    assert main(["run", str(checkpoint), "--device", "cpu"]) == OUT_OF_TOLERANCE
    assert "OUT OF the tolerance" in capsys.readouterr().out


def test_weights_that_are_not_finite_are_out_of_tolerance(checkpoint: Path) -> None:
    shard = checkpoint / "model-00001-of-00002.safetensors"
    tensors = load_file(shard)
    for name, tensor in tensors.items():
        if name.endswith("down_proj.weight"):
            tensor[0, 0] = torch.nan
    save_file(tensors, shard, metadata={"format": "pt"})
    assert main(["run", str(checkpoint), "--device", "cpu"]) == OUT_OF_TOLERANCE


def truncate(folder: Path) -> None:
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])


def remove_shard(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").unlink()


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def rename_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["FooForCausalLM"], "model_type": "foo"}))


def reshape(folder: Path) -> None:
    shard = folder / "model-00001-of-00002.safetensors"
    tensors = load_file(shard)
    tensors["model.layers.0.mlp.experts.3.up_proj.weight"] = torch.zeros(7, 256, dtype=torch.bfloat16)
    save_file(tensors, shard, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "fragment"),
    [
        (truncate, "model-00001-of-00002.safetensors"),
        (remove_shard, "model-00001-of-00002.safetensors"),
        (remove_config, "config.json"),
        (rename_architecture, "FooForCausalLM"),
        (reshape, "experts.3.up_proj.weight"),
        (shutil.rmtree, "does not exist"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_bad_checkpoint_exits_with_2_and_one_message(checkpoint: Path, damage, fragment: str, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    damage(checkpoint)
    assert main(["run", str(checkpoint), "--device", "cpu"]) == BAD_INPUT
    message = capsys.readouterr().err
    assert message.startswith("moe-typed: ")
    assert fragment in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--layer", "2"], "layer 2"),
        (["--layer", "-1"], "layer -1"),
        (["--device", "nonsense"], "nonsense"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--device", "meta"], "cpu or cuda"),
        (["--runner", "triton"], "CUDA device"),
    ],
)
def test_a_request_that_cannot_be_met_exits_with_2(checkpoint: Path, arguments: list[str], fragment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(checkpoint), "--device", "cpu", *arguments]) == BAD_INPUT
    assert fragment in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--tokens", "-1"], ["--tokens", "many"], ["--tokens", str(10**30)], ["--seed", "-1"], ["--wire", "int3"], ["--runner", "magic"]]
)
def test_arguments_that_do_not_parse_exit_with_2(checkpoint: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", str(checkpoint), *arguments])
    assert caught.value.code == BAD_INPUT


def test_more_rows_than_memory_exit_with_2(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def allocate(*_: object) -> bool:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2199023254528 bytes")

    monkeypatch.setattr(run, "run_checkpoint", allocate)
    assert main(["run", str(checkpoint), "--device", "cpu"]) == BAD_INPUT
    assert capsys.readouterr().err.startswith("moe-typed: out of memory: ")


SIZES = ["plan", "--device", "cpu", "--experts", "8", "--top-k", "2", "--hidden", "256", "--inter", "128"]


def test_plan_as_json_is_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIZES, "--wire", "mxfp8", "--rows", "10", "--json"]) == GOOD
    report = from_json(capsys.readouterr().out)
    assert (report.wire, report.problem.rows, report.runner) == ("mxfp8", 10, "reference")


def test_plan_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SIZES) == GOOD
    printed = capsys.readouterr().out
    for fragment in ("8 experts, top 2", "ReferenceDenseWeights", "not chosen", "all conversions"):
        assert fragment in printed


def test_plan_of_a_checkpoint(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(checkpoint), "--device", "cpu", "--json"]) == GOOD
    assert from_json(capsys.readouterr().out).problem.num_experts == 8


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--top-k", "9"], "top_k is 9, but there are 8 experts"),
        (["--activation", "mish"], "activation is mish; it does silu, swiglu-oai"),
        (["--weights", "fp8-block128", "--inter", "64"], "inter = 64 is not a multiple of 128"),
    ],
)
def test_a_layer_that_cannot_be_is_not_planned(arguments: list[str], fragment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIZES, *arguments]) == BAD_INPUT
    assert fragment in capsys.readouterr().err


def test_plan_takes_a_checkpoint_or_sizes(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(checkpoint), "--device", "cpu", "--top-k", "1", "--weights", "mxfp8"]) == BAD_INPUT
    assert "the checkpoint says what --top-k, --weights would" in capsys.readouterr().err


def test_plan_without_sizes_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--experts", "8", "--device", "cpu"]) == BAD_INPUT
    assert "--top-k, --hidden, --inter" in capsys.readouterr().err
