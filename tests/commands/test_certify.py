"""The command certify: its output, its exit status and the input that it refuses."""

from __future__ import annotations

import csv
import io
import random
import re
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.support.asking import claims
from tests.support.draws import draws
from tests.support.flat_nets import relu_layers
from tests.support.processes import Process, environment, run
from tests.support.scripted import Scripted
from tests.unit.test_campaign import known
from verifiable_relu.campaign import inputs
from verifiable_relu.certify import main
from verifiable_relu.ir.network import Network
from verifiable_relu.readers import read_onnx, write_onnx
from verifiable_relu.search.outcomes import Outcome, Reason, Verdict
from verifiable_relu.search.registry import make
from verifiable_relu.spec import Box, Property, Query, Row, SpecFile, Variable, read_vnnlib, write_vnnlib


def spec(unsafe: str, low: str = "0.0", high: str = "1.0", inputs: int = 2, outputs: int = 2, head: str = "") -> str:
    """A VNN-LIB 1.0 property over a box with the same bounds for every input."""
    lines = [head, *(f"(declare-const X_{i} Real)" for i in range(inputs))]
    lines += [f"(declare-const Y_{i} Real)" for i in range(outputs)]
    lines += [f"(assert (>= X_{i} {low})) (assert (<= X_{i} {high}))" for i in range(inputs)]
    return "\n".join([*lines, f"(assert {unsafe})\n"])


SAFE, VIOLATED = "(<= Y_0 -1.0)", "(>= Y_0 1.5)"
TWO_BOXES = "(or (and (<= X_0 0.25) (>= Y_0 1.5)) (and (>= X_0 0.75) (>= Y_0 1.5)))"
TWO = """(vnnlib-version <2.0>)
(declare-network N (declare-input X float32 [1, 2]) (declare-output Y float32 [1, 2]))
(assert (and (>= X[0,0] 0.0) (<= X[0,0] 1.0) (>= X[0,1] 0.0) (<= X[0,1] 1.0)))
(assert (>= Y[0,0] 1.5))
"""


def network(bias: float = 0.0) -> Network:
    """The network y_0 = relu(x_0) + relu(x_1) + bias, y_1 = relu(x_0) − relu(x_1)."""
    return relu_layers(([[1.0, 0.0], [0.0, 1.0]], [0.0, 0.0]), ([[1.0, 1.0], [1.0, -1.0]], [bias, 0.0]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a network and properties of it, all of which are valid."""
    write_onnx(network(), tmp_path / "net.onnx")
    for name, text in (
        ("safe", spec(SAFE)), ("violated", spec(VIOLATED)), ("boxes", spec(TWO_BOXES)), ("two", TWO),
    ):  # fmt: skip
        (tmp_path / f"{name}.vnnlib").write_text(text)
    return tmp_path


def test_a_counterexample_in_the_form_of_the_competition(folder: Path) -> None:
    done = run(["-m", "verifiable_relu.certify", "--spec", "violated.vnnlib", "--method", "attack"], cwd=folder)
    assert done.returncode == 0
    first, rest = done.stdout.split("\n", 1)
    assert first == "sat"
    number = r"(-?[0-9.e-]+)"
    found = re.fullmatch(rf"\(\(X_0 {number}\)\n \(X_1 {number}\)\n \(Y_0 {number}\)\n \(Y_1 {number}\)\)\n", rest)
    assert found, rest
    x0, x1, y0, y1 = map(Fraction, found.groups())
    assert 0 <= x0 <= 1 and 0 <= x1 <= 1 and y0 >= Fraction(3, 2)
    assert float(x0 + x1) == pytest.approx(float(y0)) and float(x0 - x1) == pytest.approx(float(y1))
    for word in ("violated.vnnlib: sat", "attack", "margin", "time", "net.onnx: 2 inputs, 2 neurons, 2 outputs"):
        assert word in done.stderr


@pytest.mark.quick
def test_an_unsat_answer_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seconds, answer in (("60", "unknown\n"), ("1e-9", "timed-out\n")):
        arguments = ["--spec", str(folder / "violated.vnnlib"), "--method", "crown", "--timeout", seconds, "--quiet"]
        assert main(arguments) == 0 and capsys.readouterr() == (answer, "")
    assert main(["--spec", str(folder / "safe.vnnlib"), "--method", "crown"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "unsat\n"
    assert "margin    1 (a proven lower bound)" in shown.err and re.search(r"unstable  \d neurons", shown.err)
    assert "float32   the verdict holds for every evaluation in float32, too" in shown.err


def quotient(text: str) -> Fraction:
    """A printed number: a decimal or (/ numerator denominator)."""
    parts = text.strip("()/ ").split()
    return Fraction(parts[0]) / Fraction(parts[1]) if len(parts) > 1 else Fraction(text)


def printed(out: str) -> dict[str, Fraction]:
    """The counterexample printed after *sat*, in the form of either VNN-LIB version."""
    verdict, _, rest = out.partition("\n")
    assert verdict == "sat"
    found = re.findall(r"([XY](?:_[0-9]+|\[[0-9,]+\])) (\(/ [^()]*\)|[^ ()\n]+)", rest)
    return {name: quotient(text) for name, text in found}


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_the_printed_point_lies_in_the_box_exactly(
    version: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The boxes have all widths, down to zero and far below a float64 step; the witness is any point of the box."""
    rng = random.Random(version)
    network = read_onnx(folder / "net.onnx")
    for case in range(draws(60)):
        sides = []
        for _ in range(network.input_size):
            low = Fraction(rng.randint(-50, 50), rng.choice([1, 3, 7, 10, 255, 2**60, 10**30]))
            width = rng.choice([Fraction(0), Fraction(1, 3), Fraction(1, 10**25), Fraction(1, 3 * 10**40), Fraction(2)])
            sides.append((low, low + width))
        exact = Box.exact([low for low, _ in sides], [high for _, high in sides])
        anything = Property(exact, ((Row((), Fraction(1)),),), "p")
        shapes = Variable("X", (1, network.input_size)), Variable("Y", (1, network.output_size))
        path = folder / "p.vnnlib"
        write_vnnlib(SpecFile(path, version, (anything,), *shapes, network="net.onnx"), path, version)
        part = Fraction(rng.randint(0, 9), 9)
        inside = tuple(low + (high - low) * part for low, high in sides)

        def answer(query: Query, witness: tuple[Fraction, ...] = inside) -> Outcome:
            return Outcome(Verdict.SAT, Reason.REFUTED, "planted", witness=witness)

        monkeypatch.setattr("verifiable_relu.campaign.inputs.make", lambda *_, answer=answer: Scripted(answer))
        assert main(["--spec", str(path), "--quiet"]) == 0
        assignment = printed(capsys.readouterr().out)
        box = read_vnnlib(path).properties[0].box
        names = read_vnnlib(path).inputs.elements(version)
        assert box.contains([assignment[name] for name in names]), (case, sides, assignment)


def test_a_witness_that_only_a_fraction_can_be_is_printed_as_one(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(query: Query) -> Outcome:
        return Outcome(Verdict.SAT, Reason.REFUTED, "thirds", witness=(Fraction(1, 2), Fraction(2, 3)))

    monkeypatch.setattr("verifiable_relu.campaign.inputs.make", lambda *_: Scripted(answer))
    box = "(assert (<= (* 3 X_1) 2))(assert (>= (* 3 X_1) 2))"
    (folder / "thirds.vnnlib").write_text(spec("(<= Y_0 9.0)") + box)
    assert main(["--spec", str(folder / "thirds.vnnlib"), "--quiet"]) == 0
    assert "((X_0 0.5)\n (X_1 (/ 2.0 3.0))\n" in capsys.readouterr().out
    # With room beside it, a decimal is found that is still a counterexample.
    (folder / "wide.vnnlib").write_text(spec("(<= Y_0 9.0)"))
    assert main(["--spec", str(folder / "wide.vnnlib"), "--quiet"]) == 0
    assert f"(X_1 0.{'6' * 19}7)" in capsys.readouterr().out


def test_a_property_of_a_file_imports_no_solver_and_nothing_of_torch_modules(folder: Path) -> None:
    code = (
        "import sys; from verifiable_relu.certify import main\n"
        f"assert main(['--spec', {str(folder / 'safe.vnnlib')!r}, '--method', 'crown']) == 0\n"
        "heavy = {'rich', 'z3', 'highspy', 'vnnlib', 'auto_LiRPA', *(f'verifiable_relu.{part}' for part in "
        "('nn', 'train', 'hardening', 'network.module'))} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr


def fractional(path: Path) -> None:
    """A network with an operator that the package does not support."""
    graph = helper.make_graph(
        [helper.make_node("Hardmax", ["x"], ["y"], name="wave")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("n", 2))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("n", 2))],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)]), path)


def not_a_number(path: Path) -> None:
    model = onnx.load_from_string(write_onnx(network()))
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor).copy()
        if values.shape == (2, 2) and (values < 0).any():
            values[0, 0] = np.nan
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(model, path)


BAD = {
    "no spec": (["--spec", "none.vnnlib"], ["none.vnnlib", "no such file"]),
    "no network": (["--spec", "safe.vnnlib", "--net", "none.onnx"], ["none.onnx", "no such file"]),
    "malformed network": (["--spec", "safe.vnnlib", "--net", "broken.onnx"], ["broken.onnx"]),
    "unclosed": (["--spec", "unclosed.vnnlib"], ["unclosed.vnnlib", "line", "never closed"]),
    "empty spec": (["--spec", "empty"], ["empty"]),
    "unsupported operator": (["--spec", "safe.vnnlib", "--net", "hardmax.onnx"], ["hardmax.onnx", "wave", "Hardmax"]),
    "NaN": (["--spec", "safe.vnnlib", "--net", "nan.onnx"], ["nan.onnx", "NaN"]),
    "inputs": (["--spec", "three.vnnlib", "--net", "net.onnx"], ["three.vnnlib", "3 inputs", "2"]),
    "outputs": (["--spec", "outputs.vnnlib", "--net", "net.onnx"], ["outputs.vnnlib", "4 outputs", "2"]),
    "inverted": (["--spec", "inverted.vnnlib"], ["inverted.vnnlib", "X_0", "empty"]),
    "non-linear": (["--spec", "quotient.vnnlib"], ["quotient.vnnlib", "line"]),
    "method": (["--spec", "safe.vnnlib", "--method", "magic"], ["magic", "crown"]),
    "device": (["--spec", "safe.vnnlib", "--device", "nowhere"], ["nowhere"]),
    "other method's device": (["--spec", "safe.vnnlib", "--method", "milp", "--device", "cuda"], ["milp", "CPU"]),
    "memory word": (["--spec", "safe.vnnlib", "--memory", "lots"], ["--memory", "'lots'", "512M"]),
    "memory 0": (["--spec", "safe.vnnlib", "--memory", "0G"], ["--memory", "'0G'"]),
    "other method's memory": (["--spec", "safe.vnnlib", "--method", "milp", "--memory", "1G"], ["milp", "memory"]),
    "timeout 0": (["--spec", "safe.vnnlib", "--timeout", "0"], ["--timeout", "'0'"]),
    "timeout NaN": (["--spec", "safe.vnnlib", "--timeout", "nan"], ["--timeout", "'nan'"]),
    "nothing": ([], ["--spec"]),
    "network name": (["--spec", "two.vnnlib", "--network", "net.onnx"], ["--network", "NAME=FILE"]),
    "no jobs": (["--spec", "instances.csv", "--jobs", "0"], ["--jobs", "'0'"]),
    "executor": (["--spec", "instances.csv", "--executor", "tcp://here:1"], ["--executor", "dask://HOST:PORT"]),
    "two executors": (["--spec", "i.csv", "--executor", "dask://h:1", "--jobs", "2"], ["--executor", "--jobs"]),
    "undeclared": (["--spec", "two.vnnlib", "--network", "M=net.onnx"], ["two.vnnlib", "no network 'M'"]),
    "empty folder": (["--spec", "nothing"], ["nothing", "no property"]),
    "no table": (["--spec", "none.csv"], ["none.csv", "no such file"]),
    "bad table": (["--spec", "short.csv"], ["short.csv", "line 2", "fields"]),
    "bad timeout in the table": (["--spec", "late.csv"], ["late.csv", "line 1", "-3"]),
    "occupied": (["--spec", "safe.vnnlib", "--out", "empty"], ["empty"]),
    "damaged records": (["--spec", "safe.vnnlib", "--out", "damaged"], ["records.jsonl", "line 1", "--repair"]),
    "linked records": (["--spec", "safe.vnnlib", "--out", "linked"], ["records.jsonl", "link"]),
    "repair of nothing": (["--spec", "safe.vnnlib", "--repair"], ["--repair", "--out"]),
}


def spoil(folder: Path) -> None:
    """Add bad files of every kind to a folder."""
    (folder / "broken.onnx").write_bytes(write_onnx(network())[:-30])
    (folder / "empty").write_bytes(b"")
    (folder / "unclosed.vnnlib").write_text(spec(SAFE)[:-4])
    fractional(folder / "hardmax.onnx")
    not_a_number(folder / "nan.onnx")
    named = "; network: net.onnx"
    (folder / "three.vnnlib").write_text(spec(SAFE, inputs=3))
    (folder / "outputs.vnnlib").write_text(spec(SAFE, outputs=4))
    (folder / "inverted.vnnlib").write_text(spec(SAFE, low="1.0", high="0.0", head=named))
    (folder / "quotient.vnnlib").write_text(spec("(<= (/ 1.0 Y_0) 1.0)", head=named))
    (folder / "nothing").mkdir()
    (folder / "short.csv").write_text("net.onnx,safe.vnnlib,10\nnet.onnx,safe.vnnlib\n")
    (folder / "late.csv").write_text("net.onnx,safe.vnnlib,-3\n")
    (folder / "damaged").mkdir()
    (folder / "damaged" / "records.jsonl").write_text("so what\n")
    (folder / "linked").mkdir()
    (folder / "linked" / "records.jsonl").symlink_to(folder / "damaged" / "records.jsonl")


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, words = BAD[name]
    spoil(folder)
    monkeypatch.chdir(folder)
    if not {"--net", "--network"} & set(arguments):
        arguments = [*arguments, "--net", "net.onnx"]
    try:
        status: object = main(arguments)
    except SystemExit as end:
        status = end.code
    shown = capsys.readouterr()
    assert status == 2 and shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith("certify: ")
    for word in words:
        assert word in line, line


def test_a_fault_of_the_program_is_one_line_and_exits_with_1(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(query: object) -> object:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("verifiable_relu.campaign.inputs.make", lambda *_: Scripted(answer))  # type: ignore
    assert main(["--spec", str(folder / "safe.vnnlib"), "--quiet"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "unknown\n" and shown.err.count("\n") == 1
    assert shown.err.endswith("safe.vnnlib: fault of scripted: ZeroDivisionError: oh\n")
    monkeypatch.setattr("verifiable_relu.campaign.inputs.make", answer)
    assert main(["--spec", str(folder / "safe.vnnlib")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(ZeroDivisionError):
        main(["--spec", str(folder / "safe.vnnlib"), "--debug"])


TALKATIVE = """
import ctypes, os, runpy, sys
from tests.commands import test_certify as t
from verifiable_relu.campaign import inputs

def answer(query):
    os.write(1, b"written to the descriptor\\n")
    print("printed")
    ctypes.CDLL(None).printf(b"printed in C, and in its buffer until the process ends\\n")
    return t.claims(t.make("ibp"), [query], 9)[0]

inputs.make = lambda *_: t.Scripted(answer)
runpy.run_module("verifiable_relu.certify", run_name="__main__", alter_sys=True)
"""


def test_stdout_has_the_answers_alone_whatever_a_library_prints(folder: Path) -> None:
    (folder / "instances.csv").write_text("net.onnx,safe.vnnlib,30\n")
    for spec_, expected in (("safe.vnnlib", "unsat\n"), ("instances.csv", "net.onnx,safe.vnnlib,unsat,")):
        # The verifier is no object for another process.
        done = run(["-c", TALKATIVE, "--spec", spec_, "--quiet", "--debug"], cwd=folder)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(expected) and done.stdout.count("\n") == 1
        assert {"written to the descriptor", "printed"} <= set(done.stderr.splitlines()) and "in C" in done.stderr


@pytest.mark.parametrize("closed", [1, 2])
def test_a_closed_stream_is_no_fault(closed: int, folder: Path) -> None:
    line = f"{sys.executable} -m verifiable_relu.certify --spec safe.vnnlib --method ibp {closed}>&-"
    done = subprocess.run(line, shell=True, cwd=folder, env=environment(), capture_output=True, text=True, timeout=120)
    if closed == 2:
        assert (done.returncode, done.stdout) == (0, "unsat\n")
    else:
        assert done.returncode == 2 and done.stderr.startswith("certify: stdout cannot be written")


def test_repair_resumes_with_the_records_that_are_left(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil(folder)
    arguments = ["--spec", str(folder / "safe.vnnlib"), "--net", str(folder / "net.onnx"), "--method", "ibp", "--quiet"]
    arguments += ["--out", str(folder / "damaged")]
    assert main(arguments) == 2
    assert (folder / "damaged" / "records.jsonl").read_text() == "so what\n"
    capsys.readouterr()
    assert main([*arguments, "--repair"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "unsat\n" and shown.err.count("\n") == 1 and "1 line moved to" in shown.err
    assert (folder / "damaged" / "records.jsonl.bad-1").read_text() == "so what\n"
    assert main(arguments) == 0


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (MemoryError(), 2, "not enough memory to read"),
        (RecursionError(), 2, "nested too deeply"),
        (ZeroDivisionError("oh"), 1, "fault of reading: ZeroDivisionError: oh"),
    ],
)
@pytest.mark.parametrize("reader", ["read_onnx", "read_vnnlib"])
def test_an_instance_that_breaks_its_reader_costs_the_others_nothing(
    reader: str, error: Exception, status: int, said: str, folder: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # Equal files would be read once.
    write_onnx(network(1.0), folder / "bad.onnx")
    (folder / "bad.vnnlib").write_text(spec(SAFE, head="; not the same bytes"))
    original = getattr(inputs, reader)

    def breaking(path: Path, **options: object) -> object:
        if path.stem == "bad":
            raise error
        return original(path, **options)

    monkeypatch.setattr(inputs, reader, breaking)
    net, prop = ("bad.onnx", "safe.vnnlib") if reader == "read_onnx" else ("net.onnx", "bad.vnnlib")
    (folder / "instances.csv").write_text(f"net.onnx,safe.vnnlib,9\n{net},{prop},9\nnet.onnx,boxes.vnnlib,9\n")
    arguments = ["--spec", str(folder / "instances.csv"), "--method", "ibp", "--quiet", "--out", str(folder / "out")]
    assert main([*arguments, "--jobs", "1"]) == status
    shown = capsys.readouterr()
    assert sorted(row[2] for row in rows(shown.out)) == ["unknown", "unknown", "unsat"]
    assert said in shown.err and shown.err.count("\n") == 1
    table = csv.DictReader(io.StringIO((folder / "out" / "results.csv").read_text()))
    assert [(row["answer"], row["reason"]) for row in table] == [
        ("unsat", "proved"), ("unknown", "error"), ("unknown", "incomplete"),
    ]  # fmt: skip


def rows(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


def test_every_row_of_a_table_is_answered_and_recorded(folder: Path) -> None:
    spoil(folder)
    (folder / "instances.csv").write_text(
        "net.onnx,safe.vnnlib,30\nnet.onnx,none.vnnlib,30\nhardmax.onnx,safe.vnnlib,30\n"
        "hardmax.onnx,violated.vnnlib,30\nnet.onnx,violated.vnnlib,30\n"
    )
    arguments = ["--spec", "instances.csv", "--out", "out", "--method", "crown", "--jobs", "1"]
    done = run(["-m", "verifiable_relu.certify", *arguments], cwd=folder)
    assert done.returncode == 2
    answers = {
        ("net.onnx", "safe.vnnlib"): "unsat", ("net.onnx", "none.vnnlib"): "unknown",
        ("hardmax.onnx", "safe.vnnlib"): "unknown", ("hardmax.onnx", "violated.vnnlib"): "unknown",
        ("net.onnx", "violated.vnnlib"): "unknown",
    }  # fmt: skip
    # The rows on stdout come as the answers do.
    assert len(rows(done.stdout)) == len(answers)
    assert {(onnx, vnnlib): answer for onnx, vnnlib, answer, _ in rows(done.stdout)} == answers
    complaints = [line for line in done.stderr.splitlines() if line.startswith("certify: ")]
    # The operator is one fault, whoever meets it.
    assert len(complaints) == 2 and "none.vnnlib" in str(complaints) and "hardmax.onnx" in str(complaints)
    assert "Traceback" not in done.stderr
    table = list(csv.DictReader(io.StringIO((folder / "out" / "results.csv").read_text())))
    assert [(row["onnx"], row["vnnlib"]) for row in table] == list(answers)
    reasons = [("unsat", "proved"), *[("unknown", "error")] * 3, ("unknown", "incomplete")]
    assert [(row["answer"], row["reason"]) for row in table] == reasons


def test_every_file_of_a_folder_is_answered_and_a_time_limit_overrides_the_tables(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    below = folder / "below"
    below.mkdir()
    (below / "deep.vnnlib").write_text(spec(SAFE, head="; network: ../net.onnx"))
    assert main(["--spec", str(folder), "--method", "ibp", "--jobs", "1"]) == 0
    shown = capsys.readouterr()
    found = {Path(row[1]).name: row[2] for row in rows(shown.out)}
    assert found == {
        "deep.vnnlib": "unsat", "boxes.vnnlib": "unknown", "safe.vnnlib": "unsat", "two.vnnlib": "unknown",
        "violated.vnnlib": "unknown",
    }  # fmt: skip
    assert "unsat" in shown.err and "incomplete" in shown.err
    (folder / "instances.csv").write_text("net.onnx,violated.vnnlib,30\n")
    assert main(["--spec", str(folder), "--method", "ibp", "--timeout", "1e-9", "--quiet", "--jobs", "1"]) == 0
    (row,) = rows(capsys.readouterr().out)
    assert row[2] == "timed-out"


WAITING = """
import sys, time
from tests.commands import test_certify as t
from verifiable_relu.campaign import inputs

def answer(query):
    if query.property.unsafe[0][0].bound < -3:
        time.sleep(600)
    return t.claims(t.make("ibp"), [query], 9)[0]

inputs.make = lambda *_: t.Scripted(answer)
sys.exit(t.main())
"""


def test_ctrl_c_keeps_what_is_done_and_the_same_command_resumes(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 20
    for i in range(count):
        (folder / f"s{i:02}.vnnlib").write_text(spec(f"(<= Y_0 -{i + 1}.0)"))
    (folder / "instances.csv").write_text("".join(f"net.onnx,s{i:02}.vnnlib,30\n" for i in range(count)))
    arguments = ["--spec", "instances.csv", "--quiet", "--out", "out", "--jobs", "1"]
    with Process(["-c", WAITING, *arguments], cwd=folder) as process:
        # The work on the fourth waits.
        assert [process.stdout.readline().split(",")[1] for _ in range(3)] == [f"s{i:02}.vnnlib" for i in range(3)]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    said = f"certify: interrupted: 3 of {count} instances are answered and kept in out; the same command resumes\n"
    assert errors == said and known(folder / "out") == 3
    assert len(rows((folder / "out" / "results.csv").read_text())) == 4
    monkeypatch.chdir(folder)
    verifier = Scripted(lambda query: claims(make("ibp"), [query], 9)[0])
    monkeypatch.setattr("verifiable_relu.campaign.inputs.make", lambda *_: verifier)
    assert main(arguments) == 0
    assert [row[2] for row in rows(capsys.readouterr().out)] == ["unsat"] * count
    assert sum(len(queries) for queries in verifier.asked) == count - 3


def test_explain_says_what_auto_would_do_and_answers_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    spec = str(Path(__file__).resolve().parents[2] / "specs" / "cifar_eps.vnnlib")
    assert main(["--spec", spec, "--explain"]) == 0
    first, *stages = capsys.readouterr().out.splitlines()
    assert "varying input" in first
    assert stages[0].startswith("  1. crown, with up to 50% of the time: ")
    assert any(". bab, with up to " in stage for stage in stages)
    with pytest.raises(SystemExit, match="2"):
        main(["--spec", spec, "--explain", "--method", "crown"])
    assert "--explain needs the method auto" in capsys.readouterr().err
