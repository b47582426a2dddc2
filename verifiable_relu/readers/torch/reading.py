"""A network from a torch module: traced in evaluation mode, translated, and compared with the module.

A table has one row for each supported ATen operator. The batch is axis 0 of every computed tensor, alone or
merged with the axis after it, as torch does for a product with a matrix; what would mix, move or count samples is
refused. A value has the shape of one sample. Ops hold the module's own tensors, or what autograd derives from them, so
that a network is differentiable with respect to the module's parameters.

A trace with operators that the table lacks is read by way of torch's exporter (``exported``): an ONNX file in memory.
The exporter runs the steps of the trace again, on one sample. Weights and constants that the module has computed are
numbers there, nothing is changed in place, and what Python looked at has been decided before.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.ir.enclosure import find_difference, sample_points
from verifiable_relu.ir.functions import TORCH, Smooth
from verifiable_relu.ir.network import Elementwise, Network, Op, Shape, Source
from verifiable_relu.readers import read_onnx
from verifiable_relu.readers.builder import OpBuilder, Value
from verifiable_relu.readers.derived import deviations, share
from verifiable_relu.readers.simplify import biased, finished, simplified
from verifiable_relu.readers.torch.trace import Trace, TracedCall, exchanged, tensors, trace
from verifiable_relu.rounding import unit_roundoff
from verifiable_relu.settings import default_settings, user_settings


def from_torch(
    module: nn.Module,
    input_shape: Shape,
    name: str = "network",
    compared: bool = True,
    exact: bool = False,
    argument: str | None = None,
) -> Network:
    """Return the network that a module computes in evaluation mode.

    The module runs with its hooks on the device and in the precision of its first parameter. Training flags, buffers
    and the CPU's random numbers are afterwards what they were. What the exporter reads holds copies of parameters.

    Args:
        module: takes one tensor, (batch, *input_shape), and returns one, or a mapping or an object with
            one tensor of real numbers, or with one that is called ``logits``.
        input_shape: of one sample.
        name: what to call the network.
        compared: whether the numbers that each operator computes of four samples, and the module's outputs for these
            and for another one alone, must be the network's to within rounding. False only for whoever reads one module
            repeatedly, as losses do at each training step; the exporter is not used then.
        exact: for verification: 1/c and γ/√(σ² + ε) are rounded to float64 alone, and what they are off by is known
            (``Affine.weight_error``); else they are numbers of the parameters' precision, as in a file. A module that
            computes weights or constants, and rounds them, is refused, unless by a parametrisation
            (``torch.nn.utils.parametrize``) or one of torch's old hooks that computes a weight.
        argument: the name of the module's argument that takes the tensor; None stands for the first one.

    Raises:
        UnsupportedError: if the module is not a fixed network of known operators, or its numbers differ; names the
            module or operator.
        InputError: if the module fails for inputs of that shape, or a parameter is not finite.
    """
    place = f"module {type(module).__name__}"
    try:
        with _evaluating(module):
            return _read(_Called(module, argument), tuple(input_shape), name, compared, exact)
    except InputError as error:
        raise error if error.place else type(error)(error.message, place=place) from error


def runner(module: nn.Module, argument: str | None = None) -> Callable[[Tensor], Tensor]:
    """Return a function from a sample, (1, …), to a module's outputs in evaluation mode, on its own device."""

    @torch.no_grad()
    def run(x: Tensor) -> Tensor:
        with _evaluating(module):
            return cast(Tensor, _Called(module, argument)(x.to(_first(module)))).cpu()

    return run


class _Called(nn.Module):
    """Wrapper of a module that takes one tensor and returns one."""

    def __init__(self, module: nn.Module, argument: str | None) -> None:
        super().__init__()
        self.module, self.argument = module, argument

    def forward(self, x: Tensor) -> Any:
        made = self.module(x) if self.argument is None else self.module(**{self.argument: x})
        if isinstance(made, Tensor):
            return made
        named = dict(made) if isinstance(made, Mapping) else getattr(made, "__dict__", {})
        reals = [each for each in named.values() if isinstance(each, Tensor) and each.is_floating_point()]
        return named.get("logits", reals[0] if len(reals) == 1 else made)

    def named_modules(self, *how: Any, **more: Any) -> Iterator[tuple[str, nn.Module]]:
        # By the names that the user knows.
        return self.module.named_modules(*how, **more)


def _read(module: _Called, shape: Shape, name: str, compared: bool, exact: bool) -> Network:
    """Read by the table of operators, or where that does not do, and the network is to be compared, by the exporter."""
    if 0 in shape:
        raise InputError(f"an input of shape {shape} has no numbers")
    first = _first(module)
    if not compared:
        return ModuleTranslator(trace(module, first.new_zeros(1, *shape), exact), exact).network(name)[0]
    points = sample_points(shape, first.dtype).to(first.device)
    several, one = points[::3], points[1:2]
    try:
        network, ops, observed = ModuleTranslator(trace(module, several.clone(), exact), exact).network(name)
        _require_agreement(ops, several, observed, "the module is not the network that was read from it")
        _require_outputs(module, network, several, one)
    except NotTranslated as refusal:
        try:
            network = exported(trace(module, one.clone(), exact), name)
            _require_outputs(module, network, several, one)
        except InputError as error:
            # An ONNX file has float32 for numbers such as the ε of a normalisation.
            hint = "; in float32 (module.float()) it may be read" if first.dtype == torch.float64 else ""
            said = f"{refusal.message}; by way of torch's exporter: {error}{hint}"
            raise UnsupportedError(said, place=refusal.place) from error
    return network


@torch.no_grad()
def _require_outputs(module: nn.Module, network: Network, *batches: Tensor) -> None:
    """Make certain that what the module returns, when it is not traced, are the network's outputs."""
    said = "what it computes is not what was read, or depends on the size of the batch, or on how often it was called"
    shape = network.source.output_shape
    for x in batches:
        output = module(x.clone())
        shapes = [(len(x), *shape), (len(x),) if shape == (1,) else None]
        if not isinstance(output, Tensor) or output.shape not in shapes:
            raise UnsupportedError(f"{said}: a {type(output).__name__} of another shape")
        _require_agreement(network.ops, x, {len(network.ops) - 1: output.reshape(len(x), -1)}, said)


def _require_agreement(ops: Sequence[Op], x: Tensor, seen: dict[int, Tensor], said: str) -> None:
    found = find_difference(ops, x.flatten(1), seen, unit_roundoff(x.dtype))
    if found is not None:
        raise UnsupportedError(f"{said}: {found}", place=found.op.place)


def _first(module: nn.Module) -> Tensor:
    """Return the tensor that says in which precision and where the module computes."""
    held = [*module.parameters(), *module.buffers()]
    if any(is_lazy(tensor) or tensor.is_meta for tensor in held):
        raise UnsupportedError("it has parameters without numbers: call a lazy module once first")
    first = next((t for t in held if t.is_floating_point()), torch.zeros((), dtype=torch.float32, device="cpu"))
    if first.dtype not in (torch.float32, torch.float64):
        raise UnsupportedError(f"it is in {first.dtype}: convert it to float32 first")
    return first


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, and leave flags, buffers and random numbers as they were.

    Products in float32 are really taken in float32 meanwhile, also where the user prefers speed; and attention,
    normalisations and recurrent layers are computed by the operators that they consist of, not by fused ones.
    """
    # Modules that torch.jit.freeze made have no mode.
    flags = [(m, m.training) for m in module.modules() if hasattr(m, "training")]
    buffers = [(m, name, b, b.clone()) for m, _ in flags for name, b in m._buffers.items() if b is not None]
    fused, cudnn = torch._C._get_mkldnn_enabled(), torch.backends.cudnn.flags(enabled=False)
    # ``default_settings`` sets the precision of products: restoring the user's here would undo what a block around set.
    with default_settings(), user_settings(), torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH), cudnn:
        try:
            torch._C._set_mkldnn_enabled(False)
            if any(training for _, training in flags):
                module.eval()
            yield
        finally:
            torch._C._set_mkldnn_enabled(fused)
            for m, training in flags:
                # Parents first: ``train`` also sets the flags of what is inside.
                if m.training != training:
                    m.train(training)
            for m, name, buffer, copy in buffers:
                m._buffers[name] = buffer
                if not torch.equal(buffer, copy):
                    buffer.detach().copy_(copy)


# From ATen operators to ops of a flat network


class NotTranslated(UnsupportedError):
    """Refusal of an operator that is not in the table, after which the exporter is tried."""


class ModuleTranslator:
    """Translator of one trace into a network.

    Attributes:
        exact: whether factors are rounded to float64 alone, and what they are off by is known.
        factors: by the number of an op that is λ·x, or GELU(λ·x), x and λ as the module has it.
    """

    def __init__(self, trace: Trace, exact: bool = False) -> None:
        self.trace, self.exact = trace, exact
        self.batch, *shape = trace.x.shape
        self.device = "cpu" if exact else trace.x.device
        self.build = OpBuilder(tuple(shape))
        self.values = {id(trace.x): Value(0, tuple(shape))}
        self.factors: dict[int, tuple[Value, object]] = {}

    def network(self, name: str) -> tuple[Network, Sequence[Op], dict[int, Tensor]]:
        """Return the network, the ops before any were merged, and what was observed there: (batch, size) by number."""
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
        ops = (simplified if self.exact else biased)(*graph)
        source = Source(self.values[id(self.trace.x)].shape, output.shape or (1,))
        return Network(ops, source, name), self.build.ops, observed

    def translated(self, step: TracedCall) -> Value:
        """Return the value of a step."""
        self.build.name = step.path or step.op
        if step.op not in OPERATORS:
            raise NotTranslated(f"aten.{step.op} is not supported", place=step.place)
        try:
            value = OPERATORS[step.op](self, step, SimpleNamespace(**exchanged(step.arguments, self.operand)))
            if not isinstance(value, Value):
                raise UnsupportedError("a constant where a computed value is expected")
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
        """Return the shape of one sample of a step's result, whose batch is its first axis, or a part of that."""
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
            return self.build.scale(x, shift=factor * self.constant(step, y))
        turned = y if factor == 1 else self.build.scale(y, self.constant(step, factor))
        if not isinstance(x, Value):
            return self.build.scale(turned, shift=self.constant(step, x))
        return self.build.sum(*(self.build.broadcast(each, self.sample(step)) for each in (x, turned)))


Converter = Callable[[ModuleTranslator, TracedCall, Any], Value]
"""From a step and the arguments of ATen's schema, by their names there, ``self`` among them, to a value.

Where a constant stands for a computed value, the ``OpBuilder`` raises an AttributeError, which ``translated`` expects.
"""


def _linear(t: ModuleTranslator, step: TracedCall, x: Any, a: Any, bias: Any = None) -> Value:
    if isinstance(a.mat2, Value) or a.mat2.ndim != 2 or {getattr(a, name, 1) for name in ("alpha", "beta")} != {1}:
        raise UnsupportedError("a product with another operand than a constant matrix, or scaled by a number")
    return t.build.dense(x, a.mat2.T, None if bias is None else t.constant(step, bias))


def _convolution(t: ModuleTranslator, step: TracedCall, a: Any) -> Value:
    if isinstance(a.weight, Value) or isinstance(a.bias, Value) or a.transposed or len(a.stride) != 2:
        raise UnsupportedError("another convolution than one in two dimensions with constant weights")
    stride, padding, dilation = map(tuple, (a.stride, a.padding * 2, a.dilation))
    window = {"stride": stride, "padding": padding, "dilation": dilation, "groups": a.groups}
    return t.build.convolution(a.input, a.weight, a.bias, **window)


def _averaged(t: ModuleTranslator, x: Value, kernel: Shape, stride: Shape, pads: Shape) -> Value:
    """Return the mean over each window of each channel, zeros of the padding counted."""
    number, error = share(math.prod(kernel))
    weight = number.to(t.device).repeat(x.shape[-3], 1, *kernel)
    return t.build.convolution(x, weight, None, error, stride=stride, padding=pads, groups=len(weight))


def _avg_pool2d(t: ModuleTranslator, step: TracedCall, a: Any) -> Value:
    if a.ceil_mode or a.divisor_override is not None or (any(a.padding) and not a.count_include_pad):
        raise UnsupportedError("ceil_mode, divisor_override and count_include_pad=False are not supported")
    kernel, stride, pads = ((each[0], each[-1]) for each in (a.kernel_size, a.stride or a.kernel_size, a.padding))
    return _averaged(t, a.self, kernel, stride, pads * 2)


def _mean(t: ModuleTranslator, step: TracedCall, a: Any) -> Value:
    dim = getattr(a, "dim", None)
    if len(a.self.shape) != 3 or dim is None or sorted(axis % 4 for axis in dim) != [2, 3]:
        raise UnsupportedError("a mean is supported over the height and width of (batch, channels, height, width)")
    return _averaged(t, a.self, a.self.shape[1:], (1, 1), (0, 0, 0, 0)).reshaped(t.sample(step))


def _batch_norm(t: ModuleTranslator, step: TracedCall, a: Any) -> Value:
    if a.training or a.running_mean is None or a.running_var is None:
        raise UnsupportedError("with the batch's own statistics it is no fixed function of one sample")
    gamma, error = torch.ones_like(a.running_var) if a.weight is None else a.weight, 0.0
    shift = torch.zeros_like(a.running_mean) if a.bias is None else a.bias
    if t.exact:
        scale, error = deviations(gamma, a.running_var, a.eps)
    else:
        scale = (gamma.double() / (a.running_var.double() + a.eps).sqrt()).to(a.running_var.dtype)
    channels = (-1, *(1,) * (step.result.ndim - 2))
    scale, shift, center = (part.reshape(channels) for part in (scale, shift, a.running_mean))
    return t.build.scale(a.input, scale, shift, center, error)


def _mul(t: ModuleTranslator, step: TracedCall, a: Any) -> Value:
    x, number = (a.self, a.other) if isinstance(a.self, Value) else (a.other, a.self)
    made = t.build.scale(x, t.constant(step, number))
    t.factors[made.op] = x, step.arguments["other"]
    return made


def _gelu(t: ModuleTranslator, step: TracedCall, a: Any) -> Value:
    made = t.build.function(a.self, "tanh-GELU" if a.approximate == "tanh" else "GELU")
    if a.approximate != "tanh" and a.self.index is None and a.self.op in t.factors:
        t.factors[made.op] = t.factors[a.self.op]
    return made


def _div(t: ModuleTranslator, step: TracedCall, a: Any) -> Value:
    if getattr(a, "rounding_mode", None) is not None:
        raise UnsupportedError(f"rounds (rounding_mode='{a.rounding_mode}')")
    x, number = a.self, t.constant(step, a.other)
    base, lam = t.factors.get(x.op, (x, None)) if isinstance(t.build.ops[x.op], Elementwise) else (x, None)
    if lam is step.arguments["other"] and number.numel() == 1 and x.index is None:
        # GELU(λx)/λ, which is what λ-GELU consists of.
        number = number.reshape(())
        return t.build.apply(base, Smooth("GELU", number.item(), number if number.requires_grad else None))
    return t.build.divided(x, number) if t.exact else t.build.scale(x, (1 / number.double()).to(number.dtype))


def _softplus(t: ModuleTranslator, step: TracedCall, a: Any) -> Value:
    """Return ln(1 + exp(x)); torch takes x for it beyond the threshold, which is no more than rounding from 20 on."""
    if a.beta != 1 or a.threshold < 20:
        raise UnsupportedError(f"beta={a.beta}, threshold={a.threshold}: beyond that torch computes another function")
    return t.build.function(a.self, "Softplus")


def _permuted(t: ModuleTranslator, step: TracedCall, a: Any) -> Value:
    axes = list(getattr(a, "dims", range(step.result.ndim)))
    if step.op == "transpose":
        axes[a.dim0], axes[a.dim1] = axes[a.dim1], axes[a.dim0]
    if axes[0] % len(axes):
        raise UnsupportedError("the batch axis does not stay the first one")
    return t.build.transposed(a.self, tuple(axis % len(axes) - 1 for axis in axes[1:]))


def _as_strided(t: ModuleTranslator, step: TracedCall, a: Any) -> Value:
    """Return a mark of a memory format, as torch gives it to what it pools: each element stays at its place."""
    x, made = step.arguments["self"], step.result
    kept = all(n == 1 or old == new for n, old, new in zip(made.shape, x.stride(), made.stride(), strict=True))
    if not kept or made.shape != x.shape or made.storage_offset() != x.storage_offset():
        raise UnsupportedError("another view of a tensor's memory")
    return a.self


OPERATORS: dict[str, Converter] = {
    "mm": lambda t, step, a: _linear(t, step, a.self, a),
    "addmm": lambda t, step, a: _linear(t, step, a.mat1, a, a.self),
    "convolution": _convolution,
    "avg_pool2d": _avg_pool2d,
    "mean": _mean,
    "native_batch_norm": _batch_norm,
    "add": lambda t, step, a: t.sum(step, a.self, a.other, a.alpha),
    "sub": lambda t, step, a: t.sum(step, a.self, a.other, -a.alpha),
    "rsub": lambda t, step, a: t.sum(step, a.other, a.self, -a.alpha),
    "mul": _mul,
    "div": _div,
    "neg": lambda t, step, a: t.build.scale(a.self, t.constant(step, -1.0)),
    "relu": lambda t, step, a: t.build.relu(a.self),
    "leaky_relu": lambda t, step, a: t.build.leaky(a.self, t.constant(step, a.negative_slope)),
    "_prelu_kernel": lambda t, step, a: t.build.leaky(a.self, t.constant(step, a.weight)),
    **{name: lambda t, step, a, kind=kind: t.build.function(a.self, kind) for name, kind in TORCH.items()},  # type: ignore[misc]
    "gelu": _gelu,
    "softplus": _softplus,
    **dict.fromkeys(
        ("view", "_unsafe_view", "squeeze", "unsqueeze"), lambda t, step, a: a.self.reshaped(t.sample(step))
    ),
    **dict.fromkeys(("permute", "transpose"), _permuted),
    "as_strided": _as_strided,
    # The shape of the result tells if all of the tensor is taken, or changed.
    **dict.fromkeys(("alias", "clone", "detach", "expand", "slice", "_to_copy"), lambda t, step, a: a.self),
    **dict.fromkeys(("copy", "slice_scatter"), lambda t, step, a: a.src),
}
"""By the operator's name, how its value is made."""


# By way of torch's exporter


def exported(trace: Trace, name: str) -> Network:
    """Return the network of the file that torch's exporter writes of a trace of one sample, if it can."""
    file, silence, kept = io.BytesIO(), io.StringIO(), torch.onnx.TrainingMode.PRESERVE
    # What it logs of a failure goes to the screen past Python's streams.
    log = torch._C._jit_onnx_log
    logging.disable(logging.WARNING)
    torch._C._jit_onnx_log = lambda *what: None
    try:
        with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            steps, x = _Steps(trace).eval(), (trace.x.clone(),)
            torch.onnx.export(steps, x, file, training=kept, do_constant_folding=False, dynamo=False)  # type: ignore[arg-type]
    except Exception as error:  # the exporter's exceptions share no narrower base
        raise UnsupportedError("torch cannot export the module") from error
    finally:
        logging.disable(logging.NOTSET)
        torch._C._jit_onnx_log = log
    return read_onnx(file.getvalue(), name)


class _Steps(nn.Module):
    """Module that replays the steps of a trace."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace
        self.constants = {id(t): t.detach() for step in trace.steps for t in step.given}

    def forward(self, x: Tensor) -> Tensor:
        values = {**self.constants, id(self.trace.x): x}
        for step in self.trace.steps:
            arguments = exchanged(step.arguments, lambda t: values[id(t)])
            form = _FORMS.get("upsample" if step.op.startswith("upsample_") else step.op)
            given = SimpleNamespace(operator=step.op, **arguments)
            made = step.function(**arguments) if form is None else form(given)
            values.update({id(old): new for old, new in zip(tensors(step.made), tensors(made), strict=False)})
        return values[id(self.trace.output)]


def _upsampled(a: Any) -> Tensor:
    mode = a.operator.removeprefix("upsample_")[:-2]
    scales = [value for name, value in vars(a).items() if name.startswith("scales")]
    how = {"size": a.output_size} if None in scales else {"scale_factor": scales}
    return F.interpolate(a.self, mode=mode, align_corners=getattr(a, "align_corners", None), **how)


def _adaptive_average(a: Any) -> Tensor:
    """Return the means over windows that overlap, or differ in size, where the output's sides divide no input's."""
    sides = [
        [slice(i * n // m, -(-(i + 1) * n // m)) for i in range(m)]
        for n, m in zip(map(int, a.self.shape[2:]), a.output_size, strict=True)
    ]
    parts = [a.self[:, :, rows, columns].mean((2, 3)) for rows, columns in itertools.product(*sides)]
    return torch.stack(parts, 2).reshape(*a.self.shape[:2], *a.output_size)


def _layer_norm(a: Any) -> Tensor:
    """Return a layer normalisation; in float64 by its parts, as ONNX's own operator has ε in float32."""
    if a.input.dtype != torch.float64:
        return F.layer_norm(a.input, a.normalized_shape, a.weight, a.bias, a.eps)
    axes = tuple(range(-len(a.normalized_shape), 0))
    apart = a.input - a.input.mean(axes, keepdim=True)
    made = apart / torch.sqrt((apart * apart).mean(axes, keepdim=True) + a.eps)
    return made if a.weight is None else made * a.weight + (0 if a.bias is None else a.bias)


def _scaled_softplus(a: Any) -> Tensor:
    if a.threshold < 20:
        raise UnsupportedError(f"threshold={a.threshold}: from there on torch computes another function")
    return F.softplus(a.self) if a.beta == 1 else F.softplus(a.self * a.beta) / a.beta


_FORMS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("_softmax", "_safe_softmax"), lambda a: torch.softmax(a.self, a.dim)),
    "_prelu_kernel": lambda a: F.prelu(a.self, a.weight.flatten()),
    "_unsafe_view": lambda a: a.self.reshape(a.size),
    "_to_copy": lambda a: a.self.to(a.dtype or a.self.dtype),
    "_adaptive_avg_pool2d": _adaptive_average,
    "upsample": _upsampled,
    "native_layer_norm": _layer_norm,
    "native_group_norm": lambda a: F.group_norm(a.input, a.group, a.weight, a.bias, a.eps),
    "native_batch_norm": lambda a: F.batch_norm(
        a.input, a.running_mean, a.running_var, a.weight, a.bias, a.training, eps=a.eps
    ),
    "log_sigmoid_forward": lambda a: F.logsigmoid(a.self),
    "elu": lambda a: F.elu(a.self * a.input_scale, a.alpha) * a.scale,
    "softplus": _scaled_softplus,
    "threshold": lambda a: torch.where(a.self > a.threshold, a.self, a.value),
    "softshrink": lambda a: torch.relu(a.self - a.lambd) - torch.relu(-a.self - a.lambd),
    "sinh": lambda a: (torch.exp(a.self) - torch.exp(-a.self)) / 2,
    "cosh": lambda a: (torch.exp(a.self) + torch.exp(-a.self)) / 2,
    "tan": lambda a: torch.sin(a.self) * torch.reciprocal(torch.cos(a.self)),
    "expm1": lambda a: torch.exp(a.self) - 1,
}
"""By the operator's name, its form for the exporter; functions that it does not know, by those that they consist of."""
