"""IBP, CROWN and α-CROWN beside auto_LiRPA: time, width of the bounds, and what our CROWN makes of the machine.

    python benchmarks/bounds_speed.py
    python benchmarks/bounds_speed.py --net cifar_cnn --batch 1 16 --method crown --runs 9
    python benchmarks/bounds_speed.py --library FOLDER --name bounds_speed_newest

The question is the same for both: lower bounds of label minus every other class over L∞ balls around the first test
images that the network classifies rightly. auto_LiRPA is used as it is installed, or from FOLDER, a folder that holds
another version of the package; of its settings those are taken that are fastest for the network, method and batch,
and of the batch it gets so many images at once as is fastest.
Networks and data that are missing are named and left out. Writes results/NAME.csv (a row per network, method and
batch) and results/NAME.md. ``--net`` without names measures λ-GELU's widths alone.
"""

from __future__ import annotations

import argparse
import csv
import inspect
import itertools
import os
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from functools import cache, cached_property, partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from machine import command, describe, load_average
from rich.progress import track

# Before torch is loaded: importing the package sets how its threads wait.
import verifiable_relu  # noqa: F401  # isort: skip

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from verifiable_relu.bounds import Bounds, alpha_lower_bounds, linear_lower_bounds, preactivation_bounds, relaxed
from verifiable_relu.bounds.activations import unstable
from verifiable_relu.bounds.alpha import Ascent
from verifiable_relu.bounds.linear import Relaxation
from verifiable_relu.data import load
from verifiable_relu.errors import InputError
from verifiable_relu.network import Network, graph, read_onnx
from verifiable_relu.network.nodes import Conv2d, Gelu, Relu
from verifiable_relu.verifiers.adapters import auto_lirpa
from verifiable_relu.verifiers.adapters import library as adapter

HERE = Path(__file__).parent
RESULTS = HERE / "results"
METHODS = {"ibp": "IBP", "crown": "CROWN", "alpha-crown": "alpha-CROWN"}
ITERATIONS = 20
LAMBDAS = (1, 5, 20, 160)
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Case:
    """A network, where it lies ("data:" stands for the folder VERIFIABLE_RELU_DATA), and the balls put to it.

    Attributes:
        mean, std: of the normalisation that the network leaves to its user.
    """

    name: str
    path: str
    data: str
    eps: str
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)


LEAST = 0.1
"""Seconds that a measurement takes at least: as long the same thing is done again, with warm caches, by either side."""

PARTS = (1, 16)
"""So many images of a batch auto_LiRPA may get at once, in place of all: on some networks batches take it longer."""

EQUAL = 1e-4
"""Up to so many widths apart bounds are taken for equal."""

_OVAL = ((0.485, 0.456, 0.406), (0.225, 0.225, 0.225))
CASES = (
    Case("mnist_256x2", "data:vnncomp/mnist_fc/onnx/mnist-net_256x2.onnx.gz", "mnist", "0.02"),
    Case("mnist_6x100", "nets/mnist_6x100.onnx.gz", "mnist", "0.01"),
    Case("cifar_cnn", "../specs/cifar_cnn.onnx", "cifar10", "2/255"),
    Case("cifar_base_kw", "data:vnncomp/oval21/onnx/cifar_base_kw.onnx.gz", "cifar10", "4/255", *_OVAL),
    Case("cifar_wide_kw", "data:vnncomp/oval21/onnx/cifar_wide_kw.onnx.gz", "cifar10", "4/255", *_OVAL),
    Case("cifar_residual", "nets/cifar_residual.onnx.gz", "cifar10", "1/255"),
)
GELU_CASE = Case("mnist_mlp", "../specs/mnist_mlp.onnx", "mnist", "0.03")


@dataclass(frozen=True, eq=False)
class Problem:
    """A batch of balls and the rows to bound: the objective (batch, rows, outputs), as auto_LiRPA takes it.

    In float32 our coefficients are, and nothing else.
    """

    network: Network
    box: Bounds
    objective: Tensor

    @cached_property
    def single(self) -> bool:
        """Whether coefficients are in float32."""
        return self.box.lower.dtype == torch.float32

    @cached_property
    def given(self) -> tuple[Network, Bounds]:
        """The network and the balls as we take them."""
        return self.network.to(torch.float64), Bounds(self.box.lower.double(), self.box.upper.double())

    @cached_property
    def pre(self) -> dict[int, Bounds]:
        """CROWN's bounds of every activation's input."""
        with torch.no_grad():
            return preactivation_bounds(*self.given, single=self.single)

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """The objective as we take it: (rows, outputs), and the sample of each row."""
        samples, rows, outputs = self.objective.shape
        return self.objective.double().reshape(-1, outputs), torch.arange(samples).repeat_interleave(rows)

    def relaxation(self, known: dict[int, Bounds] | None = None) -> Relaxation:
        """Of what we take."""
        return Relaxation(*self.given, known, self.single)

    def parts(self, size: int) -> list[Problem]:
        """The same of so many images each, with the same bounds of the activations' inputs if these are known."""
        found = []
        for start in range(0, len(self.objective), size):
            part = slice(start, start + size)
            box = Bounds(self.box.lower[part], self.box.upper[part])
            found.append(replace(self, box=box, objective=self.objective[part]))
            if "pre" in self.__dict__:
                found[-1].__dict__["pre"] = {i: Bounds(b.lower[part], b.upper[part]) for i, b in self.pre.items()}
        return found

    def both_signs(self) -> Problem:
        """With the rows' negatives behind them, so that widths can be worked out."""
        return replace(self, objective=torch.cat([self.objective, -self.objective], 1))


@dataclass(frozen=True)
class Line:
    """One method on one network and batch.

    Attributes:
        unstable: share of the neurons that our bounds of the method leave unstable.
        ours, theirs: median seconds.
        ratio: median of theirs/ours over the pairs of runs.
        width: mean width of our bounds over that of theirs.
        worst: the largest amount by which one of our lower bounds lies below theirs, in widths of theirs; negative
            where all of ours are higher.
        looser, tighter: the shares of our lower bounds that lie by more than ``EQUAL`` below theirs, and above them.
        same: ``worst`` of our CROWN given auto_LiRPA's bounds of the activations' inputs.
        settings: auto_LiRPA's, as they were chosen.
        peak: share of the matrix-multiply peak that our matrix products and convolutions alone amount to.
    """

    network: str
    eps: str
    dtype: str
    method: str
    batch: int
    unstable: float
    runs: int
    ours: float
    theirs: float
    ratio: float
    width: float
    worst: float
    looser: float
    tighter: float
    same: float
    settings: str
    peak: float


class Late(BaseException):
    """The limit of one measurement is over. Not an Exception, which the library might catch."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise ``Late`` after so many seconds."""

    def ring(number: int, frame: Any) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def network_of(case: Case) -> Network:
    """The case's network.

    Raises:
        FileNotFoundError: naming what is missing.
    """
    if not case.path.startswith("data:"):
        return read_onnx(HERE / case.path)
    folder = os.environ.get("VERIFIABLE_RELU_DATA")
    path = Path(folder or "") / case.path.removeprefix("data:")
    if not folder or not path.is_file():
        raise FileNotFoundError(f"{path.name} (VERIFIABLE_RELU_DATA)")
    return read_onnx(path)


def problem_of(case: Case, network: Network, batch: int, dtype: torch.dtype) -> Problem:
    """The first ``batch`` exact test images that are classified rightly, each in its ball."""
    data = load(case.data, "test")
    chosen = np.flatnonzero(data.exact)[: 4 * batch + 50]
    images, labels = torch.from_numpy(data.images[chosen]).double(), torch.from_numpy(data.labels[chosen])
    mean, std = (torch.tensor(c, dtype=torch.float64).reshape(-1, 1, 1) for c in (case.mean, case.std))

    def seen(x: Tensor) -> Tensor:
        return ((x - mean) / std).reshape(len(x), *network.input_shape).to(dtype)

    with torch.no_grad():
        right = network(seen(images)).flatten(1).argmax(1) == labels
    images, labels = images[right][:batch], labels[right][:batch]
    eps = float(Fraction(case.eps))
    box = Bounds(seen((images - eps).clamp(0, 1)), seen((images + eps).clamp(0, 1)))
    every = torch.eye(network.output_size, dtype=dtype)
    margins = every[labels][:, None] - every
    others = torch.stack([rows[torch.arange(len(every)) != y] for rows, y in zip(margins, labels, strict=True)])
    return Problem(network.to(dtype), box, others)


def ours(problem: Problem, method: str) -> Tensor:
    """Our lower bounds, (batch, rows)."""
    network, box = problem.given
    matrix, sample = problem.rows
    single = problem.single
    with torch.no_grad() if method == "alpha-crown" else torch.inference_mode():
        if method == "ibp":
            lower = linear_lower_bounds(network, box, {}, matrix, intervals=True)
        elif method == "crown":
            lower = relaxed(network, box, single=single).outputs(matrix)
        else:
            ascent = Ascent(steps=ITERATIONS)
            lower = alpha_lower_bounds(network, box, problem.pre, matrix, sample, ascent, single=single)
    return lower.reshape(problem.objective.shape[:2])


@dataclass(frozen=True)
class Settings:
    """Those of auto_LiRPA's settings on which its speed depends."""

    conv: str
    sparse: bool
    inference: bool
    images: int

    def __str__(self) -> str:
        return f"{self.conv}, {'sparse' if self.sparse else 'dense'} α, {self.images} at once"


class Theirs:
    """auto_LiRPA, prepared once for a network, dtype and settings."""

    def __init__(
        self, network: Network, method: str, dtype: torch.dtype, settings: Settings, *, given: bool = True
    ) -> None:
        self.method = METHODS[method]
        self.given = given and method == "alpha-crown"
        self.inference, self.images = settings.inference, settings.images
        self.dtype = dtype
        options = {
            "conv_mode": settings.conv,
            "sparse_features_alpha": settings.sparse,
            "sparse_spec_alpha": settings.sparse,
            # No early stop.
            "optimize_bound_args": {"iteration": ITERATIONS, "early_stop_patience": ITERATIONS + 1},
        }
        dummy = torch.zeros(1, *network.input_shape, dtype=dtype)
        module = adapter.bounded_module()
        with adapter.quiet(dtype):
            self.module = module(auto_lirpa._Graph(network.to(dtype)), dummy, options, device="cpu")

    def __call__(self, problem: Problem) -> Tensor:
        """Its lower bounds, (batch, rows)."""
        parts = self._parts(problem)
        with adapter.quiet(self.dtype):
            return torch.cat([self._bounds(part) for part in parts])

    def seconds(self, problem: Problem, least: float = 0.0) -> float:
        """Wall clock of one run (``seconds``), without the adapter's preparations."""
        parts = self._parts(problem)
        with adapter.quiet(self.dtype):
            return seconds(lambda: [self._bounds(part) for part in parts], least)

    def _parts(self, problem: Problem) -> list[Problem]:
        """What it gets at once."""
        if self.given:
            _ = problem.pre
        return problem.parts(self.images)

    def _bounds(self, problem: Problem) -> Tensor:
        library, box = adapter.library(), problem.box
        with torch.inference_mode() if self.inference else torch.set_grad_enabled(self.method == "alpha-CROWN"):
            ball = library.PerturbationLpNorm(norm=np.inf, x_L=box.lower, x_U=box.upper)
            x = library.BoundedTensor((box.lower + box.upper) / 2, ball)
            lower, _ = self.module.compute_bounds(
                x=(x,), C=problem.objective, method=self.method, bound_upper=False, **self._given(problem)
            )
        return lower.detach()

    def _inputs(self) -> list[Any]:
        """Its nodes before every activation, in our order."""
        return [node.inputs[0] for node in self.module._modules.values() if type(node).__name__ == "BoundRelu"]

    def preactivations(self, problem: Problem) -> dict[int, Bounds]:
        """Its bounds of every activation's input, by our index, in a run of their own."""
        found: dict[int, list[Bounds]] = {i: [] for i in problem.network.activations}
        for part in self._parts(problem):
            with adapter.quiet(self.dtype):
                self._bounds(part)
            for (i, boxes), node in zip(found.items(), self._inputs(), strict=True):
                shape = (-1, *problem.network.nodes[i].shape)
                lower, upper = (side.detach().double().reshape(shape) for side in (node.lower, node.upper))
                boxes.append(Bounds(lower, upper))
        return {
            i: Bounds(torch.cat([b.lower for b in boxes]), torch.cat([b.upper for b in boxes]))
            for i, boxes in found.items()
        }

    def _given(self, problem: Problem) -> dict[str, Any]:
        """For α-CROWN the same intermediate bounds as ours; without, it optimises its own at every step."""
        if not self.given:
            return {}
        known = inspect.signature(self.module.compute_bounds).parameters
        option = "interm_bounds" if "interm_bounds" in known else "intermediate_layer_bounds"
        nodes = [node.name for node in self._inputs()]
        # Copies, since it writes into them.
        bounds = [
            [box.lower.to(self.dtype, copy=True), box.upper.to(self.dtype, copy=True)] for box in problem.pre.values()
        ]
        return {option: dict(zip(nodes, bounds, strict=True))}


def seconds(work: Callable[[], Any], least: float = 0.0) -> float:
    """Wall clock of one run: the mean of as many as take ``least`` seconds together."""
    start, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - start < least:
        work()
        count += 1
    return (time.perf_counter() - start) / count


def fastest(problem: Problem, method: str, dtype: torch.dtype, limit: float) -> tuple[Theirs, str]:
    """auto_LiRPA with the settings that take least time on this problem, and their names.

    Raises:
        Late, or what the library raised: if no settings work within the limit.
    """
    convolutions = any(isinstance(node, Conv2d) for node in problem.network.nodes)
    alpha, batch = method == "alpha-crown", len(problem.objective)
    best: tuple[float, Theirs, str] | None = None
    failure: BaseException | None = None
    for settings in (
        Settings(conv, sparse, inference, images)
        for images in (*(n for n in PARTS if n < batch), batch)
        for conv in (("patches", "matrix") if convolutions else ("patches",))
        for sparse in ((True, False) if alpha else (True,))
        for inference in ((False,) if alpha else (True, False))
    ):
        try:
            with limited(limit if best is None else min(limit, 3 * best[0] + 1)):
                theirs = Theirs(problem.network, method, dtype, settings)
                # One part stands for all.
                first, *others = theirs._parts(problem)
                theirs(first)
                taken = theirs.seconds(first) * (1 + len(others))
        except (Exception, Late) as error:
            failure = failure or error
            continue
        if best is None or taken < best[0]:
            best = (taken, theirs, str(settings))
    if best is None:
        assert failure is not None
        raise failure
    return best[1:]


@cache
def peak(dtype: torch.dtype) -> float:
    """Multiply-adds per second of a large matrix product: the best of several."""
    size = 1536
    a, b = torch.randn(2, size, size, dtype=dtype)
    return size**3 / min(seconds(lambda: a @ b) for _ in range(8))


def multiply_adds(work: Callable[[], Any]) -> float:
    """Those of all matrix products and convolutions that ``work`` calls, by the shapes of their operands."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops() / 2


def unstable_share(problem: Problem, method: str) -> float:
    """The share of all neurons that are unstable, by intervals or by CROWN."""
    with torch.no_grad():
        relaxation = problem.relaxation(problem.pre if method != "ibp" else None)
        relaxation.advance(len(problem.network.nodes) - 1)
        parts = [unstable(problem.network.nodes[i], box) for i, box in relaxation.pre.items()]
    return sum(int(p.sum()) for p in parts) / sum(p.numel() for p in parts)


def compare(case: Case, problem: Problem, method: str, dtype: str, runs: int, limit: float) -> Line:
    """Measure one line.

    Raises:
        Late, or what the library raised.
    """
    doubled = problem.both_signs()
    with limited(limit):
        mine = ours(doubled, method)
    theirs, settings = fastest(problem, method, DTYPES[dtype], limit)
    with limited(3 * limit):
        other, known = theirs(doubled), theirs.preactivations(problem) if method == "crown" else {}
    rows = problem.objective.shape[1]
    widths, others = (-(bounds[:, rows:] + bounds[:, :rows]) for bounds in (mine, other))

    def below(bounds: Tensor) -> Tensor:
        return (other - bounds) / torch.cat([others, others], 1)

    same = 0.0
    if method == "crown":
        with torch.inference_mode():
            given = problem.relaxation()
            given.advance(problem.network.last_activation, lambda index, _: known[index])
            same = float(below(given.outputs(*doubled.rows).reshape(other.shape)).max())
    pairs: list[list[float]] = []
    with limited(3 * limit):
        try:
            while len(pairs) < runs:
                # Whoever comes second may find the caches warm.
                work = [partial(seconds, lambda: ours(problem, method)), partial(theirs.seconds, problem)]
                turn = 1 if len(pairs) % 2 else -1
                pairs.append([measured(LEAST) for measured in work[::turn]][::turn])
        except Late:
            if not pairs:
                raise
    mine_s, theirs_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    share = multiply_adds(lambda: ours(problem, "crown")) / mine_s / peak(DTYPES[dtype]) if method == "crown" else 0.0
    where = (case.name, case.eps, dtype, method, len(problem.box.lower), unstable_share(problem, method))
    width, apart = float((widths / others).mean()), below(mine)
    beyond = [float((sign * apart > EQUAL).double().mean()) for sign in (1, -1)]
    return Line(*where, len(pairs), mine_s, theirs_s, ratio, width, float(apart.max()), *beyond, same, settings, share)


def measure(options: argparse.Namespace, missing: list[str]) -> Iterator[Line]:
    """All lines; what is left out is named in ``missing``."""
    for case in CASES:
        if case.name not in options.net:
            continue
        try:
            network = network_of(case)
        except FileNotFoundError as error:
            missing.append(f"{case.name}: {error} is missing")
            continue
        plan = list(itertools.product(options.dtype, options.method))
        for dtype, method in track(plan, case.name):
            for batch in options.batch:
                try:
                    problem = problem_of(case, network, batch, DTYPES[dtype])
                    yield compare(case, problem, method, dtype, options.runs, options.limit)
                except (Exception, Late) as error:
                    late = isinstance(error, Late)
                    why = f"more than {options.limit:g} s" if late else f"{type(error).__name__}: {str(error)[:80]}"
                    missing.append(f"{case.name} {dtype} {method}, batch {batch}: {why}")
                    if late:
                        break


def rounding_table(options: argparse.Namespace) -> Iterator[str]:
    """What accounting for rounding costs in the pass of the output's rows, and what float32 saves."""
    yield "| network | dtype | s without | with | slack / width | s as proven | with | slack / width |"
    yield "|---|---|---|---|---|---|---|---|"
    for case, dtype in itertools.product(CASES, options.dtype):
        if case.name not in options.net:
            continue
        try:
            problem = problem_of(case, network_of(case), 16, DTYPES[dtype]).both_signs()
        except FileNotFoundError:
            continue
        last = len(problem.network.nodes) - 1
        samples, rows, _ = problem.objective.shape
        matrix, sample = problem.rows
        mixed, plain = (problem.relaxation(problem.pre) for _ in range(2))
        plain.border = -1
        ways: list[Callable[..., Any]] = [partial(plain.lower, rounded=False), plain.lower, mixed.lower]
        times: list[list[float]] = [[] for _ in ways]
        with torch.inference_mode():
            for relaxation in (mixed, plain):
                relaxation.advance(last)
            found = [way(last, matrix, sample)[0].reshape(samples, rows) for way in ways]
            for _ in range(options.runs):
                for way, taken in zip(ways, times, strict=True):
                    taken.append(seconds(lambda: way(last, matrix, sample), LEAST))  # noqa: B023
        half = rows // 2
        width = -(found[0][:, half:] + found[0][:, :half])
        slack = [float(((found[0] - bounds)[:, :half] / width).mean()) for bounds in found]
        a, b, c = (statistics.median(t) for t in times)
        yield (
            f"| {case.name} | {dtype} | {a:.4f} | {100 * (b / a - 1):+.0f} % | {slack[1]:.1e} "
            f"| {c:.4f} | {100 * (c / a - 1):+.0f} % | {slack[2]:.1e} |"
        )


@contextmanager
def smooth_operator() -> Iterator[None]:
    """Let networks compute GELU by the operator that newer versions of the library trace."""
    try:
        operator = import_module("auto_LiRPA.operators.gelu").GELUOp
    except (ImportError, AttributeError):
        yield
        return
    functions = SimpleNamespace(**{**vars(torch.nn.functional), "gelu": operator.apply})
    with patch.object(graph, "F", functions):
        yield


def gelu_table(limit: float, missing: list[str]) -> Iterator[str]:
    """Mean widths of the margins of one network with λ-GELU in place of ReLU, ours and auto_LiRPA's."""
    network = network_of(GELU_CASE)
    problem = problem_of(GELU_CASE, network, 64, torch.float64).both_signs()
    half = problem.objective.shape[1] // 2

    def width(bounds: Tensor) -> float:
        return float(-(bounds[:, half:] + bounds[:, :half]).mean())

    yield "| activation | our IBP | our CROWN | our α-CROWN | CROWN / ReLU's | auto_LiRPA CROWN | α-CROWN |"
    yield "|---|---|---|---|---|---|---|"
    base = width(ours(problem, "crown"))
    for lam in (*LAMBDAS, None):
        name = "ReLU" if lam is None else f"λ = {lam}"
        nodes = tuple(
            Gelu(name=n.name, inputs=n.inputs, shape=n.shape, lam=torch.tensor(float(lam)))
            if lam is not None and isinstance(n, Relu)
            else n
            for n in network.nodes
        )
        changed = replace(problem, network=Network(nodes).to(torch.float64))
        mine = [width(ours(changed, method)) for method in METHODS]
        others = []
        for method in ("crown", "alpha-crown"):
            try:
                with limited(limit), smooth_operator():
                    theirs = Theirs(
                        changed.network, method, torch.float64, Settings("patches", False, False, 64), given=False
                    )
                    others.append(f"{width(theirs(changed)):.4f}")
            except (Exception, Late) as error:
                reason = str(error).strip().split("\n")[0][:80] or f"more than {limit:g} s"
                missing.append(f"auto_LiRPA {library_version()}, {method}, {name}: {type(error).__name__}: {reason}")
                others.append("–")
        cells = [f"{w:.4f}" for w in mine] + [f"{mine[1] / base:.3f}", *others]
        yield f"| {name} | {' | '.join(cells)} |"


def library_version() -> str:
    """auto_LiRPA's version, or that there is none."""
    try:
        return str(adapter.library().__version__)
    except InputError:
        return "none"


def table(lines: Sequence[Line]) -> Iterator[str]:
    """The Markdown table: one row per line."""
    yield (
        "| network | ε | dtype | method | batch | unstable | ours s | auto_LiRPA s | ratio | width "
        "| worst | looser | tighter | same | peak |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    for x in lines:
        same, share = (f"{x.same:.1e}", f"{100 * x.peak:.0f} %") if x.method == "crown" else ("", "")
        yield (
            f"| {x.network} | {x.eps} | {x.dtype} | {x.method} | {x.batch} | {100 * x.unstable:.1f} % | {x.ours:.4f} "
            f"| {x.theirs:.4f} | {x.ratio:.1f} | {x.width:.6f} | {x.worst:.1e} | {100 * x.looser:.1f} % "
            f"| {100 * x.tighter:.1f} % | {same} | {share} |"
        )


def write(options: argparse.Namespace, lines: Sequence[Line], parts: Sequence[str], missing: Sequence[str]) -> str:
    """Write both results files; returns the Markdown."""
    RESULTS.mkdir(exist_ok=True)
    if lines:
        with (RESULTS / f"{options.name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [f.name for f in fields(Line)])
            writer.writeheader()
            for line in lines:
                writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in asdict(line).items()})
    peaks = ", ".join(f"{2e-9 * peak(DTYPES[d]):.0f} GFLOP/s in {d}" for d in options.dtype)
    ran = command().replace(options.library, "FOLDER") if options.library else command()
    head = (
        f"`{ran}`: auto_LiRPA {library_version()}, {torch.get_num_threads()} threads for both, up to "
        f"{options.runs} pairs of runs in turn, each run repeated for {LEAST} s, medians. Peak: {peaks}. "
        f"{load_average()} {describe()}."
    )
    notes = (
        "Lower bounds of nine margins per image. IBP and CROWN start from the boxes, intermediate bounds included. "
        f"α-CROWN is the search alone: {ITERATIONS} iterations, both given our CROWN's intermediate bounds, no early "
        "stop, each library's own learning rate. auto_LiRPA gets a batch whole or in parts, as is fastest: see its "
        "settings in the csv. Our bounds account for rounding; auto_LiRPA's do not. With dtype "
        "float64 our coefficients of the first layers are in float32 all the same, with float32 all coefficients, and "
        "nothing else; α-CROWN's search, which proves nothing, runs in float32 in any case. *ratio*: median of the "
        "pairs' auto_LiRPA s / ours s. *width*: our bounds' width over theirs, mean. *worst*: by how much one of our "
        "lower bounds lies below theirs at most, in widths of theirs; negative: all of ours are higher. *looser*, "
        f"*tighter*: the shares that lie by more than {EQUAL:g} widths below and above. *same*: *worst* with its "
        "bounds of the activations' inputs in place of ours. *unstable*: share of the neurons. *peak*: our matrix "
        "products and convolutions, at the rate of a large matrix product, as a part of our time."
    )
    left_out = "".join(f"\n- {line}" for line in missing) or " nothing"
    text = "\n\n".join([head, *parts, notes, f"Left out:{left_out}"])
    (RESULTS / f"{options.name}.md").write_text(f"{text}\n")
    return text


def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [case.name for case in CASES]
    parser.add_argument("--net", nargs="*", choices=names, default=names)
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float64"])
    parser.add_argument("--runs", type=int, default=7, help="pairs of runs (default 7)")
    parser.add_argument("--limit", type=float, default=60, help="seconds that one run may take (default 60)")
    parser.add_argument("--memory", type=float, default=16, help="GiB of address space (default 16)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    parser.add_argument("--library", help="a folder with another version of the package auto_LiRPA")
    parser.add_argument("--name", default="bounds_speed", help="of the results files")
    options = parser.parse_args()
    if options.library:
        sys.path.insert(0, options.library)
    torch.set_num_threads(options.threads)
    size = int(options.memory * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    missing: list[str] = []
    lines = []
    for line in measure(options, missing):
        lines.append(line)
        print(list(table([line]))[-1], file=sys.stderr)
    parts = ["\n".join(table(lines))] if lines else []
    if options.net:
        title = (
            "Rows of the output only, batch 16: without regard to rounding, with it, and with it as bounds are "
            "proven, in float32 where what that costs can be borne:"
        )
        parts.append(f"{title}\n\n" + "\n".join(rounding_table(options)))
    title = f"Mean widths of margins with λ-GELU in place of ReLU ({GELU_CASE.name}, ε = {GELU_CASE.eps}, 64 images):"
    parts.append(f"{title}\n\n" + "\n".join(gelu_table(options.limit, missing)))
    print(write(options, lines, parts, missing))


if __name__ == "__main__":
    main()
