# torch_npu 2.14. An import registers the operators of torch.ops.npu and the device "npu", and needs CANN; code imports it where it runs it.
from torch import Tensor

from . import npu as npu

__version__: str

# Numbers of dtypes that torch does not have.
int4: int
hifloat8: int
float8_e5m2: int
float8_e4m3fn: int
float8_e8m0fnu: int
float4_e2m1fn_x2: int
float4_e1m2fn_x2: int

def get_npu_format(self: Tensor) -> int: ...
