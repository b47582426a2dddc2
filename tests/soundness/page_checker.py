"""A checker of certificates, written from ``docs/certificates.md`` alone, in rational arithmetic throughout.

It knows the networks of ``page_network`` and properties in VNN-LIB 1.0; of the rest it says ``Unsupported``. It imports
nothing of the package, is slow, and rounds only outward, to short numbers: what it accepts is a proof by the page's own
words. The project's checker is compared with it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
from fractions import Fraction
from itertools import pairwise, product
from typing import Any

from tests.soundness.page_functions import ONE, ZERO, Kinked, Smooth, down, up
from tests.soundness.page_network import (
    Form,
    Network,
    Refused,
    Unsupported,
    need,
    read_network,
    with_tournaments,
)

Row = tuple[dict[int, Fraction], Fraction]
"""Coefficients other than zero of outputs, and the most that their sum may be."""

Box = tuple[list[Fraction], list[Fraction]]


Disjunct = tuple[list[Fraction], list[Fraction], list[Row]]
"""The ends of a box, as they are written, and rows."""


def read_property(text: bytes) -> list[Disjunct]:
    """Return the disjuncts of a file in VNN-LIB 1.0; strict conditions count as weak ones."""
    words = re.sub(r";[^\n]*", "", text.decode()).replace("(", " [ ").replace(")", " ] ").split()
    if "vnnlib-version" in words:
        raise Unsupported("VNN-LIB 2.0")
    commands = json.loads(
        "[" + ",".join(w if w in "[]" else json.dumps(w) for w in words).replace("[,", "[").replace(",]", "]") + "]"
    )
    inputs = sum(command[0] == "declare-const" and command[1].startswith("X_") for command in commands)
    choices = _expanded(["and", *(command[1] for command in commands if command[0] == "assert")])
    return [one for conditions in choices if (one := _disjunct(conditions, inputs)) is not None]


def _expanded(formula: list[Any]) -> list[list[Any]]:
    """Return the alternatives of a formula, each a list of conditions."""
    if formula[0] == "or":
        return [one for part in formula[1:] for one in _expanded(part)]
    if formula[0] == "and":
        return [[a for part in chosen for a in part] for chosen in product(*map(_expanded, formula[1:]))]
    if formula[0] not in ("<=", ">=", "="):
        raise Unsupported(str(formula[0]))
    return [[formula]]


def _linear(term: Any) -> Form:
    """Return a sum as a form, in which X_i has the number 2·i and Y_i 2·i + 1."""
    if isinstance(term, str):
        return Form({2 * int(term[2:]) + (term[0] == "Y"): ONE}) if term[0] in "XY" else Form(constant=Fraction(term))
    operator, *parts = term[0], *map(_linear, term[1:])
    if operator == "*":
        one, other = sorted(parts, key=lambda form: len(form.terms))
        return other * one.constant
    total = -parts[0] if operator == "-" and len(parts) == 1 else parts[0].copy()
    for part in parts[1:]:
        total.put(ONE if operator == "+" else -ONE, part)
    return total


def _disjunct(conditions: list[Any], inputs: int) -> Disjunct | None:
    lower, upper, rows = [[] for _ in range(inputs)], [[] for _ in range(inputs)], list[Row]()
    for operator, left, right in conditions:
        for sign in {"=": (ONE, -ONE), "<=": (ONE,), ">=": (-ONE,)}[operator]:
            total = _linear(["-", left, right]) * sign
            most = -total.constant
            if not total.terms:
                if most < 0:
                    return None
            elif all(name % 2 for name in total.terms):
                rows.append(({name // 2: value for name, value in sorted(total.terms.items())}, most))
            else:
                if len(total.terms) > 1:
                    raise Unsupported("a condition on several variables")
                ((name, value),) = total.terms.items()
                (upper if value > 0 else lower)[name // 2].append(most / value)
    if not all([*lower, *upper]):
        raise Unsupported("an input without bounds")
    box = [max(ends) for ends in lower], [min(ends) for ends in upper]
    return None if any(low > high for low, high in zip(*box, strict=True)) else (*box, rows)


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


def _multiple(row: Row, of: Row) -> bool:
    """Whether a row is a positive multiple of another."""
    (terms, most), (others, limit) = row, of
    if not terms or terms.keys() != others.keys():
        return False
    i = next(iter(terms))
    factor = terms[i] / others[i]
    return factor > 0 and most == factor * limit and all(terms[i] == factor * others[i] for i in terms)


def check(certificate: bytes, network: bytes, prop: bytes) -> str:
    """Return the claim of a certificate that holds.

    Raises:
        Refused: if the certificate proves nothing.
        Unsupported: if it is about something that this checker does not know.
    """
    first, *found, last = read_records(certificate)
    need(last == {"end": len(found) + 1} and type(last["end"]) is int, "no end")
    if {"arithmetic", "family", "other", "pairs"} & set(first):
        raise Unsupported("an arithmetic, a family or two networks")
    keys(first, "certificate", "claim", "network", "property", "says")
    need(first["certificate"] == 6 and type(first["certificate"]) is int, "another version")
    need(isinstance(first["says"], str), "no text")
    need(first["network"] == hashlib.sha256(network).hexdigest(), "another network")
    need(first["property"] == hashlib.sha256(prop).hexdigest(), "another property")
    disjuncts = read_property(prop)
    if first["claim"] == "sat":
        need(len(found) == 1, "three records are expected")
        keys(found[0], "point")
        _reaches(network, disjuncts, found[0]["point"])
    else:
        need(first["claim"] == "unsat", "no claim")
        _Unsat(network, disjuncts, found).check()
    return str(first["claim"])


def comparing(rows: list[Row]) -> bool:
    """Return True if all rows compare two outputs, so that a head does not matter."""
    return bool(rows) and all(len(row) == 2 and not sum(row.values()) and not most for row, most in rows)


def _reaches(network: bytes, disjuncts: list[Disjunct], point: Any) -> None:
    """Refuse a point that is no counterexample."""
    for lower, upper, rows in disjuncts:
        net = read_network(network, headless=comparing(rows))
        values = x = [rational(value) for value in a_list(point, "a point", net.inputs)]
        for atom in net.atoms[net.inputs :]:
            if isinstance(atom.function, Smooth) or atom.noise:
                raise Unsupported("a point of a curve")
            made = max(values[i] for i in atom.rivals) if atom.rivals else ZERO
            made = made if atom.function is None else atom.function.value(values[atom.z])
            values = [*values, made if atom.form is None else at(atom.form, values)]
        inside = all(low <= v <= high for low, v, high in zip(lower, x, upper, strict=True))
        if inside and all(sum(c * values[net.outputs[i]] for i, c in row.items()) <= most for row, most in rows):
            return
    raise Refused("the point is not unsafe")


def at(form: Form, values: list[Fraction]) -> Fraction:
    return form.constant + sum((c * values[k] for k, c in form.terms.items()), ZERO)


Given = tuple[Fraction | None, Fraction | None]
"""The slopes t⁺ and t⁻ that a certificate has given."""


class State:
    """What holds in a node: ends of all atoms, slopes, planes, and the polytopes that are left."""

    def __init__(self, net: Network, box: Box) -> None:
        self.net, self.left = net, dict[int, list[Form]]()
        self.lower: list[Any] = [*box[0], *[None] * (len(net.atoms) - net.inputs)]
        self.upper: list[Any] = [*box[1], *[None] * (len(net.atoms) - net.inputs)]
        self.slopes: dict[int, Given] = {}
        self.planes: dict[int, Form] = {}
        self.fresh, self.before = False, len(net.activations)  # rows pass activations before this one
        self.propagate()

    def copy(self) -> State:
        new = State.__new__(State)
        new.__dict__.update({k: v.copy() if isinstance(v, list | dict | set) else v for k, v in vars(self).items()})
        return new

    @property
    def empty(self) -> bool:
        return any(low > high for low, high in zip(self.lower, self.upper, strict=True))

    def cut(self, atom: int, low: Fraction | None, high: Fraction | None) -> None:
        """Let the ends of an atom be no worse than these."""
        for ends, end, better in ((self.lower, low, max), (self.upper, high, min)):
            if end is not None:
                ends[atom] = end if ends[atom] is None else better(ends[atom], end)

    def propagate(self) -> None:
        """Interval arithmetic from operator to operator, as far as the node is not empty."""
        for k, atom in enumerate(self.net.atoms):
            if k and self.lower[k - 1] > self.upper[k - 1]:
                return self._fill(k)
            if atom.form is not None:
                off = self.error(k)
                self.cut(k, down(self.least(atom.form) - off), up(-self.least(-atom.form) + off))
                if atom.twin >= 0:
                    self.cut(k, self.lower[atom.twin], self.upper[atom.twin])
            elif atom.function is not None:
                low, high = self.lower[atom.z], self.upper[atom.z]
                self.cut(
                    k, down(atom.function.least(low, high, ONE, ZERO)), up(-atom.function.least(low, high, -ONE, ZERO))
                )
            elif atom.rivals:
                low, high = (max(ends[i] for i in atom.rivals) for ends in (self.lower, self.upper))
                self.cut(k, low, high)
        return None

    def _fill(self, first: int) -> None:
        """Give the atoms of an empty node some ends."""
        for k in range(first, len(self.net.atoms)):
            self.lower[k] = ZERO if self.lower[k] is None else self.lower[k]
            self.upper[k] = ZERO if self.upper[k] is None else self.upper[k]

    def least(self, form: Form) -> Fraction:
        """Return a lower bound of a form over its atoms' ends."""
        return form.constant + sum((min(c * self.lower[k], c * self.upper[k]) for k, c in form.terms.items()), ZERO)

    def error(self, k: int) -> Fraction:
        atom = self.net.atoms[k]
        if not atom.noise or atom.form is None:
            return ZERO
        sizes = (abs(c) * max(-self.lower[i], self.upper[i]) for i, c in atom.form.terms.items())
        return atom.noise * sum(sizes, ZERO)

    def row(self, form: Form, slopes: dict[int, Given]) -> Form:
        """Rule 1: return a form of the inputs that is a lower bound of a form, wherever the state holds."""
        form = form.copy()
        for k in range(len(self.net.atoms) - 1, self.net.inputs - 1, -1):
            atom, K = self.net.atoms[k], form.terms.pop(k, ZERO)
            if not K:
                continue
            if atom.form is not None:
                form.put(K, atom.form).constant -= abs(K) * self.error(k)
            elif atom.function is None:
                form.put(K, self.maximum(k, K))
            else:
                z, low, high = atom.z, self.lower[atom.z], self.upper[atom.z]
                if K < 0 and k in self.planes and low < 0 < high:
                    form.put(K, self.planes[k])
                    continue
                lam = K * self.slope(k, slopes, K >= 0)
                form.put(lam, Form({z: ONE})).constant += atom.function.least(low, high, K, lam)
        return form

    def slope(self, k: int, slopes: dict[int, Given], positive: bool) -> Fraction:
        function, z = self.net.atoms[k].function, self.net.atoms[k].z
        assert function is not None
        low, high = self.lower[z], self.upper[z]
        if (fixed := function.fixed(low, high)) is not None:
            return fixed
        for found in (slopes.get(k), self.slopes.get(k)):
            if found is not None and (t := found[0 if positive else 1]) is not None:
                return t
        return function.slopes(low, high)[0 if positive else 1]

    def maximum(self, k: int, K: Fraction) -> Form:
        """Return a rival that is below a maximum, or a line that is above it."""
        rivals = self.net.atoms[k].rivals
        low, high = ([ends[i] for i in rivals] for ends in (self.lower, self.upper))
        i, j = low.index(max(low)), high.index(max(high))
        others = [high[n] for n in range(len(rivals)) if n != j]
        if K >= 0:
            return Form({rivals[i]: ONE})
        top = max([low[j], *others])
        t = max(ZERO, down((high[j] - top) / (high[j] - low[j]))) if high[j] > low[j] else ZERO
        return Form({rivals[j]: t} if t else {}, max([(1 - t) * high[j], *(v - t * low[j] for v in others)]))

    def bound(self, form: Form, slopes: dict[int, Given]) -> Fraction:
        """Return rule 1's lower bound of a form."""
        return self.least(self.row(form, slopes))

    def tighten(self, a: int, rows: list[tuple[int, int]] | None, slopes: dict[int, Given]) -> None:
        """Bound neurons of an activation: the rows that are named, or both ends of the open ones."""
        self.fresh = False
        if self.empty:
            return
        z = self.net.activations[a].z
        rows = [(j, side) for j in self.open(a) for side in (1, -1)] if rows is None else rows
        found = [(z[j], side, self.bound(Form({z[j]: Fraction(side)}), slopes)) for j, side in rows]
        for atom, side, value in found:
            self.cut(atom, *((down(value), None) if side > 0 else (None, up(-value))))
        self.propagate()

    def open(self, a: int) -> list[int]:
        activation = self.net.activations[a]
        if not activation.is_maximum:
            ends = [
                (self.net.atoms[r].function, self.lower[z], self.upper[z])
                for r, z in zip(activation.r, activation.z, strict=True)
            ]
            return [
                j
                for j, (function, low, high) in enumerate(ends)
                if function is not None and function.is_open(low, high)
            ]
        winners: set[int] = set()
        for r in activation.r:
            rivals = self.net.atoms[r].rivals
            top = max(self.lower[i] for i in rivals)
            may = {i for i in rivals if self.upper[i] > top}
            winners |= may if len(may) > 1 else set()
        return [j for j, z in enumerate(activation.z) if z in winners]

    def play(self) -> None:
        """Let rows pass maxima as tournaments from here on."""
        self.net, place, numbers = with_tournaments(self.net)
        for name in ("lower", "upper"):
            ends: list[Any] = [None] * len(self.net.atoms)
            for k, end in zip(place, getattr(self, name), strict=True):
                ends[k] = end
            setattr(self, name, ends)
        self.left = {
            p: [Form({place[k]: c for k, c in form.terms.items()}, form.constant) for form in rows]
            for p, rows in self.left.items()
        }
        self.slopes, self.planes, self.before = {}, {}, numbers[self.before]
        self.propagate()

    def make_bounds(self, slopes: dict[int, Given]) -> None:
        """Bound every activation that rows pass, if the box was halved and none has been bounded since."""
        for a in range(self.before) if self.fresh else ():
            self.tighten(a, None, slopes)
        self.fresh = False


class _Unsat:
    """The parts of a certificate, record by record."""

    def __init__(self, network: bytes, disjuncts: list[Disjunct], found: list[dict[str, Any]]) -> None:
        self.network, self.disjuncts, self.records, self.place = network, disjuncts, found, 0
        self.nets: dict[bool, Network] = {}
        self.boxes: list[Box] = []
        self.box_of = []
        for lower, upper, _ in disjuncts:
            box = [outward(v, False) for v in lower], [outward(v, True) for v in upper]
            if box not in self.boxes:
                self.boxes.append(box)
            self.box_of.append(self.boxes.index(box))

    def next(self) -> dict[str, Any]:
        need(self.place < len(self.records), "a record is missing")
        self.place += 1
        return self.records[self.place - 1]

    def check(self) -> None:
        """Refuse what does not prove that no disjunct is reached."""
        covered: list[tuple[int, list[Row]]] = []
        while self.place < len(self.records):
            record = self.next()
            keys(record, "part")
            keys(record["part"], "box", "polytopes")
            box = index(record["part"]["box"], len(self.boxes))
            polytopes = [self.polytope(given) for given in a_list(record["part"]["polytopes"], "polytopes")]
            need(bool(polytopes), "a part without polytopes")
            covered += [(box, polytope) for polytope in polytopes]
            headless = all(map(comparing, polytopes))
            if headless not in self.nets:
                self.nets[headless] = read_network(self.network, headless)
            net = self.nets[headless]
            state = State(net, (list(self.boxes[box][0]), list(self.boxes[box][1])))
            for p, polytope in enumerate(polytopes):
                need(all(i < len(net.outputs) for row, _ in polytope for i in row), "no such output")
                state.left[p] = [self.g(net, row) for row in polytope]
            self.tree(state)
        for (_, _, rows), number in zip(self.disjuncts, self.box_of, strict=True):
            holding = (polytope for box, polytope in covered if box == number)
            covers = any(all(any(_multiple(row, r) for r in rows) for row in polytope) for polytope in holding)
            need(covers, "a disjunct is not covered")

    def polytope(self, given: Any) -> list[Row]:
        found = []
        for row in a_list(given, "a polytope"):
            keys(row, "y", "most")
            pairs = [a_list(term, "a term", 2) for term in a_list(row["y"], "a row")]
            terms = [(index(i, 1 << 31), rational(c)) for i, c in pairs]
            need(all(a[0] < b[0] for a, b in pairwise(terms)), "outputs out of order")
            need(all(c for _, c in terms), "a coefficient of zero")
            found.append((dict(terms), rational(row["most"])))
        return found

    def g(self, net: Network, row: Row) -> Form:
        total = Form(constant=-row[1])
        for i, c in row[0].items():
            total.put(c, Form({net.outputs[i]: ONE}))
        return total

    def tree(self, state: State) -> None:
        """Read a tree, and refuse what proves nothing."""
        waiting = [state]
        while waiting:
            node = waiting.pop()
            while node.left:
                record = self.next()
                name = next((key for key in ENDING if key in record), None)
                if name is None:
                    self.change(node, record)
                    continue
                if name == "close":
                    for p, form in self.rows(node, record).items():
                        need(node.empty or node.least(form) > 0, "a row is not positive")
                        del node.left[p]
                    continue
                keys(record, name)
                waiting += getattr(self, name)(node, record[name])
                break

    def split(self, node: State, given: Any) -> list[State]:
        a, j, m, e = a_list(given, "a split", 4)
        activation, (v,) = node.net.activations[index(a, len(node.net.activations))], binary([e, m])
        z = activation.z[index(j, len(activation.z))]
        high, low = node.copy(), node
        high.cut(z, v, None)
        low.cut(z, None, v)
        return [low, high]

    def halve(self, node: State, given: Any) -> list[State]:
        i, m, e = a_list(given, "a half", 3)
        i, (v,) = index(i, node.net.inputs), binary([e, m])
        low, high = node.copy(), node
        low.cut(i, None, v)
        high.cut(i, v, None)
        for half in (low, high):
            half.fresh, half.slopes = True, {}
            half.propagate()
        return [high, low]

    def only(self, node: State, given: Any) -> list[State]:
        chosen = a_list(given, "polytopes")
        need(all(type(p) is int and p in node.left for p in chosen), "a polytope that is not left")
        need(0 < len(set(chosen)) == len(chosen) < len(node.left), "some of the polytopes are expected")
        one, others = node.copy(), node
        one.left = {p: g for p, g in node.left.items() if p in chosen}
        others.left = {p: g for p, g in node.left.items() if p not in chosen}
        return [others, one]

    def change(self, node: State, record: dict[str, Any]) -> None:
        """Read a record that changes the state of a node."""
        if "bound" in record:
            keys(record, "bound", perhaps=("rows", "slopes"))
            a = index(record["bound"], len(node.net.activations))
            rows, count = None, len(node.net.activations[a].z)
            if "rows" in record:
                flat = a_list(record["rows"], "rows")
                need(len(flat) % 2 == 0 and all(s in (1, -1) and type(s) is int for s in flat[1::2]), "no sides")
                rows = list(zip((index(j, count) for j in flat[::2]), flat[1::2], strict=True))
            node.tighten(a, rows, self.slopes(node, record.get("slopes", [])))
        elif "plane" in record:
            self.plane(node, record)
        elif "tighten" in record:
            self.tighten(node, record)
        elif "slopes" in record:
            keys(record, "slopes")
            node.slopes |= self.slopes(node, record["slopes"], node.slopes)
        elif "tournaments" in record:
            keys(record, "tournaments")
            need(record["tournaments"] is True and not node.net.has_tournaments, "tournaments are said once")
            node.play()
        else:
            raise Refused("a record that is not known here")

    def slopes(self, node: State, given: Any, known: dict[int, Given] | None = None) -> dict[int, Given]:
        found = dict(known or {})
        for entry in a_list(given, "slopes"):
            a, where, numbers, kind = a_list(entry, "slopes", 4)
            need(kind in ("lower", "upper", "both"), "no slopes of this kind")
            for k, t in self.named(node, a, where, numbers):
                plus, minus = found.get(k, (None, None))
                found[k] = (plus if kind == "upper" else t, minus if kind == "lower" else t)
        return found

    def named(self, node: State, a: Any, where: Any, numbers: Any) -> list[tuple[int, Fraction]]:
        """Return neurons of an activation, each once, as atoms, with numbers."""
        activation = node.net.activations[index(a, len(node.net.activations))]
        need(not activation.is_maximum, "slopes or multipliers of a maximum")
        places = [index(j, len(activation.z)) for j in a_list(where, "neurons")]
        need(len(set(places)) == len(places), "a neuron twice")
        return list(zip((activation.r[j] for j in places), binary(numbers, len(places)), strict=True))

    def rows(self, node: State, record: dict[str, Any]) -> dict[int, Form]:
        """Return the forms of the rows that a record combines, by polytope."""
        keys(record, "close", perhaps=("slopes", "multipliers"))
        slopes = self.slopes(node, record.get("slopes", []))
        multipliers: dict[int, Fraction] = {}
        seen = [a_list(entry, "multipliers", 3) for entry in a_list(record.get("multipliers", []), "multipliers")]
        for a, where, numbers in seen:
            multipliers |= self.named(node, a, where, numbers)
        need(len({a for a, _, _ in seen}) == len(seen), "an activation twice")
        node.make_bounds(slopes)
        ends = Form()
        for k, w in multipliers.items() if not node.empty else ():
            z = node.net.atoms[k].z
            ends.put(w, Form({z: ONE})).constant -= max(w * node.lower[z], w * node.upper[z])
        found: dict[int, Form] = {}
        for entry in a_list(record["close"], "polytopes"):
            p, *mu = a_list(entry, "a polytope")
            need(type(p) is int and p in node.left and p not in found and len(mu) < 2, "no polytope that is left")
            g = node.left[p]
            factors = binary(mu[0], len(g)) if mu else [ONE]
            need(len(factors) == len(g) and all(m >= 0 for m in factors), "multipliers of rows")
            total = Form()
            for m, row in zip(factors, g, strict=True):
                total.put(m, row)
            found[p] = total if node.empty else node.row(total + ends, slopes)
        return found

    def plane(self, node: State, record: dict[str, Any]) -> None:
        keys(record, "plane", "terms", "bends")
        a, j = a_list(record["plane"], "a plane", 2)
        activation = node.net.activations[index(a, len(node.net.activations))]
        k = -1 if activation.is_maximum else activation.r[index(j, len(activation.z))]
        function = node.net.atoms[k].function
        if k < 0 or not isinstance(function, Kinked):
            raise Refused("a plane of such a neuron")
        mu, nu = (max(ZERO, bend) for bend in binary(record["bends"], 2))
        g, entries = Form(), [a_list(entry, "terms", 3) for entry in a_list(record["terms"], "terms")]
        need(all(type(b) is int and -1 <= b < a for b, _, _ in entries), "terms that are not earlier")
        need(len({b for b, _, _ in entries}) == len(entries), "an activation twice")
        for b, where, numbers in entries:
            if b == -1:
                inputs = [index(i, node.net.inputs) for i in a_list(where, "inputs")]
                need(len(set(inputs)) == len(inputs), "an input twice")
                pairs = list(zip(inputs, binary(numbers, len(inputs)), strict=True))
            else:
                pairs = self.named(node, b, where, numbers)
            for atom, value in pairs:
                g.put(value, Form({atom: ONE}))
        if node.empty:
            return
        z = node.net.atoms[k].z
        above, below = (node.bound(g + Form({z: -c}) if c else g, {}) for c in (1 - mu, function.slope + nu))
        c = max(mu * node.upper[z] - above, -nu * node.lower[z] - below)
        node.planes[k] = g + up(c)

    def tighten(self, node: State, record: dict[str, Any]) -> None:
        keys(record, "tighten")
        a, j, side, m, e = a_list(record["tighten"], "a claim", 5)
        activation, (v,) = node.net.activations[index(a, len(node.net.activations))], binary([e, m])
        z = activation.z[index(j, len(activation.z))]
        need(side in (1, -1) and type(side) is int, "no side")
        proof = node.copy()
        proof.left = {0: [Form({z: Fraction(side)}, -v)]}
        proof.before = a
        self.tree(proof)
        node.cut(z, *((v, None) if side > 0 else (None, -v)))
        if not node.empty:
            node.propagate()


ENDING = ("close", "split", "halve", "only")
