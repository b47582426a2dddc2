"""From ATen operators to ops of a flat network: a table with one row for each operator that is understood.

The batch is axis 0 of every computed tensor, alone or merged with the axis after it, as torch does for a product with a
matrix; what would mix, move or count samples is refused. A value has the shape of one sample. Ops hold the module's own
tensors, or what autograd derives from them, so that a network is differentiable with respect to the module's
parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.ir.functions import TORCH, Smooth
from verifiable_relu.ir.network import Network, Op, Shape, Source
from verifiable_relu.readers.builder import Builder, Value
from verifiable_relu.readers.derived import deviations, share
from verifiable_relu.readers.simplify import biased, finished, simplified
from verifiable_relu.readers.torch.trace import Trace, TracedCall, exchanged


class NotTranslated(UnsupportedError):
    """The table of operators has nothing for what a module does, and nothing forbids to read it."""


@dataclass(frozen=True)
class _Multiple:
    """A value as λ·x, or as GELU(λ·x): x, and the tensor λ as the module has it."""

    base: Value
    factor: Tensor
    given: object


class ModuleTranslator:
    """The translation of one trace.

    Args:
        trace: to be translated.
        exact: whether factors are rounded to float64 alone, and what they are off by is known.

    Attributes:
        multiples, gelus: by the number of an op that is λ·x, or GELU(λ·x), its parts.
    """

    def __init__(self, trace: Trace, exact: bool = False) -> None:
        self.trace, self.exact = trace, exact
        self.batch, *shape = trace.x.shape
        self.device = "cpu" if exact else trace.x.device
        self.build = Builder(tuple(shape))
        self.values = {id(trace.x): Value(0, tuple(shape))}
        self.multiples: dict[int, _Multiple] = {}
        self.gelus: dict[int, _Multiple] = {}

    def network(self, name: str) -> tuple[Network, Sequence[Op], dict[int, Tensor]]:
        """Return the network, the ops before any were merged, and what was observed there: (batch, size) by number.

        Raises:
            NotTranslated: if an operator is not in the table, or used in a way that no op has; names it.
            InputError: if a parameter is not finite.
        """
        observed: dict[int, Tensor] = {}
        for step in self.trace.steps:
            value = self.values[id(step.result)] = self.translated(step)
            if value.index is None:
                observed[value.op] = step.result.detach().reshape(self.batch, -1)
        if self.trace.output.shape[:1] != (self.batch,):
            raise NotTranslated("the batch axis does not stay the first one")
        output = self.values[id(self.trace.output)]
        graph = finished(self.build, output)
        # Only what is verified needs no gradients.
        ops = simplified(*graph) if self.exact else biased(*graph)
        source = Source(self.values[id(self.trace.x)].shape, output.shape or (1,))
        return Network(ops, source, name), self.build.ops, observed

    def translated(self, step: TracedCall) -> Value:
        """Return the value of a step."""
        self.build.name = step.label
        try:
            if step.op not in OPERATORS:
                raise UnsupportedError(f"aten.{step.op} is not supported")
            arguments = exchanged(step.arguments, self.operand)
            value = OPERATORS[step.op](self, step, SimpleNamespace(**arguments))
            if self.sample(step) != value.shape or step.result.dtype != self.trace.x.dtype:
                raise UnsupportedError(f"makes {step.result.dtype} of shape {tuple(step.result.shape)}")
            return value
        except InputError as error:
            raise NotTranslated(error.message, place=error.place or step.place) from error
        except (AttributeError, KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise NotTranslated(f"used in a way that is not supported: {error}", place=step.place) from error

    def operand(self, tensor: Tensor) -> Value | Tensor:
        """Return a tensor as the argument of an operator."""
        if id(tensor) in self.trace.computed:
            return self.values[id(tensor)]
        # Verification needs no gradients, and begins on the CPU whatever the device.
        return tensor.detach().cpu() if self.exact else self.trace.differentiable(tensor)

    def sample(self, step: TracedCall) -> Shape:
        """Return the shape of one sample of a step's result, the batch of which is its first axis, or a part of that.

        A tensor that has no axis but that of samples is one number for each.
        """
        first, *rest = step.result.shape or (0,)
        if not first or first % self.batch:
            raise UnsupportedError("the batch axis does not stay the first one")
        return (*rest,) if first == self.batch else (first // self.batch, *rest)

    def constant(self, step: TracedCall, number: Any) -> Tensor:
        """Return a constant operand of an element-wise operator without the batch axis, in the result's precision."""
        if isinstance(number, Value):
            raise UnsupportedError("two computed values where one is expected")
        if not isinstance(number, Tensor):
            return torch.tensor(number, dtype=step.result.dtype, device=self.device)
        found = number.to(step.result.dtype)
        if found.ndim < step.result.ndim:
            return found
        if len(found) > 1 and not bool((found == found[:1]).all()):
            raise UnsupportedError("a constant that differs from sample to sample")
        return found[0]

    def sum(self, step: TracedCall, x: Any, y: Any, factor: float) -> Value:
        """Return x + factor·y."""
        if not isinstance(y, Value):
            if abs(factor) != 1:
                raise UnsupportedError("a multiple of a constant")
            return self.build.scale(_computed(x), shift=factor * self.constant(step, y))
        turned = y if factor == 1 else self.build.scale(y, self.constant(step, factor))
        if not isinstance(x, Value):
            return self.build.scale(turned, shift=self.constant(step, x))
        return self.build.sum(*(self.build.broadcast(each, self.sample(step)) for each in (x, turned)))


def _computed(value: Any) -> Value:
    if not isinstance(value, Value):
        raise UnsupportedError("a constant where a computed value is expected")
    return value


Converter = Callable[[ModuleTranslator, TracedCall, Any], Value]
"""From a step and the arguments of ATen's schema, by their names there, ``self`` among them, to a value."""


# --- affine ----------------------------------------------------------------------------------------------------------


def _linear(t: ModuleTranslator, step: TracedCall, x: Any, matrix: Any, bias: Any = None) -> Value:
    """Return x·matrix + bias."""
    if isinstance(matrix, Value) or matrix.ndim != 2:
        raise UnsupportedError("multiplies by what is no constant matrix")
    return t.build.dense(_computed(x), matrix.T, None if bias is None else t.constant(step, bias))


def _addmm(t: ModuleTranslator, step: TracedCall, a: Any) -> Value:
    if a.beta != 1 or a.alpha != 1:
        raise UnsupportedError(f"beta={a.beta}, alpha={a.alpha}")
    return _linear(t, step, a.mat1, a.mat2, a.self)


def _convolution(t: ModuleTranslator, step: TracedCall, a: Any) -> Value:
    if isinstance(a.weight, Value) or isinstance(a.bias, Value) or a.transposed or len(a.stride) != 2:
        raise UnsupportedError("another convolution than one in two dimensions with constant weights")
    how = {"stride": (*a.stride,), "padding": (*a.padding, *a.padding), "dilation": (*a.dilation,), "groups": a.groups}
    return t.build.convolution(_computed(a.input), a.weight, a.bias, **how)


def _averaged(t: ModuleTranslator, x: Value, kernel: Shape, stride: Shape, pads: Shape) -> Value:
    """Return the mean over each window of each channel, zeros of the padding counted."""
    number, error = share(math.prod(kernel))
    weight = number.to(t.device).repeat(x.shape[-3], 1, *kernel)
    return t.build.convolution(x, weight, None, error, stride=stride, padding=pads, groups=len(weight))


def _avg_pool2d(t: ModuleTranslator, step: TracedCall, a: Any) -> Value:
    if a.ceil_mode or a.divisor_override is not None or (any(a.padding) and not a.count_include_pad):
        raise UnsupportedError("ceil_mode, divisor_override and count_include_pad=False are not supported")
    kernel, stride, pads = ((each[0], each[-1]) for each in (a.kernel_size, a.stride or a.kernel_size, a.padding))
    return _averaged(t, _computed(a.self), kernel, stride, pads * 2)


def _mean(t: ModuleTranslator, step: TracedCall, a: Any) -> Value:
    x, dim = _computed(a.self), getattr(a, "dim", None)
    if len(x.shape) != 3 or dim is None or sorted(axis % 4 for axis in dim) != [2, 3]:
        raise UnsupportedError("a mean is supported over the height and width of (batch, channels, height, width)")
    return _averaged(t, x, x.shape[1:], (1, 1), (0, 0, 0, 0)).reshaped(t.sample(step))


def _batch_norm(t: ModuleTranslator, step: TracedCall, a: Any) -> Value:
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
    return t.build.scale(_computed(a.input), scale, shift, center, error)


def _mul(t: ModuleTranslator, step: TracedCall, a: Any) -> Value:
    x, number = (a.self, a.other) if isinstance(a.self, Value) else (a.other, a.self)
    factor = t.constant(step, number)
    made = t.build.scale(_computed(x), factor)
    t.multiples[made.op] = _Multiple(x, factor, step.arguments["other"])
    return made


def _div(t: ModuleTranslator, step: TracedCall, a: Any) -> Value:
    if getattr(a, "rounding_mode", None) is not None:
        raise UnsupportedError(f"rounds (rounding_mode='{a.rounding_mode}')")
    x, number = _computed(a.self), t.constant(step, a.other)
    gelu = t.gelus.get(x.op)
    if gelu is not None and gelu.given is step.arguments["other"] and number.numel() == 1 and x.index is None:
        # GELU(λx)/λ, which is what λ-GELU consists of.
        lam = number.reshape(())
        return t.build.apply(gelu.base, Smooth("GELU", lam.item(), lam if lam.requires_grad else None))
    if not t.exact:
        return t.build.scale(x, (1 / number.double()).to(number.dtype))
    return t.build.divided(x, number)


# --- activations -----------------------------------------------------------------------------------------------------


def _function(kind: str) -> Converter:
    return lambda t, step, a: t.build.function(_computed(a.self), kind)


def _leaky_relu(t: ModuleTranslator, step: TracedCall, x: Any, slope: Any) -> Value:
    return t.build.leaky(_computed(x), t.constant(step, slope))


def _gelu(t: ModuleTranslator, step: TracedCall, a: Any) -> Value:
    x = _computed(a.self)
    made = t.build.function(x, "tanh-GELU" if a.approximate == "tanh" else "GELU")
    if a.approximate != "tanh" and x.index is None and x.op in t.multiples:
        t.gelus[made.op] = t.multiples[x.op]
    return made


def _softplus(t: ModuleTranslator, step: TracedCall, a: Any) -> Value:
    """Return ln(1 + exp(x)); torch takes x for it beyond the threshold, which is no more than rounding from 20 on."""
    if a.beta != 1 or a.threshold < 20:
        raise UnsupportedError(f"beta={a.beta}, threshold={a.threshold}: beyond that torch computes another function")
    return t.build.function(_computed(a.self), "Softplus")


# --- shapes, and what changes nothing --------------------------------------------------------------------------------


def _reshape(t: ModuleTranslator, step: TracedCall, a: Any) -> Value:
    return _computed(a.self).reshaped(t.sample(step))


def _permuted(t: ModuleTranslator, step: TracedCall, x: Any, axes: Sequence[int]) -> Value:
    if axes[0] % len(axes):
        raise UnsupportedError("the batch axis does not stay the first one")
    return t.build.transposed(_computed(x), tuple(axis % len(axes) - 1 for axis in axes[1:]))


def _transpose(t: ModuleTranslator, step: TracedCall, a: Any) -> Value:
    axes = list(range(step.result.ndim))
    axes[a.dim0], axes[a.dim1] = axes[a.dim1], axes[a.dim0]
    return _permuted(t, step, a.self, axes)


def _as_strided(t: ModuleTranslator, step: TracedCall, a: Any) -> Value:
    """Return a mark of a memory format, as torch gives it to what it pools: each element stays at its place."""
    x, made = step.arguments["self"], step.result
    kept = all(n == 1 or old == new for n, old, new in zip(made.shape, x.stride(), made.stride(), strict=True))
    if not kept or made.shape != x.shape or made.storage_offset() != x.storage_offset():
        raise UnsupportedError("another view of a tensor's memory")
    return _computed(a.self)


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
    "neg": lambda t, step, a: t.build.scale(_computed(a.self), t.constant(step, -1.0)),
    "relu": lambda t, step, a: t.build.relu(_computed(a.self)),
    "leaky_relu": lambda t, step, a: _leaky_relu(t, step, a.self, a.negative_slope),
    "_prelu_kernel": lambda t, step, a: _leaky_relu(t, step, a.self, a.weight),
    **{name: _function(kind) for name, kind in TORCH.items()},
    "gelu": _gelu,
    "softplus": _softplus,
    **dict.fromkeys(("view", "_unsafe_view", "squeeze", "unsqueeze"), _reshape),
    "permute": lambda t, step, a: _permuted(t, step, a.self, a.dims),
    "transpose": _transpose,
    "as_strided": _as_strided,
    # The shape of the result tells if all of the tensor is taken, or changed.
    **dict.fromkeys(("alias", "clone", "detach", "expand", "slice", "_to_copy"), lambda t, step, a: _computed(a.self)),
    **dict.fromkeys(("copy", "slice_scatter"), lambda t, step, a: _computed(a.src)),
}
"""By the operator's name, how its value is made."""
