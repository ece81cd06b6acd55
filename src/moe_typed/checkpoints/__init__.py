"""Open a Hugging Face checkpoint directory and load one MoE layer of it into the typed core."""

from .assembly import Progress, ProgressCallback
from .checkpoint import Checkpoint, open_checkpoint
from .errors import CheckpointError
from .layer import LayerWeights, SharedExpert

__all__ = ["Checkpoint", "CheckpointError", "LayerWeights", "Progress", "ProgressCallback", "SharedExpert", "open_checkpoint"]
