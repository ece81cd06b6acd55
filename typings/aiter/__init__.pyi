# ROCm/aiter of August 2026, with the parameter ``output`` that came after; `_versions` says what others lack. An import builds extensions and asks
# for the GPU, hence code may import it only where it runs it.
from .ops.enum import ActivationType as ActivationType
from .ops.enum import QuantType as QuantType
from .ops.quant import get_hip_quant as get_hip_quant
from .ops.quant import get_torch_quant as get_torch_quant
from .ops.quant import per_1x32_f4_quant as per_1x32_f4_quant
from .ops.quant import per_1x32_f4_quant_hip as per_1x32_f4_quant_hip
from .ops.quant import per_1x32_f8_scale_f8_quant as per_1x32_f8_scale_f8_quant
from .ops.quant import per_1x32_mx_quant_hip as per_1x32_mx_quant_hip
from .ops.quant import per_group_quant_hip as per_group_quant_hip
from .ops.quant import per_tensor_quant as per_tensor_quant
from .ops.quant import per_tensor_quant_hip as per_tensor_quant_hip
from .ops.quant import per_token_quant_hip as per_token_quant_hip
from .ops.quant import pertoken_quant as pertoken_quant
from .utility import dtypes as dtypes
