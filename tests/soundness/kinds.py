"""The five kinds of soundness test, as functions that return what they found.

Each takes the methods to ask, with the seconds they have for a case, and the report to write to.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import numpy as np
import torch

from tests.support import nets
from tests.support.bounds import linear_lower_bounds
from tests.support.exact import DIGITS, exact_outputs, exact_values, rational
from verifiable_relu.bounds import TUNING, Tuning, input_box, interval_bounds, preactivation_bounds
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Linear
from verifiable_relu.spec.property import Box, Polytope, Property, Query, Row

from .boundary import KINDS, cases
from .judge import Case, Report, ask

# ---------------------------------------------------------------- agreement near the decision boundary


def _samples(rng: np.random.Generator, lower: np.ndarray, upper: np.ndarray, count: int) -> np.ndarray:
    """Points of a box, half of them with many coordinates at its faces, the first ones corners."""
    unit = rng.random((count, len(lower)))
    faces = unit[: count // 2]
    snapped = rng.random(faces.shape) < rng.random((len(faces), 1))
    unit[: count // 2] = np.where(snapped, faces.round(), faces)
    unit[:64] = unit[:64].round()
    return np.clip(lower + unit * (upper - lower), lower, upper)


def _rows(rng: np.random.Generator, outputs: int, count: int) -> list[dict[int, Fraction]]:
    """Coefficients with one decimal, as property files have them."""
    rows = []
    while len(rows) < count:
        row = {i: Fraction(int(rng.integers(-20, 21)), 10) for i in range(outputs)}
        if any(row.values()):
            rows.append({i: c for i, c in row.items() if c})
    return rows


def boundary_cases(
    rng: np.random.Generator, networks: Iterable[Network], offsets: Sequence[float], *, boxes: int = 2, free: int = 3
) -> list[Case]:
    """Properties whose threshold is the least margin over dense samples, moved by ``offsets`` of its spread.

    A positive offset makes the property sat, for certain, at the best sample; under a negative one that sample
    misses the unsafe set by as much, and who says what is right is for the methods to agree on.

    Args:
        rng: of boxes, properties and samples.
        networks: piecewise linear or smooth.
        offsets: relative to the spread of the margin over the samples.
        boxes: per network; all but ``free`` inputs of each are fixed.
        free: number of inputs with a width.
    """
    cases = []
    for network, which in itertools.product(networks, range(boxes)):
        center = rng.normal(size=network.input_size) * 0.7
        radius = np.where(rng.permutation(network.input_size) < free, rng.uniform(0.05, 0.6), 0)
        lower, upper = (np.float32(center - radius).astype(float), np.float32(center + radius).astype(float))
        x = _samples(rng, lower, upper, 4096)
        with torch.no_grad():
            y = network(torch.from_numpy(x).reshape(-1, *network.input_shape)).flatten(1).numpy()
        shape = [(1,), (2,), (1, 1), (2, 1)][int(rng.integers(4))]
        polytopes = [_rows(rng, network.output_size, size) for size in shape]
        values = [[sum(float(c) * y[:, i] for i, c in row.items()) for row in rows] for rows in polytopes]
        start = [[float(np.quantile(v, rng.uniform(0.05, 0.3))) for v in rows] for rows in values]
        margins = np.min(
            [np.max([v - b for v, b in zip(vs, bs, strict=True)], 0) for vs, bs in zip(values, start, strict=True)], 0
        )
        best, spread = int(margins.argmin()), float(margins.std()) + 1e-6
        for offset in offsets:
            shift = float(margins[best]) + offset * spread
            unsafe = tuple(
                tuple(
                    Row(tuple(row.items()), Fraction(b + shift), bool(rng.random() < 0.3))
                    for row, b in zip(rows, bs, strict=True)
                )
                for rows, bs in zip(polytopes, start, strict=True)
            )
            query = Query(network, Property(Box(lower, upper), unsafe))
            cases.append(Case(f"{network.name} box {which} offset {offset:g}", query, nets.as_fractions(x[best])))
    return cases


def agreement(
    methods: Mapping[str, float],
    *,
    seed: int = 0,
    smooth: bool = False,
    offsets: Sequence[float] = (0.2, 1e-3, 1e-9, -1e-9, -1e-2, -0.4),
    boxes: int = 2,
    report: Report | None = None,
) -> Report:
    """All methods on random networks near the decision boundary, against each other and against samples."""
    rng = np.random.default_rng(seed)
    networks = (nets.smooth if smooth else nets.pieces)(rng, nets.gaussian(rng))
    return ask(boundary_cases(rng, networks, offsets, boxes=boxes), methods, report or Report())


# ---------------------------------------------------------------- boxes of one point


STEPS = (Fraction(0), Fraction(1, 2**45), Fraction(1, 10**12))
"""The margins asked for, with both signs, strict and not."""


def point_cases(rng: np.random.Generator, *, decimal: bool = False) -> list[Case]:
    """Dyadic networks at one point, asked whether they reach half-spaces that end at, just before or behind it.

    Args:
        rng: of networks and points.
        decimal: whether the point's coordinates are k/10, which no float is, instead of k/8.
    """
    cases = []
    for network in nets.pieces(rng, nets.eighths(rng)):
        if any(getattr(node, "slope", None) is not None for node in network.nodes):
            network = Network(
                tuple(n.map_tensors(lambda t: t if t.dim() else torch.tensor(0.25)) for n in network.nodes),
                name=network.name,
            )
        x = [Fraction(int(k), 10 if decimal else 8) for k in rng.integers(-12, 13, size=network.input_size)]
        y = exact_outputs(network, x)
        box = Box.exact(x, x)
        for step, sign, strict in itertools.product(STEPS, (1, -1), (False, True)):
            if sign < 0 and not step:
                continue
            # The first row decides, the second of a conjunction holds widely; the second polytope is out of reach.
            row, wide, far = (_rows(rng, network.output_size, 1)[0] for _ in range(3))
            value, broad, distant = (sum(c * y[i] for i, c in r.items()) for r in (row, wide, far))
            unsafe: list[Polytope] = [(Row(tuple(row.items()), value - sign * step, strict),)]
            if rng.random() < 0.5:
                unsafe[0] = (Row(tuple(wide.items()), broad + 1), *unsafe[0])
            if rng.random() < 0.5:
                unsafe.insert(int(rng.integers(2)), (Row(tuple(far.items()), distant - 1),))
            name = f"{network.name} at a point, margin {float(sign * step):g}{' strict' * strict}"
            cases.append(Case(name, Query(network, Property(box, tuple(unsafe))), tuple(x)))
    return cases


def points(
    methods: Mapping[str, float], *, seed: int = 0, decimal: bool = False, report: Report | None = None
) -> Report:
    """All methods where exact arithmetic knows the answer: a box of one point, margins 0 and ± next to nothing."""
    return ask(point_cases(np.random.default_rng(seed), decimal=decimal), methods, report or Report())


# ---------------------------------------------------------------- planted at the boundary


def boundary(
    methods: Mapping[str, float],
    *,
    seed: int = 0,
    count: int = 56,
    kinds: Sequence[str] = tuple(KINDS),
    report: Report | None = None,
) -> Report:
    """Counterexamples at the boundary of the unsafe set, at all scales, which no method may deny."""
    return ask(cases(seed, count, kinds), methods, report or Report())


# ---------------------------------------------------------------- planted witnesses


def planted_cases(rng: np.random.Generator, sizes: Sequence[int] = (3, 6)) -> list[Case]:
    """Networks that hide one counterexample: inside or in a corner, deep, shallow, or touching the border exactly."""
    cases = []
    for n, front in itertools.product(sizes, ("plain", "scale", "conv", "residual")):
        for depth, corner, decoys in ((0.0, False, 0), (2**-12, True, 3), (0.5, False, 4)):
            point = nets.dyadic(rng, n, 20)
            lower, upper = point - rng.integers(1, 33, size=n) / 64, point + rng.integers(1, 33, size=n) / 64
            if corner:
                side = rng.random(n) < 0.5
                lower, upper = np.where(side, point, lower), np.where(side, upper, point)
            radius = 2.0**-6 if depth else 2.0**-4
            network = nets.needle(rng, point, radius, 1 + depth, decoys=decoys, front=front)
            prop = Property(Box(lower, upper), ((Row(((0, Fraction(1)),), Fraction(0)),),))
            where = "in a corner" if corner else "inside"
            name = f"{network.name}, {n} inputs, depth {depth:g} {where}"
            cases.append(Case(name, Query(network, prop), nets.as_fractions(point)))
    return cases


def planted(
    methods: Mapping[str, float], *, seed: int = 0, sizes: Sequence[int] = (3, 6), report: Report | None = None
) -> Report:
    """No method may deny a counterexample that is there by construction, whatever its budget."""
    return ask(planted_cases(np.random.default_rng(seed), sizes), methods, report or Report())


# ---------------------------------------------------------------- exact values at corners


def _active(network: Network, reach: float) -> Network:
    """The network with biases so large that every neuron is active on inputs of magnitude ≤ reach."""
    nodes, bound = [], reach
    for node in network.nodes:
        if isinstance(node, Linear):
            span = float(node.weight.abs().sum(1).max()) * bound
            node = Linear(
                name=node.name,
                inputs=node.inputs,
                shape=node.shape,
                weight=node.weight,
                bias=torch.full_like(node.bias, 1.25 * span),
            )
            bound = 2.5 * span
        nodes.append(node)
    return Network(tuple(nodes), name=f"{network.name}-active")


def corner_networks(rng: np.random.Generator, smooth: bool) -> list[Network]:
    """Networks whose bounds are attained at corners, so that nothing but rounding is between them, and others."""
    if smooth:
        return nets.smooth(rng, nets.gaussian(rng))
    # First those in which most of what is computed for images alone shows.
    images = [
        *(nets.image(rng, nets.uneven(rng, spread)) for spread in (0, 0, 3, 10)),
        *(nets.windows(rng, nets.uneven(rng, spread)) for spread in (0, 2)),
    ]
    uneven = nets.uneven(rng)
    pieces = [
        *nets.pieces(rng, uneven),
        *nets.pieces(rng, nets.uneven(rng, 3)),
        *nets.pieces(rng, nets.uneven(rng, 6, positive=True)),
        *(_active(nets.mlp(rng, nets.uneven(rng, spread), widths=(4, 6, 5, 3)), 4.0) for spread in (1, 4, 10)),
        nets.mlp(rng, uneven, widths=(4, 5)),
    ]
    return [
        *images,
        *(nets.opposed(rng, nets.uneven(rng, 0), *of) for of in itertools.product((False, True), repeat=2)),
        *pieces,
        nets.mlp(rng, nets.uneven(rng, 0), widths=(24, 12)),
        *(nets.maxima(rng, nets.uneven(rng, spread)) for spread in (0, 3)),
        *(nets.extremes(rng, nets.uneven(rng, spread)) for spread in (0, 3)),
    ]


Ends = Sequence[tuple[Fraction, Fraction]]
"""The lower and upper bound of each input of a box."""


def _corner_boxes(rng: np.random.Generator, size: int) -> list[Ends]:
    """Boxes of very different widths, one of decimals, one a single point; all but three inputs of each are fixed."""
    boxes: list[Ends] = []
    for magnitude in (1.0, 2.0**-20, 0.0):
        center = rng.uniform(-2, 2, size=size) * 2.0 ** rng.integers(-8, 1, size=size)
        radius = np.where(rng.permutation(size) < 3, magnitude * rng.random(size), 0)
        boxes.append(
            [(Fraction(low), Fraction(high)) for low, high in zip(center - radius, center + radius, strict=True)]
        )
    middle = [Fraction(int(k), 10) for k in rng.integers(-20, 21, size=size)]
    reach = [Fraction(int(k), 1000) for k in np.where(rng.permutation(size) < 3, rng.integers(1, 100, size=size), 0)]
    boxes.append([(m - r, m + r) for m, r in zip(middle, reach, strict=True)])
    return boxes


def _corners_of(rng: np.random.Generator, ends: Ends) -> list[list[Fraction]]:
    """All corners of a box and a few points inside it, exactly."""
    free = [i for i, (low, high) in enumerate(ends) if low < high]
    sides = [list(side) for side in itertools.product((Fraction(0), Fraction(1)), repeat=len(free))]
    sides += [[Fraction(float(t)) for t in rng.random(len(free))] for _ in range(4 if free else 0)]
    points = []
    for side in sides:
        point = [low for low, _ in ends]
        for i, t in zip(free, side, strict=True):
            point[i] += t * (ends[i][1] - ends[i][0])
        points.append(point)
    return points


class _Known:
    """Exact values of one node at one point, against which bounds are held.

    Most bounds are told by their float64 numbers alone: a bound that lies beyond the float64 number next to the
    nearest one of the exact value is on the right side of the exact value, too. Only the others are compared exactly.
    """

    def __init__(self, exact: np.ndarray, doubt: float) -> None:
        self.exact, self.doubt = exact.reshape(-1), doubt
        nearest = self.exact.astype(float)
        self.below, self.above = np.nextafter(nearest, -np.inf), np.nextafter(nearest, np.inf)

    def hold(self, report: Report, where: str, lower: np.ndarray, upper: np.ndarray | float = np.inf) -> None:
        """Note each neuron whose exact value is outside its bounds, by more than its own evaluation may be off."""
        upper = np.broadcast_to(upper, lower.shape)
        for i in np.flatnonzero(~((lower < self.below) & (upper > self.above))):
            low, value, high = float(lower[i]), self.exact[i], float(upper[i])
            slack = Fraction(self.doubt) * (1 + abs(value)) if self.doubt else 0
            if not low <= value + slack or not high >= value - slack:
                report.note(where, f"neuron {i}: [{low!r}, {high!r}] without {float(value)!r}")


def _flat(bounds: torch.Tensor) -> np.ndarray:
    """Bounds of a batch of boxes as float64 numbers, a row for each box."""
    return bounds.double().flatten(1).numpy()


@dataclass(frozen=True)
class _Question:
    """The boxes of one network, the rows asked about its outputs, and what exact arithmetic knows of both.

    Attributes:
        boxes: of the network's inputs.
        matrix: (rows, outputs), the linear forms of the outputs.
        values: the exact values for each box, point and node.
        forms: those of the linear forms for each box and point.
    """

    boxes: list[Ends]
    matrix: torch.Tensor
    values: list[list[list[_Known]]]
    forms: list[list[_Known]]


@cache
def _question(seed: int, smooth: bool, number: int) -> _Question:
    """What is asked of a network of a seed.

    Exact values take longest and are the same for each fault, so they are kept. Networks and boxes are made anew for
    each fault: they carry what the library has computed for them.
    """
    rng = np.random.default_rng([seed, number])
    network = corner_networks(np.random.default_rng(seed), smooth)[number]
    boxes = _corner_boxes(rng, network.input_size)
    outputs = network.output_size
    rows = [[float(10 * row.get(i, 0)) for i in range(outputs)] for row in _rows(rng, outputs, 4)]
    matrix = torch.cat([torch.eye(outputs), -torch.eye(outputs), torch.tensor(rows)]).double()
    exact_matrix = rational(matrix, matrix.shape)
    doubt = 0.0 if network.piecewise_linear else 10.0 ** (5 - DIGITS)
    found = _Question(boxes, matrix, [], [])
    for box in boxes:
        values = [exact_values(network, point) for point in _corners_of(rng, box)]
        found.values.append([[_Known(value, doubt) for value in at] for at in values])
        found.forms.append([_Known(exact_matrix @ at[-1].reshape(-1), doubt) for at in values])
    return found


def corners(*, seed: int = 0, smooth: bool = False, tuning: Tuning = TUNING, report: Report | None = None) -> Report:
    """No bound of any node, pre-activation or linear form of the outputs may exclude its exact value at a corner."""
    report = report or Report()
    networks = corner_networks(np.random.default_rng(seed), smooth)
    for number, network in report.of(enumerate(networks)):
        asked = _question(seed, smooth, number)
        boxes = [Box.exact(*zip(*ends, strict=True)) for ends in asked.boxes]
        properties = [Property(box, ()) for box in boxes]
        for dtype in (torch.float64, torch.float32):
            net, box = network.to(dtype), input_box(properties, network, dtype)
            with torch.no_grad():
                pre = preactivation_bounds(net, box, tuning=tuning)
                sample = torch.arange(len(boxes)).repeat_interleave(len(asked.matrix))
                every = asked.matrix.repeat(len(boxes), 1)
                linear = {
                    name: linear_lower_bounds(net, box, pre, every, sample, intervals=intervals, tuning=tuning)
                    for name, intervals in (("crown", False), ("ibp", True))
                }
                found = [
                    (f"interval of node {index}", index, _flat(bound.lower), _flat(bound.upper))
                    for index, bound in enumerate(interval_bounds(net, box))
                ]
            found += [
                (f"pre-activation of node {index}", network.nodes[index].inputs[0], _flat(b.lower), _flat(b.upper))
                for index, b in pre.items()
            ]
            for which, (values, forms) in enumerate(zip(asked.values, asked.forms, strict=True)):
                place = f"{network.name}, box {which}, {dtype}".replace("torch.", "")
                for what, index, low, high in found:
                    for at in values:
                        at[index].hold(report, f"{place}: {what}", low[which], high[which])
                for name, lows in linear.items():
                    for form in forms:
                        low = _flat(lows.reshape(len(boxes), -1))[which]
                        form.hold(report, f"{place}: {name} of the outputs", low)
    return report
