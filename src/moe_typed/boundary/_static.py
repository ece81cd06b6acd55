"""What a type checker sees of ``boundary``: attrs.frozen, whose plugin and dataclass transform it knows."""

from attrs import frozen as boundary

__all__ = ["boundary"]
