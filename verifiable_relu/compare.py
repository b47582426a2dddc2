"""The command ``verifiable-relu compare``: two networks on the same boxes of inputs (``api.verify_change``)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verifiable_relu.certify import TIMEOUT, hardness
from verifiable_relu.command_line import Parser, add_debug, complain, fraction, guarded, seconds, write
from verifiable_relu.data import load
from verifiable_relu.errors import InputError, counted, printable
from verifiable_relu.files import csv_cell
from verifiable_relu.spec.__main__ import indices, radius

if TYPE_CHECKING:
    from verifiable_relu.spec import Property

ABOUT = """Bound how far the outputs of two networks differ on boxes, and decide whether their answers do.

    verifiable-relu compare net.onnx net.int8.onnx --data mnist --images 0-29 --eps 1/255 --delta 0.5
    verifiable-relu compare net.onnx pruned.onnx --spec property.vnnlib --top1

Stdout has a line for each box: its name, the largest difference of any output that is not excluded and, with --delta
or --top1, the answer and its seconds: unsat where no input of the box has outputs that differ by DELTA or more, or
largest outputs of different classes; sat where one has. Of a property file the boxes count alone. Exit status: 0 for
every answer, 2 for bad input, 1 for a fault of the program, 130 if interrupted.
"""


def parser() -> Parser:
    """Return the parser of the command line."""
    made = Parser(label="compare", prog="verifiable-relu compare", text=ABOUT)
    made.add_argument("first", type=Path, metavar="A.onnx", help="the first network")
    text = "the second one; with --family A with ReLU by default"
    made.add_argument("second", type=Path, nargs="?", metavar="B.onnx", help=text)
    where = made.add_argument_group("where")
    boxes = where.add_mutually_exclusive_group(required=True)
    boxes.add_argument("--spec", type=Path, metavar="FILE", help="the boxes of a property file")
    boxes.add_argument("--data", metavar="NAME|FILE.npz", help="balls around images, as the command spec takes them")
    where.add_argument("--images", type=indices, metavar="0-19,25", help="the images' indices in the test set")
    where.add_argument("--eps", type=radius, metavar="1/255", help="the radius of the balls")
    asked = made.add_argument_group("what is asked")
    one = asked.add_mutually_exclusive_group()
    one.add_argument("--delta", type=fraction, metavar="D", help="whether any output differs by D or more")
    one.add_argument("--top1", action="store_true", help="whether the largest outputs are of different classes")
    text = "the first network stands for all with λ-GELU of λ at least LAMBDA in the place of its activations"
    asked.add_argument("--family", nargs="?", type=hardness, const=True, metavar="LAMBDA[,LAMBDA…]", help=text)
    asked.add_argument("--arithmetic", default="real", metavar="NAME", help="of what runs both, as in certify")
    how = made.add_argument_group("how it is answered")
    how.add_argument("--method", default="auto", help="as in certify (default: auto)")
    text = f"for each box (default: {TIMEOUT:g})"
    how.add_argument("--timeout", type=seconds, default=TIMEOUT, metavar="SECONDS", help=text)
    text = "write a certificate of every unsat there, and have it checked"
    how.add_argument("--certificates", type=Path, metavar="DIR", help=text)
    how.add_argument("--quiet", action="store_true", help="print nothing but errors to stderr")
    add_debug(how)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (``command_line.guarded``)."""
    made = parser()
    options = made.parse_args(arguments)
    balls = options.data is not None
    if balls != (options.images is not None) or balls != (options.eps is not None):
        made.error("--data, --images and --eps go together")
    if options.second is None and options.family is None:
        made.error("a second network is needed, or --family, with which it is the first one with ReLU")
    unasked = options.delta is None and not options.top1
    if options.certificates is not None and (options.second is None or unasked):
        made.error("--certificates needs two files, and --delta or --top1")

    return guarded("compare", lambda: run(options), options.debug)


def run(options: argparse.Namespace) -> int:
    """Compare the networks and print what is known of their differences; returns the exit status."""
    # Imported here, because --help need not wait for what these load.
    from verifiable_relu.api.changing import compared, unsafe
    from verifiable_relu.api.verifying import VerifyOptions
    from verifiable_relu.campaign import open_certificates
    from verifiable_relu.execution.model import execution_model
    from verifiable_relu.readers import read_onnx
    from verifiable_relu.settings import default_settings

    boxes = _boxes(options)
    with default_settings():
        one = execution_model(read_onnx(options.first), options.arithmetic, options.family)
        other = one.limit if options.second is None else execution_model(read_onnx(options.second), options.arithmetic)
        question = unsafe(one.output_size, options.delta, options.top1)
        files = str(options.first), str(options.second)
        kept = open_certificates(options.certificates, files, (one, other))
        change = compared(one, other, boxes, question, VerifyOptions(options.method, options.timeout), kept)
    for prop, result in zip(boxes, change.results, strict=False):
        if kept is not None and result.answer == "unsat":
            complain("compare", f"{prop.name}: {'checked' if result.trust == 'checked' else result.detail}")
    answers = [f",{result.answer},{result.seconds:.2f}" for result in change.results] or [""] * len(boxes)
    rows = zip(boxes, change.largest, answers, strict=True)
    write([f"{csv_cell(prop.name)},{largest:.6g}{answer}" for prop, largest, answer in rows], sys.stdout)
    if not options.quiet:
        how = "differences are bounded neuron by neuron" if change.compared else "each network is bounded alone"
        counts = change.results.summary
        asked = f"; {counts['certified']} unsat, {counts['refuted']} sat, {counts['undecided']} undecided"
        lines = [f"{counted(len(boxes), 'box')}; {how}{asked if change.results else ''}"]
        lines += [f"{options.first}: {sentence}" for sentence in one.source.repairs]
        print("\n".join(map(printable, lines)), file=sys.stderr)
    return 0


def _boxes(options: argparse.Namespace) -> list[Property]:
    import numpy as np

    from verifiable_relu.spec import Property, linf_properties, read_vnnlib

    if options.spec is not None:
        found = {(p.box.lower.tobytes(), p.box.upper.tobytes()): p.box for p in read_vnnlib(options.spec).properties}
        return [Property(box, (), f"box {n}") for n, box in enumerate(found.values())]
    data = load(options.data, "train" if options.data.endswith(".npz") else "test")
    for index in options.images:
        if index >= len(data) or not data.exact[index]:
            said = f"does not exist: there are {len(data)}" if index >= len(data) else "differs from the official one"
            raise InputError(f"image {index} {said}", path=options.data)
    names = [f"image {index}" for index in options.images]
    zeros = np.zeros(len(names), np.int64)
    return linf_properties(data.images[options.images], zeros, options.eps, 2, names=names)


if __name__ == "__main__":
    sys.exit(main())
