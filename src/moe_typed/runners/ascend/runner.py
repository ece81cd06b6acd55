"""The Ascend runner: first product, activation, second product. Sorting and finishing are the dispatcher's."""

from typing import Annotated, ClassVar, Never, cast, final

import attrs
import torch
from torch import Tensor
from typing_extensions import override

from ...boundary import Dim, Rename, boundary, value_error
from ...formats import Payload
from ...stages import AscendRowsInput, AscendSlicedRowsInput, LiveRowsOutput, RunnerInput, SlicedRowsOutput, TensorParallel
from ..base import Runner, UnsupportedError
from .components.rows import HalfRows, half_class
from .projections import Chain
from .weights.operands import Operand


@final
@boundary
class AscendRowsMeetWeights:
    """Where sorted rows and weights meet: with debug on, both have one hidden width, one number of experts, one device."""

    weights: Annotated[Operand, Rename({"inner": "hidden", "outer": "joined", "groups": "hidden_groups", "pairs": "hidden_pairs"})]
    runner_input: AscendRowsInput | AscendSlicedRowsInput
    reduced: Annotated[int, Dim("hidden")]
    hidden: Annotated[int, Dim("hidden")]


@final
@attrs.frozen(eq=False)
class Experts:
    """A chain, the weights of its first product, how many columns come out, and the classes of rows that their products can make."""

    chain: Chain[Never]
    up: Operand
    outer: int
    gives: tuple[type[HalfRows], ...]

    def run(self, runner_input: AscendRowsInput | AscendSlicedRowsInput) -> Tensor:
        """Return one result a row. No rows call no operator.

        Raises: BoundaryError, at every debug level, for rows of another width or for another number of experts than the weights have: the operators
        would read what lies beside them.
        """
        payload, groups, out_dtype = runner_input.payload, runner_input.groups, runner_input.out_dtype
        half_class(out_dtype)
        experts, hidden, _ = self.up.sizes
        met = AscendRowsMeetWeights(self.up, runner_input, hidden, payload.hidden)
        if (payload.hidden, groups.num_groups) != (hidden, experts):
            rows = f"has rows of {payload.hidden} columns for {groups.num_groups} experts"
            raise value_error(met, "runner_input", f"{rows}; the weights are of {experts} experts with {hidden} columns")
        if not payload.rows:
            return torch.empty((0, self.outer), dtype=out_dtype, device=payload.data.device)
        # The payload's class was in the accept-set of the prepared weights when the layer was built; the chain refuses others again.
        return self.chain.run(cast("Never", payload), groups, out_dtype).data


@final
@attrs.frozen(eq=False)
class AscendRunner(Runner[AscendRowsInput, LiveRowsOutput]):
    """Run experts whose results are whole rows: of one rank, or its summands where experts are cut along their width."""

    name: ClassVar[str] = "ascend"
    inputs: ClassVar[tuple[type[RunnerInput], ...]] = (AscendRowsInput,)
    experts: Experts

    @override
    def run(self, runner_input: AscendRowsInput, /) -> LiveRowsOutput:
        return LiveRowsOutput(self.experts.run(runner_input))


@final
@attrs.frozen(eq=False)
class AscendSlicedRunner(Runner[AscendSlicedRowsInput, SlicedRowsOutput]):
    """Run experts whose second product is cut along its columns: activations are gathered over ``ranks``, results are this rank's columns."""

    name: ClassVar[str] = "ascend-sliced"
    inputs: ClassVar[tuple[type[RunnerInput], ...]] = (AscendSlicedRowsInput,)
    experts: Experts
    ranks: TensorParallel

    @override
    def run(self, runner_input: AscendSlicedRowsInput, /) -> SlicedRowsOutput:
        return SlicedRowsOutput(self.experts.run(runner_input), self.ranks)


def require_results(runner: object, rows: type[Payload]) -> None:
    """Raise UnsupportedError for an Ascend runner whose weights cannot give a model's rows. Other runners give any."""
    if isinstance(runner, AscendRunner | AscendSlicedRunner) and rows not in runner.experts.gives:
        given = " or ".join(cls.__qualname__ for cls in runner.experts.gives)
        raise UnsupportedError(
            f"the dispatcher is for {rows.__qualname__} of the model, and these weights give {given}: "
            "prepare them for the model's dtype (prepare_ascend for bf16, prepare_ascend_fp16 for fp16)"
        )
