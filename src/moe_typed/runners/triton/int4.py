"""Int4 weights as the Triton kernels read them: one layout for the orders of all checkpoints. Importing this does not import Triton."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Final, TypeAlias, final

import torch
from jaxtyping import BFloat16, UInt8
from torch import Tensor
from typing_extensions import override

from ...boundary import Dim, Floating, Layout, Rename, boundary
from ...formats import AnyDenseRows, AwqExpertWeights, CompressedInt4ExpertWeights, Format, GateUpOrder, GptqExpertWeights
from ...formats.spec import ScaleOrder, ScaleRounding, ScaleSpec
from ...ops.quantised_product.spec import Matrix
from ...stages import FlatRowsInput, SegmentRowsInput, SlabRowsInput
from ..activations import Activation
from ..base import PreparedWeights

if TYPE_CHECKING:
    from .general import TritonGeneralRunner

Int4Checkpoint: TypeAlias = AwqExpertWeights[GateUpOrder] | GptqExpertWeights[GateUpOrder] | CompressedInt4ExpertWeights[GateUpOrder]

_ROW_MAJOR: Final = Layout(contiguous=True)
_GROUPED: Final = ScaleSpec(torch.float16, (1, 128), ScaleOrder.ROW_MAJOR, ScaleRounding.TO_DTYPE)  # the group is the object's own


@final
@boundary
class TritonInt4Weights(PreparedWeights["TritonGeneralRunner", AnyDenseRows]):
    """Int4 weights for the Triton runner, two codes a byte along the reduction, the first in the low half (W4A16).

    value = (code - zero) * scale; without zeros the zero is 8. Scales and zeros lie by groups, then rows: a kernel reads those of neighbouring rows
    at once.
    """

    format: ClassVar[Format] = Format("int4-triton", torch.uint8, _GROUPED, per_element=2)
    w13: Annotated[UInt8[Tensor, "experts 4*inter_bytes hidden//2"], _ROW_MAJOR]
    w2: Annotated[UInt8[Tensor, "experts hidden inter_bytes"], _ROW_MAJOR]
    w13_scale: Annotated[Floating[Tensor, "experts hidden//group 4*inter_bytes"], _ROW_MAJOR]
    w2_scale: Annotated[Floating[Tensor, "experts 2*inter_bytes//group hidden"], _ROW_MAJOR]
    order: type[GateUpOrder]
    group: Annotated[int, Dim("group")]
    w13_zero: Annotated[UInt8[Tensor, "experts hidden//group 4*inter_bytes"], _ROW_MAJOR] | None = None
    w2_zero: Annotated[UInt8[Tensor, "experts 2*inter_bytes//group hidden"], _ROW_MAJOR] | None = None
    b13: Annotated[BFloat16[Tensor, "experts 4*inter_bytes"], _ROW_MAJOR] | None = None
    b2: Annotated[BFloat16[Tensor, "experts hidden"], _ROW_MAJOR] | None = None

    @property
    def inter(self) -> int:
        """Return the width of one expert."""
        return 2 * self.w2.shape[2]

    @property
    def up(self) -> Matrix:
        """Return the first projection."""
        return Matrix(self.w13, self.w13_scale.transpose(1, 2), None if self.w13_zero is None else self.w13_zero.transpose(1, 2), self.b13)

    @property
    def down(self) -> Matrix:
        """Return the second projection."""
        return Matrix(self.w2, self.w2_scale.transpose(1, 2), None if self.w2_zero is None else self.w2_zero.transpose(1, 2), self.b2)

    @override
    def runner(self, activation: Activation) -> "TritonGeneralRunner":
        from .general import make_general_runner

        return make_general_runner(self, self.up, self.down, activation, self.accepts())


@final
@boundary
class FlatRowsMeetInt4Weights:
    """Where flat rows and prepared int4 weights meet: with debug on, both have one hidden width, one number of experts, one device."""

    weights: TritonInt4Weights
    runner_input: FlatRowsInput


@final
@boundary
class ExpertRowsMeetInt4Weights:
    """Where rows that lie by expert and prepared int4 weights meet: with debug on, as for flat rows."""

    weights: TritonInt4Weights
    runner_input: Annotated[SlabRowsInput | SegmentRowsInput, Rename({"local_experts": "experts"})]


def pack_int4(weights: Int4Checkpoint) -> TritonInt4Weights:
    """Return the weights of a checkpoint in the kernels' layout: bytes as large again, an expert at a time."""
    b13, b2 = (None if bias is None else bias.contiguous() for bias in (weights.b13, weights.b2))
    if isinstance(weights, CompressedInt4ExpertWeights):
        # Its words hold eight codes along the reduction, ascending: in little-endian memory, the bytes that the kernels read.
        s13, s2 = (scale.transpose(1, 2).contiguous() for scale in (weights.w13_scale, weights.w2_scale))
        return TritonInt4Weights(
            weights.w13.view(torch.uint8), weights.w2.view(torch.uint8), s13, s2, weights.order, weights.group, None, None, b13, b2
        )
    experts = range(weights.num_experts)
    w13 = torch.empty(weights.num_experts, 2 * weights.inter, weights.hidden // 2, dtype=torch.uint8, device=weights.w13.device)
    w2 = torch.empty(weights.num_experts, weights.hidden, weights.inter // 2, dtype=torch.uint8, device=weights.w2.device)
    zeros13: list[Tensor] = []
    zeros2: list[Tensor] = []
    for expert in experts:
        for packed, zeros, (codes, zero) in ((w13, zeros13, weights.codes_w13(expert)), (w2, zeros2, weights.codes_w2(expert))):
            pairs = codes.T.to(torch.uint8)
            packed[expert] = pairs[:, 0::2] | pairs[:, 1::2] << 4
            if zero is not None:
                zeros.append(zero.to(torch.uint8))
    zero13, zero2 = (torch.stack(zeros) if zeros else None for zeros in (zeros13, zeros2))
    return TritonInt4Weights(w13, w2, weights.w13_scale, weights.w2_scale, weights.order, weights.group, zero13, zero2, b13, b2)
