"""Branch and bound over the phases of unstable neurons, on one relaxation that all nodes share.

A node is closed by a proof alone (``proof``). A node that stays open is split on the neuron whose line over the
activation costs its own bound most; where no line costs much, more steps are taken with adaptive lines for every
neuron, and then the node's linear program is solved. Points at which relaxations are least are tried as
counterexamples all along.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verifiable_relu.rounding import TINY, mean_below
from verifiable_relu.trust.certificate import Tree as Certified
from verifiable_relu.verifiers.bab.ascent import Ascent, Batch, Bounded, depth
from verifiable_relu.verifiers.bab.folded import Rows
from verifiable_relu.verifiers.bab.proof import Proofs
from verifiable_relu.verifiers.bab.recorded import Leaves, Recorded
from verifiable_relu.verifiers.bab.strip import Strip

if TYPE_CHECKING:
    from verifiable_relu.verifiers.bab.program import Program


@dataclass(eq=False)
class _Chunk:
    """Open nodes with their bounds, each with the neurons that it may be split on, the likeliest first.

    Columns without splits or multipliers are left out.
    """

    columns: Tensor
    split: Tensor
    multipliers: Tensor
    mu: Tensor
    bound: Tensor
    neurons: Tensor

    def __getitem__(self, chosen: slice | Tensor) -> _Chunk:
        rest = (t[chosen] for t in (self.split, self.multipliers, self.mu, self.bound, self.neurons))
        return _Chunk(self.columns, *rest)

    def batch(self, size: int) -> Batch:
        """The nodes with all their ``size`` columns."""
        split = torch.zeros(len(self), size, dtype=torch.int8)
        multipliers = torch.zeros(len(self), size)
        split[:, self.columns], multipliers[:, self.columns] = self.split, self.multipliers
        return Batch(split, multipliers, self.mu, torch.zeros(len(self.mu), dtype=torch.long))

    def __len__(self) -> int:
        return len(self.bound)

    @property
    def bytes(self) -> int:
        return len(self) * (5 * len(self.columns) + 4 * self.mu.shape[1] + 4 + 8 * self.neurons.shape[1])


class Frontier:
    """The open nodes of a tree over so many neurons; what came last is split first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._chunks: list[_Chunk] = []

    def __len__(self) -> int:
        return sum(len(chunk) for chunk in self._chunks)

    @property
    def bytes(self) -> int:
        """What the nodes take."""
        return sum(chunk.bytes for chunk in self._chunks)

    def push(self, batch: Batch, bound: Tensor, neurons: Tensor) -> None:
        """Keep nodes.

        Args:
            batch: at least one node.
            bound: (nodes,).
            neurons: (nodes, choices) that each may be split on, the likeliest first, −1 for none.
        """
        columns = ((batch.split != 0) | (batch.multipliers != 0)).any(0).nonzero().squeeze(1)
        split, multipliers = batch.split[:, columns], batch.multipliers[:, columns]
        self._chunks.append(_Chunk(columns, split, multipliers, batch.mu, bound.float(), neurons))

    def pop(self, count: int) -> tuple[Batch, Tensor, Tensor]:
        """The last nodes, so many at most and at least one, as ``push`` took them."""
        chosen: list[_Chunk] = []
        while self._chunks and count:
            chunk = self._chunks.pop()
            if len(chunk) > count:
                self._chunks.append(chunk[:-count])
                chunk = chunk[-count:]
            chosen.append(chunk)
            count -= len(chunk)
        nodes = Batch.cat([chunk.batch(self._size) for chunk in chosen])
        return nodes, torch.cat([chunk.bound for chunk in chosen]), torch.cat([chunk.neurons for chunk in chosen])

    def batches(self, size: int) -> Iterator[Batch]:
        """All nodes, so many at a time at most."""
        return (batch for chunk in self._chunks for batch in chunk.batch(self._size).parts(size))

    def dealt(self, hands: int) -> list[Frontier]:
        """The nodes dealt out one by one, early and late ones to every hand; none stay here."""
        dealt = [Frontier(self._size) for _ in range(hands)]
        begin = 0
        for chunk in self._chunks:
            for number, hand in enumerate(dealt):
                # A copy: views of views would have strides without bounds, and be sent with all that they are views of.
                mine = torch.arange(len(chunk))[(number - begin) % hands :: hands]
                if len(mine):
                    hand._chunks.append(chunk[mine])
            begin += len(chunk)
        self._chunks = []
        return dealt

    def take(self, other: Frontier) -> None:
        """Put all nodes of another frontier, which is not used any more, behind those that are here."""
        self._chunks += other._chunks


class State(Enum):
    """What is known of a tree."""

    OPEN = auto()
    PROVED = auto()
    REACHED = auto()
    STUCK = auto()
    FULL = auto()


@dataclass
class Progress:
    """What has become of some nodes of a tree, and of what these were split into.

    Attributes:
        open: the nodes that are open.
        state: what is known of them all.
        nodes, work, lower, closed: as ``Tree`` has them.
        leaves: the nodes that are closed, where they are recorded.
    """

    open: Frontier
    state: State = State.OPEN
    nodes: int = 0
    work: float = 0.0
    lower: float = math.inf
    closed: float = 0.0
    leaves: list[Leaves] = field(default_factory=list)

    def add(self, other: Progress) -> None:
        """Take what has become of other nodes of the same tree, which are then a part of these."""
        self.open.take(other.open)
        states = {self.state, other.state}
        ended = [state for state in (State.REACHED, State.STUCK, State.FULL) if state in states]
        self.state = ended[0] if ended else State.OPEN if len(self.open) else State.PROVED
        self.nodes, self.work = self.nodes + other.nodes, self.work + other.work
        self.lower, self.closed = min(self.lower, other.lower), min(1.0, self.closed + other.closed)
        self.leaves += other.leaves


_WORKING = 1 << 27
"""Bytes of coefficients of the nodes that are bounded at once."""

_PATIENCE = 0.05
"""The part of the time that is left which the linear program of a node may take."""

_OTHER = 150
"""As much work as so many rows of the system is what else is done for a node."""

_OTHER_CHILD = 0.1
"""What the gain of the worse child counts where neurons to split on are compared."""

_PROGRAM = 3e9
"""The work of a linear program."""

Decide = Callable[[Tensor], bool | None]

_MOST = 32
"""Nodes that are finished at once, at most."""

_TOGETHER = 1e10
"""The work of finishing several nodes at once, at most, so that the clock is looked at often enough."""


@dataclass(frozen=True)
class Search:
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
        record: whether to keep what proves each leaf, for a certificate.
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
    record: bool = field(default=False, repr=False)


class Tree:
    """The proof, or refutation, that no point of the box makes all of some rows at most zero.

    Args:
        strip: the relaxation; its first row is the objective.
        rows: the objective and the other rows.
        scale: (rows,) what each row is a multiple of a row of the property by.
        reached: given scaled inputs (points, n), tells whether one of them is a counterexample.
        left: tells how many seconds are left.
        search: the options.
        memory: bytes that open nodes may take.
        decide: told the splits (m,) of a node that nothing else closes, tells whether none of its points is one; None
            where it does not know. None for nobody who can tell.

    Attributes:
        state: what is known.
        nodes: how many nodes have been bounded.
        work: about how many multiplications, or what takes as long, that took.
        lower: a proven lower bound, on the nodes that are closed, of the largest of the property's rows.
        closed: the part of the tree that is closed, a node with d splits counted as 2⁻ᵈ.
    """

    def __init__(
        self,
        strip: Strip,
        rows: Rows,
        scale: Tensor,
        reached: Callable[[Tensor], bool],
        left: Callable[[], float],
        search: Search,
        memory: int,
        decide: Decide | None = None,
    ) -> None:
        self._strip, self._rows, self._scale, self._decide = strip, rows, scale, decide
        self._reached, self._left, self._search, self._memory = reached, left, search, memory
        self._program: Program | None = None
        self._everywhere: Ascent | None = None
        self._lines, self._proofs = strip, Proofs(strip)
        self._plain = self._proofs
        folded = strip.folded
        self._size = folded.size
        self._batch = max(16, min(search.batch, _WORKING // (24 * (folded.inputs + folded.size + 1))))
        self._now = Progress(Frontier(folded.size))
        self._before = self._now
        none = torch.zeros(self._size, dtype=torch.bool)
        root = Batch.roots(self._size, len(scale) - 1)
        # A line below the activation is better for being adaptive where the coefficient is positive.
        strip.prefer()
        weight = Ascent(strip, none, torch.float32).run(root, 0).coefficients[0].double()
        weight = torch.where(folded.smooth | strip.over, weight.abs(), weight)
        matter = weight.topk(min(self._size, search.adaptive)).indices
        self._ascent = Ascent(strip, none.index_fill(0, matter, True), torch.float32)
        self._recorded = Recorded(strip, self._proofs, self._ascent.adaptive) if search.record else None
        root = Batch.roots(self._size, len(scale) - 1)
        self._at_root = float(self._margins(root, self._ascent.run(root, search.finishing))[0])
        self._bound(root)

    @property
    def state(self) -> State:
        return self._now.state

    @property
    def nodes(self) -> int:
        return self._now.nodes

    @property
    def work(self) -> float:
        return self._now.work

    @property
    def lower(self) -> float:
        return self._now.lower

    @property
    def closed(self) -> float:
        return self._now.closed

    @property
    def waiting(self) -> int:
        """How many nodes are open."""
        return len(self._now.open)

    def advance(self) -> None:
        """Split the open nodes that are next, and bound what they are split into."""
        self._bound(self._children())

    def bound(self, stop: Callable[[], bool]) -> float:
        """``lower`` for closed and open nodes together; that of the root once ``stop`` says that there is no time."""
        lower = self.lower
        for batch in self._now.open.batches(self._batch):
            if stop():
                return self._at_root
            found = self._ascent.run(batch, 0)
            lower = min(lower, float(self._margins(batch, found).min()))
        return max(lower, self._at_root)

    def certified(self, activations: Sequence[int]) -> Certified | None:
        """The tree as it is written, once it is proved, of a network whose activations are these nodes."""
        return None if self._recorded is None else self._recorded.tree(self._now.leaves, activations)

    def deal(self, hands: int) -> list[Frontier]:
        """The open nodes in so many parts, each of which ``begin`` takes, here or in a copy of this process."""
        return self._now.open.dealt(hands)

    def begin(self, part: Frontier) -> None:
        """Go on with a part of the open nodes alone, until ``end``."""
        self._before, self._now = self._now, Progress(part)

    def end(self) -> Progress:
        """What has become of the part; the tree is as it was before ``begin``."""
        ended, self._now = self._now, self._before
        return ended

    def take(self, progress: Progress) -> None:
        """Take what has become of a part of the nodes."""
        self._now.add(progress)

    def _children(self) -> Batch:
        """The last open nodes, split on their neurons."""
        return self._split(*self._now.open.pop(self._batch))

    def _split(self, nodes: Batch, bound: Tensor, neurons: Tensor) -> Batch:
        """The children of nodes with these bounds by the best of some neurons, (nodes, choices), −1 for none."""
        if neurons.shape[1] == 1:
            return nodes.split_on(neurons[:, 0], self._strip.curves)
        best = torch.full((len(nodes),), -torch.inf)
        split, multipliers, mu = (torch.cat([t, t]) for t in (nodes.split, nodes.multipliers, nodes.mu))
        for neuron in neurons.T:
            children = nodes.split_on(neuron.clamp(min=0), self._strip.curves)
            found = self._ascent.run(children, self._search.look)
            self._count(len(children), self._search.look, len(found.columns))
            gained = gain(found.bound.reshape(2, -1), bound).to(best).masked_fill_(neuron < 0, -torch.inf)
            better = (gained > best).repeat(2)
            best = torch.maximum(best, gained)
            split[better], mu[better] = children.split[better], children.mu[better]
            multipliers[better] = children.multipliers[better]
        return Batch(split, multipliers, mu, torch.zeros(len(split), dtype=torch.long))

    def _bound(self, batch: Batch) -> None:
        """Bound nodes, close those that are proved, and put the others where they are split later."""
        found = self._ascent.run(batch, self._search.steps)
        self._now.nodes += len(batch)
        self._count(len(batch), self._search.steps, len(found.columns))
        rest = (~self.prove(batch, found)).nonzero().squeeze(1)
        batch, blame, bound = batch[rest], found.blame[rest], found.bound[rest]
        if len(batch):
            worst = bound.topk(min(len(bound), self._search.candidates), largest=False).indices
            if self._reached(self._ascent.minimisers(batch[worst])):
                self._now.state = State.REACHED
                return
            stalled = _total(blame) <= self._search.stalled * bound.abs()
            stalled |= (blame < 0).all(1)
            is_open = torch.ones(len(batch), dtype=torch.bool)
            one = max(1.0, self._work(1, self._search.finishing, self._size))
            for part in stalled.nonzero().squeeze(1).split(max(1, min(_MOST, int(_TOGETHER / one)))):
                if self._left() > 0 and self.state is State.OPEN:
                    is_open[part] = self._finish(batch, blame, part)
            self.push(batch[is_open], blame[is_open], bound[is_open])
        if self.state is State.OPEN and not self.waiting:
            self._now.state = State.PROVED

    def _finish(self, batch: Batch, blame: Tensor, part: Tensor) -> Tensor:
        """Which of the nodes ``part`` stay open after more steps and, where these have settled, a linear program."""
        if self._everywhere is None:
            self._everywhere = Ascent(self._strip, torch.ones(self._size, dtype=torch.bool), torch.float64)
        mine = batch[part]
        found = self._everywhere.run(mine, self._search.finishing)
        self._count(len(mine), self._search.finishing, self._size)
        is_open = ~self.prove(mine, found)
        last = (found.blame < 0).all(1)
        settled = (_total(found.blame) < self._search.exact * found.bound.abs()) | last
        if self._strip.curves is not None:
            # There are no linear programs of smooth neurons.
            if bool((is_open & last).any()):
                self._now.state = State.STUCK
            settled = torch.zeros_like(settled)
        for number in (is_open & settled).nonzero().squeeze(1).tolist():
            if self._left() <= 0 or self.state is not State.OPEN:
                break
            is_open[number] = not self._solved(mine.split[number])
        mine.multipliers *= (mine.split != 0) | self._ascent.adaptive
        batch.multipliers[part], batch.mu[part] = mine.multipliers, mine.mu
        # Where no line costs anything, the widest triangle is split.
        none = (_total(found.blame) <= 0)[:, None]
        blame[part] = torch.where(none, self._strip.gaps(mine.split), found.blame).to(blame)
        return is_open

    def _solved(self, split: Tensor) -> bool:
        """Whether the linear program of one node proves it; it may also refute the tree, or be the end of the road."""
        last = bool((split != 0).all())
        # A node that can be split further is not worth all the time.
        seconds = self._left() * (1 if last else _PATIENCE)
        if self._program is None:
            # Its solver is imported only where a node gets this far.
            from verifiable_relu.verifiers.bab.program import Program

            self._lines = plain = self._strip.without_planes(self._rows)
            self._program, self._plain = Program(plain.folded, self._rows), Proofs(plain)
        self._now.work += _PROGRAM
        hint = self._program.solve(split, self._lines.slopes, seconds)
        every = torch.arange(self._size)
        margins = self._proven(self._plain, split.expand(len(hint.w), -1), every, hint.w, hint.mu)
        best = float(margins.amax()) if len(margins) else -torch.inf
        if best > 0:
            self._close(split[None], best)
            if self._recorded is not None:
                one = margins.argmax()[None]
                leaf = self._recorded.closed_by_lines(split[None], hint.w[one], hint.mu[one], self._lines)
                self._now.leaves.append(leaf)
            return True
        points = [hint.point]
        if len(self._scale) > 1:
            # Where the objective is least, the other rows are zero at best: a point between them is further inside.
            points.append(self._program.deepest(split, seconds))
        if any(point is not None and self._reached(point) for point in points):
            self._now.state = State.REACHED
        elif self._left() > 0:
            match self._decide(split) if self._decide is not None else None:
                case True:
                    # Nothing but the sign of the margin is known.
                    self._close(split[None], TINY)
                    return True
                case False:
                    self._now.state = State.REACHED
                case None if last:
                    self._now.state = State.STUCK
        return False

    def _count(self, nodes: int, steps: int, rows: int) -> None:
        """Take note of the work of so many steps with so many rows of the system."""
        self._now.work += self._work(nodes, steps, rows)

    def _work(self, nodes: int, steps: int, rows: int) -> float:
        """The work of so many steps with so many rows of the system, for so many nodes."""
        return 2.0 * nodes * (steps + 1) * (rows + _OTHER) * (self._strip.folded.inputs + self._size)

    def prove(self, batch: Batch, found: Bounded) -> Tensor:
        """Which nodes the multipliers that were found prove."""
        proved = ~(found.bound <= 0)
        likely = proved.nonzero().squeeze(1)
        if len(likely):
            margins = self._margins(batch[likely], found[likely])
            closed = margins > 0
            proved[likely] = closed
            if bool(closed.any()):
                self._close(batch.split[likely[closed]], float(margins[closed].min()))
                if self._recorded is not None:
                    done = likely[closed]
                    mine = found[done]
                    leaves = self._recorded.closed(batch.split[done], mine.columns, mine.w, batch.mu[done], mine.v)
                    self._now.leaves.append(leaves)
        return proved

    def _close(self, split: Tensor, lower: float) -> None:
        """Take note of nodes (nodes, m) that are closed, with this bound."""
        self._now.lower = min(self.lower, lower)
        self._now.closed = min(1.0, self.closed + float((-depth(split, self._strip.folded.smooth)).exp2().sum()))

    def _margins(self, batch: Batch, found: Bounded) -> Tensor:
        """What the multipliers that were found prove."""
        return self._proven(self._proofs, batch.split, found.columns, found.w, batch.mu, found.v)

    def _proven(
        self, proofs: Proofs, split: Tensor, columns: Tensor, w: Tensor, mu: Tensor, v: Tensor | None = None
    ) -> Tensor:
        """Proven lower bounds of the largest of the property's rows over nodes; the arguments are ``Proofs.lower``'s.

        Where the objective plus Σ μ_i·row_i is at least b, the largest of the property's rows, of which they are
        multiples, is at least b / (scale_0 + Σ μ_i·scale_i).
        """
        lower = proofs.lower(split, columns, w, mu, v=v)
        parts = self._scale[0] + mu.double().clamp(min=0) @ self._scale[1:]
        return mean_below(lower, parts, len(self._scale))

    def push(self, batch: Batch, blame: Tensor, bound: Tensor) -> None:
        """Keep open nodes."""
        if not len(batch):
            return
        neurons = torch.zeros(len(batch), 1, dtype=torch.long)
        if self._size:
            likely, neurons = blame.topk(min(self._search.choices, self._size), 1)
            # The first is split on though nothing may be to blame.
            neurons[:, 1:].masked_fill_(likely[:, 1:] <= 0, -1)
        self._now.open.push(batch, bound, neurons)
        if self._now.open.bytes > self._memory and self.state is State.OPEN:
            self._now.state = State.FULL


def gain(children: Tensor, parent: Tensor) -> Tensor:
    """How good splits are, (nodes,), by the bounds of both children (2, nodes) and of the parents (nodes,).

    What counts is the part of the way to zero that the better child goes: a tree with one child closed at every node is
    a path, one whose children all gain a little has exponentially many nodes. The other child decides among equals.
    """
    # Of a parent at zero, or without a bound, no part is known: every split of it is as good as another.
    part = ((children - parent) / parent.abs()).nan_to_num(0.0).clamp(0, 1)
    return part.amax(0) + _OTHER_CHILD * part.amin(0)


def _total(blame: Tensor) -> Tensor:
    """How much the bound of each node is below the network's value where the relaxation is least, at most.

    At the best multipliers, that is: a point with a negative value is then a counterexample.
    """
    return blame.clamp(min=0).sum(1)
