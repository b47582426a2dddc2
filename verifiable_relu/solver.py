"""The command line of the VNN-LIB 2.0 standard: ``verify``, ``supports``, ``--name`` and ``--version``.

    python -m verifiable_relu.solver verify query.vnnlib --network f=f.onnx --network g=g.onnx --timeout 60
    python -m verifiable_relu.solver supports --onnx-operators

The first line that ``verify`` prints is sat, unsat, unknown or timed-out; for sat, the assignment follows. A query may
speak of several networks. The time limit counts from the start of the process. Verdicts are about real arithmetic on
the networks' weights, and a counterexample has been replayed in onnxruntime; so ``supports`` names the element type
real alone, while queries that declare float32 or float64 are answered too, with a note on stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiable_relu import __version__
from verifiable_relu.arguments import Parser, seconds
from verifiable_relu.errors import InputError
from verifiable_relu.streams import complain, guarded

if TYPE_CHECKING:
    from verifiable_relu.campaign import Result
    from verifiable_relu.network import Network
    from verifiable_relu.spec.vnnlib2 import Declared, Joined

_BEGAN = time.perf_counter()

NAME = "verifiable_relu"

_UNLIMITED = 1e6
"""The seconds that stand for no time limit."""

_SPARE = 0.3
"""The seconds before the time limit at which methods are told to stop, so that the answer comes before it."""

_TYPES = {"Real": "Real", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}

Assignment = tuple[tuple[str, tuple[int, ...], str], list[str]]
"""The name, shape and element type of a variable, and its elements in row-major order."""

THEORIES = {
    "--vnnlib-versions": "1.0\n2.0",
    "--onnx-element-types": "real",
    "--hidden-node-theories": "H",
    "--multiple-input-output-theories": "MIO",
    "--multiple-network-theories": "MNET",
    "--multiple-node-comparison-theories": "MNC",
    "--arithmetic-complexity-theories": "LIN",
    "--optimised-disjunctive-reasoning": "false",
    "--serialise-assignments": "true",
    "--unsat-proofs": "false",
}
"""The answers to ``supports`` that are known without reading the tables of operators."""

_ONNX = {"F16": "tensor(float16)", "F32": "tensor(float)", "F64": "tensor(double)"}

_OPERATORS = ("--onnx-opset-versions", "--onnx-operators", "--onnx-operators-unsat-proofs")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = Parser(label="solver", prog="python -m verifiable_relu.solver", text=__doc__)
    made.add_argument("--name", action="store_true", help="print the solver's name")
    made.add_argument("--version", action="store_true", help="print the solver's version")
    commands = made.add_subparsers(dest="command", metavar="COMMAND")
    verify = commands.add_parser("verify", help="answer a query", description="Answer a VNN-LIB query.")
    verify.add_argument("query", type=Path, metavar="QUERY", help="the VNN-LIB file, 1.0 or 2.0")
    verify.add_argument(
        "--network", type=_named_file, action="append", default=[], metavar="NAME=FILE", help="may be repeated"
    )
    verify.add_argument("--net", type=Path, metavar="FILE", help="the file of the query's only network, by no name")
    verify.add_argument("--timeout", type=seconds, default=_UNLIMITED, metavar="SECONDS", help="start-up included")
    verify.add_argument("--serialise-assignments", type=Path, metavar="DIR", help="write assignments as ONNX tensors")
    verify.add_argument("--method", default="auto", help="of verifiable_relu.certify (default: auto)")
    supports = commands.add_parser("supports", help="say what is supported", description="Say what is supported.")
    which = supports.add_mutually_exclusive_group(required=True)
    for capability in (*_OPERATORS, *THEORIES):
        which.add_argument(capability, dest="capability", action="store_const", const=capability)
    return made


def _named_file(text: str) -> tuple[str, Path]:
    name, separator, file = text.partition("=")
    if not (name and separator and file):
        raise argparse.ArgumentTypeError(f"'{text}' is not of the form NAME=FILE")
    return name, Path(file)


def main(arguments: Sequence[str] | None = None, alone: bool = False) -> int:
    """Run the command; returns the exit status (``streams.guarded``): 0 for every verdict.

    Args:
        arguments: the command line's arguments; by default those of the process.
        alone: whether the process runs this command only, so that its time limit counts from the process's start.
    """
    made = parser()
    options = made.parse_args(arguments)
    if options.name or options.version:
        print(NAME if options.name else __version__)
        return 0
    if options.command is None:
        made.error("a command is needed: verify or supports")

    def work() -> int:
        if options.command == "supports":
            print(_supported(options.capability))
            return 0
        return _verify(options, elapsed() if alone else 0.0)

    return guarded("solver", work)


def _supported(capability: str) -> str:
    if capability in THEORIES:
        return THEORIES[capability]
    if capability == "--onnx-operators-unsat-proofs":
        return ""
    from verifiable_relu.network.onnx.read import CONVERTERS

    if capability == "--onnx-opset-versions":
        versions = [version for _, version in CONVERTERS]
        return f"{min(versions)}\n{max(versions)}"
    return "\n".join(sorted({operator for operator, _ in CONVERTERS}))


def elapsed() -> float:
    """The seconds since the process was started, as far as the operating system tells, else since this import."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
        return up - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.perf_counter() - _BEGAN


class _Clock:
    """An answer that is printed once: by whoever comes first, the work or the clock.

    Args:
        limit: the seconds after which ``timed-out`` is printed and the process ends.
    """

    def __init__(self, limit: float) -> None:
        self._lock = threading.Lock()
        self._timer = threading.Timer(max(0.0, limit), self._late)
        self._timer.daemon = True
        if limit < _UNLIMITED / 2:
            self._timer.start()

    def say(self, lines: Sequence[str]) -> None:
        """Print the answer."""
        with self._lock:
            self._timer.cancel()
            print("\n".join(lines), flush=True)

    def stop(self) -> None:
        """Print nothing any more."""
        with self._lock:
            self._timer.cancel()

    def _late(self) -> None:
        with self._lock:
            if self._timer.finished.is_set():
                return
            print("timed-out", flush=True)
            # Libraries cannot be broken off in another way; processes of solvers end with this one.
            os._exit(0)


def _verify(options: argparse.Namespace, started: float) -> int:
    """Answer a query; returns the exit status.

    Args:
        options: of the command line.
        started: the seconds that the process has been running.
    """
    began = time.perf_counter()

    def left() -> float:
        """The seconds that are left for methods."""
        return max(1e-3, options.timeout - started - (time.perf_counter() - began) - _SPARE)

    clock = _Clock(options.timeout - started)
    try:
        lines = _answer(options, left)
    except BaseException:
        clock.stop()
        raise
    clock.say(lines)
    return 0


def _answer(options: argparse.Namespace, left: Callable[[], float]) -> list[str]:
    """The lines of the answer."""
    networks = dict(options.network)
    if len(networks) < len(options.network):
        raise InputError("a network is named twice", place="--network")
    if networks and options.net is not None:
        raise InputError("either --net or --network is given", place="--net")
    from verifiable_relu.files import on_disk, read_text
    from verifiable_relu.spec import limits
    from verifiable_relu.spec.read import source

    options.query = on_disk(options.query)
    networks = {name: on_disk(file) for name, file in networks.items()}
    text = source(read_text(options.query, limits.BYTES))
    return (_second_version if text.version == "2.0" else _first_version)(options, networks, left)


def _first_version(options: argparse.Namespace, networks: dict[str, Path], left: Callable[[], float]) -> list[str]:
    from verifiable_relu.campaign import run
    from verifiable_relu.campaign.inputs import Entry, Loader, chosen
    from verifiable_relu.files import on_disk
    from verifiable_relu.verifiers.copies import sharing

    if options.net is not None:
        networks = {"": on_disk(options.net)}
    if len(networks) != 1:
        raise InputError(f"{len(networks)} networks for a VNN-LIB 1.0 query, which speaks of one", place="--network")
    (file,) = networks.values()
    method, limits = chosen(options.method, processes=sharing())
    case = Loader().case(Entry(options.query, file, _UNLIMITED))
    spec = case.spec
    assert spec is not None
    (result,) = run([replace(case, timeout=left())], method, limits=limits)
    _complain(result)
    if result.answer != "sat" or result.witness is None or result.outputs is None:
        return [result.answer]
    values = [*_numbers(result.witness), *(repr(float(v)) for v in result.outputs)]
    names = [*spec.inputs.elements("1.0"), *spec.outputs.elements("1.0")]
    lines = [f"({name} {value})" for name, value in zip(names, values, strict=True)]
    return [result.answer, f"({lines[0]}", *(f" {line}" for line in lines[1:-1]), f" {lines[-1]})"]


def _second_version(options: argparse.Namespace, networks: dict[str, Path], left: Callable[[], float]) -> list[str]:
    from verifiable_relu.campaign import Case, run
    from verifiable_relu.campaign.inputs import Loader, believe, chosen
    from verifiable_relu.files import on_disk
    from verifiable_relu.network import Chosen
    from verifiable_relu.network.product import Part, product
    from verifiable_relu.spec import Query
    from verifiable_relu.spec.vnnlib2 import read_joined
    from verifiable_relu.verifiers.copies import sharing

    method, limits = chosen(options.method, processes=sharing())
    joined = read_joined(options.query)
    if options.net is not None:
        own = [declared.name for declared in joined.networks if not declared.equal_to]
        if len(own) != 1:
            raise InputError(
                f"the query declares {len(own)} networks ({', '.join(own)}): give --network", place="--net"
            )
        networks = {own[0]: on_disk(options.net)}
    files = _files(joined, networks)
    loader = Loader()
    parts = []
    for declared in joined.networks:
        network = loader.network(files[declared.name], Chosen(hidden=tuple(tensor.node for tensor in declared.hidden)))
        _require_fit(network, declared, options.query)
        parts.append(Part(declared.name, network, declared.places))
    alone = len(parts) == 1 and not joined.passed and list(parts[0].inputs) == list(range(joined.size))
    whole = parts[0].network if alone else product(parts, joined.size, joined.passed)
    believe(whole, joined.properties)
    queries = tuple(Query(whole, prop) for prop in joined.properties)
    case = Case(" ".join(map(str, networks.values())), str(options.query), queries, left())
    (result,) = run([case], method, limits=limits)
    _complain(result)
    if result.answer != "sat" or result.witness is None or result.outputs is None:
        return [result.answer]
    return [result.answer, *_assigned(options, _tensors(joined, result))]


def _complain(result: Result) -> None:
    """Say on stderr if a verdict was claimed and not confirmed, or the program was at fault."""
    if result.reason in ("unconfirmed", "error"):
        complain("solver", f"{result.reason} by {result.method}: {result.detail}")


def _files(joined: Joined, networks: dict[str, Path]) -> dict[str, Path]:
    """The file of each declared network.

    Raises:
        InputError: if a network has none, or a file is given that none has.
    """
    files = dict(networks)
    for declared in joined.networks:
        if not declared.equal_to and declared.name not in networks:
            raise InputError(f"no file for the network '{declared.name}'", place="--network")
        if declared.equal_to:
            if declared.name in networks:
                said = f"the network '{declared.name}' equals '{declared.equal_to}' and has no file of its own"
                raise InputError(said, place="--network")
            files[declared.name] = files[declared.equal_to]
    for name in networks:
        if name not in {declared.name for declared in joined.networks}:
            raise InputError(f"the query declares no network '{name}'", place="--network")
    return files


def _require_fit(network: Network, declared: Declared, path: Path) -> None:
    """Make certain that a network has the inputs and outputs that a query declares, in their shapes and types.

    Raises:
        InputError: if it does not.
    """
    from verifiable_relu.runtime import kept_session
    from verifiable_relu.spec.find import without_batch

    place = f"network '{declared.name}'"
    tensors = (*declared.inputs, *declared.given)
    ports = network.ports or {"input": network.input_shape, "output": network.output_shape}
    if len(ports) != len(tensors):
        counts = f"{len(tensors)} inputs, outputs and hidden nodes are declared, but the file has {len(ports)}"
        raise InputError(f"{counts}: {', '.join(ports)}", path=path, place=place)
    for tensor, (name, shape) in zip(tensors, ports.items(), strict=True):
        if without_batch(tensor.variable.shape) != without_batch(shape):
            said = f"'{tensor.variable.name}' is declared with shape {list(tensor.variable.shape)}, but the file's "
            raise InputError(f"{said}'{name}' has {list(shape)}", path=path, place=place)
    if network.onnx is None:
        return
    session = kept_session(network.onnx)
    kinds = [session.get_inputs()[0].type] * len(declared.inputs) + [session.get_outputs()[0].type] * len(
        declared.given
    )
    for tensor, kind in zip(tensors, kinds, strict=True):
        if tensor.kind in _ONNX and kind != _ONNX[tensor.kind]:
            said = f"'{tensor.variable.name}' is declared as {_TYPES[tensor.kind]}, but the file has {kind}"
            raise InputError(said, path=path, place=place)
    if any(tensor.kind in _ONNX for tensor in tensors):
        print("solver: the verdict is about real arithmetic on the network's weights", file=sys.stderr)


def _tensors(joined: Joined, result: Result) -> list[Assignment]:
    """The name, shape and type of each variable of a query, and its elements."""
    assert result.witness is not None and result.outputs is not None
    witness, outputs = _numbers(result.witness), [repr(float(v)) for v in result.outputs]
    found = []
    for declared in joined.networks:
        inputs = [witness[i] for i in declared.places]
        theirs = outputs[declared.start :]
        for tensors, values in ((declared.inputs, inputs), (declared.given, theirs)):
            start = 0
            for tensor in tensors:
                variable, kind = tensor.variable, _TYPES.get(tensor.kind, tensor.kind)
                found.append(((variable.name, variable.shape, kind), values[start : start + variable.size]))
                start += variable.size
    return found


def _numbers(witness: Sequence[Fraction]) -> list[str]:
    """Exact decimals, or where there is none the nearest float64 number."""
    from verifiable_relu.spec.specfile import decimal

    return [decimal(value) or repr(float(value)) for value in witness]


def _assigned(options: argparse.Namespace, tensors: Sequence[Assignment]) -> list[str]:
    """The assignment in VNN-LIB 2.0's form, or none if it is written into a folder."""
    if options.serialise_assignments is None:
        lines = []
        for (name, shape, kind), values in tensors:
            lines += [f"{name} {kind} [{','.join(map(str, shape))}]", *values]
        return lines
    import numpy as np
    from onnx import numpy_helper

    folder = options.serialise_assignments
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for (name, shape, kind), values in tensors:
            dtype: Any = {"float64": np.float64, "Real": np.float64}.get(kind, np.float32)
            array = np.array([float(value) for value in values]).astype(dtype).reshape(shape)
            (folder / f"{name}.pb").write_bytes(numpy_helper.from_array(array, name).SerializeToString())
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", path=folder) from None
    return []


if __name__ == "__main__":
    sys.exit(main(alone=True))
