import torch
from triton.experimental.gluon.language import NVMMASharedLayout

class TensorDescriptor:
    base: torch.Tensor
    def __init__(self, base: torch.Tensor, shape: list[int], strides: list[int], block_shape: list[int], layout: NVMMASharedLayout) -> None: ...
