"""Where the Triton runner's plans for products come from, as far as a problem and an environment say it."""

from typing import Final

from ..ops.product_plans.files import LayerKey, Origin, Place, Source, existing_directory, find_layers, source_of
from ..runners import SiluAndMul, SwigluClamped, SwigluOai
from .problem import Environment, MoEProblem

_FORMATS: Final = {"bf16": "bf16", "fp16": "bf16", "fp8-block128": "fp8"}
_ACTIVATIONS: Final = (SiluAndMul.name, SwigluOai.name, SwigluClamped.name)  # see runners.triton.activations.is_gate


def tuned_format(weights: str) -> str | None:
    """Return the format by which a layer with such weights is looked up, None where plans are always made by rule."""
    return _FORMATS.get(weights)


def key_of(problem: MoEProblem, fmt: str) -> LayerKey:
    """Return what the layer of a problem is looked up by: this rank's experts, and the routes of a row that a backend hands over."""
    top_k = 1 if problem.backend.one_route_a_row else problem.top_k
    return LayerKey(fmt, problem.local_experts, top_k, problem.hidden, problem.inter)


def product_plans(problem: MoEProblem, environment: Environment) -> Source:
    """Return where the plans of a layer that the Triton runner runs come from. Raises: ValueError for a file of tuned plans that cannot be read."""
    fmt = tuned_format(problem.weights)
    if fmt is None or problem.activation not in _ACTIVATIONS:
        return Source(Origin.RULE, "", f"the kernels of {problem.weights} weights with the activation {problem.activation} have no measured plans")
    if environment.gfx:
        return Source(Origin.RULE, "", "plans are measured on NVIDIA GPUs alone")
    directory = existing_directory(environment.tuned) if environment.tuned else None
    place, key = Place(environment.device_name, environment.capability, directory), key_of(problem, fmt)
    others = find_layers(place, key.format, key.experts, key.hidden, key.inter)
    if problem.backend.one_route_a_row and others and key.top_k not in others:  # see runners.triton.in_place.plan_for
        _, (_, source) = min(others.items())
        return Source(Origin.RULE, "", f"the layer was measured with more routes a row alone ({source.file}), from where tiles are taken")
    return source_of(place, key)
