"""A clock that shows work in place of time, and the record of what trees of a verifier have bounded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.bounds.relaxation import Relaxation
from verifiable_relu.bounds.zonotope import Zonotopes
from verifiable_relu.verifiers.bab.proof import Proofs

TICK = 1e-3
"""Seconds on the clock for each node that is bounded in a tree, and for each box."""


def digest(*values: object) -> str:
    """16 hexadecimal digits of SHA-256 over numbers, arrays, containers and dataclasses of them, bit for bit."""
    state = hashlib.sha256()
    for value in values:
        _update(state, value)
    return state.hexdigest()[:16]


def _update(state: Any, value: object) -> None:
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        state.update(repr((value.shape, value.dtype.kind)).encode())
        # −0 and 0 are the same number.
        state.update(np.ascontiguousarray(value.astype(np.float64) + 0.0).tobytes())
    elif isinstance(value, float):
        state.update(value.hex().encode())
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            _update(state, getattr(value, one.name))
    elif isinstance(value, dict):
        _update(state, list(value.items()))
    elif isinstance(value, list | tuple):
        state.update(f"[{len(value)}".encode())
        for one in value:
            _update(state, one)
    elif value is None or isinstance(value, str | int | bool | Fraction | bytes):
        state.update(repr(value).encode())
    else:
        raise TypeError(f"the ledger knows no digest of {type(value).__name__}")


@dataclass
class Meter:
    """What has been bounded meanwhile.

    Attributes:
        nodes: the nodes of trees and the boxes so far.
        seen: a digest of each batch of them, with its bounds.
        whole: the digest of the whole box.
    """

    nodes: int = 0
    seen: list[str] = field(default_factory=list)
    whole: str = ""

    def clock(self) -> float:
        """Seconds, by the work so far."""
        return TICK * self.nodes

    def boxes(self, lower: Tensor, upper: Tensor) -> None:
        """Count boxes, but for the whole box of the query, which is the first: how often it is bounded may change."""
        box = digest(lower, upper)
        self.whole = self.whole or box
        if box != self.whole:
            self.take(len(lower), (box,))

    def take(self, nodes: int, what: Sequence[object]) -> None:
        """Count nodes, and note what was found for them."""
        self.nodes += nodes
        self.seen.append(digest(*what)[:8])


@contextmanager
def metered() -> Iterator[Meter]:
    """The meter of what is bounded meanwhile."""
    meter, lower, relaxed, enclosed = Meter(), Proofs.lower, Relaxation.__init__, Zonotopes.__init__

    def of_trees(self: Proofs, split: Tensor, *rest: Any, **named: Any) -> Tensor:
        found = lower(self, split, *rest, **named)
        meter.take(len(split), (split, found))
        return found

    def of_relaxations(self: Relaxation, network: Any, box: Any, *rest: Any, **named: Any) -> None:
        meter.boxes(box.lower, box.upper)
        relaxed(self, network, box, *rest, **named)

    def of_zonotopes(self: Zonotopes, network: Any, box: Any, *rest: Any, **named: Any) -> None:
        enclosed(self, network, box, *rest, **named)
        meter.take(0, (box.lower, self.output.center, self.output.error))

    with ExitStack() as stack:
        stack.enter_context(patch.object(Proofs, "lower", of_trees))
        stack.enter_context(patch.object(Relaxation, "__init__", of_relaxations))
        stack.enter_context(patch.object(Zonotopes, "__init__", of_zonotopes))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield meter
        finally:
            torch.set_num_threads(threads)
