"""Bounds computed by the library auto_LiRPA, read as verdicts.

Sources: Xu et al., Automatic Perturbation Analysis for Scalable Certified Robustness and Beyond, arXiv 2002.12920
(the library); Xu et al., Fast and Complete, arXiv 2011.13824 (α-CROWN). The library does not account for rounding,
so what it proves is trusted as far as floating point goes.
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
from verifiable_relu.spec.property import Property, Query
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.verifiers.adapters.library import bounded_module, explained, library, quiet
from verifiable_relu.verifiers.adapters.operators import Graph, largest_terms, takes_patches
from verifiable_relu.verifiers.base import (
    PATIENCE,
    SILENT,
    Budget,
    Outcome,
    Progress,
    Reason,
    Trust,
    Verdict,
    by_network,
    fault,
)
from verifiable_relu.verifiers.root import NONE, Roots
from verifiable_relu.verifiers.solvers.process import Worker

Bound = Literal["ibp", "crown", "alpha-crown"]

_METHODS: dict[Bound, str] = {"ibp": "IBP", "crown": "CROWN", "alpha-crown": "alpha-CROWN"}
MOST_BOXES = 64
"""Most queries bounded at once: the α of a batch are optimised together, and for all of them or none."""

_ULPS = 4
"""Units in the last place of its largest numbers by which a bound of the library has to be clear of zero."""


@dataclass(frozen=True)
class AutoLirpa:
    """Verification by auto_LiRPA's bounds; never answers *sat*.

    The library works in a process of its own, which is ended where it does not stop in time.

    Attributes:
        bound: the kind of bound.
        iterations: gradient steps on α, for α-CROWN.
        learning_rate: of those steps.
        dtype: what the library computes in.
        memory: a limit in bytes on what a batch may hold, by a rough estimate.
        process_memory: most bytes that the library's process may have resident, libraries included; None for half of
            the machine's memory.
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

    def verify(
        self, queries: Sequence[Query], budget: Budget, progress: Progress = SILENT, roots: Roots = NONE
    ) -> list[Outcome]:
        """As every verifier.

        Raises:
            InputError: if auto_LiRPA is not installed.
        """
        missing = AUTO_LIRPA.call(None)
        if missing is not None:
            raise missing
        outcomes: dict[int, Outcome] = {}
        for network, members in by_network(queries):
            size = max(1, min(MOST_BOXES, self.memory // _bytes(network)))
            for start in range(0, len(members), size):
                part = members[start : start + size]
                for index, outcome in zip(part, self._batch(network, queries, part, budget), strict=True):
                    outcomes[index] = outcome
                    progress.finish(index, outcome)
                progress.stage(self.name, len(outcomes), len(queries))
        return [outcomes[i] for i in range(len(queries))]

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
                # The query at fault is to be alone in it.
                return [outcome for index in part for outcome in self._batch(network, queries, [index], budget)]
            return [fault(error, self.name)] * len(part)


@dataclass(frozen=True)
class _Task:
    """What the library's process is asked: bounds of one network over a batch of boxes, and what they prove.

    Attributes:
        options: the verifier.
        digest: of the network.
        nodes: of the network.
        properties: one for each query.
        seconds: after which the library is told to stop.
        threads: of torch.
    """

    options: AutoLirpa
    digest: str
    nodes: tuple[Node, ...]
    properties: tuple[Property, ...]
    seconds: float
    threads: int


def _bare(network: Network) -> tuple[Node, ...]:
    """Its nodes without what has been computed from them."""
    return tuple(node.map_tensors(lambda tensor: tensor) for node in network.nodes)


def work(task: _Task | None) -> list[Outcome] | InputError | None:
    """The outcomes of a task's queries; for None, what keeps the library from being used.

    It is called in the library's own process.
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
    """What a method of this name claims of a margin that took it so many seconds."""
    spent = {name: seconds}
    if margin > 0:
        return Outcome(Verdict.UNSAT, Reason.PROVED, name, Trust.FLOAT, margin, seconds=spent)
    # A NaN is no bound at all.
    known = margin if margin == margin else None
    return Outcome.unknown(Reason.INCOMPLETE, name, "the bounds do not decide", margin=known, seconds=spent)


_PREPARED: dict[tuple[str, AutoLirpa], Model] = {}
"""The latest model, which the next task may be about, too."""


def _prepared(task: _Task) -> Model:
    key = task.digest, task.options
    if key not in _PREPARED:
        _PREPARED.clear()
        _PREPARED[key] = Model(Network(task.nodes), task.options)
    return _PREPARED[key]


AUTO_LIRPA = Worker(f"{__name__}:{work.__name__}")
"""The library's process."""


def _doubt(network: Network, box: Bounds, rows: RowBatch) -> Tensor:
    """How large the rounding of the library's sums typically is, (rows,): some units of the numbers that are summed.

    It is no bound, and verdicts stay ``float``; but where numbers cancel that are larger than a margin by as many
    digits as there are, the library's lines of steep activations say anything.
    """
    size = largest_terms(network, torch.maximum(-box.lower, box.upper)).flatten(1)
    matrix = rows.matrix.to(size)
    return _ULPS * torch.finfo(matrix.dtype).eps * (matrix.abs() * size[rows.sample]).sum(1)


class Model:
    """A network as the library sees it, prepared once for all batches."""

    def __init__(self, network: Network, options: AutoLirpa) -> None:
        self.network = network
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self.method = _METHODS[options.bound if network.activations else "crown"]
        self.stop: Callable[[], bool] = lambda: False
        self.thresholds = torch.empty(0)
        settings = {
            "conv_mode": "patches" if takes_patches(network) else "matrix",
            # Sharing α among rows or neurons fails on batches whose samples have different unstable neurons.
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
        """Lower bounds of every row's A·y over its sample's box, (rows,), in float64.

        Raises:
            OutOfTime: if ``stop`` says so before there are bounds.
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
        """Which samples (batch, 1) need no better bounds: those proved, and all of them once the time is spent."""
        if self.stop():
            return torch.ones(len(lower), 1, dtype=torch.bool)
        return (lower > self.thresholds).all(1, keepdim=True)


def _bytes(network: Network) -> int:
    """Roughly what bounding one sample takes: two matrices from a quarter of the widest layer's neurons."""
    widest = max(node.size for node in network.nodes)
    return max(1, 2 * 8 * widest * max(1, max((network.nodes[i].size for i in network.activations), default=1) // 4))
