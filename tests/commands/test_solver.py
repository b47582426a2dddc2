"""The command line of the VNN-LIB 2.0 standard, and queries of several networks."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from tests.support.processes import run
from verifiable_relu import __version__
from verifiable_relu.certify import main as certify
from verifiable_relu.nn import LambdaGELU, substitute_relu
from verifiable_relu.readers import from_torch, write_onnx
from verifiable_relu.solver import THEORIES, main
from verifiable_relu.spec.find import Instance, Networks, write_instances

PAIR = """(vnnlib-version <2.0>)
(declare-network f (declare-input X float32 [2]) (declare-output Y float32 [1]))
(declare-network g {relation} (declare-input U float32 [2]) (declare-output V float32 [1]))
(assert (and (>= X[0] 0.0) (<= X[0] 1.0) (>= X[1] 0.0) (<= X[1] 1.0)))
{more}
"""
SHARED = "(assert (and (== X[0] U[0]) (== U[1] X[1])))\n"


def net(weight: list[float], inner: float = 1.0) -> nn.Module:
    """The network inner·ReLU(w·x)/inner of two inputs."""
    first, last = nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        first.weight.copy_(inner * torch.tensor([weight]))
        last.weight.fill_(1 / inner)
    return nn.Sequential(first, nn.ReLU(), last)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("networks")
    write_onnx(from_torch(net([1.0, -1.0]), (2,)), made / "f.onnx")
    write_onnx(from_torch(net([1.0, -1.0], 4.0), (2,)), made / "same.onnx")
    write_onnx(from_torch(net([1.0, -0.5]), (2,)), made / "other.onnx")
    return made


def asked(folder: Path, text: str, capsys: pytest.CaptureFixture[str], *more: str, **networks: str) -> list[str]:
    (folder / "q.vnnlib").write_text(text)
    files = [f"--network={name}={folder / file}" for name, file in networks.items()]
    assert main(["verify", str(folder / "q.vnnlib"), *files, "--timeout", "30", *more]) == 0
    return capsys.readouterr().out.splitlines()


def test_two_networks_that_are_equal_and_two_that_are_not(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    apart = PAIR.format(relation="(isomorphic-to f)", more=SHARED + "(assert (>= V[0] (+ Y[0] 0.25)))")
    assert asked(folder, apart, capsys, f="f.onnx", g="same.onnx") == ["unsat"]
    answer, *lines = asked(folder, apart, capsys, f="f.onnx", g="other.onnx")
    assert answer == "sat"
    assert [lines[i] for i in (0, 3, 5, 8)] == ["X float32 [2]", "Y float32 [1]", "U float32 [2]", "V float32 [1]"]
    (a, b), y, u, v = [list(map(float, lines[i:j])) for i, j in ((1, 3), (4, 5), (6, 8), (9, 10))]
    assert u == [a, b] and 0 <= a <= 1 and 0 <= b <= 1
    assert y[0] == pytest.approx(max(0, a - b)) and v[0] == pytest.approx(max(0, a - b / 2)) and v[0] >= y[0] + 0.25


def test_one_file_for_equal_networks_and_inputs_that_are_related(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The network grows in its first input: U[0] ≥ X[0] cannot make it smaller. U[0] has no lower bound of its own.
    monotone = "(assert (and (<= X[0] U[0]) (<= U[0] 1.0) (== X[1] U[1])))\n"
    smaller = PAIR.format(relation="(equal-to f)", more=monotone + "(assert (<= (+ V[0] 0.001) Y[0]))")
    assert asked(folder, smaller, capsys, f="f.onnx") == ["unsat"]
    larger = PAIR.format(relation="(equal-to f)", more=monotone + "(assert (>= V[0] (+ Y[0] 0.5)))")
    assert asked(folder, larger, capsys, f="f.onnx")[0] == "sat"


@pytest.mark.parametrize(("bound", "answer"), [("(<= Y[0] -0.5)", "unknown"), ("(>= Y[0] 0.5)", "sat")])
def test_an_input_without_a_bound_is_unknown_or_sat(
    bound: str, answer: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = "\n".join(line for line in PAIR.splitlines() if "network g" not in line)
    text = one.replace(" (<= X[0] 1.0)", "").format(more=f"(assert {bound})")
    assert asked(folder, text, capsys, f="f.onnx")[0] == answer
    command = ["--net", str(folder / "f.onnx"), "--spec", str(folder / "q.vnnlib")]
    certify(command)
    said = capsys.readouterr()
    assert answer in said.out.split()
    assert ("the input X[0] has no upper bound" in said.out + said.err) == (answer == "unknown")


def test_one_network_whose_inputs_and_outputs_are_related(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = "\n".join(line for line in PAIR.splitlines() if "network g" not in line)
    assert asked(folder, one.format(more="(assert (>= (+ Y[0] X[1]) 1.001))"), capsys, f="f.onnx") == ["unsat"]
    answer, *lines = asked(folder, one.format(more="(assert (>= (+ Y[0] X[1]) 0.99))"), capsys, f="f.onnx")
    assert answer == "sat" and float(lines[4]) + float(lines[2]) >= 0.99


def test_the_swap_of_an_activation_is_a_question_of_two_networks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    smooth = nn.Sequential(nn.Linear(2, 3), LambdaGELU(40.0), nn.Linear(3, 1))
    for name, model in (("f", smooth), ("g", substitute_relu(smooth))):
        write_onnx(from_torch(model, (2,)), tmp_path / f"{name}.onnx")
    weight = smooth[2].weight.abs().sum().item()
    far = f"(assert (>= V[0] (+ Y[0] {0.17 / 40 * weight + 0.05:.6f})))"
    text = PAIR.format(relation="", more=SHARED + far)
    assert asked(tmp_path, text, capsys, f="f.onnx", g="g.onnx") == ["unsat"]


def test_serialised_assignments_and_both_versions(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = PAIR.format(relation="", more=SHARED + "(assert (>= V[0] (+ Y[0] 0.25)))")
    out = folder / "assigned"
    assert asked(folder, text, capsys, "--serialise-assignments", str(out), f="f.onnx", g="other.onnx") == ["sat"]
    read = {
        path.stem: onnx.numpy_helper.to_array(onnx.TensorProto.FromString(path.read_bytes())) for path in out.iterdir()
    }
    assert set(read) == {"X", "Y", "U", "V"} and read["X"].dtype == np.float32 and read["X"].shape == (2,)
    assert read["V"][0] >= read["Y"][0] + 0.25
    old = (
        "(declare-const X_0 Real)\n(declare-const X_1 Real)\n(declare-const Y_0 Real)\n"
        "(assert (>= X_0 0.0))\n(assert (<= X_0 1.0))\n(assert (>= X_1 0.0))\n(assert (<= X_1 1.0))\n"
        "(assert (>= Y_0 0.75))\n"
    )
    answer, *lines = asked(folder, old, capsys, net="f.onnx")
    assert answer == "sat" and lines[0].startswith("((X_0 ") and lines[-1].endswith("))")


ROOT = Path(__file__).resolve().parents[2]


def test_a_list_names_several_networks_as_the_competition_does(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    equal = PAIR.format(relation="(equal-to f)", more=SHARED + "(assert (>= V[0] (+ Y[0] 0.25)))")
    (tmp_path / "equal.vnnlib").write_text(equal)
    (tmp_path / "apart.vnnlib").write_text(equal.replace("equal-to", "isomorphic-to"))
    both, apart = (Networks((("f", folder / "f.onnx"), ("g", folder / name))) for name in ("f.onnx", "other.onnx"))
    rows = [("equal", both), ("apart", apart), ("equal", apart)]
    write_instances(tmp_path / "instances.csv", [Instance(onnx, tmp_path / f"{name}.vnnlib", 9) for name, onnx in rows])
    assert certify(["--spec", str(tmp_path), "--jobs", "1"]) == 2
    answers = [line.split(",")[-2] for line in capsys.readouterr().out.splitlines()]
    assert answers == ["unsat", "sat", "unknown"]
    # A single property finds its row; a single network's file serves networks that are equal.
    assert certify(["--spec", str(tmp_path / "apart.vnnlib"), "--quiet"]) == 0
    answer, *lines = capsys.readouterr().out.splitlines()
    assert answer == "sat" and [line.split()[0] for line in lines] == ["X[0]", "X[1]", "Y[0]", "U[0]", "U[1]", "V[0]"]
    for options in (["--net", str(folder / "f.onnx")], ["--net", str(both)]):
        assert certify(["--spec", str(tmp_path / "equal.vnnlib"), "--quiet", *options]) == 0
        assert capsys.readouterr().out == "unsat\n"


def test_the_competitions_scripts_write_the_answer_into_a_file(folder: Path, tmp_path: Path) -> None:
    text = PAIR.format(relation="(equal-to f)", more=SHARED + "(assert (>= V[0] (+ Y[0] 0.25)))")
    (tmp_path / "q.vnnlib").write_text(text)
    scripts = ROOT / "benchmarks" / "competition"
    files = Networks((("f", folder / "f.onnx"), ("g", folder / "f.onnx")))
    about = ["v1", "test", str(files), str(tmp_path / "q.vnnlib")]
    environment = {**os.environ, "VERIFIABLE_RELU_PYTHON": sys.executable}
    run = partial(subprocess.run, env=environment, capture_output=True, text=True, check=False)
    assert run([scripts / "prepare_instance.sh", *about]).returncode == 0
    missing = [*about[:2], about[2].replace("f.onnx", "none.onnx"), about[3]]
    assert run([scripts / "prepare_instance.sh", *missing]).returncode == 1
    done = run([scripts / "run_instance.sh", *about, str(tmp_path / "out.txt"), "60"])
    assert done.returncode == 0 and (tmp_path / "out.txt").read_text() == "unsat\n", done.stderr


def test_what_is_supported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--name"]) == 0 and main(["--version"]) == 0
    assert capsys.readouterr().out == f"verifiable_relu\n{__version__}\n"
    for capability, answer in THEORIES.items():
        assert main(["supports", capability]) == 0
        assert capsys.readouterr().out == f"{answer}\n"
    assert main(["supports", "--onnx-operators"]) == 0
    assert {"Conv", "Gemm", "Relu"} <= set(capsys.readouterr().out.splitlines())
    assert main(["supports", "--onnx-opset-versions"]) == 0
    low, high = map(int, capsys.readouterr().out.split())
    assert low < high


def test_bad_requests_are_one_line_and_status_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = PAIR.format(relation="(equal-to f)", more=SHARED + "(assert (>= V[0] Y[0]))")
    own = good.replace("(equal-to f)", "")
    third = "(== U[2] X[2]) (>= X[2] 0.0) (<= X[2] 0.0)"
    f, other = (f"--network={name}={folder / 'f.onnx'}" for name in ("f", "h"))
    apart = f"--network=g={folder / 'other.onnx'}"
    for text, networks, said in (
        (good, [], "no network is named"),
        (good, [f, "--net", "f.onnx"], "give either --net or --network, not both"),
        (good, [f, apart], "'g' equals 'f'"),
        (own, [f], "no file for the network 'g'"),
        (own, [f, apart, other], "no network 'h'"),
        (own, [f, f], "named twice"),
        (good.replace("[2]", "[3]").replace("(== U", f"{third} (== U"), [f], "3 inputs are declared"),
        (good.replace("float32", "float64"), [f], "declared as float64"),
        (good.replace(">= V[0] Y[0]", ">= (* V[0] Y[0] " + "V[0] " * 15 + ") 1.0"), [f], "more than 16 variables"),
        (good.replace("X[0] U[0]", "X[0] U[5]"), [f], ""),
        ("(", [f], ""),
    ):
        (folder / "bad.vnnlib").write_text(text)
        assert main(["verify", str(folder / "bad.vnnlib"), *networks]) == 2, said
        error = [line for line in capsys.readouterr().err.splitlines() if "real arithmetic" not in line]
        assert len(error) == 1 and error[0].startswith("solver: ") and said in error[0], error
    assert main(["verify", str(folder / "none.vnnlib"), f]) == 2
    (folder / "bad.vnnlib").write_text(own)
    assert main(["verify", str(folder / "bad.vnnlib"), "--net", str(folder / "f.onnx")]) == 2
    assert "2 networks (f, g)" in capsys.readouterr().err


def test_the_limit_counts_the_start_of_the_process(folder: Path) -> None:
    text = PAIR.format(relation="", more=SHARED + "(assert (>= V[0] (+ Y[0] 0.25)))")
    (folder / "late.vnnlib").write_text(text)
    files = itertools.chain.from_iterable(("--network", f"{name}={folder / 'f.onnx'}") for name in "fg")
    command = [sys.executable, "-m", "verifiable_relu.solver", "verify", str(folder / "late.vnnlib"), *files]
    done = subprocess.run([*command, "--timeout", "0.05"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "timed-out\n"), done.stderr


AT_FAULT = """
import ctypes, os, sys
from verifiable_relu.campaign import inputs
inputs.read_onnx = lambda *_, **__: {fault}
from verifiable_relu.solver import main
sys.exit(main(alone=True))
"""


@pytest.mark.parametrize(
    ("fault", "answer", "status"), [("os.abort()", "unknown", 1), ("ctypes.PyDLL(None).pause()", "timed-out", 0)]
)
def test_a_library_that_crashes_or_hangs_costs_one_answer(fault: str, answer: str, status: int, folder: Path) -> None:
    (folder / "fault.vnnlib").write_text(PAIR.format(relation="", more=SHARED + "(assert (>= V[0] 9.0))"))
    line = ["verify", "fault.vnnlib", "--network", "f=f.onnx", "--network", "g=f.onnx", "--timeout", "4"]
    done = run(["-c", AT_FAULT.format(fault=fault), *line], cwd=folder)
    assert (done.stdout, done.returncode) == (f"{answer}\n", status), done.stderr
    assert done.stderr.count("\n") == status


def test_the_declared_type_is_the_arithmetic_where_the_user_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """x + 2³⁰ − 2³⁰ is 0 in float32: one question has two answers."""
    big = onnx.numpy_helper.from_array(np.float32([2.0**30]), "c")
    nodes = [onnx.helper.make_node("Add", ["x", "c"], ["h"]), onnx.helper.make_node("Sub", ["h", "c"], ["y"])]
    ends = (onnx.helper.make_tensor_value_info(name, 1, [1, 1]) for name in "xy")
    graph = onnx.helper.make_graph(nodes, "g", *([end] for end in ends), [big])
    opsets = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), folder / "sensing.onnx")
    text = """(vnnlib-version <2.0>)
(declare-network f (declare-input X float32 [1,1]) (declare-output Y float32 [1,1]))
(assert (and (>= X[0,0] 0.45) (<= X[0,0] 0.55)))
(assert (<= Y[0,0] 0.2))
"""
    assert asked(folder, text, capsys, f="sensing.onnx") == ["unsat"]
    for arithmetic in ("declared", "float32"):
        assert asked(folder, text, capsys, "--arithmetic", arithmetic, f="sensing.onnx")[0] == "sat"
    (folder / "q.vnnlib").write_text(text.replace("float32", "real"))
    arguments = ["verify", str(folder / "q.vnnlib"), f"--network=f={folder / 'sensing.onnx'}"]
    assert main([*arguments, "--arithmetic", "declared"]) == 0 and capsys.readouterr().out == "unsat\n"
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--arithmetic", "float64"])
    assert "unknown arithmetic 'float64'" in capsys.readouterr().err
