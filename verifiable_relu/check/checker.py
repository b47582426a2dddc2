"""One certificate, one network, one property: accepted, with what was proven, or refused."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from verifiable_relu.check.arithmetic import ARITHMETICS
from verifiable_relu.check.conditions import read_property
from verifiable_relu.check.errors import BadInput, Refused
from verifiable_relu.check.graph import Graph, side_by_side
from verifiable_relu.check.model import read_model
from verifiable_relu.check.point import check_point
from verifiable_relu.check.proof import CertificateProof
from verifiable_relu.check.records import integer, integers, opened, rational, require_regular

Made = TypeVar("Made")

VERSION = 4

LARGEST_NETWORK, LARGEST_PROPERTY = 1 << 31, 1 << 25
"""Most bytes of files, unpacked."""


def check(certificate: Path, net: Path, spec: Path, arithmetic: str | None = None, other: Path | None = None) -> str:
    """What the certificate proves, in one sentence.

    Args:
        certificate, net, spec: the files.
        arithmetic: that the claim is expected to be about; None for whatever the certificate says.
        other: the second network of a certificate of two.

    Raises:
        Refused: if it proves less than it claims; with the record and the reason.
        BadInput: if a file cannot be read.
    """
    files = {"network": _content(net, LARGEST_NETWORK), "property": _content(spec, LARGEST_PROPERTY)}
    if other is not None:
        files["other network"] = _content(other, LARGEST_NETWORK)
    with opened(certificate) as records, np.errstate(all="ignore"):
        try:
            keys = ("certificate", "claim", "network", "property", "says")
            more = () if other is None else ("other", "beside")
            found = records.take(*keys, *more, optional=("joint", "arithmetic"))
            (version, claim, *digests, _), (*two, joint, ran) = found[: len(keys)], found[len(keys) :]
            digests += two[:1]
            if version != VERSION or type(version) is not int:
                raise Refused(f"version {str(version)[:20]} of the format is not known")
            for (what, content), digest in zip(files.items(), digests, strict=True):
                if digest != hashlib.sha256(content).hexdigest():
                    raise Refused(f"it speaks of another {what}, whose SHA-256 is {str(digest)[:64]}")
            running = None if ran is None else ARITHMETICS.get(str(ran))
            if ran is not None and (running is None or claim != "unsat"):
                raise Refused("an arithmetic is one that is known, of a claim of unsat")
            if arithmetic not in (None, ran or "real"):
                raise Refused(f"it is about {ran or 'real'} arithmetic, not about {arithmetic}")
            graph = _named(net, lambda: read_model(files["network"], running))
            if joint is not None:
                if running is not None and running.result:
                    raise Refused(f"no family is known in {ran}, where the stored weights are rounded")
                least = [rational(value) for value in joint] if isinstance(joint, list) else []
                graph = graph.hardened(least, running is not None)
            if other is not None:
                second = _named(other, lambda: read_model(files["other network"], running))
                graph = side_by_side(graph, second, _pairs(graph, second, two[1]))
            sizes = graph.nodes[0].size, graph.nodes[graph.output].size
            disjuncts = _named(spec, lambda: read_property(files["property"].decode("utf-8-sig", "replace"), *sizes))
            if claim == "sat" and joint is None and other is None:
                (point,) = records.take("point")
                if not isinstance(point, list) or len(point) != sizes[0]:
                    raise Refused(f"a point has {sizes[0]} coordinates")
                at = check_point(graph, disjuncts, [rational(value) for value in point])
                records.end()
                return f"sat: the point is in the box, and in real arithmetic the network maps it into disjunct {at}"
            if claim != "unsat":
                raise Refused(f"'{str(claim)[:20]}' is neither sat nor unsat")
            subject = "the network" if other is None else "the pair of networks"
            stored = "in real arithmetic on the stored weights"
            whom = f"no evaluation of {subject} in {ran}" if running else f"{stored} {subject}"
            if joint is not None:
                whom = f"{whom}, and {stored} no" if running else f"{stored} every"
                whom += f" network with ReLU or λ-GELU, λ ≥ {', '.join(joint)}, in the place of its activations"
                whom += f"{', with the other network' * bool(other)},"
            counts = CertificateProof(graph, disjuncts, records, running).check()
        except Refused as error:
            raise Refused(str(error) if "record " in str(error) else f"{records.place}: {error}") from None
    return (
        f"unsat: {whom} maps {'any' if running else 'no'} point of the property's boxes into its "
        f"unsafe set; checked: {counts.bounds} bounds of neurons in {counts.boxes} boxes, and {counts.leaves} leaves; "
        f"{counts.exact} of these inequalities in exact arithmetic"
    )


def _pairs(first: Graph, second: Graph, given: object) -> list[tuple[int, int]]:
    """The activations that a certificate puts beside each other, by their numbers."""
    if not isinstance(given, list):
        raise Refused("activations beside each other are a list")
    sizes = [len(graph.activations) for graph in (first, second)]
    found = [[integer(at, n, "activation") for at, n in zip(integers(p, 2), sizes, strict=True)] for p in given]
    if len({j for _, j in found}) < len(found):
        raise Refused("an activation is beside two others")
    return [(i, j) for i, j in found]


def _named(path: Path, read: Callable[[], Made]) -> Made:
    try:
        return read()
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error


def _content(path: Path, most: int) -> bytes:
    """The content of a file, unpacked if it is gzipped."""
    try:
        require_regular(path)
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            data = gzip.GzipFile(fileobj=file).read(most + 1) if packed else file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > most:
        raise BadInput(f"{path}: it is larger than {most} bytes")
    return data
