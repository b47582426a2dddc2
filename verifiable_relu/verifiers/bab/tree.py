"""Trees over the phases of unstable neurons that exclude a polytope, on one relaxation that all nodes share.

A node is closed by a proof alone (``proof``). A node that stays open is split on the neuron whose line over the
activation costs its own bound most; where no line costs much, more steps are taken with adaptive lines for every
neuron, and then the node's linear program is solved. Points at which relaxations are least are tried as
counterexamples all along.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verifiable_relu.rounding import TINY, mean_below
from verifiable_relu.trust.certificate import Tree as Certified
from verifiable_relu.verifiers.bab.ascent import Bounded, DualAscent, Nodes, Packed, depth
from verifiable_relu.verifiers.bab.folded import Rows
from verifiable_relu.verifiers.bab.loop import Loop, State
from verifiable_relu.verifiers.bab.proof import Proofs
from verifiable_relu.verifiers.bab.recorded import Leaves, Recorded
from verifiable_relu.verifiers.bab.strip import Strip

if TYPE_CHECKING:
    from verifiable_relu.verifiers.bab.program import Program

_WORKING = 1 << 27
"""Bytes of coefficients of the nodes that are bounded at once."""

_PATIENCE = 0.05
"""The part of the time that is left which the linear program of a node may take."""

_OTHER = 150
"""As much work as so many rows of the system is what else is done for a node."""

_PROGRAM = 3e9
"""The work of a linear program."""

_NEW = 0.5
"""How much the blame of a neuron without a row counts beside that of others, where rows are to be few."""

_MOST = 32
"""Nodes that are finished at once, at most."""

_TOGETHER = 1e10
"""The work of finishing several nodes at once, at most, so that the clock is looked at often enough."""

Decide = Callable[[Tensor], bool | None]


@dataclass(frozen=True)
class Branching:
    """How a tree is searched.

    Attributes:
        steps: of the ascent for each node.
        adaptive: how many neurons have adaptive lines while they are open, those first that matter most at the root.
        batch: most nodes that are split at once.
        stalled: a node is finished where all neurons together are to blame for no more than this part of its bound.
        exact: its linear program is solved where finishing leaves less than this part; with 0, of nodes without open
            neurons alone.
        finishing: steps of the ascent with adaptive lines for every neuron.
        candidates: how many nodes of a batch are asked for a counterexample.
        choices: how many neurons a node may be split on; where there are several, the children by each are bounded.
        look: steps of the ascent for these children.
        looked: once so many nodes have been bounded, each is split on the neuron that is most to blame.
    """

    steps: int = 2
    adaptive: int = 32
    batch: int = 512
    stalled: float = 0.5
    exact: float = 0.05
    finishing: int = 30
    candidates: int = 4
    choices: int = 1
    look: int = 4
    looked: float = math.inf


class PhaseTree(Loop[Nodes, Bounded]):
    """The proof, or refutation, that no point of the box makes all of some rows at most zero.

    Args:
        strip: the relaxation; its first row is the objective.
        rows: the objective and the other rows.
        scale: (rows,) what each row is a multiple of a row of the property by.
        reached: whether one of some scaled inputs (points, n) is a counterexample, which ends the search.
        left: tells how many seconds are left.
        options: of the search.
        memory: bytes of open nodes.
        decide: by the splits (m,) of a node that nothing else closes, tells whether none of its points is one; None
            where it does not know. None for nobody who can tell.
        keep: whether to keep what proves each leaf, for a certificate.
    """

    def __init__(
        self,
        strip: Strip,
        rows: Rows,
        scale: Tensor,
        reached: Callable[[Tensor], bool],
        left: Callable[[], float],
        options: Branching,
        memory: float,
        decide: Decide | None = None,
        keep: bool = False,
    ) -> None:
        self._strip, self._rows, self._scale, self._decide = strip, rows, scale, decide
        self._reached, self._left, self._options = reached, left, options
        self._program: Program | None = None
        self._everywhere: DualAscent | None = None
        self._lines, self._proofs = strip, Proofs(strip)
        self._plain = self._proofs
        folded = strip.folded
        self._size = folded.size
        batch = max(16, min(options.batch, _WORKING // (24 * (folded.inputs + folded.size + 1))))
        super().__init__(1, Packed.join, batch, options.choices, memory, options.looked)
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
        if not self._strip.folded.whole:
            found.blame *= torch.where(self._strip.neurons.made, 1.0, _NEW).to(found.blame)
        return found

    def proven(self, nodes: Nodes, found: Bounded) -> Tensor:
        return self._scaled(self._proofs, nodes.split, found.columns, found.w, nodes.mu, found.v)

    def children(self, nodes: Nodes, choice: Tensor) -> Nodes:
        return nodes.split_on(choice, self._strip.curves)

    def enough(self, nodes: Nodes) -> Tensor:
        return torch.zeros(len(nodes))

    def packed(self, nodes: Nodes) -> Packed:
        return nodes.packed()

    def depth(self, nodes: Nodes) -> Tensor:
        return depth(nodes.split, self._strip.folded.smooth)

    def leaves(self, nodes: Nodes, found: Bounded) -> Leaves | None:
        if self._recorded is None:
            return None
        return self._recorded.closed(nodes.split, found.columns, found.w, nodes.mu, found.v)

    def more(self, nodes: Nodes, found: Bounded) -> Tensor:
        is_open, options = torch.ones(len(nodes), dtype=torch.bool), self._options
        worst = found.bound.topk(min(len(nodes), options.candidates), largest=False).indices
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
        """Which of the nodes ``part`` stay open after more steps and, where these have settled, a linear program."""
        if not self._strip.folded.whole:
            # Nothing but splits closes it.
            if bool((blame[part] < 0).all(1).any()):
                self.now.state = State.STUCK
            blame[part] = self._or_gaps(blame[part], nodes.split[part]).to(blame)
            return torch.ones(len(part), dtype=torch.bool)
        if self._everywhere is None:
            self._everywhere = DualAscent(self._strip, torch.ones(self._size, dtype=torch.bool), torch.float64)
        mine, options = nodes[part], self._options
        found = self._everywhere.run(mine, options.finishing)
        self.now.work += self._work(len(mine), options.finishing, self._size)
        is_open = ~self.close(mine, found)
        last = (found.blame < 0).all(1)
        settled = (_total(found.blame) < options.exact * found.bound.abs()) | last
        if self._strip.curves is not None:
            # There are no linear programs of smooth neurons.
            if bool((is_open & last).any()):
                self.now.state = State.STUCK
            settled = torch.zeros_like(settled)
        for number in (is_open & settled).nonzero().squeeze(1).tolist():
            if self._left() <= 0 or self.now.state is not State.OPEN:
                break
            is_open[number] = not self._solved(mine[number : number + 1])
        mine.multipliers *= (mine.split != 0) | self._ascent.adaptive
        nodes.multipliers[part], nodes.mu[part] = mine.multipliers, mine.mu
        blame[part] = self._or_gaps(found.blame, mine.split).to(blame)
        return is_open

    def _or_gaps(self, blame: Tensor, split: Tensor) -> Tensor:
        """What each neuron is to blame for; where no line costs anything, the widest triangle is split."""
        return torch.where(_total(blame)[:, None] > 0, blame, self._strip.gaps(split).to(blame))

    def _solved(self, node: Nodes) -> bool:
        """Whether the linear program of one node proves it; it may also refute the tree, or be the end of the road."""
        split = node.split[0]
        last = bool((split != 0).all())
        # A node that can be split further is not worth all the time.
        seconds = self._left() * (1 if last else _PATIENCE)
        if self._program is None:
            # Its solver is imported only where a node gets this far.
            from verifiable_relu.verifiers.bab.program import Program

            self._lines = plain = self._strip.without_planes(self._rows)
            self._program, self._plain = Program(plain.folded, self._rows), Proofs(plain)
        self.now.work += _PROGRAM
        hint = self._program.solve(split, self._lines.slopes, seconds)
        every = torch.arange(self._size)
        margins = self._scaled(self._plain, split.expand(len(hint.w), -1), every, hint.w, hint.mu)
        if len(margins) and float(margins.amax()) > 0:
            one, leaves = margins.argmax()[None], None
            if self._recorded is not None:
                leaves = self._recorded.closed_by_lines(node.split, hint.w[one], hint.mu[one], self._lines)
            self.note(node, margins[one], leaves)
            return True
        points = [hint.point]
        if len(self._scale) > 1:
            # Where the objective is least, the other rows are zero at best: a point between them is further inside.
            points.append(self._program.deepest(split, seconds))
        if any(point is not None and self._reached(point) for point in points):
            self.now.state = State.REACHED
        elif self._left() > 0:
            match self._decide(split) if self._decide is not None else None:
                case True:
                    # Nothing but the sign of the margin is known.
                    self.note(node, torch.full((1,), TINY, dtype=torch.float64), None)
                    return True
                case False:
                    self.now.state = State.REACHED
                case None if last:
                    self.now.state = State.STUCK
        return False

    def _work(self, nodes: int, steps: int, rows: int) -> float:
        """The work of so many steps with so many rows of the system, for so many nodes."""
        return 2.0 * nodes * (steps + 1) * (rows + _OTHER) * (self._strip.folded.inputs + self._size)

    def _scaled(
        self, proofs: Proofs, split: Tensor, columns: Tensor, w: Tensor, mu: Tensor, v: Tensor | None = None
    ) -> Tensor:
        """Proven lower bounds of the largest of the property's rows over nodes; the arguments are ``Proofs.lower``'s.

        Where the objective plus Σ μ_i·row_i is at least b, the largest of the property's rows, of which they are
        multiples, is at least b / (scale_0 + Σ μ_i·scale_i).
        """
        lower = proofs.lower(split, columns, w, mu, v=v)
        parts = self._scale[0] + mu.double().clamp(min=0) @ self._scale[1:]
        return mean_below(lower, parts, len(self._scale))


def _total(blame: Tensor) -> Tensor:
    """How much the bound of each node is below the network's value where the relaxation is least, at most.

    At the best multipliers, that is: a point with a negative value is then a counterexample.
    """
    return blame.clamp(min=0).sum(1)
