"""Branch and bound on the input box: complete in the limit, and quick where few inputs vary.

The frontier (``boxes``) holds sub-boxes of *all* queries of a network. Every step bounds a full batch of them, drops
those that are proved, tries points of the others as counterexamples, clips them, and halves them. What is known of a
query's whole box (``root``) is left alone: the first boxes are cut into many at once, and over these the bounds of the
whole box are hardly ever the tighter ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from verifiable_relu.bounds import MEMORY
from verifiable_relu.network.graph import Network
from verifiable_relu.pgd import Pgd
from verifiable_relu.settings import neutral
from verifiable_relu.spec.property import Query
from verifiable_relu.verifiers.base import SILENT, Budget, Outcome, Progress, by_network, fault
from verifiable_relu.verifiers.boxes import Frontier
from verifiable_relu.verifiers.root import NONE, Roots


@dataclass(frozen=True)
class InputSplit:
    """Branch and bound on the input box.

    Attributes:
        batch: most sub-boxes bounded at once.
        most: layers with more unstable neurons in a box are not bounded by CROWN there.
        symbols: how many unstable neurons of a layer have a noise symbol of their own in a zonotope.
        attacks: boxes are attacked in every so-manieth step.
        pgd: how they are attacked.
        easy: a query that is not through after so many boxes is attacked as a whole.
        search: how it is attacked.
        device: where to run.
        memory: a limit in bytes on what all processes hold for those; the boxes that wait are not counted.
        processes: how many processes share the boxes, where these take long and the operating system can copy processes
            (Linux). The process that calls ``verify`` should have no other threads at work.
        alone: the seconds that one process searches alone before others share the boxes.
    """

    batch: int = 256
    most: int = 512
    symbols: int = 256
    attacks: int = 4
    pgd: Pgd = Pgd(steps=10, starts=8)  # noqa: RUF009 -- frozen
    easy: int = 512
    search: Pgd = Pgd(rounds=3, more=128, screened=16384)  # noqa: RUF009 -- frozen
    device: str = "cpu"
    memory: int = MEMORY
    processes: int = field(default=1, repr=False)
    alone: float = field(default=0.5, repr=False)

    name: ClassVar[str] = "split"

    @neutral()
    def verify(
        self, queries: Sequence[Query], budget: Budget, progress: Progress = SILENT, roots: Roots = NONE
    ) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        for network, members in by_network(queries):
            search = self.frontier(network, [queries[i] for i in members], budget.subset(members))
            try:
                with torch.no_grad():
                    while search.frontier_size:
                        if search.is_worth_sharing():
                            search.share()
                        else:
                            search.step()
                        search.settle()
                        for local in search.decided():
                            outcomes[members[local]] = search.outcomes[local]
                            progress.finish(members[local], search.outcomes[local])
                        progress.stage(self.name, len(outcomes), len(queries))
            except Exception as error:
                for local, index in enumerate(members):
                    if index not in outcomes:
                        # The step that broke may have decided some before.
                        outcomes[index] = search.outcomes.get(local) or fault(error, self.name)
                        progress.finish(index, outcomes[index])
        return [outcomes[i] for i in range(len(queries))]

    def frontier(self, network: Network, queries: Sequence[Query], budget: Budget) -> Frontier:
        """Where the search begins, for queries of one network."""
        return Frontier(self, network, queries, budget)
