"""The bounds of this package; no other module of the study calls ``verifiable_relu.bounds``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.crown import bounded, unstable
from benchmarks.speed.bounds_cases import ITERATIONS, Case
from verifiable_relu.bounds.alpha import Ascent, ascend
from verifiable_relu.bounds.backward import Relaxation
from verifiable_relu.bounds.linear_bounds import lower_of_rows
from verifiable_relu.bounds.neuron_bounds import BASE
from verifiable_relu.data import load
from verifiable_relu.ir.functions.smooth import Smooth
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Elementwise, Network


@dataclass(frozen=True, eq=False)
class Problem:
    """A network, a batch of L∞ balls, and linear functions of the outputs whose least values are to be bounded.

    Attributes:
        network: the network.
        box: the balls as boxes (batch, inputs), in the dtype in which auto_LiRPA computes. This package computes in
            float64, except for the coefficients of linear bounds, which may be in float32 if that dtype is float32.
        objective: (batch, rows, outputs), the coefficients of the functions.
        known: CROWN's intervals of what feeds each activation, if they have been computed.
    """

    network: Network
    box: Interval
    objective: Tensor
    known: Mapping[int, Interval] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The dtype of this package's coefficients: that of the whole pass is chosen where float32 is asked for."""
        return {"dtype": None if self.box.lower.dtype == torch.float32 else BASE}

    @cached_property
    def pre(self) -> Mapping[int, Interval]:
        """CROWN's intervals of what feeds each activation, by the number of the op that feeds it."""
        if self.known is not None:
            return self.known
        with torch.no_grad():
            relaxation = bounded(self.network, self.box, **self.options)
        return {i: relaxation.bounds[i].interval for i in feeding(self.network)}

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """The objective as this package takes it: (batch · rows, outputs), and the sample of each row."""
        samples, rows, outputs = self.objective.shape
        return self.objective.double().reshape(-1, outputs), torch.arange(samples).repeat_interleave(rows)

    def given(self, known: Mapping[int, Interval], **options: Any) -> Relaxation:
        """Return the relaxation with intervals of what feeds the activations."""
        return bounded(self.network, self.box, intervals=True, known=known, **{**self.options, **options})

    def parts(self, size: int, *, bounded: bool) -> list[Problem]:
        """The same problem in parts of ``size`` samples each.

        Args:
            size: the number of samples of a part; the last part may have fewer.
            bounded: whether the parts have the bounds of the activations' inputs of the whole problem.
        """
        found = []
        for start in range(0, len(self.objective), size):
            part = slice(start, start + size)
            box = Interval(self.box.lower[part], self.box.upper[part])
            known = {i: Interval(b.lower[part], b.upper[part]) for i, b in self.pre.items()} if bounded else None
            found.append(replace(self, box=box, objective=self.objective[part], known=known))
        return found

    def both_signs(self) -> Problem:
        """The same problem with the negative of each row after the rows, so that bounds are known on both sides."""
        return replace(self, objective=torch.cat([self.objective, -self.objective], 1))


def feeding(network: Network) -> list[int]:
    """Return the number of the op that feeds each activation, in order."""
    return [network.ops[i].inputs[0] for i in network.activations]


def problem_of(case: Case, network: Network, batch: int, dtype: torch.dtype) -> Problem:
    """The problem of a case: balls around the first ``batch`` exact test images that the network classifies correctly.

    The rows are the label's output minus the output of each other class.
    """
    data = load(case.data, "test")
    chosen = np.flatnonzero(data.exact)[: 4 * batch + 50]
    images, labels = torch.from_numpy(data.images[chosen]).double(), torch.from_numpy(data.labels[chosen])
    mean, std = (torch.tensor(c, dtype=torch.float64).reshape(-1, 1, 1) for c in (case.mean, case.std))

    def seen(x: Tensor) -> Tensor:
        return ((x - mean) / std).flatten(1).to(dtype)

    with torch.no_grad():
        right = network(seen(images)).argmax(1) == labels
    images, labels = images[right][:batch], labels[right][:batch]
    eps = float(Fraction(case.eps))
    box = Interval(seen((images - eps).clamp(0, 1)), seen((images + eps).clamp(0, 1)))
    every = torch.eye(network.output_size, dtype=dtype)
    margins = every[labels][:, None] - every
    others = torch.stack([rows[torch.arange(len(every)) != y] for rows, y in zip(margins, labels, strict=True)])
    return Problem(network, box, others)


def ours(problem: Problem, method: str) -> Tensor:
    """The lower bounds (batch, rows) of this package by one of ``bounds_cases.METHODS``."""
    network, (matrix, sample) = problem.network, problem.rows
    with torch.no_grad() if method == "alpha-crown" else torch.inference_mode():
        if method == "alpha-crown":
            relaxation, ascent = problem.given(problem.pre), Ascent(steps=ITERATIONS)
            lower = ascend(relaxation, len(network.ops) - 1, matrix, sample, ascent).lower
        else:
            relaxation = bounded(network, problem.box, intervals=method == "ibp", **problem.options)
            lower = _by_intervals(relaxation, problem) if method == "ibp" else lower_of_rows(relaxation, matrix)[0]
    return lower.reshape(problem.objective.shape[:2])


def _by_intervals(relaxation: Relaxation, problem: Problem) -> Tensor:
    """The least values of the rows over the outputs' intervals, for which nobody needs to charge rounding here."""
    y, rows = relaxation.bounds[-1].interval, problem.objective.double()
    least = rows.clamp(min=0) @ y.lower[..., None] + rows.clamp(max=0) @ y.upper[..., None]
    return least.flatten()


def unstable_share(problem: Problem, method: str) -> float:
    """The fraction of all neurons that are unstable, by intervals or by CROWN."""
    with torch.no_grad():
        parts = unstable(problem.given(problem.pre if method != "ibp" else {})).values()
    return sum(int(p.sum()) for p in parts) / sum(p.numel() for p in parts)


def crown_given(problem: Problem, known: Mapping[int, Interval], rows: tuple[Tensor, Tensor]) -> Tensor:
    """CROWN's lower bounds of ``rows`` in this package, with the bounds ``known`` of the activations' inputs."""
    with torch.inference_mode():
        return lower_of_rows(problem.given(known), *rows)[0]


def passes(problem: Problem) -> list[Callable[[], Tensor]]:
    """The backward pass of the output's rows in three ways, as functions without arguments.

    The first ignores rounding, in float64. The second accounts for rounding, with all coefficients in float64. The
    third is that of the verifiers: it accounts for rounding, and has coefficients in float32 where this widens the
    bounds little. All three start from the same bounds of the activations' inputs.
    """
    matrix, _ = problem.rows
    with torch.inference_mode():
        ways: list[dict[str, Any]] = [{"dtype": BASE, "rounded": False}, {"dtype": BASE}, {"dtype": None}]
        relaxations = [problem.given(problem.pre, **way) for way in ways]
    return [partial(lambda relaxation: lower_of_rows(relaxation, matrix)[0], each) for each in relaxations]


def with_gelu(problem: Problem, lam: float) -> Problem:
    """The same problem for the network with λ-GELU in place of ReLU."""
    ops = tuple(
        replace(op, function=Smooth("GELU", lam)) if isinstance(op, Elementwise) and op.function.kind == "Relu" else op
        for op in problem.network.ops
    )
    source = replace(problem.network.source, onnx=None)
    return replace(problem, network=replace(problem.network, ops=ops, source=source), known=None)
