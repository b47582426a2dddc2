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
from tests.soundness.forged_dense import cut

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
        if self.scales == Scales() and self.kind not in ("ranks", "norm", "large", "denormal"):
            return written(steps, len(self.lower))
        odd = self.kind == "ranks"
        return written(steps, len(self.lower), self.scales, random.Random(self.style), self.double, odd)

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

    # Sums of products of weights with many digits are rounded.
    fine = rng.random() < 0.3 and kind != "denormal"

    def numbers(*shape: int) -> np.ndarray:
        made = np.array([short() or 1.0 for _ in range(math.prod(shape))])
        if fine:
            made *= [1 + rng.randrange(1 << 22) / (1 << 22) for _ in made]
        return made.astype(np.float32).astype(float).reshape(shape)

    def affine(before: int, after: int) -> Affine:
        return Affine(numbers(after, before), numbers(after))

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
            conv = Conv(numbers(channels, shape[0], *kernel), numbers(channels), shape, pads)
            left = [shape[1 + i] + pads[i] + pads[2 + i] - kernel[i] + 1 for i in range(2)]
            steps = [affine(inputs, math.prod(shape)), conv, act(), affine(channels * left[0] * left[1], outputs)]
        case "residual":
            steps = [affine(inputs, width), act(), affine(width, width), act(), Skip(1), affine(width, outputs)]
            if rng.random() < 0.4:
                steps = [affine(inputs, width), act(), affine(width, width), Skip(0), act(), affine(width, outputs)]
        case _:
            # Activations of inputs, outputs that are activations, and networks without any are among them.
            first = rng.random() < 0.8
            steps = [affine(inputs, width), act()] if first else [act()]
            width = width if first else inputs
            if rng.random() < 0.3:
                steps += [affine(width, 2), act()]
                width = 2
            if rng.random() < 0.1 and kind not in ("curve", "family"):
                steps = steps[:1] if first else []
                width = len(steps[0].bias) if first else inputs
            steps.append(affine(width, outputs))
            if kind == "norm" and first and rng.random() < 0.3:
                size = len(steps[0].bias)
                variance = np.array([rng.choice([0.125, 1.5, 7.0, 2.0**-20]) for _ in range(size)])
                others = [np.array([short() for _ in variance]) for _ in range(3)]
                steps.insert(1, Norm(others[0], others[1], others[2], variance))
    center = [Fraction(short()) for _ in range(inputs)]
    wide = rng.random() < 0.5
    radius = [Fraction(rng.choice([0.25, 1.0, 2.0**-8] if wide else [0.0, 0.0, 2.0**-30, 2.0**-16])) for _ in center]
    lower, upper = ([c + s * r for c, r in zip(center, radius, strict=True)] for s in (-1, 1))
    row = [rng.choice([-2, -1, 1, 2]) for _ in range(outputs)]
    kinds = [s.kind for s in steps if isinstance(s, Act)]
    double = kind != "denormal" and (kind == "large" or rng.random() < 0.7)
    scales = Scales()
    padded = any(isinstance(s, Pool) and any(s.pads) for s in steps) or any(isinstance(s, Norm) for s in steps)
    if not padded and kind != "curve" and (kind in ("large", "denormal", "norm", "ranks") or rng.random() < 0.3):
        sizes = [0, 0, 30, -30, 300, -300, 450, -450] if double else [0, 0, 20, -20, -60, -120, 60]
        outputs = (
            [*sizes, 840, -840, -1000, -1060, -1080, -1100] if double else [*sizes, -130, -300, -1060, -1080, -1100]
        )
        hidden = [0] if set(kinds) & {"sigmoid", "tanh", "gelu"} or kind == "family" else sizes
        hidden = [0, 20, -20, 33] if "spelled" in kinds and hidden != [0] else hidden
        scales = Scales(rng.choice(sizes), rng.choice(hidden), rng.choice(outputs))
        if rng.random() < (0.7 if kind in ("norm", "ranks") else 0.3):
            scales = Scales(
                rng.choice([0, 1]), rng.choice([h for h in hidden if h < 3 and h > -25]), rng.choice([0, 3])
            )
    if isinstance(steps[0], Act):
        scales = replace(scales, inputs=0, hidden=0)
    joint = [Fraction(rng.choice([1, 1, 1.5, 4])) for s in steps if isinstance(s, Act)] if kind == "family" else []
    if joint:
        steps = [Act("gelu") if isinstance(s, Act) and rng.random() < 0.3 else s for s in steps]
    return Net(kind, steps, lower, upper, row, scales, rng.randrange(1 << 30), double, joint)


# ---------------------------------------------------------------------------------------------------------- writing


class _Writer:
    """Nodes of a graph; without ``rng`` nothing is spread, scaled or permuted.

    Attributes:
        odd: whether values and scalars may have any rank.
        rank: of values where it is not 2.
    """

    def __init__(self, rng: random.Random | None, double: bool, odd: bool = False) -> None:
        self.rng, self.dtype, self.odd = rng, np.float64 if double else np.float32, odd
        self.rank: dict[str, int] = {}
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

    @property
    def limits(self) -> tuple[int, int]:
        """The least and the largest power of two that is a factor in the file."""
        return (-1060, 1000) if self.dtype == np.float64 else (-140, 120)

    def parts(self, power: int) -> list[int]:
        """Powers of two whose sum is given; their products in turn may be below what float64 holds."""
        low, high = self.limits
        if self.rng is None or (self.rng.random() < 0.4 and low <= power <= high):
            return [power] if power else []
        far = (
            []
            if self.rng.random() < 0.2
            else [self.rng.choice([-1074 - self.rng.randint(0, 90), self.rng.randint(-990, 700)])]
        )
        found, at = [], 0
        for target in (*far, power):
            while at != target:
                found.append(min(max(target - at, low), high))
                at += found[-1]
        return found

    def scaled(self, x: str, power: int, size: int = 0) -> str:
        """x·2^power: a chain of products and quotients by scalars of any rank, and of normalisations of ``size``."""
        rng = self.rng
        if rng is None:
            return self.times(x, 2.0**power) if power else x
        factors = [(part, 1.0) for part in self.parts(power)]
        if rng.random() < 0.4 and power > -1000:
            # A factor and a divisor that are no powers of two: each is rounded where its reciprocal is taken.
            odd = rng.choice([3.0, 5.0, 7.0, 49.0])
            factors.insert(rng.randint(0, len(factors)), (0, odd))
            factors.insert(rng.randint(0, len(factors)), (0, 1 / odd))
        while factors:
            part, odd = factors.pop(0)
            normal = size and odd == 1 and self.rank.get(x, 2) == 2 and rng.random() < 0.5
            # γ/√var may be below what float64 holds, though neither γ nor var is.
            if normal and factors and factors[0][1] == 1 and self.root(part + factors[0][0]) is not None:
                part += factors.pop(0)[0]
            if normal and (root := self.root(part)) is not None:
                given = [_times(np.ones(size), part + root), np.zeros(size), np.zeros(size)]
                given.append(_times(np.ones(size), 2 * root))
                x = self.node("BatchNormalization", x, *(self.number(g) for g in given), epsilon=0.0)
            elif odd < 1 or (part > -self.limits[1] and odd == 1 and rng.random() < 0.4):
                x = self.times(x, 2.0**-part * (1 if odd == 1 else round(1 / odd)), "Div")
            else:
                x = self.times(x, 2.0**part * odd)
        return x

    def root(self, part: int) -> int | None:
        """A power of two √var with which γ = √var·2^part can be stored, if there is one."""
        assert self.rng is not None
        least, most = self.limits
        far = 480 if self.dtype == np.float64 else 60
        low, high = max(least - part, -far), min(most - part, far)
        return self.rng.randint(low, high) if low <= high else None

    def gated(self, x: str, power: int) -> str:
        """A gate 1 + erf times 2^power, by scalars that are no divisors."""
        for part in self.parts(power):
            x = self.times(x, 2.0**part)
        return x

    def times(self, x: str, factor: float, kind: str = "Mul") -> str:
        """A value and a scalar, of any rank where ranks are odd."""
        rank = self.rng.choice([0, 1, 2, 3, 4] if self.odd else [0, 1, 2]) if self.rng is not None else 0
        inputs = [x, self.number(np.full([1] * rank, factor))]
        turned = kind != "Div" and self.rng is not None and self.rng.random() < 0.3
        found = self.node(kind, *(inputs[::-1] if turned else inputs))
        self.rank[found] = max(self.rank.get(x, 2), rank)
        return found


def written(
    steps: Sequence[Step],
    inputs: int,
    scales: Scales | None = None,
    rng: random.Random | None = None,
    double: bool = False,
    odd: bool = False,
) -> tuple[bytes, list[str]]:
    """An ONNX file, and the names of the activations' inputs; of a MaxPool it has no name."""
    to, scales = _Writer(rng, double, odd), scales or Scales()
    skips = any(isinstance(step, Skip) for step in steps)
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
                # What the file's numbers cannot say of a bias is said by factors behind it.
                held = max(after, -120 if not double else -1000)
                alone = at != last or held != after
                x = _affine(to, x, weight[:, order], _times(bias, held), held - power, None if alone else "y")
                if held != after:
                    x = to.scaled(x, after - held)
                    x = to.node("Reshape", x, to.shape(1, len(bias)), name="y" if at == last else None)
                power, size = after, len(bias)
                order = np.arange(size)
            case Act(kind, parameter):
                shape = [1, size]
                if odd and not skips and to.rng is not None and to.rng.random() < 0.5:
                    shape = to.rng.choice(_shapes(size))
                    x = to.node("Reshape", x, to.shape(*shape))
                    to.rank[x] = len(shape)
                z.append(x)
                x = _activation(to, x, kind, parameter, number, power)
                shape = [1] * (to.rank.get(x, len(shape)) - len(shape)) + shape
                if len(shape) != 2 or shape[0] != 1 or (odd and not skips):
                    x, order = _moved(to, x, shape)
            case Pool(shape, kernel, pads):
                z.append("")
                x = to.node("Reshape", x, to.shape(1, 1, *shape))
                x = to.node("MaxPool", x, name=f"r{number}", kernel_shape=list(kernel), pads=list(pads))
                size = math.prod(shape[i] + pads[i] + pads[2 + i] - kernel[i] + 1 for i in range(2))
                x, order = to.node("Flatten", x), np.arange(size)
            case Conv(weight, bias, shape, pads):
                x = to.node("Reshape", x, to.shape(1, *shape))
                x = to.node("Conv", x, to.number(weight), to.number(_times(bias, power)), pads=list(pads))
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


def _times(values: np.ndarray, power: int) -> np.ndarray:
    """values·2^power in float64, if it can hold them."""
    found = np.ldexp(values, power)
    if not np.array_equal(np.ldexp(found, -power), values):
        raise OverflowError("a number that float64 cannot hold")
    return found


def _affine(to: _Writer, x: str, weight: np.ndarray, bias: np.ndarray, power: int, name: str | None) -> str:
    """2^power·(weight·x) + bias."""
    rng = to.rng
    if rng is None:
        return to.node("Gemm", x, to.number(_times(weight, power)), to.number(bias), name=name, transB=1)
    if rng.random() < 0.25 and to.limits[0] <= power <= to.limits[1]:
        return to.node("Gemm", x, to.number(_times(weight, power)), to.number(bias), name=name, transB=1)
    first = rng.choice([0, power, power // 2])
    first = min(max(first, to.limits[0]), to.limits[1])
    y = to.node("MatMul", x, to.number(_times(weight.T, first)))
    y = to.scaled(y, power - first, len(bias))
    if to.rank.get(y, 2) > 2:
        y = to.node("Reshape", y, to.shape(1, len(bias)))
    if rng.random() < 0.7:
        return to.node("Add", y, to.number(bias), name=name)
    # The factor γ/√var is 1.
    root = rng.randint(-30, 20)
    ones = np.ones(len(bias))
    given = [np.ldexp(ones, root), bias, 0 * ones, np.ldexp(ones, 2 * root)]
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
    h = to.scaled(to.times(x, parameter), -power)
    erf = to.node("Erf", h, name=name)
    to.rank[erf] = to.rank.get(h, 2)
    far = [-700, -300, -1100] if to.dtype == np.float64 else [-120, -60, -1100]
    inner = 0 if to.rng is None else to.rng.choice([0, 0, 3, *far])
    rank = to.rng.choice([0, 1, 2, 3]) if to.odd and to.rng is not None else 0
    gate = to.node("Add", erf, to.number(np.full([1] * rank, 1.0)))
    to.rank[gate] = max(rank, to.rank[erf])
    outside = to.rng is None or to.rng.random() < 0.5
    value = to.scaled(x, inner)
    gate = gate if outside else to.gated(gate, -1 - inner)
    found = to.node("Mul", value, gate)
    to.rank[found] = max(to.rank.get(value, 2), to.rank[gate])
    return to.scaled(found, -1 - inner) if outside else found


def _shapes(size: int) -> list[list[int]]:
    """Shapes of a value of this size for a batch of one."""
    found = [[1, a, size // a] for a in range(1, size + 1) if size % a == 0]
    return [*found, [1, size], *([1, 1, *shape[1:]] for shape in found)]


def _moved(to: _Writer, x: str, shape: list[int]) -> tuple[str, np.ndarray]:
    """A value with its entries permuted by moves, at last shaped (1, size); and which entry each one is."""
    assert to.rng is not None
    size = math.prod(shape)
    index = np.arange(size).reshape(shape)
    if to.rng.random() < 0.3:
        shape = to.rng.choice(_shapes(size))
        x, index = to.node("Reshape", x, to.shape(*shape)), index.reshape(shape)
    for _ in range(to.rng.randint(1, 3)):
        match to.rng.randrange(4):
            case 0:
                perm = to.rng.sample(range(index.ndim), index.ndim)
                x, index = to.node("Transpose", x, perm=perm), index.transpose(perm)
            case 1:
                axis = to.rng.randint(0, index.ndim)
                x = to.node("Flatten", x, axis=axis)
                index = index.reshape(math.prod(index.shape[:axis]), -1)
            case other:
                rank = to.rng.randint(0, 4)
                kind = to.rng.choice(["Mul", "Div"]) if other == 2 else "Add"
                x = to.node(kind, x, to.number(np.full([1] * rank, 0.0 if kind == "Add" else 1.0)))
                index = index + np.zeros([1] * rank, int)
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
                kept = cut(corners, [], [-v for v in at])[0]
                behind.append([[*c, page_checker.at(z, c)] for c in kept])
            if min(at) < 0:
                behind.append([[*c, s * page_checker.at(z, c)] for c in cut(corners, [], at)[0]])
        found = behind
    return found


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
                x = np.concatenate(
                    [[best, worst], self._grid(np.maximum(best - reach, low), np.minimum(best + reach, high))]
                )
            ranked.append((float(values.min()), kinds, [best, worst]))
        ranked.sort(key=lambda entry: entry[0])
        chosen = [ranked[0], *ranked[1:3], *([ranked[-1]] if len(ranked) > 3 else [])]
        ends = [list(net.lower), list(net.upper)]
        return [(kinds, [self._inside(p) for p in points] + ends) for _, kinds, points in chosen]

    def _inside(self, point: np.ndarray) -> Vector:
        return [
            min(max(Fraction(float(v)), a), b) for v, a, b in zip(point, self.net.lower, self.net.upper, strict=True)
        ]

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
