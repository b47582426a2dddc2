"""Numbers of ops in a search, and of the activations of the file as the checker counts them.

A search works on a network that was flattened, merged and rewritten; a certificate counts the activations of the file.
Both networks are evaluated at the same few points: an activation is an op whose inputs and values are the same there,
neuron by neuron, in any order. Whatever this finds are hints: a wrong number makes a certificate that is refused, never
a false claim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.spatial import KDTree

from verifiable_relu.check.bounds import State
from verifiable_relu.check.graph import AffineNode, DifferenceNode, Graph, MaximumNode
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir import network as ir

_POINTS = 3

_NEAR = 1e-4
"""Values that differ by less than this part of the largest one are those of one neuron: what runs may round weights."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Place:
    """An activation of the certificate: its number, and for each of its neurons the number in the op."""

    number: int
    neurons: Array
    is_same: bool

    def positions(self, neurons: Array) -> tuple[Array, Array]:
        """Return the certificate's numbers of some of the op's neurons, and which of them each is."""
        if self.is_same:
            return neurons, np.arange(len(neurons))
        at = np.full(int(max(self.neurons.max(initial=0), neurons.max(initial=0))) + 1, -1)
        at[neurons] = np.arange(len(neurons))
        found = at[self.neurons]
        chosen = np.flatnonzero(found >= 0)
        return chosen, found[chosen]


class Numbering:
    """The activations that the ops of one network are.

    Args:
        graph: the file as the checker reads it.
        network: the network of a search.
        low, high: (inputs,) of a box in which both are evaluated.
        has_tournaments: whether activations have the numbers of the graph in which maxima are tournaments.

    Attributes:
        has_tournaments: as above, or because the network is without maxima, and the file is not.
        differences: by an activation of a second network the one that is its difference from the first one's.
    """

    def __init__(self, graph: Graph, network: ir.Network, has_tournaments: bool, low: Array, high: Array) -> None:
        rng = np.random.default_rng(0)
        middle, radius = (low + high) / 2, np.maximum((high - low) / 2, 1e-3 * (1 + np.abs(low)))
        x = middle + radius * rng.uniform(-1, 1, (_POINTS, len(low)))
        with torch.no_grad():
            values = [v.double().numpy() for v in network.limit.values(torch.from_numpy(x))]
        ops = {i: op for i, op in enumerate(network.ops) if isinstance(op, ir.Elementwise | ir.Maximum)}
        plays = not any(isinstance(op, ir.Maximum) for op in ops.values())
        self.has_tournaments = has_tournaments or (plays and any(isinstance(node, MaximumNode) for node in graph.nodes))
        graph = graph.tournaments[0] if self.has_tournaments else graph
        mine = {i: _columns(op, values[op.inputs[0]], values[i]) for i, op in ops.items()}
        theirs = _evaluated(graph, x)
        places = {n: at for at, n in enumerate(graph.activations)}
        nodes: Any = graph.nodes
        kinds = {n: isinstance(nodes[n], MaximumNode) for n in graph.activations}
        self.differences = {
            places[at]: places[change]
            for node in nodes
            if isinstance(node, DifferenceNode)
            for _, at, change in (node.sources,)
            if at in places and not kinds[at]
        }
        self._places: dict[int, Place] = {}
        left = [n for n in graph.activations if places[n] not in self.differences.values()]
        for i, op in ops.items():
            for number in left:
                if kinds[number] != isinstance(op, ir.Maximum):
                    continue
                z, r = theirs[nodes[number].source], theirs[number]
                found = _matched(mine[i], _columns(op, z, r))
                if found is not None:
                    same = found.shape == mine[i][0].shape and bool((found == np.arange(len(found))).all())
                    self._places[i] = Place(places[number], found, same)
                    left.remove(number)
                    break
        self._network = network

    def __getitem__(self, op: int) -> Place:
        """Return the activation that an op is.

        Raises:
            UnsupportedError: if it is none that a certificate counts.
        """
        if op not in self._places:
            raise UnsupportedError(f"certificates do not know {self._network.ops[op].place}")
        return self._places[op]


def _columns(op: ir.Op, z: Array, r: Array) -> Array:
    """Return numbers that tell neurons apart, (numbers, neurons); those of a maximum are its inputs."""
    return np.concatenate([z, r]) if isinstance(op, ir.Elementwise) else z


def _matched(mine: Array, theirs: Array) -> Array | None:
    """Return for each column of ``theirs`` the column of ``mine`` that is the same; None if there is none."""
    near = _NEAR * (1e-6 + np.abs(theirs).max(initial=0))
    if len(mine) != len(theirs) or not mine.size:
        return None
    if mine.shape == theirs.shape and np.abs(mine - theirs).max() <= near:
        return np.arange(mine.shape[1])
    distance, found = KDTree(mine.T).query(theirs.T, p=np.inf, distance_upper_bound=2 * near)
    return np.asarray(found) if bool((distance <= near).all()) else None


def _evaluated(graph: Graph, x: Array) -> dict[int, Array]:
    """Return the values (points, size) of a graph's nodes, those of ReLU for a family, by intervals that are points."""
    state = State(graph, {0: (x, x)})
    for number in graph.order[1:]:
        low, high = state.interval(number)
        value = (low + high) / 2 if isinstance(graph.nodes[number], AffineNode) else high
        state.ends[number] = value, value
    return {number: value for number, (value, _) in state.ends.items()}
