"""Hooks: a function of the library does something wrong while a test runs, so that faults can be seeded."""

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
    """A function, method or property of the library, with something wrong in its place.

    A function is replaced in each module that has it by any name, a method or a property in its class.

    Attributes:
        path: ``module:function``, ``module:Class.method`` or ``module:Class.property``, the module below the package.
        wrong: what is called instead, with the right function and then the arguments.
        here: a function is replaced in this module alone, which may have imported it.
    """

    path: str
    wrong: Callable[..., Any]
    here: bool = False

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The library with the wrong function."""
        module, _, qualified = self.path.partition(":")
        *owner, name = qualified.split(".")
        place: object = import_module(f"verifiable_relu.{module}")
        for part in owner:
            place = getattr(place, part)
        right = inspect.getattr_static(place, name)
        alone = bool(owner) or self.here
        places = [(place, name)] if alone else [(m, n) for m in modules() for n, v in vars(m).items() if v is right]
        with ExitStack() as stack:
            for each, known_as in places:
                stack.enter_context(patch.object(each, known_as, self._instead_of(right)))
            yield

    def _instead_of(self, right: Any) -> Any:
        """What replaces a function, a static method or a property."""
        if isinstance(right, property):
            return property(_calling(self.wrong, right.fget))
        if isinstance(right, staticmethod):
            return staticmethod(_calling(self.wrong, right.__func__))
        assert callable(right), f"{self.path} is neither a function nor a property"
        return _calling(self.wrong, right)


def _calling(wrong: Callable[..., Any], right: Any) -> Callable[..., Any]:
    # A function, which becomes a method where it is an attribute of a class.
    def called(*args: Any, **kwargs: Any) -> Any:
        return wrong(right, *args, **kwargs)

    return called
