"""Trees over splits of neurons as records: slopes of the relaxation that a tree shares, splits, and leaves.

Of a leaf the search proves, for a row with coefficients K_j of neurons' values r_j, and multipliers w_j, that the row
is positive with λ_j = t_j·K_j + w_j, t_j being the slope of the tree's relaxation. A checker takes its own slope t′_j,
which is that of the phase where the leaf has decided one, and the chord where K_j < 0 for a neuron that has lines of
its own (``search.bab.ascent``). Where λ_j is another than t′_j·K_j, the record has the slope λ_j/K_j, or, of a neuron
that is decided or whose K_j is nothing, the multiplier λ_j − t′_j·K_j of z_j. Both are zero for most neurons, and else
rounded by so little that the leaf's margin pays for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.network import Network
from verifiable_relu.proof.encoding import FINE, Array, NotToldError, Record, SlopeTable, binary, numbers, step_of
from verifiable_relu.proof.numbering import Numbering
from verifiable_relu.rounding import TINY
from verifiable_relu.search.bab.loop import IntervalsTightened, NodesClosed
from verifiable_relu.search.bab.relaxation import TreeRelaxation

_SPENT = 0.25
"""The part of a leaf's margin that rounding of its multipliers may take."""

_NOTHING = 1e-10
"""A coefficient is nothing if it is smaller than this part of the largest one."""

_CLAIMED = 2.0**-8
"""Ends of intervals are claimed less this part of the interval, so that their leaves have margins."""

_LARGEST = 1 << 28
"""Most entries of the table of leaves and splits."""


@dataclass(frozen=True, eq=False)
class _Leaf:
    """A closed node: its row, where it is, multipliers and slopes (neurons and multiples of 2^step), and those of rows.

    ``path``: segments by neuron.
    """

    objective: int
    path: dict[int, int]
    multipliers: tuple[Array, Array]
    slopes: tuple[Array, Array]
    step: int
    mu: Array


class Tree:
    """One tree, or those of one relaxation that tighten intervals.

    Args:
        relaxation: of the tree.
        polytope, order, scale: as of ``TreeBegun``; None for intervals.

    Attributes:
        polytope: as above.
    """

    def __init__(
        self, relaxation: TreeRelaxation, polytope: int | None = None, order: Any = None, scale: Any = None
    ) -> None:
        self.polytope, self._relaxation = polytope, relaxation
        self._order, self._scale = order, None if scale is None else torch.as_tensor(scale).double()
        self._lines: tuple[Any, Any] | None = None
        self._leaves: list[_Leaf] = []
        self._claims: list[tuple[int, int, float, int]] = []
        self._op, self.broken = -1, False

    def _set_lines(self, event: NodesClosed) -> None:
        """Choose the slopes t⁺ and t⁻ of all neurons: chords above those with lines of their own."""
        r, system = self._relaxation, self._relaxation.system
        own = torch.zeros_like(r.slopes, dtype=torch.bool)
        own[event.neurons[(event.segment == 1).any(0)]] = True
        below, above, self._below = r.slopes.clone(), r.slopes.clone(), torch.zeros_like(r.slopes)
        for block in system.blocks:
            x, part, f = system.interval(block), block.part, block.function
            if not f.piecewise_linear:
                continue
            self._below[part] = -f.value(-torch.ones_like(x.lower))[0]
            low, high = f.value(x.lower)[0], f.value(x.upper)[0]
            chord = (high - low) / (x.upper - x.lower)[0].clamp(min=TINY)
            convex = self._below[part] <= 1
            above[part] = torch.where(own[part] & convex, chord, above[part])
            below[part] = torch.where(own[part] & ~convex, chord, below[part])
        self._lines = below, above

    def add(self, event: NodesClosed) -> None:
        """Take leaves."""
        if self._lines is None:
            self._set_lines(event)
        assert self._lines is not None
        r, n = self._relaxation, self._relaxation.system.inputs
        neurons, segment, w = event.neurons, event.segment, event.w.double()
        columns = r.places(neurons)
        mu = event.mu.double().clamp(min=0)
        weight = torch.cat([torch.nn.functional.one_hot(event.objective, r.objectives).double(), mu], 1)
        c = weight @ r.rows.matrix[:, n:] + w @ r.forms[columns].matrix[:, n:]
        over = r.over[neurons]
        if bool(over.any()):
            c = c + event.v.double() @ r.base.matrix[columns[over]][:, n:]
        k = c[:, neurons] / r.span[neurons]
        if bool(over.any()):
            k[:, over] = torch.where(event.v != 0, -event.v.double(), k[:, over])
        wanted = r.slopes[neurons] * k + w
        below, above = (line[neurons] for line in self._lines)
        taken, kinked = torch.where(k >= 0, below, above), r.segments.kinked[neurons]
        taken = torch.where(kinked & (segment == 3), 1.0, taken)
        taken = torch.where(kinked & (segment == 2), self._below[neurons], taken)
        rest = (wanted - taken * k).numpy()
        width = (r.system.upper - r.system.lower)[neurons].numpy()
        lower = event.lower
        if self._scale is None:
            margin = _CLAIMED * r.rows.size()[event.objective] / 4
        else:
            self.broken |= bool((lower <= 2 * TINY).any())
            margin = _SPENT * lower * (self._scale[0] + mu @ self._scale[1:])
        # A slope of its own gives a neuron the wanted λ, but where K is nothing: there a multiplier does.
        small = k.abs() <= _NOTHING * k.abs().amax(1, keepdim=True)
        small[:, over] |= event.v != 0  # What a hull cut takes the place of
        sloped = (~small & ~(kinked & (segment > 1))).numpy() & (rest != 0)
        unit = np.where(sloped, k.abs().numpy(), 1.0)
        given = np.where(sloped, (wanted / k.where(~small, 1.0)).numpy(), rest)
        decided, places = segment.numpy(), neurons.numpy()
        margins, mus, objective = margin.numpy(), mu.numpy(), event.objective.tolist()
        for at in range(len(objective)):
            total = float((width * unit[at] * (rest[at] != 0)).sum())
            # Rounded slopes change the coefficients of earlier neurons, whose own slopes multiply that.
            total *= max(1.0, 4 * float(np.abs(given[at][sloped[at]]).max(initial=0)))
            step = int(np.floor(np.log2(max(float(margins[at]), 1e-300) / max(total, 1e-300)))) if total else 0
            step = max(step, step_of(given[at], 50))
            whole = np.rint(np.ldexp(given[at], -step)).astype(np.int64)
            free, own = (np.flatnonzero(chosen) for chosen in ((whole != 0) & ~sloped[at], sloped[at]))
            split = np.flatnonzero(decided[at] > 1)
            path = dict(zip(places[split].tolist(), decided[at, split].tolist(), strict=True))
            hints = [(places[used].astype(np.int32), whole[used]) for used in (free, own)]
            self._leaves.append(_Leaf(objective[at], path, hints[0], hints[1], step, mus[at]))

    def claim(self, event: IntervalsTightened) -> None:
        """Take the ends that are gained."""
        self._op, count, r = event.op, len(event.numbers), self._relaxation
        width = r.rows.size()[:count].numpy()
        for side, ends in ((1, event.lower), (-1, -event.upper)):
            for at, (number, end) in enumerate(zip(event.numbers.tolist(), ends.tolist(), strict=True)):
                if math.isfinite(end):
                    step = step_of(width[at : at + 1], 12)
                    value = math.ldexp(math.floor(math.ldexp(end - _CLAIMED * float(width[at]), -step)), step)
                    self._claims.append((number, side, value, at if side > 0 else count + at))

    def finished(self, network: Network | None) -> Tree:
        """Keep what a certificate needs of the relaxation, and drop it."""
        r, system = self._relaxation, self._relaxation.system
        assert network is not None
        self.network, self._places = network, system.places.numpy()
        self._slopes = SlopeTable({})
        for kind, line in zip(("lower", "upper"), self._lines or (), strict=False):
            for block in system.blocks:
                self._slopes.values[block.op, kind] = self._places[block.part, 1], line[block.part].numpy()
        ends = {end for leaf in self._leaves for end in leaf.path.items()}
        if pairs := sorted({(j, above >> up) for j, above in ends for up in range(1, 6) if above >> up}):
            at = torch.tensor(pairs)
            points = r.segments.point(at[:, 0], at[:, 1]).tolist()
            self._points = dict(zip(pairs, points, strict=True))
        self._planes = list(self._cuts())
        del self._relaxation, self._lines
        return self

    def _cuts(self) -> Iterator[tuple[int, list[tuple[int, Array, Array]], Array]]:
        """Yield each hull cut: its neuron, terms of inputs (−1) and of ops' neurons, and bends."""
        r, system = self._relaxation, self._relaxation.system
        if r.cuts is None:
            return
        cut, variable = r.cuts.entries.numpy()
        values, n = r.cuts.coefficients.numpy(), system.inputs
        free, radius = system.free.numpy(), system.radius.numpy()
        for number, neuron in enumerate(r.cuts.neurons.tolist()):
            mine = cut == number
            places, given, terms = variable[mine], values[mine], []
            of_input = places < n
            if of_input.any():
                at = free[places[of_input]]
                terms.append((-1, at, given[of_input] / radius[at]))
            of_neuron = self._places[places[~of_input] - n]
            for op in np.unique(of_neuron[:, 0]).tolist():
                chosen = of_neuron[:, 0] == op
                terms.append((op, of_neuron[chosen, 1], given[~of_input][chosen]))
            yield neuron, terms, r.cuts.bends[number].numpy()

    # Records

    def records(self, numbering: Numbering) -> Iterator[Record]:
        """Yield the records of the tree of a polytope, or of all claims about intervals."""
        if self.broken:
            raise NotToldError("a part of the search was decided by a solver, which tells no proof")
        if slopes := self._slopes.records(numbering, FINE):
            yield {"slopes": slopes}
        if self._scale is not None:
            yield from self._plane_records(numbering)
            yield from self._nodes(numbering, self._leaves)
            return
        for number, side, value, objective in self._claims:
            place, mantissa = numbering[self._op], binary(value)
            at, _ = place.positions(np.array([number]))
            leaves = [leaf for leaf in self._leaves if leaf.objective == objective]
            for each in at.tolist():
                yield {"tighten": [place.number, each, side, *mantissa]}
                yield from self._nodes(numbering, leaves)

    def _plane_records(self, numbering: Numbering) -> Iterator[Record]:
        for neuron, terms, bends in self._planes:
            place, at = self._at(numbering, neuron)
            found = []
            for op, neurons, values in terms:
                number, mine = -1, neurons
                if op >= 0:
                    number, (mine, which) = numbering[op].number, numbering[op].positions(neurons)
                    values = values[which]
                found.append([number, mine.tolist(), numbers(values, step_of(values, 40))])
            yield {"plane": [place, at], "terms": found, "bends": numbers(bends, -30)}

    def _at(self, numbering: Numbering, neuron: int) -> tuple[int, int]:
        op, number = self._places[neuron].tolist()
        place = numbering[op]
        return place.number, int(place.positions(np.array([number]))[0][0])

    def _nodes(self, numbering: Numbering, leaves: list[_Leaf]) -> Iterator[Record]:
        """Yield a tree in preorder. Wherever all leaves of a part are on a side of one cut, that cut may come first."""
        cuts: dict[tuple[int, int], int] = {}
        entries = []
        for row, leaf in enumerate(leaves):
            for neuron, segment in leaf.path.items():
                while segment > 1:
                    cut = cuts.setdefault((neuron, segment >> 1), len(cuts))
                    entries.append((row, cut, 1 if segment & 1 else -1))
                    segment >>= 1
        if len(leaves) * len(cuts) > _LARGEST:
            raise UnsupportedError("the tree of the proof is too large")
        matrix = np.zeros((len(leaves), len(cuts)), np.int8)
        if entries:
            rows, columns, sides = np.array(entries).T
            matrix[rows, columns] = sides
        names = list(cuts)
        waiting = [np.arange(len(leaves))]
        done = [np.ones(len(cuts), bool)]
        while waiting:
            members, left = waiting.pop(), done.pop()
            common = left & (matrix[members] != 0).all(0) if len(members) else left & False
            if len(members) == 1 and not common.any():
                yield self._leaf(numbering, leaves[int(members[0])])
                continue
            if not common.any():
                raise UnsupportedError("the leaves of a tree do not cover it")
            chosen = int(common.argmax())
            neuron, segment = names[chosen]
            place, at = self._at(numbering, neuron)
            yield {"split": [place, at, *binary(self._points[neuron, segment])]}
            rest = left.copy()
            rest[chosen] = False
            for side in (-1, 1):
                waiting.append(members[matrix[members, chosen] == side])
                done.append(rest)

    def _leaf(self, numbering: Numbering, leaf: _Leaf) -> Record:
        combined: list[Any] = [0 if self.polytope is None else self.polytope]
        if self._scale is not None and len(self._order) > 1:
            scaled = np.zeros(len(self._order))
            scaled[self._order] = np.concatenate([[1.0], leaf.mu]) * self._scale.numpy()
            combined.append(numbers(scaled, min(0, step_of(scaled, 50))))
        elif self._scale is not None:
            # The row is that of the property, which the search multiplied.
            combined.append(numbers(self._scale.numpy(), step_of(self._scale.numpy(), 53)))
        record: Record = {"close": [combined]}
        for key, (neurons, whole), kind in (("multipliers", leaf.multipliers, []), ("slopes", leaf.slopes, ["both"])):
            places = self._places[neurons]
            for op in np.unique(places[:, 0]).tolist():
                mine = places[:, 0] == op
                at, which = numbering[op].positions(places[mine, 1])
                values = np.ldexp(whole[mine][which].astype(np.float64), leaf.step)
                hint = [numbering[op].number, at.tolist(), numbers(values, leaf.step), *kind]
                record.setdefault(key, []).append(hint)
        return record
