"""The bounds of this package; no other module of the study calls ``verifiable_relu.bounds``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.speed.bounds_cases import ITERATIONS, Case
from verifiable_relu.bounds import (
    TUNING,
    Bounds,
    Relaxation,
    Tuning,
    ascend,
    crown_relaxation,
    preactivation_bounds,
)
from verifiable_relu.bounds.activations import unstable
from verifiable_relu.bounds.crown import Ascent
from verifiable_relu.data import load
from verifiable_relu.network import Network
from verifiable_relu.network.nodes import Gelu, Relu


@dataclass(frozen=True, eq=False)
class Problem:
    """A network, a batch of L∞ balls, and linear functions of the outputs whose least values are to be bounded.

    Attributes:
        network: the network, in the dtype in which auto_LiRPA computes. This package computes in float64, except for
            the coefficients of linear bounds, which are in float32 if that dtype is float32.
        box: the balls as boxes, in the same dtype.
        objective: (batch, rows, outputs), the coefficients of the functions.
        known: CROWN's bounds of every activation's input, if they have been computed.
    """

    network: Network
    box: Bounds
    objective: Tensor
    known: dict[int, Bounds] | None = None

    @cached_property
    def float32(self) -> bool:
        """Whether the coefficients of this package's linear bounds are in float32."""
        return self.box.lower.dtype == torch.float32

    @cached_property
    def given(self) -> tuple[Network, Bounds]:
        """The network and the balls in float64, as this package's bounds take them."""
        return self.network.to(torch.float64), Bounds(self.box.lower.double(), self.box.upper.double())

    @cached_property
    def pre(self) -> dict[int, Bounds]:
        """CROWN's bounds of every activation's input, by the activation's index."""
        if self.known is not None:
            return self.known
        with torch.no_grad():
            return preactivation_bounds(*self.given, float32=self.float32)

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """The objective as this package takes it: (batch · rows, outputs), and the sample of each row."""
        samples, rows, outputs = self.objective.shape
        return self.objective.double().reshape(-1, outputs), torch.arange(samples).repeat_interleave(rows)

    def relaxation(self, known: dict[int, Bounds] | None = None, tuning: Tuning = TUNING) -> Relaxation:
        """The relaxation of the problem, with the bounds ``known`` of the activations' inputs, if given."""
        return Relaxation(*self.given, known, self.float32, tuning=tuning)

    def parts(self, size: int, *, bounded: bool) -> list[Problem]:
        """The same problem in parts of ``size`` samples each.

        Args:
            size: the number of samples of a part; the last part may have fewer.
            bounded: whether the parts have the bounds of the activations' inputs of the whole problem.
        """
        found = []
        for start in range(0, len(self.objective), size):
            part = slice(start, start + size)
            box = Bounds(self.box.lower[part], self.box.upper[part])
            known = {i: Bounds(b.lower[part], b.upper[part]) for i, b in self.pre.items()} if bounded else None
            found.append(replace(self, box=box, objective=self.objective[part], known=known))
        return found

    def both_signs(self) -> Problem:
        """The same problem with the negative of each row after the rows, so that bounds are known on both sides."""
        return replace(self, objective=torch.cat([self.objective, -self.objective], 1))


def problem_of(case: Case, network: Network, batch: int, dtype: torch.dtype) -> Problem:
    """The problem of a case: balls around the first ``batch`` exact test images that the network classifies correctly.

    The rows are the label's output minus the output of each other class.
    """
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
    """The lower bounds (batch, rows) of this package by one of ``bounds_cases.METHODS``."""
    network, box = problem.given
    matrix, sample = problem.rows
    float32 = problem.float32
    with torch.no_grad() if method == "alpha-crown" else torch.inference_mode():
        if method == "ibp":
            lower = problem.relaxation().outputs(matrix, intervals=True)
        elif method == "crown":
            lower = crown_relaxation(network, box, float32=float32).outputs(matrix)
        else:
            ascent = Ascent(steps=ITERATIONS)
            relaxation = problem.relaxation(problem.pre)
            relaxation.advance(network.last_activation)
            rows = matrix.reshape(-1, *network.output_shape)
            lower = ascend(relaxation, len(network.nodes) - 1, rows, sample, ascent).lower
    return lower.reshape(problem.objective.shape[:2])


def unstable_share(problem: Problem, method: str) -> float:
    """The fraction of all neurons that are unstable, by intervals or by CROWN."""
    with torch.no_grad():
        relaxation = problem.relaxation(problem.pre if method != "ibp" else None)
        relaxation.advance(len(problem.network.nodes) - 1)
        parts = [unstable(problem.network.nodes[i], box) for i, box in relaxation.pre.items()]
    return sum(int(p.sum()) for p in parts) / sum(p.numel() for p in parts)


def crown_given(problem: Problem, known: dict[int, Bounds], rows: tuple[Tensor, Tensor]) -> Tensor:
    """CROWN's lower bounds of ``rows`` in this package, with the bounds ``known`` of the activations' inputs."""
    with torch.inference_mode():
        given = problem.relaxation()
        given.advance(problem.network.last_activation, lambda index, _: known[index])
        return given.outputs(*rows)


def passes(problem: Problem) -> list[Callable[[], Tensor]]:
    """The backward pass of the output's rows in three ways, as functions without arguments.

    The first ignores rounding. The second accounts for rounding, with all coefficients in float64. The third is that of
    the verifiers: it accounts for rounding, and has coefficients in float32 where this widens the bounds little. All
    three start from the same bounds of the activations' inputs.
    """
    last = len(problem.network.nodes) - 1
    matrix, sample = problem.rows
    mixed, plain = (problem.relaxation(problem.pre, tuning) for tuning in (TUNING, replace(TUNING, float32=False)))
    with torch.inference_mode():
        for relaxation in (mixed, plain):
            relaxation.advance(last)
    ways: tuple[Callable[..., tuple[Tensor, Tensor | None]], ...] = (
        partial(plain.lower, rounded=False),
        plain.lower,
        mixed.lower,
    )
    return [lambda way=way: way(last, matrix, sample)[0] for way in ways]  # type: ignore[misc]


def with_gelu(problem: Problem, lam: float) -> Problem:
    """The same problem for the network with λ-GELU in place of ReLU."""
    nodes = tuple(
        Gelu(name=n.name, inputs=n.inputs, shape=n.shape, lam=torch.tensor(lam)) if isinstance(n, Relu) else n
        for n in problem.network.nodes
    )
    return replace(problem, network=Network(nodes).to(torch.float64), known=None)
