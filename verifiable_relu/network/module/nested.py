"""Nested arguments of torch's functions and operators: tuples, lists and dicts of tensors and of anything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

Kind = TypeVar("Kind", bound=Tensor)


def harmless(result: Any) -> bool:
    """Whether what a function of a computed tensor returned is a tensor, or tells no more than shapes and kinds."""
    if isinstance(result, tuple | list):
        return all(map(harmless, result))
    kinds = (Tensor, int, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(NotImplemented))
    return result is None or isinstance(result, kinds)


def of_kind(arguments: Any, kind: type[Kind]) -> Iterator[Kind]:
    """The tensors of a kind in nested arguments."""
    if isinstance(arguments, kind):
        yield arguments
    elif isinstance(arguments, list | tuple):
        for each in arguments:
            yield from of_kind(each, kind)
    elif isinstance(arguments, dict):
        yield from of_kind(list(arguments.values()), kind)


def exchanged(arguments: Any, change: Callable[[Tensor], Any]) -> Any:
    """Nested arguments with each tensor changed."""
    if isinstance(arguments, Tensor):
        return change(arguments)
    if isinstance(arguments, list | tuple):
        return [exchanged(each, change) for each in arguments]
    if isinstance(arguments, dict):
        return {key: exchanged(value, change) for key, value in arguments.items()}
    return arguments


@cache
def schema(func: Any) -> tuple[tuple[str, ...], dict[str, Any], frozenset[str]]:
    """The names of an operator's arguments, their defaults, and which it writes to."""
    arguments = func._schema.arguments
    return (
        tuple(a.name for a in arguments),
        {a.name: a.default_value for a in arguments if a.has_default_value()},
        frozenset(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write),
    )
