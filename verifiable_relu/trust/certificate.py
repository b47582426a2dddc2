"""Proofs of *unsat* as certificates hold them: plain data; ``docs/certificates.md`` says what it means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verifiable_relu.spec.property import Polytope


@dataclass(frozen=True, eq=False)
class OwnSlopes:
    """Slopes that prove one bound of one neuron."""

    neuron: int  # Its number in its activation.
    sign: int  # +1 for the lower bound, −1 for the upper one.
    slopes: np.ndarray  # (open neurons of all earlier activations,)


@dataclass(frozen=True, eq=False)
class Claim:
    """Bounds of the inputs of one activation."""

    lower: np.ndarray  # (size,)
    upper: np.ndarray  # (size,)
    slopes: np.ndarray  # (open neurons,) the slopes that later rows without slopes of their own use.
    own: Sequence[OwnSlopes] = ()
    # Of the maxima that end with this activation, the entries that bound them below and above: (size,) each, by their
    # numbers among each maximum's.
    maxima: tuple[np.ndarray, np.ndarray] | None = None
    # Of differences of two networks' activations the neurons whose second value is taken by itself; else None.
    alone: np.ndarray | None = None

    @property
    def open(self) -> np.ndarray:
        """The neurons that the bounds leave in two phases."""
        return np.flatnonzero((self.lower < 0) & (self.upper > 0))


@dataclass(frozen=True, eq=False)
class Plain:
    """Proof of a polytope that needs no split."""

    rows: np.ndarray  # (rows,) multipliers, not negative.
    slopes: np.ndarray  # (open neurons of all activations,)


@dataclass(frozen=True, eq=False)
class Leaf:
    """One leaf of a tree."""

    splits: np.ndarray  # (splits,) cuts of the tree.
    sides: np.ndarray  # (splits,) on which side of each cut the leaf is, +1 above and −1 below.
    neurons: np.ndarray  # (multipliers,) neurons of the tree.
    multipliers: np.ndarray  # (multipliers,)
    rows: np.ndarray  # (rows,) multipliers of the rows, not negative.


@dataclass(frozen=True, eq=False)
class Branches:
    """Leaves of one tree, and the cuts that lead to them.

    A cut is the number of a neuron of the tree, and the point where its interval is cut, or None for its kink at zero.
    Of the cuts of a neuron, those of a part come behind the one that makes the part.
    """

    cuts: Sequence[tuple[int, float | None]]
    leaves: Sequence[Leaf]


@dataclass(frozen=True, eq=False)
class Plane:
    """Upper bound of one neuron's value that is affine in inputs and in values of open neurons before it."""

    neuron: tuple[int, int]  # The number of its activation, and its number there.
    terms: np.ndarray  # (terms,) the variables that have a coefficient: inputs and, behind these, the open neurons.
    parts: np.ndarray  # (terms,) their coefficients, as parts of those of the neuron's pre-activation.
    bends: np.ndarray  # μ and ν, not negative: how far the plane leaves the activation on either side of zero.


@dataclass(frozen=True, eq=False)
class Tree:
    """Proof of a polytope that needs splits."""

    slopes: np.ndarray  # (open neurons of all activations,)
    neurons: Sequence[
        tuple[int, int]
    ]  # For each neuron of the tree the number of its activation, and its number there.
    chords: Sequence[int]  # Neurons of the tree that have their chord's multiplier at leaves that give them none.
    branches: Branches
    planes: Sequence[Plane] = ()


@dataclass(frozen=True, eq=False)
class Tighter:
    """Tighter bounds of neurons of one activation, each with a tree of its own; fields are those of ``Tree``."""

    activation: int
    rows: np.ndarray  # (bounds, 2) each bound's neuron and its side, +1 for a lower bound and −1 for an upper one.
    least: np.ndarray  # (bounds,) what side·z is at least.
    slopes: np.ndarray  # (open neurons of all activations before,)
    neurons: Sequence[tuple[int, int]]
    chords: Sequence[int]
    trees: Sequence[Branches]


@dataclass(frozen=True, eq=False)
class Excluded:
    """Polytope that is not reached: its rows as the proof counts them, the proof, and bounds made known before it."""

    rows: Polytope
    proof: Plain | Tree
    tighter: Sequence[Tighter] = ()


@dataclass(frozen=True, eq=False)
class Proof:
    """Proof that one query's whole box misses its unsafe set."""

    claims: Sequence[Claim]  # Of each activation, in the order of the network.
    excluded: Sequence[Excluded]  # All polytopes, in the order in which they are proven.

    @property
    def polytopes(self) -> list[Polytope]:
        return [each.rows for each in self.excluded]


@dataclass(frozen=True, eq=False)
class Cover:
    """Proof that one query misses its unsafe set, box by box.

    A box has what excludes the polytopes, in their order: for each of them the number of the row that the box's
    zonotope proves, or a proof.
    """

    polytopes: Sequence[Polytope]
    lower: np.ndarray  # (boxes, inputs) what halving the query's box, and the halves, leaves in the end.
    upper: np.ndarray
    proofs: Sequence[Sequence[int] | Proof]
