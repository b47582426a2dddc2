"""Random ONNX networks in which activations follow activations, and properties that hold by as little as is proven.

``drawn(seed)`` makes a file: dense, convolutional, pooled or residual, with up to three activations after one another,
in front of the first layer too, and weights of ordinary, tiny, large, dyadic or mostly zero size. ``refusal`` has a
method prove a property of it, writes the certificate and says what the checker has against it.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from tests.support.asking import claims
from verifiable_relu.campaign.certificates import Certificates
from verifiable_relu.network.graph import Network
from verifiable_relu.spec.property import Box, Property, Query, Row
from verifiable_relu.spec.specfile import vnnlib_text
from verifiable_relu.verifiers.auto import recording
from verifiable_relu.verifiers.base import Verdict
from verifiable_relu.verifiers.registry import make

KINDS = ("dense", "conv", "pooled", "residual")
SCALES = ("ordinary", "tiny", "large", "dyadic", "sparse")
METHODS = ("crown", "alpha-crown", "split", "bab", "auto")

KINKED = ("Relu", "Relu", "LeakyRelu", "PRelu", "Abs")
SMOOTH = ("Sigmoid", "Tanh", "Gelu", "spelled Gelu")

Shape = tuple[int, ...]


@dataclass(eq=False)
class Draft:
    """A file under construction, whose last value has the shape ``shape``, (1, …)."""

    rng: random.Random
    kind: str
    scale: str
    shape: Shape
    value: str = "x"
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    stored: list[onnx.TensorProto] = field(default_factory=list)

    def numbers(self, *shape: int) -> np.ndarray:
        """Weights of the drawn scale."""
        rng, count = self.rng, math.prod(shape)
        values = [rng.gauss(0, 1) for _ in range(count)]
        match self.scale:
            case "dyadic":
                values = [rng.randint(-12, 12) / 8 for _ in range(count)]
            case "tiny" | "large":
                values = [v * 2.0 ** (rng.uniform(0, 25) * (1 if self.scale == "large" else -1)) for v in values]
            case "sparse":
                values = [v * (rng.random() < 0.4) for v in values]
        return np.array(values, np.float32).reshape(shape)

    def store(self, values: np.ndarray) -> str:
        self.stored.append(numpy_helper.from_array(values, f"w{len(self.stored)}"))
        return self.stored[-1].name

    def add(self, operator: str, *inputs: str, **attributes: object) -> str:
        self.value = f"{operator.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [self.value], **attributes))
        return self.value

    def dense(self, width: int) -> None:
        if len(self.shape) > 2:
            self.add("Flatten", self.value)
            self.shape = (1, math.prod(self.shape))
        weight = self.numbers(self.shape[1], width) / np.float32(self.shape[1] ** 0.5)
        self.add("Gemm", self.value, self.store(weight), self.store(self.bias(width)))
        self.shape = (1, width)

    def bias(self, width: int) -> np.ndarray:
        return self.numbers(width) * np.float32(self.rng.random() < 0.7)

    def conv(self, channels: int) -> None:
        weight = self.numbers(channels, self.shape[1], 2, 2) / np.float32(2)
        self.add("Conv", self.value, self.store(weight), self.store(self.bias(channels)), pads=[0, 1, 1, 0])
        self.shape = (1, channels, *self.shape[2:])

    def pool(self) -> None:
        """Maxima or means over windows; maxima of few numbers, some of them padding."""
        pads = self.rng.choice(([0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 1]))
        kind = "AveragePool" if self.rng.random() < 0.25 else "MaxPool"
        self.add(kind, self.value, kernel_shape=[2, 2], pads=pads)
        height, width = (self.shape[2 + i] + pads[i] + pads[2 + i] - 1 for i in range(2))
        self.shape = (*self.shape[:2], height, width)

    def activations(self) -> None:
        """One to three of them, one after the other."""
        for _ in range(self.rng.choice((1, 1, 2, 2, 3))):
            self.activation(self.rng.choice(KINKED if self.rng.random() < 0.7 else SMOOTH))
            if len(self.shape) > 2 and min(self.shape[2:]) > 1 and self.kind == "pooled" and self.rng.random() < 0.4:
                self.pool()

    def activation(self, kind: str) -> None:
        rng = self.rng
        match kind:
            case "LeakyRelu":
                self.add(kind, self.value, alpha=rng.choice((0.01, 0.25, 1.5, -0.5)))
            case "PRelu":
                slopes = np.array([rng.choice((0.0, 0.1, 0.25, 1.0, 2.0, -1.0)) for _ in range(self.shape[1])])
                self.add(
                    kind, self.value, self.store(slopes.astype(np.float32).reshape(-1, *(1,) * (len(self.shape) - 2)))
                )
            case "spelled Gelu":
                x, scale = self.value, np.array(rng.choice((0.5, 0.75, 3.0)), np.float32)
                gate = self.add("Erf", self.add("Mul", x, self.store(scale)))
                gate = self.add("Mul", self.add("Add", gate, self.store(np.float32(1))), self.store(np.float32(0.5)))
                self.add("Mul", x, gate)
            case _:
                self.add(kind, self.value)

    def file(self) -> bytes:
        ends = [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, self.given),
            helper.make_tensor_value_info(self.value, TensorProto.FLOAT, self.shape),
        ]
        graph = helper.make_graph(self.nodes, "drawn", ends[:1], ends[1:], self.stored)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9).SerializeToString()

    def __post_init__(self) -> None:
        self.given = self.shape


def drawn(seed: int, kind: str = "", scale: str = "") -> bytes:
    """The file of a number, of one of ``KINDS`` and ``SCALES``."""
    rng = random.Random(seed)
    kind, scale = kind or rng.choice(KINDS), scale or rng.choice(SCALES)
    images = kind in ("conv", "pooled")
    draft = Draft(rng, kind, scale, (1, rng.randint(1, 2), 3, 2) if images else (1, rng.randint(1, 3)))
    if rng.random() < 0.15:
        draft.activations()
    if kind == "residual":
        draft.dense(width := rng.randint(2, 4))
        draft.activations()
        for _ in range(rng.randint(1, 2)):
            before = draft.value
            draft.dense(width)
            if rng.random() < 0.5:
                draft.activations()
            draft.add("Add", draft.value, before)
            draft.activations()
    elif images:
        for _ in range(rng.randint(1, 2)):
            draft.conv(rng.randint(1, 2))
            if kind == "pooled" and min(draft.shape[2:]) > 1 and rng.random() < 0.5:
                draft.pool()
            draft.activations()
    else:
        for _ in range(rng.randint(1, 3)):
            draft.dense(rng.randint(1, 4))
            draft.activations()
    if rng.random() < 0.85:
        draft.dense(rng.randint(1, 2))
    else:
        draft.shape = tuple(draft.shape)
    return draft.file()


def boxed(rng: random.Random, size: int) -> Box:
    """A box: wide, narrow, of one point in some coordinates, with ends at 0, or around it."""
    center = np.array([rng.choice((0.0, rng.gauss(0, 1))) for _ in range(size)])
    radius = np.array([rng.choice((0.0, 2.0**-12, 0.05, 0.5, 1.0)) for _ in range(size)])
    if not radius.any():
        radius[0] = 0.5
    low, high = (np.float32(center + sign * radius).astype(float) for sign in (-1, 1))
    if rng.random() < 0.2:
        low = np.maximum(low, 0)
        high = np.maximum(high, 0)
    return Box(low, high)


@dataclass(frozen=True, eq=False)
class Asked:
    """A question that a method answers with unsat, and its answer."""

    query: Query
    outcome: object


def asked(method: str, network: Network, box: Box, rng: random.Random, seconds: float = 1.0) -> Asked | None:
    """The hardest question Σ c·Y ≤ b that a method answers with unsat, or one near it: b by bisection."""
    coefficients = [(i, Fraction(rng.choice((1, -1, 1, -2)))) for i in range(network.output_size)]
    points = np.random.default_rng(rng.randrange(1 << 30)).random((64, box.size))
    points[:20] = points[:20].round()
    x = torch.from_numpy(box.lower + points * (box.upper - box.lower))
    with torch.no_grad():
        y = network.to(torch.float64)(x.reshape(-1, *network.input_shape)).reshape(len(x), -1).numpy()
    values = sum(float(c) * y[:, i] for i, c in coefficients)
    high, spread = float(values.min()), float(values.max() - values.min())
    size = max(spread, abs(high) * 1e-6, 1e-30)

    def at(bound: float) -> Asked | None:
        query = Query(network, Property(box, ((Row(tuple(coefficients), Fraction(bound)),),), "p"))
        (outcome,) = claims(recording(make(method)), [query], seconds)
        return Asked(query, outcome) if outcome.verdict is Verdict.UNSAT else None

    gap = size * rng.choice((2.0**-30, 2.0**-10, 2.0**-4, 2.0**-1))
    if method in ("crown", "alpha-crown"):
        gap, found = size * 2.0**-40, None
        while found is None and gap < size * 2.0**40:
            found, gap = at(high - gap), gap * 16
        if found is None:
            return None
        low = high - gap / 16
        for _ in range(rng.choice((0, 4, 30)) if method == "crown" else rng.choice((0, 6))):
            middle = 0.5 * (low + high)
            if middle in (low, high):
                break
            if (better := at(middle)) is not None:
                found, low = better, middle
            else:
                high = middle
        return found
    return at(high - gap)


def refusal(folder: Path, data: bytes, found: Asked) -> str:
    """Why the checker refuses the certificate of an answer; empty where it accepts it, "none: …" if there is none."""
    (folder / "net.onnx").write_bytes(data)
    (folder / "p.vnnlib").write_text(vnnlib_text(found.query.property))
    kept = Certificates(folder / "c").keep(
        str(folder / "net.onnx"), str(folder / "p.vnnlib"), [found.query], [found.outcome], 5.0
    )
    if kept.accepted:
        return ""
    return kept.detail if kept.refused else f"none: {kept.detail}"
