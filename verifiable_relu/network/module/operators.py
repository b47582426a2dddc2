"""From ATen operators to nodes of a network: a table with one row for each operator that is understood.

The batch is axis 0 of every computed value, alone or merged with the axis after it, as torch does for a product with a
matrix; what would mix, move or count samples is refused. Nodes hold the module's own tensors, or what autograd derives
from them, so that a network is differentiable with respect to the module's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.network.build import Builder
from verifiable_relu.network.graph import Network
from verifiable_relu.network.module.trace import Trace, TracedCall, exchanged
from verifiable_relu.network.nodes import Activation, Gelu, LeakyRelu, Relu, Shape, Sigmoid, Tanh, curve
from verifiable_relu.network.simplify import needed
from verifiable_relu.readers.derived import deviations, quotient

_ORDER = ("center", "scale", "shift")
"""The parts of a Scale node in the order in which they act."""


class NotTranslated(UnsupportedError):
    """The table of operators has nothing for what a module does, and nothing forbids to read it."""


@dataclass(frozen=True)
class Ref:
    """The node of a computed tensor, in the arguments of an operator."""

    node: int


class ModuleTranslator:
    """Makes a network of one trace.

    Args:
        trace: to be translated.
        exact: whether factors are rounded to float64 alone, and what they are off by is known.

    Attributes:
        parts: by a Scale node, the node before it and its tensors, where more may be merged into it.
        scales, gelus: the input and the factor λ of the nodes that are λ·x and GELU(λ·x), the factor by its identity.
    """

    def __init__(self, trace: Trace, exact: bool = False) -> None:
        self.trace, self.exact = trace, exact
        self.batch, *shape = trace.x.shape
        self.build = Builder(tuple(shape), device=trace.x.device)
        self.nodes = {id(trace.x): 0}
        self.parts: dict[int, tuple[int, dict[str, Tensor]]] = {}
        self.scales: dict[int, tuple[int, int]] = {}
        self.gelus: dict[int, tuple[int, int]] = {}

    def network(self, name: str) -> tuple[Network, dict[int, Tensor]]:
        """The network, and by node index the numbers that were observed there: (batch, *shape).

        Raises:
            NotTranslated: if an operator is not in the table, or used in a way that no node has; names it.
            InputError: if a parameter is not finite.
        """
        observed: dict[int, Tensor] = {}
        for step in self.trace.steps:
            node = self.nodes[id(step.result)] = self.translated(step)
            observed[node] = step.result
        output = self.nodes[id(self.trace.output)]
        if self.trace.output.shape[:1] != (self.batch,):
            raise NotTranslated("the batch axis does not stay the first one")
        found = ((place, observed.get(old)) for place, old in enumerate(needed(self.build.nodes, output)))
        network = self.build.network(output, name=name)
        return network, {place: value for place, value in found if value is not None}

    def translated(self, step: TracedCall) -> int:
        """The node of a step."""
        try:
            if step.op not in OPERATORS:
                raise UnsupportedError(f"aten.{step.op} is not supported")
            arguments = exchanged(step.arguments, self.operand)
            node = OPERATORS[step.op](self, step, SimpleNamespace(**arguments))
            if self.sample(step) != self.build.shape(node) or step.result.dtype != self.trace.x.dtype:
                raise UnsupportedError(f"makes {step.result.dtype} of shape {tuple(step.result.shape)}")
            return node
        except InputError as error:
            raise NotTranslated(error.message, place=error.place or step.place) from error
        except (AttributeError, KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise NotTranslated(f"used in a way that is not supported: {error}", place=step.place) from error

    def operand(self, tensor: Tensor) -> Ref | Tensor:
        """A tensor as the argument of an operator."""
        if id(tensor) in self.trace.computed:
            return Ref(self.nodes[id(tensor)])
        return tensor if self.exact else self.trace.differentiable(tensor)

    def sample(self, step: TracedCall) -> Shape:
        """The shape of one sample of a step's result, the batch of which is its first axis, or a part of that."""
        first, *rest = step.result.shape or (0,)
        if not first or first % self.batch:
            raise UnsupportedError("the batch axis does not stay the first one")
        return (*rest,) if first == self.batch else (first // self.batch, *rest)

    def node(self, value: Any) -> int:
        """The node of a value, which must be computed."""
        if not isinstance(value, Ref):
            raise UnsupportedError("a constant where a computed value is expected")
        return value.node

    def constant(self, step: TracedCall, value: Any) -> Tensor:
        """A constant operand of an element-wise operator without the batch axis, in the precision of the result."""
        if isinstance(value, Ref):
            raise UnsupportedError("two computed values where one is expected")
        if not isinstance(value, Tensor):
            return torch.tensor(value, dtype=step.result.dtype, device=self.build.device)
        number = value.to(step.result.dtype)
        if number.ndim < step.result.ndim:
            return number
        if len(number) > 1 and not bool((number == number[:1]).all()):
            raise UnsupportedError("a constant that differs from sample to sample")
        return number[0]

    def scaled(self, step: TracedCall, x: int, part: str, value: Tensor, error: float = 0.0) -> int:
        """x − center, x·scale or x + shift, in one node with those that came right before it in this order.

        What is known up to a relative ``error`` has nothing after it in its node.
        """
        source, parts = self.parts.get(x, (x, {}))
        if any(_ORDER.index(key) >= _ORDER.index(part) or other.dtype != value.dtype for key, other in parts.items()):
            source, parts = x, {}
        parts = {**parts, part: value}
        index = self.build.scale(source, step.label, error=error, **parts)
        if not error:
            self.parts[index] = source, parts
        return index

    def sum(self, step: TracedCall, x: Any, y: Any, factor: float) -> int:
        """x + factor·y."""
        if not isinstance(y, Ref):
            if abs(factor) != 1:
                raise UnsupportedError("a multiple of a constant")
            return self.scaled(step, self.node(x), "shift" if factor == 1 else "center", self.constant(step, y))
        node = y.node if factor == 1 else self.scaled(step, y.node, "scale", self.constant(step, factor))
        if not isinstance(x, Ref):
            return self.scaled(step, node, "shift", self.constant(step, x))
        return self.build.add(x.node, node, step.label)


Converter = Callable[[ModuleTranslator, TracedCall, Any], int]
"""From a step and the arguments of ATen's schema, by their names there, ``self`` among them, to the index of a node."""


# --- affine ----------------------------------------------------------------------------------------------------------


def _linear(t: ModuleTranslator, step: TracedCall, x: Any, matrix: Any, bias: Any = None) -> int:
    """x·matrix + bias."""
    if isinstance(matrix, Ref) or matrix.ndim != 2:
        raise UnsupportedError("multiplies by what is no constant matrix")
    return t.build.linear(t.node(x), matrix.T, None if bias is None else t.constant(step, bias), step.label)


def _addmm(t: ModuleTranslator, step: TracedCall, a: Any) -> int:
    if a.beta != 1 or a.alpha != 1:
        raise UnsupportedError(f"beta={a.beta}, alpha={a.alpha}")
    return _linear(t, step, a.mat1, a.mat2, a.self)


def _convolution(t: ModuleTranslator, step: TracedCall, a: Any) -> int:
    if isinstance(a.weight, Ref) or isinstance(a.bias, Ref) or a.transposed or len(a.stride) != 2:
        raise UnsupportedError("another convolution than one in two dimensions with constant weights")
    how = {"stride": (*a.stride,), "padding": (*a.padding, *a.padding), "dilation": (*a.dilation,), "groups": a.groups}
    return t.build.conv2d(t.node(a.input), a.weight, a.bias, step.label, **how)


def _avg_pool2d(t: ModuleTranslator, step: TracedCall, a: Any) -> int:
    if a.ceil_mode or a.divisor_override is not None or (any(a.padding) and not a.count_include_pad):
        raise UnsupportedError("ceil_mode, divisor_override and count_include_pad=False are not supported")
    kernel, stride, pads = ((each[0], each[-1]) for each in (a.kernel_size, a.stride or a.kernel_size, a.padding))
    return t.build.average_pool(t.node(a.self), kernel, stride, pads * 2, step.label)


def _mean(t: ModuleTranslator, step: TracedCall, a: Any) -> int:
    shape, dim = t.build.shape(t.node(a.self)), getattr(a, "dim", None)
    if len(shape) != 3 or dim is None or sorted(axis % 4 for axis in dim) != [2, 3]:
        raise UnsupportedError("a mean is supported over the height and width of (batch, channels, height, width)")
    pooled = t.build.average_pool(t.node(a.self), (shape[1], shape[2]), (1, 1), (0, 0, 0, 0), step.label)
    return t.build.reshape(pooled, t.sample(step), step.label)


def _batch_norm(t: ModuleTranslator, step: TracedCall, a: Any) -> int:
    if a.training or a.running_mean is None or a.running_var is None:
        raise UnsupportedError("with the batch's own statistics it is no fixed function of one sample")
    gamma = torch.ones_like(a.running_var) if a.weight is None else a.weight
    shift, error = torch.zeros_like(a.running_mean) if a.bias is None else a.bias, 0.0
    if t.exact:
        scale, error = deviations(gamma, a.running_var, a.eps)
    else:
        scale = (gamma.double() / (a.running_var.double() + a.eps).sqrt()).to(a.running_var.dtype)
    channels = (-1, *(1,) * (step.result.ndim - 2))
    center, scale, shift = (part.reshape(channels) for part in (a.running_mean, scale, shift))
    return t.build.scale(t.node(a.input), step.label, center=center, scale=scale, shift=shift, error=error)


def _mul(t: ModuleTranslator, step: TracedCall, a: Any) -> int:
    x, number = (a.self, a.other) if isinstance(a.self, Ref) else (a.other, a.self)
    index = t.scaled(step, t.node(x), "scale", t.constant(step, number))
    t.scales[index] = x.node, id(step.arguments["other"])
    return index


def _div(t: ModuleTranslator, step: TracedCall, a: Any) -> int:
    if getattr(a, "rounding_mode", None) is not None:
        raise UnsupportedError(f"rounds (rounding_mode='{a.rounding_mode}')")
    number = t.constant(step, a.other)
    source, factor = t.gelus.get(t.node(a.self), (0, 0))
    if factor == id(step.arguments["other"]):
        # GELU(λx)/λ, which is what λ-GELU consists of.
        return t.build.activation(source, Gelu, step.label, lam=number)
    if not t.exact:
        return t.scaled(step, t.node(a.self), "scale", (1 / number.double()).to(number.dtype))
    inverse, error = quotient(1.0, number)
    index = t.scaled(step, t.node(a.self), "scale", inverse.to(number.device), error)
    t.build.nodes[index] = replace(t.build.nodes[index], divisor=number)  # type: ignore[call-arg]
    return index


# --- activations -----------------------------------------------------------------------------------------------------


def _plain(kind: type[Activation]) -> Converter:
    return lambda t, step, a: t.build.activation(t.node(a.self), kind, step.label)


def _curve(function: str) -> Converter:
    return lambda t, step, a: t.build.append(curve(function, step.label, (t.node(a.self),), t.build.shape(a.self.node)))


def _leaky_relu(t: ModuleTranslator, step: TracedCall, x: Any, slope: Any) -> int:
    number = t.constant(step, slope)
    return t.build.activation(
        t.node(x), LeakyRelu, step.label, slope=number.squeeze() if number.numel() == 1 else number
    )


def _gelu(t: ModuleTranslator, step: TracedCall, a: Any) -> int:
    if a.approximate == "tanh":
        return _curve("tanh-GELU")(t, step, a)
    index = t.build.activation(t.node(a.self), Gelu, step.label, lam=t.constant(step, 1.0))
    t.gelus[index] = t.scales.get(a.self.node, (0, 0))
    return index


def _softplus(t: ModuleTranslator, step: TracedCall, a: Any) -> int:
    """ln(1 + exp(x)); torch takes x for it beyond the threshold, which is no more than rounding from 20 on."""
    if a.beta != 1 or a.threshold < 20:
        raise UnsupportedError(f"beta={a.beta}, threshold={a.threshold}: beyond that torch computes another function")
    return _curve("Softplus")(t, step, a)


# --- shapes, and what changes nothing --------------------------------------------------------------------------------


def _reshape(t: ModuleTranslator, step: TracedCall, a: Any) -> int:
    return t.build.reshape(t.node(a.self), t.sample(step), step.label)


def _permuted(t: ModuleTranslator, step: TracedCall, x: Any, axes: Sequence[int]) -> int:
    if axes[0] % len(axes):
        raise UnsupportedError("the batch axis does not stay the first one")
    return t.build.permute(t.node(x), tuple(axis % len(axes) - 1 for axis in axes[1:]), step.label)


def _transpose(t: ModuleTranslator, step: TracedCall, a: Any) -> int:
    axes = list(range(step.result.ndim))
    axes[a.dim0], axes[a.dim1] = axes[a.dim1], axes[a.dim0]
    return _permuted(t, step, a.self, axes)


def _as_strided(t: ModuleTranslator, step: TracedCall, a: Any) -> int:
    """A mark of a memory format, as torch gives it to what it pools: each element stays at its place in memory."""
    x, made = step.arguments["self"], step.result
    kept = all(n == 1 or old == new for n, old, new in zip(made.shape, x.stride(), made.stride(), strict=True))
    if not kept or made.shape != x.shape or made.storage_offset() != x.storage_offset():
        raise UnsupportedError("another view of a tensor's memory")
    return t.node(a.self)


OPERATORS: dict[str, Converter] = {
    "mm": lambda t, step, a: _linear(t, step, a.self, a.mat2),
    "addmm": _addmm,
    "convolution": _convolution,
    "avg_pool2d": _avg_pool2d,
    "mean": _mean,
    "native_batch_norm": _batch_norm,
    "add": lambda t, step, a: t.sum(step, a.self, a.other, a.alpha),
    "sub": lambda t, step, a: t.sum(step, a.self, a.other, -a.alpha),
    "rsub": lambda t, step, a: t.sum(step, a.other, a.self, -a.alpha),
    "mul": _mul,
    "div": _div,
    "neg": lambda t, step, a: t.scaled(step, t.node(a.self), "scale", t.constant(step, -1.0)),
    "relu": _plain(Relu),
    "sigmoid": _plain(Sigmoid),
    "tanh": _plain(Tanh),
    "leaky_relu": lambda t, step, a: _leaky_relu(t, step, a.self, a.negative_slope),
    "_prelu_kernel": lambda t, step, a: _leaky_relu(t, step, a.self, a.weight),
    "gelu": _gelu,
    "silu": _curve("SiLU"),
    "mish": _curve("Mish"),
    "hardswish": _curve("HardSwish"),
    "softplus": _softplus,
    **{name.lower(): _curve(name) for name in ("Asin", "Acos", "Asinh", "Acosh", "Atanh")},
    **dict.fromkeys(("view", "_unsafe_view", "squeeze", "unsqueeze"), _reshape),
    "permute": lambda t, step, a: _permuted(t, step, a.self, a.dims),
    "transpose": _transpose,
    "as_strided": _as_strided,
    # The shape of the result tells if all of the tensor is taken, or changed.
    **dict.fromkeys(("alias", "clone", "detach", "expand", "slice", "_to_copy"), lambda t, step, a: t.node(a.self)),
    **dict.fromkeys(("copy", "slice_scatter"), lambda t, step, a: t.node(a.src)),
}
"""By the operator's name, how its node is made."""
