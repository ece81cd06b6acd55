# nixl 1.5.1.
import torch

from .buffer import Buffer as Buffer
from .nixl_ep_cpp import Config as Config
from .utils import EventOverlap as EventOverlap

topk_idx_t: torch.dtype  # chosen when it was built: int32 unless asked otherwise
