"""Events: what a search proves, told to an observer at the moment it is proven.

An event holds tensors of a batch: all that another proof of the same inequality needs. For any multipliers w_j of the
pre-activations z_j of unstable neurons, and any μ ≥ 0 of rows that are at most zero, the row bounded is at least the
least value of objective + Σ μ_i·row_i + Σ w_j·(z_j(e, q̃) − z_j) on a node (``proof``). Multipliers are hints: whoever
writes them may round them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from verifiable_relu.search.bab.relaxation import TreeRelaxation


@dataclass(frozen=True, eq=False)
class TreeBegun:
    """A tree is to exclude a polytope; of several trees of one polytope, one that is proven suffices.

    Attributes:
        relaxation: by which the tree's other events name it.
        polytope: its number, as ``RowBatch`` counts polytopes.
        order: (rows,) which row of the polytope each row of the relaxation is; the first is the objective.
        scale: (rows,) the factors of the rows.
    """

    relaxation: TreeRelaxation
    polytope: int
    order: Tensor
    scale: Tensor


@dataclass(frozen=True, eq=False)
class TreeEnded:
    """A tree has ended, or was given up; if it ``is_proved``, the nodes that were closed exclude its polytope."""

    relaxation: TreeRelaxation
    is_proved: bool


@dataclass(frozen=True, eq=False)
class NodesClosed:
    """Nodes of a tree that are proven.

    Attributes:
        relaxation: that of the tree: its system, slopes, rows, and the points at which segments were cut.
        objective: (nodes,) the row that is bounded.
        neurons: (k,) the neurons with segments or multipliers, by their numbers in the system.
        segment: (nodes, k) their segments; 0 and 1 are the whole interval.
        w: (nodes, k) the multipliers of their pre-activations; those of all other neurons are 0.
        v: (nodes, h) those of the values of the h of these neurons that have hull cuts (``TreeRelaxation.base``).
        mu: (nodes, rows behind the objectives) multipliers of rows.
        lower: (nodes,) what is proven of the objective, or of the largest row of its polytope.
    """

    relaxation: TreeRelaxation
    objective: Tensor
    neurons: Tensor
    segment: Tensor
    w: Tensor
    v: Tensor
    mu: Tensor
    lower: Tensor


@dataclass(frozen=True, eq=False)
class NeuronsSplit:
    """Nodes of a tree that were split, each on one neuron.

    Attributes:
        relaxation: that of the tree.
        neuron: (nodes,) by the numbers of the system.
        segment: (nodes,) the segments that were cut.
        point: (nodes,) where.
    """

    relaxation: TreeRelaxation
    neuron: Tensor
    segment: Tensor
    point: Tensor


@dataclass(frozen=True, eq=False)
class IntervalsTightened:
    """Intervals of pre-activations that trees have proven: the leaves were told of before.

    Attributes:
        op: the elementwise op that the pre-activations feed.
        numbers: (count,) its elements.
        lower, upper: (count,) the ends; infinite where nothing was gained.
        relaxation: of the trees: its first objectives are the pre-activations ``numbers``, then their negatives.
    """

    op: int
    numbers: Tensor
    lower: Tensor
    upper: Tensor
    relaxation: TreeRelaxation


Event = TreeBegun | TreeEnded | NodesClosed | NeuronsSplit | IntervalsTightened
Observer = Callable[[Event], None]
