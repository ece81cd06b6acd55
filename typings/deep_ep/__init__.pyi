# deep_ep 2.1.0.
from ._C import Config as Config
from ._C import topk_idx_t as topk_idx_t
from .buffers.elastic import ElasticBuffer as ElasticBuffer
from .buffers.elastic import EPHandle as EPHandle
from .buffers.legacy import Buffer as Buffer
from .utils.envs import get_logical_domain_size as get_logical_domain_size
from .utils.envs import get_physical_domain_size as get_physical_domain_size
from .utils.event import EventHandle as EventHandle
from .utils.event import EventOverlap as EventOverlap

__version__: str
