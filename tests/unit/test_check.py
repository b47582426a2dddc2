"""The checker of certificates: what is right is accepted, whatever else is refused with the reason."""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from onnx import helper

from tests.support.asking import claims
from tests.support.certificates import Case, Records, checked, one_point, tree_case, written
from tests.support.onnx_files import onnx_file
from tests.support.processes import Process
from verifiable_relu.campaign.certificates import proofs
from verifiable_relu.check import BadInput, Refused
from verifiable_relu.check.checker import VERSION
from verifiable_relu.check.conditions import read_property
from verifiable_relu.network import read_onnx
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.read import read_vnnlib
from verifiable_relu.trust.certificate_file import write_unsat
from verifiable_relu.verifiers.auto import recording
from verifiable_relu.verifiers.bab import Bab

Fault = Callable[[Records], Records | bytes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture
def case(folder: Path) -> Case:
    found = tree_case(folder, "leaky")
    return Case(found.network, found.prop, copy.deepcopy(found.records))


def at(records: Records, key: str, number: int = 0) -> dict[str, Any]:
    """The record of a kind with this number among its kind."""
    return [record for record in records if key in record][number]


def put(key: str, value: Any, number: int = 0, of: str | None = None) -> Fault:
    """Change a value of one record."""

    def change(records: Records) -> Records:
        at(records, of or key, number)[key] = value
        return records

    return change


def edit(change: Callable[[Records], object]) -> Fault:
    """Change records in place."""

    def whole(records: Records) -> Records:
        change(records)
        return records

    return whole


def line(before: str, after: str) -> Fault:
    """Change the first place of a text in the file."""
    return lambda records: written(records).replace(before.encode(), after.encode(), 1)


def drop(key: str, number: int = 0) -> Fault:
    return edit(lambda records: records.remove(at(records, key, number)))


def leaves(records: Records) -> Records:
    return [record for record in records if "leaf" in record]


def flipped(records: Records) -> None:
    for record in leaves(records):
        record["leaf"] = [value if i % 2 or not i else -value for i, value in enumerate(record["leaf"])]


def branches_left_out(records: Records) -> Records:
    """The last leaf becomes the whole tree."""
    start, leaf = records.index(at(records, "split")), records.index(at(records, "leaf", -1))
    return [*records[:start], records[leaf], *records[leaf + 1 :]]


def everywhere(key: str, value: Any) -> Fault:
    """Change a value of all leaves."""
    return edit(lambda records: [leaf.update({key: value}) for leaf in leaves(records)])


def tree_below_itself(records: Records) -> Records:
    """A leaf is the whole tree again."""
    start = records.index(at(records, "split"))
    end = records.index(at(records, "end"))
    leaf = records.index(at(records, "leaf"))
    return [*records[:leaf], *records[start:end], *records[leaf + 1 :]]


def narrowed(records: Records) -> None:
    """All bounds of the second activation by a quarter."""
    claim = at(records, "activation", 1)
    for side in ("lower", "upper"):
        claim[side] = [claim[side][0] - 2, *(3 * value for value in claim[side][1:])]


def exchanged(records: Records) -> None:
    one, two = (records.index(at(records, "activation", number)) for number in (0, 1))
    records[one], records[two] = records[two], records[one]


def row(records: Records) -> dict[str, Any]:
    """The one row of the property."""
    found: dict[str, Any] = at(records, "part")["part"]["polytopes"][0][0]
    return found


FAULTS: dict[str, tuple[Fault, str]] = {
    "the digest of another network": (put("network", "0" * 64), "another network"),
    "the digest of another property": (put("property", "0" * 64), "another property"),
    "another version": (put("certificate", 1), "version"),
    "another claim": (put("claim", "proved"), "neither sat nor unsat"),
    "the other claim": (put("claim", "sat"), "point"),
    "a key left out": (edit(lambda r: r[0].pop("says")), "expected"),
    "a key too many": (edit(lambda r: r[0].update(more=1)), "expected"),
    "a key twice": (line('{"certificate"', '{"says": "", "certificate"'), "twice"),
    "a key twice in a row": (line('{"y"', '{"y": [], "y"'), "twice"),
    "a fraction in an integer's place": (line('"root": 2', '"root": 2.0'), "no integer"),
    "a number too large for a float": (line('"root": 2', '"root": 1e999'), "no integer"),
    "a string in a number's place": (put("root", "2"), "expected"),
    "a huge mantissa": (edit(lambda r: at(r, "lower")["lower"].__setitem__(1, 1 << 60)), "mantissa"),
    "a huge exponent": (edit(lambda r: at(r, "lower")["lower"].__setitem__(0, 10**6)), "exponent"),
    "a record that is a list": (lambda r: written(r).replace(b'{"root": 2}', b"[2]"), "object"),
    "a record that is no text": (lambda r: written(r).replace(b'{"root": 2}', b"\xff\xfe"), "record"),
    "an empty line": (lambda r: written(r).replace(b'{"root": 2}', b"\n"), "record"),
    "truncation within a line": (lambda r: written(r)[:-9], "too early"),
    "damage to what is packed": (lambda r: gzip.compress(written(r))[:60] + b"\0" * 40, "cannot be read"),
    "nothing at all": (lambda r: b"", "too early"),
    "another number of records": (line('"end": ', '"end": 1'), "before the end"),
    "something behind the end": (lambda r: written(r) + b'{"end": 1}\n', "follows"),
    "no part": (lambda r: [r[0]], "nothing is said"),
    "a part of no polytope": (edit(lambda r: at(r, "part")["part"].update(polytopes=[])), "polytopes"),
    "a part with another key": (edit(lambda r: at(r, "part")["part"].update(more=1)), "a box and polytopes"),
    "a box that the property has not": (edit(lambda r: at(r, "part")["part"].update(box=1)), "no box"),
    "a polytope without rows": (edit(lambda r: at(r, "part")["part"].update(polytopes=[[]])), "list of rows"),
    "a row further away": (edit(lambda r: row(r).update(most=str(Fraction(row(r)["most"]) - 1))), "nothing is said"),
    "a row nearer by": (edit(lambda r: row(r).update(most=str(Fraction(row(r)["most"]) + 5))), "not excluded"),
    "a row of an output that there is not": (edit(lambda r: row(r)["y"][1].__setitem__(0, 7)), "no output"),
    "a row whose outputs are out of order": (edit(lambda r: row(r)["y"].reverse()), "in order"),
    "a coefficient of zero": (edit(lambda r: row(r)["y"][0].__setitem__(1, "0")), "not zero"),
    "a coefficient that is a number": (edit(lambda r: row(r)["y"][0].__setitem__(1, 1)), "string"),
    "a quotient by zero": (edit(lambda r: row(r).update(most="1/0")), "rational"),
    "bounds of too few activations": (drop("activation", 1), "expected"),
    "activations exchanged": (edit(exchanged), "is expected"),
    "another number of activations": (put("root", 1), "activations are expected"),
    "an activation that the file has not": (put("activation", "nothing"), "is expected"),
    "bounds too few": (edit(lambda r: at(r, "lower")["lower"].pop()), "integers are expected"),
    "bounds exchanged": (
        edit(lambda r: at(r, "lower").update(lower=at(r, "lower")["upper"], upper=at(r, "lower")["lower"])),
        "above the upper",
    ),
    "bounds narrowed": (edit(narrowed), "is not proven"),
    "slopes too few": (edit(lambda r: at(r, "activation")["slopes"].pop()), "integers are expected"),
    "own slopes of no neuron": (put("row", [99, 1]), "no neuron"),
    "own slopes of no side": (put("row", [0, 0]), "a side is"),
    "own slopes far out of range": (
        edit(lambda r: at(r, "row").update(slopes=[9] + [1] * (len(at(r, "row")["slopes"]) - 1))),
        "is not proven",
    ),
    "slopes of a tree far out of range": (
        edit(lambda r: at(r, "tree").update(tree=[8] + [1] * (len(at(r, "tree")["tree"]) - 1))),
        "not excluded",
    ),
    "a neuron of a tree twice": (
        edit(lambda r: at(r, "tree")["neurons"].append(at(r, "tree")["neurons"][0])),
        "named twice",
    ),
    "a neuron of no activation": (edit(lambda r: at(r, "tree")["neurons"][0].__setitem__(0, 9)), "no activation"),
    "a neuron that an activation has not": (edit(lambda r: at(r, "tree")["neurons"][0][1].append(99)), "no neuron"),
    "neurons that are no list": (put("neurons", 3), "neurons are lists"),
    "the last leaf left out": (drop("leaf", -1), "record"),
    "branches left out": (branches_left_out, "not excluded"),
    "a split too many": (edit(lambda r: r.insert(r.index(at(r, "split")), at(r, "split"))), "split twice"),
    "a split made again below itself": (edit(lambda r: at(r, "split", 1).update(at(r, "split"))), "split twice"),
    "a tree below itself": (tree_below_itself, "split twice"),
    "a split of no neuron": (put("split", 99), "no neuron"),
    "a multiplier of no neuron": (edit(lambda r: at(r, "leaf")["leaf"].extend([99, 1])), "no neuron"),
    "a multiplier too few": (edit(lambda r: at(r, "leaf")["leaf"].append(0)), "pairs"),
    "a neuron with two multipliers": (edit(lambda r: at(r, "leaf")["leaf"].extend([0, 1, 0, 1])), "two multipliers"),
    "the signs of multipliers": (edit(flipped), "not excluded"),
    "multipliers all zero": (everywhere("leaf", [0]), "not excluded"),
    "huge multipliers": (edit(lambda r: [leaf["leaf"].__setitem__(0, 890) for leaf in leaves(r)]), "not excluded"),
    "a negative multiplier of a row": (put("rows", [0, -1], of="leaf"), "negative"),
    "multipliers of zero of the only row": (everywhere("rows", [0, 0]), "not excluded"),
    "multipliers of too many rows": (put("rows", [0, 1, 1], of="leaf"), "integers are expected"),
    "a leaf in a tree's place": (drop("tree"), "record"),
    "a box halved beyond its ends": (edit(lambda r: r.insert(2, {"halve": [0, 1000, 0]})), "beyond its ends"),
    "an input halved that there is not": (edit(lambda r: r.insert(2, {"halve": [3, 0, 0]})), "no input"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_refused_with_the_record_and_the_reason(name: str, folder: Path, case: Case) -> None:
    change, reason = FAULTS[name]
    changed = change(case.records)
    with pytest.raises(Refused, match="record ") as refused:
        checked(folder, case, changed if isinstance(changed, bytes) else written(changed))
    assert reason in str(refused.value)


def test_changes_that_leave_a_proof_are_accepted(folder: Path, case: Case) -> None:
    records = case.records
    assert checked(folder, case, gzip.compress(written(records))).startswith("unsat: ")
    start, end = records.index(at(records, "root")), records.index(at(records, "end"))
    halved = [*records[:start], {"halve": [1, -1, -2]}, *records[start:end], *records[start:]]
    assert "in 2 boxes" in checked(folder, case, written(halved))
    more = copy.deepcopy(records)
    for record in more:
        for key in ("lower", "upper", "slopes", "tree"):
            if key in record:
                record[key] = [record[key][0] - 3, *(8 * value for value in record[key][1:])]
    row(more)["y"], row(more)["most"] = [[0, "1/3"], [1, "-1/3"]], str(Fraction(row(records)["most"]) / 3)
    # Rows count with integer coefficients, whatever they are multiples of.
    assert checked(folder, case, written(more)).startswith("unsat: ")


@pytest.mark.parametrize("side", ["lower", "upper"])
def test_halving_makes_progress(side: str, folder: Path, case: Case) -> None:
    """At an end of the box one half would be the box itself, and that again and again."""
    (disjunct,) = read_property(case.prop.decode(), 3, 2)
    case.records.insert(2, {"halve": [0, int(8 * getattr(disjunct, side)[0]), -3]})
    with pytest.raises(Refused, match="beyond its ends or at one"):
        checked(folder, case, written(case.records))


def enough(case: Case, first: Records) -> bytes:
    """A certificate that begins with these records behind its head, and does not end."""
    return b"".join(json.dumps(record).encode() + b"\n" for record in [*case.records[:2], *first])


def halvings(case: Case) -> bytes:
    """Of the part of the box below the last point, again and again."""
    low, high = (getattr(read_property(case.prop.decode(), 3, 2)[0], side)[0] for side in ("lower", "upper"))
    points = [low + (high - low) * Fraction(2000 - at, 2048) for at in range(1500)]
    return enough(case, [{"halve": [0, int(point * 2**20), -20]} for point in points])


def strings(case: Case) -> bytes:
    record = {"part": {"box": 0, "polytopes": [[{"y": [[0, "1" * 4001]], "most": "0"}]]}}
    return enough(Case(case.network, case.prop, case.records[:1]), [record])


SIZES: dict[str, tuple[Callable[[Case], bytes], str]] = {
    "a line of many lists": (lambda case: b'{"a":[' + b"[]," * (1 << 22) + b"[]]}\n", "a line is too long"),
    "a line of many bytes": (lambda case: b'{"a":[' + b"1111," * (1 << 23) + b"1]}\n", "a line is too long"),
    "a line without an end": (lambda case: b"1" * (40 << 20), "a line is too long"),
    "a number of ten thousand digits": (lambda case: b'{"a": ' + b"1" * 10_000 + b"}\n", "too many digits"),
    "a rational number of many digits": (strings, "too many digits"),
    "deeply nested lists": (lambda case: b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}\n", "nested too deeply"),
    "deeply nested objects": (lambda case: b'{"a":' * 40 + b"1" + b"}" * 40 + b"\n", "nested too deeply"),
    "halvings of halvings": (halvings, "too deep"),
}
"""Certificates beyond the sizes that docs/certificates.md tells."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", SIZES)
def test_what_is_too_large_ends_in_one_line_and_little_memory(name: str, folder: Path, case: Case) -> None:
    made, said = SIZES[name]
    with pytest.raises(BadInput, match=said):
        checked(folder, case, gzip.compress(made(case), 1))
    files = ["--net", folder / "net.onnx", "--spec", folder / "p.vnnlib"]
    with Process(["-m", "verifiable_relu.check", folder / "certificate", *files]) as command:
        _, errors = command.communicate()
        assert command.wait() == 2
    assert len(errors.splitlines()) == 1 and said in errors
    assert command.mebibytes < 700


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("; a comment\0\n", "NUL"),
        ("(" * (1 << 22), "nested too deeply"),
        ("a " * (1 << 22) + "a a", "words"),
        (" " * (1 << 25) + " ", "larger than"),
    ],
)
def test_properties_that_are_too_large_or_not_plain_are_refused(text: str, said: str, folder: Path, case: Case) -> None:
    prop = case.prop + text.encode()
    case.records[0]["property"] = hashlib.sha256(prop).hexdigest()
    with pytest.raises(BadInput, match=said):
        checked(folder, case, written(case.records), prop=prop)


def test_files_that_cannot_be_read_are_named(folder: Path, case: Case) -> None:
    changed = case.records
    for key, name, data in (("network", "net.onnx", b"no network"), ("property", "p.vnnlib", b"(assert")):
        changed[0][key] = hashlib.sha256(data).hexdigest()
        with pytest.raises(BadInput, match=name):
            checked(folder, case, written(changed), **{"network" if key == "network" else "prop": data})
        changed = copy.deepcopy(tree_case(folder, "leaky").records)


def distance() -> bytes:
    """|x|, as relu(x) + relu(−x)."""
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["z"], transB=1),
        helper.make_node("Relu", ["z"], ["r"]),
        helper.make_node("Gemm", ["r", "v"], ["y"], transB=1),
    ]
    return onnx_file(nodes, {"x": [1, 1]}, {"y": [1, 1]}, 13, w=[[1.0], [-1.0]], v=[[1.0, 1.0]])


def unsafe(condition: str, low: str = "-1", high: str = "1") -> bytes:
    """A condition on the output is unsafe over [low, high]."""
    head = "(declare-const X_0 Real)\n(declare-const Y_0 Real)\n"
    return f"{head}(assert (<= X_0 {high}))\n(assert (>= X_0 {low}))\n(assert {condition})\n".encode()


def at_most(least: str, high: str = "1") -> bytes:
    """Y_0 ≥ least is unsafe over [−1, high]."""
    return unsafe(f"(>= Y_0 {least})", high=high)


def claimed(network: bytes, prop: bytes, *records: dict[str, Any]) -> Case:
    """A certificate of unsat with these records between its first one and its last one."""
    digests = {"network": hashlib.sha256(network).hexdigest(), "property": hashlib.sha256(prop).hexdigest()}
    head = {"certificate": VERSION, "claim": "unsat", **digests, "says": ""}
    return Case(network, prop, [head, *records, {"end": len(records) + 1}])


def by_hand(prop: bytes, least: str, lower: list[int] | None = None, upper: list[int] | None = None) -> Case:
    """|x| < least over [−1, 1] by the chords of both neurons, whose bounds are exactly ±1."""
    return claimed(
        distance(),
        prop,
        {"part": {"box": 0, "polytopes": [[{"y": [[0, "-1"]], "most": "-" + least}]]}},
        {"root": 1},
        {"activation": "r", "lower": lower or [0, -1, -1], "upper": upper or [0, 1, 1], "slopes": [0, 0, 0]},
        {"plain": [0, 1], "slopes": [0, 0, 0]},
    )


def test_what_rounding_hides_is_settled_exactly(tmp_path: Path) -> None:
    for least in ("1.125", "1.0000000000000000000001"):
        case = by_hand(at_most(least), least)
        # The bounds of the neurons are attained, so that no floating point proves them.
        assert "exact" in checked(tmp_path, case, written(case.records))
    case = by_hand(at_most("1"), "1")
    with pytest.raises(Refused, match="not excluded"):
        checked(tmp_path, case, written(case.records))


@pytest.mark.parametrize("side", ["lower", "upper"])
@pytest.mark.parametrize("neuron", [0, 1])
def test_a_bound_that_is_attained_cannot_be_moved_by_one_unit(side: str, neuron: int, tmp_path: Path) -> None:
    unit, sign = 1 << 50, -1 if side == "lower" else 1
    bounds = [-50, sign * unit, sign * unit]
    for move, proven in ((0, True), (1, True), (-1, False)):
        moved = list(bounds)
        moved[1 + neuron] += sign * move
        case = by_hand(at_most("1.125"), "1.125", **{side: moved})
        if proven:
            checked(tmp_path, case, written(case.records))
        else:
            with pytest.raises(Refused, match=f"the {side} bound .* of neuron {neuron} of 'r' is not proven"):
                checked(tmp_path, case, written(case.records))


@pytest.mark.parametrize("slope", [0, 1])
def test_a_split_leaves_the_phase_that_it_names(slope: int, tmp_path: Path) -> None:
    """With these slopes the remainders of all active, or of all inactive, neurons reach 1, and |x| reaches 1/2."""
    case = by_hand(at_most("0.5"), "0.5")
    split, leaf = (
        [{"split": 1}, {"leaf": [0]}, {"leaf": [0]}],
        {"tree": [0, slope, slope], "neurons": [[0, [0, 1]]], "chords": []},
    )
    case.records[4:5] = [leaf, {"split": 0}, *split, *copy.deepcopy(split)]
    with pytest.raises(Refused, match="the leaf is not excluded"):
        checked(tmp_path, case, written(case.records))


def test_a_multiplier_that_overflows_proves_nothing(tmp_path: Path) -> None:
    """The weight times the multiplier is infinite, while every term of the leaf's value is small as the input is."""
    nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["z"]), helper.make_node("Relu", ["z"], ["y"])]
    network = onnx_file(nodes, {"x": [1, 1]}, {"y": [1, 1]}, 13, w=[[2.0**100]], b=[-1.0])
    prop = unsafe("(<= Y_0 0.25)", repr(2.0**-101), repr(1.5 * 2.0**-100))
    for exponent in (0, 100, 500, 900):
        case = claimed(
            network,
            prop,
            {"part": {"box": 0, "polytopes": [[{"y": [[0, "1"]], "most": "0.25"}]]}},
            {"root": 1},
            {"activation": "y", "lower": [0, -1], "upper": [0, 1], "slopes": [0, 1]},
            {"tree": [0, 1], "neurons": [[0, [0]]], "chords": []},
            {"leaf": [exponent, 0, 1 << 52]},
        )
        with pytest.raises(Refused, match="the leaf is not excluded"):
            checked(tmp_path, case, written(case.records))


@pytest.mark.parametrize("most", ["1e999", "-1e999", "1e-999", f"1{'0' * 400}", "1e0999"])
def test_numbers_beyond_floating_point_end_in_one_line(most: str, tmp_path: Path) -> None:
    for prop in (at_most("1.125").replace(b"1.125", most.encode()), at_most("1.125", high=most)):
        case = by_hand(prop, "1.125")
        case.records[1]["part"]["polytopes"][0][0]["most"] = most
        with pytest.raises((Refused, BadInput)) as ended:
            checked(tmp_path, case, written(case.records))
        assert "\n" not in str(ended.value)


def test_every_disjunct_is_asked_for(tmp_path: Path) -> None:
    case = by_hand(unsafe("(or (and (>= Y_0 1.125)) (and (>= Y_0 3) (<= Y_0 4)) (and (<= Y_0 -1)))"), "1.125")
    with pytest.raises(Refused, match="nothing is said of disjunct 1"):
        checked(tmp_path, case, written(case.records))
    case = by_hand(unsafe("(or (and (>= Y_0 1.125)) (and (>= Y_0 1.125) (<= Y_0 4)))"), "1.125")
    assert checked(tmp_path, case, written(case.records)).startswith("unsat: ")


def test_every_box_is_asked_for(tmp_path: Path) -> None:
    text = (
        "(declare-const X_0 Real)(declare-const Y_0 Real)(assert (>= Y_0 1.125))"
        "(assert (or (and (>= X_0 -1) (<= X_0 1)) (and (>= X_0 0) (<= X_0 0.5)) (and (>= X_0 2) (<= X_0 1))))"
    )
    case = by_hand(text.encode(), "1.125")
    with pytest.raises(Refused, match="nothing is said of disjunct 1"):
        checked(tmp_path, case, written(case.records))
    second = copy.deepcopy(case.records[1:-1])
    second[0]["part"]["box"] = 1
    # The third box is empty.
    assert "in 2 boxes" in checked(tmp_path, case, written([*case.records[:-1], *second]))


@pytest.mark.parametrize("never", ["(>= 1 2)", "(< 2 2)", "(< Y_0 Y_0)", "(>= (- Y_0 Y_0) 1)"])
@pytest.mark.parametrize("always", ["(<= 1 2)", "(>= Y_0 Y_0)"])
def test_conditions_without_variables_hold_or_do_not(never: str, always: str, tmp_path: Path) -> None:
    """As the verifier reads them: what never holds is no disjunct, and what always holds asks for nothing."""

    def said(condition: str, records: Records | None = None) -> str:
        text = unsafe(condition).decode()
        (tmp_path / "p.vnnlib").write_text(text)
        theirs = [len(each.unsafe) for each in read_vnnlib(tmp_path / "p.vnnlib").properties]
        assert sum(theirs) == len(read_property(text, 1, 1)), condition
        case = by_hand(text.encode(), "1.125")
        return checked(tmp_path, case, written(case.records if records is None else [case.records[0]]))

    assert said(f"(or {never} (and {always} (>= Y_0 1.125)))").startswith("unsat: ")
    assert said(f"(and {never} (>= Y_0 1))", []).startswith("unsat: ")
    for condition in (f"(or {always} (>= Y_0 1.125))", f"(or {never} {always})"):
        with pytest.raises(Refused, match="nothing is said of disjunct"):
            said(condition)
        with pytest.raises(Refused, match="nothing is said of disjunct"):
            said(condition, [])


@pytest.mark.parametrize(
    "empty",
    [
        "(and (<= X_0 -2) (>= Y_0 2))",
        "(and (< X_0 0.5) (>= X_0 0.5) (>= Y_0 0))",
        "(and (<= X_0 0.5) (> 1 2))",
    ],
)
def test_boxes_that_nothing_lies_in_are_not_counted(empty: str, tmp_path: Path) -> None:
    """By the checker as by whoever numbers the boxes of a certificate, wherever the disjunct stands."""
    for parts in (f"{empty} (>= Y_0 1.125)", f"(>= Y_0 1.125) {empty}"):
        text = unsafe(f"(or {parts})")
        (tmp_path / "p.vnnlib").write_bytes(text)
        network = read_onnx(distance())
        queries = [Query(network, prop) for prop in read_vnnlib(tmp_path / "p.vnnlib").properties]
        outcomes = claims(recording(Bab()), queries, 60.0)
        write_unsat(tmp_path / "made", distance(), text, list(proofs(queries, outcomes, 60.0)))
        case = Case(distance(), text, [])
        assert checked(tmp_path, case, (tmp_path / "made").read_bytes()).startswith("unsat: ")


def test_a_point_is_checked_exactly(tmp_path: Path) -> None:
    prop = at_most("0.333", high="0.333")
    network = distance()
    case = Case(network, prop, [])
    good = ("333/1000", "-333/1000", "-0.5")
    for x in (*good, "0.3329999999999999999999", "0.334", "-2"):
        certificate = written(one_point(network, prop, [Fraction(x)]))
        if x in good:
            assert checked(tmp_path, case, certificate).startswith("sat: ")
        else:
            with pytest.raises(Refused, match="in no disjunct"):
                checked(tmp_path, case, certificate)
    strict = prop.replace(b"(>= Y_0", b"(> Y_0").replace(b"(<= X_0", b"(< X_0")
    with pytest.raises(Refused, match="in no disjunct"):
        checked(tmp_path, case, written(one_point(network, strict, [Fraction("0.333")])), prop=strict)
    for bad in ([], ["1/3", "1/3"], ["x"], [0.5], ["1/0"], ["1e999999999"], ["٣"], ["1_0"]):
        records = one_point(network, prop, [Fraction(0)])
        records[1]["point"] = bad
        with pytest.raises(Refused, match=r"point|rational|integer"):
            checked(tmp_path, case, written(records))


def test_the_command_says_how_it_ended(folder: Path, case: Case) -> None:
    from verifiable_relu.check.__main__ import main

    checked(folder, case, written(case.records))
    arguments = [str(folder / "certificate"), "--net", str(folder / "net.onnx"), "--spec", str(folder / "p.vnnlib")]
    assert main(arguments) == 0
    (folder / "certificate").write_bytes(written(case.records[:-4]))
    assert main(arguments) == 1
    assert main([str(folder / "none"), *arguments[1:]]) == 2


@pytest.mark.thorough
def test_the_checker_imports_nothing_of_the_verifier(folder: Path, case: Case) -> None:
    checked(folder, case, written(case.records))
    code = (
        "import json, sys\nfrom verifiable_relu.check.__main__ import main\nstatus = main(sys.argv[1:])\n"
        "print(json.dumps([status, sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'verifiable_relu'))]))"
    )
    names = [str(folder / name) for name in ("certificate", "net.onnx", "p.vnnlib")]
    made = subprocess.run(
        [sys.executable, "-c", code, names[0], "--net", names[1], "--spec", names[2]],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    status, modules = json.loads(made.stdout.splitlines()[-1])
    assert status == 0
    assert {m for m in modules if not m.startswith("verifiable_relu.check")} == {"verifiable_relu"}
