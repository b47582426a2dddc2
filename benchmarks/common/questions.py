"""Questions about L∞ balls around test images, and their answers as numbers of images proven and refuted.

The module imports torch; scripts import it when they measure, so that --help need not wait.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor

from benchmarks.common.progress import Bar
from verifiable_relu.data import Dataset, load
from verifiable_relu.ir.network import Network
from verifiable_relu.search.batch import QueryBatch, Verifier
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Outcome, Verdict
from verifiable_relu.spec import Query, linf_properties
from verifiable_relu.supervisor.workers import processor_seconds

_BATCH = 256


def clean(network: Network, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Whether the network classifies each image correctly in float32: a bool for each image."""
    with torch.inference_mode():
        classes = [
            network(torch.from_numpy(images[start : start + _BATCH]).flatten(1)).argmax(1).numpy()
            for start in range(0, len(images), _BATCH)
        ]
    return np.concatenate([np.empty(0, labels.dtype), *classes]) == labels


def first_exact(data: Dataset, count: int) -> np.ndarray:
    """The indices of the first ``count`` images that equal the official ones (``Dataset.exact``)."""
    return np.flatnonzero(data.exact)[:count]


@dataclass(frozen=True)
class Balls:
    """Queries about a network: one for the L∞ ball around each image that the network classifies correctly.

    Attributes:
        network: the network.
        eps: the radius of the balls, as text.
        indices: the indices of the images in the data set.
        queries: the queries, one for each image.
    """

    network: Network
    eps: str
    indices: np.ndarray
    queries: tuple[Query, ...]

    @classmethod
    def around(cls, network: Network, data: Dataset, indices: np.ndarray, eps: str) -> Balls:
        """The balls around those of the images with the given indices that the network classifies correctly."""
        right = indices[clean(network, data.images[indices], data.labels[indices])]
        properties = linf_properties(data.images[right], data.labels[right], Fraction(eps), network.output_size)
        return cls(network, eps, right, tuple(Query(network, prop) for prop in properties))

    def __len__(self) -> int:
        return len(self.queries)

    def those(self, chosen: np.ndarray) -> Balls:
        """Those of the balls for which ``chosen``, a bool for each ball, is true."""
        queries = tuple(query for query, wanted in zip(self.queries, chosen, strict=True) if wanted)
        return Balls(self.network, self.eps, self.indices[chosen], queries)

    def ask(self, verifier: Verifier, bar: Progress, seconds: float = math.inf) -> Answers:
        """The answers of a verifier to all balls in one batch, with a budget of ``seconds`` for each ball."""
        label = f"{self.network.name} ε={self.eps} {verifier.name}".strip()
        wall, cpu = time.perf_counter(), processor_seconds()
        with Bar(bar, label, len(self)) as shown:
            batch = QueryBatch(self.queries, TimeBudget(seconds))
            for _ in batch.ask(verifier):
                shown.advance()
        wall, cpu = time.perf_counter() - wall, processor_seconds() - cpu
        outcomes = tuple(batch.outcomes[number] for number in batch.queries)
        return Answers(outcomes, tuple(outcome.verdict for outcome in outcomes), wall, cpu)


@dataclass(frozen=True)
class Answers:
    """The answers of a verifier to a batch of queries.

    Attributes:
        outcomes: the claimed outcome of each query.
        verdicts: the verdict of each query, where *sat* counts only if exact evaluation and replay confirm it.
        wall: the wall-clock seconds of the batch.
        cpu: the processor seconds of the batch, those of a solver's process included.
    """

    outcomes: tuple[Outcome, ...]
    verdicts: tuple[Verdict, ...]
    wall: float
    cpu: float

    def are(self, verdict: Verdict) -> np.ndarray:
        """Whether each verdict is ``verdict``: a bool for each query."""
        return np.array([found is verdict for found in self.verdicts], bool)

    def count(self, verdict: Verdict) -> int:
        """The number of queries with this verdict."""
        return Counter(self.verdicts)[verdict]

    @property
    def unstable(self) -> float | None:
        """The mean number of unstable neurons over the queries; None if the verifier does not count them."""
        known = [outcome.unstable for outcome in self.outcomes if outcome.unstable is not None]
        return float(np.mean(known)) if known else None


def climb(balls: Balls, make: Callable[[str], Verifier], bar: Progress) -> dict[str, int]:
    """Ask CROWN, then α-CROWN, then the attack, each about the balls that are left open.

    Returns:
        The numbers of balls (``clean``, for their images are classified correctly), of those that the attack does not
        refute (``not refuted``; proven balls are not attacked), that CROWN proves (``crown``), and that CROWN or
        α-CROWN proves (``alpha-crown``).
    """
    by_crown = balls.ask(make("crown"), bar)
    rest = balls.those(~by_crown.are(Verdict.UNSAT))
    by_alpha = rest.ask(make("alpha-crown"), bar)
    attacked = rest.those(~by_alpha.are(Verdict.UNSAT)).ask(make("attack"), bar)
    crown = by_crown.count(Verdict.UNSAT)
    return {
        "clean": len(balls),
        "not refuted": len(balls) - attacked.count(Verdict.SAT),
        "crown": crown,
        "alpha-crown": crown + by_alpha.count(Verdict.UNSAT),
    }


def split_tensors(name: str, count: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the first training images of a data set and all its test images, with their classes."""
    training, test = load(name, "train"), load(name, "test")
    return (
        (torch.from_numpy(training.images[:count]), torch.from_numpy(training.labels[:count])),
        (torch.from_numpy(test.images), torch.from_numpy(test.labels)),
    )
