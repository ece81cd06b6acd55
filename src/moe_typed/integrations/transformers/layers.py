"""One expert layer of a model, planned and prepared once, and the tests that say whether it is still the module's."""

from abc import ABC
from collections.abc import Callable
from typing import Final, TypeAlias, cast, final

import attrs
import torch
from torch import Tensor, nn
from typing_extensions import override

from ...boundary import debug
from ...dispatchers import MoELayer
from ...formats import DenseRows, Payload
from ...ops.local_ids.reference import local_ids
from ...plan import MoEProblem, PlanError, PlanReport, RunnerRequest, build_layer, plan, probe_environment
from ...plan.ways import DENSE_MODELS
from ...routing import Localize, from_topk
from ...runners import UnsupportedError
from ...runners.acceptance import RunnerName
from ...runners.activations import Activation
from ...stages import StandardCombineInput
from .adapt import Adapted, adapt, may_relay
from .modules import Between, Stored, model_dtype, read_activation, read_stored
from .options import Options
from .seen import Seen, see, version_of

Layer: TypeAlias = MoELayer[DenseRows, Payload, StandardCombineInput]

_NAMES: Final = {model.rows.format.data_dtype: name for name, model in DENSE_MODELS.items()}


class _Own(ABC):
    """What a module holds for itself: a copy of the module, or a pickle, has None in its place, and prepares its own."""

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        return None

    @override
    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


@final
@attrs.frozen(eq=False)
class Found(_Own):
    """What was found out of a module: all that stays true when its tensors are replaced by others like them. It keeps no tensor alive.

    ``compute``: the dtype of rows in the layer. ``tensors``: dtype, shape and device of each. ``weights``: the name of the class that they became.
    """

    options: Options
    report: PlanReport
    between: Between
    compute: torch.dtype
    tensors: dict[str, tuple[torch.dtype, torch.Size, torch.device]]
    weights: str
    relaid: int
    copied: int

    @property
    def activation(self) -> Activation:
        """Return what happens between the products."""
        return self.between.activation

    def is_of(self, module: nn.Module, stored: Stored, compute: torch.dtype, options: Options) -> bool:
        """Say whether this holds for what ``module`` has now, wherever that lies."""
        if options is not self.options or compute is not self.compute:
            return False
        return _kinds(stored) == self.tensors and self.between.watch.holds(module)


def _kinds(stored: Stored) -> dict[str, tuple[torch.dtype, torch.Size, torch.device]]:
    return {name: (tensor.dtype, tensor.shape, tensor.device) for name, tensor in stored.tensors.items()}


@final
@attrs.frozen(eq=False)
class Held(_Own):
    """The layer of one experts module, which holds it.

    ``rows``: the dtype that rows must have, None where they are converted to that of the weights. ``localize``: the implementation of ops.local_ids.
    ``with_grad``: whether gradients were recorded while it was prepared. ``copies``: whether anything that was prepared is a copy, which does not
    follow a change of the module's own.
    """

    found: Found
    adapted: Adapted
    layer: Layer
    make_rows: Callable[[Tensor], DenseRows]
    localize: Localize
    seen: tuple[Seen, ...]
    rows: torch.dtype | None
    num_experts: int
    with_grad: bool
    copies: bool
    differentiable: bool

    def serves(self, module: nn.Module, hidden_states: Tensor, options: Options) -> bool:
        """Say whether this layer is what ``module`` holds now, in rows of this dtype and as ``options`` ask."""
        found = self.found
        if options is not found.options:
            return False
        if self.rows is not None and hidden_states.dtype is not self.rows:
            return False
        grad, compiling = torch.is_grad_enabled(), torch.compiler.is_compiling()
        if (grad and not self.with_grad) or not found.between.watch.holds(module, compiling=compiling):
            return False
        if compiling:  # addresses and versions are not to be had here, and dynamo guards dtypes and shapes
            return all(self._is(getattr(module, seen.name), seen, grad=grad) for seen in self.seen)
        parameters = cast("dict[str, Tensor | None]", vars(module)["_parameters"])  # getattr of a module takes three times as long
        for seen in self.seen:
            now = parameters.get(seen.name)
            if not self._holds(getattr(module, seen.name, None) if now is None else now, seen, grad=grad):
                return False
        return True

    @staticmethod
    def _is(now: Tensor, seen: Seen, *, grad: bool) -> bool:
        return now is seen.tensor and seen.lies_so(now) and (not grad or now.requires_grad is seen.with_grad)

    def _holds(self, now: Tensor | None, seen: Seen, *, grad: bool) -> bool:
        if now is None:
            return False
        if grad and (now.requires_grad is not seen.with_grad or (now is not seen.tensor and seen.with_grad)):
            return False  # its gradient belongs to the tensor that is there now
        return seen.same_memory(now) and (not self.copies or version_of(now) == seen.version)

    def run(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the layer's output (rows, hidden) in the dtype of ``hidden_states``.

        ``top_k_index``: (rows, k); ids outside the experts mark routes that are another rank's.
        ``top_k_weights``: (rows, k).
        Raises: UnsupportedError for gradients that the runner has not, and for copies that ``torch.compile`` could not see the change of.
        """
        if not self.differentiable and torch.is_grad_enabled():
            self._demand_no_gradient(hidden_states, top_k_weights)
        if self.copies and torch.compiler.is_compiling():
            raise UnsupportedError("these weights were copied when they were prepared, and compiled code would not see that the module's change")
        level = self.found.options.debug
        if level is None or torch.compiler.is_compiling():
            return self._run(hidden_states, top_k_index, top_k_weights)
        with debug(level):
            return self._run(hidden_states, top_k_index, top_k_weights)

    def _run(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        routing = from_topk(*self.localize(top_k_index, top_k_weights, 0, self.num_experts, None), self.num_experts)
        return self.layer(self.make_rows(hidden_states.to(self.found.compute)), routing).to(hidden_states.dtype)

    def _demand_no_gradient(self, *inputs: Tensor) -> None:
        if any(tensor.requires_grad for tensor in (*inputs, *(seen.tensor for seen in self.seen))):
            raise UnsupportedError(
                f"the {self.found.report.runner} runner has no gradients: run under torch.no_grad(), or ask for runner='reference'"
            )


def hold(module: nn.Module, rows: torch.dtype, top_k: int, options: Options, before: Found | None = None) -> Held:
    """Plan and prepare the layer of a module; what was found out before is kept where its tensors are alike.

    Raises: UnsupportedError, with the reason, where there is no way.
    """
    try:
        stored = read_stored(module)
        compute = model_dtype(stored, rows)
        if before is not None and before.is_of(module, stored, compute, options):
            stored = attrs.evolve(stored, order=before.between.order)
            adapted = adapt(stored, row_major=stored.transposed and before.report.runner != RunnerName.REFERENCE.value)
            if adapted.weights.format.name == before.report.problem.weights:
                return _hold(stored, adapted, rows, before)
        between = read_activation(module, compute)
        stored = attrs.evolve(stored, order=between.order)
        adapted, report = _adapt_for_runner(stored, between.activation, compute, top_k, options)
        found = Found(
            options=options,
            report=report,
            between=between,
            compute=compute,
            tensors=_kinds(stored),
            weights=type(adapted.weights).__qualname__,
            relaid=adapted.relaid,
            copied=adapted.copied,
        )
        return _hold(stored, adapted, rows, found)
    except UnsupportedError as error:
        raise UnsupportedError(f"{type(module).__qualname__}: {error}") from error


def _hold(stored: Stored, adapted: Adapted, rows: torch.dtype, found: Found) -> Held:
    report = found.report
    rows_class = DENSE_MODELS[report.problem.model].rows
    prepared_apart = report.runner not in (RunnerName.REFERENCE.value, RunnerName.TRITON.value)
    copies = _demand_versions(stored, copies=adapted.copied > 0 or prepared_apart)
    return Held(
        found=found,
        adapted=adapted,
        layer=build_layer(report, rows_class, adapted.weights, found.activation),
        make_rows=cast("Callable[[Tensor], DenseRows]", rows_class),
        localize=_localize(report),
        seen=tuple(see(name, tensor, copied=copies) for name, tensor in stored.tensors.items()),
        rows=None if stored.dtype is found.compute else rows,
        num_experts=stored.num_experts,
        with_grad=torch.is_grad_enabled(),
        copies=copies,
        differentiable=report.runner == RunnerName.REFERENCE.value,
    )


def _localize(report: PlanReport) -> Localize:
    if report.runner != RunnerName.TRITON.value:
        return local_ids
    from ...ops.local_ids import triton  # here, since Triton is not everywhere

    return triton.local_ids


def _demand_versions(stored: Stored, *, copies: bool) -> bool:
    if copies and any(tensor.is_inference() for tensor in stored.tensors.values()):
        raise UnsupportedError("the weights were made under torch.inference_mode(), so that their changes cannot be seen, and must be copied")
    return copies


def _adapt_for_runner(stored: Stored, activation: Activation, compute: torch.dtype, top_k: int, options: Options) -> tuple[Adapted, PlanReport]:
    """Return the weights as they are stored, or laid out anew where a runner other than the reference takes them so."""
    if stored.transposed and options.relay and options.runner is not RunnerRequest.REFERENCE and may_relay(stored):
        shapes = stored.need(stored.first).shape, stored.need(stored.second).shape
        if row_major := _plan_row_major(stored, activation, compute, shapes, top_k, options):
            return adapt(stored, row_major=True), row_major
    adapted = adapt(stored, row_major=False)
    weights = adapted.weights
    problem = _problem(weights.num_experts, weights.hidden, weights.inter, weights.format.name, activation, compute, top_k, options)
    return adapted, plan(problem, probe_environment(weights.w13.device))


def _plan_row_major(
    stored: Stored, activation: Activation, compute: torch.dtype, shapes: tuple[torch.Size, torch.Size], top_k: int, options: Options
) -> PlanReport | None:
    """Return the plan over row-major weights, None where they would be of no more use than as they are."""
    (experts, hidden, _), (_, inter, _) = shapes
    problem = _problem(experts, hidden, inter, _NAMES.get(stored.need(stored.first).dtype, ""), activation, compute, top_k, options)
    try:
        report = plan(problem, probe_environment(stored.need(stored.first).device))
    except PlanError:
        return None
    return None if report.runner == RunnerName.REFERENCE.value else report


def _problem(
    experts: int, hidden: int, inter: int, weights: str, activation: Activation, compute: torch.dtype, top_k: int, options: Options
) -> MoEProblem:
    return MoEProblem(
        num_experts=experts,
        top_k=min(top_k, experts),
        hidden=hidden,
        inter=inter,
        model=_NAMES[compute],
        weights=weights,
        activation=activation.name,
        rows=1,
        wire=options.wire,
        runner=options.runner,
    )
