"""Trees over the phases of unstable neurons that exclude a polytope, on one relaxation that all nodes share.

A node is closed by a proof alone (``proof``). A node that stays open is split on the neuron whose line over the
activation costs its own bound most; where no line costs much, more steps are taken with adaptive lines for every
neuron. Points at which relaxations are least are tried as counterexamples all along.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from verifiable_relu.rounding import TINY, mean_below
from verifiable_relu.trust.certificate import Tree as Certified
from verifiable_relu.verifiers.bab.ascent import Bounded, DualAscent, Nodes
from verifiable_relu.verifiers.bab.loop import Loop, State
from verifiable_relu.verifiers.bab.proof import Proofs
from verifiable_relu.verifiers.bab.recorded import Recorded, RecordedLeaves
from verifiable_relu.verifiers.bab.strip import TreeRelaxation

_WORKING = 1 << 27
"""Bytes of coefficients of the nodes that are bounded at once."""

_OTHER = 150
"""Everything else that is done for a node takes as much work as this number of rows of the system."""

_NEW = 0.5
"""The weight of the blame of a neuron without a row, compared with others, where rows are to be few."""

_MOST = 32
"""Nodes that are finished at once, at most."""

_TOGETHER = 1e10
"""The work of finishing several nodes at once, at most, so that the clock is looked at often enough."""

_LAST = 300
"""Steps of a node without open neurons: there is nothing else to do."""

_CANDIDATES = 4
"""The nodes of a batch, those with the least bounds, that are asked for a counterexample."""

Decide = Callable[[Tensor], bool | None]


@dataclass(frozen=True)
class Branching:
    """How a tree is searched.

    Attributes:
        steps: of the ascent for each node.
        adaptive: how many neurons have adaptive lines while they are open, those first that matter most at the root.
        batch: most nodes that are split at once.
        stalled: a node is finished where all neurons together are to blame for no more than this part of its bound.
        settled: where finishing leaves less than this part, points below the node's are tried, and it is put to whoever
            decides nodes exactly.
        finishing: steps of the ascent with adaptive lines for every neuron.
        choices: how many neurons a node may be split on; where there are several, the children by each are bounded.
        look: steps of the ascent for these children.
        looked: from this number of bounded nodes on, each is split on the neuron that is most to blame.
    """

    steps: int = 2
    adaptive: int = 32
    batch: int = 512
    stalled: float = 0.5
    settled: float = 0.05
    finishing: int = 30
    choices: int = 1
    look: int = 4
    looked: float = math.inf


class PhaseTree(Loop):
    """The proof, or refutation, that no point of the box makes all of some rows at most zero.

    Args:
        strip: the relaxation; its first row is the objective.
        scale: (rows,) the factor of each row, a multiple of a row of the property.
        reached: whether one of some scaled inputs (points, n) is a counterexample, which ends the search; if True
            follows, points below these are tried, too.
        left: tells how many seconds are left.
        options: of the search.
        memory: bytes of open nodes.
        decide: by the splits (m,) of a node that nothing else closes, tells whether none of its points is a
            counterexample; None where it does not know. None for nobody who can tell.
        keep: whether to keep what proves each leaf, for a certificate.
    """

    def __init__(
        self,
        strip: TreeRelaxation,
        scale: Tensor,
        reached: Callable[..., bool],
        left: Callable[[], float],
        options: Branching,
        memory: float,
        decide: Decide | None = None,
        keep: bool = False,
    ) -> None:
        self._scale, self._decide = scale, decide
        self._reached, self._left, self._options = reached, left, options
        self._proofs, folded = Proofs(strip), strip.folded
        self._size = folded.size
        batch = max(16, min(options.batch, _WORKING // (24 * (folded.inputs + folded.size + 1))))
        super().__init__(strip, 1, batch, options.choices, memory, options.looked)
        none = torch.zeros(self._size, dtype=torch.bool)
        root = Nodes.roots(self._size, len(scale) - 1)
        # A line below the activation is better for being adaptive where the coefficient is positive.
        strip.prefer()
        weight = DualAscent(strip, none, torch.float32).run(root, 0).coefficients[0].double()
        weight = torch.where(folded.smooth | strip.over, weight.abs(), weight)
        matter = weight.topk(min(self._size, options.adaptive)).indices
        self._ascent = DualAscent(strip, none.index_fill(0, matter, True), torch.float32)
        self._recorded = Recorded(strip, self._proofs, self._ascent.adaptive) if keep else None
        root = Nodes.roots(self._size, len(scale) - 1)
        self._at_root = float(self.proven(root, self._ascent.run(root, options.finishing))[0])
        self.begin(root)

    @property
    def lower(self) -> float:
        """A proven lower bound, on the nodes that are closed, of the largest of the property's rows."""
        return float(self.now.lower[0])

    def bound(self, stop: Callable[[], bool]) -> float:
        """``lower`` for closed and open nodes together; that of the root once ``stop`` says that there is no time."""
        lower = self.lower
        for nodes in self.now.open.batches(self._batch):
            if stop():
                return self._at_root
            lower = min(lower, float(self.proven(nodes, self._ascent.run(nodes, 0)).min()))
        return max(lower, self._at_root)

    def certified(self, activations: Sequence[int]) -> Certified | None:
        """The tree as it is written, once it is proved, of a network whose activations are these nodes."""
        return None if self._recorded is None else self._recorded.tree(self.now.leaves, activations)

    def bounded(self, nodes: Nodes, look: bool = False) -> Bounded:
        steps = self._options.look if look else self._options.steps
        found = self._ascent.run(nodes, steps)
        self.now.work += self._work(len(nodes), steps, len(found.columns))
        if not self.strip.folded.whole:
            found.blame *= torch.where(self.strip.neurons.made, 1.0, _NEW).to(found.blame)
        return found

    def proven(self, nodes: Nodes, found: Bounded) -> Tensor:
        # Where the objective plus Σ μ_i·row_i is at least b, the largest of the property's rows, of which they are
        # multiples, is at least b / (scale_0 + Σ μ_i·scale_i).
        lower = self._proofs.lower(nodes.split, found.columns, found.w, nodes.mu, v=found.v)
        parts = self._scale[0] + nodes.mu.double().clamp(min=0) @ self._scale[1:]
        return mean_below(lower, parts, len(self._scale))

    def enough(self, nodes: Nodes) -> Tensor:
        return torch.zeros(len(nodes))

    def leaves(self, nodes: Nodes, found: Bounded) -> RecordedLeaves | None:
        if self._recorded is None:
            return None
        return self._recorded.closed(nodes.split, found.columns, found.w, nodes.mu, found.v)

    def more(self, nodes: Nodes, found: Bounded) -> Tensor:
        is_open, options = torch.ones(len(nodes), dtype=torch.bool), self._options
        worst = found.bound.topk(min(len(nodes), _CANDIDATES), largest=False).indices
        if self._reached(self._ascent.minimisers(nodes[worst])):
            self.now.state = State.REACHED
            return is_open
        stalled = _total(found.blame) <= options.stalled * found.bound.abs()
        stalled |= (found.blame < 0).all(1)
        one = max(1.0, self._work(1, options.finishing, self._size))
        for part in stalled.nonzero().squeeze(1).split(max(1, min(_MOST, int(_TOGETHER / one)))):
            if len(part) and self._left() > 0 and self.now.state is State.OPEN:
                is_open[part] = self._finish(nodes, found.blame, part)
        return is_open

    def _finish(self, nodes: Nodes, blame: Tensor, part: Tensor) -> Tensor:
        """Return which of the nodes ``part`` stay open after more steps and, where these have settled, a decision."""
        if not self.strip.folded.whole:
            # Nothing but splits closes it.
            if bool((blame[part] < 0).all(1).any()):
                self.now.state = State.STUCK
            blame[part] = self._or_gaps(blame[part], nodes.split[part]).to(blame)
            return torch.ones(len(part), dtype=torch.bool)
        mine = nodes[part]
        is_open, found = self._more_steps(mine, self._options.finishing)
        last = (found.blame < 0).all(1)
        if bool((is_open & last).any()):
            rest = (is_open & last).nonzero().squeeze(1)
            is_open[rest], _ = self._more_steps(mine[rest], _LAST, 1.0)
        settled = is_open & (last | (_total(found.blame) < self._options.settled * found.bound.abs()))
        if bool(settled.any()) and self._reached(self._everywhere.minimisers(mine[settled]), True):
            self.now.state = State.REACHED
        for number in settled.nonzero().squeeze(1).tolist():
            if self._left() <= 0 or self.now.state is not State.OPEN:
                break
            is_open[number] = not self._decided(mine[number : number + 1], bool(last[number]))
        mine.multipliers *= (mine.split != 0) | self._ascent.adaptive
        nodes.multipliers[part], nodes.mu[part] = mine.multipliers, mine.mu
        blame[part] = self._or_gaps(found.blame, mine.split).to(blame)
        return is_open

    def _more_steps(self, nodes: Nodes, steps: int, *factor: float) -> tuple[Tensor, Bounded]:
        """Bound nodes by steps in float64 with adaptive lines for every neuron; return which stay open."""
        found = self._everywhere.run(nodes, steps, *factor)
        self.now.work += self._work(len(nodes), steps, self._size)
        return ~self.close(nodes, found), found

    @cached_property
    def _everywhere(self) -> DualAscent:
        return DualAscent(self.strip, torch.ones(self._size, dtype=torch.bool), torch.float64)

    def _or_gaps(self, blame: Tensor, split: Tensor) -> Tensor:
        """Return the blame of each neuron; where no line costs anything, the widest triangle is split."""
        return torch.where(_total(blame)[:, None] > 0, blame, self.strip.gaps(split).to(blame))

    def _decided(self, node: Nodes, last: bool) -> bool:
        """Return True if one node is decided to hold no counterexample; it may also be the end of the search."""
        known = self._decide(node.split[0]) if self._decide is not None else None
        if known:
            # Nothing but the sign of the margin is known.
            self.note(node, torch.full((1,), TINY, dtype=torch.float64), None)
            return True
        if known is False:
            self.now.state = State.REACHED
        elif last and self._left() > 0:
            self.now.state = State.STUCK
        return False

    def _work(self, nodes: int, steps: int, rows: int) -> float:
        """Return the work of some steps with some rows of the system, for some nodes."""
        return 2.0 * nodes * (steps + 1) * (rows + _OTHER) * (self.strip.folded.inputs + self._size)


def _total(blame: Tensor) -> Tensor:
    """Return how much the bound of each node is below the network's value where the relaxation is least, at most.

    At the best multipliers, that is: a point with a negative value is then a counterexample.
    """
    return blame.clamp(min=0).sum(1)
