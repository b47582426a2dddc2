"""A seeded fault: what is wrong, and the hooks by which the library gets it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.hooks import Hook


@dataclass(frozen=True)
class Fault:
    """A mistake that someone could make in the library.

    Attributes:
        name: what is wrong.
        best: the kind of test that sees it.
        hooks: what is replaced: the mistake, and what gives the occasion for it where it needs one.
    """

    name: str
    best: str
    hooks: tuple[Hook, ...]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The library with the fault in it."""
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook.applied())
            yield


def instead(path: str, wrong: Callable[..., Any], here: bool = False) -> tuple[Hook, ...]:
    """The hooks of a fault that has one."""
    return (Hook(path, wrong, here=here),)
