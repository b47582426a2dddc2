"""``auto``: cheap bounds for all queries, an attack on the open ones, then complete methods within the budget.

Every query is bounded by CROWN. Its features then decide which steps of ``PORTFOLIO`` take it, in their order: how many
inputs vary, which functions the network has, and how many neurons CROWN leaves unstable. Queries still open go to
``ROUNDS``, round after round with growing shares, as long as there is time and a method may gain something.

A counterexample that does not stand up to exact evaluation and replay does not end a query here: the next method
takes over, and only if none decides is the query unknown (unconfirmed).
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from verifiable_relu.bounds.alpha import Ascent
from verifiable_relu.bounds.structure import structure
from verifiable_relu.errors import counted
from verifiable_relu.rounding import varies
from verifiable_relu.search.attack import Attack, Pgd
from verifiable_relu.search.bab.verifier import Bab
from verifiable_relu.search.batch import NO_BOUNDS, BoundsCache, Claims, QueryBatch, RootBounds, Verifier, answers
from verifiable_relu.search.bounding import AlphaCrown, Crown
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Reason, Verdict
from verifiable_relu.search.registry import make
from verifiable_relu.spec.property import Query


@dataclass(frozen=True)
class Thresholds:
    """Numbers of the portfolio's rules; ``docs/methods.md`` states the rules, ``PERFORMANCE.md`` the measurements."""

    few_inputs: int = 20  # Inputs that vary. ACAS Xu (5 inputs): ``split`` decides all, α-CROWN a quarter
    few_neurons: int = 40  # Unstable neurons, not measured alone: either may be split, and both have half of the time
    integer_neurons: int = 200  # Competition: MILP decided no query with more unstable neurons that others left open
    exact_neurons: int = 10  # Unstable neurons, not measured alone: queries on the boundary, which tests ask about
    crown_share: float = 0.5  # Of the time. cifar_biasfield: bounds take seconds, and all other methods need them
    large_neurons: int = 50_000  # A round of the attack costs as much as the bounds of some hundred neurons
    first_share: float = 0.05  # Of the time, for the same reason
    least_gain: float = 1e-3  # Of the margin, not measured alone: a method that gains nothing leaves its time to others
    kept_memory_share: float = 0.25  # Of the memory, not measured alone: half is for boxes and rows that are bounded


LIMITS = Thresholds()


@dataclass(frozen=True)
class QueryFeatures:
    """Features of a query, as they are known once CROWN has bounded it."""

    inputs: int  # Inputs that vary
    unstable: float  # Unstable neurons; infinite where that is not known
    linear: bool  # The network is piecewise linear
    splittable: bool  # Branch and bound over neurons takes the network, and has memory for the query
    bounded: float = 1.0  # The part of the network that CROWN has bounded; all where that is not known
    integer: bool = False  # All varying inputs matter only through whole numbers
    large: bool = False  # The network is so large that an attack comes before its bounds

    @staticmethod
    def from_query(query: Query, unstable: float, memory: int, root: RootBounds | None = None) -> QueryFeatures:
        """Return the features of a query with some unstable neurons and known bounds."""
        box, network, bab = query.property.box, query.network, Bab()
        # Outward rounding may have made two neighbouring floats of one value.
        inputs = int(varies(box.lower, box.upper).sum())
        splittable = bab.takes(network) and bab.fits(inputs, unstable, memory)
        last = max(1, structure(network).last_nonlinear)
        bounded = 1.0 if root is None else min(1.0, max(0, root.reached) / last)
        flags = _has_integer_inputs(query), _is_large(query)
        return QueryFeatures(inputs, unstable, network.piecewise_linear, splittable, bounded, *flags)

    @property
    def narrow(self) -> bool:
        return self.inputs <= LIMITS.few_inputs

    @property
    def few(self) -> bool:
        """True if few inputs vary and few neurons are unstable, and branch and bound has memory for them."""
        return self.narrow and self.splittable and self.unstable <= LIMITS.few_neurons

    def __str__(self) -> str:
        kind = "a piecewise-linear network" if self.linear else "a network that is not piecewise linear"
        known = self.unstable < math.inf
        neurons = counted(self.unstable, "unstable neuron") if known else "an unknown number of unstable neurons"
        return f"{counted(self.inputs, 'varying input')}, {neurons} under CROWN's bounds, {kind}"


@dataclass(frozen=True)
class PortfolioStep:
    """One step of the portfolio: a method, the queries that it takes, and its share of their time."""

    method: str  # Its name
    takes: Callable[[QueryFeatures], bool]  # Chooses queries by their features
    why: str = ""  # Why a query that it takes goes there, in plain words
    share: Callable[[QueryFeatures], float] = lambda f: 1.0  # The part of the time left that a query may spend here
    most: float = math.inf  # Takes only queries with at most this number of unstable neurons under the latest bounds
    make: Callable[[int], Verifier] | None = None  # Makes the verifier of a round; None for the method's own

    def verifier(self, number: int = 0) -> Verifier:
        return make(self.method) if self.make is None else self.make(number)


def _attack_share(features: QueryFeatures) -> float:
    return 1.0 if features.bounded == 1 else 0.5


# Reasons of steps
_FAR = "its first share took it far enough that it seems to end in time"
_CHEAP = "a counterexample is cheap to look for"
_LONG = "its bounds take longer than its first share, and other methods begin with them"
_NO_BAB = "branch and bound, which would begin with better slopes, does not take the query"
_FEW = "few inputs vary and few neurons are unstable"
_SLOPES = "better slopes decide some queries by which boxes would take long, and are where these start"
_BOXES = "few inputs vary and many neurons are unstable, so that phases are far more than boxes"
_PHASES = "what is open is the phases of unstable neurons, or the segments of smooth ones"
_EDGE = "what is left is within the others' tolerances of the boundary, and exact arithmetic has none"

PORTFOLIO = (
    PortfolioStep("crown", lambda f: 0.5 <= f.bounded < 1 and not f.integer, _FAR, lambda f: 0.9),
    PortfolioStep(
        "attack",
        lambda f: f.narrow and not f.integer,
        f"{_CHEAP}; splitting inputs looks again, more thoroughly",
        _attack_share,
        make=lambda _: Attack(Pgd(rounds=1)),
    ),
    PortfolioStep("attack", lambda f: not f.narrow, _CHEAP, _attack_share),
    PortfolioStep("crown", lambda f: f.bounded < 0.5 and not f.integer, _LONG, lambda f: 0.5 if f.narrow else 1.0),
    PortfolioStep(
        "alpha-crown",
        lambda f: not f.splittable and not f.integer and not (f.narrow and f.linear),
        _NO_BAB,
        lambda f: 0.5,
        make=lambda _: AlphaCrown(intermediate=Ascent(steps=6)),
    ),
    PortfolioStep("bab", lambda f: f.few, f"{_FEW}: either may be split, neurons first", lambda f: 0.5),
    PortfolioStep("split", lambda f: f.few, f"{_FEW}: now inputs", lambda f: 0.5),
    PortfolioStep(
        "alpha-crown",
        lambda f: f.narrow and f.splittable and not f.few,
        _SLOPES,
        lambda f: 0.05,
        make=lambda _: AlphaCrown(intermediate=Ascent(steps=2)),
    ),
    PortfolioStep("split", lambda f: f.narrow and not f.few, _BOXES, lambda f: 0.8 if f.splittable else 1.0),
    PortfolioStep(
        "bab",
        lambda f: f.splittable,
        _PHASES,
        lambda f: 0.9 if f.linear and f.unstable <= LIMITS.integer_neurons else 1.0,
    ),
    PortfolioStep(
        "milp",
        lambda f: f.linear,
        "few enough phases are integer variables of a linear program",
        most=LIMITS.integer_neurons,
    ),
    PortfolioStep("split", lambda f: f.few, "few inputs vary, and there is time left"),
    PortfolioStep("smt-exact", lambda f: f.linear, _EDGE, most=LIMITS.exact_neurons),
)
"""The steps of ``auto`` after CROWN, in their order."""

ROUNDS = (
    PortfolioStep(
        "alpha-crown",
        lambda f: f.unstable > 0,
        make=lambda number: AlphaCrown(ascent=Ascent(steps=50 * 2**number), intermediate=Ascent(steps=10 * 2**number)),
    ),
    PortfolioStep("bab", lambda f: f.splittable),
    PortfolioStep("split", lambda f: f.inputs > 0),
    PortfolioStep(
        "attack", lambda f: f.inputs > 0, make=lambda number: Attack(Pgd(rounds=sys.maxsize, seed=number + 1))
    ),
)
"""The methods that take turns in rounds after that: slopes with more steps, what profits from them, and attacks from
other points, which last as long as they may."""

# The parts of the time left that rounds have: of all of it 1/7, 2/7 and 4/7. A method that had too little time in one
# has twice as much in the next
ROUND_SHARES = (1 / 7, 1 / 3, 1.0)


def explanation(features: QueryFeatures) -> str:
    """Return an explanation of what ``auto`` does: a line for the query, and one for each step that takes it."""
    first = f"attack, with up to {LIMITS.first_share:.0%} of the time: bounds of a network this large take long"
    lines = [first] if features.large else []
    lines.append(f"crown, with up to {LIMITS.crown_share:.0%} of the time: bounds are cheap, and prove much")
    for step in PORTFOLIO:
        if step.takes(features) and features.unstable <= step.most:
            lines.append(f"{step.method}, with up to {step.share(features):.0%} of the time left: {step.why}")
    lines = [str(features), *(f"  {number}. {line}" for number, line in enumerate(lines, start=1))]
    rounds = ", ".join(step.method for step in ROUNDS if step.takes(features))
    lines.append(f"  then, while time is left and they gain, in turns: {rounds or 'none'}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Auto:
    """A portfolio: the steps of ``PORTFOLIO`` one after the other, each for the queries still open.

    Attack, MILP and SMT have no limit of memory.
    """

    name: ClassVar[str] = "auto"

    def claims(self, batch: QueryBatch) -> Claims:
        cache, memory = batch.bounds_cache, batch.budget.memory
        cache = BoundsCache(int(memory * LIMITS.kept_memory_share)) if cache is NO_BOUNDS else cache
        whole = batch.part(list(batch.queries), bounds_cache=cache)
        # Points are soon all that is left of boxes in which whole numbers alone matter.
        integer = {i: _has_integer_inputs(query) for i, query in whole.queries.items()}
        large = [i for i, query in whole.queries.items() if _is_large(query)]
        yield from self._ask(whole, Attack(Pgd(rounds=1)), large, LIMITS.first_share)
        for points, share in ((False, LIMITS.crown_share), (True, LIMITS.crown_share / 10)):
            yield from self._ask(whole, Crown(), [i for i in whole.open if integer[i] == points], share)
        asked = ((i, whole.queries[i]) for i in whole.open)
        features = {i: QueryFeatures.from_query(q, _unstable(whole, i), memory, cache.get(i)) for i, q in asked}
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
                    outcome = replace(outcome, reason=Reason.TIMEOUT, detail="the time limit was reached")
                batch.outcomes[number] = outcome
                yield number, outcome

    def _ask(self, batch: QueryBatch, verifier: Verifier, members: list[int], share: float) -> Claims:
        """Ask a verifier about ``members``, each with a share of its time left; yields the decided ones."""
        for number in batch.part(members, share).ask(verifier) if members else ():
            if number in batch.closed:
                yield number, batch.outcomes[number]

    def _rounds(self, batch: QueryBatch, features: Mapping[int, QueryFeatures]) -> Claims:
        """Ask methods in turn until time is over or none may gain anything; yields the decided queries."""
        # Without a limit, attacks would never end.
        finite = [i for i in batch.open if batch.left([i]) < math.inf]
        steps = {i: [step for step in ROUNDS if step.takes(features[i])] for i in finite}
        for number in itertools.count():
            members = [i for i in batch.open if steps.get(i)]
            if not members:
                return
            whole = batch.part(members, ROUND_SHARES[min(number, len(ROUND_SHARES) - 1)])
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
                        least = -math.inf if margin is None else margin + LIMITS.least_gain * abs(margin)
                        known = batch.outcomes[i].margin
                        if now.left([i]) > 0 and (known is None or not known > least):
                            steps[i].remove(step)

    def explain(self, query: Query, budget: TimeBudget) -> str:
        """Return an explanation of what ``auto`` does with a query; CROWN's bounds may take the budget's time."""
        (outcome,) = answers(Crown(), [query], budget)
        if outcome.verdict is Verdict.UNSAT:
            return "CROWN's bounds decide"
        unstable = math.inf if outcome.unstable is None else outcome.unstable
        return explanation(QueryFeatures.from_query(query, unstable, budget.memory))


def _is_large(query: Query) -> bool:
    """Return True if an attack is cheap compared with bounds, and inputs matter by more than whole numbers."""
    network = query.network
    neurons = sum(network.ops[i].size for i in network.activations)
    return neurons >= LIMITS.large_neurons and not _has_integer_inputs(query)


def _has_integer_inputs(query: Query) -> bool:
    """Return True if all varying inputs matter only through whole numbers."""
    varying = varies(query.property.box.lower, query.property.box.upper)
    for places in query.network.integer_inputs.values():
        varying[places.numpy()] = False
    return not varying.any() and bool(query.network.integer_inputs)


def _unstable(batch: QueryBatch, number: int) -> float:
    known = batch.outcomes[number].unstable
    return math.inf if known is None else known
