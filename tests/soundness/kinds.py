"""The kinds of soundness test, as functions that report what they found.

Each takes the methods to ask, with the seconds they have for a case, and the report to write to.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache

import numpy as np
import torch
from torch import Tensor

from tests.support import nets
from tests.support.exact import DIGITS, exact_outputs, exact_values
from verifiable_relu.bounds.backward import Relaxation
from verifiable_relu.bounds.linear_bounds import bound_by_crown, lower_of_rows
from verifiable_relu.bounds.zonotopes import Zonotopes
from verifiable_relu.ir.functions.piecewise_linear import PiecewiseLinear
from verifiable_relu.ir.network import Network
from verifiable_relu.ir.transform import NetworkPart, combine, without_repeated
from verifiable_relu.search.property_rows import input_box
from verifiable_relu.spec.property import Box, Polytope, Property, Query, Row

from .boundary import KINDS, cases
from .judge import Case, Report, ask

# Agreement near the decision boundary


def samples(rng: np.random.Generator, box: Box, count: int) -> np.ndarray:
    """Points of a box, half of them with many coordinates at its faces, the first ones corners."""
    unit = rng.random((count, box.size))
    faces = unit[: count // 2]
    unit[: count // 2] = np.where(rng.random(faces.shape) < rng.random((len(faces), 1)), faces.round(), faces)
    unit[:64] = unit[:64].round()
    return np.clip(box.lower + unit * (box.upper - box.lower), box.lower, box.upper)


def low_points(rng: np.random.Generator, network: Network, box: Box, row: Tensor, count: int = 6) -> np.ndarray:
    """Points of a box, (count, inputs): those at which row·y is least of a few hundred, and two others."""
    x = samples(rng, box, 300)
    y = network(torch.from_numpy(x)) @ row
    return x[np.concatenate([y.argsort()[: count - 2], rng.integers(0, len(x), 2)])]


def _rows(rng: np.random.Generator, outputs: int, count: int) -> list[dict[int, Fraction]]:
    """Coefficients with one decimal, as property files have them."""
    rows: list[dict[int, Fraction]] = []
    while len(rows) < count:
        row = {i: Fraction(int(c), 10) for i in range(outputs) if (c := rng.integers(-20, 21))}
        rows += [row] if row else []
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
    made = []
    for network, which in itertools.product(networks, range(boxes)):
        center = rng.normal(size=network.input_size) * 0.7
        radius = np.where(rng.permutation(network.input_size) < free, rng.uniform(0.05, 0.6), 0)
        box = Box(*(np.float32(center + sign * radius).astype(float) for sign in (-1, 1)))
        x = samples(rng, box, 4096)
        y = network(torch.from_numpy(x)).numpy()
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
            query = Query(network, Property(box, unsafe))
            made.append(Case(f"{network.name} box {which} offset {offset:g}", query, nets.as_fractions(x[best])))
    return made


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


# Boxes of one point

STEPS = (Fraction(0), Fraction(1, 2**45), Fraction(1, 10**12))
"""The margins asked for, with both signs, strict and not."""


def point_cases(rng: np.random.Generator, *, decimal: bool = False) -> list[Case]:
    """Dyadic networks at one point, asked whether they reach half-spaces that end at, just before or behind it.

    Args:
        rng: of networks and points.
        decimal: whether the point's coordinates are k/10, which no float is, instead of k/8.
    """
    made = []
    for network in nets.pieces(rng, nets.eighths(rng)):
        network = nets.with_functions(
            network, lambda f, _: f if f.kind == "Relu" or f.slope_below.ndim else PiecewiseLinear(torch.tensor(0.25))
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
            made.append(Case(name, Query(network, Property(box, tuple(unsafe))), tuple(x)))
    return made


def points(
    methods: Mapping[str, float], *, seed: int = 0, decimal: bool = False, report: Report | None = None
) -> Report:
    """All methods where exact arithmetic knows the answer: a box of one point, margins 0 and ± next to nothing."""
    return ask(point_cases(np.random.default_rng(seed), decimal=decimal), methods, report or Report())


# Planted counterexamples


def boundary(
    methods: Mapping[str, float],
    *,
    seed: int = 0,
    count: int = 56,
    kinds: Sequence[str] = KINDS,
    report: Report | None = None,
) -> Report:
    """Counterexamples at the boundary of the unsafe set, at all scales, which no method may deny."""
    return ask(cases(seed, count, kinds), methods, report or Report())


def planted_cases(rng: np.random.Generator, sizes: Sequence[int] = (3, 6)) -> list[Case]:
    """Networks that hide one counterexample: inside or in a corner, deep, shallow, or touching the border exactly."""
    made = []
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
            name = f"{network.name}, {n} inputs, depth {depth:g} {'in a corner' if corner else 'inside'}"
            made.append(Case(name, Query(network, prop), nets.as_fractions(point)))
    return made


def planted(
    methods: Mapping[str, float], *, seed: int = 0, sizes: Sequence[int] = (3, 6), report: Report | None = None
) -> Report:
    """No method may deny a counterexample that is there by construction, whatever its budget."""
    return ask(planted_cases(np.random.default_rng(seed), sizes), methods, report or Report())


# Exact values at corners


def _copied(rng: np.random.Generator, rows: Tensor) -> Tensor:
    """The rows, most of them replaced by copies of others: the same, negated, scaled, zero, or nearly the same."""
    rows = rows.clone()
    for target in range(len(rows)):
        source, kind = int(rng.integers(len(rows))), rng.random()
        copy = rows[source].clone()
        if kind < 0.15:
            continue
        if kind < 0.4:
            copy = -copy if kind > 0.2 else torch.zeros_like(copy)
        elif kind < 0.5:
            copy = 2 * copy
        elif kind < 0.7:
            at = int(rng.integers(len(copy)))
            copy[at] = torch.nextafter(copy[at], copy.new_tensor(float(rng.choice([-np.inf, np.inf]))))
        elif kind < 0.75:
            copy[-1] = -copy[-1]
        rows[target] = copy
    return rows


def copies(rng: np.random.Generator) -> Network:
    """A fully connected network in which neurons repeat and mirror others, exactly or nearly."""
    dyadic, chain = rng.random() < 0.4, nets.Chain(2)
    draw = nets.eighths(rng) if dyadic else nets.uneven(rng, int(rng.choice([0, 12, 45])))
    dtype = torch.float64 if rng.random() < 0.5 else torch.float32
    layers = int(rng.integers(2, 5))
    for layer in range(layers):
        fan, out = chain.last.size, int(rng.integers(2, 7))
        rows = torch.cat([draw((out, fan), fan), draw((out, 1), 4)], 1).to(dtype)
        if not dyadic:
            # Float64 weights have as many bits as they can.
            rows *= 1 + torch.from_numpy(rng.uniform(size=rows.shape) * 2.0**-24).to(dtype)
        rows = _copied(rng, rows)
        chain.linear(rows[:, :-1].contiguous(), rows[:, -1].contiguous())
        if rng.random() < (0.5 if layer == layers - 1 else 0.7):
            chain.act()
    return chain.network(f"copies-{layers}")


def pair(rng: np.random.Generator, kind: str, share: float) -> Network:
    """The difference of two networks of the same inputs, whose weights differ by a share of themselves."""
    first = nets.mlp(rng, nets.gaussian(rng), kind)
    parts = [NetworkPart(name, net, range(3)) for name, net in (("f", first), ("g", nets.changed(first, share)))]
    return combine(parts, 3, lambda network, x: network(torch.from_numpy(x)[None])[0].numpy())


def corner_networks(rng: np.random.Generator, smooth: bool) -> list[Network]:
    """Networks whose bounds are attained at corners, so that nothing but rounding is between them, and others."""
    if smooth:
        pairs = [pair(rng, kind, share) for kind in ("Tanh", "GELU") for share in (1e-3, 1.0)]
        return [*nets.smooth(rng, nets.gaussian(rng)), *(nets.mixed(rng, kind) for kind in nets.SMOOTH), *pairs]
    uneven = [nets.uneven(rng, spread) for spread in (0, 3, 10)]
    return [
        *(nets.image(rng, draw) for draw in uneven),
        *(nets.windows(rng, draw) for draw in uneven),
        *(nets.opposed(rng, uneven[0], *of) for of in itertools.product((False, True), repeat=2)),
        *nets.pieces(rng, uneven[2]),
        *nets.pieces(rng, uneven[1]),
        *nets.pieces(rng, nets.uneven(rng, 6, positive=True)),
        nets.mlp(rng, uneven[2], widths=(4, 5)),
        nets.mlp(rng, uneven[0], widths=(24, 12)),
        *(make(rng, draw) for make in (nets.maxima, nets.extremes, nets.polynomials) for draw in uneven[:2]),
        *(pair(rng, "LeakyRelu", share) for share in (0.0, 1e-6, 1.0)),
        *(copies(rng) for _ in range(8)),
    ]


Ends = Sequence[tuple[Fraction, Fraction]]
"""The lower and upper bound of each input of a box."""


def _corner_boxes(rng: np.random.Generator, size: int) -> list[Ends]:
    """Boxes of very different widths, one of decimals, one a single point; all but three inputs of each are fixed."""
    boxes: list[Ends] = []
    for magnitude in (1.0, 2.0**-20, 0.0):
        center = rng.uniform(-2, 2, size=size) * 2.0 ** rng.integers(-8, 1, size=size)
        radius = np.where(rng.permutation(size) < 3, magnitude * rng.random(size), 0)
        boxes.append([(Fraction(a), Fraction(b)) for a, b in zip(center - radius, center + radius, strict=True)])
    middle = [Fraction(int(k), 10) for k in rng.integers(-20, 21, size=size)]
    reach = [Fraction(int(k), 1000) for k in np.where(rng.permutation(size) < 3, rng.integers(1, 100, size=size), 0)]
    boxes.append([(m - r, m + r) for m, r in zip(middle, reach, strict=True)])
    return boxes


def _corners_of(rng: np.random.Generator, ends: Ends) -> Iterator[list[Fraction]]:
    """All corners of a box and two points inside it, exactly."""
    free = [i for i, (low, high) in enumerate(ends) if low < high]
    sides = [list(side) for side in itertools.product((Fraction(0), Fraction(1)), repeat=len(free))]
    sides += [[Fraction(float(t)) for t in rng.random(len(free))] for _ in range(2 if free else 0)]
    for side in sides:
        point = [low for low, _ in ends]
        for i, t in zip(free, side, strict=True):
            point[i] += t * (ends[i][1] - ends[i][0])
        yield point


class _Known:
    """Exact values of one op at one point, against which bounds are held.

    Most bounds are told by their float64 numbers alone: a bound that lies beyond the float64 number next to the
    nearest one of the exact value is on the right side of the exact value, too. Only the others are compared exactly.
    """

    def __init__(self, exact: np.ndarray, doubt: float) -> None:
        self.exact, self.doubt = exact, doubt
        nearest = exact.astype(float)
        self.below, self.above = np.nextafter(nearest, -np.inf), np.nextafter(nearest, np.inf)

    def hold(self, report: Report, where: str, lower: Tensor, upper: Tensor | None = None) -> None:
        """Note each neuron whose exact value is outside its bounds, by more than its own evaluation may be off."""
        low_ends = lower.double().numpy()
        high_ends = np.full_like(low_ends, np.inf) if upper is None else upper.double().numpy()
        for i in np.flatnonzero(~((low_ends < self.below) & (high_ends > self.above))):
            low, value, high = float(low_ends[i]), self.exact[i], float(high_ends[i])
            slack = Fraction(self.doubt) * (1 + abs(value)) if self.doubt else 0
            # What is not a number says nothing.
            if low > value + slack or high < value - slack:
                report.note(where, f"neuron {i}: [{low!r}, {high!r}] without {float(value)!r}")


@cache
def _question(seed: int, smooth: bool, number: int) -> tuple[Network, list[Ends], Tensor, list[list[list[_Known]]]]:
    """A network, boxes, rows of its outputs, and the exact values of ops, and last of the rows, by box and point."""
    network = corner_networks(np.random.default_rng(seed), smooth)[number]
    rng = np.random.default_rng([seed, number])
    boxes, doubt = _corner_boxes(rng, network.input_size), 10.0 ** (5 - DIGITS) if smooth else 0.0
    matrix = rng.integers(-3, 4, size=(4, network.output_size)).astype(float)
    values = []
    for ends in boxes:
        at = [exact_values(network, x) for x in _corners_of(rng, ends)]
        exactly = np.vectorize(Fraction, otypes=[object])(matrix)
        values.append([[_Known(v, doubt) for v in (*each, exactly @ each[-1])] for each in at])
    return network, boxes, torch.from_numpy(matrix), values


@torch.no_grad()
def corners(*, seed: int = 0, smooth: bool = False, report: Report | None = None) -> Report:
    """No bound of any op, by rows, forms or intervals, and of rows of the outputs may exclude an exact value."""
    report = report or Report()
    count = len(corner_networks(np.random.default_rng(seed), smooth))
    for number in report.of(range(count)):
        network, boxes, matrix, values = _question(seed, smooth, number)
        properties = [Property(Box.exact(*zip(*ends, strict=True)), ()) for ends in boxes]
        box = input_box(properties, torch.float64, "cpu")
        for dtype in (torch.float64, torch.float32):
            where = f"{network.name}, {dtype}".replace("torch.", "")
            found = [(f"{where}, intervals", _held(Relaxation(network, box, dtype=dtype).advance()), None)]
            relaxation = bound_by_crown(Relaxation(network, box, dtype=dtype))
            lower = lower_of_rows(relaxation, matrix.repeat(len(boxes), 1))[0].view(len(boxes), -1)
            found.append((f"{where}, rows", _held(relaxation), lower))
            forms = Zonotopes(network, box, (box.lower < box.upper).any(0).nonzero().squeeze(1), dtype=dtype)
            ends = {**forms.inputs, len(network.ops) - 1: forms.output.interval()}
            rows = forms.rows(matrix.repeat(len(boxes), 1, 1)).lower
            found.append((f"{where}, affine forms", [(i, x.lower, x.upper) for i, x in ends.items()], rows))
            for (place, held, low), (which, at) in itertools.product(found, enumerate(values)):
                for known in at:
                    for index, lows, highs in held:
                        known[index].hold(report, f"{place} of op {index}, box {which}", lows[which], highs[which])
                    if low is not None:
                        known[-1].hold(report, f"{place} of the outputs, box {which}", low[which])
        smaller = without_repeated(network)
        if smaller is not network:
            for x in itertools.chain(*(_corners_of(np.random.default_rng(0), ends) for ends in boxes)):
                if exact_outputs(smaller, x) != exact_outputs(network, x):
                    report.note(network.name, "another function without repeated neurons")
    return report


def _held(relaxation: Relaxation) -> list[tuple[int, Tensor, Tensor]]:
    return [(i, x.interval.lower, x.interval.upper) for i, x in enumerate(relaxation.bounds)]
