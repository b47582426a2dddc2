"""``smt`` and ``smt-exact``: z3 over the exact rationals that weights are, complete for piecewise-linear networks.

``smt-exact`` asks z3 one formula for each polytope that bounds leave open; beyond ten unstable neurons that is slow.
``smt`` is a client of branch and bound: its trees split the phases of neurons and prove what bounds can prove, and a
sub-problem with few neurons left that nothing else closes is z3's to decide, exactly.

Each unstable neuron is two non-negative reals, its pre-activation being their difference, and the clause that one of
them is zero (the phases of Katz et al., Reluplex, arXiv 1702.01135). The dense equations never change during the
search then, only bounds of variables do, which is what a simplex core is good at. Bounds serve to leave out stable
neurons (``encoding``) and nothing else: the chords of the relaxation, or the intervals, as further constraints make
z3 several times slower, since it pays for every digit. Without bounds nothing in the formula rests on floating point.
Where stored weights are not the operator's own, the equations and the rows are loosened by what that may change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.bounds import Ascent, Bounds, input_box, interval_bounds
from verifiable_relu.dyadic import Dyadic
from verifiable_relu.errors import CallFailed, OutOfTime
from verifiable_relu.spec.property import Polytope, Query, Row, nearest
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.trust.exact import evaluable, evaluate_exact
from verifiable_relu.verifiers.attack import claim
from verifiable_relu.verifiers.bab.search import QuerySearch, Schedule, WitnessCheck
from verifiable_relu.verifiers.bab.slopes import Slopes
from verifiable_relu.verifiers.bab.tree import Branching, Decide
from verifiable_relu.verifiers.bab.verifier import BoundedBoxes, Decider
from verifiable_relu.verifiers.base import (
    PATIENCE,
    Outcome,
    Reason,
    TimeBudget,
    Trust,
    Verdict,
    Witness,
    attempted,
    fault,
)
from verifiable_relu.verifiers.batch import QueryBatch
from verifiable_relu.verifiers.encoding import Folding, Forms, Phases, Sizes, sizes_of
from verifiable_relu.verifiers.solvers.z3 import Z3, Checked, Z3Task

_TREES = Schedule(refinement=None, better=None)

_DEPTHS = tuple(Fraction(1, 1 << bits) for bits in (4, 8, 12, 16, 20, 24, 30))
"""How far beyond the boundary a counterexample is looked for, so that rounding it to floats leaves it one."""

STOPPED = ("timeout", "canceled")
"""The reasons that z3 gives where it was told to stop."""


FEW = 8
"""At most this many neurons without a phase has a sub-problem of ``smt`` that z3 decides."""


@dataclass(frozen=True, eq=False)
class Problem:
    """One query, ready for z3.

    Attributes:
        phases: by activation node.
        sizes: of values, where weights are known up to an error.
    """

    query: Query
    folding: Folding
    phases: Mapping[int, Phases]
    sizes: Sizes

    @staticmethod
    def of(query: Query, pre: Mapping[int, Bounds] | None = None, sample: int = 0) -> Problem:
        """From bounds of pre-activations of a batch of boxes; every neuron is unstable without."""
        network, folding = query.network, Folding(query.network)
        sizes: Sizes = {}
        if network.weight_error:
            net = network.to(torch.float64)
            known = None if pre is None else {i: Bounds(b.lower[[sample]], b.upper[[sample]]) for i, b in pre.items()}
            sizes = sizes_of(net, interval_bounds(net, input_box([query.property], net), known), 0)
        if pre is None:
            free = {i: np.full(network.nodes[i].size, np.inf) for i in network.activations}
            return Problem(query, folding, {i: Phases(-width, width) for i, width in free.items()}, sizes)
        return Problem(query, folding, {i: Phases.of(pre[i], sample) for i in network.activations}, sizes)


@dataclass(frozen=True)
class Smt(Decider):
    """Verification by z3.

    Attributes:
        whole: ask z3 about each whole polytope, as ``smt-exact`` does; otherwise about sub-problems, as ``smt`` does.
        bounds: use bounds to leave out stable neurons and decided polytopes. Their rounding is accounted for, so that
            *unsat* is then ``Trust.ROUNDED``; without them, z3 is asked about whole polytopes, and *unsat* is
            ``Trust.EXACT`` and much slower, where the stored weights are the operators' own.
        search: how the trees of ``smt`` are searched.
        slopes: the search for the slopes of each relaxation, over which trees are searched.
        intermediate: the search for bounds of the neurons that CROWN leaves unstable.
        seed: of the solver.
        process_memory: most bytes that the solver's process may have resident, its libraries included; None for half
            of the machine's memory.
    """

    whole: bool = False
    bounds: bool = True
    search: Branching = field(default_factory=Branching)
    slopes: Slopes = field(default_factory=Slopes, repr=False)
    intermediate: Ascent = Ascent(steps=6)  # noqa: RUF009 -- frozen
    seed: int = 0
    process_memory: int | None = None

    @property
    def name(self) -> str:  # type: ignore[override]
        return "smt-exact" if self.whole or not self.bounds else "smt"

    def start(self) -> None:
        Z3.start()

    def claims(self, batch: QueryBatch) -> Iterator[tuple[int, Outcome]]:
        """As ``Verifier.claims``."""
        if self.bounds:
            yield from super().claims(batch)
            return

        def answer(part: QueryBatch, work: TimeBudget) -> Sequence[Outcome]:
            (query,) = part.queries.values()
            return [self._asked(Problem.of(query), query.property.unsafe, work)]

        for number in batch.queries:
            self.start()
            yield number, attempted(batch.part([number]), self.name, answer)[0]

    def decide(self, bounds: BoundedBoxes, number: int, work: TimeBudget) -> Outcome:
        query = bounds.queries[number]
        problem = Problem.of(query, bounds.relaxation.pre, bounds.sample(number))
        rows = RowBatch.from_properties([query.property], query.network.output_size)
        lower = bounds.lower[number].tolist()
        if self.whole:
            order = sorted(
                (value, origin) for value, origin in zip(lower, rows.origin.tolist(), strict=True) if not value > 0
            )
            return self._asked(problem, [query.property.unsafe[i] for i in dict.fromkeys(i for _, i in order)], work)
        candidates = _Referee(self, problem, rows.origin.tolist(), work)
        with torch.no_grad():
            system = bounds.system(number, self.slopes, work)
            if system is None:
                return candidates.anywhere()
            found = QuerySearch(
                system, candidates, self.search, _TREES, replace(work, memory=work.memory // 2, processes=1)
            ).run()
        bounds.prove(number, found.lower)
        margin, nodes = bounds.margin(number), found.nodes
        told = f"{nodes} sub-problems, {candidates.decided} of them decided by z3"
        if (ended := candidates.found or candidates.referred) is not None:
            return replace(ended, detail="; ".join(filter(None, (ended.detail, told))), subproblems=nodes)
        if margin > 0:
            # What z3 decides has no other margin than a positive one.
            least = 0.0 if candidates.decided else margin
            proved = Outcome(Verdict.UNSAT, Reason.PROVED, self.name, bounds.trust, least, detail=told)
            return replace(proved, subproblems=nodes)
        detail = f"{found.ended.detail} after {told}"
        known = margin if margin > -np.inf else None
        return Outcome.unknown(found.ended.reason, self.name, detail, margin=known, subproblems=nodes)

    def _asked(self, problem: Problem, polytopes: Sequence[Polytope], work: TimeBudget) -> Outcome:
        """Go through polytopes; sat ends the search, unsat needs all of them excluded."""
        undecided: Outcome | None = None
        formula = _Formula(problem, work)
        shared = formula.text()
        for polytope in polytopes:
            outcome = self.reach(formula, shared + formula.unsafe(polytope), work)
            if outcome.verdict is Verdict.SAT or outcome.reason is Reason.TIMEOUT:
                return outcome
            if outcome.verdict is Verdict.UNKNOWN:
                undecided = undecided or outcome
        trust = Trust.ROUNDED if self.bounds or not evaluable(problem.query.network) else Trust.EXACT
        return undecided or Outcome(Verdict.UNSAT, Reason.PROVED, self.name, trust, 0.0)

    def reach(self, formula: _Formula, assertions: str, work: TimeBudget) -> Outcome:
        """Look for a point that satisfies the assertions; unsat only if z3 says that there is none."""
        seconds = work.left()
        if seconds <= 0:
            return Outcome.unknown(Reason.TIMEOUT, self.name, "the budget ran out")
        task = Z3Task(formula.declarations, assertions, self._options(), seconds)
        search = _Search(formula, self.name, work)
        try:
            Z3.call(task, seconds + PATIENCE, self.process_memory, search.judge)
        except (OutOfTime, MemoryError, CallFailed) as error:
            return search.outcome() or fault(error, self.name)
        assert search.first is not None
        return search.outcome() or self._read(search.first, work)

    def _options(self) -> dict[str, bool | int]:
        """z3's options, by its names."""
        return {"random_seed": self.seed, "ctrl_c": False}

    def _read(self, checked: Checked, work: TimeBudget) -> Outcome:
        """What z3's answer says where it is not *sat*."""
        if excludes(checked):
            return Outcome(Verdict.UNSAT, Reason.PROVED, self.name)
        if work.over() or checked.reason in STOPPED:
            return Outcome.unknown(Reason.TIMEOUT, self.name, "the budget ran out")
        return Outcome.unknown(Reason.ERROR, self.name, f"z3 gave up: {checked.reason}")


class _Referee(WitnessCheck):
    """Where points of a query are judged, and sub-problems decided.

    Args:
        method: that claims.
        problem: the query.
        origin: by polytope, as ``RowBatch`` counts them, the number of that of the property which it is a part of.
        work: what may be used.

    Attributes:
        decided: how many sub-problems z3 has excluded.
        referred: an exact counterexample that is none in floating point; None while there is none.
    """

    def __init__(self, method: Smt, problem: Problem, origin: Sequence[int], work: TimeBudget) -> None:
        super().__init__(problem.query, method.name)
        self.decided = 0
        self.referred: Outcome | None = None
        self._smt, self._problem, self._origin, self._work = method, problem, origin, work
        self._formula = _Formula(problem, work)
        self._shared: dict[int, str] = {}

    def _take(self, point: np.ndarray) -> None:
        super()._take(point)
        if self.found is not None and self.found.witness is not None:
            # A point on the boundary is a counterexample or not; float64 does not tell.
            self.found = exact_claim(self.query, self.found.witness, self._method)

    def decider(self, polytope: int, places: Tensor) -> Decide:
        return lambda split: self._without(polytope, places.tolist(), split.tolist())

    def _without(self, polytope: int, places: Sequence[Sequence[int]], split: Sequence[int]) -> bool | None:
        """Whether no point with these phases reaches a polytope; None where z3 is not asked, or does not know."""
        if sum(side == 0 for side in split) > FEW:
            return None
        origin = self._origin[polytope]
        if origin not in self._shared:
            self._shared[origin] = self._formula.text() + self._formula.unsafe(self.query.property.unsafe[origin])
        names = (f"{'n' if side > 0 else 'p'}_{i}_{j}" for (i, j), side in zip(places, split, strict=True) if side)
        fixed = "".join(f"(assert (<= {name} 0.0))\n" for name in names)
        outcome = self._smt.reach(self._formula, self._shared[origin] + fixed, self._work)
        if outcome.verdict is Verdict.UNSAT:
            self.decided += 1
            return True
        if outcome.verdict is Verdict.SAT:
            self.found = outcome
        elif outcome.reason is Reason.UNCONFIRMED:
            self.referred = outcome
        else:
            return None
        return False


def excludes(checked: Checked) -> bool:
    """Whether an answer of z3 means that the formula has no solution."""
    return checked.answer == "unsat"


def at_most(strict: bool) -> str:
    """The SMT-LIB operator of a row that is at most its bound, or below it."""
    return "<" if strict else "<="


class _Search:
    """What becomes of the answers of z3 about one polytope.

    The first model is an exact counterexample, which may be none after rounding to floating point. Then the same
    phases are asked for one that is further inside the unsafe set, less and less far.

    Attributes:
        first: the answer to the first check; None while there is none.
    """

    def __init__(self, formula: _Formula, method: str, work: TimeBudget) -> None:
        self.first: Checked | None = None
        self._formula, self._method, self._work = formula, method, work
        self._depths = iter(_DEPTHS)
        self._found: Outcome | None = None

    def judge(self, checked: Checked) -> str | None:
        """Take an answer; returns what is asked next, None for nothing."""
        first = self.first = self.first or checked
        if checked.answer == "sat":
            self._found = exact_claim(self._formula.query, self._formula.point(checked.model), self._method)
        if first.answer != "sat" or self._found is not None or self._work.over():
            return None
        depth = next(self._depths, None)
        return None if depth is None else self._formula.phases(first.model) + self._formula.inside(depth)

    def outcome(self) -> Outcome | None:
        """A counterexample, or that there is an exact one alone; None if z3 has found none."""
        if self.first is None or self.first.answer != "sat":
            return None
        if self._found is not None:
            return self._found
        query, witness = self._formula.query, self._formula.point(self.first.model)
        if evaluable(query.network) and query.property.margin(evaluate_exact(query.network, witness)) == 0:
            # A set that is only touched has no other points.
            return Outcome(Verdict.SAT, Reason.REFUTED, self._method, Trust.EXACT, 0.0, witness)
        detail = "the exact counterexample is none after rounding to floating point"
        return Outcome.unknown(Reason.UNCONFIRMED, self._method, detail, witness=witness)


def exact_claim(query: Query, point: Witness, method: str) -> Outcome | None:
    """A sat claim for the float point nearest to an exact one, judged exactly where that is possible."""
    near = np.array([value.numerator / value.denominator for value in point])
    network, prop = query.network, query.property
    if not evaluable(network):
        return claim(network, prop, near, method)
    witness = prop.box.witness(near)
    outputs = evaluate_exact(network, witness)
    if not (prop.box.contains(witness) and prop.violated(outputs)):
        return None
    margin = nearest(prop.margin(outputs))
    return Outcome(Verdict.SAT, Reason.REFUTED, method, Trust.EXACT, margin, witness)


def _number(value: Fraction | int) -> str:
    value = Fraction(value)
    sign, top = ("(- ", ")") if value < 0 else ("", "")
    size = f"{abs(value.numerator)}.0"
    return sign + (size if value.denominator == 1 else f"(/ {size} {value.denominator}.0)") + top


def _error(forms: Forms, row: int) -> Fraction:
    """By how much a form may be off, rounded up to a power of two, since z3 pays for every digit."""
    error = int(forms.error.numbers[row])
    return Fraction(2) ** (forms.error.exponent + error.bit_length()) if error else Fraction(0)


def _sum(terms: Sequence[str]) -> str:
    return "0.0" if not terms else terms[0] if len(terms) == 1 else f"(+ {' '.join(terms)})"


class _Formula:
    """The problem in SMT-LIB: reals ``x_i``, ``p_k_j`` and ``n_k_j`` (positive and negative part), and ``gap``."""

    def __init__(self, problem: Problem, work: TimeBudget) -> None:
        self.query = problem.query
        self._problem = problem
        self._work = work
        self._size = problem.query.network.input_size
        self._neurons = [
            (index, int(j)) for index, phase in problem.phases.items() for j in np.flatnonzero(phase.unstable)
        ]
        names = [f"x_{i}" for i in range(self._size)]
        names += [f"{part}_{index}_{j}" for index, j in self._neurons for part in "pn"]
        self.declarations = "".join(f"(declare-const {name} Real)\n" for name in (*names, "gap"))

    def text(self) -> str:
        """What is asserted for all polytopes: box, unstable neurons, and that the gap is not negative.

        Raises:
            OutOfTime: if the budget runs out while it is written.
        """
        asserted = [*self._box(), *self._hidden(), "(>= gap 0.0)"]
        return "".join(f"(assert {line})\n" for line in asserted)

    def _box(self) -> Iterator[str]:
        box = self._problem.query.property.box
        for i in range(self._size):
            lower, upper = box.bounds(i)
            yield f"({'>' if i in box.open_lower else '>='} x_{i} {_number(lower)})"
            yield f"({'<' if i in box.open_upper else '<='} x_{i} {_number(upper)})"

    def _hidden(self) -> Iterator[str]:
        """One equation, two signs and one clause for every unstable neuron."""
        for index, chosen, forms in self._problem.folding.neurons(self._problem.phases, self._problem.sizes):
            for row, j in enumerate(chosen):
                if self._work.over():
                    raise OutOfTime
                p, n = f"p_{index}_{j}", f"n_{index}_{j}"
                terms, constant, scale = self._linear(forms, row)
                here, there = f"(* {_number(scale)} (- {p} {n}))", _sum([*terms, _number(constant)])
                error = _error(forms, row) * scale
                if error:
                    yield f"(<= {here} (+ {there} {_number(error)}))"
                    yield f"(>= {here} (- {there} {_number(error)}))"
                else:
                    yield f"(= {here} {there})"
                yield f"(>= {p} 0.0)"
                yield f"(>= {n} 0.0)"
                yield f"(or (<= {p} 0.0) (<= {n} 0.0))"

    def _linear(self, forms: Forms, row: int) -> tuple[list[str], int, Fraction]:
        """Integer terms, an integer constant, and the factor that made integers of the form."""
        parts: list[tuple[str, int, int]] = []

        def add(name: str, number: int, exponent: int) -> None:
            if number:
                parts.append((name, int(number), exponent))

        for index, term in forms.terms.items():
            numbers = term.numbers[row]
            if index == 0:
                for i in np.flatnonzero(numbers):
                    add(f"x_{i}", numbers[i], term.exponent)
                continue
            slope = self._problem.folding.slopes(index)
            for j in np.flatnonzero(numbers):
                add(f"p_{index}_{j}", numbers[j], term.exponent)
                add(f"n_{index}_{j}", -numbers[j] * slope.numbers[j], term.exponent + slope.exponent)
        constant = int(forms.constant.numbers[row])
        exponent = min([forms.constant.exponent, *(e for _, _, e in parts)])
        numbers = [number << (e - exponent) for _, number, e in parts]
        constant <<= forms.constant.exponent - exponent
        divisor = math.gcd(constant, *numbers) or 1
        terms = [f"(* {_number(v // divisor)} {name})" for (name, _, _), v in zip(parts, numbers, strict=True)]
        return terms, constant // divisor, 1 / (Fraction(2) ** exponent * divisor)

    def unsafe(self, polytope: Polytope) -> str:
        """The rows, each with ``gap`` on its smaller side; a gap of zero leaves them as they are."""
        network = self._problem.query.network
        if not polytope:
            return ""
        rows = np.zeros((len(polytope), network.output_size), dtype=object)
        scales = [math.lcm(*(c.denominator for _, c in row.coefficients)) for row in polytope]
        for r, (row, scale) in enumerate(zip(polytope, scales, strict=True)):
            for i, c in row.coefficients:
                rows[r, i] = int(c * scale)
        last, problem = len(network.nodes) - 1, self._problem
        forms = problem.folding.pull_back(last, Dyadic(rows, 0), problem.phases, problem.sizes)
        parts = (self._row(forms, r, row, scale) for r, (row, scale) in enumerate(zip(polytope, scales, strict=True)))
        return "".join(f"(assert {part})\n" for part in parts)

    def _row(self, forms: Forms, r: int, row: Row, scale: int) -> str:
        terms, constant, factor = self._linear(forms, r)
        left = _sum([*terms, f"(* {_number(factor * scale)} gap)"])
        limit = (row.bound * scale + _error(forms, r)) * factor - constant
        return f"({at_most(row.strict)} {left} {_number(limit)})"

    def point(self, model: Mapping[str, Fraction]) -> Witness:
        """The input that a model describes."""
        box = self._problem.query.property.box
        return tuple(model.get(f"x_{i}", box.bounds(i)[0]) for i in range(self._size))

    def phases(self, model: Mapping[str, Fraction]) -> str:
        """Assertions that fix every unstable neuron to its side in a model."""
        zero = ((f"{'n' if model.get(f'p_{i}_{j}', 0) > 0 else 'p'}_{i}_{j}") for i, j in self._neurons)
        return "".join(f"(assert (<= {name} 0.0))\n" for name in zero)

    def inside(self, depth: Fraction) -> str:
        """The assertion that a point is at least so far inside the unsafe set, as ``gap`` measures it."""
        return f"(assert (>= gap {_number(depth)}))\n"
