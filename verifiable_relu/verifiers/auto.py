"""``auto``: cheap bounds for all queries, the attack on what is left, then complete methods within the budget.

Every query is bounded by CROWN. What it is like then decides which of ``STAGES`` take it, in their order: how many
inputs vary, which activations the network has, and how many neurons CROWN leaves unstable. What these leave open goes
to ``TURNS``, round after round with growing shares, as long as there is time and a method that may gain something.

A counterexample that does not stand up to exact evaluation and replay does not end a query here: the next method
takes over, and only if none decides is the query unknown (unconfirmed).
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from verifiable_relu.bounds import Ascent, crown_relaxation, input_box
from verifiable_relu.bounds.zonotope import NARROW
from verifiable_relu.rounding import varies
from verifiable_relu.spec.property import Query
from verifiable_relu.trust.certificate import Cover, Proof
from verifiable_relu.verifiers.attack import Attack, Pgd
from verifiable_relu.verifiers.bab import Bab
from verifiable_relu.verifiers.base import Outcome, Reason, TimeBudget, Verdict, Verifier
from verifiable_relu.verifiers.batch import QueryBatch, answers
from verifiable_relu.verifiers.incomplete import AlphaCrown, Crown
from verifiable_relu.verifiers.recording import Recorder, uncertified
from verifiable_relu.verifiers.root_bounds import NO_BOUNDS, BoundsCache, RootBounds
from verifiable_relu.verifiers.split import InputSplit

_FEW_INPUTS = 20
"""Up to so many inputs that vary it can pay to split the input box."""

_FEW_NEURONS = 40
"""Up to so many unstable neurons their phases are fewer than the boxes that inputs are split into, and go first."""

_INTEGER_NEURONS = 200
"""Up to so many unstable neurons mixed-integer programming has a chance in a minute."""

_EXACT_NEURONS = 10
"""Up to so many unstable neurons exact arithmetic (SMT) has a chance."""

CROWN_SHARE = 0.5
"""The part of its time that a query may spend on CROWN's bounds."""

_RECORDED_SHARE = 0.9
"""The same where proofs are recorded."""

_LARGE, _FIRST = 50_000, 0.05
"""Heuristic: from so many neurons on an attack is cheap beside their bounds, and comes first, with this share."""


@dataclass(frozen=True)
class Traits:
    """What a query is like, as it is known once CROWN has bounded it.

    Attributes:
        inputs: how many inputs vary.
        unstable: how many neurons are unstable; infinite where that is not known.
        linear: whether every activation of the network is piecewise linear.
        foldable: whether branch and bound over neurons takes the network, and has memory for the query.
        bounded: which part of the network CROWN has bounded; all where that is not known.
        counted: whether nothing but whole numbers of the inputs that vary matters.
        large: whether the network is so large that an attack comes before its bounds.
    """

    inputs: int
    unstable: float
    linear: bool
    foldable: bool
    bounded: float = 1.0
    counted: bool = False
    large: bool = False

    @staticmethod
    def of(query: Query, unstable: float, memory: int, root: RootBounds | None = None) -> Traits:
        """The traits of a query with so many unstable neurons, of which this is known."""
        # Outward rounding may have made two neighbouring floats of one value.
        box, bab = query.property.box, Bab()
        inputs = int(varies(box.lower, box.upper).sum())
        counted = only_counted(query)
        foldable = bab.takes(query.network) and bab.fits(inputs, unstable, memory)
        bounded = 1.0 if root is None else min(1.0, max(0, root.reached) / max(1, query.network.last_activation))
        return Traits(inputs, unstable, query.network.piecewise_linear, foldable, bounded, counted, _large(query))

    @property
    def narrow(self) -> bool:
        """Whether few inputs vary."""
        return self.inputs <= _FEW_INPUTS

    @property
    def few(self) -> bool:
        """Whether few neurons are unstable, all of which branch and bound has memory for."""
        return self.foldable and self.unstable <= _FEW_NEURONS

    def __str__(self) -> str:
        kind = f"the network is {'' if self.linear else 'not '}piecewise linear"
        number = "an unknown number of" if self.unstable == math.inf else f"{self.unstable:.0f}"
        return f"{self.inputs} inputs vary, {number} neurons are unstable under CROWN's bounds, {kind}"


@dataclass(frozen=True)
class Stage:
    """One method's turn.

    Attributes:
        method: its name.
        why: why a query that it takes goes there, in plain words.
        make: makes the verifier.
        takes: which queries it takes by their traits.
        share: the part of the time left that a query may spend here.
        most: takes only queries with at most so many unstable neurons under the latest bounds.
    """

    method: str
    why: str
    make: Callable[[], Verifier]
    takes: Callable[[Traits], bool]
    share: Callable[[Traits], float] = lambda traits: 1.0
    most: float = math.inf


def _milp() -> Verifier:
    # It is imported only where a query gets this far: scipy comes with it.
    from verifiable_relu.verifiers.milp import Milp

    return Milp()


def _smt() -> Verifier:
    from verifiable_relu.verifiers.smt import Smt

    return Smt(whole=True)


STAGES = (
    Stage(
        "crown",
        "its first share took it far enough that it seems to end in time",
        Crown,
        lambda t: 0.5 <= t.bounded < 1 and not t.counted,
        lambda t: 0.9,
    ),
    Stage(
        "attack",
        "a counterexample is cheap to look for; splitting inputs looks again, more thoroughly",
        lambda: Attack(Pgd(rounds=1)),
        lambda t: t.narrow and not t.counted,
        lambda t: 1.0 if t.bounded == 1 else 0.5,
    ),
    Stage(
        "attack",
        "a counterexample is cheap to look for",
        Attack,
        lambda t: not t.narrow,
        lambda t: 1.0 if t.bounded == 1 else 0.5,
    ),
    Stage(
        "crown",
        "its bounds take longer than its first share, and other methods begin with them",
        Crown,
        lambda t: t.bounded < 0.5 and not t.counted,
        lambda t: 0.5 if t.narrow else 1.0,
    ),
    Stage(
        "alpha-crown",
        "branch and bound, which would begin with better slopes, does not take the query",
        lambda: AlphaCrown(intermediate=Ascent(steps=6)),
        lambda t: not t.foldable and not t.counted and not (t.narrow and t.linear),
        lambda t: 0.5,
    ),
    Stage(
        "bab",
        "few inputs vary and few neurons are unstable: either may be split, neurons first",
        Bab,
        lambda t: t.narrow and t.few,
        lambda t: 0.5,
    ),
    Stage(
        "split",
        "few inputs vary and few neurons are unstable: now inputs",
        InputSplit,
        lambda t: t.narrow and t.few,
        lambda t: 0.5,
    ),
    Stage(
        "alpha-crown",
        "better slopes decide some queries by which boxes would take long, and are where these start",
        lambda: AlphaCrown(intermediate=Ascent(steps=2)),
        lambda t: t.narrow and t.foldable and not t.few,
        lambda t: 0.05,
    ),
    Stage(
        "split",
        "few inputs vary and many neurons are unstable, so that phases are far more than boxes",
        InputSplit,
        lambda t: t.narrow and not t.few,
        lambda t: 0.8 if t.foldable else 1.0,
    ),
    Stage(
        "bab",
        "what is open is the phases of unstable neurons, or the segments of smooth ones",
        Bab,
        lambda t: t.foldable,
        lambda t: 0.9 if t.linear and t.unstable <= _INTEGER_NEURONS else 1.0,
    ),
    Stage(
        "milp",
        "few enough phases are integer variables of a linear program",
        _milp,
        lambda t: t.linear,
        most=_INTEGER_NEURONS,
    ),
    Stage("split", "few inputs vary, and there is time left", InputSplit, lambda t: t.narrow and t.few),
    Stage(
        "smt",
        "what is left is within the others' tolerances of the boundary, and exact arithmetic has none",
        _smt,
        lambda t: t.linear,
        most=_EXACT_NEURONS,
    ),
)
"""The stages of ``auto`` after CROWN, in their order."""


@dataclass(frozen=True)
class Turn:
    """One method's turn in the rounds that follow the stages.

    Attributes:
        method: its name.
        make: makes the verifier of a round, by its number.
        takes: which queries it takes by their traits.
    """

    method: str
    make: Callable[[int], Verifier]
    takes: Callable[[Traits], bool]


def _slower(number: int) -> Verifier:
    return AlphaCrown(ascent=Ascent(steps=50 * 2**number), intermediate=Ascent(steps=10 * 2**number))


def _elsewhere(number: int) -> Verifier:
    return Attack(Pgd(rounds=sys.maxsize, seed=number + 1))


TURNS = (
    Turn("alpha-crown", _slower, lambda t: t.unstable > 0),
    Turn("bab", lambda number: Bab(), lambda t: t.foldable),
    Turn("split", lambda number: InputSplit(), lambda t: t.inputs > 0),
    Turn("attack", _elsewhere, lambda t: t.inputs > 0),
)
"""The methods that take turns in rounds after the stages: slopes with more steps, what profits from them, and attacks
from other points, which last as long as they may."""

_ROUNDS = (1 / 7, 1 / 3, 1.0)
"""The parts of the time left that rounds have: of all of it 1/7, 2/7 and 4/7. A method that had too little time in one
has twice as much in the next."""


def explanation(traits: Traits) -> str:
    """What ``auto`` does with a query, in plain words: a line for the query, and one for each stage that takes it."""
    lines = [f"crown, with up to {CROWN_SHARE:.0%} of the time: bounds are cheap, and prove much"]
    if traits.large:
        lines.insert(0, f"attack, with up to {_FIRST:.0%} of the time: bounds of a network this large take long")
    for stage in STAGES:
        if stage.takes(traits) and traits.unstable <= stage.most:
            lines.append(f"{stage.method}, with up to {stage.share(traits):.0%} of the time left: {stage.why}")
    lines = [str(traits), *(f"  {number}. {line}" for number, line in enumerate(lines, start=1))]
    turns = ", ".join(turn.method for turn in TURNS if turn.takes(traits))
    lines.append(f"  then, while time is left and they gain, in turns: {turns or 'none'}")
    return "\n".join(lines)


_WORTH = 1e-3
"""The part of a margin by which it has to grow in a turn whose method has another one."""

_HANDED_ON = 1 / 4
"""The part of the limit of memory that is for what stages hand on."""


@dataclass(frozen=True)
class Auto:
    """A portfolio: the verifiers of ``STAGES``, one after the other, each for the queries that are left by then.

    A later stage starts from what earlier ones have proven of a query's box (``BoundsCache``). Attack, MILP and SMT
    have no limit of memory.

    Attributes:
        record: whether every stage records its proofs, if it can.
    """

    record: bool = field(default=False, repr=False)

    name: ClassVar[str] = "auto"

    def claims(self, batch: QueryBatch) -> Iterator[tuple[int, Outcome]]:
        """As ``Verifier.claims``."""
        bounds_cache = (
            BoundsCache(int(batch.budget.memory * _HANDED_ON))
            if batch.bounds_cache is NO_BOUNDS
            else batch.bounds_cache
        )
        whole = batch.part(list(batch.queries), bounds_cache=bounds_cache)
        # Points are soon all that is left of boxes in which whole numbers alone matter.
        counted = {i: only_counted(query) for i, query in whole.queries.items()}
        large = [i for i, query in whole.queries.items() if _large(query)]
        yield from self._stage(whole, Attack(Pgd(rounds=1)), large, _FIRST)
        # Of what is recorded, no later stage begins with bounds of an earlier one.
        most = _RECORDED_SHARE if self.record else CROWN_SHARE
        for points, share in ((False, most), (True, CROWN_SHARE / 10)):
            yield from self._stage(whole, Crown(), [i for i in whole.open if counted[i] == points], share)
        traits = {
            i: Traits.of(whole.queries[i], _unstable(whole, i), whole.budget.memory, bounds_cache.get(i))
            for i in whole.open
        }
        for stage in STAGES:
            members = [i for i in whole.open if stage.takes(traits[i]) and _unstable(whole, i) <= stage.most]
            shares = {i: stage.share(traits[i]) for i in members}
            for share in sorted(set(shares.values())):
                yield from self._stage(whole, stage.make(), [i for i in members if shares[i] == share], share)
        yield from self._rounds(whole, traits)
        for number in batch.queries:
            if number not in batch.closed:
                outcome = batch.outcomes[number]
                if outcome.reason is Reason.INCOMPLETE and batch.left([number]) <= 0:
                    outcome = replace(outcome, reason=Reason.TIMEOUT, detail="the budget ran out")
                batch.outcomes[number] = outcome
                yield number, outcome

    def _stage(
        self, batch: QueryBatch, verifier: Verifier, members: list[int], share: float
    ) -> Iterator[tuple[int, Outcome]]:
        """Put ``members`` to a verifier, each with a share of the time that it has left; yields what is decided."""
        if not members:
            return
        for number in batch.part(members, share).ask(recording(verifier) if self.record else verifier):
            if number in batch.closed:
                yield number, batch.outcomes[number]

    def _rounds(self, batch: QueryBatch, traits: Mapping[int, Traits]) -> Iterator[tuple[int, Outcome]]:
        """Give methods turns until the time is over, or none is left that may gain; yields what is decided."""
        # Without a limit, attacks would never end.
        finite = [i for i in batch.open if batch.left([i]) < math.inf]
        turns = {i: [turn for turn in TURNS if turn.takes(traits[i])] for i in finite}
        for number in itertools.count():
            members = [i for i in batch.open if turns.get(i)]
            if not members:
                return
            part = _ROUNDS[min(number, len(_ROUNDS) - 1)]
            whole = batch.part(members, part)
            rest = {i: len(turns[i]) for i in members}
            for turn in TURNS:
                mine = [i for i in whole.open if turn in turns[i]]
                for count in sorted({rest[i] for i in mine}):
                    now = whole.part([i for i in mine if rest[i] == count], 1 / count)
                    margins = {i: batch.outcomes[i].margin for i in now.queries}
                    yield from self._stage(now, turn.make(number), list(now.queries), 1.0)
                    for i, margin in margins.items():
                        rest[i] -= 1
                        # The same again, or more of what brought nothing, would bring nothing.
                        if now.left([i]) > 0 and not _more(batch.outcomes[i].margin, margin):
                            turns[i].remove(turn)

    def explain(self, query: Query, budget: TimeBudget) -> str:
        """What ``auto`` does with a query, in plain words; bounding its neurons by CROWN may take the budget's time."""
        (outcome,) = answers(Crown(), [query], budget)
        if outcome.verdict is Verdict.UNSAT:
            return "CROWN's bounds decide"
        unstable = math.inf if outcome.unstable is None else outcome.unstable
        return explanation(Traits.of(query, unstable, budget.memory))


def _more(now: float | None, before: float | None) -> bool:
    """Whether a margin is larger than one before, by more than the part of it that is worth another try."""
    if now is None or before is None:
        return now is not None
    return now > before + _WORTH * abs(before)


def _large(query: Query) -> bool:
    """Whether an attack is cheap beside the bounds of a query's network, and points are not soon all that is left."""
    nodes, activations = query.network.nodes, query.network.activations
    return sum(nodes[i].size for i in activations) >= _LARGE and not only_counted(query)


def only_counted(query: Query) -> bool:
    """Whether nothing but whole numbers of the inputs that vary matters."""
    box = query.property.box
    varying = varies(box.lower, box.upper)
    for places in query.network.counted.values():
        varying[places.numpy()] = False
    return not varying.any() and bool(query.network.counted)


def _unstable(batch: QueryBatch, number: int) -> float:
    """The number of a query's unstable neurons, as far as it is known."""
    known = batch.outcomes[number].unstable
    return math.inf if known is None else known


def recording(verifier: Verifier) -> Verifier:
    """The verifier, recording its proofs if it can."""
    return replace(verifier, record=True) if isinstance(verifier, Auto | Bab | Crown | InputSplit) else verifier


def prove(query: Query, seconds: float) -> Proof | Cover | None:
    """A recorded proof that a query is unsat: by CROWN and α-CROWN, else by branch and bound for so many seconds.

    Branch and bound over neurons has half of the time, and that over few inputs the rest. None if there is no proof in
    this time, or the network has activations that certificates do not know.
    """
    network = query.network
    if uncertified(network):
        return None
    recorder = Recorder.of(network)
    with torch.no_grad():
        box = input_box([query.property], network)
        relaxation = crown_relaxation(network.to(torch.float64), box, coarse=recorder.coarse)
        found = recorder.proof(relaxation, 0, query.property, {}, Ascent())
    if found is not None:
        return found
    batch = QueryBatch([query], TimeBudget(seconds))
    narrow = int((box.lower < box.upper).sum()) <= NARROW
    methods: list[tuple[Verifier, float]] = [(Bab(), 0.5), (InputSplit(), 1.0)] if narrow else [(Bab(), 1.0)]
    for method, share in methods:
        for _, outcome in recording(method).claims(batch.part([0], share)):
            if outcome.proof is not None:
                return outcome.proof
    return None
