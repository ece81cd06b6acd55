"""What the emulated AITER raises before any kernel, in both modes, and the names that a caller finds."""

import importlib
import sys
from typing import Literal

import pytest
import torch

from tests.emulation.aiter.enums import ActivationType, GateMode, PybindEnum, QuantType
from tests.emulation.aiter.library import Tuned, VersionName
from tests.emulation.aiter.misuse import EmulationGap
from tests.emulation.aiter_cases import H, I, Kind, L, make_aiter, make_hidden, make_layer, make_routes

TOKENS = 5
BF16 = torch.bfloat16


def raised(mode: Literal["strict", "faithful"], change: dict[str, object], kind: Kind = "no", version: VersionName = "head") -> type[BaseException]:
    library = make_aiter(kind, mode, version=version)
    arguments = {"hidden_states": make_hidden(TOKENS), **make_layer(library, kind).arguments, **make_routes(TOKENS).arguments, **change}
    with pytest.raises(Exception, match=r".*") as error:
        library.fused_moe(**arguments)
    return error.type


@pytest.mark.parametrize("mode", ["strict", "faithful"])
def test_host_checks_raise_what_upstream_raises(mode: Literal["strict", "faithful"]) -> None:
    wrong: tuple[tuple[type[BaseException], dict[str, object], Kind], ...] = (
        (AttributeError, {"activation": 0}, "no"),
        (AttributeError, {"quant_type": 0}, "no"),
        (ValueError, {"gate_mode": "together"}, "no"),
        (AssertionError, {"w1": torch.zeros(L, 3 * I, H, dtype=BF16)}, "no"),
        (AssertionError, {"w2": torch.zeros(L, H, I // 2, dtype=torch.uint8)}, "no"),  # one packed, one not
        (AssertionError, {"hidden_states": make_hidden(TOKENS).float()}, "no"),
        (AssertionError, {"hidden_states": make_hidden(TOKENS).to(torch.float8_e4m3fn)}, "per_token_fp8"),  # rows in fp8 need a dtype
        (AssertionError, {"dtype": torch.float32}, "no"),
        (RuntimeError, {"topk_weight": make_routes(TOKENS).weights.bfloat16()}, "no"),
        (TypeError, {"bias1": torch.zeros(L, 2 * I, dtype=BF16)}, "no"),
        (TypeError, {"bias2": torch.zeros(L, H, dtype=BF16)}, "a4w4"),
        (NotImplementedError, {"quant_type": QuantType.per_256x128}, "no"),
        (NotImplementedError, {"quant_type": QuantType.per_1024x128}, "no"),
        (RuntimeError, {"activation": ActivationType.No}, "no"),
        (RuntimeError, {"activation": ActivationType.Situv2}, "no"),
        (EmulationGap, {"shared_w1": torch.zeros(1)}, "no"),
        (EmulationGap, {"shared_expert_id": 3}, "no"),
        (EmulationGap, {"stage2_scatter": object()}, "no"),
        (EmulationGap, {"gate_mode": "gate_only"}, "no"),
    )
    for error, change, kind in wrong:
        assert raised(mode, change, kind) is error, change.keys()


def test_versions_refuse_what_they_have_not() -> None:
    later: dict[str, object] = {"shared_w1": torch.zeros(1), "a2_scale": torch.ones(1)}
    assert raised("strict", later, version="later") is NotImplementedError
    assert raised("strict", {"activation": ActivationType.Situv2}, "a4w4", "0.1.7") is RuntimeError
    assert raised("strict", {"gate_mode": "separated"}, version="0.1.7") is TypeError
    assert raised("strict", {"output": torch.zeros(TOKENS, H, dtype=BF16)}) is TypeError
    assert raised("strict", {"no_combine": True}, "per_tensor", "no_combine") is EmulationGap


def test_the_wheel_has_no_microscaled_fp8_weights() -> None:
    assert raised("strict", {}, "mxfp8", "0.1.7") is RuntimeError


def test_enumerations_are_those_of_pybind() -> None:
    assert [QuantType(value).name for value in range(8)] == list(QuantType.__members__)
    assert (ActivationType.Swiglu.value, ActivationType.No.value, QuantType.per_1x32.value) == (2, -1, 3)
    assert ActivationType(0) == ActivationType.Silu
    assert hash(ActivationType(0)) == hash(ActivationType.Silu)
    others: tuple[object, ...] = (0, QuantType.No, ActivationType.Gelu)
    assert all(other != ActivationType.Silu for other in others)
    assert repr(QuantType.per_1x32) == "<QuantType.per_1x32: 3>"
    assert int(QuantType.per_1x128) == 4
    with pytest.raises(ValueError, match="9"):
        QuantType(9)
    assert isinstance(QuantType.No, PybindEnum)


def test_fp8_is_that_of_the_architecture() -> None:
    assert make_aiter(gfx="gfx942").dtypes.fp8 is torch.float8_e4m3fnuz
    assert make_aiter(gfx="gfx950").dtypes.fp8 is torch.float8_e4m3fn
    assert "u8" in make_aiter().dtypes.d_dtypes
    assert "u8" not in make_aiter(version="0.1.7").dtypes.d_dtypes


def test_fp8_of_the_older_architecture_is_computed_with() -> None:
    library = make_aiter(gfx="gfx942")
    layer = make_layer(library, "per_128x128", torch.float8_e4m3fnuz)
    out = library.fused_moe(hidden_states=make_hidden(TOKENS), **layer.arguments, **make_routes(TOKENS).arguments)
    assert out.isfinite().all()
    assert library.decisions[-1].activation is torch.float8_e4m3fnuz


def test_imports_find_the_names_where_the_library_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    library = make_aiter(tuned=Tuned())
    for name, module in library.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    assert importlib.import_module("aiter").QuantType is QuantType
    assert importlib.import_module("aiter").dtypes == library.dtypes
    assert importlib.import_module("aiter.fused_moe").fused_moe is library.fused_moe
    assert importlib.import_module("aiter.ops.shuffle").shuffle_weight == library.shuffle_weight
    assert importlib.import_module("aiter.utility.fp4_utils").e8m0_shuffle == library.e8m0_shuffle
    assert importlib.import_module("aiter.ops.flydsl.moe_common").GateMode is GateMode
    assert "aiter.ops.flydsl" not in make_aiter(version="0.1.7").modules()
