"""Random quantised networks: layers between QuantizeLinear and DequantizeLinear, of all types, scales and biases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MS = "com.microsoft"

LIMITS = {np.uint8: (0, 255), np.int8: (-128, 127), np.uint16: (0, 65535), np.int16: (-32768, 32767)}


class Graph:
    """A file under construction."""

    def __init__(self, opset: int, seed: int) -> None:
        self.opset, self.rng, self.rank = opset, np.random.default_rng(seed), 2
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}

    def __call__(self, op: str, *inputs: Any, domain: str = "", **attributes: Any) -> str:
        """Add a node; arrays become constants, None an input that is left out."""
        names = [x if isinstance(x, str) else "" if x is None else self.constant(x) for x in inputs]
        self.nodes.append(helper.make_node(op, names, [f"t{len(self.nodes)}"], domain=domain, **attributes))
        return f"t{len(self.nodes) - 1}"

    def constant(self, array: Any) -> str:
        name = f"c{len(self.constants)}"
        made = array if isinstance(array, onnx.TensorProto) else numpy_helper.from_array(np.asarray(array))
        self.constants[name] = onnx.TensorProto.FromString(made.SerializeToString())
        self.constants[name].name = name
        return name

    def scale(self, *shape: int, about: float = 0.02) -> np.ndarray:
        return np.asarray(about * self.rng.uniform(0.7, 1.4, shape), np.float32)

    def whole(self, dtype: type, *shape: int, most: int = 60) -> np.ndarray:
        low = 0 if np.iinfo(dtype).min == 0 else -most
        return np.asarray(self.rng.integers(low, most, shape), dtype)

    def both(self, x: str, scale: np.ndarray, zero: Any, **attributes: Any) -> str:
        """x quantised, and what stands for it."""
        return self("DequantizeLinear", self("QuantizeLinear", x, scale, zero, **attributes), scale, zero, **attributes)

    def file(self, output: str, shape: tuple[int, ...]) -> bytes:
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
        y = helper.make_tensor_value_info(output, TensorProto.FLOAT, [None] * self.rank)
        graph = helper.make_graph(self.nodes, "g", [x], [y], list(self.constants.values()))
        imports = [helper.make_opsetid("", self.opset), helper.make_opsetid(MS, 1)]
        made = helper.make_model(graph, opset_imports=imports, ir_version=10)
        return made.SerializeToString()


def u8(value: int) -> np.ndarray:
    return np.array(value, np.uint8)


@dataclass
class Numbers:
    """A float tensor of a network under construction.

    Attributes:
        name: of the tensor.
        shape: with the batch axis.
        most: about the size of its largest number.
        step: scale and zero point of the DequantizeLinear from which its numbers come, if from one.
        direct: whether it is the result of that DequantizeLinear itself.
    """

    name: str
    shape: tuple[int, ...]
    most: float
    step: tuple[np.ndarray, np.ndarray] | None = None
    direct: bool = False


class RandomNetwork(Graph):
    """One random network, with the input ``x``.

    Args:
        seed: of all that is drawn.
        kept: whether it has only forms that optimisations of onnxruntime leave as they are: no bias of another scale
            than s_x·s_w, no constant that is not quantised, nothing quantised twice.
    """

    def __init__(self, seed: int, kept: bool) -> None:
        super().__init__((13, 19, 21)[seed % 3], seed)
        self.kept, self.wide, self.known = kept, seed % 21 == 2, list[Numbers]()
        image = self.one_in(2)
        shape = (1, int(self.rng.integers(1, 3)), 4, 4) if image else (1, int(self.rng.integers(1, 6)))
        at = self.quantised(Numbers("x", shape, 1.0))
        for _ in range(int(self.rng.integers(1, 6))):
            layers = [self.products, self.products, self.activation, self.pool, self.residual, self.scaled]
            at = layers[int(self.rng.integers(len(layers)))](at)
            if kept or not self.one_in(4):
                at = self.quantised(at)
        if len(at.shape) == 4:
            flat = self("Flatten", at.name)
            at = self.products(self.quantised(Numbers(flat, (1, int(np.prod(at.shape))), at.most, at.step)))
        if self.one_in(2):
            at = self.quantised(at)
        self.shape, self.data = shape, self.file(at.name, shape)

    def one_in(self, count: int) -> bool:
        return not self.rng.integers(count)

    def quantised(self, x: Numbers) -> Numbers:
        """x as quantised numbers stand for it, of the scale that it has where it is such numbers already."""
        if self.kept and x.direct:
            return x
        if x.step is not None and (self.kept or self.one_in(2)):
            scale, zero = x.step
        else:
            kinds = (np.uint16, np.int16) if self.wide else (np.uint8, np.int8)
            low, high = LIMITS[kinds[int(self.rng.integers(2))]]
            kind = next(k for k, ends in LIMITS.items() if ends == (low, high))
            scale = np.asarray(2 * x.most / (high - low) * self.rng.uniform(0.5, 1.5), np.float32)
            zero = np.asarray(
                self.rng.choice([low, low, (low + high + 1) // 2, self.rng.integers(low, high + 1)]), kind
            )
        low, high = LIMITS[zero.dtype.type]
        made = self.both(x.name, scale, zero)
        self.known.append(Numbers(made, x.shape, min(x.most, float(scale) * (high - low)), (scale, zero), True))
        return self.known[-1]

    def products(self, x: Numbers) -> Numbers:
        """A convolution or a dense layer of quantised weights, with or without a bias and an activation."""
        if not x.direct and (self.kept or self.one_in(2)):
            x = self.quantised(x)
        rank, inputs = len(x.shape), x.shape[1]
        outputs, size = int(self.rng.integers(1, 5)), int(self.rng.integers(1, 4))
        kernel = (min(size, *x.shape[2:]),) * 2 if rank == 4 else ()
        transposed = rank == 4 or self.one_in(2)
        operator = "Conv" if rank == 4 else "Gemm" if transposed or self.one_in(2) else "MatMul"
        shape = (outputs, inputs, *kernel) if transposed else (inputs, outputs)
        fan = int(np.prod(shape)) / outputs
        axis = {"axis": 0 if transposed else 1} if self.one_in(2) else {}
        scale = np.asarray(self.rng.uniform(0.5, 1.5, (outputs,) if axis else ()) / 50 / np.sqrt(fan), np.float32)
        # Where the left operand is signed, kernels of whole numbers take none but signed weights.
        kind, middle = (np.uint8, 128) if self.one_in(5) else (np.int8, 0)
        if self.one_in(5) and not axis:
            middle += int(self.rng.integers(1, 5))
        most = int(self.rng.choice([30, 120]))
        whole = self.rng.integers(middle - most, middle + most + 1, shape).clip(*LIMITS[kind]).astype(kind)
        weight = self("DequantizeLinear", whole, scale, np.full(scale.shape, middle, kind), **axis)
        if not self.kept and self.one_in(10):
            weight = self.constant((self.rng.normal(size=shape) / np.sqrt(fan)).astype(np.float32))
        bias = self.bias(x, scale, outputs)
        given = [bias] if bias and operator != "MatMul" else []
        attributes = {"transB": int(transposed)} if operator == "Gemm" else {}
        made = self(operator, x.name, weight, *given, **attributes)
        if bias and operator == "MatMul":
            made = self("Add", *((made, bias) if self.one_in(2) else (bias, made)))
        sizes = tuple(n - k + 1 for n, k in zip(x.shape[2:], kernel, strict=True))
        found = Numbers(made, (1, outputs, *sizes), x.most)
        return self.activation(found) if self.one_in(2) else found

    def bias(self, x: Numbers, scale: np.ndarray, outputs: int) -> str | None:
        if self.one_in(3):
            return None
        numbers = 0.3 * x.most * self.rng.normal(size=outputs)
        if not self.kept and self.one_in(4):
            return self.constant(numbers.astype(np.float32))
        if x.step is None or (not self.kept and self.one_in(4)):
            own = np.asarray(x.most / 300 * self.rng.uniform(0.5, 2), np.float32)
        else:
            own = np.asarray(x.step[0] * scale, np.float32)
        whole = np.rint(numbers / own).clip(-(2**30), 2**30).astype(np.int32)
        zero = [np.zeros(own.shape, np.int32)] if self.one_in(2) else []
        return self("DequantizeLinear", whole, own, *zero, **({"axis": 0} if own.ndim else {}))

    def activation(self, x: Numbers) -> Numbers:
        operator = self.rng.choice(["Relu", "Relu", "Relu", "LeakyRelu", "Sigmoid"])
        return Numbers(self(operator, x.name), x.shape, 1.0 if operator == "Sigmoid" else x.most)

    def pool(self, x: Numbers) -> Numbers:
        if len(x.shape) == 2 or min(x.shape[2:]) < 2:
            # Nothing is moved, but onnxruntime does not know that.
            same = self("Reshape", x.name, np.array([1, -1, *x.shape[2:]], np.int64))
            return Numbers(same, x.shape, x.most, x.step)
        stride = int(self.rng.integers(1, 3))
        sizes = tuple((n - 2) // stride + 1 for n in x.shape[2:])
        if self.one_in(2):
            made = self("MaxPool", x.name, kernel_shape=[2, 2], strides=[stride] * 2)
            return Numbers(made, (1, x.shape[1], *sizes), x.most, x.step)
        if self.one_in(4):
            return Numbers(self("GlobalAveragePool", x.name), (1, x.shape[1], 1, 1), x.most)
        made = self("AveragePool", x.name, kernel_shape=[2, 2], strides=[stride] * 2)
        return Numbers(made, (1, x.shape[1], *sizes), x.most)

    def residual(self, x: Numbers) -> Numbers:
        others = [y for y in self.known if y.shape == x.shape and y.name != x.name]
        if not others:
            return self.activation(x)
        y = others[int(self.rng.integers(len(others)))]
        made = self("Sub" if self.one_in(3) else "Add", x.name, y.name)
        found = Numbers(made, x.shape, x.most + y.most)
        return self.activation(found) if self.one_in(2) else found

    def scaled(self, x: Numbers) -> Numbers:
        number = np.asarray(self.rng.uniform(0.3, 1.5), np.float32)
        return Numbers(self("Add" if self.one_in(2) else "Mul", x.name, number), x.shape, 1.5 * x.most)
