"""The five kinds of soundness test, as functions that return what they found.

Each takes the methods to ask, with the seconds they have for a case, and the report to write to.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

import numpy as np
import torch

from tests.support import nets
from tests.support.exact import DIGITS, exact_outputs, exact_values
from verifiable_relu.bounds import input_box, interval_bounds, linear_lower_bounds, preactivation_bounds
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
    report: Report | None = None,
) -> Report:
    """All methods on random networks near the decision boundary, against each other and against samples."""
    rng = np.random.default_rng(seed)
    networks = (nets.smooth if smooth else nets.pieces)(rng, nets.gaussian(rng))
    return ask(boundary_cases(rng, networks, offsets), methods, report or Report())


# ---------------------------------------------------------------- boxes of one point


STEPS = (Fraction(0), Fraction(1, 2**20), Fraction(1, 2**45), Fraction(1, 10**12))
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
    return ask(list(cases(seed, count, kinds)), methods, report or Report())


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
    uneven = nets.uneven(rng)
    return [
        *nets.pieces(rng, uneven),
        *nets.pieces(rng, nets.uneven(rng, 3)),
        *nets.pieces(rng, nets.uneven(rng, 6, positive=True)),
        *(_active(nets.mlp(rng, nets.uneven(rng, spread), widths=(4, 6, 5, 3)), 4.0) for spread in (1, 4, 10)),
        nets.mlp(rng, uneven, widths=(4, 5)),
        *(nets.image(rng, nets.uneven(rng, spread)) for spread in (0, 3, 10)),
        *(nets.opposed(rng, nets.uneven(rng, 0), *of) for of in itertools.product((False, True), repeat=2)),
        nets.mlp(rng, nets.uneven(rng, 0), widths=(24, 12)),
    ]


def _corner_boxes(rng: np.random.Generator, size: int) -> list[Box]:
    """Boxes of very different widths, one of decimals, one a single point; all but three inputs of each are fixed."""
    boxes = []
    for magnitude in (1.0, 2.0**-20, 0.0):
        center = rng.uniform(-2, 2, size=size) * 2.0 ** rng.integers(-8, 1, size=size)
        radius = np.where(rng.permutation(size) < 3, magnitude * rng.random(size), 0)
        boxes.append(Box(center - radius, center + radius))
    middle = [Fraction(int(k), 10) for k in rng.integers(-20, 21, size=size)]
    reach = [Fraction(int(k), 1000) for k in np.where(rng.permutation(size) < 3, rng.integers(1, 100, size=size), 0)]
    ends = [(m - r, m + r) for m, r in zip(middle, reach, strict=True)]
    boxes.append(Box.exact([low for low, _ in ends], [high for _, high in ends]))
    return boxes


def _corners_of(rng: np.random.Generator, box: Box) -> list[list[Fraction]]:
    """All corners of a box and a few points inside it, exactly."""
    ends = [box.bounds(i) for i in range(box.size)]
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


def _hold(report: Report, where: str, low: torch.Tensor, high: torch.Tensor, value: np.ndarray, doubt: float) -> None:
    lows, highs = (t.double().numpy().reshape(-1) for t in (low, high))
    for i, v in enumerate(value.reshape(-1)):
        slack = Fraction(doubt) * (1 + abs(v)) if doubt else 0
        if not (lows[i] <= v + slack and highs[i] >= v - slack):
            report.note(where, f"neuron {i}: [{lows[i]!r}, {highs[i]!r}] without {float(v)!r}")


def corners(*, seed: int = 0, smooth: bool = False, report: Report | None = None) -> Report:
    """No bound of any node, pre-activation or linear form of the outputs may exclude its exact value at a corner."""
    rng, report = np.random.default_rng(seed), report or Report()
    for network in corner_networks(rng, smooth):
        boxes = _corner_boxes(rng, network.input_size)
        properties = [Property(box, ()) for box in boxes]
        outputs = network.output_size
        rows = _rows(rng, outputs, 4)
        matrix = torch.eye(outputs).double()
        matrix = torch.cat(
            [
                matrix,
                -matrix,
                torch.tensor(
                    [[float(10 * row.get(i, 0)) for i in range(outputs)] for row in rows], dtype=torch.float64
                ),
            ]
        )
        exact_matrix = np.vectorize(lambda v: Fraction(float(v)), otypes=[object])(matrix.numpy())
        known = [[exact_values(network, point) for point in _corners_of(rng, box)] for box in boxes]
        doubt = 0.0 if network.piecewise_linear else 10.0 ** (5 - DIGITS)
        for dtype in (torch.float64, torch.float32):
            net, box = network.to(dtype), input_box(properties, network, dtype)
            with torch.no_grad():
                interval = interval_bounds(net, box)
                pre = preactivation_bounds(net, box)
                sample = torch.arange(len(boxes)).repeat_interleave(len(matrix))
                every = matrix.repeat(len(boxes), 1)
                linear = {
                    name: linear_lower_bounds(net, box, pre, every, sample, intervals=intervals).reshape(len(boxes), -1)
                    for name, intervals in (("crown", False), ("ibp", True))
                }
            for b, sampled in enumerate(known):
                for values in sampled:
                    place = f"{network.name}, box {b}, {dtype}".replace("torch.", "")
                    for index, bound in enumerate(interval):
                        _hold(
                            report,
                            f"{place}: interval of node {index}",
                            bound.lower[b],
                            bound.upper[b],
                            values[index],
                            doubt,
                        )
                    for index, bound in pre.items():
                        _hold(
                            report,
                            f"{place}: pre-activation of node {index}",
                            bound.lower[b],
                            bound.upper[b],
                            values[network.nodes[index].inputs[0]],
                            doubt,
                        )
                    y = exact_matrix @ values[-1].reshape(-1)
                    for name, lows in linear.items():
                        _hold(
                            report,
                            f"{place}: {name} of the outputs",
                            lows[b],
                            torch.full_like(lows[b], torch.inf),
                            y,
                            doubt,
                        )
    return report
