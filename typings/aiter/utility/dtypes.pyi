import torch

fp8: torch.dtype  # float8_e4m3fnuz, float8_e4m3fn or uint8: by the GPU
fp8_e8m0: torch.dtype
fp4x2: torch.dtype
i4x2: torch.dtype
fp16: torch.dtype
bf16: torch.dtype
fp32: torch.dtype
u8: torch.dtype
u32: torch.dtype
u64: torch.dtype
i8: torch.dtype
i16: torch.dtype
i32: torch.dtype
i64: torch.dtype
d_dtypes: dict[str, torch.dtype]

def get_dtype_fp8() -> torch.dtype: ...
