"""What is asked of a network: an input box, and the outputs that must not be reached from it.

The one sign convention of the project: a property describes the *unsafe* set, as VNN-LIB does. It is the union
of polytopes {y : A·y ≤ b}. *sat* means that some x of the box is mapped into the unsafe set (x is a
counterexample), *unsat* that none is (the property is verified). The margin of an output y is

    margin(y) = min over polytopes of max over its rows of (A_i·y − b_i),

so margin > 0 is outside the unsafe set, and a lower bound of the margin over the box that is > 0 proves unsat.

Numbers in properties are exact rationals. ``Box.lower`` and ``Box.upper`` are float64, rounded outward, for
whoever computes bounds; the exact values are kept beside them for whoever judges a counterexample.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from verifiable_relu.errors import InputError

if TYPE_CHECKING:  # Reading and writing property files must not wait for torch.
    from torch import Tensor

    from verifiable_relu.network.graph import Network


def round_down(value: Fraction) -> float:
    """The largest float64 that is not above ``value``.

    Raises:
        InputError: if ``value`` is beyond the range of float64.
    """
    try:
        nearest = value.numerator / value.denominator
    except OverflowError:
        raise InputError("a number beyond the range of float64") from None
    n, d = nearest.as_integer_ratio()
    return nearest if n * value.denominator <= value.numerator * d else math.nextafter(nearest, -math.inf)


def round_up(value: Fraction) -> float:
    """The smallest float64 that is not below ``value``; raises like :func:`round_down`."""
    return -round_down(-value)


def nearest(value: Fraction | float) -> float:
    """The float64 number nearest to a rational, beyond the range of float64 the largest; a float as it is."""
    try:
        return float(value)
    except OverflowError:
        return sys.float_info.max if value > 0 else -sys.float_info.max


@dataclass(frozen=True, eq=False)
class Box:
    """A box of inputs in row-major order, {x : lower ≤ x ≤ upper}; ``lower == upper`` is a point, not empty.

    Args:
        lower: float64 (n,), the exact lower bounds rounded down.
        upper: float64 (n,), the exact upper bounds rounded up.
        exact_lower: the exact bound of each variable whose bound is no float64 number.
        exact_upper: likewise.
        open_lower: variables whose lower bound is strict. Bounds are computed on the closed box, which is
            sound; only a counterexample is held to strictness.
        open_upper: likewise.

    Raises:
        InputError: if a bound is not finite, or the box is empty (lower > upper), by variable.
    """

    lower: np.ndarray
    upper: np.ndarray
    exact_lower: Mapping[int, Fraction] = field(default_factory=dict)
    exact_upper: Mapping[int, Fraction] = field(default_factory=dict)
    open_lower: frozenset[int] = frozenset()
    open_upper: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.lower.shape != self.upper.shape or self.lower.ndim != 1:
            raise InputError(f"box bounds of shapes {self.lower.shape} and {self.upper.shape}")
        bad = np.flatnonzero(~(np.isfinite(self.lower) & np.isfinite(self.upper)))
        if bad.size:
            raise InputError(f"X_{bad[0]} has no finite bound on one side, or NaN")
        # Outward rounding hides an inversion smaller than a float64 step.
        with np.errstate(over="ignore"):
            below = np.nextafter(self.upper, -np.inf)
        for i in np.flatnonzero(self.lower >= below):
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
        """A box from exact rational bounds."""
        low = np.array([round_down(v) for v in lower], dtype=np.float64)
        high = np.array([round_up(v) for v in upper], dtype=np.float64)
        return cls(
            low,
            high,
            {i: v for i, v in enumerate(lower) if v != low[i]},
            {i: v for i, v in enumerate(upper) if v != high[i]},
            frozenset(open_lower),
            frozenset(open_upper),
        )

    @property
    def size(self) -> int:
        """Number of input variables."""
        return len(self.lower)

    def bounds(self, i: int) -> tuple[Fraction, Fraction]:
        """The exact bounds of variable i."""
        lower = self.exact_lower.get(i)
        upper = self.exact_upper.get(i)
        return (
            Fraction(float(self.lower[i])) if lower is None else lower,
            Fraction(float(self.upper[i])) if upper is None else upper,
        )

    def contains(self, x: Sequence[Fraction]) -> bool:
        """Whether an exact point lies in the box, strict bounds respected."""
        for i, value in enumerate(x):
            lower, upper = self.bounds(i)
            if not lower <= value <= upper:
                return False
            if (i in self.open_lower and value == lower) or (i in self.open_upper and value == upper):
                return False
        return True

    def witness(self, x: np.ndarray) -> tuple[Fraction, ...]:
        """The exact point of the (closed) box nearest to a float point x of shape (n,); NaN stands for the lower bound.

        A float32 neighbour inside the box is preferred, so that replay in float32 sees the very same point; a
        coordinate whose range holds no float32 number takes the exact bound that is nearest.
        """
        given = np.asarray(x, dtype=np.float64).reshape(-1)
        x64 = np.clip(np.where(np.isnan(given), self.lower, given), self.lower, self.upper)
        # Beyond float32 the largest number is taken first, and the box's bound then.
        largest = float(np.finfo(np.float32).max)
        near = np.clip(x64, -largest, largest).astype(np.float32)
        point: list[Fraction] = []
        for i, value in enumerate(near):
            lower, upper = self.bounds(i)
            candidate = Fraction(float(value))
            toward = np.inf if candidate < lower else -np.inf if candidate > upper else float(value)
            if abs(value) < largest:
                candidate = Fraction(float(np.nextafter(value, np.float32(toward))))
            point.append(min(max(candidate, lower), upper))
        return tuple(point)


@dataclass(frozen=True)
class Row:
    """One linear constraint Σ coefficient·y_i ≤ bound (``strict``: <), exact; indices ascend, no zero coefficient."""

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

    def slack(self, y: Sequence[Fraction]) -> Fraction:
        """Σ coefficient·y_i − bound at an exact output y: ≤ 0 where the constraint holds (< 0 if strict)."""
        return sum((c * y[i] for i, c in self.coefficients), Fraction(0)) - self.bound

    def holds(self, y: Sequence[Fraction]) -> bool:
        """Whether an exact output y satisfies the constraint."""
        slack = self.slack(y)
        return slack < 0 if self.strict else slack <= 0


Polytope = tuple[Row, ...]
"""A conjunction of rows; the empty tuple is the whole space."""


@dataclass(frozen=True, eq=False)
class Property:
    """An input box and the unsafe set as a union of polytopes over the outputs (see the module's convention).

    Args:
        box: the inputs.
        unsafe: the union; the empty tuple is the empty set, which is trivially never reached.
        name: what to call it in messages and tables.
    """

    box: Box
    unsafe: tuple[Polytope, ...]
    name: str = "property"

    @cached_property
    def output_size(self) -> int:
        """One more than the largest output index mentioned."""
        return 1 + max((i for polytope in self.unsafe for row in polytope for i, _ in row.coefficients), default=-1)

    def violated(self, y: Sequence[Fraction]) -> bool:
        """Whether an exact output y lies in the unsafe set, strict rows respected."""
        return any(all(row.holds(y) for row in polytope) for polytope in self.unsafe)

    def margin(self, y: Sequence[Fraction]) -> Fraction | float:
        """The margin of an exact output y (module docstring); ±inf for an empty or full unsafe set."""
        return min(
            (max((row.slack(y) for row in polytope), default=-math.inf) for polytope in self.unsafe),
            default=math.inf,
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the exact box and unsafe set, whatever the scale of a row."""
        # Adding 0.0 makes one zero of the two that float64 has.
        state = hashlib.sha256((self.box.lower + 0.0).tobytes() + (self.box.upper + 0.0).tobytes())
        state.update(repr((sorted(self.box.exact_lower.items()), sorted(self.box.exact_upper.items()))).encode())
        unsafe = tuple(tuple(row.canonical() for row in polytope) for polytope in self.unsafe)
        state.update(repr((sorted(self.box.open_lower), sorted(self.box.open_upper), unsafe)).encode())
        return state.hexdigest()


@dataclass(frozen=True, eq=False)
class Query:
    """One question: does this network reach this property's unsafe set?

    Raises:
        InputError: if the property's variables do not fit the network.
    """

    network: Network
    property: Property

    def __post_init__(self) -> None:
        inputs, outputs = self.property.box.size, self.property.output_size
        if inputs != self.network.input_size:
            raise InputError(
                f"the property has {inputs} inputs, the network '{self.network.name}' {self.network.input_size}"
            )
        if outputs > self.network.output_size:
            raise InputError(
                f"the property speaks of Y_{outputs - 1}, the network '{self.network.name}' has "
                f"{self.network.output_size} outputs"
            )

    @cached_property
    def digest(self) -> str:
        """The key of every cache and record: equal digests ask the same question."""
        return hashlib.sha256((self.network.digest + self.property.digest).encode()).hexdigest()


def _members(group: Tensor, chosen: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The positions of the members of each chosen group, and which choice each stands for; ``group`` ascends."""
    import torch

    counts = torch.bincount(group, minlength=groups)
    first = counts.cumsum(0) - counts
    taken = counts[chosen]
    choice = torch.repeat_interleave(torch.arange(len(chosen), device=chosen.device), taken)
    within = torch.arange(len(choice), device=chosen.device) - (taken.cumsum(0) - taken)[choice]
    return first[chosen][choice] + within, choice


_LONG = Fraction(1, 2**30)
"""By this part of its largest number a row is loosened whose coefficients have more digits than float64."""


@dataclass(frozen=True)
class _FloatRow:
    """coefficients·y ≤ bound in float64; a margin of the property is at least a row's value divided by ``scale``."""

    coefficients: tuple[tuple[int, float], ...]
    bound: float
    scale: float


def _pieces(coefficients: Sequence[tuple[int, Fraction]]) -> list[tuple[tuple[int, float], ...]]:
    """Integer coefficients as a sum of float64 rows: the nearest one, then what is left, until nothing is.

    Raises:
        OverflowError: if a coefficient is beyond the range of float64.
    """
    pieces = [tuple((i, float(c)) for i, c in coefficients)]
    while coefficients := [
        (i, rest) for (i, c), (_, near) in zip(coefficients, pieces[-1], strict=True) if (rest := c - Fraction(near))
    ]:
        pieces.append(tuple((i, float(c)) for i, c in coefficients))
    return pieces


def _float_rows(polytope: Polytope) -> list[list[_FloatRow]]:
    """Polytopes with float64 coefficients whose union holds ``polytope``: one, unless coefficients are too long.

    Each row is multiplied by its ``scale``, so that its coefficients are integers. Where float64 holds these, that is
    all. Otherwise the row A·y ≤ b is written as the sum of float64 rows A = A₀ + A₁ + … + A_k. Where A₀·y > b + t and
    A_j·y > −t/k for every j > 0, A·y > b: so the polytope lies in the union of the one that has A₀·y ≤ b + t in the
    row's place and the half-spaces {A_j·y ≤ −t/k}. Since |A_j| is at most 2⁻⁵³·max|A|, these are far away from outputs
    of ordinary size for a t that hardly counts. The row's value is at least k + 1 times the least of the k + 1 parts.

    A row beyond the range of float64 is left out, which makes the polytope larger.
    """
    kept: list[_FloatRow] = []
    far: list[list[_FloatRow]] = []
    for row in polytope:
        factor = Fraction(math.lcm(*(c.denominator for _, c in row.coefficients)))
        try:
            first, *others = _pieces([(i, c * factor) for i, c in row.coefficients])
            scale, bound = round_up(factor / (1 + len(others))), row.bound * factor
            if others:
                spare = _LONG * max(abs(bound), *(abs(Fraction(c)) for _, c in first))
                far += [[_FloatRow(piece, round_up(-spare / len(others)), scale)] for piece in others]
                bound += spare
            kept.append(_FloatRow(first, round_up(bound), scale))
        except (OverflowError, InputError):
            continue
    return [kept, *far]


@dataclass(frozen=True)
class RowBatch:
    """The rows of several properties' polytopes, flattened, in float64 for bounds.

    Every property's unsafe set is contained in the union of its polytopes here: rows are scaled to integer
    coefficients and their bounds rounded up. A polytope whose coefficients float64 does not hold becomes several.

    Attributes:
        matrix: (rows, outputs); A of A·y ≤ b, times ``scale``.
        bound: (rows,); b times ``scale``.
        scale: (rows,) what a row's value is divided by for the margin.
        sample: (rows,) which property a row belongs to.
        polytope: (rows,) which polytope a row belongs to, counted over all properties.
        owner: (polytopes,) which property a polytope belongs to.
        origin: (polytopes,) which polytope of the properties, counted over all of them, it is, or is a part of.
        samples: the number of properties.
    """

    matrix: Tensor
    bound: Tensor
    scale: Tensor
    sample: Tensor
    polytope: Tensor
    owner: Tensor
    origin: Tensor
    samples: int

    @classmethod
    def of(cls, properties: Sequence[Property], outputs: int) -> RowBatch:
        """Collect the rows of ``properties`` over a network with ``outputs`` outputs."""
        import torch

        entries: list[tuple[int, int, float]] = []
        bound: list[float] = []
        scales: list[float] = []
        sample: list[int] = []
        member: list[int] = []
        owner: list[int] = []
        origin: list[int] = []
        given = 0
        for index, prop in enumerate(properties):
            for polytope in prop.unsafe:
                for part in _float_rows(polytope):
                    for row in part:
                        entries += [(len(bound), column, value) for column, value in row.coefficients]
                        bound.append(row.bound)
                        scales.append(row.scale)
                        sample.append(index)
                        member.append(len(owner))
                    owner.append(index)
                    origin.append(given)
                given += 1
        matrix = torch.zeros(len(bound), outputs, dtype=torch.float64)
        if entries:
            rows, columns, values = zip(*entries, strict=True)
            matrix[list(rows), list(columns)] = torch.tensor(values, dtype=torch.float64)
        return cls(
            matrix,
            torch.tensor(bound, dtype=torch.float64),
            torch.tensor(scales, dtype=torch.float64),
            torch.tensor(sample, dtype=torch.long),
            torch.tensor(member, dtype=torch.long),
            torch.tensor(owner, dtype=torch.long),
            torch.tensor(origin, dtype=torch.long),
            len(properties),
        )

    def to(self, like: Tensor) -> RowBatch:
        """The same on the device of a tensor, its numbers in the tensor's dtype."""
        matrix, bound, scale = (t.to(like) for t in (self.matrix, self.bound, self.scale))
        numbers = (self.sample, self.polytope, self.owner, self.origin)
        sample, polytope, owner, origin = (t.to(like.device) for t in numbers)
        return RowBatch(matrix, bound, scale, sample, polytope, owner, origin, self.samples)

    def take(self, samples: Tensor) -> RowBatch:
        """The rows of the properties ``samples`` (n,), as a batch of n properties; repetitions are allowed."""
        import torch

        row, row_of = _members(self.sample, samples, self.samples)
        chosen, polytope_of = _members(self.owner, samples, self.samples)
        position = torch.zeros_like(samples)
        counts = torch.bincount(self.owner, minlength=self.samples)
        first = counts.cumsum(0) - counts
        position[1:] = counts[samples].cumsum(0)[:-1]
        polytope = self.polytope[row] - first[self.sample[row]] + position[row_of]
        values = self.matrix[row], self.bound[row], self.scale[row]
        return RowBatch(*values, row_of, polytope, polytope_of, self.origin[chosen], len(samples))

    def unscaled(self, row_values: Tensor) -> Tensor:
        """Values (…, rows) of matrix·y − bound in the properties' own units: divided by ``scale``, rounded down."""
        import torch

        scale = self.scale.to(row_values)
        quotient = row_values / scale
        down = quotient - torch.finfo(row_values.dtype).eps * quotient.abs()
        return torch.where(scale == 1, row_values, down)

    def margins(self, row_values: Tensor) -> Tensor:
        """Reduce values (…, rows) of matrix·y − bound to margins (…, samples): max over rows, min over polytopes.

        Lower bounds in, lower bounds out: the maximum of lower bounds bounds the maximum from below.
        """
        return self.least(self.largest(row_values))

    def largest(self, row_values: Tensor) -> Tensor:
        """Reduce values (…, rows) of matrix·y − bound to the largest of each polytope, (…, polytopes), unscaled."""
        row_values = self.unscaled(row_values)
        kept = row_values.new_full((*row_values.shape[:-1], len(self.owner)), -math.inf)
        return kept.scatter_reduce(-1, self.polytope.expand_as(row_values), row_values, "amax")

    def least(self, largest: Tensor) -> Tensor:
        """The margins (…, samples) of values (…, polytopes) that ``largest`` returned."""
        worst = largest.new_full((*largest.shape[:-1], self.samples), math.inf)
        return worst.scatter_reduce(-1, self.owner.expand_as(largest), largest, "amin")

    @property
    def polytopes(self) -> list[int]:
        """How many polytopes each property has."""
        import torch

        counts: list[int] = torch.bincount(self.owner, minlength=self.samples).tolist()
        return counts
