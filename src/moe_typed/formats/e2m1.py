"""The e2m1 codec: four bits a value, two values a byte, the low nibble first (OCP Microscaling Formats v1.0, section 5.3.3).

The low three bits of a nibble count through 0, 0.5, 1, 1.5, 2, 3, 4, 6; the fourth is the sign. There is no infinity and no NaN.
"""

import torch
from torch import Tensor

MAX = 6.0
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode(packed: Tensor) -> Tensor:
    """Return the values of float4_e2m1fn_x2 (..., n) as float32 (..., 2 * n)."""
    codes = packed.view(torch.uint8)
    nibbles = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.float32, device=packed.device)
    return table[nibbles.to(torch.int32)]
