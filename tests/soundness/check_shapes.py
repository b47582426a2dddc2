"""Random graphs of odd shapes and ranks: does the checker of certificates read them as ONNX's reference evaluator?

Every node is evaluated when it is drawn, so that the next one fits the shape that ONNX gives it. Some do not fit on
purpose: what the reference evaluator refuses the checker is to refuse, too. Numbers are short, in double precision, and
no two entries of a value are equal by design, so that an order of entries other than ONNX's shows.

``python -m tests.soundness.check_shapes --count 5000 --seed 1`` prints what disagrees, and the cases by kind.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from verifiable_relu.check import BadInput, Refused
from verifiable_relu.check.model import read_model
from verifiable_relu.check.point import enclosed

OPSET = 20
MOST = 96
"""Most entries of a value."""


class Misfit(Exception):
    """The last node that was drawn is one that ONNX's reference evaluator refuses."""


def evaluator(node: Any, given: dict[str, np.ndarray]) -> Any:
    """Of one node; what ONNX defines by other operators needs a model of its own.

    The reference evaluator computes MaxPool with ``auto_pad`` wrong, and refuses some padding: onnxruntime stands in.
    """
    if node.op_type not in ("Gelu", "MaxPool"):
        return ReferenceEvaluator(node, opsets={"": OPSET})
    ends = [helper.make_tensor_value_info(n, TensorProto.DOUBLE, None) for n in (*given, *node.output)]
    graph = helper.make_graph([node], "g", ends[:-1], ends[-1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)
    if node.op_type == "Gelu":
        return ReferenceEvaluator(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


@dataclass
class Graph:
    """A graph that grows, with all values at one point.

    Attributes:
        values: what has been computed, by name; the last one is the latest.
        stored: the constants.
        counted: what has been computed of shapes.
        kinds: what has been drawn.
    """

    rng: random.Random
    values: dict[str, np.ndarray]
    nodes: list[Any] = field(default_factory=list)
    stored: dict[str, np.ndarray] = field(default_factory=dict)
    counted: dict[str, np.ndarray] = field(default_factory=dict)
    kinds: list[str] = field(default_factory=list)

    @property
    def x(self) -> str:
        return list(self.values)[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values[self.x].shape

    def constant(self, value: Any, dtype: type = np.float64) -> str:
        name = f"c{len(self.stored)}"
        self.stored[name] = np.array(value, dtype)
        return name

    def numbers(self, shape: tuple[int, ...]) -> str:
        """A constant of short numbers, none of them zero."""
        signs = np.array([self.rng.choice([-1, 1]) for _ in range(int(np.prod(shape)))]).reshape(shape)
        return self.constant(signs * self.positive(shape))

    def positive(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.array([self.rng.randint(1, 12) / 4 for _ in range(int(np.prod(shape)))]).reshape(shape)

    def add(self, kind: str, inputs: list[str], **attributes: Any) -> str:
        """Append a node, and evaluate it."""
        name = f"v{len(self.nodes)}"
        node = helper.make_node(kind, inputs, [name], **attributes)
        self.nodes.append(node)
        given = {i: (self.values | self.stored | self.counted)[i] for i in inputs}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                (found,) = evaluator(node, given).run(None, given)[:1]
        except Exception as error:  # numpy and onnx raise exceptions of many kinds
            raise Misfit(str(error)) from error
        (self.counted if found.dtype == np.int64 else self.values)[name] = np.asarray(found)
        return name

    def odd(self) -> tuple[int, ...]:
        """A shape that broadcasts with that of the latest value, of another rank perhaps; seldom one that does not."""
        rng, shape = self.rng, self.shape
        kind = rng.randrange(8)
        if kind == 0:
            return (1,) * rng.randint(0, 4)
        if kind == 1:
            return (rng.randint(1, 3), *(rng.choice([1, n]) for n in shape))
        if kind == 2 and rng.random() < 0.2:
            return tuple(rng.randint(1, 3) for _ in range(rng.randint(0, 3)))
        part = tuple(n if rng.random() < 0.6 else 1 for n in shape[rng.randint(0, len(shape)) :])
        return tuple(rng.randint(1, 3) if n == 1 and rng.random() < 0.2 else n for n in part)

    def axis(self, after: int = 0) -> int:
        """An axis, counted from either end, and seldom one that there is not."""
        rank = len(self.shape) + after
        return self.rng.randint(-rank - (self.rng.random() < 0.03), max(rank - 1, 0) + (self.rng.random() < 0.03))

    def integers(self, values: list[int]) -> str:
        return self.constant(values, np.int64)


def arithmetic(g: Graph) -> None:
    kind = g.rng.choice(["Add", "Sub", "Mul", "Div"])
    constant = g.numbers(g.odd())
    swapped = kind != "Div" and g.rng.random() < 0.5
    g.add(kind, [constant, g.x] if swapped else [g.x, constant])


def together(g: Graph) -> None:
    """Two values of different ranks."""
    one = g.rng.choice(list(g.values))
    other = g.x
    if g.rng.random() < 0.5:
        other = g.add("Unsqueeze", [other, g.integers([g.axis(1)])])
    g.add(g.rng.choice(["Add", "Sub"]), g.rng.sample([one, other], 2))


def activation(g: Graph) -> None:
    kind = g.rng.choice(["Relu", "Abs", "LeakyRelu", "Sigmoid", "Tanh", "Identity", "Dropout"])
    g.add(kind, [g.x], **({"alpha": g.rng.choice([0.25, 0.1, -0.5, 2.0])} if kind == "LeakyRelu" else {}))


def prelu(g: Graph) -> None:
    g.add("PRelu", [g.x, g.numbers(g.odd())])


def flatten(g: Graph) -> None:
    rank = len(g.shape)
    g.add("Flatten", [g.x], axis=g.rng.randint(-rank, rank))


def reshape(g: Graph) -> None:
    """To factors of the size, with zeros for sizes that stay and −1 for one that is left."""
    rest, wanted = int(np.prod(g.shape)), []
    while rest > 1 and len(wanted) < 3:
        factor = g.rng.choice([n for n in range(1, rest + 1) if rest % n == 0])
        wanted.append(factor)
        rest //= factor
    wanted.append(rest)
    wanted += [1] * g.rng.randint(0, 1)
    g.rng.shuffle(wanted)
    wanted = [0 if i < len(g.shape) and n == g.shape[i] and g.rng.random() < 0.5 else n for i, n in enumerate(wanted)]
    if g.rng.random() < 0.5:
        wanted[g.rng.randrange(len(wanted))] = -1
    if g.rng.random() < 0.2 and len(g.shape):
        # The first size as the file computes it.
        size = g.add("Gather", [g.add("Shape", [g.x]), g.integers([0])])
        g.add("Reshape", [g.x, g.add("Concat", [size, g.integers([-1])], axis=0)])
        return
    g.add("Reshape", [g.x, g.integers(wanted)])


def squeeze(g: Graph) -> None:
    ones = [i - g.rng.choice([0, len(g.shape)]) for i, n in enumerate(g.shape) if n == 1]
    axes = g.rng.sample(ones, g.rng.randint(0, len(ones))) + [g.axis()] * (g.rng.random() < 0.05)
    g.add("Squeeze", [g.x, g.integers(axes)] if axes else [g.x])


def unsqueeze(g: Graph) -> None:
    count = g.rng.randint(1, 2)
    rank = len(g.shape) + count
    axes = g.rng.sample(range(rank), count)
    g.add("Unsqueeze", [g.x, g.integers([i - g.rng.choice([0, rank]) for i in axes])])


def transpose(g: Graph) -> None:
    order = list(range(len(g.shape)))
    g.rng.shuffle(order)
    g.add("Transpose", [g.x], **({"perm": order} if g.rng.random() < 0.8 and order else {}))


def gemm(g: Graph) -> None:
    if len(g.shape) != 2:
        flatten(g)
    trans, rows, columns = g.rng.randint(0, 1), *g.shape
    rows, inputs = (columns, rows) if trans else (rows, columns)
    outputs, other = g.rng.randint(1, 4), g.rng.randint(0, 1)
    weight = g.numbers((outputs, inputs) if other else (inputs, outputs))
    bias = g.rng.choice([None, (), (1,), (outputs,), (1, outputs), (rows, 1), (rows, outputs), (1, 1, outputs)])
    g.add("Gemm", [g.x, weight, *([] if bias is None else [g.numbers(bias)])], transA=trans, transB=other)


def matmul(g: Graph) -> None:
    if not g.shape:
        return
    n = g.rng.randint(1, 3)
    if g.rng.random() < 0.5:
        g.add("MatMul", [g.x, g.numbers((g.shape[-1], n))])
    else:
        g.add("MatMul", [g.numbers((n, g.shape[-2] if len(g.shape) > 1 else g.shape[0])), g.x])


def imaged(g: Graph, rank: int) -> tuple[int, ...]:
    """Make an image of the latest value, one sample with channels."""
    size = int(np.prod(g.shape))
    channels = g.rng.choice([n for n in (1, 2, 3, 4, 6) if size % n == 0])
    rest = size // channels
    height = g.rng.choice([n for n in range(1, rest + 1) if rest % n == 0])
    g.add("Reshape", [g.x, g.integers([1, channels, rest] if rank == 1 else [1, channels, height, -1])])
    return g.shape


def windows(g: Graph, rank: int) -> dict[str, Any]:
    rng = g.rng
    found: dict[str, Any] = {}
    if rng.random() < 0.6:
        found["strides"] = [rng.randint(1, 3) for _ in range(rank)]
    if rng.random() < 0.6:
        found["pads"] = [rng.randint(0, 1) for _ in range(2 * rank)]
    elif rng.random() < 0.4:
        found["auto_pad"] = rng.choice(["SAME_UPPER", "SAME_LOWER", "VALID"])
    if rng.random() < 0.3:
        found["dilations"] = [rng.randint(1, 2) for _ in range(rank)]
    return found


def conv(g: Graph) -> None:
    rank = g.rng.randint(1, 2)
    _, channels, *_ = imaged(g, rank)
    group = g.rng.choice([n for n in range(1, channels + 1) if channels % n == 0])
    outputs = group * g.rng.randint(1, 2)
    kernel = tuple(g.rng.randint(1, 2) for _ in range(rank))
    inputs = [g.x, g.numbers((outputs, channels // group, *kernel))]
    inputs += [g.numbers((outputs,))] if g.rng.random() < 0.5 else []
    g.add("Conv", inputs, group=group, **windows(g, rank))


def maxpool(g: Graph) -> None:
    rank = g.rng.randint(1, 2)
    imaged(g, rank)
    g.add("MaxPool", [g.x], kernel_shape=[g.rng.randint(2, 3) for _ in range(rank)], **windows(g, rank))


def normalisation(g: Graph) -> None:
    if len(g.shape) < 2:
        return
    n = g.shape[1]
    given = [g.numbers((n,)) for _ in range(3)]
    g.add("BatchNormalization", [g.x, *given, g.constant(g.positive((n,)))])


def gelu(g: Graph) -> None:
    """GELU in operators, its scalars of any rank."""

    def scalar(value: float) -> str:
        return g.constant(np.full((1,) * g.rng.choice([0, 0, 0, 1, 1, len(g.shape), 3, 4]), value))

    x = g.x
    for _ in range(g.rng.randint(0, 2)):
        x = g.add(g.rng.choice(["Mul", "Div"]), [x, scalar(g.rng.choice([0.5, 3.0, 2.0, -1.0]))])
    if g.rng.random() < 0.3:
        g.add("Gelu", [x])
        return
    argument = g.add(*g.rng.choice([("Div", [x, scalar(1.5)]), ("Mul", [x, scalar(0.75)]), ("Identity", [x])]))
    gate = g.add("Erf", [argument])
    factor = g.rng.choice([None, 0.5, 2.0])
    first = g.rng.random() < 0.5
    if factor and first:
        gate = g.add("Mul", [gate, scalar(factor)])
    gate = g.add("Add", g.rng.sample([gate, scalar(factor if factor and first else 1.0)], 2))
    if factor and not first:
        gate = g.add("Mul", g.rng.sample([gate, scalar(factor)], 2))
    other = x if g.rng.random() < 0.5 else g.add("Mul", [x, scalar(g.rng.choice([0.5, 0.3]))])
    g.add("Mul", g.rng.sample([other, gate], 2))


STEPS: dict[str, Callable[[Graph], None]] = {
    step.__name__: step
    for step in (arithmetic, together, activation, prelu, flatten, reshape, squeeze, unsqueeze, transpose, gemm, matmul,
                 conv, maxpool, normalisation, gelu)
}  # fmt: skip


@dataclass
class Found:
    """What came of one case.

    Attributes:
        ended: "read", "refused", or "invalid" where the reference evaluator refuses it, too.
        wrong: what disagrees.
    """

    kinds: list[str]
    ended: str
    wrong: str = ""


def judged(seed: int, steps: Sequence[str] = tuple(STEPS)) -> Found:
    """Draw a graph of some kinds of steps, and compare what the checker makes of it with the reference evaluator."""
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 4) if i else rng.choice([1, 1, 2]) for i in range(rng.randint(1, 4)))
    point = np.array([rng.randint(-40, 40) / 16 + i / 64 for i in range(int(np.prod(shape)))]).reshape(shape)
    graph, misfit = Graph(rng, {"x": point}), ""
    try:
        for _ in range(rng.randint(1, 5)):
            name = rng.choice(steps)
            graph.kinds.append(name)
            STEPS[name](graph)
            if not 0 < graph.values[graph.x].size <= MOST:
                break
    except Misfit as error:
        misfit = str(error)
    if not graph.nodes:
        return Found(graph.kinds, "empty")
    output = graph.nodes[-1].output[0]
    known = graph.values.get(output, point)
    ends = [helper.make_tensor_value_info(n, TensorProto.DOUBLE, s) for n, s in (("x", shape), (output, known.shape))]
    stored = [numpy_helper.from_array(value, name) for name, value in graph.stored.items()]
    model = helper.make_model(
        helper.make_graph(graph.nodes, "g", ends[:1], ends[1:], stored),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=9,
    )
    try:
        read = read_model(model.SerializeToString())
        found = enclosed(read, [Fraction(float(v)) for v in point.ravel()])
    except (BadInput, Refused) as error:
        return Found(graph.kinds, "invalid" if misfit else "refused: " + str(error).rpartition("): ")[2][:60])
    if misfit:
        return Found(graph.kinds, "read", f"read though the reference evaluator says: {misfit[:80]}")
    expected = known.ravel()
    # The reference evaluator has erf in single precision.
    size = (1e-6 if "gelu" in graph.kinds else 1e-9) * (
        1 + max(float(np.abs(value).max()) for value in graph.values.values())
    )
    if len(found) != len(expected) or any(
        not low - Fraction(size) <= Fraction(float(value)) <= high + Fraction(size)
        for (low, high), value in zip(found, expected, strict=True)
    ):
        return Found(graph.kinds, "read", f"{[float(low) for low, _ in found[:4]]}, not {expected[:4]}")
    if any(high - low > 1e3 * size for low, high in found):
        return Found(graph.kinds, "read", "the enclosure is wide")
    return Found(graph.kinds, "read")


def judge(count: int, seed: int, steps: Sequence[str] = tuple(STEPS)) -> tuple[Counter[str], list[str]]:
    """How cases ended, and, of those that were read, the kinds of their steps; and what is wrong."""
    ended: Counter[str] = Counter()
    wrong = []
    for number in range(seed, seed + count):
        found = judged(number, steps)
        ended[found.ended] += 1
        if found.ended == "read":
            ended.update(f"read {kind}" for kind in set(found.kinds))
        if found.wrong:
            wrong.append(f"{number} ({', '.join(found.kinds)}): {found.wrong}")
    return ended, wrong


def main(arguments: list[str] | None = None) -> int:
    """Compare as many cases as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m tests.soundness.check_shapes")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    ended, wrong = judge(given.count, 1_000_000 * given.seed)
    for kind, number in ended.most_common():
        print(f"{number:6} {kind}")
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
