"""From ATen operators to nodes of a network: a table with one row for each operator that is understood.

The batch is axis 0 of every computed value and stays there; what would mix, move or count samples is refused.
Nodes hold the module's own tensors, or what autograd derives from them, so that a network is differentiable with
respect to the module's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.network.build import Builder
from verifiable_relu.network.derived import deviations, quotient, scaled
from verifiable_relu.network.graph import Network
from verifiable_relu.network.module.capture import GATE, NotFollowed, Program, Ref, Step
from verifiable_relu.network.nodes import Activation, Gelu, LeakyRelu, Relu, Shape, Sigmoid, Tanh
from verifiable_relu.network.simplify import needed
from verifiable_relu.nn import HardnessGate, LambdaGELU

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
                node = OPERATORS[step.op](self, step, **step.arguments)
                if (self.batch, *self.build.shape(node)) != step.shape:
                    raise UnsupportedError(f"a result of shape {step.shape} for a batch of {self.batch}")
            except InputError as error:
                raise NotFollowed(error.message, place=error.place or step.place) from error
            except (TypeError, ValueError, IndexError, RuntimeError) as error:
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
        index = self.build.scale(source, label(step), error=error, **parts)
        if error:
            return index
        self.parts[index] = source, parts
        return index

    def times(self, step: Step, number: Tensor, factor: float) -> tuple[Tensor, float]:
        """A constant times a number, and its relative error."""
        if not self.exact:
            return number * factor, 0.0
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
        return self.build.add(self.node(x), node, label(step))

    def activation(self, step: Step, x: Ref, kind: type[Activation], **parameters: Tensor) -> int:
        return self.build.activation(self.node(x), kind, label(step), **parameters)


def label(step: Step) -> str:
    """What a step's nodes are called."""
    return step.path or step.op


Converter = Callable[..., int]

# Converters take the arguments of ATen's schema, ``self`` among them, by their names there.


# --- affine ----------------------------------------------------------------------------------------------------------


def _linear(t: Translator, step: Step, /, input: Ref, weight: Tensor, bias: Tensor | None) -> int:
    require_constant(weight, bias)
    return t.build.linear(t.node(input), weight, bias, label(step))


def _matmul(t: Translator, step: Step, /, self: Ref, other: Tensor) -> int:
    require_constant(other)
    if other.ndim != 2:
        raise UnsupportedError(f"multiplies by a tensor of {other.ndim} axes, where a matrix is expected")
    return t.build.linear(t.node(self), other.T, None, label(step))


def _mm(t: Translator, step: Step, /, self: Ref, mat2: Tensor) -> int:
    return _matmul(t, step, self=self, other=mat2)


def _addmm(t: Translator, step: Step, /, self: Tensor, mat1: Ref, mat2: Tensor, beta: float, alpha: float) -> int:
    require_constant(self, mat2)
    bias, error = t.times(step, t.constant(step, self), beta)
    weight, other = t.times(step, mat2.T, alpha)
    return t.build.linear(t.node(mat1), weight, bias, label(step), max(error, other))


def _conv2d(
    t: Translator,
    step: Step,
    /,
    input: Ref,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int] | str,
    dilation: Sequence[int],
    groups: int,
) -> int:
    require_constant(weight, bias)
    dilation = _pair(dilation)
    if isinstance(padding, str):
        total = [d * (k - 1) * (padding == "same") for d, k in zip(dilation, weight.shape[2:], strict=True)]
        before = total[0] // 2, total[1] // 2
        after = total[0] - before[0], total[1] - before[1]
    else:
        before = after = _pair(padding)
    return t.build.conv2d(
        t.node(input),
        weight,
        bias,
        label(step),
        stride=_pair(stride),
        padding=(*before, *after),
        dilation=dilation,
        groups=groups,
    )


def _pair(value: Sequence[int]) -> tuple[int, int]:
    return value[0], value[-1]


def _avg_pool2d(
    t: Translator,
    step: Step,
    /,
    self: Ref,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> int:
    pads = _pair(padding)
    if ceil_mode or divisor_override is not None or (any(pads) and not count_include_pad):
        raise UnsupportedError("ceil_mode, divisor_override and count_include_pad=False are not supported")
    return t.build.average_pool(
        t.node(self), _pair(kernel_size), _pair(stride or kernel_size), (*pads, *pads), label(step)
    )


def _mean(
    t: Translator, step: Step, /, self: Ref, dim: Sequence[int] | None = None, keepdim: bool = False, dtype: Any = None
) -> int:
    shape = t.shape(self)
    if len(shape) != 3 or dim is None or sorted(axis % 4 for axis in dim) != [2, 3]:
        raise UnsupportedError("a mean is supported over the height and width of (batch, channels, height, width)")
    pooled = t.build.average_pool(t.node(self), (shape[1], shape[2]), (1, 1), (0, 0, 0, 0), label(step))
    return t.build.reshape(pooled, step.shape[1:], label(step))


def _batch_norm(
    t: Translator,
    step: Step,
    /,
    input: Ref,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> int:
    if training or running_mean is None or running_var is None:
        raise UnsupportedError("with the batch's own statistics it is no fixed function of one sample")
    require_constant(weight, bias, running_mean, running_var)
    shape = (-1, *(1,) * (len(step.shape) - 2))
    gamma = torch.ones_like(running_var) if weight is None else weight
    error = 0.0
    if t.exact:
        scale, error = deviations(gamma, running_var, eps)
    else:
        scale = (gamma.double() / (running_var.double() + eps).sqrt()).to(running_var.dtype)
    shift = torch.zeros_like(running_mean) if bias is None else bias
    center = running_mean.reshape(shape)
    return t.build.scale(
        t.node(input), label(step), center=center, scale=scale.reshape(shape), shift=shift.reshape(shape), error=error
    )


def require_constant(*tensors: Any) -> None:
    """Make certain that parameters are tensors, or None.

    Raises:
        UnsupportedError: if one is computed from the input.
    """
    if any(isinstance(tensor, Ref) for tensor in tensors):
        raise UnsupportedError("a parameter that is itself computed from the input")


def _add(t: Translator, step: Step, /, self: Any, other: Any, alpha: float = 1) -> int:
    return t.sum(step, self, other, alpha)


def _sub(t: Translator, step: Step, /, self: Any, other: Any, alpha: float = 1) -> int:
    return t.sum(step, self, other, -alpha)


def _rsub(t: Translator, step: Step, /, self: Any, other: Any, alpha: float = 1) -> int:
    return t.sum(step, other, self, -alpha)


def _mul(t: Translator, step: Step, /, self: Any, other: Any) -> int:
    if isinstance(self, Ref) and isinstance(other, Ref):
        raise UnsupportedError("multiplies two computed values")
    x, number = (self, other) if isinstance(self, Ref) else (other, self)
    return t.scaled(step, t.node(x), "scale", t.constant(step, number))


def _div(t: Translator, step: Step, /, self: Any, other: Any, rounding_mode: str | None = None) -> int:
    if isinstance(other, Ref):
        raise UnsupportedError("divides by a computed value")
    if rounding_mode is not None:
        raise UnsupportedError(f"rounds (rounding_mode='{rounding_mode}')")
    number = t.constant(step, other)
    if t.exact:
        factor, error = quotient(1.0, number)
        return t.scaled(step, t.node(self), "scale", factor.to(number.device), error)
    return t.scaled(step, t.node(self), "scale", (1 / number.double()).to(number.dtype))


def _neg(t: Translator, step: Step, /, self: Ref) -> int:
    return t.scaled(step, t.node(self), "scale", t.constant(step, -1.0))


# --- activations -----------------------------------------------------------------------------------------------------


def _plain(kind: type[Activation]) -> Converter:
    def convert(t: Translator, step: Step, /, self: Ref) -> int:
        return t.activation(step, self, kind)

    return convert


def _leaky_relu(t: Translator, step: Step, /, self: Ref, negative_slope: float) -> int:
    return t.activation(step, self, LeakyRelu, slope=t.constant(step, negative_slope))


def _prelu(t: Translator, step: Step, /, self: Ref, weight: Tensor) -> int:
    require_constant(weight)
    slope = weight.reshape(()) if weight.numel() == 1 else weight.reshape(-1, *(1,) * (len(step.shape) - 2))
    return t.activation(step, self, LeakyRelu, slope=slope)


def _gelu(t: Translator, step: Step, /, self: Ref, approximate: str) -> int:
    require_exact(approximate)
    return t.activation(step, self, Gelu, lam=t.constant(step, 1.0))


def _gate(t: Translator, step: Step, /, self: Ref, gate: HardnessGate) -> int:
    if not isinstance(gate, LambdaGELU):
        raise UnsupportedError(f"{type(gate).__name__} has no bounds: nn.substitute_relu replaces it by ReLU")
    require_exact(gate.approximate)
    return t.activation(step, self, Gelu, lam=gate.lam)


def require_exact(approximate: str) -> None:
    """Make certain that a GELU is the exact one.

    Raises:
        UnsupportedError: if it is not.
    """
    if approximate != "none":
        raise UnsupportedError(f"approximate='{approximate}': only the exact form has bounds; use approximate='none'")


# --- shapes, and what changes nothing --------------------------------------------------------------------------------


def _reshape(t: Translator, step: Step, /, self: Ref, dtype: Any = None, **how: Any) -> int:
    if dtype is not None:
        raise UnsupportedError("takes the bits of numbers for other numbers")
    if step.shape[:1] != (t.batch,):
        raise UnsupportedError(f"the batch axis does not stay the first one (a result of shape {step.shape})")
    return t.build.reshape(t.node(self), step.shape[1:], label(step))


def _permuted(t: Translator, step: Step, x: Ref, axes: Sequence[int]) -> int:
    axes = [axis % len(step.shape) for axis in axes]
    if axes[0] != 0:
        raise UnsupportedError("the batch axis does not stay the first one")
    return t.build.permute(t.node(x), tuple(axis - 1 for axis in axes[1:]), label(step))


def _permute(t: Translator, step: Step, /, self: Ref, dims: Sequence[int]) -> int:
    return _permuted(t, step, self, dims)


def _transpose(t: Translator, step: Step, /, self: Ref, dim0: int, dim1: int) -> int:
    axes = list(range(len(step.shape)))
    axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
    return _permuted(t, step, self, axes)


def _whole(t: Translator, step: Step, /, self: Ref, **which: Any) -> int:
    if step.shape[1:] != t.shape(self):
        raise UnsupportedError("a part of a computed tensor, or more than one copy of it")
    return t.node(self)


def _same(t: Translator, step: Step, /, self: Ref, **how: Any) -> int:
    return t.node(self)


def _copy(t: Translator, step: Step, /, self: Ref, src: Ref, non_blocking: bool) -> int:
    if t.shape(src) != step.shape[1:]:
        raise UnsupportedError("copies a tensor of another shape")
    return t.node(src)


def _dropout(t: Translator, step: Step, /, p: float, train: bool, input: Any = None, self: Any = None) -> int:
    if train:
        raise UnsupportedError("random numbers are drawn in evaluation mode, too")
    return t.node(self if input is None else input)


OPERATORS: dict[str, Converter] = {
    "linear": _linear,
    "matmul": _matmul,
    "mm": _mm,
    "addmm": _addmm,
    "conv2d": _conv2d,
    "avg_pool2d": _avg_pool2d,
    "mean": _mean,
    "batch_norm": _batch_norm,
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "mul": _mul,
    "div": _div,
    "neg": _neg,
    "relu": _plain(Relu),
    "sigmoid": _plain(Sigmoid),
    "tanh": _plain(Tanh),
    "leaky_relu": _leaky_relu,
    "prelu": _prelu,
    "gelu": _gelu,
    GATE: _gate,
    "view": _reshape,
    "_unsafe_view": _reshape,
    "_reshape_alias": _reshape,
    "reshape": _reshape,
    "flatten": _reshape,
    "squeeze": _reshape,
    "unsqueeze": _reshape,
    "expand": _whole,
    "permute": _permute,
    "transpose": _transpose,
    "slice": _whole,
    "alias": _same,
    "detach": _same,
    "clone": _same,
    "_to_copy": _same,
    "copy": _copy,
    "dropout": _dropout,
    "feature_dropout": _dropout,
    "alpha_dropout": _dropout,
    "feature_alpha_dropout": _dropout,
}
"""By the operator's name, how its node is made; the node's index is returned."""
