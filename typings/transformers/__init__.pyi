from torch import nn

class PreTrainedConfig:
    num_experts_per_tok: int
    _experts_implementation: str | None

class PreTrainedModel(nn.Module):
    config: PreTrainedConfig
    def set_experts_implementation(self, experts_implementation: str | dict[str, str]) -> None: ...

__version__: str
