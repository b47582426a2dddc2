"""A checker of certificates, written from ``docs/certificates.md`` alone, in rational arithmetic throughout.

It knows the networks of ``page_network``, one or two, and properties in VNN-LIB 1.0; of the rest it says
``Unsupported``. It imports nothing of the package, is slow, and rounds nowhere: what it accepts is a proof by the
page's own words. The project's checker is compared with it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, product
from typing import Any

from tests.soundness.page_curves import Ends, Smooth, gap
from tests.soundness.page_network import (
    ARITHMETICS,
    ONE,
    ZERO,
    Error,
    Form,
    Network,
    Refused,
    Unsupported,
    need,
    read_network,
    read_pair,
)

Row = tuple[dict[int, Fraction], Fraction]
"""Coefficients other than zero of outputs, and the most that their sum may be."""

Box = tuple[list[Fraction], list[Fraction]]


@dataclass(frozen=True)
class Disjunct:
    """A box, its ends as they are written, and rows."""

    lower: list[Fraction]
    upper: list[Fraction]
    rows: list[Row]
    strict: list[bool]


def read_property(text: bytes) -> list[Disjunct]:
    """The disjuncts of a file in VNN-LIB 1.0."""
    words = re.findall(r"[()]|[^\s()]+", re.sub(r";[^\n]*", "", text.decode()))
    if "vnnlib-version" in words:
        raise Unsupported("VNN-LIB 2.0")
    stack: list[list[Any]] = [[]]
    for word in words:
        if word == "(":
            stack.append([])
        elif word == ")":
            closed = stack.pop()
            stack[-1].append(closed)
        else:
            stack[-1].append(word)
    inputs = sum(command[0] == "declare-const" and command[1].startswith("X_") for command in stack[0])
    choices = _expanded(["and", *(command[1] for command in stack[0] if command[0] == "assert")])
    return [one for conditions in choices if (one := _disjunct(conditions, inputs)) is not None]


def _expanded(formula: list[Any]) -> list[list[Any]]:
    """The alternatives of a formula, each a list of conditions."""
    if formula[0] == "or":
        return [one for part in formula[1:] for one in _expanded(part)]
    if formula[0] == "and":
        return [[a for part in chosen for a in part] for chosen in product(*map(_expanded, formula[1:]))]
    if formula[0] not in ("<=", ">=", "<", ">", "="):
        raise Unsupported(str(formula[0]))
    return [[formula]]


def _linear(term: Any) -> dict[str, Fraction]:
    """Coefficients by variable; the constant under the empty name."""
    if isinstance(term, str):
        return {term: ONE} if term[0] in "XY" else {"": Fraction(term)}
    operator, *rest = term
    parts = [_linear(part) for part in rest]
    if operator == "*":
        factor = math.prod([part[""] for part in parts if set(part) == {""}], start=ONE)
        (others,) = [part for part in parts if set(part) != {""}] or [{"": ONE}]
        return {name: factor * value for name, value in others.items()}
    if operator == "/":
        return {name: value / parts[1][""] for name, value in parts[0].items()}
    found: dict[str, Fraction] = {}
    for number, part in enumerate(parts):
        sign = -ONE if operator == "-" and (number or len(parts) == 1) else ONE
        for name, value in part.items():
            found[name] = found.get(name, ZERO) + sign * value
    return found


def _disjunct(conditions: list[Any], inputs: int) -> Disjunct | None:
    lower: list[Any] = [None] * inputs
    upper: list[Any] = [None] * inputs
    open_ends: set[tuple[int, bool]] = set()
    rows: list[Row] = []
    stricts: list[bool] = []
    for operator, left, right in conditions:
        for sign in {"=": (1, -1), "<": (1,), "<=": (1,), ">": (-1,), ">=": (-1,)}[operator]:
            strict = operator in "<>"
            total = {name: sign * value for name, value in _linear(["-", left, right]).items() if value}
            most = -total.pop("", ZERO)
            if not total:
                if not (most > 0 if strict else most >= 0):
                    return None
            elif all(name[0] == "Y" for name in total):
                rows.append(({int(name[2:]): value for name, value in sorted(total.items())}, most))
                stricts.append(strict)
            elif len(total) == 1 and next(iter(total))[0] == "X":
                ((name, value),) = total.items()
                i, end, ends = int(name[2:]), most / value, upper if value > 0 else lower
                if ends[i] is None or (end < ends[i] if value > 0 else end > ends[i]):
                    ends[i] = end
                    open_ends.discard((i, value > 0))
                if strict and ends[i] == end:
                    open_ends.add((i, value > 0))
            else:
                raise Unsupported("a condition on several inputs")
    if None in lower or None in upper:
        raise Unsupported("an input without bounds")
    for i, (low, high) in enumerate(zip(lower, upper, strict=True)):
        if low > high or (low == high and open_ends & {(i, True), (i, False)}):
            return None
    return Disjunct(lower, upper, rows, stricts)


def outward(value: Fraction, up: bool) -> Fraction:
    """The nearest float64 that is not below (not above) a number."""
    near = float(value)
    if (Fraction(near) < value) if up else (Fraction(near) > value):
        near = math.nextafter(near, math.inf if up else -math.inf)
    return Fraction(near)


def a_list(given: Any, what: str, count: int | None = None) -> list[Any]:
    """A list, of so many entries."""
    if not isinstance(given, list) or (count is not None and len(given) != count):
        raise Refused(f"{given!r:.40} is not {what}")
    return given


def binary(given: Any, count: int | None = None) -> list[Fraction]:
    """A list of binary numbers."""
    exponent, *mantissas = a_list(given, "binary numbers") or [None]
    need(all(type(v) is int for v in (exponent, *mantissas)), "no list of binary numbers")
    need(abs(exponent) <= 900 and all(abs(m) <= 1 << 53 for m in mantissas), "a binary number that is too large")
    need(count is None or len(mantissas) == count, f"{len(mantissas)} numbers for {count}")
    return [m * Fraction(2) ** exponent for m in mantissas]


def rational(given: Any) -> Fraction:
    try:
        return Fraction(given if isinstance(given, str) else "")
    except (ValueError, ZeroDivisionError):
        raise Refused(f"{given!r} is no rational number") from None


def index(given: Any, count: int) -> int:
    """A number that counts something."""
    need(type(given) is int and 0 <= given < count, f"{given} is no number below {count}")
    return int(given)


def indices(given: Any, count: int) -> list[int]:
    return [index(i, count) for i in a_list(given, "numbers")]


def sides(given: Any, count: int) -> list[tuple[int, int]]:
    """Neurons and their sides, +1 or −1, which stand in turn."""
    rows = a_list(given, "neurons and sides")
    need(len(rows) % 2 == 0, "a neuron without a side")
    need(all(side in (1, -1) and type(side) is int for side in rows[1::2]), "no side")
    return list(zip(indices(rows[::2], count), rows[1::2], strict=True))


def keys(record: Any, *wanted: str, perhaps: tuple[str, ...] = ()) -> None:
    """Refuse a record whose keys are others."""
    need(isinstance(record, dict) and set(wanted) <= set(record) <= {*wanted, *perhaps}, f"{wanted} are expected")


def read_records(data: bytes) -> list[dict[str, Any]]:
    """The records of a file."""
    unpacked = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len(dict(pairs)) == len(pairs), "a key twice")
        return dict(pairs)

    try:
        found = [json.loads(line, object_pairs_hook=once) for line in unpacked.decode().splitlines()]
    except ValueError as error:
        raise Refused(f"no JSON: {error}") from None
    need(len(found) > 1 and all(isinstance(record, dict) for record in found), "no records")
    return found


def check(certificate: bytes, network: bytes, prop: bytes, other: bytes | None = None) -> str:
    """The claim of a certificate that holds.

    Args:
        other: the second network's file, where the certificate is about two.

    Raises:
        Refused: if the certificate proves nothing.
        Unsupported: if it is about something that this checker does not know.
    """
    first, *found, last = read_records(certificate)
    need(last == {"end": len(found) + 1} and type(last["end"]) is int, "no end")
    more = {"arithmetic", "joint"} & set(first) | ({"other", "beside"} if other is not None else set())
    keys(first, "certificate", "claim", "network", "property", "says", *more)
    need(first["certificate"] == 4 and type(first["certificate"]) is int, "another version")
    need(first["network"] == hashlib.sha256(network).hexdigest(), "another network")
    need(first["property"] == hashlib.sha256(prop).hexdigest(), "another property")
    disjuncts, arithmetic, joint = read_property(prop), first.get("arithmetic"), None
    known = isinstance(arithmetic, str) and arithmetic in ARITHMETICS
    need("arithmetic" not in first or known, "an arithmetic that is not known")
    if "joint" in first:
        joint = [rational(value) for value in a_list(first["joint"], "a family")]
        need(bool(joint) and all(value >= 1 for value in joint), "a λ below 1, or none")
    if other is None:
        net = read_network(network, arithmetic, joint)
    else:
        need(first["other"] == hashlib.sha256(other).hexdigest(), "another other network")
        pairs = [a_list(pair, "a pair", 2) for pair in a_list(first["beside"], "pairs")]
        need(all(type(i) is int and i >= 0 for pair in pairs for i in pair), "no pair")
        net = read_pair(network, other, [(i, j) for i, j in pairs], arithmetic, joint)
    if first["claim"] == "sat":
        need(not more, "a point of more than one function")
        need(len(found) == 1, "three records are expected")
        keys(found[0], "point")
        _reaches(net, disjuncts, found[0]["point"])
    else:
        need(first["claim"] == "unsat", "no claim")
        unsat = _Unsat(net, disjuncts, found)
        for box in unsat.boxes if arithmetic is not None else ():
            _stays_below(net, box, ARITHMETICS[arithmetic].largest)
        unsat.check()
    return str(first["claim"])


def _stays_below(net: Network, box: Box, largest: Fraction) -> None:
    """Refuse a box in which something may overflow."""
    over = Bounds(net, box)
    for k in (k for members in net.members for k in members):
        over.lower[k], over.upper[k] = over.interval(net.z[k]), over.highest(net.z[k])
        need(max(-over.lower[k], over.upper[k]) <= largest, "a value that may overflow")
    need(all(over.size(error) <= largest for error in net.errors.values()), "a sum that may overflow")
    need(all(over.farthest(form) <= largest for form in net.outputs), "an output that may overflow")


def _reaches(net: Network, disjuncts: list[Disjunct], point: Any) -> None:
    """Refuse a point that is no counterexample."""
    x = [rational(value) for value in a_list(point, "a point", net.inputs)]
    atoms = list(x)
    if any(isinstance(curve, Smooth) for curve in net.curves.values()):
        raise Unsupported("a point of a curve")
    for k, (z, s) in enumerate(zip(net.z, net.s, strict=True)):
        value = at(z, atoms)
        atoms.append(Fraction(round(value)) if k in net.curves else value if value >= 0 else s * value)
    y = [at(form, atoms) for form in net.outputs]
    for d in disjuncts:
        inside = all(low <= v <= high for low, v, high in zip(d.lower, x, d.upper, strict=True))
        totals = [(sum(c * y[i] for i, c in row.items()), most) for row, most in d.rows]
        if inside and all(t < m if s else t <= m for (t, m), s in zip(totals, d.strict, strict=True)):
            return
    raise Refused("the point is not unsafe")


def at(form: Form, atoms: list[Fraction]) -> Fraction:
    return form.constant + sum((c * atoms[k] for k, c in form.terms.items()), ZERO)


class _Unsat:
    """The parts of a certificate, record by record."""

    def __init__(self, net: Network, disjuncts: list[Disjunct], found: list[dict[str, Any]]) -> None:
        self.net, self.disjuncts, self.records, self.place = net, disjuncts, found, 0
        self.boxes: list[Box] = []
        self.box_of = []
        for d in disjuncts:
            box = [outward(v, False) for v in d.lower], [outward(v, True) for v in d.upper]
            if box not in self.boxes:
                self.boxes.append(box)
            self.box_of.append(self.boxes.index(box))

    def next(self) -> dict[str, Any]:
        need(self.place < len(self.records), "a record is missing")
        self.place += 1
        return self.records[self.place - 1]

    def coming(self, key: str) -> bool:
        return self.place < len(self.records) and key in self.records[self.place]

    def check(self) -> None:
        """Refuse what does not prove that no disjunct is reached."""
        covered: list[tuple[int, list[Row]]] = []
        while self.place < len(self.records):
            record = self.next()
            keys(record, "part")
            keys(record["part"], "box", "polytopes")
            box = index(record["part"]["box"], len(self.boxes))
            polytopes = [self.polytope(given) for given in a_list(record["part"]["polytopes"], "polytopes")]
            covered += [(box, polytope) for polytope in polytopes]
            self.cover(self.boxes[box], polytopes)
        for d, box in zip(self.disjuncts, self.box_of, strict=True):
            holding = (polytope for number, polytope in covered if number == box)
            covers = any(all(any(_multiple(row, r) for r in d.rows) for row in polytope) for polytope in holding)
            need(covers, "a disjunct is not covered")

    def polytope(self, given: Any) -> list[Row]:
        found = []
        for row in a_list(given, "a polytope"):
            keys(row, "y", "most")
            pairs = [a_list(term, "a term", 2) for term in a_list(row["y"], "a row")]
            terms = [(index(i, len(self.net.outputs)), rational(c)) for i, c in pairs]
            need(all(a[0] < b[0] for a, b in pairwise(terms)), "outputs out of order")
            need(all(c for _, c in terms), "a coefficient of zero")
            found.append((dict(terms), rational(row["most"])))
        return found

    def cover(self, box: Box, polytopes: list[list[Row]]) -> None:
        """Read a cover of a box, and all that belongs to it."""
        waiting = [box]
        while waiting:
            low, high = waiting.pop()
            record = self.next()
            if "halve" in record:
                keys(record, "halve")
                i, m, e = a_list(record["halve"], "halving", 3)
                i, (middle,) = index(i, len(low)), binary([e, m])
                below, above = list(high), list(low)
                need(low[i] < middle < high[i], "a box that is not halved between its ends")
                below[i] = above[i] = middle
                waiting += [(above, high), (low, below)]
            elif "zonotope" in record:
                keys(record, "zonotope")
                rows = a_list(record["zonotope"], "a row for each polytope", len(polytopes))
                need(not self.net.curves and not self.net.differences, "a zonotope of a curve, or of a difference")
                over = Bounds.zonotope(self.net, (low, high))
                for number, polytope in zip(rows, polytopes, strict=True):
                    g = self.integral(polytope[index(number, len(polytope))])
                    need(over.least(g, over.chord_slopes) > 0, "a row that the zonotope does not prove")
            else:
                keys(record, "root")
                is_count = type(record["root"]) is int and record["root"] == len(self.net.names)
                need(is_count, "another number of activations")
                self.root((low, high), polytopes)

    def integral(self, row: Row) -> Form:
        """g of a row."""
        factor = Fraction(math.lcm(1, *(c.denominator for c in row[0].values())))
        outputs = [self.net.outputs[i] for i in row[0]]
        return _sum((factor * c for c in row[0].values()), outputs) - factor * row[1]

    def root(self, box: Box, polytopes: list[list[Row]]) -> None:
        over = Bounds(self.net, box)
        shared: Slopes = {}
        for number, name in enumerate(self.net.names):
            self.activation(over, number, name, shared)
            while self.coming("maximum"):
                self.maxima(over)
        for polytope in polytopes:
            while self.coming("tighter"):
                self.tighter(over)
            g = [self.integral(row) for row in polytope]
            record = self.next()
            if "plain" in record:
                keys(record, "plain", "slopes")
                mu = binary(record["plain"], len(g))
                need(all(m >= 0 for m in mu), "a negative multiplier")
                slopes = over.slopes(record["slopes"], range(len(self.net.names)))
                need(over.least(_sum(mu, g), over.by_sign(slopes)) > 0, "a plain proof that fails")
            else:
                Tree(self, over, record, g).check()

    def activation(self, over: Bounds, number: int, name: str, shared: Slopes) -> None:
        """Bounds of an activation."""
        record, members = self.next(), self.net.members[number]
        are_differences = bool(members) and members[0] in self.net.differences
        keys(record, "activation", "lower", "upper", "slopes", *(["alone"] if are_differences else []))
        need(record["activation"] == name, "another activation")
        lower, upper = (binary(record[side], len(members)) for side in ("lower", "upper"))
        if are_differences:
            over.alone |= {members[j] for j in indices(record["alone"], len(members))}
        # A row that bounds the other network goes through this network alone.
        alone = set() if are_differences else set(self.net.differences)
        rows: dict[tuple[int, int], list[Slopes]] = {}
        while self.coming("row"):
            own = self.next()
            keys(own, "row", "slopes")
            (pair,) = sides(a_list(own["row"], "a row", 2), len(members))
            rows.setdefault(pair, []).append(over.slopes(own["slopes"], range(number)))
        for (j, k), (side, bounds) in product(enumerate(members), ((1, lower), (-1, upper))):
            form, bound = self.net.z[k] * Fraction(side), side * bounds[j]
            holds = over.interval(form) >= bound or (are_differences and over.apart(k, side) >= bound)
            ways = (over.by_sign(slopes) for slopes in (shared, *rows.get((j, side), [])))
            holds = holds or any(over.least(form, way, alone) >= bound for way in ways)
            need(holds, f"bound {side} of neuron {j} of {name}")
        over.lower.update(zip(members, lower, strict=True))
        over.upper.update(zip(members, upper, strict=True))
        shared.update(over.slopes(record["slopes"], range(number, number + 1)))

    def maxima(self, over: Bounds) -> None:
        """The entries by which the maxima of a MaxPool are bounded."""
        record = self.next()
        keys(record, "maximum", "below", "above")
        every = [k for k, (name, _) in self.net.maxima.items() if name == record["maximum"]]
        need(bool(every), "no maxima of this name")
        earlier = [k for members in self.net.members for k in members if k < every[0]]
        need(all(k in over.lower for k in earlier), "maxima before their activations")
        entries = [a_list(record[side], "an entry for each maximum", len(every)) for side in ("below", "above")]
        for k, i, j in zip(every, *entries, strict=True):
            rivals = self.net.maxima[k][1]
            i, j = indices([i, j], len(rivals))
            low, high = over.interval(rivals[j]), [over.highest(rival) for rival in rivals]
            t = max([low, *high[:j], *high[j + 1 :]])
            s = (high[j] - t) / (high[j] - low) if high[j] > low and high[j] > t else ZERO
            over.windows[k] = rivals[i], rivals[j] * s + max(t - s * low, high[j] - s * high[j])

    def tighter(self, over: Bounds) -> None:
        """Tighter bounds of an activation."""
        record = self.next()
        keys(record, "tighter", "rows", "least", "tree", "neurons", "chords")
        members = self.net.members[index(record["tighter"], len(self.net.members))]
        pairs = sides(record["rows"], len(members))
        least = binary(record["least"], len(pairs))
        for (j, side), value in zip(pairs, least, strict=True):
            form = self.net.z[members[j]] * Fraction(side) - value
            Tree(self, over, {key: record[key] for key in ("tree", "neurons", "chords")}, [form], members[0]).check()
        for (j, side), value in zip(pairs, least, strict=True):
            bounds = over.lower if side > 0 else over.upper
            bounds[members[j]] = side * max(side * bounds[members[j]], value)
        over.off.clear()


def _multiple(row: Row, of: Row) -> bool:
    """Whether a row is a positive multiple of another."""
    (terms, most), (others, limit) = row, of
    if not terms or terms.keys() != others.keys():
        return False
    i = next(iter(terms))
    factor = terms[i] / others[i]
    return factor > 0 and most == factor * limit and all(terms[i] == factor * others[i] for i in terms)


def _sum(factors: Iterable[Fraction], forms: Iterable[Form]) -> Form:
    total = Form()
    for factor, form in zip(factors, forms, strict=True):
        total.put(factor, form)
    return total


Choice = Callable[[int, Fraction], Fraction]
"""The slope of an open neuron, given the coefficient K that its value has."""

Slopes = dict[int, tuple[Fraction, Fraction]]
"""Of open neurons the slopes for a coefficient K ≥ 0 and for K < 0; neurons with a kink have one."""


class Bounds:
    """A box, and bounds of neurons; those of later activations may be missing."""

    def __init__(self, net: Network, box: Box) -> None:
        self.net, self.box = net, box
        self.lower: dict[int, Fraction] = {}
        self.upper: dict[int, Fraction] = {}
        self.windows: dict[int, tuple[Form, Form]] = {}
        self.alone: set[int] = set()  # differences in whose place the other network's value itself goes on
        self.off: dict[int, Fraction] = {}  # how far off values are that errors belong to, as far as asked

    @classmethod
    def zonotope(cls, net: Network, box: Box) -> Bounds:
        """Each neuron's bounds are those of its form over the earlier ones' remainders, every slope the chord."""
        over = cls(net, box)
        for k in (k for members in net.members for k in members):
            over.lower[k] = over.least(net.z[k], over.chord_slopes)
            over.upper[k] = -over.least(net.z[k] * -ONE, over.chord_slopes)
        return over

    def open(self) -> list[int]:
        return [k for k in self.lower if self.is_open(k)]

    def is_curve(self, k: int) -> bool:
        """Whether a neuron has two slopes, and is open whatever its bounds are."""
        return k in self.net.curves or k in self.net.differences

    def is_open(self, k: int) -> bool:
        if k in self.net.maxima or k in self.net.errors:
            return False
        return self.is_curve(k) or self.lower[k] < 0 < self.upper[k]

    def slopes(self, given: Any, activations: Iterable[int]) -> Slopes:
        """The slopes of some activations' open neurons, with those of curves for either sign of a coefficient."""
        places: list[tuple[int, int]] = []
        for number in activations:
            opened = [k for k in self.net.members[number] if self.is_open(k)]
            places += [(k, 0) for k in opened] + [(k, 1) for k in opened if self.is_curve(k)]
        read = dict(zip(places, binary(given, len(places)), strict=True))
        return {k: (t, read.get((k, 1), t)) for (k, side), t in read.items() if not side}

    def chord(self, k: int) -> Fraction:
        return (self.upper[k] - self.net.s[k] * self.lower[k]) / (self.upper[k] - self.lower[k])

    def chord_slopes(self, k: int, _: Fraction) -> Fraction:
        return self.chord(k)

    def by_sign(self, slopes: Slopes) -> Choice:
        """The certificate's slope or the chord, by the sign of the coefficient."""

        def slope(k: int, K: Fraction) -> Fraction:
            if self.is_curve(k):
                return slopes[k][K < 0]
            return slopes[k][0] if (K >= 0) == (self.net.s[k] <= 1) else self.chord(k)

        return slope

    def fixed(self, k: int) -> Fraction:
        """The slope of a neuron that is not open."""
        return ONE if k in self.net.maxima or self.lower[k] >= 0 else self.net.s[k]

    def value(self, k: int, z: Fraction) -> Fraction:
        return z if z >= 0 else self.net.s[k] * z

    def z_of(self, k: int) -> Ends:
        return self.lower[k], self.upper[k]

    def ends(self, k: int) -> tuple[Fraction, Fraction]:
        """The least and the largest value of a neuron."""
        if k in self.net.errors:
            return -self.error(k), self.error(k)
        if k in self.net.maxima:
            made, rivals = self.net.z[k], self.net.maxima[k][1]
            low, high = (max(map(bound, rivals)) for bound in (self.interval, self.highest))
            return max(low, self.interval(made)), min(high, self.highest(made))
        if (curve := self.net.curves.get(k)) is not None:
            return curve.least(self.z_of(k), ZERO), curve.most(self.z_of(k), ZERO)
        values = [self.value(k, z) for z in self.z_of(k)] + [ZERO] * self.is_open(k)
        return min(values), max(values)

    def size(self, error: Error) -> Fraction:
        """The most that the terms of what has an error are, together."""
        return sum((w * self.farthest(x) for w, x in error.terms), error.constant)

    def error(self, k: int) -> Fraction:
        if k not in self.off:
            error = self.net.errors[k]
            self.off[k] = error.part * self.size(error) + error.lost
        return self.off[k]

    def interval(self, form: Form) -> Fraction:
        """A lower bound of a form by interval arithmetic over its atoms."""
        total, inputs = form.constant, self.net.inputs
        for atom, c in form.terms.items():
            low, high = self.ends(atom - inputs) if atom >= inputs else (self.box[0][atom], self.box[1][atom])
            total += min(c * low, c * high)
        return total

    def highest(self, form: Form) -> Fraction:
        """An upper bound of a form, likewise."""
        return -self.interval(form * -ONE)

    def farthest(self, form: Form) -> Fraction:
        """A bound of a form's magnitude."""
        return max(-self.interval(form), self.highest(form))

    def apart(self, k: int, side: int) -> Fraction:
        """A bound of a difference by what is claimed of both neurons."""
        mine, other = self.net.differences[k]
        return self.lower[other] - self.upper[mine] if side > 0 else self.lower[mine] - self.upper[other]

    def rest(self, k: int, K: Fraction, t: Fraction) -> Fraction:
        """The least of K·q for q = r − t·z."""
        if (curve := self.net.curves.get(k)) is not None:
            return curve.term(self.z_of(k), K, t)
        if k in self.net.differences:
            mine, other = self.net.differences[k]
            below, above = (gap(self.net.curves.get(n), self.z_of(n)) for n in (other, mine))
            least = Fraction(int(all(self.lower[n] >= 0 for n in (mine, other))))
            most = Fraction(int(any(self.upper[n] > 0 for n in (mine, other))))
            lines = [(s - t) * d for d in self.z_of(k) for s in (least, most)]
            return K * (min(lines) - below if K > 0 else max(lines) + above)
        return min(K * (self.value(k, z) - t * z) for z in (ZERO, *self.z_of(k)))

    def least(self, form: Form, slope: Choice, alone: Iterable[int] = ()) -> Fraction:
        """The walk's lower bound of a form."""
        form = Form(dict(form.terms), form.constant)
        for k in range(len(self.net.z) - 1, -1, -1):
            if k in self.net.differences:
                self.part(form, k, alone)
            K = form.terms.pop(self.net.inputs + k, ZERO)
            if not K:
                continue
            if k in self.windows:
                form.put(K, self.windows[k][K < 0])
            elif self.is_open(k):
                t = slope(k, K)
                form.put(K * t, self.net.z[k])
                form.constant += self.rest(k, K, t)
            else:
                self.closed(form, k, K)
        return self.interval(form)

    def part(self, form: Form, k: int, alone: Iterable[int] = ()) -> None:
        """Replace the other network's value by the first one's and their difference."""
        if k in self.alone or k in alone:
            return
        mine, other = (self.net.inputs + n for n in self.net.differences[k])
        form.put(form.terms.pop(other, ZERO), Form({mine: ONE, self.net.inputs + k: ONE}))

    def closed(self, form: Form, k: int, K: Fraction) -> None:
        """Replace K times the value of a neuron that is not open."""
        if k in self.net.errors:
            form.constant -= abs(K) * self.error(k)
        else:
            form.put(K * self.fixed(k), self.net.z[k])


class Tree:
    """A proof by splits."""

    def __init__(
        self, reader: _Unsat, over: Bounds, record: dict[str, Any], g: list[Form], before: int | None = None
    ) -> None:
        keys(record, "tree", "neurons", "chords")
        self.reader, self.over, self.net, self.g = reader, over, over.net, g
        self.refining = before is not None
        opened = [k for k in over.open() if before is None or k < before]
        self.slopes = dict(zip(opened, binary(record["tree"], len(opened)), strict=True))
        self.neurons: list[int] = []
        for number, inside in (a_list(entry, "neurons", 2) for entry in a_list(record["neurons"], "neurons")):
            for j in a_list(inside, "neurons"):
                k = self.neuron(number, j)
                need(k in self.slopes and k not in self.neurons, "a neuron that is not open, or twice")
                self.neurons.append(k)
        self.chords = {self.neurons[j] for j in indices(record["chords"], len(self.neurons))}
        need(not any(self.over.is_curve(k) for k in self.chords), "a chord of a curve")
        need(not any(k in self.net.differences for k in self.neurons), "a difference that a tree speaks of")
        # Of each neuron a form with r ≤ form, and how far below that r may be.
        self.planes: dict[int, tuple[Form, Fraction]] = {}
        terms: list[int] | None = None
        while before is None and reader.coming("plane"):
            terms = self.plane(reader.next(), terms)

    def neuron(self, number: Any, j: Any) -> int:
        members = self.net.members[index(number, len(self.net.members))]
        return members[index(j, len(members))]

    def plane(self, record: dict[str, Any], terms: list[int] | None) -> list[int]:
        """Read a plane; returns its terms as atoms."""
        keys(record, "plane", "parts", "bends", perhaps=("terms",))
        number, j = a_list(record["plane"], "a plane", 2)
        k, n = self.neuron(number, j), self.net.inputs
        need(k in self.slopes and self.net.s[k] <= 1 and k not in self.planes, "a plane of such a neuron")
        need(not self.net.curves and not self.net.differences, "a plane in a network with curves")
        if "terms" in record:
            opened = self.over.open()
            terms = [i if i < n else n + opened[i - n] for i in indices(record["terms"], n + len(opened))]
            need(len(set(terms)) == len(terms), "a term twice")
        if terms is None:
            raise Refused("a plane without terms")
        first = self.net.members[number][0]
        need(all(atom < n + first for atom in terms), "a term that is not before the neuron")
        parts = binary(record["parts"], len(terms))
        mu, nu = binary(record["bends"], 2)
        need(mu >= 0 and nu >= 0, "a negative bend")
        z = self.kept_open(self.net.z[k])
        g = Form({atom: p * z.terms[atom] for atom, p in zip(terms, parts, strict=True) if atom in z.terms})
        (low, high), s, highest = self.over.z_of(k), self.net.s[k], self.over.highest
        # The largest of z·(1 − μ) − g and z·(s + ν) − g, moved by the bends.
        c = max(-self.over.interval(g - z * (1 - mu)) + mu * high, -self.over.interval(g - z * (s + nu)) - nu * low)
        self.planes[k] = g + c, highest(g + c - z * self.over.chord(k))
        return terms

    def kept_open(self, form: Form) -> Form:
        """The form over inputs and open neurons' values."""
        form = Form(dict(form.terms), form.constant)
        for k in range(len(self.net.z) - 1, -1, -1):
            is_kept = k in self.net.errors or (self.net.inputs + k in form.terms and self.over.is_open(k))
            if self.net.inputs + k in form.terms and not is_kept:
                form.put(form.terms.pop(self.net.inputs + k) * self.over.fixed(k), self.net.z[k])
        return form

    def check(self) -> None:
        """Read the nodes, and refuse a leaf that proves nothing."""
        waiting: list[dict[int, Ends]] = [{}]
        while waiting:
            path = waiting.pop()
            record = self.reader.next()
            if "split" in record:
                keys(record, "split")
                waiting += self.split(record["split"], path)
            else:
                bound = self.leaf(record, path)
                need(bound > 0 or (self.refining and bound == 0), "a leaf that fails")

    def split(self, given: Any, path: dict[int, Ends]) -> list[dict[int, Ends]]:
        """What is below a split: the lower half, which is read last, and the upper one."""
        j, m, e = a_list(given, "a split", 3) if isinstance(given, list) else (given, 0, 0)
        k, (middle,) = self.neurons[index(j, len(self.neurons))], binary([e, m])
        if isinstance(given, list):
            need(self.over.is_curve(k), "a split of a neuron with a kink at another place than 0")
        need(k not in path or self.over.is_curve(k), "a neuron is split twice")
        low, high = path.get(k, self.over.z_of(k))
        need(low < middle < high, "a split that is not between the ends")
        return [{**path, k: (low, middle)}, {**path, k: (middle, high)}]

    def leaf(self, record: dict[str, Any], path: dict[int, Ends]) -> Fraction:
        """A lower bound of Σ μ·g below the splits of a path."""
        keys(record, "leaf", perhaps=() if self.refining else ("rows",))
        leaf = a_list(record["leaf"], "a leaf")
        need(len(leaf) % 2 == 1, "no leaf")
        places = [self.neurons[j] for j in indices(leaf[1::2], len(self.neurons))]
        w = dict(zip(places, binary([leaf[0], *leaf[2::2]]), strict=True))
        need(len(w) == len(places), "a multiplier twice")
        need("rows" in record or len(self.g) == 1, "no multipliers of rows")
        mu = binary(record["rows"], len(self.g)) if "rows" in record else [ONE]
        need(all(m >= 0 for m in mu), "a negative multiplier")
        form = _sum(mu, self.g)
        for k in range(len(self.net.z) - 1, -1, -1):
            if k in self.net.differences:
                self.over.part(form, k)
            K = form.terms.pop(self.net.inputs + k, ZERO)
            if k not in self.slopes:
                if K:
                    self.over.closed(form, k, K)
                continue
            ends, given = path.get(k, self.over.z_of(k)), w.get(k, ZERO)
            if k in self.planes:
                upper, drop = self.planes[k]
                v = self.second(k, K, given, k in path, k in w)
                form.put(K + v, upper)
                form.constant += min(ZERO, -(K + v) * drop)
                form.constant += min(-v * self.over.value(k, z) - given * z for z in (ZERO, *ends))
            else:
                t = self.slopes[k]
                if k in self.chords and k not in w and k not in path:
                    # The multiplier that makes the slope that of the chord.
                    given = K * (self.over.chord(k) - t) if (K < 0) != (self.net.s[k] > 1) else ZERO
                form.put(K * t, self.net.z[k])
                if (curve := self.net.curves.get(k)) is not None:
                    form.constant += curve.term(ends, K, t, given)
                elif k in self.net.differences:
                    form.constant += self.over.rest(k, K, t)
                else:
                    form.constant += min(K * (self.over.value(k, z) - t * z) - given * z for z in (ZERO, *ends))
            form.put(given, self.net.z[k])
        return self.over.interval(form)

    def second(self, k: int, K: Fraction, w: Fraction, is_split: bool, is_given: bool) -> Fraction:
        """The multiplier v of a neuron with a plane."""
        if k not in self.neurons:
            return ZERO
        if is_split:
            return -K
        if K >= 0:
            return -K if is_given or k in self.chords else ZERO
        return -w / self.over.chord(k) if self.over.chord(k) > 0 else ZERO
