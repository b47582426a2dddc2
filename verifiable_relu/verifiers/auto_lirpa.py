"""The verifiers ``auto_lirpa…``, which prove properties by the bounds of the library auto_LiRPA.

Sources: Xu et al., Automatic Perturbation Analysis for Scalable Certified Robustness and Beyond, arXiv 2002.12920
(the library); Xu et al., Fast and Complete, arXiv 2011.13824 (α-CROWN). The library does not account for rounding
errors, so that its verdicts have the trust label ``float``.

Version 0.3 of the library was written for torch < 1.13. Four repairs, which are in place only during the library's
import and its calls, let it run with newer versions. Any other version of the library is used as it is.
"""

from __future__ import annotations

import io
import logging
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifiable_relu.bounds import MEMORY, Bounds, input_box
from verifiable_relu.errors import CallFailed, InputError, OutOfTime, UnsupportedError
from verifiable_relu.network.dispatch import Refusal, Table
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import (
    Activation,
    Add,
    Affine,
    Beside,
    Bilinear,
    Conv2d,
    Extreme,
    Gelu,
    Hardened,
    Identity,
    Kinked,
    LeakyRelu,
    Linear,
    Maximum,
    Node,
    Permute,
    Relu,
    Reshape,
    Scale,
    Sigmoid,
    Smooth,
    Sparse,
    Step,
    Tanh,
)
from verifiable_relu.rounding import epsilon
from verifiable_relu.spec.property import Property
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.supervisor.workers import Worker
from verifiable_relu.verifiers.base import (
    PATIENCE,
    Batched,
    Outcome,
    Reason,
    TimeBudget,
    Trust,
    Verdict,
    attempted,
    fault,
)
from verifiable_relu.verifiers.batch import QueryBatch

Bound = Literal["ibp", "crown", "alpha-crown"]

_METHODS: dict[Bound, str] = {"ibp": "IBP", "crown": "CROWN", "alpha-crown": "alpha-CROWN"}
MOST_BOXES = 64
"""The most queries that are bounded at once; the library optimises the α of a batch for all its queries or for none."""

_ULPS = 4
"""The least distance from zero of a bound that proves, in units in the last place of the numbers that it sums."""


@dataclass(frozen=True)
class AutoLirpa(Batched):
    """Verification by auto_LiRPA's bounds, which never answers *sat*.

    The library runs in a process of its own, which is ended if the library does not stop in time.

    Attributes:
        bound: the kind of bound.
        iterations: the number of gradient steps on α, for α-CROWN.
        learning_rate: the learning rate of these steps.
        dtype: the dtype in which the library computes.
        memory: the bytes that a batch may hold, by a rough estimate.
        process_memory: the most bytes of resident memory of the library's process, libraries included; None allows half
            of the machine's memory.
    """

    bound: Bound = "alpha-crown"
    iterations: int = 20
    learning_rate: float = 0.5
    dtype: Literal["float32", "float64"] = "float64"
    memory: int = MEMORY
    process_memory: int | None = None

    def __post_init__(self) -> None:
        if self.bound not in _METHODS:
            raise InputError(f"auto_LiRPA has no bound '{self.bound}'; there are {', '.join(_METHODS)}")

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"auto_lirpa-{self.bound}"

    def claims(self, batch: QueryBatch) -> Iterator[tuple[int, Outcome]]:
        """As ``Verifier.claims``.

        Raises:
            InputError: if auto_LiRPA is not installed.
        """
        missing = AUTO_LIRPA.call(None)
        if missing is not None:
            raise missing
        yield from super().claims(batch)

    def size(self, network: Network, budget: TimeBudget) -> int:
        """As ``Batched.size``."""
        return max(1, min(MOST_BOXES, self.memory // _bytes(network)))

    def answer(self, part: QueryBatch, work: TimeBudget) -> Sequence[Outcome]:
        """As ``Batched.answer``."""
        properties = tuple(query.property for query in part.queries.values())
        network = part.network
        task = _Task(self, network.digest, _bare(network), properties, work.seconds, torch.get_num_threads())
        try:
            found: list[Outcome] = AUTO_LIRPA.call(task, work.left() + PATIENCE, self.process_memory)
        except (CallFailed, MemoryError):
            if len(properties) == 1:
                raise
            # Each query is tried by itself, so that the failure costs the query at fault alone.
            return [
                claim for number in part.queries for claim in attempted(part.part([number]), self.name, self.answer)
            ]
        return found


@dataclass(frozen=True)
class _Task:
    """A task of the library's process: the outcomes of queries about one network.

    Attributes:
        options: the verifier.
        digest: the digest of the network.
        nodes: the nodes of the network.
        properties: the properties of the queries.
        seconds: the seconds after which the library is told to stop.
        threads: the number of threads of torch.
    """

    options: AutoLirpa
    digest: str
    nodes: tuple[Node, ...]
    properties: tuple[Property, ...]
    seconds: float
    threads: int


def _bare(network: Network) -> tuple[Node, ...]:
    """The nodes of a network as copies without cached values."""
    return tuple(node.map_tensors(lambda tensor: tensor) for node in network.nodes)


def work(task: _Task | None) -> list[Outcome] | InputError | None:
    """The outcomes of a task's queries, computed in the library's own process.

    Args:
        task: the task; None only asks whether the library can be used.

    Returns:
        The outcomes; for None the error if the library is not installed, and None if it is.
    """
    if task is None:
        try:
            library()
        except InputError as error:
            return error
        return None
    start = time.perf_counter()
    name, count = task.options.name, len(task.properties)

    def elapsed() -> float:
        return time.perf_counter() - start

    try:
        library()
        torch.set_num_threads(task.threads)
        model = _prepared(task)
        box = input_box(task.properties, model.network, model.dtype)
        rows = RowBatch.from_properties(task.properties, model.network.output_size)
        lower = model.lower(box, rows, lambda: elapsed() > task.seconds)
        doubt = _doubt(model.network.to(model.dtype), box, rows).double()
        margins = rows.margins(lower - doubt - rows.bound).tolist()
    except Exception as error:
        return [fault(explained(error), name)] * count
    return [_outcome(name, margin, elapsed() / count) for margin in margins]


def _outcome(name: str, margin: float, seconds: float) -> Outcome:
    """The outcome that a lower bound ``margin`` of the margin proves, for the method ``name``."""
    spent = {name: seconds}
    if margin > 0:
        return Outcome(Verdict.UNSAT, Reason.PROVED, name, Trust.FLOAT, margin, seconds=spent)
    # NaN is not a bound.
    known = margin if margin == margin else None
    return Outcome.unknown(Reason.INCOMPLETE, name, "the bounds do not decide", margin=known, seconds=spent)


_PREPARED: dict[tuple[str, AutoLirpa], Model] = {}
"""The model of the last task, kept for a next task with the same network and options."""


def _prepared(task: _Task) -> Model:
    key = task.digest, task.options
    if key not in _PREPARED:
        _PREPARED.clear()
        _PREPARED[key] = Model(Network(task.nodes), task.options)
    return _PREPARED[key]


AUTO_LIRPA = Worker(f"{__name__}:{work.__name__}")
"""The library's process."""


def _doubt(network: Network, box: Bounds, rows: RowBatch) -> Tensor:
    """An estimate (rows,) of the rounding errors of the library's sums: ``_ULPS`` units of the numbers that are summed.

    The estimate is no bound, and verdicts keep the label ``float``. It keeps apart the cases in which numbers much
    larger than the margin cancel, so that the library's bounds are rounding noise.
    """
    sizes = [torch.maximum(-box.lower, box.upper)]
    for node in network.nodes[1:]:
        sizes.append(_size(node, *(sizes[i] for i in node.inputs)))
    size = sizes[-1].flatten(1)
    matrix = rows.matrix.to(size)
    return _ULPS * epsilon(matrix.dtype) * (matrix.abs() * size[rows.sample]).sum(1)


def _size(node: Node, *sizes: Tensor) -> Tensor:
    """The approximate size of the numbers that the library sums for a node, by that of its inputs."""
    if isinstance(node, Affine):
        return node.absolute(sizes[0]) + node.offset_magnitude()
    if isinstance(node, Kinked):
        return sizes[0] * node.below.abs().clamp(min=1)
    if isinstance(node, Activation):
        return torch.ones_like(sizes[0]) if node.op == "Sigmoid" else sizes[0]
    return node.forward(*sizes)


class Model:
    """A network in the library's own form, prepared once for all batches.

    Args:
        network: the network.
        options: the verifier, whose options are the bound, the optimisation of α and the dtype.
    """

    def __init__(self, network: Network, options: AutoLirpa) -> None:
        self.network = network
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self.method = _METHODS[options.bound if network.activations else "crown"]
        self.stop: Callable[[], bool] = lambda: False
        self.thresholds = torch.empty(0)
        settings = {
            "conv_mode": "patches" if takes_patches(network) else "matrix",
            # If rows or neurons share α, the library fails on batches whose samples differ in unstable neurons.
            "sparse_features_alpha": False,
            "sparse_spec_alpha": False,
            "optimize_bound_args": {
                "iteration": options.iterations,
                "lr_alpha": options.learning_rate,
                "stop_criterion_func": self._satisfied,
            },
        }
        dummy = torch.zeros(1, *network.input_shape, dtype=self.dtype)
        with quiet(self.dtype):
            try:
                self.module = bounded_module()(Graph(network.to(self.dtype)), dummy, settings, device="cpu")
            except NotImplementedError as error:
                used = ", ".join(sorted({node.op for node in network.nodes}))
                message = f"auto_LiRPA {version('auto_LiRPA')} lacks one of the operators {used}"
                raise UnsupportedError(message) from error
        self.module.interrupted = lambda: self.stop()

    def lower(self, box: Bounds, rows: RowBatch, stop: Callable[[], bool]) -> Tensor:
        """Lower bounds of every row's A·y over the box of the row's sample, (rows,), in float64.

        Args:
            box: the boxes of the samples.
            rows: the rows.
            stop: asked by the library between layers and between steps of the optimisation whether to stop.

        Raises:
            OutOfTime: if ``stop`` returns True before there are bounds.
        """
        counts = torch.bincount(rows.sample, minlength=rows.samples)
        position = torch.arange(len(rows.sample)) - (counts.cumsum(0) - counts)[rows.sample]
        objective = torch.zeros(rows.samples, int(counts.max()), rows.matrix.shape[1], dtype=self.dtype)
        objective[rows.sample, position] = rows.matrix.to(self.dtype)
        self.thresholds = torch.full(objective.shape[:2], -torch.inf, dtype=torch.float64)
        self.thresholds[rows.sample, position] = rows.bound
        self.stop = stop
        center = box.lower + (box.upper - box.lower) / 2
        with quiet(self.dtype):
            perturbation = library().PerturbationLpNorm(norm=np.inf, x_L=box.lower, x_U=box.upper)
            x = library().BoundedTensor(center, perturbation)
            with torch.set_grad_enabled(self.method == "alpha-CROWN"):
                lower, _ = self.module.compute_bounds(x=(x,), C=objective, method=self.method, bound_upper=False)
        return lower.detach().double()[rows.sample, position]

    def _satisfied(self, lower: Tensor) -> Tensor:
        """Whether each sample (batch, 1) needs no tighter bounds: it is proven, or the time is spent."""
        if self.stop():
            return torch.ones(len(lower), 1, dtype=torch.bool)
        return (lower > self.thresholds).all(1, keepdim=True)


def _bytes(network: Network) -> int:
    """An estimate of the bytes for one sample's bounds: two matrices from a quarter of the widest layer's neurons."""
    widest = max(node.size for node in network.nodes)
    return max(1, 2 * 8 * widest * max(1, max((network.nodes[i].size for i in network.activations), default=1) // 4))


def _no_tensors(node: Node) -> dict[str, Tensor]:
    return {}


def _forward(node: Node, held: list[Tensor], *xs: Tensor) -> Tensor:
    return node.forward(*xs)


@dataclass(frozen=True)
class Conversion:
    """The conversion of one kind of node, by functions of a node. Tensors of values are shaped (batch, *shape).

    Attributes:
        tensors: node ↦ the constant tensors that the library needs for the node, by name.
        apply: (node, these tensors, values of its inputs …) ↦ the node's value, in operators that the library knows.
        patches: node ↦ whether the library's sparse form of matrices for convolutions ("patches") passes through it.
    """

    tensors: Callable[[Any], dict[str, Tensor]] = _no_tensors
    apply: Callable[..., Tensor] = _forward
    patches: Callable[[Any], bool] = lambda node: True


def _linear_tensors(node: Linear) -> dict[str, Tensor]:
    if len(node.shape) > 1:
        raise UnsupportedError("auto_LiRPA takes linear maps of vectors", place=node.place)
    return {"weight": node.weight, "bias": node.bias}


def _linear(node: Linear, held: list[Tensor], x: Tensor) -> Tensor:
    return F.linear(x, held[0], held[1])


def _conv2d_tensors(node: Conv2d) -> dict[str, Tensor]:
    """The bias, and the kernel extended by zeros such that equal padding on opposite sides gives the same result.

    Let p₀ and p₁ be the padding before and after the image. With padding p = max(p₀, p₁) on both sides, p − p₀ zeros
    before and p − p₁ zeros after the kernel's entries change neither the windows' products nor the number of windows.
    """
    top, left, bottom, right = node.padding
    if (top, left) == (bottom, right):
        return {"weight": node.weight, "bias": node.bias}
    if node.dilation != (1, 1):
        raise UnsupportedError("auto_LiRPA takes no dilated convolution with unequal padding", place=node.place)
    height, width = max(top, bottom), max(left, right)
    margins = (width - left, width - right, height - top, height - bottom)
    return {"weight": F.pad(node.weight, margins), "bias": node.bias}


def _conv2d(node: Conv2d, held: list[Tensor], x: Tensor) -> Tensor:
    top, left, bottom, right = node.padding
    padding = (max(top, bottom), max(left, right))
    return F.conv2d(x, held[0], held[1], node.stride, padding, node.dilation, node.groups)


def _conv2d_patches(node: Conv2d) -> bool:
    square = all(a == b for a, b in (node.shape[1:], node.stride, node.padding[:2], node.padding[2:]))
    return square and node.dilation == (1, 1) and node.groups == 1


def _by_channel(node: Scale) -> bool:
    """Whether a node scales all pixels of a channel alike, so that it equals a 1×1 convolution."""
    constants = (node.scale, node.offset())
    return len(node.shape) == 3 and all(c.numel() == 1 or c.shape[-2:] == (1, 1) for c in constants)


def _scale_tensors(node: Scale) -> dict[str, Tensor]:
    if not _by_channel(node):
        return {"scale": _full(node, node.scale), "offset": _full(node, node.offset())}
    scale, offset = (c.expand(node.shape[0], 1, 1) for c in (node.scale, node.offset()))
    return {"weight": torch.diag(scale[:, 0, 0])[:, :, None, None], "bias": offset[:, 0, 0].clone()}


def _scale(node: Scale, held: list[Tensor], x: Tensor) -> Tensor:
    return F.conv2d(x, held[0], held[1]) if held[0].ndim > len(node.shape) else x * held[0] + held[1]


def _leaky_relu_tensors(node: LeakyRelu) -> dict[str, Tensor]:
    """The tensors with which LeakyReLU is written as slope·x + (1 − slope)·relu(x).

    For slopes in [0, 1] this form makes no bound looser, and α can be optimised. The library's own LeakyReLU takes only
    scalar slopes below 1.
    """
    return {"slope": _full(node, node.slope), "rest": _full(node, 1 - node.slope)}


def _leaky_relu(node: LeakyRelu, held: list[Tensor], x: Tensor) -> Tensor:
    return x * held[0] + F.relu(x) * held[1]


def _full(node: Node, tensor: Tensor) -> Tensor:
    """A constant of an elementwise operator in the node's own shape; the library does not broadcast all shapes."""
    return tensor.expand(node.shape).clone()


def _reshape(node: Reshape, held: list[Tensor], x: Tensor) -> Tensor:
    return torch.flatten(x, 1) if len(node.shape) == 1 else x.reshape(-1, *node.shape)


CONVERSIONS: Table[Conversion] = Table(
    "auto_LiRPA",
    {
        Linear: Conversion(_linear_tensors, _linear),
        Conv2d: Conversion(_conv2d_tensors, _conv2d, _conv2d_patches),
        Sparse: Refusal("auto_LiRPA takes no affine map that is given term by term"),
        Scale: Conversion(_scale_tensors, _scale, _by_channel),
        **dict.fromkeys((Add, Extreme), Conversion(patches=lambda node: len(node.shape) == 3)),
        Beside: Refusal("auto_LiRPA bounds one network, not two beside each other"),
        Maximum: Refusal("auto_LiRPA has its own relaxation of maxima, which is not tried here"),
        Reshape: Conversion(apply=_reshape, patches=lambda node: len(node.shape) == 1),
        Permute: Conversion(patches=lambda node: False),
        LeakyRelu: Conversion(_leaky_relu_tensors, _leaky_relu, lambda node: False),
        **dict.fromkeys((Relu, Identity, Sigmoid, Tanh, Gelu), Conversion()),
        Bilinear: Refusal("auto_LiRPA's bounds of products of two computed values are not tried here"),
        Step: Refusal("auto_LiRPA takes no function that jumps"),
        Smooth: Refusal("auto_LiRPA has no sound bounds of this function, or none that are tried here"),
        # The node's forward pass is that of ReLU, and a proof for ReLU says nothing of the smooth members of the set.
        Hardened: Refusal("auto_LiRPA takes one network, not a set of networks"),
    },
)
"""The conversion of each kind of node."""


class Graph(nn.Module):
    """A network as a torch module of operators that the library knows, with flat outputs.

    Raises:
        UnsupportedError: if the library does not take a kind of node, or not with the attributes of a node.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.nodes = network.nodes[1:]
        self.held: list[tuple[str, ...]] = []
        for index, node in enumerate(self.nodes):
            tensors = CONVERSIONS[node].tensors(node)
            self.held.append(tuple(f"{name}_{index}" for name in tensors))
            for name, tensor in zip(self.held[-1], tensors.values(), strict=True):
                # The library takes the dtype from a module's parameters, so that constants are parameters too.
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for node, names in zip(self.nodes, self.held, strict=True):
            held = [getattr(self, name) for name in names]
            values.append(CONVERSIONS[node].apply(node, held, *(values[i] for i in node.inputs)))
        return values[-1] if values[-1].ndim == 2 else torch.flatten(values[-1], 1)


def takes_patches(network: Network) -> bool:
    """Whether the library's sparse form of matrices for convolutions ("patches") passes through every node."""
    return all(CONVERSIONS[node].patches(node) for node in network.nodes[1:])


_RECURSION = 20_000
"""The most nested calls that Python allows during a call of the library, which recurses from node to node."""


@cache
def library() -> Any:
    """The package auto_LiRPA, imported with the repairs that its version needs.

    Raises:
        InputError: if it cannot be imported.
    """
    try:
        with quiet(torch.get_default_dtype()):
            import auto_LiRPA

            return auto_LiRPA
    except (ImportError, PackageNotFoundError) as error:
        raise InputError(f"auto_LiRPA cannot be imported: {error}") from error


@cache
def bounded_module() -> Any:
    """The library's module class, extended such that it can stop between two layers and permute axes."""
    base = library().BoundedModule
    transpose = import_module("auto_LiRPA.bound_ops").BoundTranspose

    class Transpose(transpose):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Tensor:
            # Later operators of the library take views of the result.
            return super().forward(x).contiguous()

    class Interruptible(base):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, custom_ops={"onnx::Transpose": Transpose}, **options)

        def compute_intermediate_bounds(self, *arguments: Any, **options: Any) -> Any:
            if self.interrupted():
                raise OutOfTime
            return super().compute_intermediate_bounds(*arguments, **options)

        def _named_members(
            self, get_members_fn: Any, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
        ) -> Any:
            # Version 0.3 has no argument remove_duplicate, and always removes duplicates.
            return super()._named_members(get_members_fn, prefix, recurse)

    Interruptible.interrupted = staticmethod(lambda: False)
    return Interruptible


@contextmanager
def quiet(dtype: torch.dtype) -> Iterator[None]:
    """The context in which the library runs, which restores all global state afterwards.

    Within the context, torch's default dtype is ``dtype``, the repairs are in place, and what the library prints, warns
    or logs is dropped.
    """
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(dtype)
        # The library recurses from node to node, and its import raises Python's limit a thousandfold.
        stack.callback(sys.setrecursionlimit, sys.getrecursionlimit())
        sys.setrecursionlimit(max(sys.getrecursionlimit(), _RECURSION))
        # The library's import installs a handler on the root logger. Errors that it logs are raised as exceptions too.
        stack.callback(setattr, logging.root, "handlers", list(logging.root.handlers))
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        stack.enter_context(redirect_stdout(io.StringIO()))
        stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("ignore")
        if version("auto_LiRPA") == "0.3":
            stack.enter_context(_repaired())
        yield


@contextmanager
def _repaired() -> Iterator[None]:
    """The context in which torch and numpy have the modules and functions that version 0.3 imports and calls."""
    import torch.onnx.symbolic_helper
    from torch.onnx._internal.torchscript_exporter._globals import GLOBALS

    def set_opset_version(number: int) -> None:
        GLOBALS.export_onnx_opset_version = number

    def attribute(node: Any, name: str) -> Any:
        return getattr(node, node.kindOf(name))(name)

    sets = ModuleType("numpy.lib.arraysetops")
    sets.isin = np.isin  # type: ignore[attr-defined]
    with ExitStack() as stack:
        stack.callback(set_opset_version, GLOBALS.export_onnx_opset_version)
        sys.modules[sets.__name__] = sets
        stack.callback(sys.modules.pop, sets.__name__)
        stack.enter_context(
            patch.object(torch.onnx.symbolic_helper, "_set_opset_version", set_opset_version, create=True)
        )
        stack.enter_context(patch.object(torch._C.Node, "__getitem__", attribute, create=True))
        yield


def explained(error: Exception) -> Exception:
    """The exception to report in place of one that a call of the library raised.

    A failure within the library's own code becomes an UnsupportedError: the library does not take the network. Want of
    memory or time, bad input, and exceptions outside of the library's code stay as they are.
    """
    if isinstance(error, InputError | OutOfTime | MemoryError) or "allocate memory" in str(error):
        return error
    if isinstance(error, NotImplementedError):
        return UnsupportedError(f"auto_LiRPA: {error}")
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(name.partition(".")[0] == "auto_LiRPA" for name in frames):
        return UnsupportedError(f"auto_LiRPA fails on this network: {type(error).__name__}: {error}")
    return error
