"""How signatures are read and compared, and how a wheel is fetched: what the comparison with a published wheel stands on."""

import ast
from pathlib import Path

import pytest

from tests.typings.published import OFFLINE, fetch, needs
from tests.typings.signatures import Parameter, Signature, bound, difference, members, read, signature


def written(text: str) -> Signature:
    (function,) = ast.parse(f"def f({text}): ...").body
    assert isinstance(function, ast.FunctionDef)
    return signature(function, {"SIZE": ast.Constant(32)})


def test_every_kind_of_parameter_is_read() -> None:
    assert written("a, /, b, c=dtypes.i8, *, d, e=None") == (
        Parameter("a", "positional", None),
        Parameter("b", "any", None),
        Parameter("c", "any", "dtypes.i8"),
        Parameter("d", "keyword", None),
        Parameter("e", "keyword", "None"),
    )
    assert written("*a, **k") == (Parameter("a", "rest", None), Parameter("k", "rest", None))


def test_a_constant_of_the_module_stands_for_its_value() -> None:
    assert written("a=SIZE") == written("a=32") != written("a=OTHER")


def test_annotations_do_not_matter() -> None:
    assert written("a: Optional[torch.tensor] = None") == written("a=None")


@pytest.mark.parametrize(
    ("other", "faults"),
    [
        ("a, b=0, c=None", 0),
        ("a, b=1, c=None", 1),  # a default
        ("a, b, c=None", 1),  # none
        ("a, x=0, c=None", 1),  # a name
        ("a, c=None, b=0", 2),  # an order
        ("a, b=0, *, c=None", 1),  # a kind
        ("a, b=0", 1),  # too few
        ("a, b=0, c=None, d=None", 1),  # too many
    ],
)
def test_differences_are_found(other: str, faults: int) -> None:
    assert len(difference("f", written("a, b=0, c=None"), written(other))) == faults


def test_a_partial_leaves_what_comes_after_to_names() -> None:
    assert bound(written("x, y=0, size=1, z=2"), "size") == written("x, y=0, *, z=2")


def test_overloads_protocols_and_enums_are_read(tmp_path: Path) -> None:
    text = """
SIZE = 4
Names: TypeAlias = Literal["a", "b"]
@overload
def f(x: None) -> None: ...
@overload
def f(x: int, y: int = SIZE) -> int: ...
class P(Protocol):
    def __call__(self, x: int) -> int: ...
class E(PybindEnum[V]):
    No: ClassVar[E[Literal[-1]]]
    Yes: ClassVar[E[Literal[0]]]
    __members__: ClassVar[Mapping[str, E]]
"""
    (tmp_path / "m.pyi").write_text(text)
    module = read(tmp_path / "m.pyi")
    assert module.signatures("f") == [written("x"), written("x, y=4")]
    assert module.call_signatures("P") == [written("x")]
    assert module.literals("Names") == ["a", "b"]
    assert members(module.classes["E"]) == {"No": -1, "Yes": 0}


# ---- fetching ------------------------------------------------------------------------------------------------------------------------------


def test_a_wheel_that_nobody_has_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"amd-aiter==\S+ did not come") as caught:
        fetch("amd-aiter", tmp_path / "here")
    assert f"{OFFLINE}=1" in str(caught.value)


def test_who_has_no_network_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OFFLINE, raising=False)
    needs("amd-aiter")
    monkeypatch.setenv(OFFLINE, "1")
    with pytest.raises(pytest.skip.Exception, match="amd-aiter"):
        needs("amd-aiter")
