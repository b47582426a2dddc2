"""The command line of the VNN-LIB 2.0 standard: ``verify``, ``supports``, ``--name`` and ``--version``.

    python -m verifiable_relu.solver verify query.vnnlib --network f=f.onnx --network g=g.onnx --timeout 60
    python -m verifiable_relu.solver supports --onnx-operators

``verify`` is ``certify``, with a time limit that counts from the start of the process, and with assignments in the
standard's form. Verdicts are about real arithmetic on the networks' weights, and counterexamples were replayed in
onnxruntime; so ``supports`` names the element type real alone, while queries that declare float32 or float64 are
answered too, with a note on stderr.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiable_relu import __version__, certify
from verifiable_relu.command_line import Parser, complain
from verifiable_relu.errors import InputError

if TYPE_CHECKING:
    from verifiable_relu.campaign import Case, Result

_UNLIMITED = 1e6  # The seconds that stand for no time limit

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


def parser() -> Parser:
    """Return the parser of the command line."""
    made = Parser(label="solver", prog="python -m verifiable_relu.solver", text=__doc__)
    made.add_argument("--name", action="store_true", help="print the solver's name")
    made.add_argument("--version", action="store_true", help="print the solver's version")
    actions, given = made.add_subparsers(dest="action", metavar="COMMAND"), [certify.parser()]
    verify = actions.add_parser("verify", label="solver", help="answer a query", parents=given, add_help=False)
    verify.add_argument("--serialise-assignments", type=Path, metavar="DIR", help="write assignments as ONNX tensors")
    verify.set_defaults(timeout=_UNLIMITED, quiet=True)
    supports = actions.add_parser("supports", label="solver", help="say what is supported")
    which = supports.add_mutually_exclusive_group(required=True)
    for capability in ("--onnx-opset-versions", "--onnx-operators", *THEORIES):
        which.add_argument(capability, dest="capability", action="store_const", const=capability)
    return made


def main(arguments: Sequence[str] | None = None, alone: bool = False) -> int:
    """Run the command; returns the exit status. A process that is ``alone`` answers in a copy, timed from its start."""
    made = parser()
    options = made.parse_args(arguments)
    if options.action is None and not (options.name or options.version):
        made.error("a command is needed: verify or supports")
    if options.action == "verify":
        options.end = time.perf_counter() + options.timeout - (_elapsed() if alone else 0.0)
        options.lines = partial(_lines, options.serialise_assignments)
        return certify.answer(made, options, alone)
    print("verifiable_relu" if options.name else __version__ if options.version else _supported(options.capability))
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
    """Return the seconds since the process was started; on other systems than Linux, its processor time so far."""
    if sys.platform != "linux":
        return time.process_time()
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _lines(folder: Path | None, result: Result, case: Case) -> Iterator[str]:
    """Yield the answer and, for sat, the assignment in the standard's form; it goes to files in a ``folder``."""
    import numpy as np
    from onnx import numpy_helper

    from verifiable_relu.campaign.inputs import declared_types
    from verifiable_relu.campaign.store import assignment, tensors
    from verifiable_relu.spec.specfile import KINDS, decimal

    spec = case.spec
    assert spec is not None
    if result.arithmetic == "real" and declared_types(spec) != ("real",):
        print("solver: the verdict is about real arithmetic on the network's weights", file=sys.stderr)
    if result.reason == "unconfirmed":
        complain("solver", f"{result.ending}: {result.detail}")
    yield result.answer
    if result.answer == "sat" and spec.version == "1.0":
        yield from assignment(result, spec)
    elif result.answer == "sat":
        # The standard's numbers have no quotients.
        for variable, values in tensors(result, spec, lambda value: decimal(value) or repr(float(value))):
            if folder is None:
                yield from (f"{variable.name} {KINDS[variable.kind]} [{','.join(map(str, variable.shape))}]", *values)
                continue
            kind: Any = np.float64 if variable.kind in ("F64", "Real") else np.float32
            array = np.array(values, np.float64).astype(kind).reshape(variable.shape)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                data = numpy_helper.from_array(array, variable.name).SerializeToString()
                (folder / f"{variable.name}.pb").write_bytes(data)
            except OSError as error:
                raise InputError(f"cannot be written: {error.strerror}", path=folder) from None


if __name__ == "__main__":
    sys.exit(main(alone=True))
