"""``auto``: cheap bounds for all queries, the attack on what is left, then complete methods within the budget.

Every query is bounded by CROWN. Its features then decide which steps of ``PORTFOLIO`` take it, in their order: how many
inputs vary, which activations the network has, and how many neurons CROWN leaves unstable. What these leave open goes
to ``ROUNDS``, round after round with growing shares, as long as there is time and a method that may gain something.

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
from verifiable_relu.verifiers.base import Outcome, Reason, TimeBudget, Verdict
from verifiable_relu.verifiers.batch import QueryBatch, Verifier, answers
from verifiable_relu.verifiers.incomplete import AlphaCrown, Crown
from verifiable_relu.verifiers.recording import Recorder, uncertified
from verifiable_relu.verifiers.registry import make
from verifiable_relu.verifiers.root_bounds import NO_BOUNDS, BoundsCache, RootBounds
from verifiable_relu.verifiers.split import InputSplit

_FEW_INPUTS = 20
"""Up to this number of inputs that vary it can pay to split the input box."""

_FEW_NEURONS = 40
"""Up to this number of unstable neurons their phases are fewer than the boxes that inputs are split into."""

_INTEGER_NEURONS, _EXACT_NEURONS = 200, 10
"""Up to these numbers of unstable neurons mixed-integer programming and exact arithmetic (SMT) have a chance."""

_CROWN_SHARE, _RECORDED_SHARE = 0.5, 0.9
"""The part of its time that a query may spend on CROWN's bounds; the second, where proofs are recorded."""

_LARGE, _FIRST = 50_000, 0.05
"""Heuristic: from this number of neurons on an attack is cheap beside their bounds, and comes first with this share."""

_WORTH = 1e-3
"""The part of a margin by which it has to grow in a round whose method has another one."""

_HANDED_ON = 1 / 4
"""The part of the limit of memory that is for bounds that steps hand on."""


@dataclass(frozen=True)
class QueryFeatures:
    """Features of a query, as they are known once CROWN has bounded it.

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
    def of(query: Query, unstable: float, memory: int, root: RootBounds | None = None) -> QueryFeatures:
        """Return the features of a query with some unstable neurons and known bounds."""
        # Outward rounding may have made two neighbouring floats of one value.
        box, bab = query.property.box, Bab()
        inputs = int(varies(box.lower, box.upper).sum())
        foldable = bab.takes(query.network) and bab.fits(inputs, unstable, memory)
        bounded = 1.0 if root is None else min(1.0, max(0, root.reached) / max(1, query.network.last_activation))
        linear, counted = query.network.piecewise_linear, _only_counted(query)
        return QueryFeatures(inputs, unstable, linear, foldable, bounded, counted, _large(query))

    @property
    def narrow(self) -> bool:
        """True if few inputs vary."""
        return self.inputs <= _FEW_INPUTS

    @property
    def few(self) -> bool:
        """True if few inputs vary and few neurons are unstable, all of which branch and bound has memory for."""
        return self.narrow and self.foldable and self.unstable <= _FEW_NEURONS

    def __str__(self) -> str:
        kind = f"the network is {'' if self.linear else 'not '}piecewise linear"
        number = "an unknown number of" if self.unstable == math.inf else f"{self.unstable:.0f}"
        return f"{self.inputs} inputs vary, {number} neurons are unstable under CROWN's bounds, {kind}"


@dataclass(frozen=True)
class PortfolioStep:
    """One method's turn.

    Attributes:
        method: its name.
        takes: which queries it takes by their features.
        why: why a query that it takes goes there, in plain words.
        share: the part of the time left that a query may spend here.
        most: takes only queries with at most this number of unstable neurons under the latest bounds.
        make: makes the verifier of a round, by its number; the method as the command line has it by default.
    """

    method: str
    takes: Callable[[QueryFeatures], bool]
    why: str = ""
    share: Callable[[QueryFeatures], float] = lambda f: 1.0
    most: float = math.inf
    make: Callable[[int], Verifier] | None = None

    def verifier(self, number: int = 0) -> Verifier:
        """Return the verifier of a round."""
        return make(self.method) if self.make is None else self.make(number)


def _attack_share(features: QueryFeatures) -> float:
    return 1.0 if features.bounded == 1 else 0.5


PORTFOLIO = (
    PortfolioStep(
        "crown",
        lambda f: 0.5 <= f.bounded < 1 and not f.counted,
        "its first share took it far enough that it seems to end in time",
        lambda f: 0.9,
    ),
    PortfolioStep(
        "attack",
        lambda f: f.narrow and not f.counted,
        "a counterexample is cheap to look for; splitting inputs looks again, more thoroughly",
        _attack_share,
        make=lambda _: Attack(Pgd(rounds=1)),
    ),
    PortfolioStep("attack", lambda f: not f.narrow, "a counterexample is cheap to look for", _attack_share),
    PortfolioStep(
        "crown",
        lambda f: f.bounded < 0.5 and not f.counted,
        "its bounds take longer than its first share, and other methods begin with them",
        lambda f: 0.5 if f.narrow else 1.0,
    ),
    PortfolioStep(
        "alpha-crown",
        lambda f: not f.foldable and not f.counted and not (f.narrow and f.linear),
        "branch and bound, which would begin with better slopes, does not take the query",
        lambda f: 0.5,
        make=lambda _: AlphaCrown(intermediate=Ascent(steps=6)),
    ),
    PortfolioStep(
        "bab",
        lambda f: f.few,
        "few inputs vary and few neurons are unstable: either may be split, neurons first",
        lambda f: 0.5,
    ),
    PortfolioStep("split", lambda f: f.few, "few inputs vary and few neurons are unstable: now inputs", lambda f: 0.5),
    PortfolioStep(
        "alpha-crown",
        lambda f: f.narrow and f.foldable and not f.few,
        "better slopes decide some queries by which boxes would take long, and are where these start",
        lambda f: 0.05,
        make=lambda _: AlphaCrown(intermediate=Ascent(steps=2)),
    ),
    PortfolioStep(
        "split",
        lambda f: f.narrow and not f.few,
        "few inputs vary and many neurons are unstable, so that phases are far more than boxes",
        lambda f: 0.8 if f.foldable else 1.0,
    ),
    PortfolioStep(
        "bab",
        lambda f: f.foldable,
        "what is open is the phases of unstable neurons, or the segments of smooth ones",
        lambda f: 0.9 if f.linear and f.unstable <= _INTEGER_NEURONS else 1.0,
    ),
    PortfolioStep(
        "milp",
        lambda f: f.linear,
        "few enough phases are integer variables of a linear program",
        most=_INTEGER_NEURONS,
    ),
    PortfolioStep("split", lambda f: f.few, "few inputs vary, and there is time left"),
    PortfolioStep(
        "smt-exact",
        lambda f: f.linear,
        "what is left is within the others' tolerances of the boundary, and exact arithmetic has none",
        most=_EXACT_NEURONS,
    ),
)
"""The steps of ``auto`` after CROWN, in their order."""


def _slower(number: int) -> Verifier:
    return AlphaCrown(ascent=Ascent(steps=50 * 2**number), intermediate=Ascent(steps=10 * 2**number))


ROUNDS = (
    PortfolioStep("alpha-crown", lambda f: f.unstable > 0, make=_slower),
    PortfolioStep("bab", lambda f: f.foldable),
    PortfolioStep("split", lambda f: f.inputs > 0),
    PortfolioStep(
        "attack", lambda f: f.inputs > 0, make=lambda number: Attack(Pgd(rounds=sys.maxsize, seed=number + 1))
    ),
)
"""The methods that take turns in rounds after that: slopes with more steps, what profits from them, and attacks from
other points, which last as long as they may."""

_PARTS = (1 / 7, 1 / 3, 1.0)
"""The parts of the time left that rounds have: of all of it 1/7, 2/7 and 4/7. A method that had too little time in one
has twice as much in the next."""


def explanation(features: QueryFeatures) -> str:
    """Return what ``auto`` does with a query: a line for the query, and one for each step that takes it."""
    lines = [f"crown, with up to {_CROWN_SHARE:.0%} of the time: bounds are cheap, and prove much"]
    if features.large:
        lines.insert(0, f"attack, with up to {_FIRST:.0%} of the time: bounds of a network this large take long")
    for step in PORTFOLIO:
        if step.takes(features) and features.unstable <= step.most:
            lines.append(f"{step.method}, with up to {step.share(features):.0%} of the time left: {step.why}")
    lines = [str(features), *(f"  {number}. {line}" for number, line in enumerate(lines, start=1))]
    rounds = ", ".join(step.method for step in ROUNDS if step.takes(features))
    lines.append(f"  then, while time is left and they gain, in turns: {rounds or 'none'}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Auto:
    """A portfolio: the verifiers of ``PORTFOLIO``, one after the other, each for the queries that are left by then.

    A later step starts from what earlier ones have proven of a query's box (``BoundsCache``). Attack, MILP and SMT
    have no limit of memory.

    Attributes:
        record: whether every step records its proofs, if it can.
    """

    record: bool = field(default=False, repr=False)

    name: ClassVar[str] = "auto"

    def claims(self, batch: QueryBatch) -> Iterator[tuple[int, Outcome]]:
        """As ``Verifier.claims``."""
        cache = batch.bounds_cache
        if cache is NO_BOUNDS:
            cache = BoundsCache(int(batch.budget.memory * _HANDED_ON))
        whole = batch.part(list(batch.queries), bounds_cache=cache)
        # Points are soon all that is left of boxes in which whole numbers alone matter.
        counted = {i: _only_counted(query) for i, query in whole.queries.items()}
        large = [i for i, query in whole.queries.items() if _large(query)]
        yield from self._ask(whole, Attack(Pgd(rounds=1)), large, _FIRST)
        # Of what is recorded, no later step begins with bounds of an earlier one.
        most = _RECORDED_SHARE if self.record else _CROWN_SHARE
        for points, share in ((False, most), (True, _CROWN_SHARE / 10)):
            yield from self._ask(whole, Crown(), [i for i in whole.open if counted[i] == points], share)
        memory = whole.budget.memory
        features = {
            i: QueryFeatures.of(whole.queries[i], _unstable(whole, i), memory, cache.get(i)) for i in whole.open
        }
        for step in PORTFOLIO:
            members = [i for i in whole.open if step.takes(features[i]) and _unstable(whole, i) <= step.most]
            shares = {i: step.share(features[i]) for i in members}
            for share in sorted(set(shares.values())):
                yield from self._ask(whole, step.verifier(), [i for i in members if shares[i] == share], share)
        yield from self._rounds(whole, features)
        for number in batch.queries:
            if number not in batch.closed:
                outcome = batch.outcomes[number]
                if outcome.reason is Reason.INCOMPLETE and batch.left([number]) <= 0:
                    outcome = replace(outcome, reason=Reason.TIMEOUT, detail="the budget ran out")
                batch.outcomes[number] = outcome
                yield number, outcome

    def _ask(
        self, batch: QueryBatch, verifier: Verifier, members: list[int], share: float
    ) -> Iterator[tuple[int, Outcome]]:
        """Put ``members`` to a verifier, each with a share of the time that it has left; yields what is decided."""
        if not members:
            return
        for number in batch.part(members, share).ask(recording(verifier) if self.record else verifier):
            if number in batch.closed:
                yield number, batch.outcomes[number]

    def _rounds(self, batch: QueryBatch, features: Mapping[int, QueryFeatures]) -> Iterator[tuple[int, Outcome]]:
        """Give methods turns until the time is over, or none is left that may gain; yields what is decided."""
        # Without a limit, attacks would never end.
        finite = [i for i in batch.open if batch.left([i]) < math.inf]
        steps = {i: [step for step in ROUNDS if step.takes(features[i])] for i in finite}
        for number in itertools.count():
            members = [i for i in batch.open if steps.get(i)]
            if not members:
                return
            whole = batch.part(members, _PARTS[min(number, len(_PARTS) - 1)])
            rest = {i: len(steps[i]) for i in members}
            for step in ROUNDS:
                mine = [i for i in whole.open if step in steps[i]]
                for count in sorted({rest[i] for i in mine}):
                    now = whole.part([i for i in mine if rest[i] == count], 1 / count)
                    margins = {i: batch.outcomes[i].margin for i in now.queries}
                    yield from self._ask(now, step.verifier(number), list(now.queries), 1.0)
                    for i, margin in margins.items():
                        rest[i] -= 1
                        # The same again, or more of what brought nothing, would bring nothing.
                        if now.left([i]) > 0 and not _more(batch.outcomes[i].margin, margin):
                            steps[i].remove(step)

    def explain(self, query: Query, budget: TimeBudget) -> str:
        """Return what ``auto`` does with a query; bounding its neurons by CROWN may take the budget's time."""
        (outcome,) = answers(Crown(), [query], budget)
        if outcome.verdict is Verdict.UNSAT:
            return "CROWN's bounds decide"
        unstable = math.inf if outcome.unstable is None else outcome.unstable
        return explanation(QueryFeatures.of(query, unstable, budget.memory))


def _more(now: float | None, before: float | None) -> bool:
    """Whether a margin is larger than one before, by more than the part of it that is worth another try."""
    if now is None or before is None:
        return now is not None
    return now > before + _WORTH * abs(before)


def _large(query: Query) -> bool:
    """Whether an attack is cheap beside the bounds of a query's network, and points are not soon all that is left."""
    nodes, activations = query.network.nodes, query.network.activations
    return sum(nodes[i].size for i in activations) >= _LARGE and not _only_counted(query)


def _only_counted(query: Query) -> bool:
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
