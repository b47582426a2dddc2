"""Properties: an input box, and a set of outputs that must not be reached from the box.

The whole project has one sign convention: a property describes the *unsafe* set, as VNN-LIB does. The unsafe set is a
union of polytopes {y : A·y ≤ b}. *sat* means that some x of the box is mapped into the unsafe set (x is a
counterexample), *unsat* that no x is (the property is verified). The margin of an output y is

    margin(y) = min over polytopes of max over the polytope's rows of (A_i·y − b_i).

An output with margin > 0 is outside the unsafe set, so that a lower bound > 0 of the margin over the box proves
*unsat*.

Numbers in properties are exact rationals. ``Box.lower`` and ``Box.upper`` are these rounded outward to float64, from
which bounds are computed; the exact values are kept beside them for the check of counterexamples.
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
    from verifiable_relu.network.graph import Network


def round_down(value: Fraction) -> float:
    """The largest float64 that is not above ``value``.

    Raises:
        InputError: if ``value`` is beyond the range of float64.
    """
    try:
        return not_above(value)
    except OverflowError:
        raise InputError("a number beyond the range of float64") from None


def round_up(value: Fraction) -> float:
    """The smallest float64 that is not below ``value``; raises like :func:`round_down`."""
    return -round_down(-value)


def nearest(value: Fraction | float) -> float:
    """The float64 number nearest to a rational, ±the largest one beyond the range of float64; a float unchanged."""
    try:
        return float(value)
    except OverflowError:
        return LARGEST if value > 0 else -LARGEST


def lower_end(center: float, radius: Fraction, least: Fraction, decimals: int | None) -> Fraction:
    """The exact max(center − radius, least), with the difference rounded down to ``decimals`` if they are given."""
    end = Fraction(center) - radius
    return max(end if decimals is None else Fraction(math.floor(end * 10**decimals), 10**decimals), least)


_MOST_TEXTS = 1 << 14
"""The most bounds that are kept as text, about 100 bytes each, for balls with the same radii."""


@dataclass(frozen=True, eq=False)
class BallBounds(Mapping[int, Fraction]):
    """The exact lower bounds of an L∞ ball that float64 does not represent, by variable, computed when asked for.

    Attributes:
        centers: float64 (n,).
        inexact: bool (n,), the variables in question.
        radii: the different radii.
        level: (n,), the index of each variable's radius.
        least: the least valid value.
        decimals: as for ``lower_end``.
        sign: −1 for the ball's upper bounds: the negated lower bounds of the ball around −centers.
        texts: bounds as text, by center and level: what balls with the same radii have in common, since images have few
            different numbers. None is added once there are ``_MOST_TEXTS``.
    """

    centers: np.ndarray
    inexact: np.ndarray
    radii: Sequence[Fraction]
    level: np.ndarray
    least: Fraction
    decimals: int | None = None
    sign: int = 1
    texts: dict[tuple[float, int], str] = field(default_factory=dict)

    def _pairs(self) -> tuple[list[int], list[tuple[float, int]]]:
        """Return the variables, and center and level of each."""
        where = np.flatnonzero(self.inexact)
        pairs = zip((self.sign * self.centers[where]).tolist(), self.level[where].tolist(), strict=True)
        return where.tolist(), list(pairs)

    @cached_property
    def found(self) -> dict[int, Fraction]:
        """The bounds by variable, in the order of the variables."""
        where, pairs = self._pairs()
        known = {(x, i): self.sign * lower_end(x, self.radii[i], self.least, self.decimals) for x, i in set(pairs)}
        return {variable: known[pair] for variable, pair in zip(where, pairs, strict=True)}

    def __repr__(self) -> str:
        """The pairs of variable and bound, as a list of them is written: text that ``Property.digest`` hashes."""
        # Where x − ε is not the bound itself, as after rounding to decimals, the fractions are written one by one.
        if self.decimals is not None or Fraction(nearest(self.least)) != self.least:
            return repr(list(self.found.items()))
        where, pairs = self._pairs()
        texts = self.texts if len(self.texts) < _MOST_TEXTS else dict(self.texts)
        for x, i in set(pairs) - texts.keys():
            (a, b), (p, q) = x.as_integer_ratio(), self.radii[i].as_integer_ratio()
            top, bottom = a * q - p * b, b * q
            common = math.gcd(top, bottom)
            texts[x, i] = f"Fraction({self.sign * (top // common)}, {bottom // common})"
        return f"[{', '.join([f'({i}, {texts[pair]})' for i, pair in zip(where, pairs, strict=True)])}]"

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
        # Rounded outward, bounds of which the lower exceeds the upper by less than a float64 step look consistent.
        with np.errstate(over="ignore"):
            smaller = below(self.upper)
        certain = self.lower <= self.upper
        ends = (self.exact_lower, self.exact_upper)
        certain &= all(isinstance(each, dict) for each in ends)
        if certain.any():
            certain[list({*self.exact_lower, *self.exact_upper, *self.open_lower, *self.open_upper})] = False
        for i in np.flatnonzero((self.lower >= smaller) & ~certain):
            lower, upper = self.bounds(int(i))
            if lower > upper or (lower == upper and (i in self.open_lower or i in self.open_upper)):
                raise InputError(
                    f"the box is empty: X_{i} has lower bound {float(lower)!r} not below upper bound {float(upper)!r}"
                )

    @classmethod
    def exact(
        cls,
        lower: Sequence[Fraction],
        upper: Sequence[Fraction],
        open_lower: Iterable[int] = (),
        open_upper: Iterable[int] = (),
    ) -> Box:
        """The box with these exact rational bounds; ``open_lower`` and ``open_upper`` as for the class."""
        low = np.array([round_down(v) for v in lower], dtype=np.float64)
        high = np.array([round_up(v) for v in upper], dtype=np.float64)
        below, above = ({i: v for i, v in enumerate(each) if v != f[i]} for each, f in ((lower, low), (upper, high)))
        return cls(low, high, below, above, frozenset(open_lower), frozenset(open_upper))

    @property
    def size(self) -> int:
        """The number of input variables."""
        return len(self.lower)

    def bounds(self, i: int) -> tuple[Fraction, Fraction]:
        """The exact lower and upper bound of variable i."""
        lower = self.exact_lower.get(i)
        upper = self.exact_upper.get(i)
        return (
            Fraction(float(self.lower[i])) if lower is None else lower,
            Fraction(float(self.upper[i])) if upper is None else upper,
        )

    def contains(self, x: Sequence[Fraction]) -> bool:
        """Whether an exact point lies in the box and satisfies its strict bounds strictly."""
        # Floats are compared as floats; what remains, and strict bounds, one by one.
        floats = [nearest(value) for value in x]
        others = {
            i for i, (a, b) in enumerate(zip(floats, x, strict=True)) if a.as_integer_ratio() != b.as_integer_ratio()
        }
        missed = np.logical_or(*self._missed(np.array(floats)))
        missed[list(others)] = False
        if missed.any():
            return False
        for i in others | self.open_lower | self.open_upper:
            value = x[i]
            lower, upper = self.bounds(i)
            if not lower <= value <= upper:
                return False
            if (i in self.open_lower and value == lower) or (i in self.open_upper and value == upper):
                return False
        return True

    def witness(self, x: np.ndarray) -> tuple[Fraction, ...]:
        """An exact point of the closed box near a float point x of shape (n,).

        A coordinate is a float32 number within its bounds where there is one near x, so that a replay in float32 takes
        the very same point, and otherwise the nearest exact bound. NaN in x stands for the lower bound.
        """
        given = np.asarray(x, dtype=np.float64).reshape(-1)
        x64 = np.clip(np.where(np.isnan(given), self.lower, given), self.lower, self.upper)
        # A coordinate beyond float32's range becomes the largest float32 number, and then the box's bound if need be.
        near = np.clip(x64, -LARGEST_SINGLE, LARGEST_SINGLE).astype(np.float32)
        low, high = self._missed(near.astype(np.float64))
        movable = np.abs(near) < LARGEST_SINGLE
        # The neighbours of numbers that stay may lie beyond float32's range.
        with np.errstate(over="ignore"):
            near = np.where(movable & low, above(near), np.where(movable & high & ~low, below(near), near))
        point = [Fraction(value) for value in near.tolist()]
        for i in np.flatnonzero(np.logical_or(*self._missed(near.astype(np.float64)))).tolist():
            lower, upper = self.bounds(i)
            point[i] = min(max(point[i], lower), upper)
        return tuple(point)

    def _missed(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where floats (n,) are below the exact lower bounds, and where they are above the exact upper bounds."""
        # The float64 bounds are the exact ones rounded outward: a float is at such a bound, or on the exact one's side.
        low, high = x < self.lower, x > self.upper
        for missed, ends, bound in ((low, self.exact_lower, self.lower), (high, self.exact_upper, self.upper)):
            if isinstance(ends, BallBounds):
                missed |= ends.inexact & (x == bound)
            else:
                for i in ends:
                    missed[i] |= x[i] == bound[i]
        return low, high


@dataclass(frozen=True, eq=False)
class Ball:
    """An L1 or L2 ball {x : ‖x − center‖ ≤ radius} of the input variables.

    Attributes:
        center: float64 (n,), taken exactly.
        radius: ≥ 0.
        order: 1 or 2, the order of the norm.
    """

    center: np.ndarray
    radius: Fraction
    order: int

    def contains(self, x: Sequence[Fraction]) -> bool:
        """Whether an exact point lies in the ball."""
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
        """The same constraint with coprime integer coefficients."""
        if not self.coefficients:
            return self
        values = [c for _, c in self.coefficients]
        scale = Fraction(math.lcm(*(c.denominator for c in values)), math.gcd(*(c.numerator for c in values)))
        return Row(tuple((i, c * scale) for i, c in self.coefficients), self.bound * scale, self.strict)

    def negated(self) -> Row:
        """The constraint that holds exactly where this one does not."""
        return Row(tuple((i, -c) for i, c in self.coefficients), -self.bound, not self.strict)

    @cached_property
    def text(self) -> str:
        """The canonical constraint as text, once for all properties and polytopes that share the row."""
        return repr(self.canonical())

    def slack(self, y: Sequence[Fraction]) -> Fraction:
        """The value Σ coefficient·y_i − bound at an exact output y: ≤ 0 where the constraint holds (< 0 if strict)."""
        return sum((c * y[i] for i, c in self.coefficients), Fraction(0)) - self.bound

    def holds(self, y: Sequence[Fraction]) -> bool:
        """Whether an exact output y satisfies the constraint."""
        slack = self.slack(y)
        return slack < 0 if self.strict else slack <= 0


Polytope = tuple[Row, ...]
"""A polytope as the conjunction of its rows; the empty tuple is the whole space."""


@dataclass(frozen=True, eq=False)
class Property:
    """An input box and the unsafe set of outputs, a union of polytopes.

    Args:
        box: the set of inputs; with a ball, a box that contains all inputs asked about.
        unsafe: the polytopes of the union; the empty tuple is the empty set, which no input reaches.
        name: the name in messages and tables.
        ball: if given, only the inputs that lie in the box and in this ball are asked about. A proof for the box holds
            for them; a counterexample must lie in both (``admits``).
        partial: why the box is only a part of what is asked about, such as an input without a bound; empty where it is
            all. A counterexample in the part is one; that there is none there proves nothing.
    """

    box: Box
    unsafe: tuple[Polytope, ...]
    name: str = "property"
    ball: Ball | None = None
    partial: str = ""

    def admits(self, x: Sequence[Fraction]) -> bool:
        """Whether an exact point is one of the inputs asked about."""
        return self.box.contains(x) and (self.ball is None or self.ball.contains(x))

    @cached_property
    def output_size(self) -> int:
        """One more than the largest output index in a row; 0 without rows."""
        return 1 + max((i for polytope in self.unsafe for row in polytope for i, _ in row.coefficients), default=-1)

    @property
    def only_compares(self) -> bool:
        """Whether every row of the unsafe set compares one output with another, Y_i ≤ Y_j or Y_i < Y_j."""
        rows = (row for polytope in self.unsafe for row in polytope)
        return all(
            not row.bound and len(row.coefficients) == 2 and not sum(c for _, c in row.coefficients) for row in rows
        )

    def violated(self, y: Sequence[Fraction]) -> bool:
        """Whether an exact output y lies in the unsafe set, and satisfies strict rows strictly."""
        return any(all(row.holds(y) for row in polytope) for polytope in self.unsafe)

    def margin(self, y: Sequence[Fraction]) -> Fraction | float:
        """The margin of an exact output y: +inf if the unsafe set is empty, −inf if it is the whole space."""
        return min(
            (max((row.slack(y) for row in polytope), default=-math.inf) for polytope in self.unsafe),
            default=math.inf,
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the exact box, ball and unsafe set; a row times a positive number counts as the same row."""
        # Adding 0.0 turns −0.0 into 0.0.
        state = hashlib.sha256((self.box.lower + 0.0).tobytes() + (self.box.upper + 0.0).tobytes())
        lower, upper = (
            ends if isinstance(ends, BallBounds) else sorted(ends.items())
            for ends in (self.box.exact_lower, self.box.exact_upper)
        )
        state.update(repr((lower, upper)).encode())
        # The rows as a tuple of them is written.
        state.update(f"({sorted(self.box.open_lower)!r}, {sorted(self.box.open_upper)!r}, (".encode())
        for number, polytope in enumerate(self.unsafe):
            rows = [row.text for row in polytope]
            state.update(f"{', ' * (number > 0)}({', '.join(rows)}{',' * (len(rows) == 1)})".encode())
        state.update(f"{',' * (len(self.unsafe) == 1)}))".encode())
        if self.ball is not None:
            state.update((self.ball.center + 0.0).tobytes() + repr((self.ball.radius, self.ball.order)).encode())
        state.update(self.partial.encode())
        return state.hexdigest()


@dataclass(frozen=True, eq=False)
class Query:
    """A network and a property, which ask: does some input of the property's box reach its unsafe set?

    Raises:
        InputError: if the property has another number of inputs than the network, or names an output beyond its last.
    """

    network: Network
    property: Property

    def __post_init__(self) -> None:
        inputs, outputs = self.property.box.size, self.property.output_size
        if inputs != self.network.input_size:
            raise InputError(
                f"the property has {inputs} inputs, but the network '{self.network.name}' has {self.network.input_size}"
            )
        if outputs > self.network.output_size:
            raise InputError(
                f"the property names Y_{outputs - 1}, but the network '{self.network.name}' has "
                f"{self.network.output_size} outputs"
            )

    @cached_property
    def without_head(self) -> Query:
        """The same question of the network without a head that keeps the order of its outputs.

        The query itself, if its network has no such head or the property does not only compare outputs, or where what
        runs the network rounds, which may make a tie of a difference. A counterexample is replayed in the whole
        network's file.
        """
        if not self.property.only_compares or self.network.arithmetic != "real":
            return self
        # Imported here: the reading and writing of property files must not wait for torch.
        from verifiable_relu.network.head import headless

        whole = self.network
        network = whole.once(headless, lambda: headless(whole))
        return self if network is None else Query(network, self.property)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over network and property, the key of caches and records; equal digests mean equal answers."""
        return hashlib.sha256((self.network.digest + self.property.digest).encode()).hexdigest()
