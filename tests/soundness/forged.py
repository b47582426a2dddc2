"""Certificates that somebody forges: none of something false is accepted, and none ends in a traceback.

Small networks of one or two inputs are drawn with their properties, and bounds, branch and bound, the same with tighter
bounds of neurons, the same over planes, and zonotopes of boxes prove what they can. Their certificates are changed at
random: fields, numbers (huge and tiny ones, too), order and structure of records, and what they say of the property. Of
each that is accepted the claim and all claimed bounds are compared with the network's exact values, in rational
arithmetic: the box is cut, neuron by neuron, into polygons on which the network is affine.

``python -m tests.soundness.forged --count 20000 --seed 1`` prints what is wrong, how many certificates were accepted,
and why the others were refused. Interrupted, it prints this of the certificates tried so far.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from tests.support.certificates import Case, Records, checked, over_planes, records, written
from verifiable_relu.check import BadInput, Refused
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network import read_onnx
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.read import read_vnnlib
from verifiable_relu.trust.certificate import Cover, Proof
from verifiable_relu.trust.certificate_file import write_unsat
from verifiable_relu.verifiers.bab import Bab
from verifiable_relu.verifiers.bab.refine import Refinement
from verifiable_relu.verifiers.bab.search import Rounds
from verifiable_relu.verifiers.bab.tree import Search
from verifiable_relu.verifiers.base import Budget, Verifier
from verifiable_relu.verifiers.incomplete import Crown
from verifiable_relu.verifiers.split import RecordedSplit

Vector = list[Fraction]
Affine = tuple[list[Vector], Vector]


SECONDS = 5.0
"""For one proof; a case that takes longer is left out."""


@dataclass(frozen=True)
class Layer:
    """z = weight·x + bias, and then slope·z where z ≤ 0; without slopes z itself."""

    weight: list[Vector]
    bias: Vector
    slope: Vector | None


@dataclass(frozen=True)
class Drawn:
    """A network, a box, and the unsafe set as a union of polytopes of rows (coefficients, most)."""

    layers: list[Layer]
    lower: Vector
    upper: Vector
    polytopes: list[list[tuple[Vector, Fraction]]]


def drawn(seed: int) -> Drawn:
    """The case of a number; the sizes of some of its numbers are far from one another."""
    rng = random.Random(seed)
    # By this power of two are the inputs small and the first weights large, or the other way round.
    power = Fraction(2) ** rng.choice([0, 0, 0, 0, 20, -20, 60, -60])

    def short(most: int = 8) -> Fraction:
        return Fraction(rng.randint(-most, most), rng.choice([1, 2, 4, 8]))

    sizes = [rng.randint(1, 2), *(rng.randint(1, 3) for _ in range(rng.randint(1, 2))), rng.randint(1, 2)]
    kind = rng.choice(["relu", "relu", "leaky", "prelu"])
    layers = []
    for at, (before, after) in enumerate(pairwise(sizes)):
        weight = [[short() * (power if at == 0 else 1) for _ in range(before)] for _ in range(after)]
        slopes = {
            "relu": [Fraction(0)] * after,
            "leaky": [Fraction(rng.choice([1, 5, -1]), 4)] * after,
            "prelu": [Fraction(rng.choice([-2, 0, 1, 4, 6]), 4) for _ in range(after)],
        }[kind]
        layers.append(Layer(weight, [short() for _ in range(after)], slopes if at < len(sizes) - 2 else None))
    center = [short() / power for _ in range(sizes[0])]
    radius = [abs(short(16)) / power if rng.random() < 0.95 else Fraction(0) for _ in center]
    lower, upper = ([c + s * r for c, r in zip(center, radius, strict=True)] for s in (-1, 1))
    found = Drawn(layers, lower, upper, [])
    cells = found_cells(found, lower, upper)[-1]
    for _ in range(rng.choice([1, 1, 1, 2])):
        polytope = []
        for _ in range(rng.choice([1, 1, 2])):
            c = [short(3) for _ in range(sizes[-1])]
            if not any(c):
                c[0] = Fraction(1)
            values = [dot(c, y) for _, _, ys in cells for y in ys]
            # Values at kinks may be thirds, which no decimal is.
            low, high = (Fraction(float(end)) for end in (min(values), max(values)))
            beside = rng.choice([Fraction(1, 1000), Fraction(1, 8), (high - low) / 4, Fraction(1)])
            polytope.append((c, low - beside if rng.random() < 0.8 else low + beside))
        found.polytopes.append(polytope)
    return found


def dot(a: Vector, b: Vector) -> Fraction:
    return sum((x * y for x, y in zip(a, b, strict=True)), Fraction(0))


Cell = tuple[list[Vector], list[Vector], list[Vector]]
"""The corners of a polygon of inputs (or of a segment), values before the latest activation there, values after it."""


def cut(corners: list[Vector], values: list[list[Vector]], at: Vector) -> tuple[list[Vector], list[list[Vector]]]:
    """The part of a polygon where a function that is affine, ``at`` its corners, is at most zero."""
    kept, others = [], [[] for _ in values]  # type: ignore[var-annotated]
    for i, here in enumerate(at):
        j = (i + 1) % len(at)
        if here <= 0:
            kept.append(corners[i])
            for into, value in zip(others, values, strict=True):
                into.append(value[i])
        if (here < 0 < at[j]) or (at[j] < 0 < here):
            share = here / (here - at[j])
            for into, value in zip([kept, *others], [corners, *values], strict=True):
                into.append([p + share * (q - p) for p, q in zip(value[i], value[j], strict=True)])
    return kept, others


def found_cells(case: Drawn, lower: Vector, upper: Vector) -> list[list[Cell]]:
    """Behind each layer the cells of a box."""
    if len(lower) == 1:
        corners = [lower, upper]
    else:
        corners = [[a, b] for a, b in zip([lower[0], upper[0], upper[0], lower[0]], [lower[1]] * 2 + [upper[1]] * 2)]  # noqa: B905
    cells: list[Cell] = [(corners, corners, corners)]
    every = []
    for layer in case.layers:
        behind = []
        for x, _, values in cells:
            z = [[dot(row, v) + b for row, b in zip(layer.weight, layer.bias, strict=True)] for v in values]
            parts = [(x, z)]
            for j in range(len(layer.bias) if layer.slope is not None else 0):
                halves = []
                for corners, zs in parts:
                    for sign in (1, -1):
                        kept, (mine,) = cut(corners, [zs], [sign * v[j] for v in zs])
                        if kept:
                            halves.append((kept, mine))
                parts = halves
            for corners, zs in parts:
                slopes = layer.slope or [Fraction(1)] * len(layer.bias)
                inactive = [all(v[j] <= 0 for v in zs) for j in range(len(slopes))]
                after = [[s * a if off else a for s, a, off in zip(slopes, v, inactive, strict=True)] for v in zs]
                behind.append((corners, zs, after))
        cells = behind
        every.append(cells)
    return every


def reached(case: Drawn, polytopes: list[list[tuple[Vector, Fraction]]]) -> bool:
    """Whether some point of the box is mapped into some polytope."""
    for corners, _, values in found_cells(case, case.lower, case.upper)[-1]:
        for polytope in polytopes:
            x, y = corners, values
            for c, most in polytope:
                x, (y,) = cut(x, [y], [dot(c, v) - most for v in y])
            if x:
                return True
    return False


def network(case: Drawn) -> bytes:
    """The ONNX file of a case."""
    nodes, stored, name = [], [], "x"
    for at, layer in enumerate(case.layers):
        stored.append(numpy_helper.from_array(np.array(layer.weight, np.float32), f"w{at}"))
        stored.append(numpy_helper.from_array(np.array(layer.bias, np.float32), f"b{at}"))
        last = layer.slope is None
        nodes.append(helper.make_node("Gemm", [name, f"w{at}", f"b{at}"], ["y" if last else f"z{at}"], transB=1))
        if layer.slope is not None:
            name = f"r{at}"
            if not any(layer.slope):
                nodes.append(helper.make_node("Relu", [f"z{at}"], [name]))
            else:
                stored.append(numpy_helper.from_array(np.array(layer.slope, np.float32), f"s{at}"))
                nodes.append(helper.make_node("PRelu", [f"z{at}", f"s{at}"], [name]))
    ends = [("x", len(case.lower)), ("y", len(case.layers[-1].bias))]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, size]) for name, size in ends]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8).SerializeToString()


def decimal(value: Fraction) -> str:
    """A number whose denominator divides a power of ten, written without a quotient."""
    scale = 0
    while (value * 10**scale).denominator > 1:
        scale += 1
    digits = str(abs(value.numerator) * 10**scale // value.denominator).rjust(scale + 1, "0")
    return ("-" if value < 0 else "") + digits[: len(digits) - scale] + "." + (digits[len(digits) - scale :] or "0")


def prop(case: Drawn) -> bytes:
    """The VNN-LIB file of a case."""
    lines = [f"(declare-const X_{i} Real)" for i in range(len(case.lower))]
    lines += [f"(declare-const Y_{i} Real)" for i in range(len(case.layers[-1].bias))]
    for i, (low, high) in enumerate(zip(case.lower, case.upper, strict=True)):
        lines += [f"(assert (>= X_{i} {decimal(low)}))", f"(assert (<= X_{i} {decimal(high)}))"]
    parts = []
    for polytope in case.polytopes:
        rows = []
        for c, most in polytope:
            terms = " ".join(f"(* {decimal(value)} Y_{i})" for i, value in enumerate(c))
            rows.append(f"(<= (+ {terms} 0.0) {decimal(most)})")
        parts.append(f"(and {' '.join(rows)})")
    return "\n".join([*lines, f"(assert (or {' '.join(parts)}))"]).encode()


Prover = Callable[[Query], Proof | Cover | None]


def provers() -> list[Prover]:
    """Each makes certificates of another kind, or none of what it cannot prove."""
    search = Search(record=True, steps=0, finishing=0)
    refining = Rounds(Refinement(leaves=8), first=0, patience=0)

    def by(verifier: Verifier) -> Prover:
        return lambda query: verifier.verify([query], Budget.each(SECONDS, 1))[0].proof

    return [
        by(Bab(search=search)),
        by(Crown(record=True)),
        by(Bab(search=search, rounds=refining)),
        by(RecordedSplit(batch=4)),
        lambda query: over_planes(query, search, seconds=SECONDS),
    ]


def certificate(folder: Path, case: Drawn, seed: int) -> Records | None:
    """A certificate that the case is unsat, if it is found to be."""
    data, text = network(case), prop(case)
    (folder / "p.vnnlib").write_bytes(text)
    net = read_onnx(data)
    queries = [Query(net, each) for each in read_vnnlib(folder / "p.vnnlib").properties]
    proofs = []
    for query in queries:
        made = provers()
        if (proof := made[seed % len(made)](query)) is None:
            return None
        proofs.append((0, proof))
    try:
        write_unsat(folder / "made", data, text, proofs)
    except UnsupportedError:
        return None
    return records(folder / "made")


def lists(found: Records) -> list[list[int]]:
    """All lists of numbers of a certificate."""
    keys = ("lower", "upper", "slopes", "plain", "tree", "leaf", "rows", "row", "halve", "least", "zonotope", "chords")
    keys += ("plane", "parts", "bends", "terms")
    every = (record[key] for record in found for key in keys if key in record)
    return [value for value in every if isinstance(value, list) and value]


def forged(rng: random.Random, given: Records) -> Records:
    """A certificate with one to four changes."""
    found = copy.deepcopy(given)
    for _ in range(rng.choice([1, 1, 2, 4])):
        # What an earlier change has made strange is left alone.
        with contextlib.suppress(AttributeError, IndexError, KeyError, TypeError, ValueError):
            change(rng, found)
    return found


def change(rng: random.Random, found: Records) -> None:
    """One change of a certificate.

    Raises:
        IndexError: if there is nothing to change; and other exceptions for a certificate that is not of its form.
    """
    place, other = rng.randrange(1, len(found) - 1), rng.randrange(1, len(found) - 1)
    parts = [record["part"] for record in found if "part" in record]
    match rng.randrange(10):
        case 0 | 1 | 2 | 3:
            number(rng, rng.choice(lists(found)))
        case 4:
            found[place], found[other] = found[other], found[place]
        case 5:
            found.insert(place, copy.deepcopy(found[other]))
        case 6:
            del found[place]
        case 7:
            start = rng.choice([i for i, record in enumerate(found) if "root" in record])
            end = next(i for i in range(start + 1, len(found)) if "part" in found[i] or "end" in found[i])
            found[end:end] = copy.deepcopy(found[start:end])
            halve = [rng.randint(0, 1), rng.randint(-20, 20), rng.choice([0, -1, -3, -63, 60])]
            found.insert(start, {"halve": halve})
        case 8:
            row = rng.choice(rng.choice(rng.choice(parts)["polytopes"]))
            if rng.random() < 0.5:
                row["most"] = str(Fraction(row["most"]) + rng.choice([1, -1, Fraction(1, 1000), 100]))
            else:
                term = rng.choice(row["y"])
                term[1] = str(Fraction(term[1]) * rng.choice([2, -1, Fraction(1, 3)]))
        case 9:
            strange = [None, -1, 0, 1, 10**9, "1", [], [0], {}, True, [1 << 53, 900], "1e999", "-1/3", [0, None]]
            found[place][rng.choice(list(found[place]))] = rng.choice(strange)


def number(rng: random.Random, chosen: list[int]) -> None:
    """Change one number of a list: its exponent, or a mantissa."""
    place = rng.randrange(len(chosen)) if rng.random() < 0.7 else 0
    value = chosen[place]
    if place == 0:
        chosen[0] = value + rng.choice([1, -1, 1, -1, 4, -4, 30, -30, 900 - value, 500, -500, -900 - value])
    else:
        steps = [1, -1, 1 << rng.randrange(50), -(1 << rng.randrange(50)), -2 * value, value, -value]
        chosen[place] = value + rng.choice(steps)


def lifted(rng: random.Random, case: Drawn, given: Records) -> tuple[Drawn, Records]:
    """The case, and its certificate, with a row whose right side is larger, seldom smaller."""
    polytopes = [list(polytope) for polytope in case.polytopes]
    at = rng.randrange(len(polytopes))
    number = rng.randrange(len(polytopes[at]))
    c, most = polytopes[at][number]
    by = rng.choice([Fraction(1, 8192), Fraction(1, 512), Fraction(1, 8), Fraction(1), Fraction(9), -Fraction(1, 8)])
    polytopes[at][number] = c, most + by
    found = copy.deepcopy(given)
    used = [(i, v) for i, v in enumerate(c) if v]
    for record in found:
        for polytope in record["part"]["polytopes"] if "part" in record else ():
            for row in polytope:
                terms = [(i, Fraction(v)) for i, v in row["y"]]
                factor = terms[0][1] / used[0][1]
                same = factor > 0 and terms == [(i, v * factor) for i, v in used]
                if same and Fraction(row["most"]) == most * factor:
                    row["most"] = str((most + by) * factor)
    return Drawn(case.layers, case.lower, case.upper, polytopes), found


def wrong(case: Drawn, accepted: Records) -> str | None:
    """What an accepted certificate claims that is false."""
    if reached(case, case.polytopes):
        return "the unsafe set is reached"
    boxes: list[tuple[Vector, Vector]] = []
    low, high = case.lower, case.upper
    for record in accepted:
        if "part" in record:
            boxes = [(case.lower, case.upper)]
        elif "halve" in record:
            place, mantissa, exponent = record["halve"]
            low, high = boxes.pop()
            middle = mantissa * Fraction(2) ** exponent
            below, above = list(high), list(low)
            below[place] = above[place] = middle
            boxes += [(above, high), (low, below)]
        elif "root" in record:
            low, high = boxes.pop()
            cells = iter(found_cells(case, low, high)) if all(a <= b for a, b in zip(low, high, strict=True)) else None
            told = []
        elif "zonotope" in record:
            boxes.pop()
        elif "activation" in record and cells is not None:
            values = [z for _, zs, _ in next(cells) for z in zs]
            told.append(values)
            for j in range(len(values[0])):
                ends = [record[side][1 + j] * Fraction(2) ** record[side][0] for side in ("lower", "upper")]
                if not ends[0] <= min(z[j] for z in values) or not max(z[j] for z in values) <= ends[1]:
                    return f"neuron {j} of {record['activation']} leaves its bounds"
        elif "tighter" in record and cells is not None:
            values, (exponent, *least) = told[record["tighter"]], record["least"]
            for j, side, bound in zip(record["rows"][::2], record["rows"][1::2], least, strict=True):
                if not bound * Fraction(2) ** exponent <= min(side * z[j] for z in values):
                    return f"neuron {j} of the activation {record['tighter']} leaves its tighter bounds"
    return None


@dataclass
class Findings:
    """What a number of forged certificates came to.

    Attributes:
        ended: how many were accepted, and how many refused.
        reasons: how many were refused with each reason, numbers and names left out.
        wrong: what is wrong, a line each.
    """

    ended: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def forge(count: int, seed: int, each: int = 40, found: Findings | None = None) -> Findings:
    """Try ``count`` certificates, ``each`` made from one.

    Args:
        found: what these come to is added to it, certificate by certificate.
    """
    found = Findings() if found is None else found
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, (case, given) in enumerate(_pool(folder, seed, -(-count // each))):
            rng = random.Random(f"{seed} {number}")
            for attempt in range(each):
                mine, changed = case, given
                while attempt and mine is case and changed == given:
                    if rng.random() < 0.5:
                        mine, changed = lifted(rng, case, given)
                    if rng.random() < 0.9:
                        changed = forged(rng, changed)
                place = f"case {number} of seed {seed}, attempt {attempt}"
                _try(folder, mine, changed, place, found, unchanged=not attempt)
    return found


def _try(folder: Path, mine: Drawn, changed: Records, place: str, found: Findings, unchanged: bool) -> None:
    """Whether one certificate is accepted, and whether that is right."""
    text = prop(mine)
    changed[0]["property"] = hashlib.sha256(text).hexdigest()
    try:
        checked(folder, Case(network(mine), text, changed), written(changed))
    except (Refused, BadInput) as error:
        found.ended["refused"] += 1
        found.reasons[reason(str(error))] += 1
        if unchanged:
            found.wrong.append(f"{place}: a right certificate is refused: {error}")
        return
    except Exception as error:
        found.wrong.append(f"{place}: {type(error).__name__}: {str(error)[:200]}")
        return
    found.ended["accepted unchanged" if unchanged else "accepted"] += 1
    if (why := wrong(mine, changed)) is not None:
        found.wrong.append(f"{place}: accepted, but {why}")


def reason(message: str) -> str:
    """A message of the checker without its place, and without the numbers and names of one certificate."""
    message = message.split(": ", 1)[1] if message.startswith("record ") else message
    message = re.sub(r"'[^']*'", "…", message)
    message = re.sub(r"(a record of [a-z, ]+ is expected).*", r"\1", message)
    message = re.sub(r"\bnan\b|-?\binf\b|[-+]?\d+(\.\d+)?(e[-+]?\d+)?", "#", message)
    return re.sub(r"#[#, ]*#", "#", message)[:120]


def _pool(folder: Path, seed: int, count: int) -> Iterator[tuple[Drawn, Any]]:
    """So many cases with certificates."""
    number = 0
    while count:
        case = drawn(seed * 1_000_003 + number)
        if not reached(case, case.polytopes) and (given := certificate(folder, case, number)) is not None:
            count -= 1
            yield case, given
        number += 1


def main(arguments: list[str] | None = None) -> int:
    """Try forged certificates; exit status 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.soundness.forged")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    found = Findings()
    try:
        forge(options.count, options.seed, found=found)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    print(*(f"{count:6} {reason}" for reason, count in found.reasons.most_common()), sep="\n")
    print(*found.wrong, sep="\n")
    print(dict(found.ended), f"{len(found.wrong)} wrong")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
