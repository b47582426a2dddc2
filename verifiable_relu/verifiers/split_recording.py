"""``split``, recording what proves each of its boxes (``trust.certificate.Cover``).

A box is proven by its zonotope alone, of which nothing needs to be written but which row of each polytope is positive;
or, where zonotopes do not apply, by CROWN's bounds of its neurons, which are written.
Nothing is cut off: what halving leaves covers the query's box.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.bounds import Bounds, crown_relaxation
from verifiable_relu.bounds.zonotope import Zonotopes
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Relu
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.trust.certificate import Cover, Proof
from verifiable_relu.verifiers.base import Budget, Outcome, Verdict
from verifiable_relu.verifiers.boxes import Frontier, Lines, Share
from verifiable_relu.verifiers.clipping import Clipped
from verifiable_relu.verifiers.input_split import InputSplit
from verifiable_relu.verifiers.recording import Recorder

_SPARE = 1e-11
"""A row is to be above this part of its own size: whoever checks it computes it with other rounding."""


@dataclass(frozen=True)
class RecordedSplit(InputSplit):
    """Branch and bound on the input box whose outcomes of *unsat* hold their proofs."""

    # Whoever checks a zonotope gives every unstable neuron a symbol.
    symbols: int = 1 << 30

    def frontier(self, network: Network, queries: Sequence[Query], budget: Budget) -> Frontier:
        return _Recorded(self, network, queries, budget)


class _Zonotopes(Zonotopes):
    """Zonotopes in which every unstable neuron has a symbol of its own, as whoever checks them has."""

    def mirrors(self, node: Relu) -> None:
        return None


class _Recorded(Frontier):
    """The sub-boxes that are still to be bounded, and those that are proven."""

    def __init__(self, options: InputSplit, network: Network, queries: Sequence[Query], budget: Budget) -> None:
        self._proven: list[list[tuple[Tensor, Tensor, list[int] | Proof]]] = [[] for _ in queries]
        super().__init__(options, network, queries, budget)

    def simplified(self, network: Network) -> Network:
        # The network of the file is what the certificate speaks of.
        return network

    def lines(self, box: Bounds, rows: RowBatch, owner: Tensor, stop: Callable[[], bool]) -> Lines:
        below = rows.bound.new_full((), -torch.inf)
        if not self.by_zonotopes:
            return self._by_claims(box, rows, owner, stop)
        forms = _Zonotopes(self.network, box, self.options.symbols, stop)
        values, coefficients = forms.lower(rows.matrix, rows.sample)
        size = (
            rows.bound.abs()
            + values.abs()
            + (rows.matrix.abs() * forms.output.center.flatten(1)[rows.sample].abs()).sum(1)
        )
        values = torch.nextafter(values - rows.bound - _SPARE * size, below)
        found = Lines(rows, values, coefficients, self.influence(box, rows, coefficients, forms))
        for number in (rows.margins(values) > 0).nonzero().squeeze(1).tolist():
            self._keep(box, number, owner, _positive(rows, values, number))
        return found

    def _by_claims(self, box: Bounds, rows: RowBatch, owner: Tensor, stop: Callable[[], bool]) -> Lines:
        """By CROWN's bounds of all neurons, which are written for boxes that they prove."""
        recorder, options = Recorder.of(self.network), self.options
        relaxation = crown_relaxation(
            self.network,
            box,
            coarse=recorder.coarse,
            memory=self.memory,
            stop=stop,
            max_unstable=options.most,
        )
        last = len(self.network.nodes) - 1
        matrix = rows.matrix.reshape(-1, *self.network.output_shape)
        values, reached = relaxation.lower(last, matrix, rows.sample, coefficients=True)
        assert reached is not None
        coefficients = relaxation.of_input(reached)
        values = torch.nextafter(values - rows.bound, values.new_full((), -torch.inf))
        found = Lines(rows, values, coefficients, self.influence(box, rows, coefficients, None))
        for number in (rows.margins(values) > 0).nonzero().squeeze(1).tolist():
            prop = self.queries[int(owner[number])].property
            if len(prop.unsafe) == int((rows.owner == number).sum()):
                proof = recorder.shared(relaxation, number, prop, _positive(rows, values, number))
                self._keep(box, number, owner, proof)
        return found

    def go_on_elsewhere(self, boxes: Sequence[Tensor], pause: Callable[[], bool]) -> Share:
        self._proven = [[] for _ in self.queries]
        return replace(super().go_on_elsewhere(boxes, pause), proven=self._proven)

    def take(self, share: Share) -> None:
        for mine, more in zip(self._proven, share.proven, strict=True):
            mine += more
        super().take(share)

    def _keep(self, box: Bounds, number: int, owner: Tensor, proof: list[int] | Proof) -> None:
        lower, upper = box.lower[number].flatten().clone(), box.upper[number].flatten().clone()
        self._proven[int(owner[number])].append((lower, upper, proof))

    def clipped(self, box: Bounds, lines: Lines) -> Clipped:
        none = torch.zeros(len(box.lower), dtype=torch.bool, device=box.lower.device)
        return Clipped(box, none, box.lower.new_full((len(none),), torch.inf))

    def _decide(self, local: int, outcome: Outcome) -> None:
        if local in self.outcomes:
            return
        super()._decide(local, outcome)
        proven, self._proven[local] = self._proven[local], []
        prop = self.queries[local].property
        rows = RowBatch.of([prop], self.network.output_size)
        counts: list[Any] = torch.bincount(rows.polytope, minlength=len(rows.owner)).tolist()
        # Coefficients that float64 does not hold are split into several rows.
        if outcome.verdict is Verdict.UNSAT and counts == [len(polytope) for polytope in prop.unsafe]:
            lower, upper, proofs = zip(*proven, strict=True)
            low, high = (torch.stack(part).cpu().numpy() for part in (lower, upper))
            self.outcomes[local] = replace(self.outcomes[local], proof=Cover(prop.unsafe, low, high, proofs))


def _positive(rows: RowBatch, values: Tensor, number: int) -> list[int]:
    """Of each polytope of one box the number of the row with the largest value."""
    chosen = []
    for polytope in (rows.owner == number).nonzero().squeeze(1).tolist():
        chosen.append(int(values[rows.polytope == polytope].argmax()))
    return chosen
