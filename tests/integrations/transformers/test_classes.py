"""Every experts class of the installed package: found by its decorator, run, and compared with its own forward."""

import importlib.util
from pathlib import Path

import pytest
import torch

from moe_typed.integrations.transformers.survey import EXPERTS, ExpertsClass, find_experts_classes, need_of
from tests.integrations.transformers.support import TOLERANCE, eager, error, inputs, typed

CLASSES = find_experts_classes()
REFUSED: frozenset[str] = frozenset()


def test_all_of_them_are_found() -> None:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    files = (Path(spec.origin).parent / "models").glob("*/modeling_*.py")
    decorated = sum(line.startswith("@use_experts_implementation") for file in files for line in file.read_text(encoding="utf-8").splitlines())
    assert len(CLASSES) == decorated
    assert len({(experts.module, experts.name) for experts in CLASSES}) == decorated


@pytest.mark.parametrize("experts", CLASSES, ids=lambda experts: experts.name)
def test_gives_what_its_own_forward_gives_or_is_refused(experts: ExpertsClass) -> None:
    """All that is asked of one class is one test, so that one worker alone imports its model."""
    if experts.name in REFUSED:
        assert need_of(experts).refusal
        return
    for dtype, tolerance in TOLERANCE.items():
        module, run = experts.small(dtype), typed()
        with torch.no_grad():
            for rows in (0, 1, 5, 64):
                hidden_states, ids, weights = inputs(rows, dtype, seed=rows)
                assert error(run(module, hidden_states, ids, weights), eager(module, hidden_states, ids, weights)) <= tolerance
    check_routes_to_other_ranks(experts)


def check_routes_to_other_ranks(experts: ExpertsClass) -> None:
    """Expert parallelism marks them with ids outside the experts. Their weight is zero there, which is not relied on here."""
    module = experts.small(torch.float32)
    hidden_states, ids, weights = inputs(6, torch.float32)
    away = torch.tensor([[1, 0], [0, 1], [0, 0], [1, 1], [0, 0], [1, 0]], dtype=torch.bool)
    marked = torch.where(away, torch.tensor([[EXPERTS, EXPERTS + 3]]), ids)
    with torch.no_grad():
        expected = eager(module, hidden_states, ids, weights.masked_fill(away, 0))
        got = typed()(module, hidden_states, marked, weights)
    assert error(got, expected) <= TOLERANCE[torch.float32]
