"""The command line of the VNN-LIB 2.0 standard: ``verify``, ``supports``, ``--name`` and ``--version``.

    python -m verifiable_relu.solver verify query.vnnlib --network f=f.onnx --network g=g.onnx --timeout 60
    python -m verifiable_relu.solver supports --onnx-operators

The first line that ``verify`` prints is sat, unsat, unknown or timed-out; for sat, the assignment follows. A query may
speak of several networks. The time limit counts from the start of the process. Verdicts are about real arithmetic on
the networks' weights, and a counterexample has been replayed in onnxruntime; so ``supports`` names the element type
real alone, while queries that declare float32 or float64 are answered too, with a note on stderr. With ``--arithmetic
declared`` they are about the declared type instead, or refused.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiable_relu import __version__
from verifiable_relu.command_line import Parser, complain, guarded, named_file, seconds
from verifiable_relu.errors import InputError
from verifiable_relu.supervisor.forks import SetLimits, default_shares, run_limited

if TYPE_CHECKING:
    from verifiable_relu.spec import Variable

_BEGAN = time.perf_counter()

NAME = "verifiable_relu"

_UNLIMITED = 1e6  # The seconds that stand for no time limit
_SPARE = 0.3  # The seconds before the time limit at which methods are told to stop, so that the answer comes before it

THEORIES = {
    "--vnnlib-versions": "1.0\n2.0",
    "--onnx-element-types": "real",
    "--hidden-node-theories": "H",
    "--multiple-input-output-theories": "MIO",
    "--multiple-network-theories": "MNET",
    "--multiple-node-comparison-theories": "MNC",
    "--arithmetic-complexity-theories": "POLY",
    "--optimised-disjunctive-reasoning": "false",
    "--serialise-assignments": "true",
    "--unsat-proofs": "false",
    "--onnx-operators-unsat-proofs": "",
}
"""The answers to ``supports`` that are known without reading the tables of operators."""

_OPERATORS = ("--onnx-opset-versions", "--onnx-operators")


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = Parser(label="solver", prog="python -m verifiable_relu.solver", text=__doc__)
    made.add_argument("--name", action="store_true", help="print the solver's name")
    made.add_argument("--version", action="store_true", help="print the solver's version")
    commands = made.add_subparsers(dest="command", metavar="COMMAND")
    verify = commands.add_parser("verify", help="answer a query", description="Answer a VNN-LIB query.")
    add = verify.add_argument
    add("query", type=Path, metavar="QUERY", help="the VNN-LIB file, 1.0 or 2.0")
    add("--network", type=named_file, action="append", default=[], metavar="NAME=FILE", help="may be repeated")
    add("--net", metavar="FILE", help="the query's only network, or several as instances.csv has them")
    add("--timeout", type=seconds, default=_UNLIMITED, metavar="SECONDS", help="start-up included")
    add("--serialise-assignments", type=Path, metavar="DIR", help="write assignments as ONNX tensors")
    add("--method", default="auto", help="of verifiable_relu.certify (default: auto)")
    text = "of certify (default: real), or declared: the element type that the query declares for its network"
    add("--arithmetic", default="real", metavar="NAME", help=text)
    supports = commands.add_parser("supports", help="say what is supported", description="Say what is supported.")
    which = supports.add_mutually_exclusive_group(required=True)
    for capability in (*_OPERATORS, *THEORIES):
        which.add_argument(capability, dest="capability", action="store_const", const=capability)
    return made


def main(arguments: Sequence[str] | None = None, alone: bool = False) -> int:
    """Run the command; returns the exit status. A process that is ``alone`` answers in a copy, timed from its start."""
    made = parser()
    options = made.parse_args(arguments)
    if options.command is None and not (options.name or options.version):
        made.error("a command is needed: verify or supports")
    if options.command == "verify":
        return guarded("solver", lambda: _verify(options, alone))
    print(NAME if options.name else __version__ if options.version else _supported(options.capability))
    return 0


def _supported(capability: str) -> str:
    if capability in THEORIES:
        return THEORIES[capability]
    from verifiable_relu.readers.onnx.read import CONVERTERS

    if capability == "--onnx-opset-versions":
        versions = [version for _, version in CONVERTERS]
        return f"{min(versions)}\n{max(versions)}"
    return "\n".join(sorted({operator for operator, _ in CONVERTERS}))


def _elapsed() -> float:
    """The seconds since the process was started, as far as the operating system tells, else since this import."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
        return up - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.perf_counter() - _BEGAN


def _verify(options: argparse.Namespace, alone: bool) -> int:
    """Answer a query; returns the exit status. A process that is alone answers in a copy, which is killed in time."""
    end = time.perf_counter() - (_elapsed() if alone else 0.0) + options.timeout

    def answer(set_limits: SetLimits) -> int:
        set_limits(end - time.perf_counter() if options.timeout < _UNLIMITED / 2 else math.inf, math.inf)
        lines = _answer(options, end - _SPARE)
        set_limits(math.inf, math.inf)
        print("\n".join(lines), flush=True)
        return 0

    if not alone:
        return answer(lambda seconds, memory: None)
    ended = run_limited(answer)
    if ended.status is None:
        print("timed-out", flush=True)
        return 0
    if ended.status < 0:
        print("unknown", flush=True)
        complain("solver", f"its process ended with the status {ended.status}")
        return 1
    return ended.status


def _answer(options: argparse.Namespace, end: float) -> list[str]:
    if options.network and options.net is not None:
        raise InputError("either --net or --network is given", place="--net")
    from verifiable_relu.campaign import run
    from verifiable_relu.campaign.inputs import InstanceFiles, Loader, chosen
    from verifiable_relu.campaign.store import assignment, tensors
    from verifiable_relu.execution.model import as_executed
    from verifiable_relu.spec.find import Networks, onnx_files
    from verifiable_relu.spec.specfile import KINDS, decimal

    method, budget = chosen(options.method, processes=default_shares())
    files = Networks(tuple(options.network)) if options.net is None else onnx_files(options.net)
    entry, arithmetic = InstanceFiles(options.query, files, _UNLIMITED), options.arithmetic
    case = Loader().case(entry)
    spec = case.spec
    assert spec is not None
    declared = () if spec.joined is None else spec.joined.networks
    kinds = {KINDS[tensor.kind].lower() for each in declared for tensor in (*each.inputs, *each.given)} or {"real"}
    if arithmetic == "declared":
        if len(kinds) > 1:
            said = f"the query declares several element types: {', '.join(sorted(kinds))}"
            raise InputError(said, path=options.query)
        (arithmetic,) = kinds
    if arithmetic != "real":
        case = Loader(prepare=partial(as_executed, arithmetic=arithmetic)).case(entry)
    elif kinds != {"real"}:
        print("solver: the verdict is about real arithmetic on the network's weights", file=sys.stderr)
    left = max(1e-3, end - time.perf_counter())
    (result,) = run([replace(case, timeout=left, spent=0.0)], method, budget=budget)
    if result.reason in ("unconfirmed", "error"):
        complain("solver", f"{result.reason} by {result.method}: {result.detail}")
    if result.answer != "sat" or result.witness is None or result.outputs is None:
        return [result.answer]
    if spec.version == "1.0":
        return [result.answer, *assignment(result, spec)]
    # The standard's numbers have no quotients.
    found = list(tensors(result, spec, lambda value: decimal(value) or repr(float(value))))
    if options.serialise_assignments is not None:
        _write_tensors(options.serialise_assignments, found)
        return [result.answer]
    lines = [result.answer]
    for variable, values in found:
        lines += [f"{variable.name} {KINDS[variable.kind]} [{','.join(map(str, variable.shape))}]", *values]
    return lines


def _write_tensors(folder: Path, tensors: Sequence[tuple[Variable, list[str]]]) -> None:
    """Write an assignment as ONNX tensors, a file for each variable."""
    import numpy as np
    from onnx import numpy_helper

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for variable, values in tensors:
            dtype: Any = {"F64": np.float64, "Real": np.float64}.get(variable.kind, np.float32)
            array = np.array([float(value) for value in values]).astype(dtype).reshape(variable.shape)
            data = numpy_helper.from_array(array, variable.name).SerializeToString()
            (folder / f"{variable.name}.pb").write_bytes(data)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", path=folder) from None


if __name__ == "__main__":
    sys.exit(main(alone=True))
