"""Branch and bound on the flat network: every closed node proved again in rational arithmetic, and planted points."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import flat_nets as nets
from tests.support.draws import draws
from tests.support.exact import below, exact_forms, exact_values, intervals
from tests.support.solver_cases import row
from verifiable_relu.ir.functions.piecewise_linear import PiecewiseLinear
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.linear import Dense
from verifiable_relu.ir.network import Affine, Elementwise, Input, Network, Op, Sum
from verifiable_relu.search import records
from verifiable_relu.search.bab import loop, proof, relaxation, slopes, system
from verifiable_relu.search.bab.loop import Event, IntervalsTightened, NodesClosed, TreeState
from verifiable_relu.search.bab.query import ReducedQuery, Refinement, refine_intervals
from verifiable_relu.search.bab.slopes import hull_cuts
from verifiable_relu.search.bab.system import ReducedSystem, eliminate_stable_neurons
from verifiable_relu.search.bab.tree import Branching, PhaseTree
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.piecewise_linear import bound_differences, without_maxima
from verifiable_relu.search.property_rows import PropertyRows
from verifiable_relu.spec.property import Box, Property

LEAVES = 12
"""How many closed nodes of a tree are proved again, about."""

ZERO, ONE = Fraction(0), Fraction(1)
KINDS = ("relu", "leaky", "residual", "pooled")
NEVER = lambda: False  # noqa: E731


def make(kind: str, seed: int) -> tuple[Network, Interval, dict[int, Interval]]:
    """A network, a box, and intervals of its ops."""
    rng = np.random.default_rng(seed)
    net = nets.residual(rng) if kind == "residual" else nets.pooled(rng) if kind == "pooled" else nets.mlp(rng, kind)
    net, _ = without_maxima(net)
    box = nets.ball(rng.integers(-4, 5, net.input_size) / 8, 0.5)
    every = intervals(net, box)
    return net, box, {op.inputs[0]: every[op.inputs[0]] for op in net.ops if isinstance(op, Elementwise)}


def points(box: Interval, rng: np.random.Generator, count: int) -> Iterator[list[Fraction]]:
    """Exact points of a box, every other one a corner."""
    low, high = (end[0].numpy() for end in (box.lower, box.upper))
    for number in range(count):
        share = rng.random(len(low)) if number % 2 else rng.integers(0, 2, len(low))
        yield [Fraction(float(v)) for v in np.clip(low + share * (high - low), low, high)]


class Exact:
    """The forms of a system's neurons and of the network's outputs, in fractions."""

    def __init__(self, net: Network, made: ReducedSystem) -> None:
        places = [tuple(place) for place in made.places.tolist()]
        assert places == sorted(places)
        self.system, self.inputs = made, net.input_size
        self.center = [Fraction(float(v)) for v in made.center]
        self.radius = [Fraction(float(v)) for v in made.radius]
        forms = exact_forms(net, set(places), self.center)
        self.neurons = [forms[net.ops[op].inputs[0]][i] for op, i in places]
        self.ops = forms
        self.below = [
            below(net.ops[op].function, net.ops[op].size)[i]  # type: ignore[attr-defined]
            for op, i in places
        ]

    def cut(self, made: relaxation.TreeRelaxation, j: int) -> np.ndarray:
        """The hull cut of a neuron as a form of the inputs and neurons."""
        assert made.cuts is not None
        cuts, n = made.cuts, self.system.inputs
        number = cuts.neurons.tolist().index(j)
        form = np.full(1 + self.inputs + self.system.size, ZERO, dtype=object)
        form[0] = Fraction(float(cuts.constant[number]))
        mine = cuts.entries[0] == number
        for column, given in zip(cuts.entries[1, mine].tolist(), cuts.coefficients[mine].tolist(), strict=True):
            if column < n:
                i = int(self.system.free[column])
                form[1 + i] = Fraction(given) / self.radius[i]
                form[0] -= Fraction(given) * self.center[i] / self.radius[i]
            else:
                form[1 + self.inputs + column - n] = Fraction(given)
        return form

    def least(self, form: np.ndarray, made: relaxation.TreeRelaxation, event: NodesClosed, node: int) -> Fraction:
        """The least value of a form on a node that weak duality leaves, from the last neuron to the first.

        a·r is at least y·z plus the least a·r − y·z at the ends of the phases that the node leaves. Of a neuron with a
        cut, (a + v)·r is at least its value on the cut, or as far below it as the remainder reaches, and −v·r is left.
        """
        form, total = form.copy(), ZERO
        column = {j: k for k, j in enumerate(event.neurons.tolist())}
        over = {j: k for k, j in enumerate(event.neurons[made.over[event.neurons]].tolist())}
        for j in reversed(range(self.system.size)):
            a, form[1 + self.inputs + j] = form[1 + self.inputs + j], ZERO
            w, segment = ZERO, 1
            if j in column:
                w, segment = Fraction(float(event.w[node, column[j]])), int(event.segment[node, column[j]])
            if bool(made.over[j]):
                v = Fraction(float(event.v[node, over[j]])) if j in over else ZERO
                form = form + (a + v) * self.cut(made, j)
                total -= max(a + v, ZERO) * Fraction(float(made.span[j]))
                a = -v
            y = w + Fraction(float(made.slopes[j])) * a
            form = form + y * self.neurons[j]
            low, high = (Fraction(float(t[j])) for t in (self.system.lower, self.system.upper))
            ends = [(ZERO, ZERO)]
            ends += [(high, high)] if segment != 2 else []
            ends += [(low, self.below[j] * low)] if segment != 3 else []
            total += min(a * r - y * z for z, r in ends)
        x = form[1 : 1 + self.inputs]
        return total + form[0] + sum(c * m - abs(c) * r for c, m, r in zip(x, self.center, self.radius, strict=True))


def covers(leaves: Sequence[dict[int, int]]) -> bool:
    """Whether every choice of phases agrees with some leaf, each a map from neurons to segments."""
    if not leaves:
        return False
    split = next((j for leaf in leaves for j in leaf), None)
    if split is None or any(not leaf for leaf in leaves):
        return True
    halves = (
        [{k: s for k, s in leaf.items() if k != split} for leaf in leaves if leaf.get(split, side) == side]
        for side in (2, 3)
    )
    return all(covers(half) for half in halves)


def property_of(box: Interval, *rows: Any) -> Property:
    return Property(Box(box.lower[0].numpy(), box.upper[0].numpy()), (tuple(rows),))


def query_of(net: Network, box: Interval, known: dict[int, Interval], prop: Property) -> ReducedQuery:
    return ReducedQuery(net, box, known, PropertyRows.from_properties([prop], net.output_size), [0], NEVER)


def search(query: ReducedQuery, options: Branching, most: int = 200) -> tuple[PhaseTree, list[NodesClosed]]:
    """The tree of a query's polytope, searched without eyes for counterexamples, and its closed nodes."""
    told: list[Event] = []
    tree = PhaseTree(
        query.relaxation(0), query.parts[0].scale, lambda *_: False, lambda: 1.0, options, 1 << 30, None, told.append
    )
    while tree.loop.now.state is TreeState.OPEN and tree.loop.now.nodes < most:
        tree.loop.advance()
    return tree, [event for event in told if isinstance(event, NodesClosed)]


def near_least(net: Network, box: Interval) -> tuple[list[Fraction], Fraction]:
    """An exact point of the box at which the first output is about least, and its value there."""
    rng = np.random.default_rng(0)
    found = list(points(box, rng, 400))
    y = net(torch.tensor([[float(v) for v in x] for x in found], dtype=torch.float64))[:, 0]
    best = found[int(y.argmin())]
    return best, exact_values(net, best)[-1][0]


METHODS = {
    "few steps": Branching(batch=16, finishing_steps=6),
    "look-ahead": Branching(steps=1, choices=3, batch=16, finishing_steps=6),
    "all adaptive": Branching(steps=6, adaptive_neurons=1 << 20, batch=16, finishing_steps=6),
    "no lines": Branching(steps=2, adaptive_neurons=0, batch=16, finish_below_blame=0.0),
}


def probes(made: relaxation.TreeRelaxation, own: Exact, forms: list[np.ndarray], seed: int) -> list[str]:
    """Put segments and multipliers that no search has chosen to the proof: each of them gives a bound.

    Many mistakes hardly show at the multipliers that a search ends with, and some make bounds lower than need be.
    """
    generator, size, count = torch.Generator().manual_seed(seed), made.system.size, 2
    every = torch.arange(size)
    columns = made.places(every)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    segment = torch.randint(1, 4, (count, size), generator=generator, dtype=torch.int8)
    w, v, mu = drawn(count, size), drawn(count, int(made.over.sum())), drawn(count, len(forms) - 1)
    none, objective = torch.zeros(count, size), torch.zeros(count, dtype=torch.long)
    batch = loop.Nodes(segment, none, mu, objective, none[:, 0], objective[:, None])
    lower = proof.lower_bounds(made, loop.Bounded(batch, none[:, 0], columns, every, segment, w, v, none, none))
    event = NodesClosed(made, batch.objective, every, segment, w, v, mu, lower)
    problems = []
    for node in range(count):
        behind = (max(ZERO, Fraction(float(m))) * form for m, form in zip(mu[node], forms[1:], strict=True))
        objective = sum(behind, start=forms[0])
        least = own.least(objective, made, event, node)
        if not 0 <= least - Fraction(float(lower[node])) <= 1e-6 * (1 + sum(abs(v) for v in objective) + size):
            problems.append(f"a probe is bounded by {float(lower[node])} in place of {float(least)}")
    return problems


def examine(kind: str, seed: int, method: str, cuts: bool = False) -> list[str]:
    """Search trees around the decision boundary, and prove what they close again. Returns what is wrong."""
    problems: list[str] = []
    net, box, known = make(kind, seed)
    x, value = near_least(net, box)
    for gap in (Fraction(1, 8), ZERO):
        prop = property_of(box, row({0: 1}, value - gap), row({0: Fraction(999, 1000), 1: Fraction(1, 100)}, value + 9))
        query = query_of(net, box, known, prop)
        if cuts:
            query = query.improved(hull_cuts, [0], TimeBudget())
        tree, closed = search(query, METHODS[method])
        own = Exact(net, query.system)
        forms = []
        for number in query.parts[0].order.tolist():
            asked = prop.unsafe[0][number]
            form = sum((c * own.ops[-1][i] for i, c in asked.coefficients), start=0 * own.ops[-1][0])
            form[0] -= asked.bound
            forms.append(form * Fraction(float(query.parts[0].scale[len(forms)])))
        problems += probes(tree.loop.relaxation, own, forms, seed)
        leaves = []
        every = [(event, node) for event in closed for node in range(len(event.lower))]
        # All are looked at where there are few, else every k-th.
        for number, (event, node) in enumerate(every):
            pairs = zip(event.neurons.tolist(), event.segment[node].tolist(), strict=True)
            leaves.append({j: s for j, s in pairs if s > 1})
            if number % (1 + len(every) // LEAVES) == 0:
                mu = [max(ZERO, Fraction(float(m))) for m in event.mu[node]]
                behind = sum((m * form for m, form in zip(mu, forms[1:], strict=True)), start=0 * forms[0])
                least = own.least(forms[0] + behind, event.relaxation, event, node)
                parts = Fraction(float(query.parts[0].scale[0])) + sum(
                    m * Fraction(float(s)) for m, s in zip(mu, query.parts[0].scale[1:], strict=True)
                )
                if not 0 < Fraction(float(event.lower[node])) <= least / parts:
                    problems.append(f"{kind} {seed}: {float(event.lower[node])} is not below {float(least / parts)}")
        if tree.loop.now.state is TreeState.PROVED:
            if not covers(leaves):
                problems.append(f"{kind} {seed}: leaves leave out some phases")
            if gap == 0:
                problems.append(f"{kind} {seed}: the point {x} is denied")
    return problems


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_closed_nodes_are_proved_again_in_fractions(kind: str, method: str) -> None:
    for seed in range(draws(4)):
        assert examine(kind, seed, method) == []


@pytest.mark.parametrize("kind", KINDS)
def test_nodes_over_hull_cuts_are_proved_again_in_fractions(kind: str) -> None:
    for seed in range(draws(4)):
        assert examine(kind, seed, "few steps", cuts=True) == []


@pytest.mark.parametrize("kind", KINDS)
def test_forms_are_the_network_but_for_their_errors(kind: str) -> None:
    """At exact points of the box."""
    rng = np.random.default_rng(5)
    for seed in range(draws(8)):
        net, box, known = make(kind, seed)
        made = eliminate_stable_neurons(net, box, known)
        outputs = made.outputs(torch.eye(net.output_size))
        every = torch.arange(made.size)
        forms = made.of_neurons(every)
        relaxed = relaxation.TreeRelaxation(made, outputs, torch.from_numpy(rng.normal(size=made.size)))
        at = relaxed.places(every)
        for x in points(box, rng, 4):
            values = exact_values(net, x)
            z = [values[net.ops[op].inputs[0]][i] for op, i in made.places.tolist()]
            r = [values[op][i] for op, i in made.places.tolist()]
            center, radius = ([Fraction(float(v)) for v in t] for t in (made.center, made.radius))
            e = [(x[i] - center[i]) / radius[i] for i in made.free.tolist()]
            q = [
                (value - Fraction(t) * pre - Fraction(o)) / Fraction(width)
                for value, t, pre, o, width in zip(
                    r, relaxed.slopes.tolist(), z, relaxed.offset.tolist(), relaxed.width.tolist(), strict=True
                )
            ]
            assert all(0 <= v <= 1 for v in q) and all(abs(v) <= 1 for v in e)
            for rows, targets in ((forms, z), (outputs, list(values[-1]))):
                _compare(torch.cat([rows.inputs, rows.neurons], 1), rows.constant, rows.error, [*e, *r], targets)
            for made_forms, targets in ((relaxed.forms[at], z), (relaxed.rows, list(values[-1]))):
                _compare(made_forms.matrix, made_forms.constant, made_forms.error, [*e, *q], targets)


def _compare(matrix: Tensor, constant: Tensor, error: Tensor, at: list[Fraction], targets: list[Fraction]) -> None:
    for k, target in enumerate(targets):
        terms = (Fraction(c) * v for c, v in zip(matrix[k].tolist(), at, strict=True))
        off = abs(Fraction(float(constant[k])) + sum(terms) - target)
        assert off <= Fraction(float(error[k])) < 1e-9


@pytest.mark.parametrize("kind", ["relu", "leaky", "residual"])
def test_hull_cuts_are_above_their_neurons_by_at_most_their_width(kind: str) -> None:
    rng = np.random.default_rng(2)
    for seed in range(draws(4)):
        net, box, known = make(kind, seed)
        query = query_of(net, box, known, property_of(box, row({0: 1, 1: -1}, -9))).improved(
            hull_cuts, [0], TimeBudget()
        )
        made = query.relaxation(0)
        assert made.cuts is not None
        own = Exact(net, query.system)
        for x in points(box, rng, 8):
            values = exact_values(net, x)
            r = [values[op][i] for op, i in query.system.places.tolist()]
            for j in made.cuts.neurons.tolist():
                over = own.cut(made, j).dot(np.array([ONE, *x, *r], dtype=object)) - r[j]
                assert 0 <= over <= Fraction(float(made.span[j]))


def test_cuts_of_a_system_that_is_not_held_as_a_whole_are_those_of_one_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same relaxation, from sparse forms; with many terms none."""
    net, box, known = make(KINDS[0], 0)
    prop = property_of(box, row({0: 1, 1: -1}, -9))
    whole = query_of(net, box, known, prop).improved(hull_cuts, [0], TimeBudget()).parts[0]
    monkeypatch.setattr(system, "_WHOLE", 0)
    sparse = query_of(net, box, known, prop).improved(hull_cuts, [0], TimeBudget()).parts[0]
    assert whole.cuts is not None and sparse.cuts is not None and len(sparse.cuts.neurons)
    assert torch.equal(sparse.cuts.neurons, whole.cuts.neurons)
    assert torch.allclose(sparse.cuts.coefficients, whole.cuts.coefficients, atol=1e-3)
    assert torch.allclose(sparse.slopes, whole.slopes, atol=1e-3)
    monkeypatch.setattr(slopes, "_FEW_TERMS", 0)
    assert query_of(net, box, known, prop).improved(hull_cuts, [0], TimeBudget()).parts[0].cuts is None


@pytest.mark.parametrize("kind", KINDS)
def test_refined_intervals_hold_the_exact_values(kind: str) -> None:
    rng, narrower = np.random.default_rng(1), 0
    for seed in range(draws(4)):
        net, box, known = make(kind, seed)
        told: list[Event] = []
        found = refine_intervals(net, box, known, Refinement(), TimeBudget(), told.append)
        narrower += sum(
            bool(((found[i].upper - found[i].lower) < (known[i].upper - known[i].lower)).any()) for i in known
        )
        assert narrower == 0 or any(isinstance(event, IntervalsTightened) for event in told)
        for x in points(box, rng, 16):
            values = exact_values(net, x)
            for index, interval in found.items():
                ends = zip(values[index], interval.lower[0].tolist(), interval.upper[0].tolist(), strict=True)
                assert all(Fraction(low) <= value <= Fraction(high) for value, low, high in ends)
    assert narrower or kind == "pooled"


def test_a_layer_that_no_neuron_feeds_keeps_its_intervals() -> None:
    """Two branches from the inputs: what feeds the ReLU of the second one is exact."""
    rng = np.random.default_rng(0)
    ops: list[Op] = [Input(name="x", size=2)]
    for name in ("first", "second"):
        weight = torch.from_numpy(rng.integers(-8, 9, (3, 2)) / 8)
        ops.append(Affine(name=name, inputs=(0,), size=3, map=Dense(weight)))
        ops.append(Elementwise(name=f"{name}/relu", inputs=(len(ops) - 1,), size=3, function=PiecewiseLinear()))
    net = nets.network([*ops, Sum(name="sum", inputs=(2, 4), size=3)])
    box = nets.ball(np.zeros(2), 1.0)
    known = {index: interval for index, interval in intervals(net, box).items() if index in (1, 3)}
    assert refine_intervals(net, box, known, Refinement(), TimeBudget()) == known


def test_maxima_are_played_as_tournaments() -> None:
    for seed in range(draws(8)):
        rng = np.random.default_rng(seed)
        net = nets.pooled(rng)
        found, number = without_maxima(net)
        x = [Fraction(int(v), 8) for v in rng.integers(-16, 17, net.input_size)]
        before, after = exact_values(net, x), exact_values(found, x)
        assert all((before[i] == after[j]).all() for i, j in number.items())


def test_crown_tightens_differences_of_candidates() -> None:
    narrower = 0.0
    for seed in range(draws(8)):
        rng = np.random.default_rng(seed)
        net = nets.pooled(rng)
        box = nets.ball(rng.integers(-4, 5, net.input_size) / 8, 0.5)
        found, _ = without_maxima(net)
        known = intervals(found, box)
        fed = {op.inputs[0]: known[op.inputs[0]] for op in found.ops if isinstance(op, Elementwise)}
        relaxation, _ = bound_differences(found, box, fed, NEVER)
        tight = {index: x.intersect(relaxation.bounds[index].interval) for index, x in fed.items()}
        narrower += sum(float((fed[i].upper - fed[i].lower - x.upper + x.lower).sum()) for i, x in tight.items())
        for x in points(box, rng, 16):
            values = exact_values(found, x)
            for index, interval in tight.items():
                ends = zip(values[index], interval.lower[0].tolist(), interval.upper[0].tolist(), strict=True)
                assert all(Fraction(low) <= value <= Fraction(high) for value, low, high in ends)
    assert narrower > 0


def test_the_bound_of_an_open_tree_grows_and_stays_sound() -> None:
    net, box, known = make("relu", 3)
    _, value = near_least(net, box)
    query = query_of(net, box, known, property_of(box, row({0: 1}, value)))
    tree, _ = search(query, Branching(batch=4, finishing_steps=0, finish_below_blame=0.0, adaptive_neurons=0), most=0)
    bounds = [tree.bound(NEVER)]
    for _ in range(6):
        if tree.loop.now.state is TreeState.OPEN and len(tree.loop.now.open):
            tree.loop.advance()
            bounds.append(tree.bound(NEVER))
    assert bounds == sorted(bounds) and bounds[0] < bounds[-1] <= 1e-12


# Mistakes at the seams, which the tests above must see


def _instead(owner: Any, name: str, wrong: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    right = getattr(owner, name)

    def changed(*args: Any, **named: Any) -> Any:
        return wrong(right, *args, **named)

    is_static = isinstance(vars(owner).get(name), staticmethod)
    return lambda patch: patch.setattr(owner, name, staticmethod(changed) if is_static else changed)


def _higher_floor(right: Any, self: Any, x: Interval, slope: Tensor) -> Tensor:
    return right(self, x, slope) + 0.25 * (x.upper - x.lower)


def _without_shift(right: Any, self: Any, *args: Any) -> Any:
    found = right(self, *args)
    return type(found)(found.given, found.constants[:-1], found.charge)


def _other_slope(right: Any, function: Any, x: Interval) -> Any:
    found = right(function, x)
    if function.piecewise_linear:
        found = type(found)(found.unstable, torch.where(found.unstable, found.slope, 1.0), found.offset, found.error)
    return found


def _wrong_sign(right: Any, self: Any, numbers: Tensor, segment: Tensor, c: Tensor, pull: Tensor, unit: float) -> Any:
    return right(self, numbers, segment, c, -pull, unit)


def _half(right: Any, self: Any, numbers: Tensor, segment: Tensor, c: Tensor, pull: Tensor, unit: float) -> Any:
    return right(self, numbers, segment, c / 2, pull, unit)


def _believed(right: Any, self: Any, found: Any) -> Tensor:
    closed = found.bound > self.strategy.enough[found.nodes.objective]
    if bool(closed.any()):
        self.note(found[closed], found.bound[closed].double().clamp(min=1e-300))
    return closed


def _upper_halves(right: Any, self: Any, *args: Any) -> Any:
    found = right(self, *args)
    half = found[: len(found) // 2]
    return loop.Nodes(*(torch.cat([t, t]) for t in vars(half).values()))


def _lose_nodes(right: Any, self: Any, more: Any) -> None:
    if not isinstance(more, loop.Nodes):
        right(self, more)


def _negative_rows(right: Any, made: Any, found: Any) -> Tensor:
    weight = right(made, found)
    return torch.cat([weight[:, :1], -weight[:, 1:] - 1], 1)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "relax: floors are too high": _instead(nets.PiecewiseLinear, "floor", _higher_floor),
    "back-substitute: constants are dropped": _instead(system._StepToNeurons, "back", _without_shift),
    "back-substitute: inactive neurons pass": _instead(system._Stable, "from_bounds", _other_slope),
    "concretise: multipliers with the other sign": _instead(relaxation.Segments, "least", _wrong_sign),
    "concretise: half of the coefficients": _instead(relaxation.Segments, "least", _half),
    "concretise: rows with negative multipliers": _instead(proof, "row_weights", _negative_rows),
    "close: the search is believed": _instead(loop.Loop, "close", _believed),
    "close: lower halves are lost": _instead(loop.Nodes, "split_on", _upper_halves),
    "close: open nodes are lost": _instead(records.Stack, "push", _lose_nodes),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_mistakes_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    tried = itertools.product(range(3), KINDS, ("few steps", "all adaptive"))
    assert any(_fails(kind, seed, method) for seed, kind, method in tried)


def _fails(kind: str, seed: int, method: str) -> bool:
    try:
        return bool(examine(kind, seed, method))
    except AssertionError:
        return True
