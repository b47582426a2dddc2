"""``smt`` and ``smt-exact``: z3 over the exact rationals that weights are, complete for piecewise-linear networks.

``smt-exact`` asks z3 one formula for each polytope that bounds leave open; beyond ten unstable neurons that is slow.
``smt`` is a client of branch and bound: its trees split the phases of neurons and prove what bounds can prove, and a
sub-problem with few neurons left that nothing else closes is z3's to decide, exactly.

Each unstable neuron is two non-negative reals of which one is zero (the phases of Katz et al., Reluplex, arXiv
1702.01135):

    pre-activation = positive − negative,   value = positive − slope·negative.

The dense equations never change during the search then, only bounds of variables do. Bounds serve to leave out stable
neurons (``encoding``) and nothing else: chords or intervals as further constraints make z3 several times slower.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.bounds import Ascent, Bounds, input_box, interval_bounds
from verifiable_relu.dyadic import Dyadic
from verifiable_relu.errors import CallFailed, OutOfTime
from verifiable_relu.search.solvers.z3 import Z3, Z3Answer, Z3Task
from verifiable_relu.spec.property import Polytope, Query, nearest
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.trust.exact import evaluable, evaluate_exact
from verifiable_relu.verifiers.attack import claim
from verifiable_relu.verifiers.bab.search import QuerySearch, Schedule, WitnessCheck
from verifiable_relu.verifiers.bab.slopes import Slopes
from verifiable_relu.verifiers.bab.tree import Branching, Decide
from verifiable_relu.verifiers.bab.verifier import BoundedBoxes, Decider
from verifiable_relu.verifiers.base import PATIENCE, Outcome, Reason, TimeBudget, Trust, Verdict, Witness, fault
from verifiable_relu.verifiers.encoding import ExactEncoding, ExactForms, magnitudes, phases_of

_TREES = Schedule(refinement=None, better=None)

_DEPTHS = tuple(Fraction(1, 1 << bits) for bits in (4, 8, 12, 16, 20, 24, 30))
"""How far beyond the boundary a counterexample is looked for, so that rounding it to floats leaves it one."""

FEW = 8
"""At most this many neurons without a phase has a sub-problem of ``smt`` that z3 decides."""


@dataclass(frozen=True)
class Smt(Decider):
    """Verification by z3.

    Attributes:
        whole: ask z3 about each whole polytope, as ``smt-exact`` does; otherwise about sub-problems, as ``smt`` does.
        search, slopes: how the trees of ``smt`` are searched, and slopes for their relaxations.
        intermediate: the search for bounds of the neurons that CROWN leaves unstable.
        process_memory: the most bytes of resident memory of the solver's process; None for half of the machine's.
    """

    whole: bool = False
    search: Branching = field(default_factory=Branching)
    slopes: Slopes = field(default_factory=Slopes, repr=False)
    intermediate: Ascent = Ascent(steps=6)  # noqa: RUF009 -- frozen
    process_memory: int | None = None

    @property
    def name(self) -> str:  # type: ignore[override]
        return "smt-exact" if self.whole else "smt"

    def start(self) -> None:
        Z3.start()

    def decide(self, bounds: BoundedBoxes, number: int, work: TimeBudget) -> Outcome:
        query, lower = bounds.queries[number], bounds.lower[number].tolist()
        formula = SmtFormula(query, bounds.relaxation.pre, bounds.sample(number), work)
        origin = RowBatch.from_properties([query.property], query.network.output_size).origin.tolist()
        if self.whole:
            order = sorted((value, i) for value, i in zip(lower, origin, strict=True) if not value > 0)
            return self._asked(formula, [query.property.unsafe[i] for i in dict.fromkeys(i for _, i in order)])
        candidates = SmtWitnessCheck(self, formula, origin)
        with torch.no_grad():
            system = bounds.system(number, self.slopes, work)
            if system is None:
                return candidates.anywhere()
            within = replace(work, memory=work.memory // 2, processes=1)
            found = QuerySearch(system, candidates, self.search, _TREES, within).run()
        bounds.prove(number, found.lower)
        margin, nodes = bounds.margin(number), found.nodes
        told = f"{nodes} sub-problems, {candidates.decided} of them decided by z3"
        if (ended := candidates.found or candidates.missed) is not None:
            return replace(ended, detail="; ".join(filter(None, (ended.detail, told))), subproblems=nodes)
        if margin > 0:
            # What z3 decides has no other margin than a positive one.
            least = 0.0 if candidates.decided else margin
            proved = Verdict.UNSAT, Reason.PROVED, self.name, bounds.trust, least
            return Outcome(*proved, detail=told, subproblems=nodes)
        known = {"margin": margin if margin > -np.inf else None, "subproblems": nodes}
        return Outcome.unknown(found.ended.reason, self.name, f"{found.ended.detail} after {told}", **known)

    def _asked(self, formula: SmtFormula, polytopes: Sequence[Polytope]) -> Outcome:
        """Go through polytopes; sat ends the search, unsat needs all of them excluded."""
        result = Outcome(Verdict.UNSAT, Reason.PROVED, self.name, Trust.ROUNDED, 0.0)
        for polytope in polytopes:
            outcome = self.reach(formula, formula.unsafe(polytope))
            if outcome.verdict is Verdict.SAT or outcome.reason is Reason.TIMEOUT:
                return outcome
            if outcome.verdict is Verdict.UNKNOWN and result.verdict is Verdict.UNSAT:
                result = outcome
        return result

    def reach(self, formula: SmtFormula, assertions: str) -> Outcome:
        """Look for a point that satisfies the assertions; unsat only if z3 says that there is none."""
        seconds = formula.work.left()
        if seconds <= 0:
            return Outcome.unknown(Reason.TIMEOUT, self.name, "the budget ran out")
        deeper = [f"(assert (>= gap {_number(depth)}))\n" for depth in _DEPTHS]
        task = Z3Task(formula.declarations, formula.shared() + assertions, formula.pairs, deeper, seconds)
        try:
            found: Z3Answer = Z3.call(task, seconds + PATIENCE, self.process_memory)
        except (OutOfTime, MemoryError, CallFailed) as error:
            return fault(error, self.name)
        if found.answer == "unsat":
            return Outcome(Verdict.UNSAT, Reason.PROVED, self.name)
        if found.answer == "sat":
            return self._counterexample(formula.query, [formula.point(model) for model in found.models])
        if formula.work.over() or found.reason in ("timeout", "canceled"):
            return Outcome.unknown(Reason.TIMEOUT, self.name, "the budget ran out")
        return Outcome.unknown(Reason.ERROR, self.name, f"z3 gave up: {found.reason}")

    def _counterexample(self, query: Query, points: Sequence[Witness]) -> Outcome:
        for point in points:
            if (found := exact_claim(query, point, self.name)) is not None:
                return found
        network, witness = query.network, points[0]
        if evaluable(network) and query.property.margin(evaluate_exact(network, witness)) == 0:
            # A set that is only touched has no other points.
            return Outcome(Verdict.SAT, Reason.REFUTED, self.name, Trust.EXACT, 0.0, witness)
        detail = "the exact counterexample is none after rounding to floating point"
        return Outcome.unknown(Reason.UNCONFIRMED, self.name, detail, witness=witness)


class SmtWitnessCheck(WitnessCheck):
    """Points of a query that a search comes across, and sub-problems that z3 decides.

    ``origin`` has the number of the property's polytope that each polytope of ``RowBatch`` is a part of.

    Attributes:
        decided: the number of sub-problems that z3 has excluded.
        missed: an exact counterexample that is none in floating point; None while there is none.
    """

    def __init__(self, method: Smt, formula: SmtFormula, origin: Sequence[int]) -> None:
        super().__init__(formula.query, method.name)
        self.decided = 0
        self.missed: Outcome | None = None
        self._smt, self._formula, self._origin = method, formula, origin

    def _take(self, point: np.ndarray) -> None:
        super()._take(point)
        if self.found is not None and self.found.witness is not None:
            # A point on the boundary is a counterexample or not; float64 does not tell.
            self.found = exact_claim(self.query, self.found.witness, self._method)

    def decider(self, polytope: int, places: Tensor) -> Decide:
        return lambda split: self._without(polytope, places.tolist(), split.tolist())

    def _without(self, polytope: int, places: Sequence[Sequence[int]], split: Sequence[int]) -> bool | None:
        """Return whether no point with these phases reaches a polytope; None where z3 is not asked, or unsure."""
        if sum(side == 0 for side in split) > FEW:
            return None
        names = (f"{'n' if side > 0 else 'p'}_{i}_{j}" for (i, j), side in zip(places, split, strict=True) if side)
        unsafe = self._formula.unsafe(self.query.property.unsafe[self._origin[polytope]])
        outcome = self._smt.reach(self._formula, unsafe + _asserted(f"(<= {name} 0.0)" for name in names))
        if outcome.verdict is Verdict.UNSAT:
            self.decided += 1
            return True
        if outcome.verdict is Verdict.SAT:
            self.found = outcome
        elif outcome.reason is Reason.UNCONFIRMED:
            self.missed = outcome
        else:
            return None
        return False


def exact_claim(query: Query, point: Witness, method: str) -> Outcome | None:
    """Return a sat claim for the float point nearest to an exact one, judged exactly where that is possible."""
    near = np.array([value.numerator / value.denominator for value in point])
    network, prop = query.network, query.property
    if not evaluable(network):
        return claim(network, prop, near, method)
    witness = prop.box.witness(near)
    outputs = evaluate_exact(network, witness)
    if not (prop.box.contains(witness) and prop.violated(outputs)):
        return None
    return Outcome(Verdict.SAT, Reason.REFUTED, method, Trust.EXACT, nearest(prop.margin(outputs)), witness)


class SmtFormula:
    """A query in SMT-LIB: reals ``x_i``, ``p_k_j`` and ``n_k_j`` (positive and negative part), and ``gap``.

    ``pre`` are bounds of pre-activations, by activation, and ``sample`` the query's number in their batch.

    Attributes:
        declarations: of all reals.
        pairs: the positive and the negative part of each unstable neuron.
    """

    def __init__(self, query: Query, pre: Mapping[int, Bounds], sample: int, work: TimeBudget) -> None:
        self.query, self.work = query, work
        network, sizes = query.network, None
        if network.weight_error:
            net = network.to(torch.float64)
            known = {i: Bounds(b.lower[[sample]], b.upper[[sample]]) for i, b in pre.items()}
            sizes = magnitudes(net, interval_bounds(net, input_box([query.property], net), known))
        self._encoding = ExactEncoding(network, phases_of(pre, sample), sizes)
        unstable = [(i, j) for i, phase in self._encoding.phases.items() for j in np.flatnonzero(phase == 0).tolist()]
        self.pairs = [(f"p_{i}_{j}", f"n_{i}_{j}") for i, j in unstable]
        names = [*(f"x_{i}" for i in range(network.input_size)), *(name for pair in self.pairs for name in pair), "gap"]
        self.declarations = "".join(f"(declare-const {name} Real)\n" for name in names)
        self._shared = ""
        self._unsafe: dict[Polytope, str] = {}

    def shared(self) -> str:
        """Return what is asserted for all polytopes: box, unstable neurons, and that the gap is not negative."""
        self._shared = self._shared or _asserted([*self._box(), *self._neurons(), "(>= gap 0.0)"])
        return self._shared

    def _box(self) -> Iterator[str]:
        box = self.query.property.box
        for i in range(box.size):
            lower, upper = box.bounds(i)
            yield f"({'>' if i in box.open_lower else '>='} x_{i} {_number(lower)})"
            yield f"({'<' if i in box.open_upper else '<='} x_{i} {_number(upper)})"

    def _neurons(self) -> Iterator[str]:
        for index, chosen, forms in self._encoding.neurons():
            for row, j in enumerate(chosen):
                if self.work.over():
                    raise OutOfTime
                p, n = f"p_{index}_{j}", f"n_{index}_{j}"
                terms, constant, scale = self._linear(forms, row)
                here, there = f"(* {_number(scale)} (- {p} {n}))", _sum([*terms, _number(constant)])
                if error := _error(forms, row) * scale:
                    yield f"(<= {here} (+ {there} {_number(error)}))"
                    yield f"(>= {here} (- {there} {_number(error)}))"
                else:
                    yield f"(= {here} {there})"
                yield from (f"(>= {p} 0.0)", f"(>= {n} 0.0)", f"(or (<= {p} 0.0) (<= {n} 0.0))")

    def _linear(self, forms: ExactForms, row: int) -> tuple[list[str], int, Fraction]:
        """Integer terms, an integer constant, and the factor that made integers of the form."""
        parts: list[tuple[str, int, int]] = []
        for index, term in forms.terms.items():
            used = np.flatnonzero(term.numbers[row])
            numbers = term.numbers[row][used]
            if index == 0:
                parts += [(f"x_{i}", v, term.exponent) for i, v in zip(used, numbers, strict=True)]
                continue
            slopes = self._encoding.slopes(index)
            parts += [(f"p_{index}_{j}", v, term.exponent) for j, v in zip(used, numbers, strict=True)]
            below = zip(used, -numbers * slopes.numbers[used], strict=True)
            parts += [(f"n_{index}_{j}", v, term.exponent + slopes.exponent) for j, v in below if v]
        constant = int(forms.constant.numbers[row])
        exponent = min([forms.constant.exponent, *(e for _, _, e in parts)])
        numbers = [int(number) << (e - exponent) for _, number, e in parts]
        constant <<= forms.constant.exponent - exponent
        divisor = math.gcd(constant, *numbers) or 1
        terms = [f"(* {_number(v // divisor)} {name})" for (name, _, _), v in zip(parts, numbers, strict=True)]
        return terms, constant // divisor, 1 / (Fraction(2) ** exponent * divisor)

    def unsafe(self, polytope: Polytope) -> str:
        """Return the assertions of a polytope's rows, each with ``gap``, which may be zero, on its smaller side."""
        if polytope and polytope not in self._unsafe:
            scales = [math.lcm(*(c.denominator for _, c in row.coefficients)) for row in polytope]
            rows = np.zeros((len(polytope), self.query.network.output_size), dtype=object)
            for r, (row, scale) in enumerate(zip(polytope, scales, strict=True)):
                for i, c in row.coefficients:
                    rows[r, i] = int(c * scale)
            forms, lines = self._encoding.pull_back(len(self.query.network.nodes) - 1, Dyadic(rows, 0)), []
            for r, (row, scale) in enumerate(zip(polytope, scales, strict=True)):
                terms, constant, factor = self._linear(forms, r)
                left = _sum([*terms, f"(* {_number(factor * scale)} gap)"])
                limit = (row.bound * scale + _error(forms, r)) * factor - constant
                lines.append(f"({'<' if row.strict else '<='} {left} {_number(limit)})")
            self._unsafe[polytope] = _asserted(lines)
        return self._unsafe.get(polytope, "")

    def point(self, model: Mapping[str, Fraction]) -> Witness:
        """Return the input that a model describes."""
        box = self.query.property.box
        return tuple(model.get(f"x_{i}", box.bounds(i)[0]) for i in range(box.size))


def _number(value: Fraction | int) -> str:
    value = Fraction(value)
    sign, top = ("(- ", ")") if value < 0 else ("", "")
    size = f"{abs(value.numerator)}.0"
    return sign + (size if value.denominator == 1 else f"(/ {size} {value.denominator}.0)") + top


def _error(forms: ExactForms, row: int) -> Fraction:
    """Return the error of a form, rounded up to a power of two, since z3 pays for every digit."""
    error = int(forms.error.numbers[row])
    return Fraction(2) ** (forms.error.exponent + error.bit_length()) if error else Fraction(0)


def _sum(terms: Sequence[str]) -> str:
    return "0.0" if not terms else terms[0] if len(terms) == 1 else f"(+ {' '.join(terms)})"


def _asserted(lines: Iterable[str]) -> str:
    return "".join(f"(assert {line})\n" for line in lines)
