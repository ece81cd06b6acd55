from collections.abc import Sequence

class Type: ...

class Argument:
    name: str
    type: Type
    default: str | None

class Return:
    name: str | None
    type: Type

class Arguments:
    @property
    def flat_positional(self) -> Sequence[Argument]: ...
    @property
    def flat_kwarg_only(self) -> Sequence[Argument]: ...

class FunctionSchema:
    arguments: Arguments
    returns: tuple[Return, ...]

    @staticmethod
    def parse(func: str) -> FunctionSchema: ...
