"""From test images to numbers of images: which are classified rightly, balls around them, what is proven and refuted.

It imports torch; scripts import it when they measure.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch
from rich.progress import Progress

from benchmarks.common.progress import Bar
from verifiable_relu.bounds import Bounds, Relaxation, unstable
from verifiable_relu.data import Dataset
from verifiable_relu.network import Network
from verifiable_relu.spec import Query, linf_properties
from verifiable_relu.trust.replay import confirm
from verifiable_relu.verifiers.base import Budget, Outcome, Verdict, Verifier
from verifiable_relu.verifiers.incomplete import Crown
from verifiable_relu.verifiers.root import Known
from verifiable_relu.verifiers.solvers.process import processor_seconds

_BATCH = 256


def clean(network: Network, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Which images are classified rightly, in the arithmetic that users have: float32."""
    with torch.inference_mode():
        classes = [
            network(torch.from_numpy(images[start : start + _BATCH])).flatten(1).argmax(1).numpy()
            for start in range(0, len(images), _BATCH)
        ]
    return np.concatenate([np.empty(0, labels.dtype), *classes]) == labels


def first_exact(data: Dataset, count: int) -> np.ndarray:
    """The indices of the first ``count`` images that are as the data set's authors published them."""
    return np.flatnonzero(data.exact)[:count]


@dataclass(frozen=True)
class Balls:
    """Questions about a network: is its class the label's all over an L∞ ball? One for each image that it gets right.

    Attributes:
        network: which is asked.
        eps: the balls' radius, as text.
        indices: of the images in the data set.
        queries: one for each.
    """

    network: Network
    eps: str
    indices: np.ndarray
    queries: tuple[Query, ...]

    @classmethod
    def around(cls, network: Network, data: Dataset, indices: np.ndarray, eps: str) -> Balls:
        """Balls around those of the images with these indices that the network classifies rightly."""
        right = indices[clean(network, data.images[indices], data.labels[indices])]
        properties = linf_properties(data.images[right], data.labels[right], Fraction(eps), network.output_size)
        return cls(network, eps, right, tuple(Query(network, prop) for prop in properties))

    def __len__(self) -> int:
        return len(self.queries)

    def those(self, chosen: np.ndarray) -> Balls:
        """A part of the balls, by a truth value for each."""
        queries = tuple(query for query, wanted in zip(self.queries, chosen, strict=True) if wanted)
        return Balls(self.network, self.eps, self.indices[chosen], queries)

    def ask(self, verifier: Verifier, bar: Progress, seconds: float = math.inf) -> Answers:
        """Ask a verifier, all at once, for at most so many seconds per ball."""
        label = f"{self.network.name} ε={self.eps} {verifier.name}".strip()
        wall, cpu = time.perf_counter(), processor_seconds()
        with Bar(bar, label, len(self)) as shown:
            outcomes = verifier.verify(self.queries, Budget.each(seconds, len(self)), shown)
        wall, cpu = time.perf_counter() - wall, processor_seconds() - cpu
        verdicts = [checked(query, outcome) for query, outcome in zip(self.queries, outcomes, strict=True)]
        return Answers(tuple(outcomes), tuple(verdicts), wall, cpu)


@dataclass(frozen=True)
class Answers:
    """What a verifier said.

    Attributes:
        outcomes: for each query.
        verdicts: the same, where a counterexample counts only if exact evaluation and replay confirm it.
        wall, cpu: seconds of the clock and of the processor for all queries together, a solver's process included.
    """

    outcomes: tuple[Outcome, ...]
    verdicts: tuple[Verdict, ...]
    wall: float
    cpu: float

    def are(self, verdict: Verdict) -> np.ndarray:
        """Which verdicts are this one."""
        return np.array([found is verdict for found in self.verdicts], bool)

    def count(self, verdict: Verdict) -> int:
        """How many verdicts are this one."""
        return Counter(self.verdicts)[verdict]

    @property
    def unstable(self) -> float | None:
        """Mean number of unstable neurons, where the verifier counts them."""
        known = [outcome.unstable for outcome in self.outcomes if outcome.unstable is not None]
        return float(np.mean(known)) if known else None


def timed(query: Query, verifier: Verifier, limit: float) -> tuple[Outcome, float, float]:
    """What a verifier says of one query alone within ``limit`` seconds, and its seconds of clock and of processor."""
    wall, cpu = time.perf_counter(), processor_seconds()
    (outcome,) = verifier.verify([query], Budget.each(limit, 1))
    return outcome, time.perf_counter() - wall, processor_seconds() - cpu


def checked(query: Query, outcome: Outcome) -> Verdict:
    """The verdict; a counterexample that exact evaluation and replay do not confirm is none."""
    if outcome.verdict is Verdict.SAT and not (outcome.witness and confirm(query, outcome.witness).confirmed):
        return Verdict.UNKNOWN
    return outcome.verdict


@dataclass(frozen=True)
class Counting(Crown):
    """CROWN that remembers how many neurons of each layer were unstable, in all queries of a batch together."""

    counts: list[list[int]] = field(default_factory=list)

    def relaxation(self, network: Network, box: Bounds, known: Known | None, stop: Callable[[], bool]) -> Relaxation:
        """CROWN's, whose unstable neurons are counted."""
        found = super().relaxation(network, box, known, stop)
        self.counts.append([int(unstable(network.nodes[i], found.pre[i]).sum()) for i in sorted(found.pre)])
        return found

    @property
    def layers(self) -> list[int]:
        """Unstable neurons of each layer, over all queries."""
        return [sum(layer) for layer in zip(*self.counts, strict=True)]


@dataclass(frozen=True)
class Ladder:
    """What CROWN, α-CROWN and the attack say of the same balls, each asked only about those that are still open.

    Attributes:
        crown: how many balls CROWN proves.
        alpha: how many balls CROWN or α-CROWN proves.
        standing: how many balls the attack does not refute; what is proven is not attacked.
        layers: unstable neurons of each layer by CROWN's bounds, over all balls.
        seconds: of each method.
    """

    crown: int
    alpha: int
    standing: int
    layers: list[int]
    seconds: dict[str, float]


def climb(balls: Balls, make: Callable[[str], Verifier], bar: Progress) -> Ladder:
    """CROWN, α-CROWN and the attack in turn."""
    counting = Counting()
    by_crown = balls.ask(counting, bar)
    rest = balls.those(~by_crown.are(Verdict.UNSAT))
    by_alpha = rest.ask(make("alpha-crown"), bar)
    left = rest.those(~by_alpha.are(Verdict.UNSAT))
    attacked = left.ask(make("attack"), bar)
    seconds = {"crown": by_crown.wall, "alpha-crown": by_alpha.wall, "attack": attacked.wall}
    crown = by_crown.count(Verdict.UNSAT)
    return Ladder(
        crown,
        crown + by_alpha.count(Verdict.UNSAT),
        len(balls) - attacked.count(Verdict.SAT),
        # Of no balls at all CROWN counts nothing.
        counting.layers or [0] * len(balls.network.activations),
        {name: round(taken, 3) for name, taken in seconds.items()},
    )


def contradictions(balls: Balls, answers: Sequence[Answers]) -> list[int]:
    """The indices of the images of which one verifier proves what another refutes: one of the two is wrong."""
    pairs = zip(balls.indices, zip(*(each.verdicts for each in answers), strict=True), strict=True)
    return [int(index) for index, said in pairs if {Verdict.SAT, Verdict.UNSAT} <= set(said)]
