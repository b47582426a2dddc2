"""From a torch module to a network, by torch.fx: the module's own parameters, live, so that losses see them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.network.build import Builder
from verifiable_relu.network.graph import Gelu, LeakyRelu, Network, Relu, Shape, Sigmoid, Tanh
from verifiable_relu.nn import LambdaGELU, Normalize


class _Tracer(fx.Tracer):
    """Traces into everything but the modules that the table knows."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in MODULES or super().is_leaf_module(m, module_qualified_name)


def from_torch(module: nn.Module, input_shape: Shape, name: str = "network") -> Network:
    """The network that a module computes in evaluation mode.

    Its parameters are the module's own tensors (not copies), so that it is differentiable with respect to them.
    1/std of a normalisation and γ/√(σ² + ε) of a batch normalisation are numbers of the parameters' precision: the
    network *is* what ``write_onnx`` writes, and its outputs differ from the module's by float rounding only.

    Args:
        module: composed of the layers and functions of this file's tables.
        input_shape: of one sample.
        name: what to call the network.

    Raises:
        UnsupportedError: if a layer or function is not supported; names it.
        InputError: if shapes do not fit, or a parameter is not finite.
    """
    try:
        graph = _Tracer().trace(module)
    except (fx.proxy.TraceError, TypeError, RuntimeError) as error:
        raise UnsupportedError(
            f"the module cannot be traced: {error}", place=f"module {type(module).__name__}"
        ) from error
    modules = dict(module.named_modules())
    first = next(chain(module.parameters(), module.buffers()), None)
    build = Builder(tuple(input_shape), device="cpu" if first is None else first.device)
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        args = fx.map_arg(node.args, values.__getitem__)
        kwargs = fx.map_arg(node.kwargs, values.__getitem__)
        place = f"'{node.name}' ({node.target})"
        try:
            if node.op == "placeholder":
                if len(values):
                    raise UnsupportedError("a second input")
                values[node] = _Value(0)
            elif node.op == "get_attr":
                values[node] = operator.attrgetter(node.target)(module)
            elif node.op == "output":
                if not isinstance(args[0], _Value):
                    raise UnsupportedError("an output that is not one tensor")
                return build.network(args[0].index, name=name)
            else:
                target = modules[node.target] if node.op == "call_module" else node.target
                known: Any = {"call_module": MODULES, "call_function": FUNCTIONS, "call_method": METHODS}[node.op]
                key = type(target) if node.op == "call_module" else target
                if key not in known:
                    raise UnsupportedError(f"{getattr(key, '__name__', key)} is not supported")
                own = (target,) if node.op == "call_module" else ()
                values[node] = known[key](_Context(build, node.name), *own, *args, **kwargs)
        except InputError as error:
            if error.place is not None:
                raise
            raise type(error)(error.message, place=place) from error
        except (AttributeError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise UnsupportedError(f"used in a way that is not supported: {error}", place=place) from error
    raise UnsupportedError("the module returns nothing")


class _Value:
    """A traced tensor that is a node of the network, with a batch axis before its shape."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Context:
    """Where converters add nodes, and under which name."""

    def __init__(self, build: Builder, name: str) -> None:
        self.build = build
        self.name = name

    def shape(self, x: _Value) -> Shape:
        return self.build.shape(x.index)

    def reshaped(self, x: _Value, shape: Shape) -> _Value:
        return _Value(self.build.reshape(x.index, shape, self.name))

    def constant(self, number: float) -> Tensor:
        return torch.tensor(number, device=self.build.device)

    def activation(self, x: _Value, kind: type[Any], **parameters: Tensor) -> _Value:
        return _Value(self.build.activation(x.index, kind, self.name, **parameters))


# --- modules ---------------------------------------------------------------------------------------------------------


def _linear(c: _Context, m: nn.Linear, x: _Value) -> _Value:
    return _Value(c.build.linear(x.index, m.weight, m.bias, c.name))


def _conv2d(c: _Context, m: nn.Conv2d, x: _Value) -> _Value:
    if m.padding_mode != "zeros" or isinstance(m.padding, str):
        raise UnsupportedError(f"padding '{m.padding}' of mode '{m.padding_mode}'")
    rows, columns = m.padding
    index = c.build.conv2d(
        x.index,
        m.weight,
        m.bias,
        c.name,
        stride=m.stride,  # type: ignore[arg-type]
        padding=(rows, columns, rows, columns),
        dilation=m.dilation,  # type: ignore[arg-type]
        groups=m.groups,
    )
    return _Value(index)


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def _average_pool(c: _Context, m: nn.AvgPool2d, x: _Value) -> _Value:
    rows, columns = _pair(m.padding)
    if m.ceil_mode or m.divisor_override or ((rows or columns) and not m.count_include_pad):
        raise UnsupportedError("ceil_mode, divisor_override and count_include_pad=False are not supported")
    padding = (rows, columns, rows, columns)
    return _Value(c.build.average_pool(x.index, _pair(m.kernel_size), _pair(m.stride), padding, c.name))


def _batch_norm(c: _Context, m: nn.BatchNorm1d | nn.BatchNorm2d, x: _Value) -> _Value:
    if m.running_mean is None or m.running_var is None:
        raise UnsupportedError("without running statistics it is no fixed function of one sample")
    shape = (-1, *(1,) * (len(c.shape(x)) - 1))
    gamma = torch.ones_like(m.running_var) if m.weight is None else m.weight
    scale = (gamma.double() / (m.running_var.double() + m.eps).sqrt()).to(m.running_var.dtype)
    shift = torch.zeros_like(m.running_mean) if m.bias is None else m.bias
    center = m.running_mean.reshape(shape)
    return _Value(c.build.scale(x.index, c.name, center=center, scale=scale.reshape(shape), shift=shift.reshape(shape)))


def _normalize(c: _Context, m: Normalize, x: _Value) -> _Value:
    scale = (1 / m.std.double()).to(m.std.dtype)
    return _Value(c.build.scale(x.index, c.name, center=m.mean, scale=scale))


def _lambda_gelu(c: _Context, m: LambdaGELU, x: _Value) -> _Value:
    if m.approximate != "none":
        raise UnsupportedError(f"approximate='{m.approximate}': only the exact form has bounds")
    return c.activation(x, Gelu, lam=m.lam)


def _gelu(c: _Context, m: nn.GELU, x: _Value) -> _Value:
    if m.approximate != "none":
        raise UnsupportedError(f"approximate='{m.approximate}': only the exact form has bounds")
    return c.activation(x, Gelu, lam=c.constant(1.0))


def _leaky_relu(c: _Context, m: nn.LeakyReLU, x: _Value) -> _Value:
    return c.activation(x, LeakyRelu, slope=c.constant(m.negative_slope))


def _prelu(c: _Context, m: nn.PReLU, x: _Value) -> _Value:
    slope = m.weight.reshape(()) if m.weight.numel() == 1 else m.weight.reshape(-1, *(1,) * (len(c.shape(x)) - 1))
    return c.activation(x, LeakyRelu, slope=slope)


def _flatten_module(c: _Context, m: nn.Flatten, x: _Value) -> _Value:
    return _flatten(c, x, m.start_dim, m.end_dim)


def _identity(c: _Context, m: nn.Module, x: _Value) -> _Value:
    return x


MODULES: dict[type[nn.Module], Callable[..., _Value]] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv2d,
    nn.AvgPool2d: _average_pool,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    Normalize: _normalize,
    LambdaGELU: _lambda_gelu,
    nn.GELU: _gelu,
    nn.ReLU: lambda c, m, x: c.activation(x, Relu),
    nn.LeakyReLU: _leaky_relu,
    nn.PReLU: _prelu,
    nn.Sigmoid: lambda c, m, x: c.activation(x, Sigmoid),
    nn.Tanh: lambda c, m, x: c.activation(x, Tanh),
    nn.Flatten: _flatten_module,
    nn.Dropout: _identity,
    nn.Identity: _identity,
}


# --- functions and methods -------------------------------------------------------------------------------------------


def _flatten(c: _Context, x: _Value, start_dim: int = 0, end_dim: int = -1) -> _Value:
    shape = c.shape(x)
    rank = len(shape) + 1
    start, end = start_dim % rank, end_dim % rank
    if start == 0:
        raise UnsupportedError("flattens the batch axis")
    joined = 1
    for size in shape[start - 1 : end]:
        joined *= size
    return c.reshaped(x, (*shape[: start - 1], joined, *shape[end:]))


def _view(c: _Context, x: _Value, *sizes: Any) -> _Value:
    target = list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int | _Batch) else sizes)
    if not (isinstance(target[0], _Batch) or (target[0] == -1 and -1 not in target[1:])):
        raise UnsupportedError(f"reshapes the batch axis (to {target})")
    rest = [int(size) for size in target[1:]]
    count = 1
    for size in c.shape(x):
        count *= size
    known = 1
    for size in rest:
        known *= size if size != -1 else 1
    return c.reshaped(x, tuple(count // known if size == -1 else size for size in rest))


class _Batch:
    """What ``x.size(0)`` is: the batch's size, unknown."""


def _size(c: _Context, x: _Value, dim: int | None = None) -> Any:
    sizes = (_Batch(), *c.shape(x))
    return sizes if dim is None else sizes[dim]


def _add(c: _Context, x: Any, y: Any) -> _Value:
    if isinstance(x, _Value) and isinstance(y, _Value):
        return _Value(c.build.add(x.index, y.index, c.name))
    x, y = (x, y) if isinstance(x, _Value) else (y, x)
    return _Value(c.build.scale(x.index, c.name, shift=_number(c, x, y)))


def _sub(c: _Context, x: Any, y: Any) -> _Value:
    if not isinstance(y, _Value):
        return _Value(c.build.scale(x.index, c.name, center=_number(c, x, y)))
    negative = c.build.scale(y.index, c.name, scale=c.constant(-1.0))
    return _add(c, x, _Value(negative))


def _mul(c: _Context, x: Any, y: Any) -> _Value:
    if isinstance(x, _Value) and isinstance(y, _Value):
        raise UnsupportedError("multiplies two computed values")
    x, y = (x, y) if isinstance(x, _Value) else (y, x)
    return _Value(c.build.scale(x.index, c.name, scale=_number(c, x, y)))


def _div(c: _Context, x: Any, y: Any) -> _Value:
    if isinstance(y, _Value):
        raise UnsupportedError("divides by a computed value")
    number = _number(c, x, y)
    return _Value(c.build.scale(x.index, c.name, scale=(1 / number.double()).to(number.dtype)))


def _number(c: _Context, x: _Value, y: Any) -> Tensor:
    """A constant operand without the batch axis."""
    number = y if isinstance(y, Tensor) else c.constant(float(y))
    return number[0] if number.ndim == len(c.shape(x)) + 1 and number.shape[0] == 1 else number


def _function(kind: type[Any]) -> Callable[..., _Value]:
    return lambda c, x, inplace=False: c.activation(x, kind)


def _gelu_function(c: _Context, x: _Value, approximate: str = "none") -> _Value:
    return _gelu(c, nn.GELU(approximate), x)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    operator.add: _add,
    operator.sub: _sub,
    operator.mul: _mul,
    operator.truediv: _div,
    operator.neg: lambda c, x: _mul(c, x, -1.0),
    torch.add: _add,
    torch.sub: _sub,
    torch.mul: _mul,
    torch.div: _div,
    torch.flatten: _flatten,
    torch.reshape: _view,
    torch.relu: _function(Relu),
    torch.sigmoid: _function(Sigmoid),
    torch.tanh: _function(Tanh),
    F.relu: _function(Relu),
    F.gelu: _gelu_function,
    operator.getitem: lambda c, sizes, i: sizes[i],
    getattr: lambda c, x, attribute: _size(c, x) if attribute == "shape" else getattr(x, attribute),
}

METHODS: dict[str, Callable[..., Any]] = {
    "flatten": _flatten,
    "view": _view,
    "reshape": _view,
    "size": _size,
    "relu": _function(Relu),
    "sigmoid": _function(Sigmoid),
    "tanh": _function(Tanh),
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
}
