"""What the activation kernels are told: where gate and up lie, and one formula's parameters."""

from typing import Final, NamedTuple

GROUP: Final = 128  # channels of a row that share a scale, where the next product is fp8 block 128
E4M3_MAX: Final = 448.0  # the largest finite float8_e4m3fn


class Split(NamedTuple):
    """Say where column j of gate and of up lies in a joined row: at ``gate + step * j`` and at ``up + step * j``."""

    gate: int
    up: int
    step: int


class Gate(NamedTuple):
    """Parameters of g * sigmoid(alpha * g) * (u + shift), with g = min(gate, limit) and u = clamp(up, -limit, limit).

    silu(gate) * up is alpha 1, no limit (infinity), shift 0; gpt-oss' swiglu has shift 1.
    """

    alpha: float
    limit: float
    shift: float
