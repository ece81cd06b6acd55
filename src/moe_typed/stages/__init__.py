"""The values that cross between stages: dispatch outputs, runner inputs and outputs, combine inputs, carries."""

from .base import Carry, CombineInput, DispatchOutput, RunnerInput, RunnerOutput
from .flat_rows import FlatRowsInput, SummedRowsOutput
from .standard import StandardCarry, StandardCombineInput, StandardDispatchOutput

__all__ = [
    "Carry",
    "CombineInput",
    "DispatchOutput",
    "FlatRowsInput",
    "RunnerInput",
    "RunnerOutput",
    "StandardCarry",
    "StandardCombineInput",
    "StandardDispatchOutput",
    "SummedRowsOutput",
]
