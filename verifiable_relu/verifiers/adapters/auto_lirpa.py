"""The verifiers ``auto_lirpa…``, which prove properties by the bounds of the library auto_LiRPA.

Sources: Xu et al., Automatic Perturbation Analysis for Scalable Certified Robustness and Beyond, arXiv 2002.12920
(the library); Xu et al., Fast and Complete, arXiv 2011.13824 (α-CROWN). The library does not account for rounding
errors, so that its verdicts have the trust label ``float``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.bounds import MEMORY, Bounds, input_box
from verifiable_relu.errors import CallFailed, InputError, UnsupportedError
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Node
from verifiable_relu.rounding import epsilon
from verifiable_relu.settings import neutral
from verifiable_relu.spec.property import Property, Query
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.verifiers.adapters.conversion import Graph, largest_terms, takes_patches
from verifiable_relu.verifiers.adapters.library import bounded_module, explained, library, quiet
from verifiable_relu.verifiers.base import (
    PATIENCE,
    SILENT,
    Budget,
    Outcome,
    Progress,
    Reason,
    Trust,
    Verdict,
    fault,
    in_batches,
)
from verifiable_relu.verifiers.root import NONE, Roots
from verifiable_relu.verifiers.solvers.process import Worker

Bound = Literal["ibp", "crown", "alpha-crown"]

_METHODS: dict[Bound, str] = {"ibp": "IBP", "crown": "CROWN", "alpha-crown": "alpha-CROWN"}
MOST_BOXES = 64
"""The most queries that are bounded at once; the library optimises the α of a batch for all its queries or for none."""

_ULPS = 4
"""The least distance from zero of a bound that proves, in units in the last place of the numbers that it sums."""


@dataclass(frozen=True)
class AutoLirpa:
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
    def name(self) -> str:
        return f"auto_lirpa-{self.bound}"

    @neutral()
    def verify(
        self, queries: Sequence[Query], budget: Budget, progress: Progress = SILENT, roots: Roots = NONE
    ) -> list[Outcome]:
        """Answer a batch of queries, as ``Verifier.verify`` says.

        Raises:
            InputError: if auto_LiRPA is not installed.
        """
        missing = AUTO_LIRPA.call(None)
        if missing is not None:
            raise missing
        return in_batches(
            self.name,
            queries,
            progress,
            lambda network: max(1, min(MOST_BOXES, self.memory // _bytes(network))),
            lambda network, part: self._batch(network, queries, part, budget),
        )

    def _batch(self, network: Network, queries: Sequence[Query], part: list[int], budget: Budget) -> list[Outcome]:
        allowance = budget.subset(part).total()
        if allowance <= 0:
            return [Outcome.unknown(Reason.TIMEOUT, self.name, "no time was left")] * len(part)
        try:
            AUTO_LIRPA.start()
            with budget.charging(part):
                properties = tuple(queries[i].property for i in part)
                task = _Task(self, network.digest, _bare(network), properties, allowance, torch.get_num_threads())
                found: list[Outcome] = AUTO_LIRPA.call(task, allowance + PATIENCE, self.process_memory)
                return found
        except Exception as error:
            if len(part) > 1 and isinstance(error, CallFailed | MemoryError):
                # Each query is tried by itself, so that the failure costs the query at fault alone.
                return [outcome for index in part for outcome in self._batch(network, queries, [index], budget)]
            return [fault(error, self.name)] * len(part)


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
        rows = RowBatch.of(task.properties, model.network.output_size)
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
    size = largest_terms(network, torch.maximum(-box.lower, box.upper)).flatten(1)
    matrix = rows.matrix.to(size)
    return _ULPS * epsilon(matrix.dtype) * (matrix.abs() * size[rows.sample]).sum(1)


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
