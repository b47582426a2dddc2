"""Limits of time and memory: files that are small and ask for much end in *unknown* with its reason, or in one line."""

from __future__ import annotations

import csv
import os
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.support.processes import run
from tests.support.scripted import tiny
from verifiable_relu.readers import write_onnx

HEAD = "(declare-const X_0 Real)(declare-const Y_0 Real)(assert (>= X_0 0))(assert (<= X_0 1))"


def alternatives(count: int) -> str:
    """As many disjuncts, each of one box and one row."""
    return "".join(f"(and (>= X_0 {k / count})(<= X_0 {(k + 1) / count})(<= Y_0 -{k + 1}))" for k in range(count))


PROPERTIES = {
    "products of or over outputs": "".join("(assert (or (<= Y_0 -1)(<= Y_0 -2)))" for _ in range(16)),
    "products of or over inputs": "".join(
        f"(assert (or {''.join(f'(>= X_0 0.{k}{n})' for k in range(1, 10))}))" for n in range(5)
    )
    + "(assert (<= Y_0 9))",
    "100,000 disjuncts": f"(assert (or {alternatives(100_000)}))",
    "nested deeply": f"(assert {'(or (<= Y_0 -1) ' * 900}(<= Y_0 -2){')' * 900})",
    "nested too deeply": f"(assert {'(or ' * 100_000}(<= Y_0 -2){')' * 100_000})",
    "nested products": f"(assert {'(and (or (<= Y_0 -1)(<= Y_0 -2)) (or (<= Y_0 -3) ' * 20}(<= Y_0 -9){'))' * 20})",
}


def model(nodes: list[onnx.NodeProto], *constants: onnx.TensorProto) -> bytes:
    """A file that adds a number z, which the nodes make, to its input."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [*nodes, helper.make_node("ReduceMax", ["z"], ["m"], keepdims=0), helper.make_node("Add", ["x", "m"], ["y"])],
        "g", [value("x", TensorProto.FLOAT, [1, 1])], [value("y", TensorProto.FLOAT, [1, 1])], list(constants),
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    data: bytes = made.SerializeToString()
    return data


def numbers(name: str, values: object, kind: type = np.int64) -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(np.array(values, kind), name)


ONE = numbers("o", [1], np.float32)

NETWORKS = {
    "Expand": model([helper.make_node("Expand", ["o", "s"], ["z"])], ONE, numbers("s", [1 << 36])),
    "ConstantOfShape": model([helper.make_node("ConstantOfShape", ["s"], ["z"])], numbers("s", [1 << 20, 1 << 16])),
    "Tile": model([helper.make_node("Tile", ["o", "s"], ["z"])], ONE, numbers("s", [1 << 35])),
    "products of Tile": model(
        [
            helper.make_node("Tile", ["o", "s"], ["a"]),
            helper.make_node("Tile", ["a", "s"], ["b"]),
            helper.make_node("Tile", ["b", "s"], ["z"]),
        ],
        ONE, numbers("s", [1 << 12]),
    ),
    "a declared shape": model(
        [helper.make_node("Identity", ["c"], ["z"])],
        TensorProto(name="c", data_type=TensorProto.FLOAT, dims=[1 << 40], raw_data=b"\0" * 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_small_property_that_asks_for_much_ends_in_time(name: str, tmp_path: Path) -> None:
    write_onnx(tiny(1.0), tmp_path / "net.onnx")
    (tmp_path / "p.vnnlib").write_text(HEAD + PROPERTIES[name])
    limit, start = 4.0, os.times()
    line = ["-m", "verifiable_relu", "certify", "--spec", "p.vnnlib", "--net", "net.onnx", "--timeout", f"{limit:g}"]
    done = run([*line, "--jobs", "1", "--memory", "256M"], cwd=tmp_path, timeout=600)
    after = os.times()
    answer, answered = done.stdout.split("\n")[0], "sat" if "over inputs" in name else "unsat"
    if done.returncode == 2:
        assert done.stdout == "" and done.stderr.count("\n") == 1 and "p.vnnlib" in done.stderr
    else:
        assert done.returncode == 0 and answer in ("timed-out", "unknown", answered), done.stderr
        assert answer != "unknown" or "memory" in done.stderr
    # Start-up takes 2 to 4 s of processor time.
    assert after.children_user + after.children_system - start.children_user - start.children_system < limit + 8


@pytest.mark.parametrize("name", NETWORKS)
def test_a_small_network_that_asks_for_much_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(NETWORKS[name])
    (tmp_path / "p.vnnlib").write_text(HEAD + "(assert (<= Y_0 -1))")
    line = ["-m", "verifiable_relu", "certify", "--spec", "p.vnnlib", "--net", "net.onnx", "--timeout", "9"]
    done = run([*line, "--memory", "256M"], cwd=tmp_path, timeout=600)
    assert done.returncode == 2 and done.stdout == "", (done.stdout, done.stderr)
    assert done.stderr.count("\n") == 1 and "net.onnx" in done.stderr


HANG = """
import ctypes, os, sys
from verifiable_relu.campaign import inputs

original = inputs.read_onnx

def read(path, **options):
    if path.stem == "hang":
        # C code that holds the interpreter's lock.
        ctypes.PyDLL(None).pause()
    if path.stem == "fill":
        held = [bytes(b"x" * (16 << 20)) for _ in range(1000)]
    return original(path, **options)

inputs.read_onnx = read
sys.argv[0] = "certify"
from verifiable_relu.certify import main
sys.exit(main(alone=True))
"""


@pytest.mark.parametrize(("name", "answer", "why"), [("hang", "timed-out", "timeout"), ("fill", "unknown", "memory")])
def test_a_library_that_hangs_or_fills_the_memory_is_ended(name: str, answer: str, why: str, tmp_path: Path) -> None:
    said = {"timeout": "time limit reached", "memory": "out of memory"}[why]
    write_onnx(tiny(1.0), tmp_path / f"{name}.onnx")
    (tmp_path / "p.vnnlib").write_text(HEAD + "(assert (<= Y_0 -1))")
    line = ["-c", HANG, "--spec", "p.vnnlib", "--net", f"{name}.onnx", "--timeout", "60" if name == "fill" else "3"]
    done = run([*line, "--out", "out", "--memory", "64M"], cwd=tmp_path, timeout=600)
    assert (done.stdout, done.returncode) == (f"{answer}\n", 0) and said in done.stderr
    (row,) = csv.DictReader((tmp_path / "out" / "results.csv").read_text().splitlines())
    assert (row["answer"], row["reason"]) == (answer, why)


@pytest.mark.seldom
def test_a_property_of_a_list_that_is_not_read_in_time_costs_no_other_answer(tmp_path: Path) -> None:
    write_onnx(tiny(1.0), tmp_path / "net.onnx")
    (tmp_path / "long.vnnlib").write_text(HEAD + PROPERTIES["100,000 disjuncts"])
    for number in range(3):
        (tmp_path / f"{number}.vnnlib").write_text(HEAD + f"(assert (<= Y_0 -{number + 1}))")
    names = ["0", "long", "1", "2"]
    (tmp_path / "instances.csv").write_text("".join(f"net.onnx,{name}.vnnlib,60\n" for name in names))
    line = ["-m", "verifiable_relu", "certify", "--spec", "instances.csv", "--jobs", "1", "--timeout", "3"]
    start = time.perf_counter()
    done = run([*line, "--quiet"], cwd=tmp_path, timeout=600)
    assert done.returncode == 0 and time.perf_counter() - start < 600
    found = {row[1]: row[2] for row in csv.reader(done.stdout.splitlines())}
    assert found == {"0.vnnlib": "unsat", "long.vnnlib": "timed-out", "1.vnnlib": "unsat", "2.vnnlib": "unsat"}
