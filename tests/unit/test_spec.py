"""Property files: what is read, what is refused, and what is written."""

from __future__ import annotations

import gzip
import math
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import vnnlib.compat

from verifiable_relu.errors import InputError
from verifiable_relu.spec import SpecFile, Variable, read_vnnlib, vnnlib_text, write_vnnlib
from verifiable_relu.spec.property import Box, Property, Row
from verifiable_relu.spec.read import parse

FAMILIES = {
    "acasxu": 10,
    "collins_rul_cnn": 41,
    "eran_2021": 72,
    "mnist_fc": 30,
    "oval21": 30,
    "rl_benchmarks": 296,
    "safenlp": 1080,
    "test": 4,
    "tllverifybench": 32,
}


def data(name: str) -> Path:
    folder = os.environ.get("VERIFIABLE_RELU_DATA")
    if not folder or not (Path(folder) / name).is_dir():
        pytest.skip(f"needs {name} in the folder that VERIFIABLE_RELU_DATA names")
    return Path(folder) / name


def declared(inputs: int, outputs: int) -> str:
    names = [f"X_{i}" for i in range(inputs)] + [f"Y_{i}" for i in range(outputs)]
    return "".join(f"(declare-const {name} Real)\n" for name in names)


def declared_2(inputs: str = "[2]", outputs: str = "[2]", kind: str = "float32") -> str:
    return (
        f"(vnnlib-version <2.0>)\n(declare-network N\n(declare-input X {kind} {inputs})\n"
        f"(declare-output Y {kind} {outputs})\n)\n"
    )


def one(text: str) -> Property:
    (prop,) = parse(text, Path("p.vnnlib")).properties
    return prop


# ---- what is read ----------------------------------------------------------------------------------------------


def test_decimals_are_exact_and_a_point_is_no_empty_box() -> None:
    prop = one(declared(1, 1) + "(assert (<= X_0 0.1))(assert (>= X_0 0.1))(assert (<= Y_0 1e-1))")
    lower, upper = prop.box.bounds(0)
    assert lower == upper == Fraction(1, 10)
    assert Fraction(float(prop.box.lower[0])) < lower < Fraction(float(prop.box.upper[0]))
    assert prop.unsafe == ((Row(((0, Fraction(1)),), Fraction(1, 10)),),)


def test_a_strict_constraint_holds_a_witness_to_strictness_and_a_proof_to_the_closure() -> None:
    prop = one(declared(1, 1) + "(assert (< X_0 1))(assert (> X_0 0))(assert (> Y_0 5))")
    assert (prop.box.lower[0], prop.box.upper[0]) == (0, 1)
    assert prop.box.contains([Fraction(1, 2)])
    assert not prop.box.contains([Fraction(0)]) and not prop.box.contains([Fraction(1)])
    assert prop.margin([Fraction(5)]) == 0 and not prop.violated([Fraction(5)])
    assert prop.margin([Fraction(6)]) < 0 and prop.violated([Fraction(6)])


def test_disjuncts_of_inputs_and_outputs_become_boxes_with_polytopes() -> None:
    spec = parse(
        declared(1, 1)
        + "(assert (or (and (>= X_0 -1) (<= X_0 1) (>= Y_0 100)) (and (>= X_0 3) (<= X_0 4) (<= Y_0 0))"
        + " (and (<= X_0 1) (>= X_0 -1) (<= Y_0 -100)) (and (>= X_0 9) (<= X_0 8) (<= Y_0 0))))",
        Path("m.vnnlib"),
    )
    assert [(p.name, p.box.bounds(0), len(p.unsafe)) for p in spec.properties] == [
        ("m#0", (-1, 1), 2),
        ("m#1", (3, 4), 1),
    ]


def test_an_unsafe_set_may_be_empty_or_everything() -> None:
    box = declared(1, 1) + "(assert (<= X_0 1))(assert (>= X_0 0))"
    assert one(box + "(assert false)").unsafe == ()
    assert one(box + "(assert (<= 2 1))").unsafe == ()
    assert one(box).unsafe == ((),)


def test_2_0_is_read_as_1_0_is() -> None:
    body = "(assert (>= {0} -0.1))(assert (< {0} 1.0))(assert (== {1} 0.3))"
    body += "(assert (or (<= (+ (* 2.0 {2}) (- {3})) 1.0) (and (> {2} 0.7) (!= {3} {2}))))"
    first = parse(declared(2, 2) + body.format("X_0", "X_1", "Y_0", "Y_1").replace("==", "=")
                    .replace("!=", "distinct"), Path("p"))  # fmt: skip
    second = parse(declared_2("[1,2]") + body.format("X[0,0]", "X[0,1]", "Y[0]", "Y[1]"), Path("p"))
    assert [p.digest for p in first.properties] == [p.digest for p in second.properties]
    assert second.inputs == Variable("X", (1, 2)) and second.networks == ("N",)


@pytest.mark.parametrize("kind", ["Real", "real", "float64"])
def test_scalars_and_reals_of_2_0_are_read(kind: str) -> None:
    text = declared_2("[]", "[]", kind) + "(assert (<= (* 2.0 X) 1.0))(assert (>= X 0.0))(assert (>= Y 1.0))"
    (prop,) = parse(text, Path("p")).properties
    assert prop.box.bounds(0) == (0, Fraction(1, 2))


@pytest.mark.parametrize("family", FAMILIES)
def test_files_of_the_competition_are_read(family: str) -> None:
    files = sorted((data("vnncomp") / family / "vnnlib").rglob("*.vnnlib*"))
    assert len(files) == FAMILIES[family]
    for file in files[:: max(len(files) // 4, 1)]:
        spec = read_vnnlib(file)
        assert spec.properties and all(prop.unsafe for prop in spec.properties)


EXAMPLES = {
    **dict.fromkeys(["cartpole", "drones", "dubinsrejoin", "lunarlander", "acc", "acc_nonlinear"], ""),
    **dict.fromkeys(["intermediate_nodes", "single_network"], ""),
    "mnist": "[0,1] has no lower bound",
    "multiple_networks": "A[1] has no lower bound",
    "acasxu_equivalent_networks": "line 30: syntax error: at 'Y_f'",
    "initialized": "line 4: syntax error: at 'initialized'",
    "test_linearise": "line 26: in every case the box is empty",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_of_2_0_are_read_or_refused(name: str) -> None:
    path, said = data("vnnlib2") / f"{name}.vnnlib", EXAMPLES[name]
    if said.startswith("line"):
        with pytest.raises(InputError) as caught:
            read_vnnlib(path)
        assert str(caught.value).startswith(f"{path}: {said}")
        return
    spec = read_vnnlib(path)
    (partial,) = {prop.partial for prop in spec.properties}
    assert spec.version == "2.0" and spec.properties[0].unsafe and (partial.endswith(said) if said else not partial)


@pytest.mark.parametrize(
    ("conditions", "missing", "ends"),
    [
        ("(assert (>= X_0 3))(assert (<= -1 X_1 1))", "the input X_0 has no upper bound", [(3, 4), (-1, 1)]),
        ("(assert (<= 0 X_0 1))(assert (< X_1 1))", "the input X_1 has no lower bound", [(0, 1), (-1, 1)]),
        ("(assert (<= X_0 0.1))", "the input X_0 has no lower bound", [(-1, Fraction(1, 10)), (-1, 1)]),
        ("(assert (>= X_0 1e300))(assert (= X_1 0))", "the input X_0 has no upper bound", None),
        ("(assert (<= 0 X_0 1))(assert (<= X_0 X_1 1))", "", [(0, 1), (0, 1)]),
    ],
)
def test_of_inputs_without_a_bound_a_part_is_asked_about(
    conditions: str, missing: str, ends: list[tuple[Fraction, Fraction]] | None
) -> None:
    text = declared(2, 1) + conditions
    prop = one(text + "(assert (<= Y_0 1))")
    assert prop.partial == missing and ends in (None, [prop.box.bounds(i) for i in range(2)])
    assert one(text + "(assert false)").partial == ""
    assert prop.digest != Property(prop.box, prop.unsafe).digest or not missing
    if missing:
        with pytest.raises(InputError, match="unbounded inputs is not written"):
            vnnlib_text(prop)


# ---- what is refused -------------------------------------------------------------------------------------------

BOX = "(assert (>= X_0 0))\n(assert (<= X_0 1))\n"
INVERTED = f"(and {' '.join(f'(>= X_{i} 0.0) (<= X_{i} {1 - 2 * (i == 3)}.0)' for i in range(4))})"
BAD = {
    "empty": ("", "the file is empty"),
    "nothing but a comment": ("; hello\n", "the file is empty"),
    "no outputs": ("(declare-const X_0 Real)\n" + BOX, "no output variables"),
    "a gap": ("(declare-const X_0 Real)(declare-const X_2 Real)(declare-const Y_0 Real)", "X_1 is not declared"),
    "twice": (declared(1, 1) + "(declare-const X_0 Real)", "line 3, column 1: 'X_0' is declared twice"),
    "another sort": ("(declare-const X_0 Int)", "line 1, column 1: 'X_0' is of sort Int"),
    "another name": ("(declare-const Z Real)", "line 1, column 1: 'Z' is neither"),
    "inverted": (declared(1, 1) + BOX + "(assert (>= X_0 1.5))", "line 4, column 9: the box is empty"),
    "empty by strictness": (declared(1, 1) + BOX + "(assert (> X_0 1))", "line 4, column 9: the box is empty"),
    "a hair's breadth": (
        declared(1, 1) + "(assert (>= X_0 0.10000000000000000001))\n(assert (<= X_0 0.1))",
        "line 4, column 9: the box is empty",
    ),
    "every case inverted": (
        declared(1, 1) + "(assert (or (and (>= X_0 1) (<= X_0 0)) (and (>= X_0 3) (<= X_0 2))))",
        "line 3, column 29: in every case the box is empty: 1.0 <= X_0 (line 3, column 18) but X_0 <= 0.0",
    ),
    "every case inverted, read at once": (
        declared(4, 1) + f"(assert (or {INVERTED} {INVERTED}))",
        "line 6, column 109: in every case the box is empty: 0.0 <= X_3 (line 6, column 96) but X_3 <= -1.0",
    ),
    "undeclared": (declared(1, 1) + BOX + "(assert (<= Y_1 0))", "line 5, column 9: 'Y_1' is neither"),
    "nan": (declared(1, 1) + "(assert (<= X_0 nan))", "line 3, column 9: 'nan' is not a finite number"),
    "infinite": (declared(1, 1) + "\n(assert (<= X_0 -inf))", "line 4, column 9: '-inf' is not a finite number"),
    "too large": (declared(1, 1) + "(assert (<= X_0 1e400))", "line 3, column 9: a number beyond the range"),
    "too large to say": (declared(1, 1) + "(assert (<= X_0 1e99999))", "line 3, column 9: the exponent of '1e99999'"),
    "hexadecimal": (declared(1, 1) + "(assert (<= X_0 #x10))", "line 3, column 9: '#x10' is neither"),
    "17 factors": (
        declared(1, 1) + f"(assert (<= (* {'Y_0 ' * 17}) 1))",
        "line 3, column 13: a product of more than 16",
    ),
    "declared later": (
        declared(2, 1) + "(assert (<= X_0 X_1))(declare-const Y_1 Real)",
        "line 4, column 22: 'Y_1' is declared after",
    ),
    "not linear in x": (declared(1, 1) + "(assert (<= (/ 1 X_0) 1))", "line 3, column 13: a division by a variable"),
    "by zero": (declared(1, 1) + "(assert (<= (/ X_0 0) 1))", "line 3, column 13: division by zero"),
    "never closed": (declared(1, 1) + "(assert (<= X_0 1)", "line 3, column 1: this parenthesis is never closed"),
    "closed too late": (declared(1, 1) + "(assert (<= X_0 1)\n" + BOX, "line 3, column 1: this parenthesis is never"),
    "closed too early": (declared(1, 1) + BOX + ")", "line 5, column 1: a closing parenthesis"),
    "a stray word": (declared(1, 1) + "hello", "line 3, column 1: 'hello' is outside"),
    "no operator": (declared(1, 1) + "(assert (1 X_0))", "line 3, column 9: the operator '1'"),
    "no condition": (declared(1, 1) + "(assert X_0)", "line 3, column 1: a condition is expected"),
    "a number for a condition": (declared(1, 1) + "(assert (and X_0))", "line 3, column 9: a condition is expected"),
    "a condition for a number": (declared(1, 1) + "(assert (<= (< X_0 1) 1))", "line 3, column 9: a number is"),
    "one argument": (declared(1, 1) + "(assert (<= X_0))", "line 3, column 9: '<=' needs two"),
    "another command": (declared(1, 1) + "(push 1)", "line 3, column 1: the command 'push'"),
    "another operator": (declared(1, 1) + "(assert (ite (< X_0 1) 1 2))", "line 3, column 9: the operator 'ite'"),
    "too deep": (
        declared(1, 1) + "(assert " + "(or (< Y_0 0) (and (< Y_0 1) " * 2000 + "(< Y_0 2)" + ")" * 4001,
        "line 3, column 14484: more than 1,000 open parentheses",
    ),
    "2.0, no assertion": (declared_2(), "line 5: syntax error: the file ends too early"),
    "2.0, exponent": (declared_2() + "(assert (<= X[0] 1e3))", "line 6: syntax error: at 'e3' in '(assert"),
    "2.0, undeclared": (declared_2() + "(assert (<= Z[0] 1.0))", "line 6: Undeclared variable: 'Z'"),
    "2.0, index": (declared_2() + "(assert (<= X[2] 1.0))", "line 6: Index out of bounds for variable: 'X[2]'"),
    "2.0, negative index": (declared_2() + "(assert (<= X[-1] 1.0))", "line 6: the index -1 is not in 0 … 1"),
    "2.0, huge index": (declared_2() + f"(assert (<= X[{'9' * 20}] 1.0))", "line 6, column 15: an integer has more"),
    **{
        f"2.0, {term}": (declared_2() + f"(assert (<= {term} 1.0))", "line 6, column ")
        for term in ("(* 2.0Y[0] 1.0)", "(+ 2.0Y[0] 1.0)", "(+ Y[0] 1.0-0.5)", "(* Y[0] -1.0-0.5)")
    },
    "2.0, type": (declared_2() + "\n(assert (<= X[0] 1))", "line 7: Type mismatch"),
    "2.0, integers": (declared_2(kind="int8") + "(assert (<= X[0] 1))", "line 3: the element type of 'X'"),
    "2.0, unknown type": (declared_2(kind="f32") + "(assert (<= X[0] 1.0))", "line 3: the element type of 'X'"),
    "2.0, version": (declared_2().replace("2.0", "3.0") + "(assert (<= X[0] 1.0))", "line 1: Incompatible VNNLib"),
    "2.0, inverted": (
        declared_2() + "(assert (<= X[0] 0.0))\n(assert (>= X[0] 1.0))",
        "line 6: the box is empty: 1.0 <= X[0] (line 7) but X[0] <= 0.0",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_with_file_and_line(case: str, tmp_path: Path) -> None:
    text, message = BAD[case]
    path = tmp_path / "bad.vnnlib"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_vnnlib(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_box_that_only_rounding_keeps_from_being_empty_is_refused() -> None:
    tenth = Fraction(1, 10)
    with pytest.raises(InputError, match="the box is empty: X_0"):
        Box.exact([tenth + Fraction(1, 10**30)], [tenth])
    with pytest.raises(InputError, match="the box is empty: X_0"):
        Box.exact([tenth], [tenth], open_lower=[0])
    assert Box.exact([tenth], [tenth]).contains([tenth])


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    def refused(name: str, content: bytes | None) -> str:
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InputError, match=name) as caught:
            read_vnnlib(path)
        return str(caught.value)

    assert "no such file" in refused("missing.vnnlib", None)
    assert "damaged gzip file" in refused("cut.vnnlib.gz", gzip.compress(b"x" * 1000)[:-20])
    assert "damaged gzip file" in refused("plain.vnnlib.gz", b"(declare-const X_0 Real)")
    assert "not a text file" in refused("binary.vnnlib", b"\xff\xfe\x00\x81")
    (tmp_path / "folder.vnnlib").mkdir()
    assert "cannot be read" in refused("folder.vnnlib", None)


def test_a_gzipped_file_is_found_under_its_plain_name(tmp_path: Path) -> None:
    text = declared(1, 1) + BOX + "(assert (<= Y_0 0))"
    (tmp_path / "p.vnnlib.gz").write_bytes(gzip.compress(text.encode()))
    assert read_vnnlib(tmp_path / "p.vnnlib").properties[0].digest == one(text).digest


# ---- what is written -------------------------------------------------------------------------------------------


def sample() -> Property:
    third, tiny = Fraction(1, 3), Fraction(1, 10**12)
    box = Box.exact([-third, Fraction(0), Fraction(1)], [third, Fraction(1, 255), Fraction(1)], open_upper=[0])
    rows = (
        Row(((0, Fraction(1)), (1, Fraction(-1))), Fraction(0)),
        Row(((1, Fraction(-1)),), third, strict=True),
        Row(((0, third), (2, Fraction(-5, 7))), tiny),
        Row((), Fraction(1)),
    )
    return Property(box, (rows, (Row(((2, Fraction(1)),), Fraction(-3)),)), "p")


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("name", ["p.vnnlib", "p.vnnlib.gz"])
def test_numbers_without_an_end_are_written_exactly(version: str, name: str, tmp_path: Path) -> None:
    write_vnnlib(sample(), tmp_path / name, version, ["two\nlines"])
    spec = read_vnnlib(tmp_path / name)
    assert spec.version == version
    (prop,) = spec.properties
    for i in range(3):
        assert prop.box.bounds(i) == sample().box.bounds(i)
    assert prop.box.open_upper == {0}
    # A row without variables is a constant, and 0 ≤ 1 goes without saying.
    kept = tuple(tuple(row.canonical() for row in polytope if row.coefficients) for polytope in sample().unsafe)
    assert tuple(tuple(row.canonical() for row in polytope) for polytope in prop.unsafe) == kept


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("large", [Fraction(10**306), Fraction(10**303 + 1, 3), 10**301 + Fraction(1, 2)])
def test_numbers_too_large_for_a_decimal_are_written_exactly(large: Fraction, version: str) -> None:
    rows = (
        Row(((0, large), (1, Fraction(-1, 7))), Fraction(1)),
        Row(((0, Fraction(1)), (1, Fraction(2))), large),
        Row(((1, Fraction(-1)),), large),
    )
    prop = Property(Box.exact([Fraction(0)], [Fraction(1)]), (rows,))
    (read,) = parse(vnnlib_text(prop, version), Path("p")).properties
    assert read.digest == prop.digest


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("unsafe", [(), ((),)])
def test_empty_and_full_unsafe_sets_are_written(version: str, unsafe: tuple[()]) -> None:
    prop = Property(Box.exact([Fraction(0)], [Fraction(1)]), unsafe)
    text = vnnlib_text(prop, version)
    spec = parse(text, Path("p"))
    assert spec.version == version and spec.properties[0].unsafe == unsafe


def test_shapes_and_network_survive(tmp_path: Path) -> None:
    inputs, outputs = Variable("image", (1, 3)), Variable("logits", (1, 3))
    spec = SpecFile(tmp_path / "p", "2.0", (sample(),), inputs, outputs, ("net",), "nets/a b.onnx")
    write_vnnlib(spec, tmp_path / "p.vnnlib", "2.0")
    again = read_vnnlib(tmp_path / "p.vnnlib")
    assert (again.inputs, again.outputs, again.networks, again.network) == (inputs, outputs, ("net",), "nets/a b.onnx")
    write_vnnlib(again, tmp_path / "q.vnnlib")
    flat = read_vnnlib(tmp_path / "q.vnnlib")
    assert flat.inputs == Variable("X", (3,)) and flat.network == "nets/a b.onnx"


def test_an_unknown_version_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no VNN-LIB '3\.0'"):
        write_vnnlib(sample(), tmp_path / "p", "3.0")
    with pytest.raises(InputError, match="cannot be written"):
        write_vnnlib(sample(), tmp_path / "no" / "p.vnnlib")


def test_the_competition_survives_a_round_trip() -> None:
    for family, name in (("acasxu", "prop_7"), ("rl_benchmarks", ""), ("mnist_fc", "")):
        file = next(file for file in sorted((data("vnncomp") / family / "vnnlib").iterdir()) if name in file.name)
        spec = read_vnnlib(file)
        text = vnnlib_text(spec, "2.0")
        again = parse(text, file)
        assert [prop.digest for prop in again.properties] == [prop.digest for prop in spec.properties]
        # The standard's own reading, in floats.
        for case, prop in zip(vnnlib.compat.transform(vnnlib.parse_query_string(text)), spec.properties, strict=False):
            for (low, high), lower, upper in zip(case.input_box, prop.box.lower, prop.box.upper, strict=True):
                assert math.isclose(low, lower, abs_tol=1e-12) and math.isclose(high, upper, abs_tol=1e-12)


def test_reading_and_writing_needs_no_torch() -> None:
    code = "import sys, verifiable_relu.spec.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
