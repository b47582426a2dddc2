"""Hooks: a public name of the library stands for something else while a test runs, so that faults can be seeded."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest.mock import patch

import verifiable_relu
from verifiable_relu.network.dispatch import Table
from verifiable_relu.network.nodes import Node


@cache
def modules() -> tuple[ModuleType, ...]:
    """All modules of the library, imported: one that is imported while a fault is in place would keep the fault.

    A module that imports an optional package that is not installed cannot be used, and is left out.
    """
    found = []
    for info in pkgutil.walk_packages(verifiable_relu.__path__, "verifiable_relu."):
        if not info.name.endswith("__main__"):
            try:
                found.append(import_module(info.name))
            except ModuleNotFoundError as error:
                if (error.name or "").startswith("verifiable_relu"):
                    raise
    return tuple(found)


@dataclass(frozen=True)
class Hook:
    """A public function, method, property or table row of the library, with something wrong in its place.

    A function is replaced in each module that has it by any name, a method or a property in its class.

    Attributes:
        path: ``module:function``, ``module:Class.method``, ``module:Class.property`` or ``module:TABLE``, the module
            below the package.
        wrong: what is called instead, with the right function and then the arguments.
        kind: of a table, the kinds of node whose rows are replaced; a row is a function then.
    """

    path: str
    wrong: Callable[..., Any]
    kind: type[Node] = Node

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The library with the wrong function."""
        module, _, qualified = self.path.partition(":")
        *owner, name = qualified.split(".")
        if any(part.startswith("_") for part in (*module.split("."), *owner, name)):
            raise ValueError(f"a hook replaces public names alone, and {self.path} is private")
        place: object = import_module(f"verifiable_relu.{module}")
        for part in owner:
            place = getattr(place, part)
        right = inspect.getattr_static(place, name)
        wrong = self._instead_of(right)
        places = [(place, name)] if owner else [(m, n) for m in modules() for n, v in vars(m).items() if v is right]
        with ExitStack() as stack:
            for place, name in places:
                stack.enter_context(patch.object(place, name, wrong))
            yield

    def _instead_of(self, right: Any) -> Any:
        """What replaces a function, a static method, a property or a table."""
        if isinstance(right, Table):
            return _Altered(right, self.kind, self.wrong)
        if isinstance(right, property):
            return property(_calling(self.wrong, right.fget))
        if isinstance(right, staticmethod):
            return staticmethod(_calling(self.wrong, right.__func__))
        assert inspect.isfunction(right), f"{self.path} is neither a function nor a property nor a table"
        return _calling(self.wrong, right)


def _calling(wrong: Callable[..., Any], right: Any) -> Callable[..., Any]:
    # A function, which becomes a method where it is an attribute of a class.
    def called(*args: Any, **kwargs: Any) -> Any:
        return wrong(right, *args, **kwargs)

    return called


class _Altered:
    """A table with other rows for some kinds of node."""

    def __init__(self, table: Table[Any], kind: type[Node], wrong: Callable[..., Any]) -> None:
        self._table, self._kind, self._wrong = table, kind, wrong

    def __getitem__(self, node: Node) -> Any:
        right = self._table[node]
        return _calling(self._wrong, right) if isinstance(node, self._kind) else right
