"""Properties: an input box, and a set of outputs that must not be reached from the box.

A property describes the *unsafe* set, as VNN-LIB does, a union of polytopes {y : A·y ≤ b}. *sat* means that some x of
the box is mapped into it (x is a counterexample), *unsat* that no x is (the property is verified). The margin of y is

    margin(y) = min over polytopes of max over the polytope's rows of (A_i·y − b_i).

so that a lower bound > 0 of the margin over the box proves *unsat*. Numbers are exact rationals; bounds are computed
from ``Box.lower`` and ``Box.upper``, these rounded outward to float64, and counterexamples checked exactly.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from verifiable_relu.errors import InputError
from verifiable_relu.rounding import LARGEST, LARGEST_SINGLE, above, below, not_above

if TYPE_CHECKING:  # The reading and writing of property files must not wait for torch.
    from verifiable_relu.ir.network import Network


def round_down(value: Fraction) -> float:
    """Return the largest float64 that is not above ``value``; raises InputError beyond the range of float64."""
    try:
        return not_above(value)
    except OverflowError:
        raise InputError("a number beyond the range of float64") from None


def round_up(value: Fraction) -> float:
    """Return the smallest float64 that is not below ``value``; raises like :func:`round_down`."""
    return -round_down(-value)


def nearest(value: Fraction | float) -> float:
    """Return the float64 number nearest to a number, ±the largest one beyond the range of float64."""
    try:
        return float(value)
    except OverflowError:
        return LARGEST if value > 0 else -LARGEST


_MOST_TEXTS = 1 << 14  # bounds of balls with the same radii that are kept as text, about 100 bytes each


@dataclass(frozen=True, eq=False)
class BallEnd:
    """The exact lower bounds of L∞ balls with the same radii; with ``sign`` −1 their negated upper bounds.

    An upper bound min(x + ε, h) is −max(−x − ε, −h), the negated lower bound of the ball around −x. ``texts`` has
    bounds as text by center and index of the radius, since images have few different numbers.
    """

    radii: Sequence[Fraction]
    least: Fraction
    decimals: int | None
    sign: int
    texts: dict[tuple[float, int], str] = field(default_factory=dict)

    def ratio(self, center: float, level: int) -> tuple[int, int]:
        """Return numerator and denominator of max(sign·center − radius ``level``, least), in no lowest terms.

        The difference is rounded down to ``decimals`` if they are given.
        """
        (a, b), (p, q), (c, d) = (each.as_integer_ratio() for each in (center, self.radii[level], self.least))
        top, bottom = self.sign * a * q - p * b, b * q
        if self.decimals is not None:
            scale = 10**self.decimals
            top, bottom = top * scale // bottom, scale
        return (c, d) if top * d < c * bottom else (top, bottom)

    def text(self, center: float, level: int) -> str:
        """Return the bound of a variable with this center as a ``Fraction`` is written."""
        found = self.texts.get((center, level))
        if found is None:
            top, bottom = self.ratio(center, level)
            common = math.gcd(top, bottom)
            found = f"Fraction({self.sign * top // common}, {bottom // common})"
            if len(self.texts) < _MOST_TEXTS:
                self.texts[center, level] = found
        return found


@dataclass(frozen=True, eq=False)
class BallBounds(Mapping[int, Fraction]):
    """The exact bounds on one side of an L∞ ball that float64 does not represent, by variable, computed when asked for.

    The variables are those where ``inexact`` (n,) is True; ``centers`` and ``level`` (n,) are what ``end`` takes.
    """

    end: BallEnd
    centers: np.ndarray
    level: np.ndarray
    inexact: np.ndarray

    def _pairs(self) -> Iterator[tuple[int, float, int]]:
        where = list(self)
        return zip(where, self.centers[where].tolist(), self.level[where].tolist(), strict=True)

    @cached_property
    def found(self) -> dict[int, Fraction]:
        """The bounds by variable, in the order of the variables."""
        return {i: self.end.sign * Fraction(*self.end.ratio(center, level)) for i, center, level in self._pairs()}

    def __repr__(self) -> str:
        """Return the pairs of variable and bound as the text of a list, which ``Property.digest`` hashes."""
        text = self.end.text
        return f"[{', '.join([f'({i}, {text(center, level)})' for i, center, level in self._pairs()])}]"

    def __getitem__(self, variable: int) -> Fraction:
        return self.found[variable]

    def __iter__(self) -> Iterator[int]:
        return iter(np.flatnonzero(self.inexact).tolist())

    def __len__(self) -> int:
        return int(np.count_nonzero(self.inexact))


@dataclass(frozen=True, eq=False)
class Box:
    """A box {x : lower ≤ x ≤ upper} of the input variables in row-major order; where lower = upper it is one point.

    Args:
        lower: float64 (n,), the exact lower bounds rounded down.
        upper: float64 (n,), the exact upper bounds rounded up.
        exact_lower: the exact lower bounds that float64 does not represent, by variable.
        exact_upper: the exact upper bounds that float64 does not represent, by variable.
        open_lower: the variables whose lower bound is strict (<). Bounds are computed over the closed box, which
            contains the open one; only a counterexample must satisfy the strict inequality.
        open_upper: the variables whose upper bound is strict.

    Raises:
        InputError: if a bound is not finite or the box is empty; the error names the variable.
    """

    lower: np.ndarray
    upper: np.ndarray
    exact_lower: Mapping[int, Fraction] = field(default_factory=dict)
    exact_upper: Mapping[int, Fraction] = field(default_factory=dict)
    open_lower: frozenset[int] = frozenset()
    open_upper: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.lower.shape != self.upper.shape or self.lower.ndim != 1:
            raise InputError(f"the bounds of a box have the shapes {self.lower.shape} and {self.upper.shape}")
        bad = np.flatnonzero(~(np.isfinite(self.lower) & np.isfinite(self.upper)))
        if bad.size:
            raise InputError(f"a bound of X_{bad[0]} is infinite or NaN")
        # Rounded outward, a lower bound that exceeds the upper one by less than a float64 step looks consistent.
        with np.errstate(over="ignore"):
            smaller = below(self.upper)
        certain = self.lower <= self.upper
        certain &= all(isinstance(each, dict) for each in (self.exact_lower, self.exact_upper))
        if certain.any():
            certain[list({*self.exact_lower, *self.exact_upper, *self.open_lower, *self.open_upper})] = False
        for i in np.flatnonzero((self.lower >= smaller) & ~certain):
            lower, upper = self.bounds(int(i))
            if lower > upper or (lower == upper and (i in self.open_lower or i in self.open_upper)):
                said = f"X_{i} has lower bound {float(lower)!r} not below upper bound {float(upper)!r}"
                raise InputError(f"the box is empty: {said}")

    @classmethod
    def exact(
        cls,
        lower: Sequence[Fraction],
        upper: Sequence[Fraction],
        open_lower: Iterable[int] = (),
        open_upper: Iterable[int] = (),
    ) -> Box:
        """Return the box with these exact bounds; ``open_lower`` and ``open_upper`` as for the class."""
        low, high = np.array([*map(round_down, lower)], np.float64), np.array([*map(round_up, upper)], np.float64)
        below, above = ({i: v for i, v in enumerate(each) if v != f[i]} for each, f in ((lower, low), (upper, high)))
        return cls(low, high, below, above, frozenset(open_lower), frozenset(open_upper))

    @property
    def size(self) -> int:
        return len(self.lower)

    def bounds(self, i: int) -> tuple[Fraction, Fraction]:
        """Return the exact lower and upper bound of variable i."""
        lower, upper = self.exact_lower.get(i), self.exact_upper.get(i)
        lower = Fraction(float(self.lower[i])) if lower is None else lower
        return lower, Fraction(float(self.upper[i])) if upper is None else upper

    def contains(self, x: Sequence[Fraction]) -> bool:
        """Return True if an exact point lies in the box and satisfies its strict bounds strictly."""
        # Floats are compared as floats; what remains, and strict bounds, one by one.
        floats = [nearest(value) for value in x]
        pairs = enumerate(zip(floats, x, strict=True))
        others = {i for i, (a, b) in pairs if a.as_integer_ratio() != b.as_integer_ratio()}
        missed = np.logical_or(*self._missed(np.array(floats)))
        missed[list(others)] = False
        for i in () if missed.any() else others | self.open_lower | self.open_upper:
            lower, upper = self.bounds(i)
            missed[i] |= x[i] <= lower if i in self.open_lower else x[i] < lower
            missed[i] |= x[i] >= upper if i in self.open_upper else x[i] > upper
        return not missed.any()

    def witness(self, x: np.ndarray) -> tuple[Fraction, ...]:
        """Return an exact point of the closed box near a float point x of shape (n,).

        A coordinate is a float32 number within its bounds where there is one near x, so that a replay in float32 takes
        the very same point, and otherwise the nearest exact bound. NaN in x stands for the lower bound.
        """
        given = np.asarray(x, dtype=np.float64).reshape(-1)
        x64 = np.clip(np.where(np.isnan(given), self.lower, given), self.lower, self.upper)
        # A coordinate beyond float32's range becomes the largest float32 number, and then the box's bound if need be.
        near = np.clip(x64, -LARGEST_SINGLE, LARGEST_SINGLE).astype(np.float32)
        low, high = (missed & (np.abs(near) < LARGEST_SINGLE) for missed in self._missed(near.astype(np.float64)))
        # The neighbours of numbers that stay may lie beyond float32's range.
        with np.errstate(over="ignore"):
            near = np.where(low, above(near), np.where(high & ~low, below(near), near))
        point = [Fraction(value) for value in near.tolist()]
        for i in np.flatnonzero(np.logical_or(*self._missed(near.astype(np.float64)))).tolist():
            lower, upper = self.bounds(i)
            point[i] = min(max(point[i], lower), upper)
        return tuple(point)

    def _missed(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where floats (n,) are below the exact lower bounds, and where above the exact upper ones."""
        # The float64 bounds are the exact ones rounded outward: a float is at such a bound, or on the exact one's side.
        low, high = x < self.lower, x > self.upper
        for missed, ends, bound in ((low, self.exact_lower, self.lower), (high, self.exact_upper, self.upper)):
            where = list(ends)
            missed[where] |= x[where] == bound[where]
        return low, high


@dataclass(frozen=True, eq=False)
class Ball:
    """An L1 or L2 ball {x : ‖x − center‖ ≤ radius}: a center, float64 (n,), a radius ≥ 0 and the norm's order."""

    center: np.ndarray
    radius: Fraction
    order: int

    def contains(self, x: Sequence[Fraction]) -> bool:
        """Return True if an exact point lies in the ball."""
        apart = (abs(value - Fraction(float(c))) for value, c in zip(x, self.center, strict=True))
        return sum((d**self.order for d in apart), Fraction(0)) <= self.radius**self.order


@dataclass(frozen=True)
class Row:
    """One exact linear constraint Σ coefficient·y_i ≤ bound on the outputs, with < in place of ≤ if ``strict``.

    ``coefficients`` has pairs of output index and coefficient; indices ascend, and no coefficient is zero.
    """

    coefficients: tuple[tuple[int, Fraction], ...]
    bound: Fraction
    strict: bool = False

    def canonical(self) -> Row:
        """Return the constraint with coprime integer coefficients."""
        if not self.coefficients:
            return self
        values = [c for _, c in self.coefficients]
        scale = Fraction(math.lcm(*(c.denominator for c in values)), math.gcd(*(c.numerator for c in values)))
        return Row(tuple((i, c * scale) for i, c in self.coefficients), self.bound * scale, self.strict)

    def negated(self) -> Row:
        """Return the constraint that holds exactly where this one does not."""
        return Row(tuple((i, -c) for i, c in self.coefficients), -self.bound, not self.strict)

    @cached_property
    def text(self) -> str:
        """The canonical constraint as text, once for all properties and polytopes that share the row."""
        return repr(self.canonical())

    def slack(self, y: Sequence[Fraction]) -> Fraction:
        """Return Σ coefficient·y_i − bound at an exact output y: ≤ 0 where the constraint holds (< 0 if strict)."""
        return sum((c * y[i] for i, c in self.coefficients), Fraction(0)) - self.bound


Polytope = tuple[Row, ...]
"""A polytope as the conjunction of its rows; the empty tuple is the whole space."""


@dataclass(frozen=True, eq=False)
class Property:
    """An input box and the unsafe set of outputs, a union of polytopes.

    Args:
        box: the set of inputs.
        unsafe: the polytopes of the union; the empty tuple is the empty set, which no input reaches.
        name: the name in messages and tables.
        ball: if given, a counterexample must lie in the box and in this ball (``admits``); a proof for the box holds.
        partial: why the box is only a part of what is asked about, such as an input without a bound; empty where it is
            all. A counterexample in the part is one; that there is none there proves nothing.
    """

    box: Box
    unsafe: tuple[Polytope, ...]
    name: str = "property"
    ball: Ball | None = None
    partial: str = ""

    def admits(self, x: Sequence[Fraction]) -> bool:
        """Return True if an exact point is one of the inputs asked about."""
        return self.box.contains(x) and (self.ball is None or self.ball.contains(x))

    @cached_property
    def output_size(self) -> int:
        """One more than the largest output index in a row; 0 without rows."""
        return 1 + max((i for polytope in self.unsafe for row in polytope for i, _ in row.coefficients), default=-1)

    @property
    def only_compares(self) -> bool:
        """True if every row of the unsafe set compares one output with another, Y_i ≤ Y_j or Y_i < Y_j."""
        rows = ((row.bound, [c for _, c in row.coefficients]) for polytope in self.unsafe for row in polytope)
        return all(not bound and len(values) == 2 and not sum(values) for bound, values in rows)

    def violated(self, y: Sequence[Fraction]) -> bool:
        """Return True if an exact output y lies in the unsafe set, and satisfies strict rows strictly."""
        polytopes = (((row.slack(y), row.strict) for row in polytope) for polytope in self.unsafe)
        return any(all(slack < 0 if strict else slack <= 0 for slack, strict in rows) for rows in polytopes)

    def margin(self, y: Sequence[Fraction]) -> Fraction | float:
        """Return the margin of an exact output y: +inf if the unsafe set is empty, −inf if it is the whole space."""
        largest = (max((row.slack(y) for row in polytope), default=-math.inf) for polytope in self.unsafe)
        return min(largest, default=math.inf)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the exact box, ball and unsafe set; a row times a positive number counts as the same row."""
        # Adding 0.0 turns −0.0 into 0.0.
        state = hashlib.sha256((self.box.lower + 0.0).tobytes() + (self.box.upper + 0.0).tobytes())
        ends = (self.box.exact_lower, self.box.exact_upper)
        texts = [repr(each if isinstance(each, BallBounds) else sorted(each.items())) for each in ends]
        state.update(
            f"({', '.join(texts)})({sorted(self.box.open_lower)!r}, {sorted(self.box.open_upper)!r}, ".encode()
        )
        # Rows as a tuple of tuples is written, with the rows' own cached texts.
        polytopes = [f"({', '.join([row.text for row in each])}{',' * (len(each) == 1)})" for each in self.unsafe]
        state.update(f"({', '.join(polytopes)}{',' * (len(polytopes) == 1)}))".encode())
        if self.ball is not None:
            state.update((self.ball.center + 0.0).tobytes() + repr((self.ball.radius, self.ball.order)).encode())
        state.update(self.partial.encode())
        return state.hexdigest()


@dataclass(frozen=True, eq=False)
class Query:
    """A network and a property: the question whether some input of the property's box reaches its unsafe set.

    Raises:
        InputError: if the property has another number of inputs than the network, or names an output beyond its last.
    """

    network: Network
    property: Property

    def __post_init__(self) -> None:
        inputs, outputs, network = self.property.box.size, self.property.output_size, self.network
        has = f"but the network '{network.name}' has"
        if inputs != network.input_size:
            raise InputError(f"the property has {inputs} inputs, {has} {network.input_size}")
        if outputs > network.output_size:
            raise InputError(f"the property names Y_{outputs - 1}, {has} {network.output_size} outputs")

    @cached_property
    def without_head(self) -> Query:
        """The question of the network without a head that keeps the order of its outputs, or the query itself.

        It is the query itself, too, where what runs the network rounds, which may make a tie of a difference.
        """
        if not self.property.only_compares or self.network.arithmetic != "real":
            return self
        # Imported here: property files must be read without torch.
        from verifiable_relu.ir.transform import without_head

        network = without_head(self.network)
        return self if network is None else Query(network, self.property)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over network and property, the key of caches and records; equal digests mean equal answers."""
        return hashlib.sha256((self.network.digest + self.property.digest).encode()).hexdigest()
