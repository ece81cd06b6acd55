"""What a layer was made of beside its weights is followed too: functions, their parameters, and who wants gradients."""

import copy
import importlib
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from typing_extensions import override

from moe_typed import SiluAndMul
from moe_typed.formats import Fp32TransposedExpertWeights
from moe_typed.integrations.transformers import Options
from moe_typed.integrations.transformers.adapt import adapt
from moe_typed.integrations.transformers.modules import read_stored
from moe_typed.integrations.transformers.survey import EXPERTS, HIDDEN, INTER, ExpertsClass
from moe_typed.runners import OpaqueActivation, UnsupportedError
from tests.integrations.transformers.support import GPT_OSS, INKLING, MUSE, NEMOTRON, QWEN, TOLERANCE, eager, error, experts, inputs, typed
from tests.integrations.transformers.test_weights import check, held

DEEPSEEK_V4 = experts("deepseek_v4", "DeepseekV4Experts")


def by_interface(module: nn.Module, *of: Tensor) -> Tensor:
    """Return what transformers' own implementation makes of what the interface declares: eager forwards look at less."""
    return cast("Tensor", importlib.import_module("transformers.integrations.moe").batched_mm_experts_forward(module, *of))


def check_by_interface(module: nn.Module, run: Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]) -> None:
    of = inputs(5, torch.float32)
    with torch.no_grad():
        assert error(run(module, *of), by_interface(module, *of)) <= TOLERANCE[torch.float32]


def multiply(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return gate * up


def other_function(module: Any) -> None:
    module.act_fn = nn.GELU()


def other_limit(module: Any) -> None:
    module.limit = 0.1


def other_alpha(module: Any) -> None:
    module.alpha = 1.0


def other_gate(module: Any) -> None:
    module._apply_gate = multiply


def other_norm(module: Any) -> None:
    module.post_expert_norm = copy.deepcopy(module.post_expert_norm)
    with torch.no_grad():
        module.post_expert_norm.weight.mul_(3)


@pytest.mark.parametrize(
    ("experts", "change"),
    [
        (QWEN, other_function),
        (QWEN, other_gate),
        (INKLING, other_gate),
        (NEMOTRON, other_function),
        (GPT_OSS, other_limit),
        (GPT_OSS, other_alpha),
        (DEEPSEEK_V4, other_limit),
        (MUSE, other_norm),
        (MUSE, other_function),
    ],
    ids=lambda value: getattr(value, "name", None) or value.__name__,
)
def test_a_change_between_the_products_is_followed(experts: ExpertsClass, change: Callable[[nn.Module], None]) -> None:
    module, run = experts.small(torch.float32), typed()
    check_by_interface(module, run)
    change(module)
    check_by_interface(module, run)
    layer = held(module)
    check_by_interface(module, run)
    assert held(module) is layer


def test_a_class_that_is_given_another_gate_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    module, run = QWEN.small(torch.float32), typed()
    check_by_interface(module, run)

    def gate(_: nn.Module, rows: Tensor) -> Tensor:
        return multiply(rows)

    monkeypatch.setattr(type(module), "_apply_gate", gate)
    check_by_interface(module, run)


def test_a_function_without_a_gate_is_called_as_it_is_now() -> None:
    module, run = NEMOTRON.small(torch.float32), typed()
    for function in (nn.Tanh(), nn.Sigmoid()):
        module.act_fn = function
        assert isinstance(check(module, run).found.activation, OpaqueActivation)


def test_a_layer_computes_in_the_dtype_of_its_weights() -> None:
    module, run = QWEN.small(torch.float32), typed()
    with torch.no_grad():
        assert run(module, *inputs(2, torch.bfloat16)).dtype is torch.bfloat16
    assert held(module).found.compute is torch.float32


def test_projections_of_two_dtypes_are_refused() -> None:
    module = QWEN.small(torch.float32)
    module.down_proj = nn.Parameter(module.get_parameter("down_proj").detach().half())
    with pytest.raises(UnsupportedError, match=r"the projections are torch.float32 and torch.float16; both must have one dtype"):
        typed()(module, *inputs(2, torch.float32))


def test_weights_of_other_experts_are_refused() -> None:
    module = QWEN.small(torch.float32)
    module.gate_up_proj = nn.Parameter(module.get_parameter("gate_up_proj").detach()[:4].clone())
    with pytest.raises(UnsupportedError, match=f"the projections hold 4 and {EXPERTS} experts; the module counts {EXPERTS}"):
        typed()(module, *inputs(2, torch.float32))


def test_a_gate_from_outside_may_read_anything() -> None:
    module, run, limits = QWEN.small(torch.float32), typed(), [2.0]

    def gate(rows: Tensor) -> Tensor:
        first, second = rows.chunk(2, dim=-1)
        return nn.functional.silu(first.clamp(max=limits[0])) * second.clamp(-limits[0], limits[0])

    vars(module)["_apply_gate"] = gate
    check_by_interface(module, run)
    limits[0] = 0.05
    check_by_interface(module, run)


def test_a_value_inside_a_function_is_followed() -> None:
    module, run = QWEN.small(torch.float32), typed()
    module.act_fn = function = nn.GELU()
    assert check(module, run).found.activation.name == "gelu"
    function.approximate = "tanh"
    assert check(module, run).found.activation.name == "gelu-tanh"


@pytest.mark.parametrize(("experts", "change"), [(GPT_OSS, other_limit), (INKLING, other_gate)], ids=["known", "called"])
def test_a_shallow_copy_does_what_it_has_become(experts: ExpertsClass, change: Callable[[nn.Module], None]) -> None:
    module, run = experts.small(torch.float32), typed()
    check_by_interface(module, run)
    twin = copy.copy(module)
    change(twin)
    check_by_interface(twin, run)
    check_by_interface(module, run)


def test_a_shallow_copy_calls_its_own_function() -> None:
    module, run = INKLING.small(torch.float32), typed()
    check(module, run)
    twin = copy.copy(module)
    layer = check(twin, run)
    assert isinstance(layer.found.activation, OpaqueActivation)
    assert getattr(layer.found.activation.function, "__self__", None) is twin


class ByConfig(nn.Module):
    """Experts of a user, whose gate reads what it is told at other places."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        generator = torch.Generator().manual_seed(1)
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INTER, HIDDEN, generator=generator) / 8)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INTER, generator=generator) / 8)
        self.deep = nn.Sequential(nn.SiLU())
        self.calls = 0

    def _apply_gate(self, rows: Tensor) -> Tensor:
        gate, up = rows.chunk(2, dim=-1)
        limit = cast("float", cast("Any", self).config.swiglu_limit)
        return nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


class ByChild(ByConfig):
    @override
    def _apply_gate(self, rows: Tensor) -> Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return cast("Tensor", self.deep(gate)) * up


class ByHelper(ByConfig):
    limit = 2.0

    def clamped(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = rows.chunk(2, dim=-1)
        return gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)

    @override
    def _apply_gate(self, rows: Tensor) -> Tensor:
        gate, up = self.clamped(rows)
        return nn.functional.silu(gate) * up


def of_user(cls: type[nn.Module]) -> Any:
    config = importlib.import_module("transformers").Qwen3MoeConfig()
    config.swiglu_limit = 2.0
    decorated: Any = importlib.import_module("transformers.integrations.moe").use_experts_implementation(type(cls.__name__, (cls,), {}))
    return decorated(config).eval()


def change_config(module: Any) -> None:
    module.config.swiglu_limit = 0.05


def change_child(module: Any) -> None:
    module.deep[0] = nn.Tanh()


def change_limit(module: Any) -> None:
    module.limit = 0.05


@pytest.mark.parametrize(
    ("cls", "change", "known"), [(ByConfig, change_config, False), (ByChild, change_child, False), (ByHelper, change_limit, True)]
)
def test_what_cannot_be_watched_is_called(cls: type[nn.Module], change: Callable[[nn.Module], None], known: bool) -> None:
    module, run = of_user(cls), typed()
    check_by_interface(module, run)
    assert isinstance(held(module).found.activation, OpaqueActivation) is not known
    change(module)
    check_by_interface(module, run)


def test_what_a_gate_does_not_read_may_change() -> None:
    module, run = of_user(ByHelper), typed()
    check_by_interface(module, run)
    layer = held(module)
    module.calls += 1
    check_by_interface(module, run)
    assert held(module) is layer


def gradients(module: nn.Module, forward: Callable[..., Tensor], *of: Tensor) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(forward(module, *of).square().sum(), tuple(module.parameters()), allow_unused=True)


def lay_out_anew(module: nn.Module) -> None:
    adapt(read_stored(module), row_major=True)


def halve_biases(module: nn.Module) -> None:
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        setattr(module, name, nn.Parameter(module.get_parameter(name).detach().half()))


@pytest.mark.parametrize("before", [lay_out_anew, halve_biases])
def test_weights_that_are_frozen_no_longer_have_gradients(before: Callable[[nn.Module], None]) -> None:
    """A view or a copy that was made while they were frozen has none."""
    module, run, of = GPT_OSS.small(torch.float32), typed(), inputs(5, torch.float32)
    before(module)
    module.requires_grad_(False)
    run(module, *of)
    module.requires_grad_(True)
    found = gradients(module, run, *of)
    assert len(found) == 4
    assert all(gradient is not None and bool(gradient.any()) for gradient in found)
    module.requires_grad_(False)
    assert not run(module, *of).requires_grad


def test_gradients_are_those_of_the_parameter_that_is_there_now() -> None:
    """Another parameter in the same memory."""
    module, run, of = QWEN.small(torch.float32), typed(), inputs(5, torch.float32)
    run(module, *of)
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(parameter.data))
    assert all(gradient is not None for gradient in gradients(module, run, *of))


class Dropping(ByConfig):
    @override
    def _apply_gate(self, rows: Tensor) -> Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return nn.functional.dropout(nn.functional.silu(gate), 0.5, self.training) * up


def test_what_is_done_in_training_alone_is_done_there() -> None:
    module, run, of = of_user(Dropping), typed(), inputs(5, torch.float32)
    check_by_interface(module, run)
    assert held(module).found.activation == SiluAndMul()
    module.train()
    with torch.no_grad():
        assert not torch.equal(run(module, *of), run(module, *of))
    module.eval()
    check_by_interface(module, run)


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj_bias"])
def test_a_parameter_that_is_computed_is_followed(name: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))

        @override
        def forward(self, tensor: Tensor) -> Tensor:
            return tensor * self.scale

    module, run, of = GPT_OSS.small(torch.float32), typed(), inputs(5, torch.float32)
    check(module, run)
    parametrize.register_parametrization(module, name, Scaled())
    check(module, run)
    with torch.no_grad():
        cast("Any", module).parametrizations[name][0].scale.mul_(2)
    check(module, run)
    for got, expected in zip(gradients(module, run, *of), gradients(module, eager, *of), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


def test_a_layer_in_a_transform_of_torch_func() -> None:
    module, run, of = QWEN.small(torch.float32), typed(), inputs(5, torch.float32)
    check(module, run)

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = module

        @override
        def forward(self, function: Callable[..., Tensor]) -> Tensor:
            return function(self.experts, *of).square().sum()

    functional: Any = importlib.import_module("torch.func")
    weights = {f"experts.{name}": parameter.detach() * 1.5 for name, parameter in module.named_parameters()}
    caller = Caller()

    def gradients_by(forward: Callable[..., Tensor]) -> dict[str, Tensor]:
        def loss(given: dict[str, Tensor]) -> Tensor:
            return cast("Tensor", functional.functional_call(caller, given, (forward,)))

        return cast("dict[str, Tensor]", functional.grad(loss)(weights))

    got, expected = gradients_by(run), gradients_by(eager)
    for name in weights:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-3, atol=1e-4)
    check(module, run)


def test_a_parameter_at_another_s_old_place_is_followed() -> None:
    module, run = QWEN.small(torch.float32), typed()
    check(module, run)
    old = module.get_parameter("gate_up_proj")
    memory = old.data
    old.data = torch.zeros_like(memory)
    module.gate_up_proj = nn.Parameter(memory)
    check(module, run)


def test_memory_that_a_copy_was_made_of_is_not_used_again_meanwhile() -> None:
    module, run = GPT_OSS.small(torch.float32), typed()
    halve_biases(module)
    before = {name: parameter.data_ptr() for name, parameter in module.named_parameters()}
    layer = check(module, run)
    for parameter in module.parameters():
        parameter.data = torch.zeros_like(parameter)
    assert {seen.name: seen.kept.data_ptr() for seen in layer.seen if seen.kept is not None} == before
    check(module, run)


def test_memory_that_is_read_as_another_dtype_is_followed() -> None:
    module, run = QWEN.small(torch.bfloat16), typed()
    check(module, run, torch.bfloat16)
    for parameter in module.parameters():
        parameter.data = parameter.data.view(torch.float16)
    with torch.no_grad():
        run(module, *inputs(2, torch.float16))
    assert held(module).found.compute is torch.float16


def test_a_bias_that_is_taken_away_is_missed() -> None:
    module, run = GPT_OSS.small(torch.float32), typed()
    check(module, run)
    setattr(module, "down_proj_bias", None)  # noqa: B010  checkers take modules and tensors alone
    with pytest.raises(UnsupportedError, match="declares biases, and there is no 'down_proj_bias'"), torch.no_grad():
        run(module, *inputs(2, torch.float32))


def test_a_function_that_writes_to_its_rows_is_called() -> None:
    """What comes out is silu(gate) * up of the rows that it has changed, which is not silu(gate) * up."""

    def doubling(rows: Tensor) -> Tensor:
        gate, up = rows.chunk(2, dim=-1)
        gate.mul_(2.0)
        return nn.functional.silu(gate) * up

    class Doubling(ByConfig):
        @override
        def _apply_gate(self, rows: Tensor) -> Tensor:
            return doubling(rows)

    module, run = of_user(Doubling), typed()
    check_by_interface(module, run)
    assert isinstance(held(module).found.activation, OpaqueActivation)


def test_functions_are_read_in_several_threads_at_once() -> None:
    found: list[str] = []

    def prepare() -> None:
        for _ in range(5):
            found.append(check(QWEN.small(torch.float32), typed()).found.activation.name)

    threads = [threading.Thread(target=prepare) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [SiluAndMul.name] * 20
    compiler: Any = vars(torch)["compile"]  # torch types it by halves
    rows = torch.ones(2, 2 * INTER)
    assert torch.equal(compiler(multiply, backend="eager")(rows), multiply(rows))  # a tracer's switch is one for the process


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.usefixtures("on_a_gpu")
class TestRelay:
    def test_under_inference_mode_leaves_parameters_that_can_be_trained(self) -> None:
        module, of = GPT_OSS.small(torch.float32), inputs(3, torch.float32)
        with torch.inference_mode():
            typed()(module, *of)
        assert held(module).adapted.relaid
        assert not any(parameter.is_inference() for parameter in module.parameters())
        assert all(gradient is not None for gradient in gradients(module, typed(Options(runner="reference")), *of))

    def test_takes_parameters_that_were_made_under_inference_mode(self) -> None:
        with torch.inference_mode():
            module = GPT_OSS.small(torch.float32)
        check(module, typed())
        assert held(module).adapted.relaid

    def test_leaves_a_part_of_a_larger_tensor_where_it_is(self) -> None:
        module, run = GPT_OSS.small(torch.float32), typed()
        whole = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
        start = 0
        for parameter in module.parameters():
            parameter.data = whole[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
        assert isinstance(check(module, run).adapted.weights, Fp32TransposedExpertWeights)
        whole.mul_(1.5)
        check(module, run)
        assert module.get_parameter("gate_up_proj").untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()

    @pytest.mark.parametrize("rows", [0, 1, 5, 64])
    @pytest.mark.parametrize("experts", [QWEN, GPT_OSS, NEMOTRON], ids=lambda experts: experts.name)
    def test_any_number_of_rows_in_any_layout(self, experts: ExpertsClass, rows: int) -> None:
        module, run = experts.small(torch.float32), typed()
        hidden_states, ids, weights = inputs(rows, torch.float32)
        away = torch.arange(rows) % 3 == 1
        marked, masked = ids.clone(), weights.clone()
        marked[away, 0], masked[away, 0] = EXPERTS, 0
        turned = (hidden_states.T.contiguous().T, marked.T.contiguous().T, masked.T.contiguous().T)
        with torch.no_grad():
            assert error(run(module, *turned), eager(module, hidden_states, ids, masked)) <= TOLERANCE[torch.float32]
