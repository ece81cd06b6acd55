"""Describe a value without reading it: a tensor's numbers are never printed, for that would sync its device."""

import re
import types
from collections.abc import Collection
from typing import Annotated, TypeVar, Union, cast, get_args, get_origin

import torch

_LONGEST = 120


def describe(value: object) -> str:
    """Return dtype, shape, stride and device of a tensor; the short repr of anything else."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}{list(value.shape)} stride={value.stride()} {value.device}"
    if isinstance(value, type):
        return value.__qualname__
    kind = type(value).__name__
    if isinstance(value, (list, tuple, set, frozenset, dict)):  # their reprs would print the tensors in them
        items = cast("Collection[object]", value.items() if isinstance(value, dict) else value)
        text = f"{kind}({', '.join(map(describe, items))})"
    else:
        text = " ".join(repr(value).split())  # in one line
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


_MODULES = re.compile(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_])")


def describe_annotation(annotation: object) -> str:
    """Return an annotation as its author wrote it: without module names, a type variable by its bound."""
    if annotation is type(None):
        return "None"
    if isinstance(annotation, TypeVar):
        return describe_annotation(annotation.__bound__) if annotation.__bound__ is not None else "object"
    if get_origin(annotation) in (Union, types.UnionType):
        return " | ".join(describe_annotation(member) for member in get_args(annotation))
    if get_origin(annotation) is type:
        return f"type[{describe_annotation(get_args(annotation)[0])}]"
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        return f"{describe_annotation(inner)} with {', '.join(map(str, metadata))}"
    return _MODULES.sub("", annotation.__qualname__ if isinstance(annotation, type) else str(annotation)).replace("+", "").replace("~", "")
