"""The five components of an MoE layer on the Ascend NPU. Each is an abstract base and its implementations, with one signature and one return type.

A component says in its type which rows it takes and which it makes; none knows another. A layer is put together by those types:

* ``InitRouting``: rows of tokens become rows of routes, sorted by expert, with an index of where each went.
* ``HiddenStatesQuant``: rows become rows in the format that a product takes.
* ``GroupedMatmul``: rows times the matrix of their expert.
* ``Activation``: joined gate and up columns become rows for the second product.
* ``FinalizeRouting``: rows of routes become rows of tokens again.
"""

from .activation import (
    AllGatheredActivation,
    AscendActivation,
    ClippedSwiglu,
    ClippedSwigluQuant,
    GeluAndMulHalves,
    JoinedRows,
    SortedSwiglu,
    SortedSwigluOai,
    SortedSwigluOaiQuant,
    SortedSwigluQuant,
    StepSwiglu,
    Swiglu,
    SwigluQuant,
)
from .finalize_routing import AllGatheredFinalize, FinalizeKMajor, FinalizeRouting, FinalizeRowMajor, FinalizeSparse, Unpermute
from .hidden_states_quant import (
    DynamicInt4Quant,
    DynamicInt8Quant,
    DynamicMxFp4Quant,
    DynamicMxFp8Quant,
    HiddenStatesQuant,
    NoQuant,
    PairScales,
)
from .init_routing import (
    InitRouting,
    InitRoutingQuant,
    InitRoutingV1,
    InitRoutingV2,
    InitRoutingV2Int8,
    InitRoutingV2MxFp8,
    InitRoutingV2On310P,
    RangeInitRouting,
    RoutedRows,
)
from .matmul import DenseMatmul, GroupedMatmul, W4A4Matmul, W4A8Matmul, W4A16Matmul, W8A8Matmul
from .matmul_mx import MxFp4A8Matmul, MxFp4Matmul, MxFp8Matmul

__all__ = [
    "AllGatheredActivation",
    "AllGatheredFinalize",
    "AscendActivation",
    "ClippedSwiglu",
    "ClippedSwigluQuant",
    "DenseMatmul",
    "DynamicInt4Quant",
    "DynamicInt8Quant",
    "DynamicMxFp4Quant",
    "DynamicMxFp8Quant",
    "FinalizeKMajor",
    "FinalizeRouting",
    "FinalizeRowMajor",
    "FinalizeSparse",
    "GeluAndMulHalves",
    "GroupedMatmul",
    "HiddenStatesQuant",
    "InitRouting",
    "InitRoutingQuant",
    "InitRoutingV1",
    "InitRoutingV2",
    "InitRoutingV2Int8",
    "InitRoutingV2MxFp8",
    "InitRoutingV2On310P",
    "JoinedRows",
    "MxFp4A8Matmul",
    "MxFp4Matmul",
    "MxFp8Matmul",
    "NoQuant",
    "PairScales",
    "RangeInitRouting",
    "RoutedRows",
    "SortedSwiglu",
    "SortedSwigluOai",
    "SortedSwigluOaiQuant",
    "SortedSwigluQuant",
    "StepSwiglu",
    "Swiglu",
    "SwigluQuant",
    "Unpermute",
    "W4A4Matmul",
    "W4A8Matmul",
    "W4A16Matmul",
    "W8A8Matmul",
]
