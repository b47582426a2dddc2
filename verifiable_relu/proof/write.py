"""Files of certificates: the first record, parts for the boxes of a property, and the end."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any

from verifiable_relu.check.graph import Graph, joined
from verifiable_relu.check.model import read_model
from verifiable_relu.check.running import ARITHMETICS
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.proof.encoding import Record
from verifiable_relu.proof.numbering import Numbering
from verifiable_relu.proof.recorder import Recorder
from verifiable_relu.spec.property import Query

VERSION = 6

_SAYS = {
    "unsat": "No point of the property's boxes is mapped into its unsafe set by the network's stored weights "
    "in real arithmetic.",
    "family": "No point of the property's boxes is mapped into its unsafe set by any network that has ReLU or λ-GELU, "
    "λ at least its number in 'family', in the place of each activation, and the other weights as stored, in real "
    "arithmetic.",
    "runs": "No point of the property's boxes is mapped into its unsafe set by any evaluation of the network in the "
    "arithmetic of 'arithmetic'.",
    "two": "No point of the property's boxes is mapped into its unsafe set, of the outputs of both networks, the first "
    "one's before the other's; 'family' and 'arithmetic' say what else is meant.",
    "sat": "The point is in a box of the property, and the network's stored weights map it into the unsafe set "
    "in real arithmetic.",
}


@dataclass(frozen=True, eq=False)
class Subject:
    """Subject of a certificate: files, family and arithmetic.

    Attributes:
        network, prop: the bytes of the ONNX and the VNN-LIB file, unpacked.
        lambdas: of a family, the least λ of each activation.
        arithmetic: of what runs the network.
        other: the second network's file, of two networks.
        pairs: activations of both that stand next to each other, by number.
    """

    network: bytes
    prop: bytes
    lambdas: Sequence[Fraction] = ()
    arithmetic: str = "real"
    other: bytes | None = None
    pairs: Sequence[tuple[int, int]] = ()

    def graph(self) -> Graph:
        """Return the network, or both, as a checker reads them, without the rounding of what runs."""
        graph = read_model(self.network, ARITHMETICS.get(self.arithmetic))
        if self.lambdas:
            graph = graph.hardened(list(self.lambdas), self.arithmetic != "real")
        if self.other is None:
            return graph
        return joined(graph, read_model(self.other, ARITHMETICS.get(self.arithmetic)), list(self.pairs))


def write_unsat(path: Path, subject: Subject, queries: Sequence[Query], numbers: Sequence[int], told: Recorder) -> None:
    """Write a certificate that no box reaches the unsafe set.

    Args:
        path: the file, which is gzipped.
        subject: what it speaks of.
        queries: all queries that the property makes, as they were asked.
        numbers: under which the recorder knows them.
        told: what was told of the search.

    Raises:
        UnsupportedError: if the proof of a query was not told, or a certificate cannot say it.
    """
    head = _head("unsat", subject)
    if subject.arithmetic != "real":
        head |= {"says": _SAYS["runs"], "arithmetic": subject.arithmetic}
    if subject.lambdas:
        head |= {"says": _SAYS["family"], "family": [str(value) for value in subject.lambdas]}
    if subject.other is not None:
        digest = hashlib.sha256(subject.other).hexdigest()
        head |= {"says": _SAYS["two"], "other": digest, "pairs": [list(pair) for pair in subject.pairs]}
    _write(path, head, _parts(subject, queries, numbers, told))


def write_sat(path: Path, network: bytes, prop: bytes, point: Sequence[Fraction]) -> None:
    """Write a certificate that a point is a counterexample."""
    _write(path, _head("sat", Subject(network, prop)), iter([{"point": [str(value) for value in point]}]))


def _head(claim: str, subject: Subject) -> dict[str, Any]:
    digests = {"network": hashlib.sha256(subject.network).hexdigest()}
    digests["property"] = hashlib.sha256(subject.prop).hexdigest()
    return {"certificate": VERSION, "claim": claim, **digests, "says": _SAYS[claim]}


def _write(path: Path, head: dict[str, Any], records: Iterator[Record]) -> None:
    count = 1
    try:
        with gzip.open(path, "wt", compresslevel=4, encoding="ascii", newline="\n") as file:
            file.write(json.dumps(head) + "\n")
            for record in records:
                file.write(json.dumps(record, separators=(",", ":")) + "\n")
                count += 1
            file.write(json.dumps({"end": count}) + "\n")
    except UnsupportedError:
        path.unlink(missing_ok=True)
        raise


def _parts(subject: Subject, queries: Sequence[Query], numbers: Sequence[int], told: Recorder) -> Iterator[Record]:
    graph, boxes = subject.graph(), list[tuple[object, ...]]()
    for number, query in zip(numbers, queries, strict=True):
        prop = query.property
        if not prop.unsafe:
            # What never holds is no disjunct, and its box is not counted.
            continue
        if prop.ball is not None:
            raise UnsupportedError("certificates speak of boxes, not of balls")
        box = tuple(prop.box.bounds(i) for i in range(prop.box.size))
        if box not in boxes:
            boxes.append(box)
        rows = [
            [{"y": [[i, str(c)] for i, c in row.coefficients], "most": str(row.bound)} for row in polytope]
            for polytope in prop.unsafe
        ]
        yield {"part": {"box": boxes.index(box), "polytopes": rows}}
        heads = subject.arithmetic == "real" and subject.other is None and prop.only_compares
        place = cache(partial(Numbering, graph.asked(heads), low=prop.box.lower, high=prop.box.upper))
        yield from told.records(number, len(prop.unsafe), place)
