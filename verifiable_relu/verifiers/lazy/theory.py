"""What phases mean: the sub-problems under an assignment are bounded, and what is proven comes back as clauses.

The theory keeps a tree of sub-problems, of which z3 follows one path at a time: a decision of z3's is the split of the
path's last node. Each time that z3 asks, the open sub-problem that its assignment leads to is bounded with all phases
that z3 has implied, and together with it the newest of the others are split and bounded, since a batch costs little
more than one. A sub-problem that is proved becomes a clause: not all of these phases at once. It is shortened
(``shorten``), so that it rules out more than it was learned from, and implies phases elsewhere.

Where no line of a relaxation costs anything, or every phase is decided, the linear program of the sub-problem is
solved; it has multipliers for a proof, or a point at which the network is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.errors import CallFailed
from verifiable_relu.verifiers.bab.ascent import Ascent, Batch, Bounded
from verifiable_relu.verifiers.bab.folded import Rows
from verifiable_relu.verifiers.bab.leaf import Hint, Program
from verifiable_relu.verifiers.bab.proof import Proofs
from verifiable_relu.verifiers.bab.strip import Strip
from verifiable_relu.verifiers.base import Reason
from verifiable_relu.verifiers.lazy.shorten import Shortening
from verifiable_relu.verifiers.solvers.phases import Advice, Clause

_TOGETHER = 32
"""Sub-problems that are finished at once, so that the clock is looked at often enough."""

_PATIENCE = 0.05
"""The part of the time that is left which the linear program of a sub-problem that can still be split may take."""


@dataclass(frozen=True)
class Bounding:
    """How sub-problems are bounded.

    Attributes:
        steps: of the ascent for each.
        adaptive: how many neurons have adaptive lines while they are open, those first that matter most at the root.
        batch: most sub-problems that are split at once.
        stalled: a sub-problem is finished where all neurons together are to blame for no more than this part of its
            bound.
        exact: its linear program is solved where finishing leaves no more than this part.
        finishing: steps of the ascent with adaptive lines for every neuron.
        candidates: how many sub-problems of a batch are asked for a counterexample.
    """

    steps: int = 2
    adaptive: int = 64
    batch: int = 128
    stalled: float = 0.5
    exact: float = 0.05
    finishing: int = 30
    candidates: int = 4


@dataclass
class Counts:
    """What a search has cost.

    Attributes:
        consulted: how often z3 has asked.
        bounded: sub-problems bounded.
        programs: linear programs solved.
        exactly: sub-problems decided in exact arithmetic, by z3.
        decisions: of z3.
        conflicts: of z3.
        clauses: proven.
        literals: in all of them.
    """

    consulted: int = 0
    bounded: int = 0
    programs: int = 0
    exactly: int = 0
    decisions: int = 0
    conflicts: int = 0
    clauses: int = 0
    literals: int = 0

    @staticmethod
    def sum(parts: Sequence[Counts]) -> Counts:
        """Those of several searches together."""
        return Counts(*(sum(getattr(part, f.name) for part in parts) for f in fields(Counts)))

    def __str__(self) -> str:
        length = self.literals / max(1, self.clauses)
        return (
            f"{self.decisions} decisions, {self.conflicts} conflicts, {self.bounded} sub-problems, "
            f"{self.programs} linear programs, {self.clauses} clauses of {length:.1f} literals on average"
        )


@dataclass(eq=False)
class _Node:
    """A sub-problem.

    Attributes:
        parent: None at the root.
        literal: the decision that leads here from the parent.
        split: (m,) int8, its phases: +1 active, −1 inactive, 0 open.
        multipliers: (m,) of the ascent.
        mu: (rows − 1,) likewise.
        neuron: to split it on.
        children: by the phase of that neuron, once it has been split.
        clause: that rules it out, once it is closed.
    """

    parent: _Node | None
    literal: int
    split: Tensor
    multipliers: Tensor
    mu: Tensor
    neuron: int = -1
    children: dict[int, _Node] = field(default_factory=dict)
    clause: frozenset[int] | None = None


Exactly = Callable[[Tensor], "bool | None"]
"""Decides a sub-problem, given by the phases (m,) of every neuron, exactly: True if it holds no unsafe point."""


class Theory:
    """What z3 consults about phases: whether no point of the box makes all of some rows at most zero under them.

    Args:
        strip: the relaxation; its first row is the objective.
        rows: the objective and the other rows.
        reached: given scaled inputs (points, n), tells whether one of them is a counterexample.
        exactly: asked where float64 does not decide.
        left: tells how many seconds are left.
        bounding: the options.
        memory: bytes that open sub-problems may take.

    Attributes:
        proven: the clauses that were proved, shortened; what z3 learns from them is not among them.
        counts: what it has cost.
        reached: whether a counterexample was found.
        ended: why the search was ended with nothing decided; None if it was not.
    """

    def __init__(
        self,
        strip: Strip,
        rows: Rows,
        reached: Callable[[Tensor], bool],
        exactly: Exactly,
        left: Callable[[], float],
        bounding: Bounding,
        memory: int,
    ) -> None:
        self._strip, self._rows = strip, rows
        self._try, self._exactly, self._left, self._bounding, self._memory = reached, exactly, left, bounding, memory
        self._size, self._others = strip.folded.size, len(rows.constant) - 1
        self._proofs = Proofs(strip)
        self._program: Program | None = None
        self.proven: list[Clause] = []
        self.counts = Counts()
        self.reached = False
        self.ended: Reason | None = None
        none = torch.zeros(self._size, dtype=torch.bool)
        weight = Ascent(strip, none, torch.float64).run(self._start(), 0).coefficients[0]
        matter = weight.topk(min(self._size, bounding.adaptive)).indices
        self._ascent = Ascent(strip, none.index_fill(0, matter, True), torch.float32)
        self._everywhere = Ascent(strip, ~none, torch.float64)
        self._shortening = Shortening(strip, self._proofs)
        folded = strip.folded
        self._gap = folded.gap
        root = self._start()
        self._ascent.run(root, bounding.finishing)
        self._root = _Node(None, 0, root.split[0], root.multipliers[0], root.mu[0])
        self._open: dict[_Node, None] = {}
        self._new: list[Clause] = []

    def _start(self) -> Batch:
        return Batch.roots(self._size, self._others)

    def consult(self, phases: bytes) -> Advice:
        """What is known about an assignment of phases, an int8 for each neuron, after some work on it."""
        self.counts.consulted += 1
        assigned = torch.from_numpy(np.frombuffer(phases, np.int8).copy())
        node = self._follow(assigned)
        self._new = []
        if node.clause is not None:
            clause = tuple(node.clause)
            if not any(int(assigned[abs(literal) - 1]) * literal >= 0 for literal in clause):
                # z3 may have forgotten it.
                return Advice((clause,))
            # The clause was proved under phases that were implied when it was, and are not now.
            node.clause = None
            node.split = assigned.clone()
            self._bound([node])
        more = torch.where(node.split == 0, assigned, node.split)
        if not node.children and (node.neuron < 0 or bool((more != node.split).any())):
            node.split = more
            self._bound([node])
        self._look_at_clock()
        if not node.children and node.clause is None and not self.over:
            # A decision of z3's is that of a split, so that the phases beyond it are implied.
            self._open.pop(node, None)
            self._bound(self._split([node, *self._newest()]))
            self._look_at_clock()
        if self.over:
            return Advice(over=True)
        return Advice(tuple(dict.fromkeys(self._new)), self._next(node, assigned))

    def _look_at_clock(self) -> None:
        """End the search if no time is left: a sub-problem may then be open and yet have no neuron to split."""
        if self._left() <= 0:
            self.ended = self.ended or Reason.TIMEOUT

    @property
    def over(self) -> bool:
        """Whether there is nothing more to be asked."""
        return self.reached or self.ended is not None

    @property
    def refuted(self) -> bool:
        """Whether resolution of the clauses along the tree has left the empty clause: no phases satisfy them."""
        return self._root.clause == frozenset()

    def _follow(self, assigned: Tensor) -> _Node:
        """The sub-problem that an assignment leads to: one that is not split, or whose split is not decided yet."""
        node = self._root
        while node.children and int(assigned[node.neuron]):
            node = node.children[int(assigned[node.neuron])]
        return node

    def _next(self, node: _Node, assigned: Tensor) -> int:
        """The literal to decide on at a sub-problem, 0 if it is closed."""
        if node.clause is not None or node.neuron < 0 or int(assigned[node.neuron]):
            return 0
        return node.neuron + 1

    def _newest(self) -> list[_Node]:
        """Open sub-problems, the newest ones, for a batch."""
        chosen: list[_Node] = []
        while self._open and len(chosen) < self._bounding.batch:
            node, _ = self._open.popitem()
            if not self._closed(node):
                chosen.append(node)
        return chosen

    def _closed(self, node: _Node | None) -> bool:
        while node is not None and node.clause is None:
            node = node.parent
        return node is not None

    def _split(self, nodes: list[_Node]) -> list[_Node]:
        """The children of open sub-problems."""
        made: list[_Node] = []
        for node in nodes:
            for sign in (1, -1):
                split, multipliers = node.split.clone(), node.multipliers.clone()
                split[node.neuron], multipliers[node.neuron] = sign, 0
                child = _Node(node, sign * (node.neuron + 1), split, multipliers, node.mu)
                node.children[sign] = child
                made.append(child)
        return made

    def _bound(self, nodes: list[_Node]) -> None:
        """Bound sub-problems; those that are proved are closed."""
        split, multipliers, mu = (
            torch.stack([getattr(n, name) for n in nodes]) for name in ("split", "multipliers", "mu")
        )
        batch = Batch(split, multipliers, mu, torch.zeros(len(nodes), dtype=torch.long))
        batch.multipliers *= (batch.split != 0) | self._ascent.adaptive
        found = self._ascent.run(batch, self._bounding.steps)
        self.counts.bounded += len(nodes)
        is_open = ~self._prove(nodes, batch, found, torch.arange(len(nodes)))
        rest = is_open.nonzero().squeeze(1)
        if not len(rest):
            return
        worst = rest[found.bound[rest].topk(min(len(rest), self._bounding.candidates), largest=False).indices]
        if self._try(self._ascent.minimisers(batch[worst])):
            self.reached = True
            return
        blame, decided = found.blame, (batch.split != 0).all(1)
        stalled = is_open & ((_total(blame) <= self._bounding.stalled * found.bound.abs()) | decided)
        for part in stalled.nonzero().squeeze(1).split(_TOGETHER):
            if self._left() > 0 and not self.reached:
                self._finish(nodes, batch, blame, part)
        # Where no line costs anything, the widest triangle is split.
        none = (_total(blame) <= 0)[:, None]
        score = torch.where(none, torch.where(batch.split == 0, self._gap, -1.0).to(blame), blame)
        for number in (is_open & ~decided).nonzero().squeeze(1).tolist():
            node = nodes[number]
            if node.clause is None:
                node.multipliers, node.mu = batch.multipliers[number].clone(), batch.mu[number].clone()
                node.neuron = int(score[number].argmax())
                self._open[node] = None
        if len(self._open) * (5 * self._size + 4 * self._others + 400) > self._memory:
            self.ended = Reason.MEMORY

    def _finish(self, nodes: list[_Node], batch: Batch, blame: Tensor, part: Tensor) -> None:
        """More steps for the sub-problems ``part`` and, where these have settled, a linear program."""
        mine = batch[part]
        found = self._everywhere.run(mine, self._bounding.finishing)
        is_open = ~self._prove(nodes, mine, found, part)
        decided = (mine.split != 0).all(1)
        settled = (_total(found.blame) <= self._bounding.exact * found.bound.abs()) | decided
        for number in (is_open & settled).nonzero().squeeze(1).tolist():
            if self._left() <= 0 or self.reached:
                break
            self._solve(nodes[int(part[number])])
        mine.multipliers *= (mine.split != 0) | self._ascent.adaptive
        batch.multipliers[part], batch.mu[part] = mine.multipliers, mine.mu
        blame[part] = found.blame.to(blame)

    def _solve(self, node: _Node) -> None:
        """Close a sub-problem by its linear program, or find a counterexample; if every phase is decided, exactly."""
        last = bool((node.split != 0).all())
        seconds = self._left() * (1 if last else _PATIENCE)
        self._program = self._program or Program(self._strip, self._rows)
        self.counts.programs += 1
        points: list[Tensor | None] = []
        # What its solver does not take or solve is a hint less.
        with suppress(CallFailed):
            hint = self._program.solve(node.split, seconds)
            if self._hinted(node, hint):
                return
            points.append(hint.point)
            if self._others:
                # Where the objective is least, the other rows are zero at best: a point between them is further inside.
                points.append(self._program.deepest(node.split, seconds))
        if any(point is not None and self._try(point) for point in points):
            self.reached = True
        elif last and self._left() > 0:
            self.counts.exactly += 1
            match self._exactly(node.split):
                case True:
                    self._close(node, node.split)
                case False:
                    self.reached = True
                case None:
                    self.ended = Reason.INCOMPLETE if self._left() > 0 else Reason.TIMEOUT

    def _hinted(self, node: _Node, hint: Hint) -> bool:
        """Whether the multipliers of a linear program prove a sub-problem, which is closed then."""
        columns, split = torch.arange(self._size), node.split.expand(len(hint.w), -1)
        lower = self._proofs.lower(split, columns, hint.w, hint.mu)
        if not bool((lower > 0).any()):
            return False
        best = torch.where(lower.isnan(), -torch.inf, lower).argmax()[None]
        short = self._shortening.shorten(split[best], columns, hint.w[best], hint.mu[best], lower[best])
        self._close(node, short[0])
        return True

    def _prove(self, nodes: list[_Node], batch: Batch, found: Bounded, which: Tensor) -> Tensor:
        """Close the sub-problems that the multipliers prove; ``which`` of the nodes are the batch's. Returns them."""
        proved = ~(found.bound <= 0)
        likely = proved.nonzero().squeeze(1)
        if len(likely):
            chosen, multipliers = batch[likely], found[likely]
            lower = self._proofs.lower(chosen.split, found.columns, multipliers.w, chosen.mu)
            proved[likely] = lower > 0
            sure = (lower > 0).nonzero().squeeze(1)
            if len(sure):
                mine, w = chosen[sure], multipliers.w[sure]
                short = self._shortening.shorten(mine.split, found.columns, w, mine.mu, lower[sure])
                for number, split in zip(which[likely[sure]].tolist(), short, strict=True):
                    self._close(nodes[number], split)
        return proved

    def _close(self, node: _Node, split: Tensor) -> None:
        """A sub-problem is ruled out by some of its phases, and with it those above that have nothing else open."""
        at = split.nonzero().squeeze(1)
        clause = frozenset((-(at + 1) * split[at]).tolist())
        self.proven.append(tuple(clause))
        self.counts.clauses += 1
        self.counts.literals += len(clause)
        self._new.append(tuple(clause))
        node.clause = clause
        resolved = False
        while node.parent is not None and node.parent.clause is None:
            parent, literal = node.parent, node.literal
            if -literal in clause:
                other = parent.children[-1 if literal > 0 else 1].clause
                if other is None:
                    break
                clause = (clause - {-literal}) | (other - {literal}) if literal in other else other
            parent.clause, node = clause, parent
            parent.children = {}
            resolved = True
        if resolved:
            self._new.append(tuple(clause))


def _total(blame: Tensor) -> Tensor:
    """How far the bound of each sub-problem is below the least value, at most, where its multipliers are the best."""
    return blame.clamp(min=0).sum(1)
