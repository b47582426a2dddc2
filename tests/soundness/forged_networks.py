"""Networks whose certificates are forged: how they are drawn, written as ONNX, scaled, and minimised.

A network is drawn as steps on one or two inputs, at ordinary scales. Its *plain* file is for verifiers. The *spoken*
file, of which the certificate speaks, has the same function up to powers of two: inputs, hidden values and outputs are
scaled, and factors are spread over chains of products, quotients and normalisations whose parts are as large or as
small as the file's numbers can be; scalars have any rank, and values are reshaped and permuted between layers.

The least value of an output over the box is found at the corners of the pieces on which a piecewise-linear network is
affine, in rational arithmetic, and elsewhere by search, at points at which ``onnx_exact`` knows the network's value.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from scipy import special

from tests.soundness import onnx_exact, page_checker

Vector = list[Fraction]

KINDS = ("curve", "family", "maxpool", "conv", "residual", "large", "denormal", "norm", "ranks")


@dataclass(frozen=True, eq=False)
class Affine:
    weight: np.ndarray
    bias: np.ndarray


@dataclass(frozen=True, eq=False)
class Act:
    """relu, leaky, abs, sigmoid, tanh, gelu (the operator), or spelled (x·(1 + erf(k·x))/2)."""

    kind: str
    parameter: float = 0.0


@dataclass(frozen=True, eq=False)
class Pool:
    shape: tuple[int, int]
    kernel: tuple[int, int]
    pads: tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class Conv:
    weight: np.ndarray
    bias: np.ndarray
    shape: tuple[int, int, int]
    pads: tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class Skip:
    """The value behind an earlier step is added."""

    step: int


@dataclass(frozen=True, eq=False)
class Norm:
    gamma: np.ndarray
    beta: np.ndarray
    mean: np.ndarray
    variance: np.ndarray


Step = Affine | Act | Pool | Conv | Skip | Norm


@dataclass(frozen=True)
class Scales:
    """Powers of two by which inputs, hidden values and outputs are larger in the spoken file."""

    inputs: int = 0
    hidden: int = 0
    outputs: int = 0


@dataclass(eq=False)
class Net:
    """A drawn network over a box, and one row c of outputs.

    Attributes:
        style: of the spoken file, a seed.
        double: whether the spoken file has numbers of type double.
        joint: of a family the least λ of each activation.
    """

    kind: str
    steps: list[Step]
    lower: Vector
    upper: Vector
    row: list[int]
    scales: Scales
    style: int
    double: bool
    joint: list[Fraction] = field(default_factory=list)

    @cached_property
    def plain(self) -> bytes:
        return written(self.steps, len(self.lower))[0]

    @cached_property
    def spoken(self) -> bytes:
        return self.member(())[0]

    def member(self, kinds: Sequence[Act]) -> tuple[bytes, list[str]]:
        """The spoken file with other activations, and the names of their inputs; no name for a MaxPool's."""
        others = iter(kinds)
        steps = [next(others, step) if isinstance(step, Act) else step for step in self.steps]
        if self.scales == Scales() and self.kind not in ("ranks", "norm"):
            return written(steps, len(self.lower))
        return written(steps, len(self.lower), self.scales, random.Random(self.style), self.double)

    @property
    def linear(self) -> bool:
        """Whether the network is piecewise linear, and no family."""
        smooth = any(isinstance(s, Act) and s.kind in ("sigmoid", "tanh", "gelu", "spelled") for s in self.steps)
        return not smooth and not self.joint and not any(isinstance(s, Norm) for s in self.steps)


# ---------------------------------------------------------------------------------------------------------- drawing


def drawn(kind: str, seed: int) -> Net:
    """The network of a number."""
    rng = random.Random(f"{kind} {seed}")

    def short(most: int = 8) -> float:
        return rng.randint(-most, most) / rng.choice([1, 2, 4, 8])

    def affine(before: int, after: int) -> Affine:
        weight = np.array([[short() or 1.0 for _ in range(before)] for _ in range(after)])
        return Affine(weight, np.array([short() for _ in range(after)]))

    def act() -> Act:
        linear = [Act("relu"), Act("relu"), Act("leaky", rng.choice([0.25, 1.25, -0.25])), Act("abs")]
        curves = [Act("sigmoid"), Act("tanh"), Act("gelu"), Act("spelled", rng.choice([0.5, 0.75, 1.0, 3.0]))]
        if kind == "curve" or (kind in ("large", "denormal", "norm", "ranks") and rng.random() < 0.6):
            return rng.choice(curves if rng.random() < 0.6 else curves[3:])
        return rng.choice(linear) if kind != "family" else Act("relu")

    inputs, outputs = rng.randint(1, 2), rng.randint(1, 2)
    width = rng.randint(1, 3)
    steps: list[Step] = []
    match kind:
        case "maxpool":
            shape = rng.choice([(1, 2), (2, 2), (2, 3), (1, 3)])
            kernel = (rng.randint(1, shape[0]), rng.randint(2, shape[1]))
            pads = rng.choice([(0, 0, 0, 0), (0, 0, 0, 0), (0, 1, 0, 0), (0, 0, 0, 1)])
            steps = [affine(inputs, shape[0] * shape[1]), Pool(shape, kernel, pads)]
            left = [shape[i] + pads[i] + pads[2 + i] - kernel[i] + 1 for i in range(2)]
            if rng.random() < 0.5:
                steps.append(Act("relu"))
            steps.append(affine(left[0] * left[1], outputs))
        case "conv":
            shape = rng.choice([(1, 2, 2), (2, 1, 2), (1, 2, 3)])
            kernel = (rng.randint(1, shape[1]), 2)
            pads = rng.choice([(0, 0, 0, 0), (0, 1, 0, 0), (0, 0, 0, 1)])
            channels = rng.randint(1, 2)
            weight = np.array([short() or 1.0 for _ in range(channels * shape[0] * kernel[0] * 2)])
            conv = Conv(
                weight.reshape(channels, shape[0], *kernel), np.array([short() for _ in range(channels)]), shape, pads
            )
            left = [shape[1 + i] + pads[i] + pads[2 + i] - kernel[i] + 1 for i in range(2)]
            steps = [affine(inputs, math.prod(shape)), conv, act(), affine(channels * left[0] * left[1], outputs)]
        case "residual":
            steps = [affine(inputs, width), act(), affine(width, width), act(), Skip(1), affine(width, outputs)]
            if rng.random() < 0.4:
                steps = [affine(inputs, width), act(), affine(width, width), Skip(0), act(), affine(width, outputs)]
        case _:
            steps = [affine(inputs, width), act()]
            if rng.random() < 0.35:
                steps += [affine(width, 2), act()]
                width = 2
            steps.append(affine(width, outputs))
            if kind == "norm" and rng.random() < 0.3:
                variance = np.array([rng.choice([0.125, 1.5, 7.0, 2.0**-20]) for _ in range(len(steps[0].bias))])
                others = [np.array([short() for _ in variance]) for _ in range(3)]
                steps.insert(1, Norm(others[0], others[1], others[2], variance))
    center = [Fraction(short()) for _ in range(inputs)]
    radius = [Fraction(rng.choice([0.0, 2.0**-30, 2.0**-8, 0.25, 1.0, 1.0])) for _ in center]
    lower, upper = ([c + s * r for c, r in zip(center, radius, strict=True)] for s in (-1, 1))
    row = [rng.choice([-2, -1, 1, 2]) for _ in range(outputs)]
    double, scales = kind != "denormal" and rng.random() < 0.7, Scales()
    smooth = any(isinstance(s, Act) and s.kind in ("sigmoid", "tanh", "gelu") for s in steps)
    if kind in ("large", "denormal", "norm", "ranks") and not any(isinstance(s, Norm) for s in steps):
        double = double or kind == "large"
        sizes = [0, 30, -30, 300, -300, 450, -450] if double else [0, 20, -20, -60, -120, 60]
        far = [*sizes, 840, -840, -800] if double else [*sizes, -100, -130]
        hidden = 0 if smooth else rng.choice(far)
        scales = Scales(rng.choice(sizes), hidden, rng.choice(far))
        if kind in ("norm", "ranks") and rng.random() < 0.5:
            scales = Scales(rng.choice([0, 1]), 0 if smooth else rng.choice([0, -1, 2]), rng.choice([0, 3]))
    joint = [Fraction(rng.choice([1, 1, 1.5, 4])) for s in steps if isinstance(s, Act)] if kind == "family" else []
    if joint:
        steps = [Act("gelu") if isinstance(s, Act) and rng.random() < 0.3 else s for s in steps]
    return Net(kind, steps, lower, upper, row, scales, rng.randrange(1 << 30), double, joint)


# ---------------------------------------------------------------------------------------------------------- writing


class _Writer:
    """Nodes of a graph; without ``rng`` nothing is spread, scaled or permuted."""

    def __init__(self, rng: random.Random | None, double: bool) -> None:
        self.rng, self.dtype = rng, np.float64 if double else np.float32
        self.nodes: list[onnx.NodeProto] = []
        self.stored: list[onnx.TensorProto] = []

    def number(self, values: Any) -> str:
        """Store numbers, which must not be rounded."""
        made = np.asarray(values, np.float64).astype(self.dtype)
        if not np.array_equal(made.astype(np.float64), np.asarray(values, np.float64)) or not np.isfinite(made).all():
            raise OverflowError("a number that the file cannot hold")
        self.stored.append(numpy_helper.from_array(made, f"c{len(self.stored)}"))
        return self.stored[-1].name

    def shape(self, *sizes: int) -> str:
        self.stored.append(numpy_helper.from_array(np.array(sizes, np.int64), f"c{len(self.stored)}"))
        return self.stored[-1].name

    def node(self, kind: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        output = name or f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    def parts(self, power: int, count: int) -> list[int]:
        """Powers of two whose sum is given."""
        most = 1000 if self.dtype == np.float64 else 120
        least = -1060 if self.dtype == np.float64 else -140
        if self.rng is None or (self.rng.random() < 0.4 and least <= power <= most):
            return [power] if power else []
        for _ in range(50):
            found = [self.rng.randint(least, most) for _ in range(count - 1)]
            if least <= power - sum(found) <= most:
                return [*found, power - sum(found)]
        return self.parts(power, count + 1)

    def scaled(self, x: str, power: int, rank: int = 2) -> str:
        """x·2^power, as a chain of products and quotients by scalars of up to this rank."""
        for part in self.parts(power, 2 if self.rng is None else self.rng.randint(2, 3)):
            ranks = [1] * (0 if self.rng is None else self.rng.randint(0, rank))
            if self.rng is not None and part > -1000 and self.rng.random() < 0.4:
                x = self.node("Div", x, self.number(np.full(ranks, 2.0**-part)))
            else:
                inputs = [x, self.number(np.full(ranks, 2.0**part))]
                x = self.node("Mul", *(inputs if self.rng is None or self.rng.random() < 0.7 else inputs[::-1]))
        return x


def written(
    steps: Sequence[Step], inputs: int, scales: Scales | None = None, rng: random.Random | None = None, double: bool = False
) -> tuple[bytes, list[str]]:
    """An ONNX file, and the names of the activations' inputs."""
    to, scales = _Writer(rng, double), scales or Scales()
    x, power, size = "x", scales.inputs, inputs
    behind: list[str] = []
    z: list[str] = []
    last = max(i for i, step in enumerate(steps) if isinstance(step, Affine))
    order = np.arange(size)
    for at, step in enumerate(steps):
        after = scales.outputs if at == last else scales.hidden
        number = len(z)
        match step:
            case Affine(weight, bias):
                x = _affine(to, x, weight[:, order], bias * 2.0**after, after - power, "y" if at == last else None)
                power, size = after, len(bias)
                order = np.arange(size)
            case Act(kind, parameter):
                z.append(x)
                x = _activation(to, x, kind, parameter, number, power)
                if rng is not None and rng.random() < 0.5 and not any(isinstance(s, Skip) for s in steps):
                    x, order = _moved(to, x, size)
            case Pool(shape, kernel, pads):
                z.append("")
                x = to.node("Reshape", x, to.shape(1, 1, *shape))
                x = to.node("MaxPool", x, name=f"r{number}", kernel_shape=list(kernel), pads=list(pads))
                size = math.prod(shape[i] + pads[i] + pads[2 + i] - kernel[i] + 1 for i in range(2))
                x, order = to.node("Flatten", x), np.arange(size)
            case Conv(weight, bias, shape, pads):
                x = to.node("Reshape", x, to.shape(1, *shape))
                x = to.node("Conv", x, to.number(weight), to.number(bias * 2.0**power), pads=list(pads))
                left = [shape[1 + i] + pads[i] + pads[2 + i] - weight.shape[2 + i] + 1 for i in range(2)]
                size = len(bias) * math.prod(left)
                x, order = to.node("Flatten", x), np.arange(size)
            case Skip(earlier):
                x = to.node("Add", x, behind[earlier])
            case Norm(gamma, beta, mean, variance):
                given = [to.number(part) for part in (gamma, beta, mean, variance)]
                x = to.node("BatchNormalization", x, *given, epsilon=1e-5)
        behind.append(x)
    kind = TensorProto.DOUBLE if double else TensorProto.FLOAT
    infos = [
        helper.make_tensor_value_info("x", kind, [1, inputs]),
        helper.make_tensor_value_info("y", kind, [1, size]),
    ]
    graph = helper.make_graph(to.nodes, "g", infos[:1], infos[1:], to.stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString(), z


def _affine(to: _Writer, x: str, weight: np.ndarray, bias: np.ndarray, power: int, name: str | None) -> str:
    """2^power·(weight·x) + bias."""
    rng = to.rng
    if rng is None:
        return to.node("Gemm", x, to.number(np.ldexp(weight, power)), to.number(bias), name=name, transB=1)
    limits = (-1060, 1000) if to.dtype == np.float64 else (-140, 120)
    way = rng.randrange(4)
    if way == 0 and limits[0] <= power <= limits[1]:
        return to.node("Gemm", x, to.number(np.ldexp(weight, power)), to.number(bias), name=name, transB=1)
    if way <= 2:
        first, *others = to.parts(power, 2) or [0]
        y = to.node("MatMul", x, to.number(np.ldexp(weight.T, first)))
        return to.node("Add", to.scaled(y, sum(others)), to.number(bias), name=name)
    # γ/√var is a power of two, of any size, exactly.
    first, gamma = (to.parts(power, 2) + [0, 0])[:2]
    rest = power - first - gamma
    root = rng.randint(-500, 250) if to.dtype == np.float64 else rng.randint(-60, 40)
    y = to.node("MatMul", x, to.number(np.ldexp(weight.T, first)))
    y = to.scaled(y, rest + root)
    size = len(bias)
    zero, ones = np.zeros(size), np.ones(size)
    given = [np.ldexp(ones, gamma), bias, zero, np.ldexp(ones, 2 * root)]
    return to.node("BatchNormalization", y, *(to.number(part) for part in given), name=name, epsilon=0.0)


def _activation(to: _Writer, x: str, kind: str, parameter: float, number: int, power: int) -> str:
    name = f"r{number}"
    match kind:
        case "relu" | "abs" | "sigmoid" | "tanh" | "gelu":
            operator = {"relu": "Relu", "abs": "Abs", "sigmoid": "Sigmoid", "tanh": "Tanh", "gelu": "Gelu"}[kind]
            return to.node(operator, x, name=name)
        case "leaky":
            return to.node("LeakyRelu", x, name=name, alpha=parameter)
    # x·(1 + erf(k·x))/2, of a value that is 2^power times larger; the name is that of Erf.
    h = to.scaled(to.node("Mul", x, to.number(parameter)), -power)
    erf = to.node("Erf", h, name=name)
    inner = 0 if to.rng is None else to.rng.choice([0, 0, 3, *([-700, 700] if to.dtype == np.float64 else [-120, 90])])
    gate = to.node("Add", erf, to.number(1.0))
    if to.rng is None or to.rng.random() < 0.5:
        return to.scaled(to.node("Mul", to.scaled(x, inner), gate), -1 - inner)
    return to.node("Mul", to.scaled(gate, -1 - inner), to.scaled(x, inner))


def _moved(to: _Writer, x: str, size: int) -> tuple[str, np.ndarray]:
    """A value with its entries permuted by moves, at last shaped (1, size); and which entry each one is."""
    assert to.rng is not None
    shapes = [[1, a, size // a] for a in range(1, size + 1) if size % a == 0]
    shape = to.rng.choice(shapes)
    index = np.arange(size).reshape(shape)
    x = to.node("Reshape", x, to.shape(*shape))
    for _ in range(to.rng.randint(1, 3)):
        match to.rng.randrange(4):
            case 0:
                perm = to.rng.sample(range(index.ndim), index.ndim)
                x, index = to.node("Transpose", x, perm=perm), index.transpose(perm)
            case 1:
                axis = to.rng.randint(0, index.ndim)
                x = to.node("Flatten", x, axis=axis)
                index = index.reshape(math.prod(index.shape[:axis]), -1)
            case 2:
                rank = to.rng.randint(0, 4)
                one = to.number(np.full([1] * rank, to.rng.choice([1.0, 1.0, 1.0])))
                x, index = to.node(to.rng.choice(["Mul", "Div"]), x, one), index + np.zeros([1] * rank, int)
            case 3:
                rank = to.rng.randint(0, 4)
                x, index = to.node("Add", x, to.number(np.zeros([1] * rank))), index + np.zeros([1] * rank, int)
    return to.node("Reshape", x, to.shape(1, size)), index.ravel()


# ------------------------------------------------------------------------------------------------------- least values


def forward(steps: Sequence[Step], x: np.ndarray) -> np.ndarray:
    """Outputs of the plain network in float64, row by row."""
    behind: list[np.ndarray] = []
    for step in steps:
        match step:
            case Affine(weight, bias):
                x = x @ weight.T + bias
            case Act(kind, p):
                x = {
                    "relu": lambda v, p: np.maximum(v, 0),
                    "abs": lambda v, p: np.abs(v),
                    "leaky": lambda v, p: np.where(v >= 0, v, p * v),
                    "sigmoid": lambda v, p: special.expit(v),
                    "tanh": lambda v, p: np.tanh(v),
                    "gelu": lambda v, p: v * special.ndtr(v),
                    "spelled": lambda v, p: v * special.ndtr(v * p * 2**0.5),
                }[kind](x, p)
            case Skip(earlier):
                x = x + behind[earlier]
            case Norm(gamma, beta, mean, variance):
                x = gamma * (x - mean) / np.sqrt(variance + 1e-5) + beta
            case _:
                raise AssertionError("windows are piecewise linear")
        behind.append(x)
    return x


def cells(net: page_checker.Network, lower: Vector, upper: Vector) -> list[list[Vector]]:
    """The corners of the pieces of a box on which a network is affine, with the values of all atoms there."""
    if len(lower) == 1:
        found = [[list(lower), list(upper)]]
    else:
        xs, ys = (lower[0], upper[0], upper[0], lower[0]), (lower[1], lower[1], upper[1], upper[1])
        found = [[[a, b] for a, b in zip(xs, ys, strict=True)]]
    for z, s in zip(net.z, net.s, strict=True):
        behind = []
        for corners in found:
            at = [page_checker.at(z, corner) for corner in corners]
            if max(at) > 0 or min(at) == 0:
                kept = _cut(corners, [-v for v in at])
                behind.append([[*c, page_checker.at(z, c)] for c in kept])
            if min(at) < 0:
                behind.append([[*c, s * page_checker.at(z, c)] for c in _cut(corners, at)])
        found = behind
    return found


def _cut(corners: list[Vector], at: Vector) -> list[Vector]:
    """The part of a polygon where an affine function, ``at`` its corners, is at most zero."""
    kept = []
    for i, here in enumerate(at):
        j = (i + 1) % len(at)
        if here <= 0:
            kept.append(corners[i])
        if (here < 0 < at[j]) or (at[j] < 0 < here):
            share = here / (here - at[j])
            kept.append([p + share * (q - p) for p, q in zip(corners[i], corners[j], strict=True)])
    return kept


@dataclass(eq=False)
class Referee:
    """What is true of a drawn network.

    Attributes:
        least: a value that the row has at a point of the box, in the spoken file's scale; no threshold at or above it
            may be accepted. Of piecewise-linear networks the least one.
        known: points in the spoken scale, and the activations' inputs there by activation, of networks with curves.
    """

    net: Net
    least: Fraction = Fraction(0)
    high: Fraction = Fraction(0)
    known: list[tuple[Vector, list[Vector]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        net = self.net
        if net.linear:
            self._reader = page_checker.read_network(net.plain)
            unit = Fraction(2) ** net.scales.outputs
            corners = [corner for cell in cells(self._reader, net.lower, net.upper) for corner in cell]
            values = [self._row([page_checker.at(f, c) for f in self._reader.outputs]) for c in corners]
            self.least, self.high = min(values) * unit, max(values) * unit
            # The file that is spoken of has this value, too: the evaluator has never seen the steps.
            best = corners[values.index(min(values))][: len(net.lower)]
            if self.value(*net.member(()), best)[0] != self.least:
                raise AssertionError(f"{net.kind}: the spoken file is another network")
            return
        tried: list[tuple[Fraction, Fraction]] = []
        for kinds, points in self._candidates():
            data = net.member(kinds)
            for point in points:
                value, z = self.value(*data, point)
                tried.append((value, abs(value)))
                self.known.append(([v * Fraction(2) ** net.scales.inputs for v in point], z))
        # Values of curves are known to 60 digits.
        self.least = min(value + size / 10**50 for value, size in tried)
        self.high = max(value for value, _ in tried)

    def _row(self, outputs: Sequence[Fraction]) -> Fraction:
        return sum((c * y for c, y in zip(self.net.row, outputs, strict=True)), Fraction(0))

    def value(self, data: bytes, names: list[str], point: Vector) -> tuple[Fraction, list[Vector]]:
        """The row's value in the spoken scale, and the activations' inputs, at a point in the plain scale."""
        model = onnx.load_from_string(data)
        x = np.empty((1, len(point)), object)
        x[0, :] = [v * Fraction(2) ** self.net.scales.inputs for v in point]
        found = onnx_exact.exact(model, {"x": x})
        z = [[Fraction(v) for v in found[name].ravel()] if name else [] for name in names]
        return self._row([Fraction(v) for v in found["y"].ravel()]), z

    def _candidates(self) -> list[tuple[list[Act], list[Vector]]]:
        """Members of the family (or the network itself), and points at which the row is about least or largest."""
        net = self.net
        low, high = (np.array([float(v) for v in end]) for end in (net.lower, net.upper))
        members: list[list[Act]] = [[]]
        if net.joint:
            choices = [[Act("relu"), *(_harder(lam * by) for by in (1, 1.25, 2, 8))] for lam in net.joint]
            members = [list(each) for each in itertools.product(*choices)]
        ranked = []
        for kinds in members:
            others = iter(kinds)
            steps = [next(others, step) if isinstance(step, Act) else step for step in net.steps]
            x, reach = self._grid(low, high), (high - low)
            for _ in range(4):
                values = forward(steps, x) @ np.array(net.row, float)
                best, worst = x[values.argmin()], x[values.argmax()]
                reach = reach / 20
                x = np.concatenate([[best, worst], self._grid(np.maximum(best - reach, low), np.minimum(best + reach, high))])
            ranked.append((float(values.min()), kinds, [best, worst]))
        ranked.sort(key=lambda entry: entry[0])
        chosen = [ranked[0], *ranked[1:3], *([ranked[-1]] if len(ranked) > 3 else [])]
        ends = [list(net.lower), list(net.upper)]
        return [(kinds, [self._inside(p) for p in points] + ends) for _, kinds, points in chosen]

    def _inside(self, point: np.ndarray) -> Vector:
        return [min(max(Fraction(float(v)), a), b) for v, a, b in zip(point, self.net.lower, self.net.upper, strict=True)]

    @staticmethod
    def _grid(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        count = 801 if len(low) == 1 else 41
        axes = [np.linspace(a, b, count) for a, b in zip(low, high, strict=True)]
        return np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(low))

    def inputs_of(self, activation: int, low: Vector, high: Vector) -> list[Vector]:
        """Values that an activation's inputs have together in a part of the box, all in the spoken scale."""
        if self.net.linear:
            unit = Fraction(2) ** self.net.scales.inputs
            key = [v / unit for v in low], [v / unit for v in high]
            members = self._reader.members[activation]
            scale = Fraction(2) ** self.net.scales.hidden
            forms = [self._reader.z[k] for k in members]
            corners = [corner for cell in cells(self._reader, *key) for corner in cell]
            return [[page_checker.at(form, c) * scale for form in forms] for c in corners]
        inside = [z for x, z in self.known if all(a <= v <= b for a, v, b in zip(low, x, high, strict=True))]
        return [z[activation] for z in inside if z[activation]]


def _harder(lam: Fraction) -> Act:
    """GELU(λ'·x)/λ' with λ' as little above a number as can be."""
    return Act("spelled", float(np.nextafter(np.float32(float(lam) / 2**0.5), np.float32(np.inf))))


__all__ = ["KINDS", "Net", "Referee", "Scales", "drawn", "replace"]
