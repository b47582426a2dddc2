"""From ATen operators to nodes of a network: a table with one row for each operator that is understood.

The batch is axis 0 of every computed value and stays there; what would mix, move or count samples is refused.
Nodes hold the module's own tensors, or what autograd derives from them, so that a network is differentiable with
respect to the module's parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.network.build import Builder
from verifiable_relu.network.derived import deviations, quotient, scaled, share
from verifiable_relu.network.graph import Network
from verifiable_relu.network.module.capture import GATE, NotFollowed, Program, Ref, Step
from verifiable_relu.network.nodes import Activation, Gelu, LeakyRelu, Relu, Scale, Shape, Sigmoid, Tanh, curve
from verifiable_relu.network.simplify import needed

_ORDER = ("center", "scale", "shift")
"""The parts of a Scale node in the order in which they act."""


class Translator:
    """Makes a network of one program.

    Args:
        program: to be translated.
        batch: on how many samples it was run.
        input_shape: of one sample.
        device: of the input.
        exact: whether factors are rounded to float64 alone, and what they are off by is known.
    """

    def __init__(
        self, program: Program, batch: int, input_shape: Shape, device: torch.device, exact: bool = False
    ) -> None:
        self.program = program
        self.batch = batch
        self.exact = exact
        self.build = Builder(input_shape, device=device)
        self.nodes: list[int] = [0]
        self.parts: dict[int, tuple[int, dict[str, Tensor]]] = {}

    def network(self, name: str) -> tuple[Network, dict[int, Tensor]]:
        """The network, and by node index the numbers that were observed there: (batch, *shape).

        Raises:
            UnsupportedError: if an operator is used in a way that no node has; names it.
            InputError: if a parameter is not finite.
        """
        for step in self.program.steps:
            try:
                node = OPERATORS[step.op](self, step, SimpleNamespace(**step.arguments))
                if (self.batch, *self.build.shape(node)) != step.shape:
                    raise UnsupportedError(f"a result of shape {step.shape} for a batch of {self.batch}")
            except InputError as error:
                raise NotFollowed(error.message, place=error.place or step.place) from error
            except (AttributeError, TypeError, ValueError, IndexError, RuntimeError) as error:
                raise NotFollowed(f"used in a way that is not supported: {error}", place=step.place) from error
            self.nodes.append(node)
        output = self.nodes[self.program.output]
        observed = {node: s.observed for node, s in zip(self.nodes[1:], self.program.steps, strict=True)}
        found = ((place, observed.get(old)) for place, old in enumerate(needed(self.build.nodes, output)))
        network = self.build.network(output, name=name)
        return network, {place: value for place, value in found if value is not None}

    def node(self, value: Any) -> int:
        """The node of a computed value.

        Raises:
            UnsupportedError: if the value does not depend on the input.
        """
        if not isinstance(value, Ref):
            raise UnsupportedError("a constant where a computed value is expected")
        return self.nodes[value.index]

    def shape(self, x: Ref) -> Shape:
        """The shape of a computed value, the batch not counted."""
        return self.build.shape(self.node(x))

    def constant(self, step: Step, value: Any) -> Tensor:
        """An operand of an element-wise operator without the batch axis, in the precision of the result.

        Raises:
            UnsupportedError: if it is another for each sample.
        """
        if not isinstance(value, Tensor):
            return torch.tensor(value, dtype=step.dtype, device=self.build.device)
        number = value.to(step.dtype)
        if number.ndim < len(step.shape):
            return number
        if len(number) > 1 and not bool((number == number[:1]).all()):
            raise UnsupportedError("a constant that differs from sample to sample")
        return number[0]

    def scaled(self, step: Step, x: int, part: str, value: Tensor, error: float = 0.0) -> int:
        """x − center, x·scale or x + shift, in one node with those that came right before it in this order.

        What is known up to a relative ``error`` has nothing after it in its node.
        """
        source, parts = self.parts.get(x, (x, {}))
        if any(_ORDER.index(key) >= _ORDER.index(part) or other.dtype != value.dtype for key, other in parts.items()):
            source, parts = x, {}
        parts = {**parts, part: value}
        index = self.build.scale(source, step.label, error=error, **parts)
        if error:
            return index
        self.parts[index] = source, parts
        return index

    def times(self, step: Step, number: Tensor, factor: float) -> tuple[Tensor, float]:
        """A constant times a number, and its relative error."""
        if factor == 1 or not self.exact:
            return (number if factor == 1 else number * factor), 0.0
        product, error = scaled(number.detach().cpu(), float(torch.tensor(factor, dtype=step.dtype, device="cpu")))
        return product.to(number.device), error

    def sum(self, step: Step, x: Any, y: Any, factor: float) -> int:
        """x + factor·y."""
        if not isinstance(y, Ref):
            number = self.constant(step, y)
            if factor == -1:
                return self.scaled(step, self.node(x), "center", number)
            number, error = self.times(step, number, factor)
            return self.scaled(step, self.node(x), "shift", number, error)
        node = self.node(y)
        if factor != 1:
            node = self.scaled(step, node, "scale", self.constant(step, factor))
        if not isinstance(x, Ref):
            return self.scaled(step, node, "shift", self.constant(step, x))
        return self.build.add(self.node(x), node, step.label)

    def linear(
        self, step: Step, x: Any, weight: Tensor, bias: Tensor | None = None, beta: float = 1, alpha: float = 1
    ) -> int:
        """alpha·x·weightᵀ + beta·bias."""
        require_constant(weight, bias)
        weight, error = self.times(step, weight, alpha)
        if bias is not None:
            bias, other = self.times(step, bias, beta)
            error = max(error, other)
        return self.build.linear(self.node(x), weight, bias, step.label, error)

    def activation(self, step: Step, x: Ref, kind: type[Activation], **parameters: Tensor) -> int:
        return self.build.activation(self.node(x), kind, step.label, **parameters)


Converter = Callable[[Translator, Step, Any], int]
"""From a step and the arguments of ATen's schema, by their names there, ``self`` among them, to the index of a node."""


def require_constant(*tensors: Any) -> None:
    """Make certain that parameters are tensors, or None.

    Raises:
        UnsupportedError: if one is computed from the input.
    """
    if any(isinstance(tensor, Ref) for tensor in tensors):
        raise UnsupportedError("a parameter that is itself computed from the input")


# --- affine ----------------------------------------------------------------------------------------------------------


def _matmul(t: Translator, step: Step, x: Any, other: Any) -> int:
    require_constant(other)
    if other.ndim != 2:
        raise UnsupportedError(f"multiplies by a tensor of {other.ndim} axes, where a matrix is expected")
    return t.linear(step, x, other.T)


def _addmm(t: Translator, step: Step, a: Any) -> int:
    require_constant(a.self, a.mat2)
    return t.linear(step, a.mat1, a.mat2.T, t.constant(step, a.self), a.beta, a.alpha)


def _conv2d(t: Translator, step: Step, a: Any) -> int:
    require_constant(a.weight, a.bias)
    dilation = _pair(a.dilation)
    if isinstance(a.padding, str):
        total = [d * (k - 1) * (a.padding == "same") for d, k in zip(dilation, a.weight.shape[2:], strict=True)]
        before = total[0] // 2, total[1] // 2
        after = total[0] - before[0], total[1] - before[1]
    else:
        before = after = _pair(a.padding)
    how = {"stride": _pair(a.stride), "padding": (*before, *after), "dilation": dilation, "groups": a.groups}
    return t.build.conv2d(t.node(a.input), a.weight, a.bias, step.label, **how)


def _pair(value: Sequence[int]) -> tuple[int, int]:
    return value[0], value[-1]


def _avg_pool2d(t: Translator, step: Step, a: Any) -> int:
    pads = _pair(a.padding)
    if a.ceil_mode or a.divisor_override is not None or (any(pads) and not a.count_include_pad):
        raise UnsupportedError("ceil_mode, divisor_override and count_include_pad=False are not supported")
    kernel, stride = _pair(a.kernel_size), _pair(a.stride or a.kernel_size)
    return t.build.average_pool(t.node(a.self), kernel, stride, (*pads, *pads), step.label)


def _adaptive_avg_pool2d(t: Translator, step: Step, a: Any) -> int:
    """The mean over windows that overlap, or differ in size, where the sides are no multiples of the output's."""
    channels, *sides = t.shape(a.self)
    rows, columns = (
        [range(i * n // m, -(-(i + 1) * n // m)) for i in range(m)] for n, m in zip(sides, step.shape[2:], strict=True)
    )
    places = torch.arange(channels * math.prod(sides)).reshape(channels, *sides)
    windows = [places[:, r.start : r.stop, c.start : c.stop].flatten(1) for r in rows for c in columns]
    most = max(window.shape[1] for window in windows)
    index = torch.stack([F.pad(window, (0, most - window.shape[1])) for window in windows], 1)
    shares = [share(window.shape[1]) for window in windows]
    filled = [F.pad(part.expand(w.shape), (0, most - w.shape[1])) for (part, _), w in zip(shares, windows, strict=True)]
    weight, error = torch.stack(filled, 1), max(off for _, off in shares)
    index, weight = (part.flatten(0, 1).to(t.build.device) for part in (index, weight))
    return t.build.sparse(t.node(a.self), index, weight, None, step.shape[1:], step.label, error)


def _mean(t: Translator, step: Step, a: Any) -> int:
    shape, dim = t.shape(a.self), getattr(a, "dim", None)
    if len(shape) != 3 or dim is None or sorted(axis % 4 for axis in dim) != [2, 3]:
        raise UnsupportedError("a mean is supported over the height and width of (batch, channels, height, width)")
    pooled = t.build.average_pool(t.node(a.self), (shape[1], shape[2]), (1, 1), (0, 0, 0, 0), step.label)
    return t.build.reshape(pooled, step.shape[1:], step.label)


def _batch_norm(t: Translator, step: Step, a: Any) -> int:
    if a.training or a.running_mean is None or a.running_var is None:
        raise UnsupportedError("with the batch's own statistics it is no fixed function of one sample")
    require_constant(a.weight, a.bias, a.running_mean, a.running_var)
    gamma = torch.ones_like(a.running_var) if a.weight is None else a.weight
    error = 0.0
    if t.exact:
        scale, error = deviations(gamma, a.running_var, a.eps)
    else:
        scale = (gamma.double() / (a.running_var.double() + a.eps).sqrt()).to(a.running_var.dtype)
    shift = torch.zeros_like(a.running_mean) if a.bias is None else a.bias
    center, scale, shift = (part.reshape(-1, *(1,) * (len(step.shape) - 2)) for part in (a.running_mean, scale, shift))
    return t.build.scale(t.node(a.input), step.label, center=center, scale=scale, shift=shift, error=error)


def _mul(t: Translator, step: Step, a: Any) -> int:
    if isinstance(a.self, Ref) and isinstance(a.other, Ref):
        raise UnsupportedError("multiplies two computed values")
    x, number = (a.self, a.other) if isinstance(a.self, Ref) else (a.other, a.self)
    return t.scaled(step, t.node(x), "scale", t.constant(step, number))


def _div(t: Translator, step: Step, a: Any) -> int:
    if isinstance(a.other, Ref):
        raise UnsupportedError("divides by a computed value")
    if getattr(a, "rounding_mode", None) is not None:
        raise UnsupportedError(f"rounds (rounding_mode='{a.rounding_mode}')")
    number = t.constant(step, a.other)
    if t.exact:
        factor, error = quotient(1.0, number)
        index = t.scaled(step, t.node(a.self), "scale", factor.to(number.device), error)
        made = t.build.nodes[index]
        assert isinstance(made, Scale)
        t.build.nodes[index] = replace(made, divisor=number)
        return index
    return t.scaled(step, t.node(a.self), "scale", (1 / number.double()).to(number.dtype))


# --- activations -----------------------------------------------------------------------------------------------------


def _plain(kind: type[Activation]) -> Converter:
    return lambda t, step, a: t.activation(step, a.self, kind)


def _prelu(t: Translator, step: Step, a: Any) -> int:
    require_constant(a.weight)
    shape = () if a.weight.numel() == 1 else (-1, *(1,) * (len(step.shape) - 2))
    return t.activation(step, a.self, LeakyRelu, slope=a.weight.reshape(shape))


def _gelu(t: Translator, step: Step, a: Any) -> int:
    if a.approximate == "tanh":
        return _curve("tanh-GELU")(t, step, a)
    return t.activation(step, a.self, Gelu, lam=t.constant(step, 1.0))


def _gate(t: Translator, step: Step, a: Any) -> int:
    return t.activation(step, a.self, Gelu, lam=a.gate.lam)


def _curve(function: str) -> Converter:
    return lambda t, step, a: t.build.append(curve(function, step.label, (t.node(a.self),), t.shape(a.self)))


def _softplus(t: Translator, step: Step, a: Any) -> int:
    """ln(1 + exp(x)); torch takes x for it beyond the threshold, which is no more than rounding from 20 on."""
    if a.beta != 1 or a.threshold < 20:
        raise UnsupportedError(f"beta={a.beta}, threshold={a.threshold}: it is another function beyond its threshold")
    return _curve("Softplus")(t, step, a)


# --- shapes, and what changes nothing --------------------------------------------------------------------------------


def _reshape(t: Translator, step: Step, a: Any) -> int:
    if getattr(a, "dtype", None) is not None:
        raise UnsupportedError("takes the bits of numbers for other numbers")
    if step.shape[:1] != (t.batch,):
        raise UnsupportedError(f"the batch axis does not stay the first one (a result of shape {step.shape})")
    return t.build.reshape(t.node(a.self), step.shape[1:], step.label)


def _permuted(t: Translator, step: Step, x: Ref, axes: Sequence[int]) -> int:
    axes = [axis % len(step.shape) for axis in axes]
    if axes[0] != 0:
        raise UnsupportedError("the batch axis does not stay the first one")
    return t.build.permute(t.node(x), tuple(axis - 1 for axis in axes[1:]), step.label)


def _transpose(t: Translator, step: Step, a: Any) -> int:
    axes = list(range(len(step.shape)))
    axes[a.dim0], axes[a.dim1] = axes[a.dim1], axes[a.dim0]
    return _permuted(t, step, a.self, axes)


def _whole(t: Translator, step: Step, a: Any) -> int:
    if step.shape[1:] != t.shape(a.self):
        raise UnsupportedError("a part of a computed tensor, or more than one copy of it")
    return t.node(a.self)


def _same(t: Translator, step: Step, a: Any) -> int:
    return t.node(a.self)


def _copy(t: Translator, step: Step, a: Any) -> int:
    if t.shape(a.src) != step.shape[1:]:
        raise UnsupportedError("copies a tensor of another shape")
    return t.node(a.src)


def _dropout(t: Translator, step: Step, a: Any) -> int:
    if a.train:
        raise UnsupportedError("random numbers are drawn in evaluation mode, too")
    return t.node(a.input if hasattr(a, "input") else a.self)


OPERATORS: dict[str, Converter] = {
    "linear": lambda t, step, a: t.linear(step, a.input, a.weight, a.bias),
    "matmul": lambda t, step, a: _matmul(t, step, a.self, a.other),
    "mm": lambda t, step, a: _matmul(t, step, a.self, a.mat2),
    "addmm": _addmm,
    "conv2d": _conv2d,
    "avg_pool2d": _avg_pool2d,
    "_adaptive_avg_pool2d": _adaptive_avg_pool2d,
    "mean": _mean,
    "batch_norm": _batch_norm,
    "add": lambda t, step, a: t.sum(step, a.self, a.other, a.alpha),
    "sub": lambda t, step, a: t.sum(step, a.self, a.other, -a.alpha),
    "rsub": lambda t, step, a: t.sum(step, a.other, a.self, -a.alpha),
    "mul": _mul,
    "div": _div,
    "neg": lambda t, step, a: t.scaled(step, t.node(a.self), "scale", t.constant(step, -1.0)),
    "relu": _plain(Relu),
    "sigmoid": _plain(Sigmoid),
    "tanh": _plain(Tanh),
    "leaky_relu": lambda t, step, a: t.activation(step, a.self, LeakyRelu, slope=t.constant(step, a.negative_slope)),
    "prelu": _prelu,
    "gelu": _gelu,
    "silu": _curve("SiLU"),
    "mish": _curve("Mish"),
    "hardswish": _curve("HardSwish"),
    "softplus": _softplus,
    **{name.lower(): _curve(name) for name in ("Asin", "Acos", "Asinh", "Acosh", "Atanh")},
    GATE: _gate,
    "permute": lambda t, step, a: _permuted(t, step, a.self, a.dims),
    "transpose": _transpose,
    "expand": _whole,
    "slice": _whole,
    "copy": _copy,
    **dict.fromkeys(("view", "_unsafe_view", "_reshape_alias", "reshape", "flatten", "squeeze", "unsqueeze"), _reshape),
    **dict.fromkeys(("alias", "detach", "clone", "_to_copy"), _same),
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"), _dropout),
}
"""By the operator's name, how its node is made."""
