"""The layer of a module is made of the module's own memory, and follows whatever becomes of it."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from moe_typed import DebugLevel, Interleaved, debug_level
from moe_typed.formats import Fp32ExpertWeights, Fp32TransposedExpertWeights, Fp32UngatedExpertWeights
from moe_typed.integrations.transformers import Options
from moe_typed.integrations.transformers.adapt import adapt
from moe_typed.integrations.transformers.implementation import ExpertsImplementation, give_options, held_by
from moe_typed.integrations.transformers.layers import Held
from moe_typed.integrations.transformers.modules import read_stored
from moe_typed.integrations.transformers.survey import EXPERTS, HIDDEN, INTER, ExpertsClass
from moe_typed.runners import UnsupportedError
from tests.integrations.transformers.support import GPT_OSS, INKLING, MUSE, NEMOTRON, QWEN, TOLERANCE, eager, error, inputs, random, typed

FIRST = {QWEN: "gate_up_proj", GPT_OSS: "gate_up_proj", NEMOTRON: "up_proj"}
every_kind = pytest.mark.parametrize("experts", FIRST, ids=lambda experts: experts.name)


def held(module: nn.Module) -> Held:
    found = held_by(module)
    assert found is not None
    return found


def check(module: nn.Module, run: Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype = torch.float32) -> Held:
    """Compare a module with its own forward, and return the layer that it holds."""
    hidden_states, ids, weights = inputs(5, dtype)
    with torch.no_grad():
        assert error(run(module, hidden_states, ids, weights), eager(module, hidden_states, ids, weights)) <= TOLERANCE[dtype]
    return held(module)


@pytest.mark.parametrize(
    ("experts", "weights"), [(QWEN, Fp32ExpertWeights), (GPT_OSS, Fp32TransposedExpertWeights), (NEMOTRON, Fp32UngatedExpertWeights)]
)
def test_weights_are_the_module_s_own_memory(experts: ExpertsClass, weights: type) -> None:
    module = experts.small(torch.float32)
    adapted = check(module, typed()).adapted
    assert isinstance(adapted.weights, weights)
    assert (adapted.relaid, adapted.copied) == (0, 0)
    tensors = dict(module.named_parameters())
    assert adapted.weights.w13 is tensors[FIRST[experts]]
    assert adapted.weights.w2 is tensors["down_proj"]


@every_kind
def test_a_layer_is_prepared_once(experts: ExpertsClass) -> None:
    module, run = experts.small(torch.float32), typed()
    first = check(module, run)
    assert check(module, run) is first
    with torch.inference_mode():
        run(module, *inputs(3, torch.float32))
    assert held(module) is first


def scale_in_place(module: nn.Module, first: str) -> None:
    with torch.no_grad():
        module.get_parameter(first).mul_(1.5)
        module.get_parameter("down_proj").add_(0.01)


def write_through_data(module: nn.Module, first: str) -> None:
    module.get_parameter(first).data.mul_(1.5)


def replace_data(module: nn.Module, first: str) -> None:
    parameter = module.get_parameter(first)
    parameter.data = random(*parameter.shape, seed=7) / 8


def replace_parameter(module: nn.Module, first: str) -> None:
    shape = module.get_parameter(first).shape
    setattr(module, first, nn.Parameter(random(*shape, seed=8) / 8))


def load(module: nn.Module, first: str) -> None:
    module.load_state_dict({name: random(*tensor.shape, seed=9) / 8 for name, tensor in module.state_dict().items()})


def assign(module: nn.Module, first: str) -> None:
    module.load_state_dict({name: random(*tensor.shape, seed=9) / 8 for name, tensor in module.state_dict().items()}, assign=True)


def offload(module: nn.Module, first: str) -> None:
    """What device_map offload does between two forwards: the parameters go, and come back as others."""
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(torch.empty_like(parameter, device="meta")))
        setattr(module, name, nn.Parameter(parameter.detach() * 1.25))


CHANGES = (scale_in_place, write_through_data, replace_data, replace_parameter, load, assign, offload)


@every_kind
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_the_module_s_weights_is_followed(experts: ExpertsClass, change: Callable[[nn.Module, str], None]) -> None:
    module, run = experts.small(torch.float32), typed()
    check(module, run)
    change(module, FIRST[experts])
    check(module, run)


@every_kind
def test_another_dtype_is_followed(experts: ExpertsClass) -> None:
    module, run = experts.small(torch.float32), typed()
    check(module, run)
    before = held(module)
    module.to(torch.bfloat16)
    assert check(module, run, torch.bfloat16).found.compute is torch.bfloat16
    assert held(module) is not before


def test_weights_that_are_not_there_are_refused() -> None:
    module = QWEN.small(torch.float32).to("meta")
    with pytest.raises(UnsupportedError, match="Qwen3MoeExperts: gate_up_proj is on the meta device"):
        typed()(module, *inputs(2, torch.float32))


def test_a_tensor_of_another_kind_is_refused() -> None:
    class Wrapped(Tensor):
        pass

    module = QWEN.small(torch.float32)
    weight = module.get_parameter("gate_up_proj").detach()
    del module.gate_up_proj
    module.gate_up_proj = weight.as_subclass(Wrapped)
    with pytest.raises(UnsupportedError, match=r"gate_up_proj is a .*Wrapped"):
        typed()(module, *inputs(2, torch.float32))


def test_strides_that_no_class_has_are_refused() -> None:
    module = QWEN.small(torch.float32)
    weight = module.get_parameter("gate_up_proj").detach()
    module.gate_up_proj = nn.Parameter(weight.mT.contiguous().mT)
    with pytest.raises(UnsupportedError, match="make it contiguous"):
        typed()(module, *inputs(2, torch.float32))


def copied(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module)


def pickled(module: nn.Module) -> nn.Module:
    twin = pickle.loads(pickle.dumps(module))
    assert isinstance(twin, nn.Module)
    return twin


@every_kind
@pytest.mark.parametrize("twin", [copied, pickled])
def test_a_copy_of_a_module_prepares_a_layer_of_its_own(experts: ExpertsClass, twin: Callable[[nn.Module], nn.Module]) -> None:
    module, run = experts.small(torch.float32), typed()
    check(module, run)
    other = twin(module)
    assert held_by(other) is None
    scale_in_place(other, FIRST[experts])
    assert check(other, run).adapted.weights.w2.data_ptr() != check(module, run).adapted.weights.w2.data_ptr()


@pytest.mark.parametrize("experts", [QWEN, INKLING, MUSE], ids=lambda experts: experts.name)
def test_a_layer_ends_with_its_module(experts: ExpertsClass) -> None:
    module, run = experts.small(torch.float32), typed()
    layer = weakref.ref(check(module, run).layer)
    del module
    gc.collect()
    assert layer() is None


def test_options_are_those_of_the_module_or_else_the_registered_ones() -> None:
    module = QWEN.small(torch.float32)
    one, other = ExpertsImplementation(Options()), ExpertsImplementation(Options(wire="bf16"))
    assert check(module, one.__call__).found.report.wire == "fp32"
    hidden_states, ids, weights = inputs(4, torch.float32)
    with torch.no_grad():
        rounded = other(module, hidden_states, ids, weights)
        assert held(module).found.report.wire == "bf16"
        give_options(module, Options(runner="reference"))
        exact = other(module, hidden_states, ids, weights)
    assert held(module).found.report.wire == "fp32"
    assert not torch.equal(rounded, exact)


def test_the_debug_level_that_is_asked_for_holds_while_the_layer_runs() -> None:
    module, found = INKLING.small(torch.float32), list[DebugLevel]()
    function = module._apply_gate

    def gate(rows: Tensor) -> Tensor:
        found.append(debug_level())
        return cast("Callable[[Tensor], Tensor]", function)(rows)

    vars(module)["_apply_gate"] = gate
    outside = debug_level()
    with torch.no_grad():
        typed(Options(runner="reference"))(module, *inputs(2, torch.float32))
        usual, found[:] = set(found), []
        typed(Options(debug="values"))(module, *inputs(2, torch.float32))
    assert usual == {outside}
    assert set(found) <= {outside, DebugLevel.VALUES}  # the function is read outside the layer, once
    assert found[-1] is DebugLevel.VALUES
    assert debug_level() is outside


def test_a_runner_that_cannot_is_refused_before_any_numbers() -> None:
    with pytest.raises(UnsupportedError, match=r"Qwen3MoeExperts: no runner can do this: triton: .*CUDA"):
        typed(Options(runner="triton"))(QWEN.small(torch.float32), *inputs(2, torch.float32))


@pytest.mark.parametrize("name", ["runner", "wire", "debug"])
def test_a_name_that_there_is_not_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="nonsense"):
        Options(**{name: "nonsense"})  # type: ignore[arg-type]


class TestRelay:
    """Transposed weights for a runner that wants them row-major: memory turns, the parameter stays."""

    def test_keeps_the_parameter_and_its_values(self) -> None:
        module = GPT_OSS.small(torch.float32)
        parameter = module.get_parameter("gate_up_proj")
        before = parameter.detach().clone()
        adapted = adapt(read_stored(module), row_major=True)
        assert module.get_parameter("gate_up_proj") is parameter
        assert torch.equal(parameter, before)
        assert adapted.relaid == sum(module.get_parameter(name).numel() * 4 for name in ("gate_up_proj", "down_proj"))
        assert adapted.weights.w13.shape == (EXPERTS, 2 * INTER, HIDDEN)
        assert adapted.weights.w13.is_contiguous()
        assert adapted.weights.w13.data_ptr() == parameter.data_ptr()
        assert adapt(read_stored(module), row_major=False).relaid == 0

    @pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
    def test_changes_are_followed(self, change: Callable[[nn.Module, str], None]) -> None:
        module, run = GPT_OSS.small(torch.float32), typed()
        adapt(read_stored(module), row_major=True)
        assert isinstance(check(module, run).adapted.weights, Fp32ExpertWeights)
        change(module, "gate_up_proj")
        check(module, run)

    def test_gradients_reach_the_parameter(self) -> None:
        module, run = GPT_OSS.small(torch.float32), typed()
        adapt(read_stored(module), row_major=True)
        check(module, run)  # prepared without gradients first
        hidden_states, ids, weights = inputs(5, torch.float32)
        found: list[list[Tensor]] = []
        for forward in (run, eager):
            loss = forward(module, hidden_states, ids, weights).square().sum()
            found.append([*torch.autograd.grad(loss, tuple(module.parameters()))])
        assert len(found[0]) == len(found[1]) == 4
        for got, expected in zip(*found, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.usefixtures("on_a_gpu")
class TestTriton:
    @pytest.mark.parametrize("experts", [QWEN, GPT_OSS, NEMOTRON], ids=lambda experts: experts.name)
    def test_runs_what_it_can(self, experts: ExpertsClass) -> None:
        module, run = experts.small(torch.float32), typed()
        layer = check(module, run)
        assert layer.found.report.runner == "triton"
        assert (layer.adapted.relaid > 0) is (experts is GPT_OSS)
        assert layer.adapted.weights.order is (Interleaved if experts is GPT_OSS else layer.adapted.weights.order)
        scale_in_place(module, "up_proj" if experts is NEMOTRON else "gate_up_proj")
        check(module, run)

    @pytest.mark.parametrize("experts", [INKLING, MUSE], ids=lambda experts: experts.name)
    def test_calls_what_no_kernel_knows_between_or_behind_the_products(self, experts: ExpertsClass) -> None:
        report = check(experts.small(torch.float32), typed()).found.report
        assert report.runner == "triton"
        assert not report.degradations

    def test_parameters_stay_as_they_are_where_that_is_asked(self) -> None:
        module = GPT_OSS.small(torch.float32)
        assert isinstance(check(module, typed(Options(relay=False))).adapted.weights, Fp32TransposedExpertWeights)
        assert module.get_parameter("gate_up_proj").is_contiguous()

    def test_gradients_that_it_has_not_are_refused(self) -> None:
        module = QWEN.small(torch.float32)
        with pytest.raises(UnsupportedError, match=r"the triton runner has no gradients: run under torch.no_grad\(\)"):
            typed()(module, *inputs(2, torch.float32))
        module.requires_grad_(False)
        typed()(module, *inputs(2, torch.float32))
