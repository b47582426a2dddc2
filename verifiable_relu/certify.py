"""Answer properties of neural networks: does some input of the box reach the unsafe set?

    python -m verifiable_relu.certify --spec specs/cifar_eps.vnnlib
    python -m verifiable_relu.certify --spec specs/instances.csv --out results

For a property file, the first line of stdout is sat (there is a counterexample, which follows), unsat (there is none:
verified), unknown or timed-out. For a folder or an instances.csv, stdout has a line onnx,vnnlib,answer,seconds for
each instance. Exit status: 0 for every verdict, 2 for bad input, 1 for a fault of the program, 130 if interrupted.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from verifiable_relu.arguments import Parser, seconds
from verifiable_relu.errors import InputError
from verifiable_relu.verifiers.registry import methods

if TYPE_CHECKING:
    from fractions import Fraction

    from verifiable_relu.campaign import Case, Result, Store
    from verifiable_relu.campaign.certificates import Certificates
    from verifiable_relu.campaign.console import Watcher
    from verifiable_relu.campaign.inputs import Loader
    from verifiable_relu.spec import SpecFile
    from verifiable_relu.verifiers.base import Verifier

_TIMEOUT = 60.0

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}
"""The binary logarithm of each unit of memory, in bytes."""


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    about, _, more = (__doc__ or "").partition("\n")
    parser = Parser(
        label="certify",
        prog="python -m verifiable_relu.certify",
        description=about,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--spec", type=Path, metavar="FILE|DIR|CSV", help="the property file, folder or list")
    parser.add_argument("--net", type=Path, metavar="FILE", help="the network, where the property file names none")
    parser.add_argument(
        "--network",
        type=_named_file,
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="the file of a network that a VNN-LIB 2.0 property declares; may be repeated",
    )
    parser.add_argument("--method", default="auto", help=f"{', '.join(methods())} (default: auto)")
    parser.add_argument(
        "--timeout",
        type=seconds,
        metavar="SECONDS",
        help=f"the time limit for each instance (default: that of instances.csv, else {_TIMEOUT:g})",
    )
    parser.add_argument("--device", default="cpu", help="a torch device (default: cpu)")
    parser.add_argument(
        "--memory",
        type=_bytes,
        metavar="BYTES",
        help="the bytes that bounds may hold at once, approximately, such as 500000000, 512M or 2G; the program itself "
        "takes more on top (default: 1G)",
    )
    parser.add_argument(
        "--joint",
        nargs="?",
        type=_hardness,
        const=(),
        metavar="LAMBDA[,LAMBDA…]",
        help="answer at once for the ReLU network and every network with λ-GELU of λ at least LAMBDA (one number, or "
        "one per layer) in its place; without a number, LAMBDA is the λ of the network's own λ-GELUs",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="the folder for results.csv (this run) and records.jsonl (all runs, whose answers are not computed again)",
    )
    parser.add_argument(
        "--repair",
        action="store_true",
        help="move lines of DIR/records.jsonl that are no records to a file DIR/records.jsonl.bad-N, and go on",
    )
    parser.add_argument(
        "--certificates",
        type=Path,
        metavar="DIR",
        help="write a certificate of every sat and unsat there, and have it checked by the independent checker "
        "(python -m verifiable_relu.check); a verdict whose certificate is accepted is 'checked'",
    )
    parser.add_argument(
        "--check", type=Path, metavar="DIR", help="check the certificates of a folder again, and do nothing else"
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors to stderr")
    parser.add_argument("--debug", action="store_true", help="show the traceback of a fault of the program")
    options = parser.parse_args(arguments)
    if (options.spec is None) == (options.check is None):
        parser.error("one of --spec and --check is needed")
    if options.method not in methods():
        parser.error(f"--method: unknown method '{options.method}'; there are {', '.join(methods())}")
    if options.repair and not options.out:
        parser.error("--repair needs --out")
    return options


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]+)([KMG]?)", text, re.IGNORECASE)
    size = int(found[1]) << _UNITS[found[2].upper()] if found else 0
    if not size:
        raise argparse.ArgumentTypeError(f"'{text}' is no number of bytes, such as 500000000, 512M or 2G")
    return size


def _hardness(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no number, nor a list of them") from None


def _loader(options: argparse.Namespace) -> Loader:
    """The reader of instances that the options describe: ``--joint`` replaces the networks' activations."""
    from verifiable_relu.campaign.inputs import Loader

    lam = options.joint
    if lam is None:
        return Loader(dict(options.network))
    from verifiable_relu.network import hardened

    return Loader(dict(options.network), lambda network: hardened(network, lam[0] if len(lam) == 1 else lam or None))


def _named_file(text: str) -> tuple[str, Path]:
    name, separator, file = text.partition("=")
    if not (name and separator and file):
        raise argparse.ArgumentTypeError(f"'{text}' is not of the form NAME=FILE")
    return name, Path(file)


def main(arguments: Sequence[str] | None = None, alone: bool = False) -> int:
    """Run the command; returns the exit status.

    Args:
        arguments: the command line's arguments; by default those of the process.
        alone: whether the process runs this command only. Then everything that libraries print to stdout, those in C
            included, goes to stderr from now on, so that stdout has the answers alone.
    """
    options = _parse(arguments)
    try:
        out = _own_stdout() if alone else sys.stdout
        if options.check is not None:
            return _check(options.check, out)
        many = options.spec.is_dir() or options.spec.suffix == ".csv"
        return _many(options, out) if many else _one(options, out)
    except InputError as error:
        _say(error)
        return 2
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except Exception as error:
        if options.debug:
            raise
        _say(f"internal error: {type(error).__name__}: {error}")
        return 1


def _say(message: object) -> None:
    print(f"certify: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


def _own_stdout() -> TextIO:
    """Redirect the descriptor 1 to stderr; returns a new text file that writes to the former stdout.

    Raises:
        InputError: if stdout is closed.
    """
    if sys.stderr is None:
        # Stderr is closed. Its descriptor is occupied, so that no file that is opened later takes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        out = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise InputError(f"stdout cannot be written: {error.strerror}") from None
    os.dup2(2, 1)
    return out


def _print(lines: Iterable[str], out: TextIO) -> None:
    """Write lines, as far as the reader of stdout takes them."""
    try:
        print("\n".join(lines), file=out, flush=True)
    except BrokenPipeError:
        # The reader, such as ``head -1``, has ended. Writing the rest of the buffer at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


@contextmanager
def _store(options: argparse.Namespace) -> Iterator[Store | None]:
    """The store of the option ``--out``, open until the ``with`` block ends; None without the option."""
    from verifiable_relu.campaign import Store

    if options.out is None:
        yield None
        return
    with Store(options.out, options.repair) as store:
        if store.set_aside is not None:
            count, path = store.set_aside
            _say(f"{store.records}: {count} line{'s' * (count > 1)} moved to {path}")
        yield store


def _one(options: argparse.Namespace, out: TextIO) -> int:
    """Answer one property file; returns the exit status."""
    start = time.perf_counter()
    from verifiable_relu.campaign import run
    from verifiable_relu.campaign.inputs import verifier

    method = verifier(options.method, options.device, options.memory)
    method, certificates = _certifying(options, method)
    with _store(options) as store:
        case, spec = _loader(options).case(options.spec, options.timeout or _TIMEOUT, options.net)
        (result,) = run([case], method, store, certificates=certificates)
    _print([result.answer, *(_assignment(result, spec, case) if result.answer == "sat" else ())], out)
    if not options.quiet:
        print("\n".join(_summary(result, case, time.perf_counter() - start)), file=sys.stderr)
    return _status([result])


def _certifying(options: argparse.Namespace, method: Verifier) -> tuple[Verifier, Certificates | None]:
    """The method, recording what it proves, and the folder of certificates, if there is to be one."""
    if options.certificates is None:
        return method, None
    from verifiable_relu.campaign.certificates import Certificates
    from verifiable_relu.verifiers.certifying import recording

    return recording(method), Certificates(options.certificates)


def _check(folder: Path, out: TextIO) -> int:
    """Check a folder of certificates; 0 if all are accepted, else 1."""
    from verifiable_relu.campaign.certificates import check_folder

    lines = io.StringIO()
    table = csv.writer(lines, lineterminator="\n")
    accepted = True
    for name, onnx, vnnlib, kept in check_folder(folder):
        accepted &= kept.accepted
        table.writerow((name, onnx, vnnlib, "accepted" if kept.accepted else "refused", kept.detail))
    _print(lines.getvalue().splitlines(), out)
    return 0 if accepted else 1


def _assignment(result: Result, spec: SpecFile, case: Case) -> Iterator[str]:
    """The lines of a counterexample: exact inputs, and the outputs that onnxruntime computes for them.

    An input that no decimal equals, such as 1/3, is moved to a decimal near to it, if the box has one and the new point
    is checked to be a counterexample too. Otherwise it is written as a quotient, (/ 1.0 3.0).
    """
    from verifiable_relu.spec.write import exact_text

    witness, outputs = _decimals(result, case)
    values = [exact_text(v) for v in witness] + [repr(float(v)) for v in outputs]
    names = [*spec.inputs.elements(spec.version), *spec.outputs.elements(spec.version)]
    lines = [f"{name} {value}" for name, value in zip(names, values, strict=True)]
    if spec.version != "1.0":
        yield from lines
        return
    last = len(lines) - 1
    for number, line in enumerate(lines):
        yield f"{' ' if number else '('}({line}){')' if number == last else ''}"


def _decimals(result: Result, case: Case) -> tuple[Sequence[Fraction], Sequence[float]]:
    """A counterexample with decimals as inputs near to the result's, or else the result's own; and its outputs."""
    from verifiable_relu.spec.write import decimal, decimal_near

    assert result.witness is not None and result.outputs is not None
    if all(decimal(v) is not None for v in result.witness):
        return result.witness, result.outputs
    from verifiable_relu.trust import confirm

    for query in case.queries:
        box = query.property.box
        if not box.contains(result.witness):
            continue
        bounds = map(box.bounds, range(box.size))
        point = [
            v if decimal(v) is not None else decimal_near(v, *between)
            for v, between in zip(result.witness, bounds, strict=True)
        ]
        judged = confirm(query, point)
        if judged.confirmed and judged.replayed is not None:
            return point, judged.replayed.tolist()
    return result.witness, result.outputs


def _summary(result: Result, case: Case, elapsed: float) -> Iterator[str]:
    """The lines of the summary that the user sees on stderr for one property file."""
    network = case.queries[0].network
    trust = f", {result.trust}" if result.trust else ""
    yield f"{result.vnnlib}: {result.answer} ({result.reason} by {result.method}{trust})"
    neurons = sum(network.nodes[i].size for i in network.activations)
    boxes = f", {len(case.queries)} boxes" if len(case.queries) > 1 else ""
    size = f"{network.input_size} inputs, {neurons} neurons, {network.output_size} outputs{boxes}"
    yield f"  network   {result.onnx}: {size}"
    match result.answer, result.margin:
        case _, None:
            pass
        case "unsat", 0.0:
            yield "  margin    positive; the method proves no larger bound"
        case answer, margin:
            meanings = {"sat": "at the counterexample", "unsat": "a proven lower bound"}
            yield f"  margin    {margin:.6g} ({meanings.get(answer, 'the best lower bound found')})"
    if result.unstable is not None:
        yield f"  unstable  {result.unstable} neurons"
    stages = ", ".join(f"{name} {spent:.2f} s" for name, spent in result.stages.items())
    yield f"  time      {stages or f'{result.seconds:.2f} s'}; with reading and start-up {elapsed:.2f} s"
    if result.detail:
        yield f"  note      {result.detail}"


def _many(options: argparse.Namespace, out: TextIO) -> int:
    """Answer the instances of a folder or a table as one campaign; returns the exit status."""
    from verifiable_relu.campaign import run
    from verifiable_relu.campaign.console import Watcher, table
    from verifiable_relu.campaign.inputs import instances, verifier

    method = verifier(options.method, options.device, options.memory)
    method, certificates = _certifying(options, method)
    listed = instances(options.spec)
    watcher = Watcher(len(listed), options.quiet)
    try:
        with _store(options) as store, watcher:
            results = run(list(_cases(options, listed, watcher)), method, store, watcher, certificates)
    except KeyboardInterrupt:
        kept = f"kept in {options.out}; the same command resumes" if options.out else "lost, since --out was not given"
        _say(f"interrupted: {watcher.done} of {len(listed)} instances are answered and {kept}")
        return 130
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\n").writerows((r.onnx, r.vnnlib, r.answer, f"{r.seconds:.3f}") for r in results)
    _print(lines.getvalue().splitlines(), out)
    if not options.quiet:
        table(results)
    return _status(results)


def _cases(
    options: argparse.Namespace, listed: Iterable[tuple[Path, Path | None, float | None]], watcher: Watcher
) -> Iterator[Case | Result]:
    """The instances of a list as they are read; one that cannot be read is a result, and the others are read on."""
    from verifiable_relu.campaign.runner import unasked

    loader = _loader(options)
    complaints: set[str] = set()
    for vnnlib, onnx, limit in listed:
        timeout, net = options.timeout or limit or _TIMEOUT, options.net or onnx
        case: Case | Result
        try:
            case, _ = loader.case(vnnlib, timeout, net)
        except Exception as error:
            if options.debug and not isinstance(error, InputError):
                raise
            case = unasked(str(net or ""), str(vnnlib), error, timeout)
            # Many instances can share one bad network, which is reported once. Faults of the program are reported at
            # the end (``_status``).
            if not case.method and case.detail not in complaints:
                watcher.line(f"certify: {case.detail}")
            complaints.add(case.detail)
        watcher.read()
        yield case


def _status(results: Sequence[Result]) -> int:
    """The exit status: 2 if an input was bad, else 1 if the program was at fault, else 0; faults go to stderr."""
    faults = [r for r in results if r.reason == "error"]
    ours = [r for r in faults if r.method]
    for result in ours:
        _say(f"{result.vnnlib}: fault of {result.method}: {result.detail}")
    return 2 if len(ours) < len(faults) else 1 if ours else 0


if __name__ == "__main__":
    sys.exit(main(alone=True))
