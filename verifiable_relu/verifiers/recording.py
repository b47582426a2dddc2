"""Recording what proves bounds while they are computed, for certificates (``trust.certificate``).

A certificate's bounds are checked with other arithmetic than they are computed with, and in it every bound rests on
those before it. So each layer's bounds are made a little looser, and their numbers short, before the next layer is
bounded with them; and slopes that were searched for are rounded before the bounds that are kept are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.bounds import Ascent, Bounds, Relaxation, ascend, crown_relaxation, input_box
from verifiable_relu.bounds.crown import Search, signed
from verifiable_relu.bounds.tuning import Lines
from verifiable_relu.bounds.zonotope import Zonotopes
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Kinked
from verifiable_relu.rounding import CLEAR, LEAST_STEP, SEEN, below
from verifiable_relu.spec.property import Property, Query
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.trust.certificate import Claim, Cover, Excluded, OwnSlopes, Plain, Proof, Tighter, Tree
from verifiable_relu.verifiers.boxes import RowBounds

BITS = 8
"""Slopes that are searched for are multiples of 2 to the power of minus this."""

_LOOSE, _LOOSE_SMOOTH = 36, 28
"""Bounds are loosened by 2 to the power of minus this of their layer's scale; the second, of networks with curves.

The checker encloses curves by itself.
"""

_GRID = 2.0**40
"""Slopes of lines beside curves are multiples of one by this: the remainders that go with them are the checker's."""

EVERY_NEURON = 1 << 30
"""Symbols of a zonotope in which every unstable neuron has one of its own, as whoever checks it gives them."""

_CHUNK = 1 << 26
"""Most slopes of rows that are bounded at once."""


def uncertified(network: Network) -> str:
    """The name of a node of a network that certificates do not know; empty if they know all."""
    if network.paired:
        return "networks beside each other"
    return next((getattr(node, "function", node.op) for node in network.uncertified), "")


def proved_beside(query: Query, ascent: Ascent) -> Proof | None:
    """What CROWN proves about two networks beside each other (``network.product``), without any split.

    None where that is nothing. The activations beside each other are ``network.product.rectified``.
    """
    network = query.network
    recorder = Recorder.of(network)
    with torch.no_grad():
        box = input_box([query.property], network)
        relaxation = crown_relaxation(network.to(torch.float64), box, coarse=recorder.coarse)
        return recorder.proof(relaxation, 0, query.property, {}, ascent)


@dataclass(eq=False)
class _Found:
    """Rows that were bounded with their own slopes: (rows,) each, the slopes by activation (rows, neurons)."""

    sample: Tensor
    neuron: Tensor
    sign: Tensor
    lower: Tensor
    slopes: dict[int, Tensor]


class Recorder:
    """What proves the bounds of one relaxation, recorded while ``crown_relaxation`` makes it.

    ``search`` and ``coarse`` are to be given to it.

    Args:
        smooth: whether some activations are curves.
    """

    def __init__(self, smooth: bool = False) -> None:
        self._loose = _LOOSE_SMOOTH if smooth else _LOOSE
        self._largest = 0.0
        self._pending: list[_Found] = []
        self._own: dict[int, list[_Found]] = {}

    @staticmethod
    def of(network: Network) -> Recorder:
        """The recorder for relaxations of a network."""
        return Recorder(not network.piecewise_linear)

    def search(
        self, ascent: Ascent, *, memory: int, stop: Callable[[], bool] | None = None, bits: int = BITS
    ) -> Search:
        """``bounds.neurons`` with slopes that are rounded before the bound is computed, and kept."""

        def search(relaxation: Relaxation, index: int, neuron: Tensor, sign: Tensor, sample: Tensor) -> Tensor:
            target, rows, constant = signed(relaxation.network, index, neuron, sign)
            found = ascend(
                relaxation, target, rows, sample, ascent, constant=constant, keep=True, memory=memory, stop=stop
            )
            if found.slopes is None:
                return found.lower
            lower, slopes = _rounded(relaxation, target, rows, sample, constant, found.slopes, bits)
            self._pending.append(_Found(sample, neuron, sign, lower, slopes))
            return lower

        return search

    def coarse(self, index: int, bounds: Bounds) -> Bounds:
        """Bounds a little looser, of few digits; own slopes that prove less than other means do are dropped."""
        low, high = bounds.lower.flatten(1), bounds.upper.flatten(1)
        kept = []
        for found in self._pending:
            side = torch.where(found.sign > 0, low[found.sample, found.neuron], -high[found.sample, found.neuron])
            chosen = (found.lower >= side).nonzero().squeeze(1)
            slopes = {i: part[chosen] for i, part in found.slopes.items()}
            parts = (found.sample[chosen], found.neuron[chosen], found.sign[chosen], found.lower[chosen])
            kept.append(_Found(*parts, slopes))
        self._pending, self._own[index] = [], kept
        width = (high - low).amax(1, keepdim=True)
        largest = torch.maximum(low.abs(), high.abs()).amax(1, keepdim=True)
        # Where large terms cancel, the checker's error is that of the terms: they are about as large as earlier layers.
        self._largest = max(self._largest, *largest[largest.isfinite()].tolist())
        size = torch.maximum(2.0**-self._loose * width, SEEN * largest).clamp(min=SEEN**2 * self._largest)
        step = torch.exp2(torch.floor(torch.log2(size))).clamp(min=LEAST_STEP)
        below, above = (torch.floor(low / step) - 1) * step, (torch.ceil(high / step) + 1) * step
        # No neuron becomes unstable, and a single point stays one.
        below = torch.where((low >= 0) & (below < 0), 0.0, torch.where(width != 0, below, low))
        above = torch.where((high <= 0) & (above > 0), 0.0, torch.where(width != 0, above, high))
        return Bounds(below.reshape(bounds.lower.shape), above.reshape(bounds.upper.shape))

    def _claims(self, relaxation: Relaxation, sample: int) -> list[Claim]:
        """The bounds of all activations' inputs over one box, with what proves them."""
        claims: list[Claim] = []
        opened: dict[int, np.ndarray] = {}
        ends = {
            max(i for i in relaxation.network.activations if i < at): _entries(relaxation, at, sample)
            for at in relaxation.network.maxima
        }
        for index in _certified(relaxation.network):
            bounds = relaxation.pre[index]
            low, high = (end[sample].flatten().numpy() for end in (bounds.lower, bounds.upper))
            own = []
            for found in self._own.get(index, []):
                for at in (found.sample == sample).nonzero().squeeze(1).tolist():
                    parts = [np.zeros(0)]
                    for earlier, chosen in opened.items():
                        given = found.slopes.get(earlier)
                        parts.append(np.zeros(len(chosen)) if given is None else given[at].numpy()[chosen])
                    own.append(OwnSlopes(int(found.neuron[at]), int(found.sign[at]), np.concatenate(parts)))
            shared, alone = _slopes(relaxation, index, sample), None
            if index in relaxation.network.differences:
                alone = np.flatnonzero(relaxation.backward.shifted.aside(index, False).alone[sample].numpy())
            opened[index] = _open(relaxation, index, sample)
            claims.append(Claim(low, high, shared[opened[index]], own, ends.get(index), alone))
        return claims

    def proof(
        self,
        relaxation: Relaxation,
        sample: int,
        prop: Property,
        trees: Mapping[int, tuple[list[int], Tree, Sequence[Tighter]]],
        ascent: Ascent | None = None,
    ) -> Proof | None:
        """What excludes the unsafe set of a query; None if that cannot be put into a certificate.

        Args:
            relaxation: that was recorded.
            sample: the query's box in it.
            prop: the query's property.
            trees: by polytope the order of its rows, its tree, and tighter bounds that it needs; in the order in which
                they were proven.
            ascent: the search for slopes for other polytopes that the lines of all rows do not exclude.
        """
        rows = RowBatch.from_properties([prop], relaxation.network.output_size)
        counts = torch.bincount(rows.polytope, minlength=len(rows.owner)).tolist()
        # Coefficients that float64 does not hold are split into several rows.
        if counts != [len(polytope) for polytope in prop.unsafe]:
            return None
        excluded = []
        for number, polytope in enumerate(prop.unsafe):
            if number not in trees:
                found = self._plain(relaxation, sample, rows, number, ascent)
                if found is None:
                    return None
                order, plain = found
                excluded.append(Excluded(tuple(polytope[i] for i in order), plain))
        for number, (order, tree, tighter) in trees.items():
            excluded.append(Excluded(tuple(prop.unsafe[number][i] for i in order), tree, tighter))
        return Proof(self._claims(relaxation, sample), excluded)

    def shared(self, relaxation: Relaxation, sample: int, prop: Property, rows: Sequence[int]) -> Proof:
        """Return the proof of a query by the lines that all rows share, and one positive row of each polytope.

        The arguments are those of ``proof``; ``rows`` are the numbers of these rows in their polytopes.
        """
        slopes, excluded = self._chosen(relaxation, sample), []
        for polytope, row in zip(prop.unsafe, rows, strict=True):
            excluded.append(Excluded(polytope, Plain(np.eye(len(polytope))[row], slopes)))
        return Proof(self._claims(relaxation, sample), excluded)

    def _plain(
        self, relaxation: Relaxation, sample: int, rows: RowBatch, polytope: int, ascent: Ascent | None = None
    ) -> tuple[list[int], Plain] | None:
        """Return what excludes a polytope without splits: the row that counts, by number in it, and the proof.

        The lines that all rows share are tried, then those below zero, then intervals, then slopes that are searched
        for; None if all of these fail.
        """
        members = (rows.polytope == polytope).nonzero().squeeze(1)
        for values, slopes in self._attempts(relaxation, sample, rows, members, ascent):
            values = values - rows.bound[members]
            best = int(values.argmax())
            if values[best] > 0:
                return [best], Plain(np.ones(1), slopes(best))
        return None

    def _attempts(
        self, relaxation: Relaxation, sample: int, rows: RowBatch, members: Tensor, ascent: Ascent | None
    ) -> Iterator[tuple[Tensor, Callable[[int], np.ndarray]]]:
        """Yield lower bounds of some rows, and the slopes that prove the bound of one of these."""
        network, last = relaxation.network, len(relaxation.network.nodes) - 1
        matrix, where = rows.matrix[members].reshape(-1, *network.output_shape), torch.full((len(members),), sample)

        def of_rows(parts: Mapping[int, Tensor]) -> Callable[[int], np.ndarray]:
            return lambda row: self._chosen(relaxation, sample, {i: part[row] for i, part in parts.items()})

        yield relaxation.lower(last, matrix, where)[0], of_rows({})
        shapes = {index: (len(members), *network.nodes[index].shape) for index in network.activations}
        flat = {index: torch.zeros(shape, dtype=torch.float64) for index, shape in shapes.items()}
        lines = {index: relaxation.lines.chosen(index, where, part) for index, part in flat.items()}
        opened = {index: kinked(relaxation, index, line).flatten(1) for index, line in lines.items()}
        yield relaxation.lower(last, matrix, where, lines=lines)[0], of_rows(opened)
        if not isinstance(network.nodes[network.last_activation], Kinked):
            # Intervals are lines of slope 0 beside the last curves; in lines before them nothing is put.
            values = relaxation.outputs(rows.matrix[members], where, intervals=True)
            yield values, lambda row: np.zeros_like(self._chosen(relaxation, sample))
        found = None if ascent is None else ascend(relaxation, last, matrix, where, ascent, keep=True)
        if found is not None and found.slopes is not None:
            for bits in (BITS, 3 * BITS):
                values, slopes = _rounded(relaxation, last, matrix, where, None, found.slopes, bits)
                yield values, of_rows(slopes)

    @staticmethod
    def _chosen(relaxation: Relaxation, sample: int, parts: Mapping[int, Tensor] | None = None) -> np.ndarray:
        """Return the slopes of the open neurons of all activations, of those of all neurons, by default the shared."""
        found = [np.zeros(0)]
        for index in _certified(relaxation.network):
            given = None if parts is None else parts.get(index)
            mine = _slopes(relaxation, index, sample) if given is None else given.flatten().numpy()
            found.append(mine[_open(relaxation, index, sample)])
        return np.concatenate(found)


class CoverRecorder:
    """Bounds boxes in the way in which a certificate is checked, and keeps what proves each of them.

    Args:
        network: of the queries, as its file has it.
        queries: of the search, by number.
        most: layers with more unstable neurons in a box are not bounded by CROWN there.
        memory: bytes for coefficients.

    Attributes:
        proven: for each query the boxes that are proven, with the row of each polytope that is positive, or a proof.
    """

    def __init__(self, network: Network, queries: Sequence[Query], most: int, memory: int) -> None:
        self._network, self._queries, self._max_unstable, self._memory = network, queries, most, memory
        self.proven: list[list[tuple[Tensor, Tensor, list[int] | Proof]]] = [[] for _ in queries]

    def bound(
        self, box: Bounds, rows: RowBatch, owner: Tensor, by_zonotopes: bool, stop: Callable[[], bool]
    ) -> RowBounds:
        """Bound rows over boxes (batch, *input_shape) of the queries ``owner``, and record those that are proven."""
        recorder, relaxation = Recorder.of(self._network), None
        if by_zonotopes:
            forms = Zonotopes(self._network, box, EVERY_NEURON, stop, mirrored=False)
            values, lines = forms.lower(rows.matrix, rows.sample)
            middle = (rows.matrix.abs() * forms.output.center.flatten(1)[rows.sample].abs()).sum(1)
            values = below(values - rows.bound - CLEAR * (rows.bound.abs() + values.abs() + middle))
            found = RowBounds.of_zonotopes(rows, values, lines, forms, box)
        else:
            options: dict[str, Any] = {"coarse": recorder.coarse, "memory": self._memory, "stop": stop}
            relaxation = crown_relaxation(self._network, box, max_unstable=self._max_unstable, **options)
            matrix = rows.matrix.reshape(-1, *self._network.output_shape)
            values, pulled = relaxation.lower(len(self._network.nodes) - 1, matrix, rows.sample, coefficients=True)
            assert pulled is not None
            values = below(values - rows.bound)
            found = RowBounds.of_lines(rows, values, relaxation.of_input(pulled), {})
        for number in (rows.margins(values) > 0).nonzero().squeeze(1).tolist():
            prop, polytopes = self._queries[int(owner[number])].property, (rows.owner == number).nonzero().squeeze(1)
            best = [int(values[rows.polytope == i].argmax()) for i in polytopes.tolist()]
            if relaxation is not None and len(prop.unsafe) != len(polytopes):
                continue
            proof = best if relaxation is None else recorder.shared(relaxation, number, prop, best)
            ends = box.lower[number].flatten().clone(), box.upper[number].flatten().clone()
            self.proven[int(owner[number])].append((*ends, proof))
        return found

    def proof(self, local: int) -> Cover | None:
        """The proof of a query all of whose boxes are proven; None if a certificate cannot hold it."""
        prop = self._queries[local].property
        rows = RowBatch.from_properties([prop], self._network.output_size)
        counts: list[int] = torch.bincount(rows.polytope, minlength=len(rows.owner)).tolist()
        # Coefficients that float64 does not hold are split into several rows.
        if counts != [len(polytope) for polytope in prop.unsafe]:
            return None
        lower, upper, proofs = zip(*self.proven[local], strict=True)
        low, high = (torch.stack(part).cpu().numpy() for part in (lower, upper))
        return Cover(prop.unsafe, low, high, proofs)


def _certified(network: Network) -> list[int]:
    """The activations, and their differences, that a certificate has bounds of, in its order."""
    return sorted({*network.activations, *network.differences})


def _slopes(relaxation: Relaxation, index: int, sample: int) -> np.ndarray:
    """The slopes that a certificate tells of the lines that all rows share, of an activation or a difference."""
    if index in relaxation.network.differences:
        aside = relaxation.backward.shifted.aside(index, False)
        both = torch.cat([aside.low[sample], aside.high[sample]]).double()
        return ((both * _GRID).round() / _GRID).numpy()
    return kinked(relaxation, index, relaxation.lines.of(index))[sample].flatten().numpy()


def _entries(relaxation: Relaxation, index: int, sample: int) -> tuple[np.ndarray, np.ndarray]:
    """The candidates that bound the maxima of a node below and above, by their numbers among each maximum's."""
    node, between = relaxation.network.maxima[index], relaxation.backward.shifted.between(index, False)
    low, high = ((node.candidates == part[sample]).int().argmax(0).numpy() for part in (between.low, between.high))
    return low, high


def _open(relaxation: Relaxation, index: int, sample: int) -> np.ndarray:
    """Which of the slopes that ``kinked`` tells are those of open neurons."""
    node, bounds = relaxation.network.nodes[index], relaxation.pre[index]
    if not isinstance(node, Kinked):
        return np.arange(2 * node.size)
    low, high = (end[sample].flatten().numpy() for end in (bounds.lower, bounds.upper))
    return np.flatnonzero((low < 0) & (high > 0))


def kinked(relaxation: Relaxation, index: int, lines: Lines) -> Tensor:
    """The slopes that a certificate tells of the lines of an activation, (batch, …).

    Of a neuron with a kink that of the line through the kink: the lower line of a convex activation, the upper one of
    a concave one. Of curves those of the lower lines and then those of the upper ones, (batch, 2, *shape).
    """
    node = relaxation.network.nodes[index]
    if not isinstance(node, Kinked):
        both = torch.stack([lines.lower_slope, lines.upper_slope], 1).double()
        return (both * _GRID).round() / _GRID
    below = node.below.detach().double().expand(node.shape)
    return torch.where(below > 1, lines.upper_slope, lines.lower_slope).double()


def _rounded(
    relaxation: Relaxation,
    target: int,
    rows: Tensor,
    sample: Tensor,
    constant: Tensor | None,
    slopes: Tensor,
    bits: int,
) -> tuple[Tensor, dict[int, Tensor]]:
    """The bounds of rows with their slopes rounded; and these slopes, (rows, neurons) by activation."""
    scale = 2.0**bits
    network = relaxation.network
    reached = {target}
    for index in range(target, -1, -1):
        if index in reached:
            reached.update(network.nodes[index].seen_through)
    way = [i for i in network.activations if i in reached]
    sizes = [network.nodes[i].size for i in way]
    lower, kept = [], []
    for part in torch.arange(len(rows)).split(max(1, _CHUNK // max(1, sum(node.size for node in network.nodes)))):
        given = ((slopes[part].double() * scale).round() / scale).split(sizes, 1)
        lines = {
            i: relaxation.lines.chosen(i, sample[part], mine.reshape(-1, *network.nodes[i].shape))
            for i, mine in zip(way, given, strict=True)
        }
        shift = None if constant is None else constant[part]
        lower.append(relaxation.lower(target, rows[part], sample[part], constant=shift, lines=lines)[0])
        kept.append({i: kinked(relaxation, i, line).flatten(1) for i, line in lines.items()})
    return torch.cat(lower), {i: torch.cat([part[i] for part in kept]) for i in way}
