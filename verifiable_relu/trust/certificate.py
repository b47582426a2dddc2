"""What proves *unsat*, as certificates hold it: plain data; ``docs/certificates.md`` says what it means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verifiable_relu.spec.property import Polytope


@dataclass(frozen=True, eq=False)
class OwnSlopes:
    """What proves one bound of one neuron.

    Attributes:
        neuron: its number in its activation.
        sign: +1 for the lower bound, −1 for the upper one.
        slopes: (open neurons of all earlier activations,).
    """

    neuron: int
    sign: int
    slopes: np.ndarray


@dataclass(frozen=True, eq=False)
class Claim:
    """Bounds of the inputs of one activation.

    Attributes:
        lower: (size,).
        upper: (size,).
        slopes: (open neurons,) the slopes that later rows without slopes of their own use.
        own: neurons' own slopes.
        maxima: of the maxima that end with this activation, the entries that bound them below and above: (size,) each,
            by their numbers among each maximum's.
        alone: of differences of two networks' activations the neurons whose second value is taken by itself; None of
            other activations.
    """

    lower: np.ndarray
    upper: np.ndarray
    slopes: np.ndarray
    own: Sequence[OwnSlopes] = ()
    maxima: tuple[np.ndarray, np.ndarray] | None = None
    alone: np.ndarray | None = None

    @property
    def open(self) -> np.ndarray:
        """The neurons that the bounds leave in two phases."""
        return np.flatnonzero((self.lower < 0) & (self.upper > 0))


@dataclass(frozen=True, eq=False)
class Plain:
    """A polytope that needs no split.

    Attributes:
        rows: (rows,) multipliers, not negative.
        slopes: (open neurons of all activations,).
    """

    rows: np.ndarray
    slopes: np.ndarray


@dataclass(frozen=True, eq=False)
class Leaf:
    """One leaf of a tree.

    Attributes:
        splits: (splits,) cuts of the tree.
        sides: (splits,) on which side of each cut the leaf is, +1 above and −1 below.
        neurons: (multipliers,) neurons of the tree.
        multipliers: (multipliers,).
        rows: (rows,) multipliers of the rows, not negative.
    """

    splits: np.ndarray
    sides: np.ndarray
    neurons: np.ndarray
    multipliers: np.ndarray
    rows: np.ndarray


@dataclass(frozen=True, eq=False)
class Branches:
    """The leaves of one tree, and the cuts that lead to them.

    Attributes:
        cuts: for each the number of a neuron of the tree, and the point where its interval is cut, or None for its
            kink at zero. Of the cuts of a neuron, those of a part come behind the one that makes the part.
        leaves: all leaves.
    """

    cuts: Sequence[tuple[int, float | None]]
    leaves: Sequence[Leaf]


@dataclass(frozen=True, eq=False)
class Plane:
    """An upper bound of one neuron's value that is affine in inputs and in values of open neurons before it.

    Attributes:
        neuron: the number of its activation, and its number there.
        terms: (terms,) the variables that have a coefficient: inputs and, behind these, the open neurons.
        parts: (terms,) their coefficients, as parts of those of the neuron's pre-activation.
        bends: μ and ν, not negative: how far the plane leaves the activation on either side of zero.
    """

    neuron: tuple[int, int]
    terms: np.ndarray
    parts: np.ndarray
    bends: np.ndarray


@dataclass(frozen=True, eq=False)
class Tree:
    """A polytope that needs splits.

    Attributes:
        slopes: (open neurons of all activations,).
        neurons: for each neuron of the tree the number of its activation, and its number there.
        chords: the neurons of the tree that have their chord's multiplier at leaves that give them none.
        branches: the tree itself.
        planes: over some neurons.
    """

    slopes: np.ndarray
    neurons: Sequence[tuple[int, int]]
    chords: Sequence[int]
    branches: Branches
    planes: Sequence[Plane] = ()


@dataclass(frozen=True, eq=False)
class Tighter:
    """Tighter bounds of neurons of one activation, each with a tree of its own.

    Attributes:
        activation: its number.
        rows: (bounds, 2) each bound's neuron and its side, +1 for a lower bound and −1 for an upper one.
        least: (bounds,) what side·z is at least.
        slopes: (open neurons of all activations before,).
        neurons, chords: of all trees, as in ``Tree``.
        trees: each bound's tree.
    """

    activation: int
    rows: np.ndarray
    least: np.ndarray
    slopes: np.ndarray
    neurons: Sequence[tuple[int, int]]
    chords: Sequence[int]
    trees: Sequence[Branches]


@dataclass(frozen=True, eq=False)
class Excluded:
    """One polytope, and what excludes it.

    Attributes:
        rows: in the order that the proof counts them.
        proof: with the bounds that are known by then.
        tighter: bounds that are made known before.
    """

    rows: Polytope
    proof: Plain | Tree
    tighter: Sequence[Tighter] = ()


@dataclass(frozen=True, eq=False)
class Proof:
    """What excludes the unsafe set of one query over its whole box.

    Attributes:
        claims: of each activation, in the order of the network.
        excluded: all polytopes, in the order in which they are proven.
    """

    claims: Sequence[Claim]
    excluded: Sequence[Excluded]

    @property
    def polytopes(self) -> list[Polytope]:
        return [each.rows for each in self.excluded]


@dataclass(frozen=True, eq=False)
class Cover:
    """What excludes the unsafe set of one query, box by box.

    Attributes:
        polytopes: the rows of each.
        lower, upper: (boxes, inputs) what halving the query's box, and the halves, leaves in the end.
        proofs: for each box what excludes the polytopes, in their order: for each of them the number of the row that
            the box's zonotope proves, or a proof.
    """

    polytopes: Sequence[Polytope]
    lower: np.ndarray
    upper: np.ndarray
    proofs: Sequence[Sequence[int] | Proof]
