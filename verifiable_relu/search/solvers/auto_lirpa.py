"""``auto_lirpa…``: bounds of the library auto_LiRPA, which prove properties, and never say *sat*.

Sources: arXiv 2002.12920 (Xu et al., the library) and 2011.13824 (Xu et al., α-CROWN). The library does not account for
rounding. It runs in a process of its own: where it crashes, fails or takes too long, one query is unknown.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifiable_relu.errors import CallFailed, UnsupportedError
from verifiable_relu.ir.functions.piecewise_linear import PiecewiseLinear
from verifiable_relu.ir.linear import Convolution, Dense, Diagonal, Gather
from verifiable_relu.ir.network import Affine, Elementwise, Network, Op, Shape, Source, Sum
from verifiable_relu.rounding import epsilon
from verifiable_relu.search.batch import Claims, QueryBatch, answer_in_parts
from verifiable_relu.search.budget import OVERTIME_S, TimeBudget
from verifiable_relu.search.outcomes import Outcome, Reason, Trust, Verdict
from verifiable_relu.search.piecewise_linear import without_maxima
from verifiable_relu.search.property_rows import PropertyRows
from verifiable_relu.spec.property import Property
from verifiable_relu.supervisor.workers import Worker

_ENTRIES = 1 << 24  # The most weights of a map that the library is given as a matrix

Traced = Callable[..., Tensor]


@dataclass(frozen=True)
class AutoLirpa:
    """Verification by a bound of auto_LiRPA, in a process of ``process_memory`` bytes (None: half of the machine's)."""

    bound: Literal["ibp", "crown", "alpha-crown"] = "alpha-crown"
    process_memory: int | None = None

    @property
    def name(self) -> str:
        return f"auto_lirpa-{self.bound}"

    def claims(self, batch: QueryBatch) -> Claims:
        # A start takes none of a query's time; that it fails, calls say.
        with suppress(CallFailed):
            AUTO_LIRPA.start()
        return answer_in_parts(self.name, batch, lambda *_: 1, lambda part, work: [self._claimed(part, work)])

    def _claimed(self, part: QueryBatch, work: TimeBudget) -> Outcome:
        network, (prop,) = part.network, part.properties
        task = self.bound, network.ops, network.source.input_shape, prop, torch.get_num_threads()
        margin = AUTO_LIRPA.call(task, work.left() + OVERTIME_S, self.process_memory)
        if isinstance(margin, str):
            raise UnsupportedError(margin)
        if margin > 0:
            return Outcome(Verdict.UNSAT, Reason.PROVED, self.name, Trust.FLOAT, margin)
        return Outcome.unknown(Reason.INCOMPLETE, self.name, "the bounds are too loose to decide", margin=margin)


def lower_bound(task: tuple[str, tuple[Op, ...], Shape, Property, int]) -> float | str:
    """Return a lower bound of a property's margin, or a message where the library fails; its process runs this."""
    bound, ops, shape, prop, threads = task
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(threads)
    network, _ = without_maxima(Network(ops, Source(shape, (ops[-1].size,))))
    rows, failure = PropertyRows.from_properties([prop], network.output_size), ""
    try:
        traced = TracedNetwork(network)
    except UnsupportedError as error:
        return str(error)
    # Its sparse form of convolutions ("patches") is faster, and raises an error where it does not fit. About dilation
    # and groups it is wrong without one.
    maps = [op.map for op in network.ops if isinstance(op, Affine) and isinstance(op.map, Convolution)]
    uniform = all(linear.groups == 1 and set(linear.dilation) == {1} for linear in maps)
    for mode in ("patches", "matrix") if uniform else ("matrix",):
        try:
            lower = _lower_bounds(bound if network.activations else "crown", traced, prop, rows, mode)
            return float(rows.margins(lower - _rounding_estimate(network, prop, rows) - rows.bound))
        except Exception as error:
            if isinstance(error, MemoryError) or "allocate memory" in str(error):
                raise MemoryError from None
            failure = f"{type(error).__name__}: {error}"
    kinds = {op.function.kind if isinstance(op, Elementwise) else type(op).__name__ for op in network.ops[1:]}
    return f"auto_LiRPA fails on this network of {', '.join(sorted(kinds))}: {failure}"


AUTO_LIRPA = Worker(f"{__name__}:lower_bound", library=f"{__package__}.auto_lirpa_import")


def _lower_bounds(bound: str, traced: TracedNetwork, prop: Property, rows: PropertyRows, mode: str) -> Tensor:
    from verifiable_relu.search.solvers.auto_lirpa_import import library, library_settings

    search = {"iteration": 20, "stop_criterion_func": lambda lower: (lower > rows.bound).all(1, keepdim=True)}
    # With α that neurons or rows share, the library fails on some convolutions.
    dense = {"sparse_features_alpha": False, "sparse_spec_alpha": False}
    settings = {"conv_mode": mode, "optimize_bound_args": {"lr_alpha": 0.5, **search}, **dense}
    low, high = (torch.from_numpy(end).reshape(1, *traced.shape) for end in (prop.box.lower, prop.box.upper))
    center, method = low + (high - low) / 2, bound.upper().replace("ALPHA", "alpha")
    with library_settings(torch.float64), torch.set_grad_enabled(method == "alpha-CROWN"):
        module = library.BoundedModule(traced, torch.zeros_like(center), settings, device="cpu")
        x = library.BoundedTensor(center, library.PerturbationLpNorm(norm=np.inf, x_L=low, x_U=high))
        lower: Tensor = module.compute_bounds(x=(x,), C=rows.matrix, method=method, bound_upper=False)[0]
    return lower.detach()


def _rounding_estimate(network: Network, prop: Property, rows: PropertyRows) -> Tensor:
    """Estimate, not bound, rounding (1, rows) in the library: four units of the numbers summed, which may cancel."""
    sizes = [torch.from_numpy(np.maximum(-prop.box.lower, prop.box.upper))[None]]
    for op in network.ops[1:]:
        size = sizes[op.inputs[0]]
        if isinstance(op, Affine):
            size = op.map.abs_apply(size)
            size = size if op.bias is None else size + op.bias.double().abs()
        elif isinstance(op, Elementwise):
            kinked = isinstance(op.function, PiecewiseLinear)
            size = size * op.function.slope_below.double().abs().clamp(min=1) if kinked else size.clamp(min=1)  # type: ignore[attr-defined]
        else:
            size = op.value(*(sizes[i] for i in op.inputs))
        sizes.append(size)
    return 4 * epsilon(torch.float64) * (rows.matrix.abs() @ sizes[-1][0])


class TracedNetwork(nn.Module):
    """A network without maxima as a torch module of operators that the library knows, with flat outputs.

    Values keep the shapes of images for as long as they can: the library's sparse form of convolutions needs them. An
    ``UnsupportedError`` names an op that the library does not take.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        # The library takes the dtype from a module's parameters, so that constants are parameters too.
        self.constants = nn.ParameterList()
        self.shape = network.source.input_shape
        self._shapes: list[Shape] = [self.shape]
        self._steps: list[tuple[tuple[int, ...], Traced]] = []
        for op in network.ops[1:]:
            shape, step = self._step(op)
            self._shapes.append(shape)
            self._steps.append((op.inputs, step))

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for inputs, step in self._steps:
            values.append(step(*(values[i] for i in inputs)))
        return _shaped(values[-1], (math.prod(self._shapes[-1]),))

    def _constant(self, tensor: Tensor, shape: Shape | None = None) -> Tensor:
        """Return a parameter: with ``shape``, of one number for each channel, (channels, 1, 1), where that suffices."""
        tensor = tensor.detach().double()
        if shape is not None:
            tensor = tensor.expand(math.prod(shape)).reshape(shape)
            if len(shape) == 3 and bool((tensor == tensor[:, :1, :1]).all()):
                tensor = tensor[:, :1, :1]
        self.constants.append(constant := nn.Parameter(tensor.clone(), requires_grad=False))
        return constant

    def _step(self, op: Op) -> tuple[Shape, Traced]:
        """Return the shape of an op's value, and how the value is computed."""
        shape = self._shapes[op.inputs[0]]
        match op:
            case Affine():
                return self._affine(op, shape)
            case Sum():
                shapes = {self._shapes[i] for i in op.inputs}
                shape = shape if len(shapes) == 1 else (op.size,)
                return shape, lambda *xs: sum(_shaped(x, shape) for x in xs[1:]) + _shaped(xs[0], shape)
            case Elementwise(function=PiecewiseLinear() as function):
                if function.flat_below:
                    return shape, F.relu
                slope = self._constant(function.slope_below, shape)
                # The library's own operator has one slope for all neurons; of 1 − slope, it makes wrong bounds.
                return shape, lambda x: (x - F.relu(x)) * slope + F.relu(x)
            case Elementwise() if op.function.kind in ("Sigmoid", "Tanh"):
                return shape, torch.sigmoid if op.function.kind == "Sigmoid" else torch.tanh
        # A set of networks is among these: its forward pass is that of one member.
        raise UnsupportedError("auto_LiRPA does not take this kind of node", place=op.place)

    def _affine(self, op: Affine, shape: Shape) -> tuple[Shape, Traced]:
        linear, bias = op.map, op.bias
        if isinstance(linear, Convolution):
            return self._convolution(op, linear)
        if isinstance(linear, Diagonal):
            numbers = linear.weight, torch.zeros(1) if bias is None else bias
            weight, shift = (self._constant(each, shape) for each in numbers)
            if len(shape) == 3 and weight.shape[1:] == shift.shape[1:] == (1, 1):
                kernel = self._constant(torch.diag(weight.flatten())[:, :, None, None])
                offset = self._constant(shift.flatten())
                return shape, lambda x: F.conv2d(x, kernel, offset)
            return shape, lambda x: x * weight + shift
        if isinstance(linear, Gather) and bias is None and len(shape) == 3:
            places = torch.arange(linear.n_in).reshape(shape)
            for axes in permutations(range(3)):
                if torch.equal(places.permute(axes).flatten(), linear.index):
                    order = (0, *(axis + 1 for axis in axes))
                    return tuple(shape[axis] for axis in axes), partial(torch.permute, dims=order)
        if isinstance(linear, Dense) and linear.copies == 1:
            matrix = self._constant(linear.weight)
        elif linear.n_in * linear.n_out <= _ENTRIES:
            matrix = self._constant(linear.rows(torch.arange(linear.n_out), torch.float64))
        else:
            raise UnsupportedError("auto_LiRPA does not take so large a map", place=op.place)
        added = None if bias is None else self._constant(bias)
        return (op.size,), lambda x: F.linear(_shaped(x, (linear.n_in,)), matrix, added)

    def _convolution(self, op: Affine, linear: Convolution) -> tuple[Shape, Traced]:
        top, left, bottom, right = linear.padding
        kernel, padding = linear.weight, (top, left)
        if (top, left) != (bottom, right):
            if set(linear.dilation) != {1}:
                raise UnsupportedError("auto_LiRPA does not take unequal padding with dilation", place=op.place)
            # Zeros around the kernel; patches pass these.
            padding = max(top, bottom), max(left, right)
            around = (padding[1] - left, padding[1] - right, padding[0] - top, padding[0] - bottom)
            kernel = F.pad(kernel, around)
        weight, options = self._constant(kernel), (linear.stride, padding, linear.dilation, linear.groups)
        bias = self._constant(torch.zeros(1) if op.bias is None else op.bias, linear.out_shape)
        if bias.shape[1:] == (1, 1):
            offset = self._constant(bias.flatten())
            return linear.out_shape, lambda x: F.conv2d(_shaped(x, linear.in_shape), weight, offset, *options)
        return linear.out_shape, lambda x: F.conv2d(_shaped(x, linear.in_shape), weight, None, *options) + bias


def _shaped(x: Tensor, shape: Shape) -> Tensor:
    if tuple(x.shape[1:]) == shape:
        return x
    return torch.flatten(x, 1) if len(shape) == 1 else x.reshape(-1, *shape)
