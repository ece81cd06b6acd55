"""Weights prepared for the Ascend runner. Each class names the rows that it takes, and makes its chain of the components that fit."""

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Final, final

from typing_extensions import override

from ....boundary import Rename, boundary
from ....formats import Bf16Rows, Fp16Rows, Int4TokenRows, Int8TokenRows, MxFp4PairRows, MxFp8PairRows
from ....stages import TensorParallel
from ...activations import Activation, SiluAndMul
from ...base import PreparedWeights
from ...widths import Widths
from ..activations import half_activation, int8_activation, refuse_activation
from ..components.activation import AllGatheredActivation
from ..components.hidden_states_quant import DynamicInt4Quant, DynamicInt8Quant, DynamicMxFp4Quant, DynamicMxFp8Quant
from ..components.matmul import DenseMatmul, GroupedMatmul, W4A4Matmul, W4A8Matmul, W4A16Matmul, W8A8Matmul
from ..components.matmul_mx import MxFp4A8Matmul, MxFp4Matmul, MxFp8Matmul
from ..components.rows import HalfRows
from ..library import AscendLibrary
from ..projections import Chain, FusedMxSwiglu, PlainProjection, ProductThenActivation, QuantisedProjection
from ..runner import AscendRunner, AscendSlicedRunner, Experts
from .layout import MXFP4_WIDTHS, MXFP8_WIDTHS, W4A4_WIDTHS, W4A8_WIDTHS, W4A16_WIDTHS
from .operands import (
    Bf16Operand,
    Fp16Operand,
    MxFp4Operand,
    MxFp8Operand,
    Operand,
    W4A4Operand,
    W4A8Operand,
    W4A16Operand,
    W8A8Fp16Operand,
    W8A8Operand,
)

# Both operands have the same names for sizes that differ: what one reduces over is what the other makes.
_UP: Final = Rename({"inner": "hidden", "outer": "joined", "groups": "hidden_groups", "pairs": "hidden_pairs"})
_DOWN: Final = Rename({"inner": "inter", "outer": "hidden", "groups": "inter_groups", "pairs": "inter_pairs"})
_SLICED: Final = Rename({"inner": "inter", "outer": "columns"})


def experts_of(chain: Chain[HalfRows], up: Operand, down: Operand) -> Experts:
    """Return a chain with what is asked of its weights."""
    return Experts(chain, up, down.sizes[2], down.gives)


class HalfWeights(ABC):
    """The base of weights whose products take rows of half precision."""

    library: AscendLibrary

    @abstractmethod
    def products(self) -> tuple[GroupedMatmul[HalfRows], GroupedMatmul[HalfRows]]:
        """Return both products."""

    def runner(self, activation: Activation) -> AscendRunner:
        """Return the runner over these weights. Raises: UnsupportedError for an activation that there is no component for."""
        up, down = self.products()
        first = ProductThenActivation(PlainProjection(up), half_activation(self.library, activation))
        return AscendRunner(experts_of(first.then(PlainProjection(down)), up.operand, down.operand))


class Int8RowsWeights(ABC):
    """The base of weights whose products take int8 rows."""

    library: AscendLibrary

    @abstractmethod
    def products(self) -> tuple[GroupedMatmul[Int8TokenRows], GroupedMatmul[Int8TokenRows]]:
        """Return both products."""

    def runner(self, activation: Activation) -> AscendRunner:
        """Return the runner over these weights. Raises: as ``HalfWeights.runner``."""
        up, down = self.products()
        quant = DynamicInt8Quant(self.library.ops)
        first = ProductThenActivation(QuantisedProjection(quant, up), int8_activation(self.library, activation))
        return AscendRunner(experts_of(first.then(QuantisedProjection(quant, down)), up.operand, down.operand))


@final
@boundary
class AscendBf16Weights(HalfWeights, PreparedWeights[AscendRunner, Bf16Rows]):
    """Bf16 weights."""

    library: AscendLibrary
    up: Annotated[Bf16Operand, _UP]
    down: Annotated[Bf16Operand, _DOWN]

    @override
    def products(self) -> tuple[GroupedMatmul[HalfRows], GroupedMatmul[HalfRows]]:
        return DenseMatmul(self.library.ops, self.up), DenseMatmul(self.library.ops, self.down)


@final
@boundary
class AscendFp16Weights(HalfWeights, PreparedWeights[AscendRunner, Fp16Rows]):
    """Fp16 weights."""

    library: AscendLibrary
    up: Annotated[Fp16Operand, _UP]
    down: Annotated[Fp16Operand, _DOWN]

    @override
    def products(self) -> tuple[GroupedMatmul[HalfRows], GroupedMatmul[HalfRows]]:
        return DenseMatmul(self.library.ops, self.up), DenseMatmul(self.library.ops, self.down)


@final
@boundary
class AscendW8A8Weights(Int8RowsWeights, PreparedWeights[AscendRunner, Bf16Rows | Int8TokenRows]):
    """Int8 weights for int8 rows of a bf16 model: scales in bf16."""

    library: AscendLibrary
    up: Annotated[W8A8Operand, _UP]
    down: Annotated[W8A8Operand, _DOWN]

    @override
    def products(self) -> tuple[GroupedMatmul[Int8TokenRows], GroupedMatmul[Int8TokenRows]]:
        return W8A8Matmul(self.library.ops, self.up), W8A8Matmul(self.library.ops, self.down)


@final
@boundary
class AscendW8A8Fp16Weights(Int8RowsWeights, PreparedWeights[AscendRunner, Fp16Rows | Int8TokenRows]):
    """Int8 weights for int8 rows of an fp16 model: scales in float32."""

    library: AscendLibrary
    up: Annotated[W8A8Fp16Operand, _UP]
    down: Annotated[W8A8Fp16Operand, _DOWN]

    @override
    def products(self) -> tuple[GroupedMatmul[Int8TokenRows], GroupedMatmul[Int8TokenRows]]:
        return W8A8Matmul(self.library.ops, self.up), W8A8Matmul(self.library.ops, self.down)


@final
@boundary
class AscendW4A8Weights(Int8RowsWeights, PreparedWeights[AscendRunner, Bf16Rows | Fp16Rows | Int8TokenRows]):
    """Int4 weights for int8 rows. Their products write over the int8 rows that they are given."""

    widths: ClassVar[Widths] = W4A8_WIDTHS
    library: AscendLibrary
    up: Annotated[W4A8Operand, _UP]
    down: Annotated[W4A8Operand, _DOWN]

    @override
    def products(self) -> tuple[GroupedMatmul[Int8TokenRows], GroupedMatmul[Int8TokenRows]]:
        return W4A8Matmul(self.library.ops, self.up), W4A8Matmul(self.library.ops, self.down)


@final
@boundary
class AscendW4A4Weights(PreparedWeights[AscendRunner, Bf16Rows | Fp16Rows | Int4TokenRows]):
    """Int4 weights for int4 rows."""

    widths: ClassVar[Widths] = W4A4_WIDTHS
    library: AscendLibrary
    up: Annotated[W4A4Operand, _UP]
    down: Annotated[W4A4Operand, _DOWN]

    @override
    def runner(self, activation: Activation) -> AscendRunner:
        ops = self.library.ops
        quant = DynamicInt4Quant(ops)
        first = ProductThenActivation(QuantisedProjection(quant, W4A4Matmul(ops, self.up)), half_activation(self.library, activation))
        return AscendRunner(experts_of(first.then(QuantisedProjection(quant, W4A4Matmul(ops, self.down))), self.up, self.down))


@final
@boundary
class AscendW4A16Weights(HalfWeights, PreparedWeights[AscendRunner, Bf16Rows]):
    """Int4 weights in groups, for bf16 rows."""

    widths: ClassVar[Widths] = W4A16_WIDTHS
    library: AscendLibrary
    up: Annotated[W4A16Operand, _UP]
    down: Annotated[W4A16Operand, _DOWN]

    @override
    def products(self) -> tuple[GroupedMatmul[HalfRows], GroupedMatmul[HalfRows]]:
        return W4A16Matmul(self.library.ops, self.up), W4A16Matmul(self.library.ops, self.down)


@final
@boundary
class AscendW4A16Fp16Weights(HalfWeights, PreparedWeights[AscendRunner, Fp16Rows]):
    """Int4 weights in groups, for fp16 rows."""

    widths: ClassVar[Widths] = W4A16_WIDTHS
    library: AscendLibrary
    up: Annotated[W4A16Operand, _UP]
    down: Annotated[W4A16Operand, _DOWN]

    @override
    def products(self) -> tuple[GroupedMatmul[HalfRows], GroupedMatmul[HalfRows]]:
        return W4A16Matmul(self.library.ops, self.up), W4A16Matmul(self.library.ops, self.down)


@final
@boundary
class AscendMxFp8Weights(PreparedWeights[AscendRunner, Bf16Rows | Fp16Rows | MxFp8PairRows]):
    """Mxfp8 weights (Ascend 950): the first product activates and quantises, silu(gate) * up alone."""

    widths: ClassVar[Widths] = MXFP8_WIDTHS
    library: AscendLibrary
    up: Annotated[MxFp8Operand, _UP]
    down: Annotated[MxFp8Operand, _DOWN]

    @override
    def runner(self, activation: Activation) -> AscendRunner:
        if not isinstance(activation, SiluAndMul):
            raise refuse_activation(activation)
        ops = self.library.ops
        first = FusedMxSwiglu(ops, DynamicMxFp8Quant(ops), self.up)
        return AscendRunner(experts_of(first.then(PlainProjection(MxFp8Matmul(ops, self.down))), self.up, self.down))


@final
@boundary
class AscendMxFp4A8Weights(PreparedWeights[AscendRunner, Bf16Rows | Fp16Rows | MxFp8PairRows]):
    """Mxfp4 weights for mxfp8 rows (Ascend 950)."""

    widths: ClassVar[Widths] = MXFP4_WIDTHS
    library: AscendLibrary
    up: Annotated[MxFp4Operand, _UP]
    down: Annotated[MxFp4Operand, _DOWN]

    @override
    def runner(self, activation: Activation) -> AscendRunner:
        ops = self.library.ops
        quant = DynamicMxFp8Quant(ops)
        first = ProductThenActivation(QuantisedProjection(quant, MxFp4A8Matmul(ops, self.up)), half_activation(self.library, activation))
        return AscendRunner(experts_of(first.then(QuantisedProjection(quant, MxFp4A8Matmul(ops, self.down))), self.up, self.down))


@final
@boundary
class AscendMxFp4A4Weights(PreparedWeights[AscendRunner, Bf16Rows | Fp16Rows | MxFp4PairRows]):
    """Mxfp4 weights for mxfp4 rows (Ascend 950)."""

    widths: ClassVar[Widths] = MXFP4_WIDTHS
    library: AscendLibrary
    up: Annotated[MxFp4Operand, _UP]
    down: Annotated[MxFp4Operand, _DOWN]

    @override
    def runner(self, activation: Activation) -> AscendRunner:
        ops = self.library.ops
        quant = DynamicMxFp4Quant(ops)
        first = ProductThenActivation(QuantisedProjection(quant, MxFp4Matmul(ops, self.up)), half_activation(self.library, activation))
        return AscendRunner(experts_of(first.then(QuantisedProjection(quant, MxFp4Matmul(ops, self.down))), self.up, self.down))


@final
@boundary
class AscendGgufWeights(PreparedWeights[AscendSlicedRunner, Bf16Rows]):
    """Dequantised GGUF weights of one of ``ranks``: the second product has this rank's columns, of activations gathered over all."""

    library: AscendLibrary
    up: Annotated[Bf16Operand, _UP]
    down: Annotated[Bf16Operand, _SLICED]
    ranks: TensorParallel

    @override
    def runner(self, activation: Activation) -> AscendSlicedRunner:
        ops, library = self.library.ops, self.library
        gathered = AllGatheredActivation(half_activation(library, activation), self.ranks)
        first = ProductThenActivation(PlainProjection(DenseMatmul(ops, self.up)), gathered)
        return AscendSlicedRunner(experts_of(first.then(PlainProjection(DenseMatmul(ops, self.down))), self.up, self.down), self.ranks)
