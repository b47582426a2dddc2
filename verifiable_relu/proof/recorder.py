"""The recorder of proofs: an observer of a search, which keeps of each event the hints that a certificate needs.

``docs/certificates.md`` says what the records mean. Events become records as follows; everything happens in the order
of the search, since each bound rests on those before.

* ``RowsBounded``, for each query of the batch: where CROWN bounds neurons, ``bound`` of each activation in order;
  behind it ``slopes`` where the search chose others than a checker does by default. ``NeuronsBounded`` before it
  becomes ``bound`` with ``rows`` and the slopes of each row that is better than CROWN's. Polytopes with a row that is
  positive are closed: ``close``, with the slopes that were searched for.
* ``IntervalsTightened``: ``tighten`` for each end that was gained, and its tree (below) from ``NodesClosed``.
* ``TreeBegun``, ``NodesClosed``, ``TreeEnded``: of a tree that is proved, ``slopes`` of its relaxation, ``plane`` for
  each hull cut, then the tree. Leaves say by themselves where they are: a split on which all leaves of a part agree
  may come first (``trees``). A leaf is ``close`` with multipliers.
* ``BoxesBounded``, ``BoxesHalved``: the tree of boxes (``boxes``).

A query is proved when all of its polytopes are closed, whoever closed them.

**Memory.** Tensors of an event are turned at once into short numbers of what a certificate will have of them, and only
for unstable neurons. Trees that are given up are dropped with the next event of their polytope's end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.bounds.alpha import slopes_of
from verifiable_relu.bounds.backward import Relaxation
from verifiable_relu.bounds.linear_bounds import lower_of_rows
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.functions.piecewise_linear import PiecewiseLinear
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.linear import Gather
from verifiable_relu.ir.network import Affine, Elementwise, Maximum, Network
from verifiable_relu.proof.boxes import BoxTree
from verifiable_relu.proof.encoding import FINE, Array, NotToldError, Numbers, Record, SlopeTable, numbers, step_of
from verifiable_relu.proof.numbering import Numbering
from verifiable_relu.proof.trees import Tree
from verifiable_relu.search.bab import loop as bab
from verifiable_relu.search.bounding import NeuronsBounded, RowsBounded
from verifiable_relu.search.split import bounding as split

_GAIN = 1e-5
"""A row of a neuron is kept if it is better than what was known by this part of the neuron's interval.

Many rows that are dropped add up: with 1e-3 the certificate of a network with margins of 1e-4 was refused.
"""


_Multipliers = tuple[int, Array, Array]


@dataclass(frozen=True, eq=False)
class _NeuronRows:
    """Neurons of the input of op ``user``, and the row of ``slopes`` that bounds each from one side."""

    user: int
    neuron: Array
    sign: Array
    row: Array
    slopes: SlopeTable


@dataclass(frozen=True, eq=False)
class _Stage:
    """Bounds of all activations, and slopes, of one relaxation of a query's box; and what its rows close.

    Attributes:
        network: the ops that numbers are of.
        users: nonlinear ops, and whether CROWN bounds their inputs, in order.
        rows: of neurons.
        slopes: of elementwise ops, those that differ from the default.
        closed: by polytope the multipliers of its rows, slopes (None for those that the state has), and of an op the
            multipliers of neurons (op, neurons, values), if any.
    """

    network: Network
    users: list[tuple[int, bool]]
    rows: list[_NeuronRows]
    slopes: SlopeTable
    closed: dict[int, tuple[list[float], SlopeTable | None, _Multipliers | None]]


@dataclass(eq=False)
class _Log:
    """Proofs of one query in the order of time, and the trees that have not ended."""

    steps: list[_Stage | Tree] = field(default_factory=list)
    closed: set[int] = field(default_factory=set)
    pending: list[_NeuronRows] = field(default_factory=list)
    trees: dict[int, Tree] = field(default_factory=dict)
    network: Network | None = None
    boxes: BoxTree | None = None
    given: dict[tuple[int, str], set[int]] = field(default_factory=dict)  # Neurons whose slopes a stage has written


class Recorder:
    """A ``search.batch.ProofObserver``: learns what is proved of queries, and returns the records of certificates."""

    def __init__(self) -> None:
        self._logs: dict[int, _Log] = {}

    def __call__(self, queries: Sequence[int], event: object) -> None:
        with torch.no_grad():
            match event:
                case NeuronsBounded():
                    for sample, number in enumerate(queries):
                        self._neurons(self._log(number), sample, event)
                case RowsBounded():
                    for sample, number in enumerate(queries):
                        self._rows(self._log(number), sample, event)
                case split.BoxesBounded() | split.BoxesHalved():
                    self._boxes(queries, event)
                case _:
                    self._tree(self._log(queries[0]), event)

    def forget(self, number: int) -> None:
        """Drop what is known of a query."""
        self._logs.pop(number, None)

    def _log(self, number: int) -> _Log:
        return self._logs.setdefault(number, _Log())

    # Bounds of whole boxes

    def _neurons(self, log: _Log, sample: int, event: NeuronsBounded) -> None:
        x = event.relaxation.bounds[event.op].interval
        low, high = (end[sample] for end in (x.lower, x.upper))
        before = torch.where(event.sign > 0, low[event.neuron], -high[event.neuron])
        width = (high - low)[event.neuron]
        better = (event.sample == sample) & (event.lower > before + _GAIN * width)
        chosen = better.nonzero().squeeze(1)
        if not len(chosen):
            return
        table = _chosen_slopes(event.relaxation, sample, event.choices, chosen)
        user, moved = _user(event.relaxation.network, event.op)
        neuron, sign = event.neuron[chosen].numpy(), event.sign[chosen].numpy().astype(np.int8)
        rows = np.arange(len(neuron))
        if moved is not None:
            places = [np.flatnonzero(moved == each) for each in neuron]
            rows = np.repeat(rows, [len(each) for each in places])
            neuron = np.concatenate(places)
        log.pending.append(_NeuronRows(user, neuron.astype(np.int32), sign[rows], rows, table))

    def _rows(self, log: _Log, sample: int, event: RowsBounded) -> None:
        relaxation = event.relaxation
        network, users = relaxation.network, []
        has_maxima, had_maxima = (
            any(isinstance(op, Maximum) for op in each.ops) for each in (network, log.network or network)
        )
        if has_maxima != had_maxima:
            # A checker drops slopes where maxima become tournaments.
            log.given.clear()
        log.network = network
        for index, op in enumerate(network.ops):
            if isinstance(op, Elementwise | Maximum):
                by_rows = event.by_crown and index > event.after and _is_bounded(relaxation, op.inputs[0], index)
                users.append((index, by_rows))
        rows, values = event.rows, event.values[sample]
        largest, flat = rows.unscaled(event.values)[sample], event.by_intervals
        closed: dict[int, tuple[list[float], SlopeTable | None, _Multipliers | None]] = {}
        place = {int(flat): k for k, flat in enumerate(event.chosen)}
        for polytope in rows.exists[sample].nonzero().squeeze(1).tolist():
            mine = (rows.polytope[sample] == polytope).nonzero().squeeze(1)
            if polytope in log.closed or not len(mine) or not bool((values[mine] > 0).any()):
                continue
            best = int(mine[largest[mine].nan_to_num(nan=-torch.inf).argmax()])
            at = place.get(sample * values.shape[0] + best)
            table, decided = None, None
            if flat is not None and bool(flat[sample, best]):
                row = rows.matrix[sample, best] / rows.scale[sample, best]
                table, decided = _no_slopes(relaxation, sample), _decided(relaxation, sample, row)
            if at is not None and table is None:
                table = _chosen_slopes(relaxation, sample, event.choices, torch.tensor([at])).row(0)
            closed[polytope] = [float(row == best) for row in mine.tolist()], table, decided
            log.closed.add(polytope)
        log.steps.append(_Stage(network, users, log.pending, _other_slopes(relaxation, sample, log.given), closed))
        log.pending = []

    # Trees of neurons

    def _tree(self, log: _Log, event: object) -> None:
        match event:
            case bab.TreeBegun():
                log.network = event.relaxation.system.network
                order = event.order.tolist()
                log.trees[id(event.relaxation)] = Tree(event.relaxation, event.polytope, order, event.scale.numpy())
            case bab.NodesClosed():
                key = id(event.relaxation)
                if key not in log.trees:
                    log.trees[key] = Tree(event.relaxation)
                log.trees[key].add(event)
            case bab.TreeEnded():
                tree = log.trees.pop(id(event.relaxation), None)
                if tree is not None and event.is_proved and tree.polytope not in log.closed:
                    log.closed.add(tree.polytope or 0)
                    log.steps.append(tree.finished(log.network))
                    log.trees = {key: each for key, each in log.trees.items() if each.polytope not in log.closed}
            case bab.IntervalsTightened():
                tree = log.trees.pop(id(event.relaxation), None)
                if tree is not None:
                    tree.claim(event)
                    log.steps.append(tree.finished(log.network))

    # Boxes

    def _boxes(self, queries: Sequence[int], event: split.Event) -> None:
        for local, number in enumerate(queries):
            log = self._log(number)
            # The root has the query's own number, in every search.
            begins = isinstance(event, split.BoxesBounded) and bool((event.boxes.number == local).any())
            if log.boxes is None or begins:
                log.boxes = BoxTree(local)
            log.boxes.add(event)

    # Records

    def records(self, number: int, polytopes: int, place: Numbers) -> Iterator[Record]:
        """Yield the records that prove all polytopes of a query, behind its ``part``.

        Args:
            number: of the query.
            polytopes: how many it has.
            place: numbers the activations of networks.

        Raises:
            UnsupportedError: if some of the proof was not told, or a certificate cannot say it.
        """
        log, left, has_tournaments = self._log(number), set(range(polytopes)), False
        steps = log.steps
        if log.boxes is not None and not log.closed:
            # Claims about intervals are made for trees of neurons.
            steps = [step for step in steps if isinstance(step, _Stage)]
        for step in steps:
            if not left:
                return
            numbering = place(step.network, has_tournaments)
            if isinstance(step, Tree) and step.polytope is not None:
                if len(left) > 1:
                    yield {"only": [step.polytope]}
                left.remove(step.polytope)
                begins = numbering.has_tournaments and not has_tournaments
            else:
                begins, has_tournaments = numbering.has_tournaments and not has_tournaments, numbering.has_tournaments
            if begins:
                yield {"tournaments": True}
            if isinstance(step, Tree):
                yield from step.records(numbering)
            else:
                yield from self._stage(step, numbering, left)
        if left and log.boxes is not None:
            yield from log.boxes.records(left)
        elif left:
            raise NotToldError("what proves the query was not told to the recorder")

    def _stage(self, stage: _Stage, numbering: Numbering, left: set[int]) -> Iterator[Record]:
        for user, by_crown in stage.users:
            if by_crown:
                yield {"bound": numbering[user].number}
            # Intervals bound what the first layers of two networks are apart far worse than rows do.
            if numbering.differences and (number := numbering[user].number) in numbering.differences:
                yield {"bound": numbering.differences[number]}
            for rows in (rows for rows in stage.rows if rows.user == user):
                place = numbering[user]
                for at in np.unique(rows.row).tolist():
                    mine = rows.row == at
                    pairs: list[int] = []
                    for neuron, side in zip(rows.neuron[mine], rows.sign[mine].tolist(), strict=True):
                        for each in place.positions(np.array([neuron]))[0].tolist():
                            pairs += [each, side]
                    slopes = rows.slopes.row(at).records(numbering)
                    yield {"bound": place.number, "rows": pairs, "slopes": slopes}
            given = {key: part for key, part in stage.slopes.values.items() if key[0] == user}
            if slopes := SlopeTable(given).records(numbering, FINE):
                yield {"slopes": slopes}
        for polytope, (weights, table, decided) in stage.closed.items():
            if polytope in left:
                left.remove(polytope)
                given_rows = [numbers(np.array(weights), 0)] if len(weights) > 1 else []
                record: Record = {"close": [[polytope, *given_rows]]}
                if table is not None and (slopes := table.records(numbering)):
                    record["slopes"] = slopes
                if decided is not None:
                    place = numbering[decided[0]]
                    at, which = place.positions(decided[1])
                    values = decided[2][which]
                    record["multipliers"] = [[place.number, at.tolist(), numbers(values, step_of(values, 53))]]
                yield record


def _chosen_slopes(relaxation: Relaxation, sample: int, choices: Mapping[int, Tensor], chosen: Tensor) -> SlopeTable:
    """Return the slopes of unstable neurons that some rows chose, (rows, neurons)."""
    found: dict[tuple[int, str], tuple[Array, Array]] = {}
    for index, choice in choices.items():
        op = relaxation.network.ops[index]
        if not isinstance(op, Elementwise):
            continue
        x = relaxation.bounds[op.inputs[0]].interval
        mine = Interval(x.lower[sample : sample + 1], x.upper[sample : sample + 1])
        at = op.function.unstable(mine)[0].nonzero().squeeze(1)
        both = slopes_of(relaxation, index, choice[chosen].double(), torch.full_like(chosen, sample))
        range_ = op.function.slope_range(mine)
        free = {"lower": (range_.lower_from, range_.lower_to), "upper": (range_.upper_from, range_.upper_to)}
        for kind, values in (("lower", both.lower), ("upper", both.upper)):
            if not op.function.piecewise_linear or not torch.equal(*(end[0, at] for end in free[kind])):
                found[index, kind] = at.numpy().astype(np.int32), values[:, at].numpy().astype(np.float32)
    return SlopeTable(found)


def _no_slopes(relaxation: Relaxation, sample: int) -> SlopeTable:
    """Return slopes of zero, with which rows are bounded by the intervals of values."""
    found: dict[tuple[int, str], tuple[Array, Array]] = {}
    for index, op in enumerate(relaxation.network.ops):
        if isinstance(op, Elementwise):
            x = relaxation.bounds[op.inputs[0]].interval
            at = op.function.unstable(Interval(x.lower[sample], x.upper[sample])).nonzero().squeeze(1).numpy()
            found[index, "both"] = at, np.zeros(len(at))
    return SlopeTable(found)


def _decided(relaxation: Relaxation, sample: int, row: Tensor) -> _Multipliers | None:
    """Return multipliers by which decided neurons of the last op count by their intervals, for a row of outputs.

    A checker takes such a neuron for s·z, whatever slope is given; K·s·z − K·s·z leaves the ends of z.
    """
    last = relaxation.structure.last_nonlinear
    op = relaxation.network.ops[last]
    if not (isinstance(op, Elementwise) and isinstance(op.function, PiecewiseLinear)):
        return None
    _, found = lower_of_rows(relaxation, row[None], torch.tensor([sample]), until=last, coefficients=True)
    assert found is not None
    x = relaxation.bounds[op.inputs[0]].interval
    low, high = x.lower[sample], x.upper[sample]
    slope = torch.where(low >= 0, 1.0, op.function.slope_below.expand(op.size).double())
    values = -found[0].double() * slope
    at = ((values != 0) & ((low >= 0) | (high <= 0))).nonzero().squeeze(1)
    return (last, at.numpy().astype(np.int32), values[at].numpy()) if len(at) else None


def _other_slopes(relaxation: Relaxation, sample: int, given: dict[tuple[int, str], set[int]]) -> SlopeTable:
    """Return the slopes of unstable neurons over a box that a checker does not choose by itself.

    Slopes stay until others take their place, so neurons that an earlier stage has ``given`` some get theirs, too.
    """
    found: dict[tuple[int, str], tuple[Array, Array]] = {}
    for index, op in enumerate(relaxation.network.ops):
        if not isinstance(op, Elementwise):
            continue
        bounds = relaxation.bounds[op.inputs[0]].pick(torch.tensor([sample]))
        by_rows = relaxation.bounds[op.inputs[0]].by_rows
        by_rows = None if by_rows is None else by_rows.pick(torch.tensor([sample]))
        own, plain = (op.function.slopes(bounds.interval, by) for by in (by_rows, None))
        unstable = op.function.unstable(bounds.interval)[0]
        for kind, mine, default in zip(("lower", "upper"), own, plain, strict=True):
            other = unstable & (mine != default)[0] if isinstance(op.function, PiecewiseLinear) else unstable
            before = given.setdefault((index, kind), set())
            at = torch.tensor(sorted({*other.nonzero().squeeze(1).tolist(), *before}), dtype=torch.long)
            if len(at):
                before |= set(at.tolist())
                found[index, kind] = at.numpy().astype(np.int32), mine[0, at].numpy()
    return SlopeTable(found)


def _user(network: Network, source: int) -> tuple[int, Array | None]:
    """Return the nonlinear op that reads an op, through moves perhaps, and the elements that these make of it."""
    for index, op in enumerate(network.ops):
        if not isinstance(op, Elementwise | Maximum):
            continue
        (at,), moved = op.inputs, None
        while at != source:
            before = network.ops[at]
            if not (isinstance(before, Affine) and isinstance(before.map, Gather) and before.is_exact):
                break
            places = before.map.index.numpy()
            moved = places if moved is None else np.where(moved >= 0, places[moved], -1)
            (at,) = before.inputs
        if at == source:
            return index, moved
    raise UnsupportedError(f"nobody reads {network.ops[source].place}")


def _is_bounded(relaxation: Relaxation, source: int, user: int) -> bool:
    """Return True if rows bound an input of an op, or what that was moved from."""
    op = relaxation.network.ops[source]
    while isinstance(op, Affine) and isinstance(op.map, Gather) and op.is_exact and op.bias is None:
        (source,) = op.inputs
        op = relaxation.network.ops[source]
    return relaxation.structure.is_bounded_by_rows(source, user)
