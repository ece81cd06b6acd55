from .moe import ExpertsInterface

class FP8ExpertsInterface(ExpertsInterface): ...

ALL_FP8_EXPERTS_FUNCTIONS: FP8ExpertsInterface
