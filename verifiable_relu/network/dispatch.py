"""What each kind of node means to one consumer: one table per consumer, one row per kind.

A consumer (interval bounds, exact evaluation, the ONNX writer, …) keeps a module-level ``Table`` whose rows are
functions or small objects, and looks a node up in it instead of asking what kind it is:

    IMAGES: Table[Callable[[Any, Bounds], Bounds]] = Table(
        "interval arithmetic",
        {
            Linear: _linear,
            Activation: _activation,
            Hardened: Refusal("interval arithmetic takes one network, not a set of them"),
        },
    )

    image = IMAGES[node](node, bounds)

A new kind of node needs a row, or a ``Refusal``, in every table of whose ``group`` it is:
``tests/unit/test_dispatch.py`` imports the whole package, finds the tables among the modules' attributes and names each
that has neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.nodes import Node

Row = TypeVar("Row")


@dataclass(frozen=True)
class Refusal:
    """A row that says why a consumer does not take a kind of node; ``reason`` is the error's message."""

    reason: str


class Table(Generic[Row]):
    """The rows of one consumer by kind of node.

    The row of a concrete kind, one that has an ``op``, serves this kind alone: a kind derived from it may compute
    something else. The row of a group of kinds (``Affine``, ``Activation``, ``Node``) serves each kind of the group
    that has no row of its own; of several such groups the narrowest counts.

    Args:
        consumer: who asks, as the subject of an error message: "exact evaluation".
        rows: what each kind, or group of kinds, means to the consumer.
        group: the consumer asks about nodes of this group alone: ``Activation`` if it asks about activations.
    """

    def __init__(self, consumer: str, rows: Mapping[type[Node], Row | Refusal], group: type[Node] = Node) -> None:
        self.consumer = consumer
        self.group = group
        self._rows = dict(rows)
        self._found: dict[type[Node], Row | Refusal | None] = {}

    def __getitem__(self, node: Node) -> Row:
        """The row for a node.

        Raises:
            UnsupportedError: if the consumer refuses the kind of node, or has no row for it; names the node.
        """
        row = self.find(type(node))
        if row is None:
            raise UnsupportedError(f"{self.consumer} does not know this kind of node", place=node.place)
        if isinstance(row, Refusal):
            raise UnsupportedError(row.reason, place=node.place)
        return row

    def __contains__(self, node: Node) -> bool:
        """Whether there is a row for the node, and no refusal."""
        row = self.find(type(node))
        return row is not None and not isinstance(row, Refusal)

    def find(self, kind: type[Node]) -> Row | Refusal | None:
        """The row or the refusal for a kind of node; None if the consumer says nothing of it."""
        if kind not in self._found:
            kinds = (base for base in kind.__mro__ if base is kind or not _is_concrete(base))
            self._found[kind] = next((self._rows[base] for base in kinds if base in self._rows), None)
        return self._found[kind]


def _is_concrete(kind: type) -> bool:
    """Whether a class is a kind of node, not a group of kinds."""
    return "op" in vars(kind)
