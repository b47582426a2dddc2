"""Malformed and hostile ONNX files at the command: a verdict or one line, soon and in little memory."""

from __future__ import annotations

import gzip
import shutil
import struct
import zlib
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from tests.support.draws import some
from tests.support.processes import run
from verifiable_relu.check import BadInput
from verifiable_relu.check.model import read_model
from verifiable_relu.errors import InputError
from verifiable_relu.readers import read_onnx

from .limited import PROCESSOR_SECONDS, ROOT, Answer, answers

MEBIBYTES = 300
LONGEST = 1000
"""Most characters of the line on stderr: the message's own limit, and the names of files."""
LIMITED = f"""
import resource, sys
from verifiable_relu.certify import main
resource.setrlimit(resource.RLIMIT_AS, ({12 * 2**30},) * 2)
sys.exit(main(alone=True))
"""
"""The command for a whole list, with a limit of memory; the libraries alone take some gibibytes of addresses."""
VERDICTS = ("sat", "unsat", "unknown", "timed-out")
PROPERTY = """(declare-const X_0 Real)
(declare-const Y_0 Real)
(assert (>= X_0 0.0))
(assert (<= X_0 1.0))
(assert (>= Y_0 {bound}))
"""


@pytest.fixture(scope="module")
def folder(data: Path) -> Path:
    found = data / "bad_input" / "onnx"
    if not found.is_dir():
        pytest.skip(f"needs {found}")
    return found


def chain(length: int) -> bytes:
    """x → Relu → … → y."""
    nodes = [
        helper.make_node("Relu", [f"v{i}" if i else "x"], [f"v{i + 1}" if i + 1 < length else "y"])
        for i in range(length)
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:])
    opset = [helper.make_opsetid("", 13)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()


def bomb(path: Path, size: int, *, members: int = 1) -> Path:
    """A gzipped file of ``size`` zeros, in one member or several."""
    if members > 1:
        path.write_bytes(gzip.compress(bytes(size // members), 6) * members)
        return path
    # Each block is packed without a look at the one before, so that all are the same and one is packed in fact.
    block = bytes(2**24)
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    packed = packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)
    check, count = 0, size // len(block)
    for _ in range(count):
        check = zlib.crc32(block, check)
    head, tail = gzip.compress(b"")[:10], struct.pack("<II", check, size % 2**32)
    path.write_bytes(head + packed * count + packer.flush() + tail)
    return path


def fault(found: Answer) -> str | None:
    """What is wrong with how a command ended; None if it gave a verdict, or one line and exit status 2."""
    if found.seconds > PROCESSOR_SECONDS or found.mebibytes > MEBIBYTES:
        return "too long, or too much memory"
    lines = found.stderr.splitlines()
    if found.status == 0:
        return None if found.verdict in VERDICTS and not lines else "no verdict, or more than a verdict"
    if found.status != 2:
        return "neither a verdict nor bad input"
    if len(lines) != 1 or len(lines[0]) > LONGEST or not lines[0].isprintable():
        return "no single printable line of bounded length"
    return None


def faults(found: list[Answer]) -> str:
    return "\n".join(f"{what}: {one}" for one in found if (what := fault(one)) is not None)


def asked(network: Path, prop: Path) -> list[str]:
    return ["--net", str(network), "--spec", str(prop), "--timeout", "0.3", "--quiet"]


def properties(folder: Path, network: Path) -> list[Path]:
    """The properties whose number of inputs is that of the network; that of one where the network does not say it."""
    try:
        dims = onnx.load(network, load_external_data=False).graph.input[0].type.tensor_type.shape.dim
        size = 1
        for dim in dims:
            size *= dim.dim_value
    except Exception:
        size = 1
    return sorted(folder.glob(f"p_{size}_*.vnnlib")) or [folder / "p_1_1.vnnlib"]


def test_every_file_ends_in_a_verdict_or_in_one_line(folder: Path) -> None:
    """Each by itself, in the gate some: of a list, all are answered below."""
    networks = sorted(folder.glob("*.onnx"))
    found = answers([asked(network, prop) for network in some(networks) for prop in properties(folder, network)])
    assert len(networks) >= 30
    assert not (bad := faults(found)), f"{len(bad.splitlines())} of {len(found)}:\n{bad}"


def test_a_chain_of_8000_nodes_ends_in_a_verdict_or_in_one_line(tmp_path: Path) -> None:
    """Many more nodes than Python has frames, and too many for anything whose time is quadratic in their number."""
    (tmp_path / "p.vnnlib").write_text(PROPERTY.format(bound="5.0"))
    (tmp_path / "chain.onnx").write_bytes(chain(8000))
    (found,) = answers([asked(tmp_path / "chain.onnx", tmp_path / "p.vnnlib")])
    assert fault(found) is None, found
    assert found.verdict in ("unsat", "unknown", "timed-out", "")


@pytest.mark.parametrize("members", [1, 64])
def test_a_gigabyte_of_zeros_in_gzip_ends_in_one_line(tmp_path: Path, members: int) -> None:
    (tmp_path / "p.vnnlib").write_text(PROPERTY.format(bound="5.0"))
    network = bomb(tmp_path / "bomb.onnx.gz", 2**30, members=members)
    (found,) = answers([asked(network, tmp_path / "p.vnnlib")])
    assert fault(found) is None, found
    assert found.status == 2


def test_gzip_that_is_cut_or_goes_on_ends_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "p.vnnlib").write_text(PROPERTY.format(bound="5.0"))
    packed = gzip.compress(chain(3))
    files = {"empty": b"", "byte": packed[:1], "head": packed[:10], "cut": packed[:-1], "more": packed + b"more"}
    for name, data in files.items():
        (tmp_path / f"{name}.onnx.gz").write_bytes(data)
    found = answers([asked(tmp_path / f"{name}.onnx.gz", tmp_path / "p.vnnlib") for name in files])
    assert not (bad := faults(found)), bad
    assert [one.status for one in found[:-1]] == [2] * 4


def test_a_list_answers_all_instances_but_those_of_bad_files(folder: Path, tmp_path: Path) -> None:
    """Run as people run it: a process of its own, and the list read from a folder."""
    networks = sorted(folder.glob("*.onnx"))
    rows: list[tuple[str, str]] = []
    for path in (*networks, *folder.glob("*.vnnlib")):
        shutil.copy(path, tmp_path / path.name)
    (tmp_path / "good.onnx").write_bytes(chain(2))
    (tmp_path / "bomb.onnx").write_bytes(b"")
    bomb(tmp_path / "bomb.onnx.gz", 2**30, members=64)
    for name, bound in (("sat", "0.5"), ("unsat", "5.0")):
        (tmp_path / f"{name}.vnnlib").write_text(PROPERTY.format(bound=bound))
    for index, network in enumerate((*networks, tmp_path / "bomb.onnx.gz")):
        rows.append((network.name, properties(tmp_path, tmp_path / network.name)[0].name))
        rows.append(("good.onnx", "sat.vnnlib" if index % 2 else "unsat.vnnlib"))
    (tmp_path / "instances.csv").write_text("".join(f"{network},{prop},3\n" for network, prop in rows))
    done = run(["-c", LIMITED, "--spec", tmp_path / "instances.csv", "--quiet", "--jobs", "1"], cwd=ROOT, timeout=600)
    answered = [line.split(",") for line in done.stdout.splitlines()]
    named = [(Path(a[0]).name, Path(a[1]).name, a[2]) for a in answered]
    assert sorted((network, prop) for network, prop, _ in named) == sorted(rows), done.stderr[-2000:]
    assert all(answer == prop.removesuffix(".vnnlib") for network, prop, answer in named if network == "good.onnx")
    assert done.returncode == 2
    assert all(len(line) <= LONGEST and line.isprintable() for line in done.stderr.splitlines())


def after_a_failed_node(*nodes: onnx.NodeProto) -> bytes:
    """A file in which a node fails whose output the first of ``nodes`` takes: its type stays unknown."""
    failed = helper.make_node("OneHot", ["index", "depth", "values"], ["hot"], axis=-7)
    last = helper.make_node("Add", ["x", nodes[-1].output[0]], ["y"])
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 3)) for name in "xy"]
    constants = [
        helper.make_tensor("index", TensorProto.INT64, (1,), [0]),
        helper.make_tensor("depth", TensorProto.INT64, (), [3]),
        helper.make_tensor("values", TensorProto.FLOAT, (2,), [0, 1]),
    ]
    graph = helper.make_graph([failed, *nodes, last], "crash", ends[:1], ends[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return bytes(model.SerializeToString())


CRASHES = {
    "eye": after_a_failed_node(helper.make_node("EyeLike", ["hot"], ["e"], dtype=1)),
    "mish": after_a_failed_node(helper.make_node("Mish", ["hot"], ["e"])),
    "both": after_a_failed_node(
        helper.make_node("Mish", ["hot"], ["m"]), helper.make_node("EyeLike", ["m"], ["e"], dtype=1)
    ),
}


@pytest.mark.parametrize("name", CRASHES)
def test_a_file_at_which_the_onnx_library_crashes_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.onnx"
    path.write_bytes(CRASHES[name])
    with pytest.raises(InputError, match=rf"{name}\.onnx: ") as raised:
        read_onnx(path)
    assert "crashes" in str(raised.value) or "checker refuses" in str(raised.value)
    with pytest.raises(BadInput, match="not known"):
        read_model(CRASHES[name])


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_crash_costs_no_other_answer(jobs: str, tmp_path: Path) -> None:
    (tmp_path / "good.onnx").write_bytes(chain(2))
    for name, bound in (("sat", "0.5"), ("unsat", "5.0")):
        (tmp_path / f"{name}.vnnlib").write_text(PROPERTY.format(bound=bound))
    for name, data in CRASHES.items():
        (tmp_path / f"{name}.onnx").write_bytes(data)
    rows = [(net, prop) for name in CRASHES for net, prop in ((name, "sat"), ("good", "unsat"), ("good", "sat"))]
    (tmp_path / "instances.csv").write_text("".join(f"{net}.onnx,{prop}.vnnlib,9\n" for net, prop in rows))
    done = run(["-m", "verifiable_relu.certify", "--spec", "instances.csv", "--jobs", jobs, "--quiet"], cwd=tmp_path)
    answered = sorted(tuple(line.split(",")[:3]) for line in done.stdout.splitlines())
    assert answered == sorted(
        (f"{net}.onnx", f"{prop}.vnnlib", prop if net == "good" else "unknown") for net, prop in rows
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == len(CRASHES)
