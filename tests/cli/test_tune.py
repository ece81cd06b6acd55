"""``moe-typed tune``: what it asks for, what it prints, and its exit codes."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from moe_typed.cli.demo_checkpoint import write_demo_checkpoint
from moe_typed.cli.main import BAD_INPUT, GOOD, main
from moe_typed.cli.options import counts
from moe_typed.cli.tune import INTERRUPTED, TuneOptions, cells_of, tune_layer
from moe_typed.ops.product_plans.files import LayerKey, read_tuned
from moe_typed.ops.product_plans.spec import How
from moe_typed.plan import Backend, MoEProblem
from moe_typed.runners import UnsupportedError
from moe_typed.tuning import Cell, DeviceLostError, families
from tests.tuning.support import LAYER, LIMITS, FakeMeasurer, cell, failing

SIZES = ["tune", "--device", "cpu", "--experts", "16", "--top-k", "2", "--hidden", "256", "--inter", "128"]


def tune(out: Path, measurer: FakeMeasurer, *, again: bool = False, terminal: bool = False) -> tuple[int, str]:
    """Return the exit code, and what was printed."""
    printed = io.StringIO()
    code = tune_layer(TuneOptions((cell(8), cell(64)), out, again), measurer, Console(file=printed, width=160, force_terminal=terminal))
    return code, printed.getvalue()


def test_each_cell_is_told_with_its_time_its_plan_and_the_one_before(tmp_path: Path) -> None:
    code, printed = tune(tmp_path, FakeMeasurer(failing(How.VECTOR)))
    first, eight, sixtyfour, last = printed.splitlines()
    assert code == GOOD
    assert first == f"{LAYER}, on Test GPU: to {tmp_path / 'Test_GPU.json'}"
    for line, tokens in ((eight, 8), (sixtyfour, 64)):
        assert line.startswith(f"{tokens} tokens: ")
        for fragment in (" us, ", "walk 16x64x", "before ", "plans tried"):
            assert fragment in line
    assert "of which 0 do not run here" not in eight
    assert "of which 0 do not run here" in sixtyfour
    assert last == f"export MOE_TYPED_TUNED={tmp_path}"


def test_a_second_run_says_that_nothing_is_left_to_do(tmp_path: Path) -> None:
    tune(tmp_path, FakeMeasurer())
    code, printed = tune(tmp_path, FakeMeasurer())
    assert code == GOOD
    assert printed.count("measured before") == 2


def test_the_bar_shows_cell_candidate_best_and_time_left(tmp_path: Path) -> None:
    _, printed = tune(tmp_path, FakeMeasurer(), terminal=True)
    assert "tokens" in printed
    assert "best" in printed


@pytest.mark.parametrize("again", [False, True])
def test_an_interruption_exits_with_130_and_says_how_to_go_on(tmp_path: Path, again: bool, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = tune(tmp_path, FakeMeasurer(interrupt=200), again=again)
    assert code == INTERRUPTED
    message = capsys.readouterr().err
    assert message.startswith("moe-typed: interrupted; what was measured is in ")
    assert str(tmp_path) in message
    assert ("without --again" in message) is again
    assert "export" not in printed
    assert tune(tmp_path, FakeMeasurer())[0] == GOOD
    (layer,) = read_tuned(tmp_path / "Test_GPU.json").layers
    assert [plan.tokens for plan in layer.plans] == [8, 64]


def test_a_device_that_is_lost_is_told_with_what_to_do(tmp_path: Path) -> None:
    culprit = families(cell(8), LIMITS)[0].plans()[0]

    def lost(plan: object) -> float:
        raise DeviceLostError(culprit, "an illegal memory access was encountered")

    with pytest.raises(UnsupportedError, match="The same command goes on without this plan"):
        tune(tmp_path, FakeMeasurer(lost))


def problem(weights: str = "bf16", *, hidden: int = 256, backend: Backend = Backend.STANDARD, ranks: int = 1) -> MoEProblem:
    return MoEProblem(
        num_experts=16,
        top_k=2,
        hidden=hidden,
        inter=128,
        model="bf16",
        weights=weights,
        activation="silu",
        rows=0,
        backend=backend,
        ranks=ranks,
    )


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (problem(), Cell(LAYER, 16, 8, "zipf")),
        (problem("fp16"), Cell(LAYER, 16, 8, "zipf")),
        (problem("fp8-block128"), Cell(LayerKey("fp8", 16, 2, 256, 128), 16, 8, "zipf")),
        (problem(backend=Backend.DEEPEP_NORMAL, ranks=4), Cell(LayerKey("bf16", 4, 2, 256, 128), 16, 8, "zipf")),
        (problem(backend=Backend.DEEPEP_LL, ranks=4), Cell(LayerKey("bf16", 4, 1, 256, 128), 4, 8, "zipf", by_expert=True)),
    ],
)
def test_a_layer_is_tuned_as_its_runner_meets_it(asked: MoEProblem, expected: Cell) -> None:
    assert cells_of(asked, (8,), "zipf") == (expected,)


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ([], "plans are measured on an NVIDIA GPU; the device is cpu"),
        (["--weights", "mxfp8"], "nothing is tuned for mxfp8 weights; bf16, fp16 and fp8-block128"),
        (["--weights", "fp32"], "nothing is tuned for fp32 weights"),
        (["--weights", "bf61"], "nothing is tuned for bf61 weights"),
        (["--format", "fp8-block128", "--hidden", "64"], "hidden = 64 is not a multiple of 128"),
        (["--top-k", "17"], "top_k is 17, but there are 16 experts"),
        (["--ranks", "2"], "the standard backend sends nothing"),
        (["--ranks", "3", "--backend", "deepep-normal"], "spread evenly over 3 ranks"),
        (["--device", "cuda:99"], "cuda:99"),
    ],
)
def test_what_cannot_be_tuned_exits_with_2_and_one_message(
    tmp_path: Path, arguments: list[str], fragment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SIZES, "--out", str(tmp_path / "out"), *arguments]) == BAD_INPUT
    message = capsys.readouterr().err
    assert message.startswith("moe-typed: ")
    assert fragment in message
    assert not (tmp_path / "out").exists()


def test_the_layer_of_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_demo_checkpoint(tmp_path)
    assert main(["tune", str(tmp_path), "--device", "cpu", "--out", str(tmp_path)]) == BAD_INPUT
    assert "NVIDIA GPU" in capsys.readouterr().err
    assert main(["tune", str(tmp_path), "--device", "cpu", "--out", str(tmp_path), "--top-k", "2"]) == BAD_INPUT
    assert "the checkpoint says what --top-k would" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--tokens", "0"], ["--tokens", "1,,2"], ["--tokens", "a"], ["--load", "even"], ["--experts", "0"]])
def test_arguments_that_do_not_parse_exit_with_2(tmp_path: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*SIZES, "--out", str(tmp_path), *arguments])
    assert caught.value.code == BAD_INPUT


def test_a_folder_to_write_to_must_be_named() -> None:
    with pytest.raises(SystemExit) as caught:
        main(SIZES)
    assert caught.value.code == BAD_INPUT


def test_numbers_of_tokens_are_taken_once_and_in_order() -> None:
    assert counts("64,8,8,1") == (1, 8, 64)


def test_a_file_that_is_not_ours_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "Test_GPU.json").write_text('{"1": {"BLOCK_SIZE_M": 16}}')
    measurer = FakeMeasurer()
    with pytest.raises(ValueError, match="not a file of tuned plans"):
        tune(tmp_path, measurer)
    assert measurer.calls == 0
