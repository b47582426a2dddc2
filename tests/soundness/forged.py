"""Certificates that somebody forges: none of something false is accepted, and none ends in a traceback.

Small networks of one or two inputs are drawn with their properties, and bounds, branch and bound, the same with tighter
bounds of neurons, the same over planes, and zonotopes of boxes prove what they can. Their certificates are changed at
random: fields, numbers (huge and tiny ones, too), order and structure of records, and what they say of the property.

The kind ``dense`` is that of ``forged_dense``. Of all others (``forged_networks``) the property is a threshold b, and
c·y ≤ b is unsafe. The greatest b that is accepted with the certificate's own numbers is found by bisection; changed
certificates are asked about that, and about a b at which the network is known to be unsafe. The certificate of the
plain file is made one of the spoken file by powers of two.

``python -m tests.soundness.forged --count 20000 --seed 1`` tries all kinds and prints what is wrong, how many
certificates were accepted, and why the others were refused. Interrupted, it prints this of the certificates tried so
far. ``--kind`` names one kind of network, ``--keep`` a folder for what was wrongly accepted.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from tests.soundness import forged_dense
from tests.soundness.forged_networks import KINDS, Net, Referee, Scales, Vector, drawn
from tests.soundness.forgery import Findings, decimal, forged, provers, reason
from tests.support.certificates import Case, Records, checked, records, written
from verifiable_relu.check import BadInput, Refused
from verifiable_relu.check.model import read_model
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network import read_onnx
from verifiable_relu.network.family import hardened
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.read import read_vnnlib
from verifiable_relu.trust.certificate_file import write_unsat

EVERY = ("dense", *KINDS)

FINEST = 64
"""Thresholds are as near to what is false as a gap over two to this power."""


def short(value: Fraction) -> Fraction:
    """A number that is at least a given one, with 40 digits."""
    if not value:
        return value
    power = 0
    while abs(value) >= Fraction(10) ** (power + 1):
        power += 1
    while abs(value) < Fraction(10) ** power:
        power -= 1
    unit = Fraction(10) ** (power - 39)
    return -(-value // unit) * unit


def scientific(value: Fraction) -> str:
    """A number whose denominator divides a power of ten, written with an exponent where it is small."""
    if abs(value) > Fraction(1, 1 << 100) or not value:
        return decimal(value)
    power = 0
    while (value * 10**power).denominator > 1:
        power += 1
    digits = str(abs(value.numerator) * 10**power // value.denominator)
    return f"{'-' if value < 0 else ''}{digits[0]}.{digits[1:] or '0'}e{len(digits) - 1 - power}"


def prop(net: Net, scales: Scales, most: Fraction) -> bytes:
    """The VNN-LIB file in which c·y ≤ ``most`` is unsafe."""
    unit = Fraction(2) ** scales.inputs
    lines = [f"(declare-const X_{i} Real)" for i in range(len(net.lower))]
    lines += [f"(declare-const Y_{i} Real)" for i in range(len(net.row))]
    for i, (low, high) in enumerate(zip(net.lower, net.upper, strict=True)):
        lines += [f"(assert (>= X_{i} {decimal(low * unit)}))", f"(assert (<= X_{i} {decimal(high * unit)}))"]
    terms = " ".join(f"(* {value}.0 Y_{i})" for i, value in enumerate(net.row))
    return "\n".join([*lines, f"(assert (<= (+ {terms} 0.0) {scientific(most)}))"]).encode()


def certificate(folder: Path, net: Net, referee: Referee, number: int) -> tuple[Records, Fraction] | None:
    """A certificate of the plain file, and its threshold, if one is found."""
    unit = Fraction(2) ** net.scales.outputs
    rng = random.Random(net.style)
    gap = (referee.high - referee.least) / unit * rng.choice([Fraction(1, 64), Fraction(1, 8), Fraction(1, 2)])
    most = Fraction(float((referee.least / unit) - gap)) - Fraction(1, 1 << rng.choice([4, 12, 30]))
    text = prop(net, Scales(), most)
    (folder / "p.vnnlib").write_bytes(text)
    network = read_onnx(net.plain)
    if net.joint:
        network = hardened(network, [float(lam) for lam in net.joint])
    (query,) = [Query(network, each) for each in read_vnnlib(folder / "p.vnnlib").properties]
    made = provers() if net.linear else provers()[:4]
    with torch.no_grad():
        proof = made[number % len(made)](query)
    if proof is None:
        return None
    try:
        write_unsat(folder / "made", net.plain, text, [(0, proof)], net.joint)
    except UnsupportedError:
        return None
    return rescaled(records(folder / "made"), net), most * unit


def rescaled(found: Records, net: Net) -> Records:
    """The certificate of the plain file as one of the spoken file: each number by the power of two of what it is."""
    scales, target = net.scales, net.scales.outputs
    found[0]["network"] = hashlib.sha256(net.spoken).hexdigest()
    for record in found:
        shifts: dict[str, int] = {}
        if "activation" in record:
            shifts = {"lower": scales.hidden, "upper": scales.hidden}
        elif "tighter" in record:
            shifts, target = {"least": scales.hidden}, scales.hidden
        elif "tree" in record:
            target = scales.outputs
        elif "leaf" in record:
            shifts = {"leaf": target - scales.hidden}
        elif "halve" in record:
            record["halve"][2] += scales.inputs
        for key, shift in shifts.items():
            if record[key]:
                record[key][0] += shift
    return found


def about(net: Net, given: Records, most: Fraction) -> tuple[bytes, Records]:
    """The property with another threshold, and the certificate that says so."""
    text, found = prop(net, net.scales, most), copy.deepcopy(given)
    found[0]["property"] = hashlib.sha256(text).hexdigest()
    for record in found:
        for polytope in record["part"]["polytopes"] if "part" in record else ():
            for row in polytope:
                output, coefficient = row["y"][0]
                row["most"] = str(most * Fraction(coefficient) / net.row[output])
    return text, found


def weighed(given: Records, power: int) -> Records:
    """The certificate with its rows' multipliers as small, or as large, as they can be."""
    found = copy.deepcopy(given)
    for record in found:
        if "plain" in record:
            record["plain"][0] = power
        elif "leaf" in record:
            record["rows"] = [power, *record.get("rows", [0, 1])[1:]]
            record["leaf"][0] = min(max(record["leaf"][0] + power, -900), 900)
    return found


@dataclass
class Forger:
    """Tries certificates about one network.

    Attributes:
        keep: where to write what is wrongly accepted.
    """

    folder: Path
    net: Net
    referee: Referee
    found: Findings
    place: str
    keep: Path | None = None

    def accepted(self, text: bytes, changed: Records, what: str) -> bool:
        """Whether a certificate is accepted; counted under its kind."""
        made = written(changed)
        try:
            checked(self.folder, Case(self.net.spoken, text, changed), made)
        except (Refused, BadInput) as error:
            self.found.ended[f"{self.net.kind}: refused"] += 1
            self.found.reasons[reason(str(error))] += 1
            return False
        except Exception as error:
            self.wrong(f"{type(error).__name__}: {str(error)[:200]}", text, made)
            return False
        self.found.ended[f"{self.net.kind}: accepted{what}"] += 1
        return True

    def wrong(self, why: str, text: bytes, made: bytes) -> None:
        self.found.wrong.append(f"{self.place}: {why}")
        if self.keep is not None:
            name = self.place.replace(" ", "-").replace(",", "")
            (self.keep / f"{name}.net.onnx").write_bytes(self.net.spoken)
            (self.keep / f"{name}.prop.vnnlib").write_bytes(text)
            (self.keep / f"{name}.cert.jsonl").write_bytes(made)

    def tried(self, given: Records, most: Fraction, what: str = "") -> bool:
        """Whether a certificate is accepted with a threshold, and what is wrong with that."""
        text, changed = about(self.net, given, most)
        if not self.accepted(text, changed, what):
            return False
        if most >= self.referee.least:
            least = float(self.referee.least)
            self.wrong(
                f"accepted, but the row is {least!r} at a point, at most {float(most)!r}", text, written(changed)
            )
        elif (why := self.left(changed)) is not None:
            self.wrong(f"accepted, but {why}", text, written(changed))
        return True

    def tried_changed(self, changed: Records, most: Fraction) -> None:
        """Try a certificate that may not be of its form any more."""
        try:
            about(self.net, changed, most)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):
            changed = [record for record in changed if "part" not in record]
        self.tried(changed, most)

    def tightest(self, given: Records, most: Fraction) -> Fraction:
        """The greatest threshold that is accepted, found by bisection between ``most``, which is, and what is false."""
        gap = self.referee.least - most
        low, high = 0, FINEST + 1
        while high - low > 1:
            middle = (low + high) // 2
            accepted = self.tried(given, self._short(self.referee.least - gap / (1 << middle), most), ", tighter")
            low, high = (middle, high) if accepted else (low, middle)
        self.found.ended[f"{self.net.kind}: to the last bits"] += low >= 40
        return self._short(self.referee.least - gap / (1 << low), most)

    def _short(self, value: Fraction, otherwise: Fraction) -> Fraction:
        found = short(value)
        return found if found < self.referee.least else otherwise

    def left(self, changed: Records) -> str | None:
        """The bounds of a neuron that a value leaves which it has."""
        unit = Fraction(2) ** self.net.scales.inputs
        whole = [v * unit for v in self.net.lower], [v * unit for v in self.net.upper]
        boxes: list[tuple[Vector, Vector]] = []
        low, high, number = *whole, 0
        for record in changed:
            if "part" in record:
                boxes = [whole]
            elif "halve" in record:
                at, mantissa, exponent = record["halve"]
                low, high = boxes.pop()
                below, above = list(high), list(low)
                below[at] = above[at] = mantissa * Fraction(2) ** exponent
                boxes += [(above, high), (low, below)]
            elif "root" in record or "zonotope" in record:
                (low, high), number = boxes.pop(), 0
            elif "activation" in record or "tighter" in record:
                at = record.get("tighter", number)
                number += "activation" in record
                if all(a <= b for a, b in zip(low, high, strict=True)):
                    values = self.referee.inputs_of(at, low, high)
                    for j, side, bound in _claims(record):
                        if any(side * z[j] < bound for z in values):
                            return f"neuron {j} of activation {at} leaves its bounds"
        return None


def _claims(record: dict[str, Any]) -> Iterator[tuple[int, int, Fraction]]:
    """What a record claims: side·z_j ≥ bound, of neurons j."""
    if "tighter" in record:
        exponent, *least = record["least"] or [0]
        for j, side, bound in zip(record["rows"][::2], record["rows"][1::2], least, strict=True):
            yield j, side, bound * Fraction(2) ** exponent
        return
    for key, side in (("lower", 1), ("upper", -1)):
        exponent, *ends = record[key] or [0]
        for j, bound in enumerate(ends):
            yield j, side, side * bound * Fraction(2) ** exponent


def forge(
    kind: str,
    count: int,
    seed: int,
    each: int = 15,
    found: Findings | None = None,
    keep: Path | None = None,
    first: bool = False,
) -> Findings:
    """Try at least ``count`` certificates of a kind of network, about ``each`` of one network.

    Args:
        found: what these come to is added to it, certificate by certificate.
        keep: a folder for what is wrongly accepted.
        first: whether to end with the first network of which something false is accepted.
    """
    found = Findings() if found is None else found
    if kind == "dense":
        return forged_dense.forge(count, seed, found=found)
    before = sum(found.ended.values())
    with tempfile.TemporaryDirectory() as name:
        for number in range(8 * count):
            if sum(found.ended.values()) - before >= count or (first and found.wrong):
                break
            try:
                net = drawn(kind, seed * 1_000_003 + number)
                referee = Referee(net)
            except OverflowError:
                continue
            try:
                read_model(net.spoken)
            except BadInput as error:
                found.ended[f"{kind}: not read"] += 1
                found.reasons[reason(str(error))] += 1
                continue
            if (made := certificate(Path(name), net, referee, number)) is None:
                continue
            one = Forger(Path(name), net, referee, found, f"{kind} {number} of seed {seed}", keep)
            _forge(one, *made, each, random.Random(f"{kind} {seed} {number}"))
    return found


def _forge(one: Forger, given: Records, most: Fraction, each: int, rng: random.Random) -> None:
    """Certificates of one network."""
    false = short(one.referee.least)
    if not one.tried(given, most, " unchanged"):
        # Numbers of such sizes may be beyond the checker; what is false must be beyond it, too.
        one.found.ended[f"{one.net.kind}: right, but refused"] += 1
        tightest, each = most, 3
    else:
        tightest = one.tightest(given, most)
    one.tried(given, false)
    for power in (-900, 900):
        one.tried(weighed(given, power), false)
    for _ in range(each):
        changed = given
        while changed == given:
            changed = forged(rng, given)
        one.tried_changed(changed, rng.choice([false, false, tightest]))


def main(arguments: list[str] | None = None) -> int:
    """Try forged certificates; exit status 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.soundness.forged")
    parser.add_argument("--count", type=int, default=2000, help="certificates of all kinds together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=EVERY, action="append", help="a kind of network; by default all")
    parser.add_argument("--keep", type=Path, help="a folder for what is wrongly accepted")
    options = parser.parse_args(arguments)
    found, kinds = Findings(), options.kind or EVERY
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    try:
        for kind in kinds:
            forge(kind, -(-options.count // len(kinds)), options.seed, 15, found, options.keep)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    print(*(f"{count:6} {reason}" for reason, count in found.reasons.most_common()), sep="\n")
    print(*found.wrong, sep="\n")
    print(dict(found.ended), f"{len(found.wrong)} wrong")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
