"""The same scales in another memory order. The data is the same tensor."""

from typing import Final, final

from torch import Tensor

from .. import e8m0
from ..payloads import (
    BLOCK_128,
    MX_GROUP,
    Fp8Block128ColumnRows,
    Fp8Block128PackedRows,
    Fp8Block128Rows,
    Fp8Block128SlabRows,
    MxFp8Rows,
    MxFp8SwizzledRows,
)
from .base import Conversion
from .ops import RelayoutOps


@final
class Relayouts:
    """Every change of order over one implementation."""

    def __init__(self, ops: RelayoutOps) -> None:
        def to_column(rows: Fp8Block128Rows, live: Tensor | None = None) -> Fp8Block128ColumnRows:
            return Fp8Block128ColumnRows(rows.data, ops.to_column_major(rows.scale, live))

        def to_row(rows: Fp8Block128ColumnRows, live: Tensor | None = None) -> Fp8Block128Rows:
            return Fp8Block128Rows(rows.data, ops.to_row_major(rows.scale, live))

        def slab_to_row(rows: Fp8Block128SlabRows, _live: Tensor | None = None) -> Fp8Block128Rows:
            return Fp8Block128Rows(rows.data, rows.row_scale)

        def pack(rows: Fp8Block128Rows, live: Tensor | None = None) -> Fp8Block128PackedRows:
            _require_powers_of_two(rows.scale, live)
            return Fp8Block128PackedRows(rows.data, ops.pack_ue8m0(rows.scale, live))

        def unpack(rows: Fp8Block128PackedRows, live: Tensor | None = None) -> Fp8Block128Rows:
            scale = ops.unpack_ue8m0(rows.scale, rows.hidden // BLOCK_128, live)
            return Fp8Block128Rows(rows.data, e8m0.decode(scale))

        def swizzle(rows: MxFp8Rows, live: Tensor | None = None) -> MxFp8SwizzledRows:
            return MxFp8SwizzledRows(rows.data, ops.swizzle(rows.scale, live))

        def unswizzle(rows: MxFp8SwizzledRows, live: Tensor | None = None) -> MxFp8Rows:
            return MxFp8Rows(rows.data, ops.unswizzle(rows.scale, rows.rows, rows.hidden // MX_GROUP, live))

        self.to_column: Final = Conversion("scales_to_column_major", (Fp8Block128Rows,), Fp8Block128ColumnRows, to_column)
        self.to_row: Final = Conversion("scales_to_row_major", (Fp8Block128ColumnRows,), Fp8Block128Rows, to_row)
        self.slab_to_row: Final = Conversion("slab_scales_to_row_major", (Fp8Block128SlabRows,), Fp8Block128Rows, slab_to_row)
        self.pack: Final = Conversion("pack_scales", (Fp8Block128Rows,), Fp8Block128PackedRows, pack)
        self.unpack: Final = Conversion("unpack_scales", (Fp8Block128PackedRows,), Fp8Block128Rows, unpack)
        self.swizzle: Final = Conversion("swizzle_scales", (MxFp8Rows,), MxFp8SwizzledRows, swizzle)
        self.unswizzle: Final = Conversion("unswizzle_scales", (MxFp8SwizzledRows,), MxFp8Rows, unswizzle)


def _require_powers_of_two(scale: Tensor, live: Tensor | None) -> None:
    """Raise ValueError for a scale that e8m0 cannot hold. Reads the scales, hence waits for their device: for once, and not for every forward."""
    counted = scale if live is None else scale[: int(live.item())]
    if not bool(e8m0.is_power_of_two(counted).all()):
        raise ValueError(
            "pack_scales takes float32 scales that are powers of two, and these are not: the data would have to be quantised again. "
            "upscale_bf16 and then quantize_fp8_block128_packed does that"
        )
