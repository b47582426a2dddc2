"""The rules by which ``auto`` chooses: which methods take a query, in which order, and with which share of its time.

Every query is bounded by CROWN. What it is like then decides which of ``STAGES`` take it, in their order: how many
inputs vary, which activations the network has, and how many neurons CROWN leaves unstable.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from verifiable_relu.bounds import MEMORY, Ascent
from verifiable_relu.pgd import Pgd
from verifiable_relu.rounding import varies
from verifiable_relu.spec.property import Query
from verifiable_relu.verifiers.attack import Attack
from verifiable_relu.verifiers.bab import Bab
from verifiable_relu.verifiers.base import Verifier
from verifiable_relu.verifiers.incomplete import AlphaCrown
from verifiable_relu.verifiers.split import InputSplit

_FEW_INPUTS = 20
"""Up to so many inputs that vary it can pay to split the input box."""

_FEW_NEURONS = 40
"""Up to so many unstable neurons their phases are fewer than the boxes that inputs are split into, and go first."""

_INTEGER_NEURONS = 200
"""Up to so many unstable neurons mixed-integer programming has a chance in a minute."""

_EXACT_NEURONS = 10
"""Up to so many unstable neurons exact arithmetic (SMT) has a chance."""

CROWN_SHARE = 0.25
"""The part of its time that a query may spend on CROWN's bounds."""

_INTERMEDIATE = Ascent(steps=6)
"""The search for bounds of unstable neurons: most of what more steps would gain is gained by now."""


@dataclass(frozen=True)
class Resources:
    """What the stages may use.

    Attributes:
        device: where bounds and attack run.
        memory: a limit in bytes on what each stage holds at once.
        processes: how many processes may share the work on a query.
    """

    device: str = "cpu"
    memory: int = MEMORY
    processes: int = 1


@dataclass(frozen=True)
class Traits:
    """What a query is like, as it is known once CROWN has bounded it.

    Attributes:
        inputs: how many inputs vary.
        unstable: how many neurons are unstable; infinite where that is not known.
        linear: whether every activation of the network is piecewise linear.
        foldable: whether branch and bound over neurons takes the network, and has memory for the query.
    """

    inputs: int
    unstable: float
    linear: bool
    foldable: bool

    @staticmethod
    def of(query: Query, unstable: float, memory: int) -> Traits:
        """The traits of a query with so many unstable neurons."""
        inputs, linear, bab = _free_inputs(query), query.network.piecewise_linear, Bab(memory=memory)
        return Traits(inputs, unstable, linear, bab.takes(query.network) and bab.fits(inputs, unstable))

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
    make: Callable[[Resources], Verifier]
    takes: Callable[[Traits], bool]
    share: Callable[[Traits], float] = lambda traits: 1.0
    most: float = math.inf


def _part(share: float) -> Callable[[Traits], float]:
    """The same share for every query."""
    return lambda traits: share


def _alpha_crown(given: Resources) -> Verifier:
    return AlphaCrown(given.device, given.memory, intermediate=_INTERMEDIATE)


def _bab(given: Resources) -> Verifier:
    return Bab(memory=given.memory, processes=given.processes)


def _split(given: Resources) -> Verifier:
    return InputSplit(device=given.device, memory=given.memory, processes=given.processes)


def _milp(_: Resources) -> Verifier:
    # Its solver is imported only where a query gets this far.
    from verifiable_relu.verifiers.milp import Milp

    return Milp()


def _smt(_: Resources) -> Verifier:
    from verifiable_relu.verifiers.smt import Smt

    return Smt(whole=True)


STAGES = (
    Stage(
        "attack",
        "a counterexample is cheap to look for; splitting inputs looks again, more thoroughly",
        lambda given: Attack(Pgd(rounds=1), given.device),
        lambda t: t.narrow,
    ),
    Stage(
        "attack",
        "a counterexample is cheap to look for",
        lambda given: Attack(device=given.device),
        lambda t: not t.narrow,
    ),
    Stage(
        "alpha-crown",
        "branch and bound, which would begin with better slopes, does not take the query",
        _alpha_crown,
        lambda t: not t.foldable and not (t.narrow and t.linear),
        _part(0.5),
    ),
    Stage(
        "bab",
        "few inputs vary and few neurons are unstable: either may be split, neurons first",
        _bab,
        lambda t: t.narrow and t.few,
        _part(0.5),
    ),
    Stage(
        "split",
        "few inputs vary and few neurons are unstable: now inputs",
        _split,
        lambda t: t.narrow and t.few,
        _part(0.5),
    ),
    Stage(
        "split",
        "few inputs vary and many neurons are unstable, so that phases are far more than boxes",
        _split,
        lambda t: t.narrow and not t.few,
        lambda t: 0.8 if t.foldable else 1.0,
    ),
    Stage(
        "bab",
        "what is open is the phases of unstable neurons, or the segments of smooth ones",
        _bab,
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
    Stage("split", "few inputs vary, and there is time left", _split, lambda t: t.narrow and t.few),
    Stage(
        "smt",
        "what is left is within the others' tolerances of the boundary, and exact arithmetic has none",
        _smt,
        lambda t: t.linear,
        most=_EXACT_NEURONS,
    ),
)
"""The stages of ``auto`` after CROWN, in their order."""


def explanation(traits: Traits) -> str:
    """What ``auto`` does with a query, in plain words: a line for the query, and one for each stage that takes it."""
    lines = [str(traits), f"  1. crown, with up to {CROWN_SHARE:.0%} of the time: bounds are cheap, and prove much"]
    chosen = [stage for stage in STAGES if stage.takes(traits) and traits.unstable <= stage.most]
    for number, stage in enumerate(chosen, start=2):
        lines.append(f"  {number}. {stage.method}, with up to {stage.share(traits):.0%} of the time left: {stage.why}")
    return "\n".join(lines)


def _free_inputs(query: Query) -> int:
    """Inputs that are not fixed to one value (which outward rounding may have made two neighbouring floats)."""
    box = query.property.box
    return int(varies(box.lower, box.upper).sum())
