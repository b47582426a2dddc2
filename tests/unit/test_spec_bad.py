"""Hostile, huge and unusual property files: a verdict's worth of meaning, or one line in little time and memory."""

from __future__ import annotations

import gzip
import math
import os
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest

from verifiable_relu.check import BadInput
from verifiable_relu.check.properties import read_property
from verifiable_relu.errors import LONGEST, InputError, UnsupportedError
from verifiable_relu.files import read_bytes
from verifiable_relu.ir.network import Input, Network, Source
from verifiable_relu.spec import SpecFile, Variable, limits, queries, read_instances, read_vnnlib
from verifiable_relu.spec.read import parse

HEAD = {
    "1.0": "(declare-const X_0 Real)(declare-const Y_0 Real)(declare-const Y_1 Real)(declare-const Y_2 Real)\n"
    "(assert (>= X_0 0))(assert (<= X_0 1))\n",
    "2.0": "(vnnlib-version <2.0>)\n(declare-network f (declare-input X float32 [1]) (declare-output Y float32 [3]))\n"
    "(assert (<= X[0] 1.0)) (assert (>= X[0] 0.0))\n",
}
ONE, TWO = HEAD["1.0"], HEAD["2.0"]


def read(text: str) -> SpecFile:
    return parse(text, Path("p"))


def unsafe(text: str, *y: object) -> bool:
    """Whether an output (three numbers) is unsafe; the input is 1/2."""
    spec, exact = read(text), [Fraction(v) for v in y]  # type: ignore[arg-type]
    return any(p.box.contains([Fraction(1, 2)]) and p.violated(exact) for p in spec.properties)


# ---- size and depth ----------------------------------------------------------------------------------------------


@cache
def hostile() -> dict[str, str]:
    made = {}
    for version, (head, y, one) in {"1.0": (ONE, "Y_0", "1"), "2.0": (TWO, "Y[0]", "1.0")}.items():
        many = 100_000
        for word in ("and", "or", "not"):
            made[f"{word}, {version}"] = f"{head}(assert {f'({word} ' * many}(<= {y} {one}){')' * many})"
        for word in "-+":
            made[f"{word}, {version}"] = f"{head}(assert (<= {f'({word} ' * many}{y}{')' * many} {one}))"
        made[f"parentheses, {version}"] = head + "(" * 1_000_000
        made[f"digits, {version}"] = f"{head}(assert (<= {y} {'1' * 1_000_000}.0))"
        made[f"integer, {version}"] = f"{head}(assert (<= {y} {'1' * 1_000_000}))"
        made[f"long product, {version}"] = f"{head}(assert (<= (* {f'1.{97 * 10**299 // 99} ' * 400} {y}) 1.0))"
        made[f"cut short, {version}"] = f"{head}(assert (or {f'(<= {y} {one})' * 1000}"
        made[f"a long word, {version}"] = f"{head}(assert (<= {'Y' * 1_000_000} 1.0))"
    made |= {
        "distinct": f"{ONE}(assert (distinct {'Y_0 ' * 2000}))",
        "words": f"{ONE}(set-info {'a ' * (limits.TOKENS + 1)}",
        "comments": ONE + ";\n" * (limits.OPAQUE + 1),
        "quotes": ONE + '"' * 100_001,
        "bars": ONE + "|" * 100_001,
        "a string without end": ONE + '(set-info :a "' + 'x""' * 100_000,
        "powers": f"{ONE}(assert (<= (* {'1e999 ' * 20} Y_0) 1))",
        "denominators": f"{ONE}(assert (<= (+ {' '.join(f'(/ Y_0 {10**99 + i})' for i in range(60))}) 1))",
        "disjunctive form": ONE + "(assert (or (<= Y_0 0) (>= Y_0 1)))" * 30,
        "long disjunctive form": ONE + ("(assert (or" + f" (and {'(<= Y_0 1)' * 100})" * 2 + "))") * 15,
        "index": f"{ONE}(declare-const X_{'9' * 5000} Real)",
        "index, 2.0": TWO.replace("X[0]", "X[99999999999999999999]"),
        "shape": TWO.replace("X float32 [1]", "X float32 [18446744073709551617]"),
        "large shape": TWO.replace("X float32 [1]", "X float32 [100000,100000]").replace("X[0]", "X[0,0]"),
        "elements": TWO + f"(assert (<= (+ {'Y[0] ' * (limits.ELEMENTS_2 + 1)}) 1.0))",
        "zeros": "\0" * 1_000_000,
    }
    return made


@pytest.mark.parametrize("case", hostile())
def test_a_huge_file_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    path = tmp_path / "p.vnnlib"
    path.write_text(hostile()[case])
    with pytest.raises(InputError) as caught:
        read_vnnlib(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: ") and len(line) <= LONGEST and line.isprintable()


@pytest.mark.seldom
@pytest.mark.thorough
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_what_the_limits_allow_is_read(version: str) -> None:
    y, one = ("Y_0", "1") if version == "1.0" else ("Y[0]", "1.0")
    deep = limits.DEPTH - 3
    nested = "".join(f"({'and' if i % 2 else 'or'} (<= {y} -9.5) " for i in range(deep))
    assert unsafe(f"{HEAD[version]}(assert {nested}(<= {y} {one}){')' * deep})", -10, 0, 0)
    assert not unsafe(f"{HEAD[version]}(assert {nested}(<= {y} {one}){')' * deep})", 2, 0, 0)
    assert unsafe(f"{HEAD[version]}(assert (<= {'(- ' * 996}{y}{')' * 996} 1.0))", 1, 0, 0)
    digits = "3" * (limits.DIGITS - 2)
    text = f"{HEAD[version]}(assert (<= {y} 0.{digits}))"
    assert unsafe(text, Fraction(f"0.{digits}"), 0, 0) and not unsafe(text, Fraction(1, 3), 0, 0)
    boxes = " ".join(f"(and (<= {y} {i}.0) (>= {y} {i}.0))" for i in range(2000))
    assert unsafe(f"{HEAD[version]}(assert (or {boxes}))", 1999, 0, 0)


@pytest.mark.thorough
def test_only_files_are_read_and_only_up_to_a_size(tmp_path: Path) -> None:
    def refused(path: Path, what: str) -> None:
        for reader in (read_vnnlib, read_instances):
            with pytest.raises(InputError, match=what) as caught:
                reader(path)
            assert str(caught.value).startswith(f"{path}: ")

    os.mkfifo(tmp_path / "pipe.vnnlib")
    os.mkfifo(tmp_path / "pipe.vnnlib.gz")
    refused(tmp_path / "pipe.vnnlib", "a pipe, not a regular file")
    refused(tmp_path / "pipe.vnnlib.gz", "a pipe, not a regular file")
    refused(tmp_path, "cannot be read")
    refused(Path("/dev/zero"), "not a regular file")
    with open(tmp_path / "sparse.vnnlib", "wb") as file:
        file.truncate(10**12)
    refused(tmp_path / "sparse.vnnlib", "larger than")
    for name, unit in (("zeros", b"\0"), ("blanks", b" ")):
        with gzip.open(tmp_path / f"{name}.vnnlib.gz", "wb", compresslevel=1) as packed:
            for _ in range((limits.BYTES >> 20) + 1):
                packed.write(unit * 2**20)
        refused(tmp_path / f"{name}.vnnlib.gz", "larger than")


def test_a_limit_is_inclusive_and_what_is_of_another_kind_is_refused_at_once(tmp_path: Path) -> None:
    for name, data in (("a", b"12345"), ("b.gz", gzip.compress(b"12345"))):
        (tmp_path / name).write_bytes(data)
        assert read_bytes(tmp_path / name, 5) == b"12345"
        with pytest.raises(InputError, match="larger than 4 bytes"):
            read_bytes(tmp_path / name, 4)

    def none(first: bytes) -> None:
        raise InputError(f"begins with {first[:1]!r}")

    with pytest.raises(InputError, match=r"b\.gz: begins with b'1'"):
        read_bytes(tmp_path / "b", 4, none)


# ---- the folder of bad input --------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_every_file_of_the_folder_of_bad_input_is_refused_in_one_line(data: Path) -> None:
    read = 0
    for path in sorted((data / "bad_input" / "vnnlib").iterdir()):
        if ".vnnlib" not in path.name:
            continue
        try:
            read_vnnlib(path)
            read += 1
        except InputError as error:
            line = str(error)
            assert line.startswith(f"{path}: ") and len(line) <= LONGEST and line.isprintable(), path
    assert read >= 5


# ---- lines, comments, versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\r\r\n", "\n\r"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_a_comment_ends_where_its_line_ends(version: str, end: str) -> None:
    y = "Y_0" if version == "1.0" else "Y[0]"
    head = HEAD[version].replace("\n", end)
    text = f"{head}; a comment{end}(assert (>= {y} 5.0)) ; (assert (>= {y} 9.0)){end}; network: a.onnx{end};{end}"
    assert unsafe(text, 5, 0, 0) and not unsafe(text, 4, 0, 0) and read(text).network == "a.onnx"
    line = text.replace("\r\n", "\n").replace("\r", "\n").count("\n") + 1
    with pytest.raises(InputError) as caught:
        read(f"{text}(assert (<= Z[0] 1.0))")
    assert str(caught.value).startswith(f"line {line}")


@pytest.mark.parametrize(
    "text",
    [
        "; (vnnlib-version <2.0>)\n" + ONE + "(assert (<= Y_0 0))",
        '(set-info :source "\n(vnnlib-version <2.0>) ; network: x.onnx\n")' + ONE + "(assert (<= Y_0 0))",
        "(set-info :source |\n(declare-network\n; network: x.onnx\n|)" + ONE + "(assert (<= Y_0 0))",
        '(set-info :source "a ""quoted"" ; word")' + ONE + "(assert (<= Y_0 0))",
        "; (declare-const X_0 Real)\n" + TWO + "(assert (<= Y[0] 0.0))",
        "\ufeff" + ONE + "(assert (<= Y_0 0)) ; ≤ é",
    ],
)
def test_comments_and_strings_decide_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "p.vnnlib").write_text(text)
    spec = read_vnnlib(tmp_path / "p.vnnlib")
    assert spec.version == ("2.0" if "float32" in text else "1.0") and spec.network is None


def test_two_comments_may_not_name_two_networks() -> None:
    assert read("; network: a.onnx\n; network: a.onnx\n" + ONE).network == "a.onnx"
    with pytest.raises(InputError, match=r"two networks, a\.onnx and b\.onnx"):
        read("; network: a.onnx\n; network: b.onnx\n" + ONE)


# ---- what SMT-LIB says --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "point", "holds"),
    [
        ("(>= |Y_0| 1)", (1, 0, 0), True),
        ("(= (- Y_0 Y_1 Y_2) -4)", (1, 2, 3), True),
        ("(= (- Y_0) 1)", (-1, 0, 0), True),
        ("(= (/ 8 2 2) Y_0)", (2, 0, 0), True),
        ("(< Y_0 Y_1 Y_2)", (1, 3, 2), False),
        ("(= Y_0 Y_1 Y_2)", (1, 1, 2), False),
        ("(not (= Y_0 Y_1 Y_2))", (1, 1, 2), True),
        ("(distinct Y_0 Y_1 Y_2)", (1, 2, 1), False),
        ("(not (distinct Y_0 Y_1 Y_2))", (1, 2, 1), True),
        ("(=> (> Y_0 0) (> Y_1 0) (> Y_2 0))", (1, 1, 0), False),
        ("(=> (> Y_0 0) (> Y_1 0) (> Y_2 0))", (1, 0, 0), True),
        ("(=> (=> (> Y_0 0) (> Y_1 0)) (> Y_2 0))", (0, 0, 0), False),
        ("(= Y_0 .5)", (Fraction(1, 2), 0, 0), True),
        ("(= Y_0 1.)", (1, 0, 0), True),
        ("(= Y_0 +1e-3)", (Fraction(1, 1000), 0, 0), True),
        ("(= Y_0 -1E+3)", (-1000, 0, 0), True),
        ("(> Y_0 1e-999)", (Fraction(1, 10**999), 0, 0), False),
        ("(> Y_0 1e-999)", (Fraction(1, 10**998), 0, 0), True),
        ("(>= (* 1e300 1e300 Y_0) 5)", (Fraction(5, 10**600), 0, 0), True),
        ("(>= (* 1e300 1e300 Y_0) 5)", (Fraction(4, 10**600), 0, 0), False),
        ("(>= (* 1e-999 Y_0) 1e-999)", (1, 0, 0), True),
        ("(<= (* 1e400 X_0) 1e400)", (0, 0, 0), True),
    ],
)
def test_a_condition_means_what_smt_lib_says(condition: str, point: tuple[object, ...], holds: bool) -> None:
    assert unsafe(f"{ONE}(assert {condition})", *point) is holds
    assert unsafe(f"{ONE}(assert (not (not {condition})))", *point) is holds
    if "X_0" not in condition:
        assert unsafe(f"{ONE}(assert (not {condition}))", *point) is not holds


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("(assert (<= Y_0 ٥))", "is not ASCII"),
        ("(assert (≥ Y_0 5))", "is not ASCII"),
        ("(assert (<= Y_0\u00a05))", "is not ASCII"),
        ("(assert (<= Y_0\f5))", "the control character U+000C is not read"),
        ("(assert (<= Y_0 1_000))", "neither a number"),
        ("(assert (<= Y_0 0x10))", "neither a number"),
        ("(assert (<= Y_0 1/3))", "neither a number"),
        ("(assert (<= Y_0 --1))", "neither a number"),
        ("(assert (<= Y_0 1e1000))", "exponent"),
        ("(assert (<= Y_0 |1|))", "neither a number"),
        ('(assert (<= Y_0 "1"))', "neither a number"),
        ("(assert (<= X_0 1e400))", "beyond the range"),
        ("(assert (/ 2))", "two arguments"),
        ("(assert (and))", "needs an argument"),
        ("(assert (or))", "needs an argument"),
        ("(assert (let ((a 1)) (<= Y_0 a)))", "the operator 'a' is not supported"),
        ("(define-fun f () Real 1.0)", "'define-fun' is not supported"),
        ("(check-sat)(assert (<= Y_0 0))", "'assert' comes after 'check-sat'"),
        ("(exit)(declare-const Y_3 Real)", "'declare-const' comes after 'exit'"),
        ("(push 1)", "'push' is not supported"),
        ("(declare-const Y_3 Int)", "of sort Int"),
        ("(declare-const |Y_0| Real)", "declared twice"),
        ("(vnnlib-version <2.0>)", "is a command of VNN-LIB 2.0"),
        ("(assert (<= Y_0 1)) \x1b[31m", "the control character U+001B is not read"),
    ],
)
def test_what_is_no_property_is_refused_by_name(rest: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read(ONE + rest)
    assert message in str(caught.value) and str(caught.value).isprintable()


# ---- empty boxes --------------------------------------------------------------------------------------------------


def test_an_empty_box_is_refused_wherever_it_is_written_and_vanishes_beside_others() -> None:
    for empty in (
        "(assert (>= X_0 2))",
        "(assert (or (and (>= X_0 2) (<= Y_0 0))))",
        "(assert (or (and (>= X_0 2) (<= Y_0 0)) (and (> X_0 1) (<= Y_0 0))))",
        "(assert (or (and (>= X_0 0.5) (< X_0 0.5)) false))",
    ):
        with pytest.raises(InputError, match="box is empty"):
            read(ONE + empty)
    (kept,) = read(f"{ONE}(assert (or (and (>= X_0 2) (<= Y_0 0)) (and (<= X_0 0.5) (<= Y_0 1))))").properties
    assert kept.box.bounds(0) == (0, Fraction(1, 2)) and len(kept.unsafe) == 1
    # Constants that are false leave an empty unsafe set, which no input reaches.
    for false in ("(assert false)", "(assert (or false (<= 1 0)))"):
        assert read(ONE + false).properties[0].unsafe == ()


# ---- shapes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "network", "fits"),
    [
        ((2,), (2,), True),
        ((1, 2), (2,), True),
        ((2,), (1, 2), True),
        ((1, 1, 2), (1, 2), True),
        ((2, 1), (2,), False),
        ((2, 1), (1, 2), False),
        ((1, 2, 1), (2,), False),
        ((3, 2), (2, 3), False),
        ((6,), (2, 3), False),
        ((1, 2, 3), (2, 3), True),
    ],
)
def test_a_declared_shape_is_the_networks(declared: tuple[int, ...], network: tuple[int, ...], fits: bool) -> None:
    # What comes out is what comes in, in the same shape.
    made = Network((Input(name="x", size=math.prod(network)),), Source(network, network))
    names = Variable("X", declared).elements("2.0")
    shape = ",".join(map(str, declared))
    declarations = f"(declare-input X float32 [{shape}]) (declare-output Y float32 [{shape}])"
    bounds = "".join(f"(assert (== {name} 0.0))" for name in names)
    spec = read(f"(vnnlib-version <2.0>)(declare-network f {declarations}){bounds}")
    if fits:
        assert len(queries(spec, made)) == 1
    else:
        with pytest.raises(InputError, match="the input X is declared with shape"):
            queries(spec, made)


def test_what_is_well_formed_and_not_supported_is_an_unsupported_error() -> None:
    for rest in ("(assert (<= (/ 1 X_0) 1))", "(push 1)", "(declare-const Z Real)"):
        with pytest.raises(UnsupportedError):
            read(ONE + rest)


CONTROLS = [*map(chr, {*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, 0xFEFF} - {*b"\t\n\r"})]
"""Characters at which other parsers end a text, a line or a word, or see nothing."""


@pytest.mark.parametrize("control", CONTROLS, ids=lambda c: f"U+{ord(c):04X}")
def test_a_control_character_is_refused_in_one_line_wherever_it_stands(control: str, tmp_path: Path) -> None:
    for version, declared in HEAD.items():
        y = "Y_0" if version == "1.0" else "Y[0]"
        condition = f"(assert (<= {y} 0))"
        for text in (
            f"{declared}{condition}{control}",
            f"{declared}{condition}\n{control}\n(assert (<= {y} -9))",
            f"{declared}; a comment {control} (assert (<= {y} -9))\n{condition}",
            f"{declared}(assert{control}(<= {y} 0))",
        ):
            path = tmp_path / "p.vnnlib"
            path.write_bytes(text.encode())
            with pytest.raises(InputError, match=rf"line \d+: the control character U\+{ord(control):04X}") as raised:
                read_vnnlib(path)
            assert str(raised.value).isprintable() and str(path) in str(raised.value)
            with pytest.raises(InputError, match="control character"):
                parse(text, path)
            if version == "1.0":
                with pytest.raises(BadInput, match="control character"):
                    read_property(text, 1, 1)
    listed = tmp_path / "instances.csv"
    listed.write_bytes(f"net.onnx,p.vnnlib,1\nnet.onnx,p{control}.vnnlib,1\n".encode())
    with pytest.raises(InputError, match="line 2: the control character"):
        read_instances(listed)


def test_messages_show_nothing_of_a_file_that_is_no_property(tmp_path: Path) -> None:
    for text in ("root:secret:0:0\n", "\n  secret=1", '{"secret": 1}', "-----BEGIN secret", "secret (a b c)"):
        path = tmp_path / "other"
        path.write_text(text)
        with pytest.raises(InputError, match="no property") as raised:
            read_vnnlib(path)
        assert "secret" not in str(raised.value)
        with pytest.raises(BadInput) as refused:
            read_property(text, 1, 1)
        assert "secret" not in str(refused.value)
