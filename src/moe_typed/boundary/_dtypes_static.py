"""What a type checker sees for the dtype names that jaxtyping does not have."""

# ruff: noqa: N814  an alias is what jaxtyping does, and all that checkers follow
from typing import Annotated as E8M0
from typing import Annotated as Float4e2m1x2
from typing import Annotated as Floating

__all__ = ["E8M0", "Float4e2m1x2", "Floating"]
