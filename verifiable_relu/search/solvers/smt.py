"""``smt`` and ``smt-exact``: z3 over the exact rationals that weights are, complete for piecewise-linear networks.

``smt-exact`` asks z3 one formula for each polytope that bounds leave open; beyond ten unstable neurons that is slow.
``smt`` uses branch and bound: its trees split the phases of neurons and prove what bounds can prove, and a
sub-problem with few open neurons that nothing else closes is decided by z3, exactly.

Each unstable neuron is two non-negative reals, and one of them is zero (the phases of Katz et al., Reluplex, arXiv
1702.01135):

    pre-activation = positive − negative,   value = positive − slope·negative.

The dense equations never change during the search then, only bounds of variables do. Intervals serve to leave out
stable neurons (``encoding``) and nothing else: chords or intervals as further constraints make z3 several times slower.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.bounds.backward import Relaxation
from verifiable_relu.bounds.neuron_bounds import BASE
from verifiable_relu.dyadic import Dyadic
from verifiable_relu.errors import CallFailed, OutOfTime, counted
from verifiable_relu.ir.exact import evaluate_exact, is_evaluable
from verifiable_relu.search.bab.tree import Branching, Decide
from verifiable_relu.search.bab.verifier import QuerySearch, Schedule
from verifiable_relu.search.budget import OVERTIME_S, TimeBudget
from verifiable_relu.search.outcomes import Outcome, Reason, Trust, Verdict, Witness, exact_claim, fault
from verifiable_relu.search.question import BoundedQuery, CompleteMethod, all_excluded
from verifiable_relu.search.solvers.encoding import ExactEncoding, ExactForms, phases_of
from verifiable_relu.search.solvers.workers import Z3, Z3Answer, Z3Task
from verifiable_relu.search.witness import WitnessCheck
from verifiable_relu.spec.property import Polytope

_TREES = Schedule(refinement=None, improve=None)

# How far beyond the boundary a counterexample is looked for, so that rounding it to floats leaves it one
_DEPTHS = tuple(Fraction(1, 1 << bits) for bits in (4, 8, 12, 16, 20, 24, 30))


@dataclass(frozen=True)
class Smt(CompleteMethod):
    """Verification by z3."""

    whole: bool = False  # Ask z3 about each whole polytope, as ``smt-exact``, else about sub-problems, as ``smt``
    branching: Branching = field(default_factory=Branching)  # How the trees of ``smt`` are searched
    open_neurons: int = 8  # z3 decides sub-problems of ``smt`` with at most this number of neurons without a phase
    ascent_steps: int = 6
    process_memory: int | None = None  # Most bytes of the solver's process; None for half of the machine's

    @property
    def name(self) -> str:
        return "smt-exact" if self.whole else "smt"

    def start(self) -> None:
        Z3.start()

    def decide(self, query: BoundedQuery, budget: TimeBudget) -> Outcome:
        solver = _Solver(self, query, budget)
        if not self.whole:
            with torch.no_grad():
                return self._in_trees(solver)
        # The least excluded polytope comes first.
        order = sorted((value, part) for part, value in enumerate(query.bounds()) if not value > 0)
        numbers = dict.fromkeys(int(query.rows.origin[0, part]) for _, part in order)
        proved = Outcome(Verdict.UNSAT, Reason.PROVED, self.name, query.trust, 0.0)
        with torch.no_grad():
            return all_excluded((solver.reach(query.prop.unsafe[number]) for number in numbers), proved)

    def _in_trees(self, solver: _Solver) -> Outcome:
        query, budget, witness = solver.query, solver.budget, solver.witness
        reduced = query.reduced(budget.over)
        if reduced is None:
            return witness.anywhere()
        within = replace(budget, memory=budget.memory // 2, processes=1)
        found = QuerySearch(reduced, witness, self.branching, _TREES, within).run()
        told = f"{counted(found.nodes, 'sub-problem')}, {solver.decided} of them decided by z3"
        if (ended := witness.found or solver.missed) is not None:
            return replace(ended, detail="; ".join(filter(None, (ended.detail, told))), subproblems=found.nodes)
        outcome = found.outcome(query, self.name, told)
        # What z3 decides has no other margin than a positive one.
        return replace(outcome, margin=0.0) if outcome.verdict is Verdict.UNSAT and solver.decided else outcome


class _Solver:
    """Adapter of z3 for one query and its sub-problems."""

    def __init__(self, method: Smt, query: BoundedQuery, budget: TimeBudget) -> None:
        self.query, self.budget, self._method = query, budget, method
        self._formula = SmtFormula(query, budget)
        self.witness = WitnessCheck(query.network, query.prop, method.name, self._decider, exact_claim)
        self.decided = 0  # Sub-problems that z3 has excluded
        self.missed: Outcome | None = None  # An exact counterexample that is none in floating point

    def _decider(self, polytope: int, places: Tensor) -> Decide:
        """Return the decider of nodes of a polytope's tree (``witness.Decider``)."""
        every, unsafe = places.tolist(), self.query.prop.unsafe[int(self.query.rows.origin[0, polytope])]

        def decide(neurons: Tensor, segments: Tensor) -> bool | None:
            if len(every) - len(neurons) > self._method.open_neurons:
                return None
            split = zip(neurons.tolist(), segments.tolist(), strict=True)
            # Segment 3 is above the kink, and 2 below.
            zeros = (f"{'n' if side == 3 else 'p'}_{every[j][0]}_{every[j][1]}" for j, side in split)
            outcome = self.reach(unsafe, _asserted(f"(<= {name} 0.0)" for name in zeros))
            if outcome.verdict is Verdict.SAT:
                self.witness.found = outcome
            elif outcome.reason is Reason.UNCONFIRMED:
                self.missed = outcome
            elif outcome.verdict is Verdict.UNKNOWN:
                return None
            self.decided += outcome.verdict is Verdict.UNSAT
            return outcome.verdict is Verdict.UNSAT

        return decide

    def reach(self, polytope: Polytope, more: str = "") -> Outcome:
        """Search for a point that reaches a polytope and satisfies more assertions; *unsat* comes from z3 alone."""
        name, formula = self._method.name, self._formula
        timeout = Outcome.unknown(Reason.TIMEOUT, name, "the time limit was reached")
        if self.budget.over():
            return timeout
        deeper = [f"(assert (>= gap {_number(depth)}))\n" for depth in _DEPTHS]
        assertions = formula.shared + formula.unsafe(polytope) + more
        seconds = max(0.0, self.budget.left())
        task = Z3Task(formula.declarations, assertions, formula.pairs, deeper, seconds)
        try:
            found: Z3Answer = Z3.call(task, seconds + OVERTIME_S, self._method.process_memory)
        except (OutOfTime, MemoryError, CallFailed) as error:
            return fault(error, name)
        if found.answer == "unsat":
            return Outcome(Verdict.UNSAT, Reason.PROVED, name)
        if found.answer == "unknown":
            given_up = Outcome.unknown(Reason.ERROR, name, f"z3 gave up: {found.reason}")
            return timeout if self.budget.over() or found.reason in ("timeout", "canceled") else given_up
        network, prop, box = self.query.network, self.query.prop, self.query.prop.box
        points = [tuple(model.get(f"x_{i}", box.bounds(i)[0]) for i in range(box.size)) for model in found.models]
        for point in points:
            near = np.array([value.numerator / value.denominator for value in point])
            if (claimed := exact_claim(network, prop, near, name)) is not None:
                return claimed
        witness: Witness = points[0]
        if is_evaluable(network) and prop.margin(evaluate_exact(network, witness)) == 0:
            # A set that is only touched has no other points.
            return Outcome(Verdict.SAT, Reason.REFUTED, name, Trust.EXACT, 0.0, witness)
        detail = "the exact counterexample is none after rounding to floating point"
        return Outcome.unknown(Reason.UNCONFIRMED, name, detail, witness=witness)


class SmtFormula:
    """A query in SMT-LIB: reals ``x_i``, ``p_k_j`` and ``n_k_j`` (positive and negative part), and ``gap``.

    Attributes:
        declarations: of all reals.
        pairs: the positive and the negative part of each unstable neuron.
    """

    def __init__(self, query: BoundedQuery, budget: TimeBudget) -> None:
        network, intervals = query.without_maxima
        self._box, self._budget = query.prop.box, budget
        bounded = cache(lambda: Relaxation(network, query.box, known=intervals, dtype=BASE).advance().bounds)
        self._encoding = ExactEncoding(network, phases_of(network, intervals), lambda index: bounded()[index].interval)
        self.pairs = [(f"p_{i}_{j}", f"n_{i}_{j}") for i, j in self._encoding.places]
        parts = (pair[side] for side in range(2) for pair in self.pairs)
        self._names = [*(f"x_{i}" for i in range(network.input_size)), *parts]
        self.declarations = "".join(f"(declare-const {name} Real)\n" for name in [*self._names, "gap"])
        self._unsafe: dict[Polytope, str] = {}

    @cached_property
    def shared(self) -> str:
        """The assertions for all polytopes: box, unstable neurons, and that the gap is not negative."""
        return _asserted([*self._of_inputs(), *self._of_neurons(), "(>= gap 0.0)"])

    def unsafe(self, polytope: Polytope) -> str:
        """Return the assertions of a polytope's rows, each with ``gap``, which may be zero, on its smaller side."""
        if polytope and polytope not in self._unsafe:
            network, lines = self._encoding.network, []
            scales = [math.lcm(*(c.denominator for _, c in row.coefficients)) for row in polytope]
            rows = np.zeros((len(polytope), network.output_size), dtype=object)
            for r, (row, scale) in enumerate(zip(polytope, scales, strict=True)):
                for i, c in row.coefficients:
                    rows[r, i] = int(c * scale)
            forms = self._encoding.forms(len(network.ops) - 1, Dyadic(rows, 0))
            for r, (row, scale) in enumerate(zip(polytope, scales, strict=True)):
                terms, constant, factor = self._linear(forms, r)
                left = _sum([*terms, f"(* {_number(factor * scale)} gap)"])
                limit = (row.bound * scale + _error(forms, r)) * factor - constant
                lines.append(f"({'<' if row.strict else '<='} {left} {_number(limit)})")
            self._unsafe[polytope] = _asserted(lines)
        return self._unsafe.get(polytope, "")

    def _of_inputs(self) -> Iterator[str]:
        box = self._box
        for i in range(box.size):
            lower, upper = box.bounds(i)
            yield f"({'>' if i in box.open_lower else '>='} x_{i} {_number(lower)})"
            yield f"({'<' if i in box.open_upper else '<='} x_{i} {_number(upper)})"

    def _of_neurons(self) -> Iterator[str]:
        for start, forms in self._encoding.neurons():
            for row, (p, n) in enumerate(self.pairs[start : start + len(forms.constant.numbers)]):
                if self._budget.over():
                    raise OutOfTime
                terms, constant, scale = self._linear(forms, row)
                here, there = f"(* {_number(scale)} (- {p} {n}))", _sum([*terms, _number(constant)])
                if error := _error(forms, row) * scale:
                    yield f"(<= {here} (+ {there} {_number(error)}))"
                    yield f"(>= {here} (- {there} {_number(error)}))"
                else:
                    yield f"(= {here} {there})"
                yield from (f"(>= {p} 0.0)", f"(>= {n} 0.0)", f"(or (<= {p} 0.0) (<= {n} 0.0))")

    def _linear(self, forms: ExactForms, row: int) -> tuple[list[str], int, Fraction]:
        """Return terms with coprime integer coefficients, a constant, and the factor that made integers of a form."""
        slopes, all_, constant = self._encoding.slopes, forms.coefficients, forms.constant
        values = all_.numbers[row, self._encoding.network.input_size :]
        below = Dyadic(-values * slopes.numbers, all_.exponent + slopes.exponent)
        exponent = min(constant.exponent, below.exponent, all_.exponent)
        numbers = [*all_.at(exponent)[row].tolist(), *below.at(exponent).tolist()]
        last = int(constant.at(exponent)[row])
        common = math.gcd(last, *numbers) or 1
        terms = (f"(* {_number(c // common)} {name})" for name, c in zip(self._names, numbers, strict=True) if c)
        return list(terms), last // common, 1 / (Fraction(2) ** exponent * common)


def _error(forms: ExactForms, row: int) -> Fraction:
    """Return the error of a form, rounded up to a power of two, since z3 pays for every digit."""
    error = int(forms.error.numbers[row])
    return Fraction(2) ** (forms.error.exponent + error.bit_length()) if error else Fraction(0)


def _number(value: Fraction | int) -> str:
    value = Fraction(value)
    sign, top = ("(- ", ")") if value < 0 else ("", "")
    size = f"{abs(value.numerator)}.0"
    return sign + (size if value.denominator == 1 else f"(/ {size} {value.denominator}.0)") + top


def _sum(terms: list[str]) -> str:
    return "0.0" if not terms else terms[0] if len(terms) == 1 else f"(+ {' '.join(terms)})"


def _asserted(lines: Iterable[str]) -> str:
    return "".join(f"(assert {line})\n" for line in lines)
