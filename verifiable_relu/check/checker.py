"""One certificate, one network, one property: accepted, with what was proven, or refused.

Points of *sat* are evaluated exactly, or enclosed where there is no exact value.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from verifiable_relu.check.bounds import root
from verifiable_relu.check.errors import BadInput, Refused
from verifiable_relu.check.functions import Kinked, Signs
from verifiable_relu.check.graph import Activation, AffineNode, Graph, MaximumNode, joined
from verifiable_relu.check.model import read_model
from verifiable_relu.check.numbers import Matrix, Number, outward
from verifiable_relu.check.proof import Proof
from verifiable_relu.check.properties import Disjunct, read_property
from verifiable_relu.check.records import Records, content, listed, number_of, opened, rational
from verifiable_relu.check.running import ARITHMETICS

VERSION = 6

LARGEST_NETWORK, LARGEST_PROPERTY = 1 << 31, 1 << 25
"""Most bytes of files, unpacked."""


def check(certificate: Path, net: Path, spec: Path, arithmetic: str | None = None, other: Path | None = None) -> str:
    """Return what the certificate proves, in one sentence.

    Args:
        certificate, net, spec: the files.
        arithmetic: that the claim is expected to be about; None for whatever the certificate says.
        other: the second network of a certificate of two.

    Raises:
        Refused: if it proves less than it claims; with the record and the reason.
        BadInput: if a file cannot be read.
    """
    files = {"network": content(net, LARGEST_NETWORK), "property": content(spec, LARGEST_PROPERTY)}
    if other is not None:
        files["other"] = content(other, LARGEST_NETWORK)
    with opened(certificate) as file, np.errstate(all="ignore"):
        records = Records(file.readline)
        try:
            return _checked(records, files, {"network": net, "property": spec, "other": other}, arithmetic)
        except Refused as error:
            raise Refused(str(error) if "record " in str(error) else f"{records.place}: {error}") from None


def _checked(records: Records, files: dict[str, bytes], paths: dict[str, Any], arithmetic: str | None) -> str:
    two = "other" in files
    keys = ("certificate", "claim", "says", *files, *(("pairs",) if two else ()), "family", "arithmetic")
    given = dict(zip(keys, records.take(*keys[:-2], optional=keys[-2:]), strict=True))
    _require_header(given, files, arithmetic)
    running, lambdas = ARITHMETICS.get(given["arithmetic"]), given["family"]
    graph = _named(paths["network"], read_model, files["network"], running)
    if lambdas is not None:
        unknown = running is not None and running.result
        Refused.when(unknown, "no family is known in an arithmetic in which stored weights are rounded")
        graph = graph.hardened([rational(value) for value in listed(lambdas)], running is not None)
    if two:
        second = _named(paths["other"], read_model, files["other"], running)
        counted = [len(each.activations) for each in (graph, second)]
        pairs = [
            [number_of(i, n, "activation") for i, n in zip(listed(pair, 2), counted, strict=True)]
            for pair in listed(given["pairs"])
        ]
        Refused.when(len({j for _, j in pairs}) < len(pairs), "an activation is in two pairs")
        graph = joined(graph, second, [(i, j) for i, j in pairs])
    sizes = graph.nodes[0].size, graph.nodes[graph.output].size
    text = files["property"].decode("utf-8-sig", "replace")
    disjuncts = _named(paths["property"], read_property, text, *sizes)
    if given["claim"] == "sat":
        point = [rational(value) for value in listed(records.take("point")[0], sizes[0])]
        at = check_point(graph, disjuncts, point)
        records.end()
        return f"sat: the point is in the box, and in real arithmetic the network maps it into disjunct {at}"
    counts = Proof(graph, disjuncts, records, running).check()
    proved = f"neuron bounds {counts.bounds}, boxes {counts.boxes}, leaves {counts.leaves}"
    return f"{_claimed(given, two)}; checked: {proved}"


def _require_header(given: dict[str, Any], files: dict[str, bytes], arithmetic: str | None) -> None:
    """Require of the first record that it speaks of these files, in a way that is known."""
    version, claim, ran = (given[key] for key in ("certificate", "claim", "arithmetic"))
    known = type(version) is int and version == VERSION
    Refused.when(not known, f"version {str(version)[:20]} of the format is not known")
    for what, data in files.items():
        named = f"it speaks of another {what}, whose SHA-256 is {str(given[what])[:64]}"
        Refused.when(given[what] != hashlib.sha256(data).hexdigest(), named)
    Refused.when(claim not in ("sat", "unsat"), f"'{str(claim)[:20]}' is neither sat nor unsat")
    Refused.when(ran is not None and str(ran) not in ARITHMETICS, "the arithmetic is not known")
    expected = arithmetic in (None, ran or "real")
    Refused.when(not expected, f"it is about {str(ran or 'real')[:20]} arithmetic, not about {arithmetic}")
    more = ran is not None or given["family"] is not None or "other" in files
    Refused.when(claim == "sat" and more, "a claim of sat is about one network in real arithmetic")


def _claimed(given: dict[str, Any], two: bool) -> str:
    lambdas, ran = given["family"], given["arithmetic"]
    subject, stored = "the pair of networks" if two else "the network", "in real arithmetic on the stored weights"
    whom = f"no evaluation of {subject} in {ran}" if ran else f"{stored} {subject}"
    if lambdas is not None:
        whom = f"{whom}, and {stored} no" if ran else f"{stored} every"
        whom += f" network with ReLU or λ-GELU, λ ≥ {', '.join(lambdas)}, in the place of its activations"
        whom += f"{', with the other network' * two},"
    return f"unsat: {whom} maps {'any' if ran else 'no'} point of the property's boxes into its unsafe set"


def _named(path: Path, read: Callable[..., Any], *given: Any) -> Any:
    try:
        return read(*given)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error


def _rationals(values: Any) -> Number:
    found = np.empty(len(values), object)
    found[:] = [Fraction(value) for value in values]
    return found


def _product(matrix: Matrix, x: Number) -> Number:
    """Return matrix·x of rational x, by sums of integers over one denominator and a power of two."""
    if matrix.ndim == 1:
        return np.asarray(x * _rationals(matrix))
    entries, scale = sparse.coo_array(matrix), math.lcm(1, *(value.denominator for value in x))
    ratios = [value.as_integer_ratio() for value in entries.data.tolist()]
    power = max((bottom for _, bottom in ratios), default=1)
    whole = np.array([top * (power // bottom) for top, bottom in ratios], object)
    sums = np.zeros(matrix.shape[0], dtype=object)
    np.add.at(sums, entries.row, np.array([int(value * scale) for value in x], object)[entries.col] * whole)
    return _rationals([Fraction(int(total), scale * power) for total in sums])


def evaluated(graph: Graph, point: list[Fraction]) -> list[Fraction] | None:
    """Return the outputs at a point, exactly; None if some number of the network is irrational, or no binary one."""
    values: dict[int, Number] = {0: np.array(point, object)}
    for number in graph.order[1:]:
        node = graph.nodes[number]
        z = values[node.source]
        if isinstance(node, AffineNode) and not node.relative and not np.any(node.lost):
            values[number] = _rationals(node.bias)
            for source, matrix in node.terms:
                values[number] = values[number] + _product(matrix, values[source])
        elif isinstance(node, MaximumNode):
            values[number] = z[node.rivals].max(0)
        elif isinstance(node, Activation) and isinstance(node.function, Kinked):
            values[number] = np.where(z > 0, z, z * _rationals(node.function.slope))
        elif isinstance(node, Activation) and isinstance(node.function, Signs):
            values[number] = _rationals(np.sign(z).astype(float))
        else:
            return None
    return list(values[graph.output])


def enclosed(graph: Graph, point: list[Fraction]) -> list[tuple[Fraction, Fraction]]:
    """Return numbers between which the outputs at a point lie."""
    if (exact := evaluated(graph, point)) is not None:
        return [(value, value) for value in exact]
    low, high = (np.array([outward(value, side) for value in point]) for side in (-np.inf, np.inf))
    ends = root(graph, low, high).ends[graph.output]
    return [(Fraction(a), Fraction(b)) for a, b in zip(*(side.ravel().tolist() for side in ends), strict=True)]


def check_point(graph: Graph, disjuncts: list[Disjunct], point: list[Fraction]) -> int:
    """Return the number of a disjunct that the point is in.

    Raises:
        Refused: if it is in none.
        BadInput: if the outputs are not known closely enough to say so.
    """
    unsure = False
    outputs_of: dict[bool, list[tuple[Fraction, Fraction]]] = {}
    for at, disjunct in enumerate(disjuncts):
        inside = all(low <= x <= high for low, x, high in zip(disjunct.lower, point, disjunct.upper, strict=True))
        if not inside or any(point[i] == (disjunct.upper if up else disjunct.lower)[i] for i, up in disjunct.open_ends):
            continue
        comparing = all(row.compares for row in disjunct.rows)
        if comparing not in outputs_of:
            outputs_of[comparing] = enclosed(graph.asked(comparing), point)
        outputs, sure, possible = outputs_of[comparing], True, True
        for row in disjunct.rows:
            sums = [sum((c * outputs[i][int((c > 0) == up)] for i, c in row.y), Fraction(0)) for up in (False, True)]
            below = [value < row.most or (value == row.most and not row.strict) for value in sums]
            possible, sure = possible and below[0], sure and below[1]
        if sure:
            return at
        unsure = unsure or possible
    BadInput.when(unsure, "the outputs at the point are not known closely enough")
    raise Refused("the point is in no disjunct of the property")
