"""One certificate, one network, one property: accepted, with what was proven, or refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from verifiable_relu.check.errors import BadInput, Refused
from verifiable_relu.check.graph import Graph, joined
from verifiable_relu.check.model import read_model
from verifiable_relu.check.point import check_point
from verifiable_relu.check.proof import Proof
from verifiable_relu.check.properties import read_property
from verifiable_relu.check.records import Records, content, integers, listed, number_of, opened, rational
from verifiable_relu.check.running import ARITHMETICS, require_moderate

Made = TypeVar("Made")

VERSION = 5

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
    files = {"network": content(net, LARGEST_NETWORK), "property": content(spec, LARGEST_PROPERTY)}
    if other is not None:
        files["other"] = content(other, LARGEST_NETWORK)
    with opened(certificate) as file, np.errstate(all="ignore"):
        records = Records(file.readline)
        try:
            keys = ("certificate", "claim", "says", *files, *(() if other is None else ("pairs",)))
            more = ("joint", "arithmetic")
            given = dict(zip((*keys, *more), records.take(*keys, optional=more), strict=True))
            _require_header(given, files, arithmetic)
            running = ARITHMETICS.get(given["arithmetic"])
            graph = _named(net, lambda: read_model(files["network"], running))
            if given["joint"] is not None:
                unknown = running is not None and running.result
                Refused.when(unknown, "no family is known in an arithmetic in which stored weights are rounded")
                graph = graph.hardened([rational(value) for value in listed(given["joint"])], running is not None)
            if other is not None:
                second = _named(other, lambda: read_model(files["other"], running))
                graph = joined(graph, second, _pairs(graph, second, given["pairs"]))
            sizes = graph.nodes[0].size, graph.nodes[graph.output].size
            disjuncts = _named(spec, lambda: read_property(files["property"].decode("utf-8-sig", "replace"), *sizes))
            if given["claim"] == "sat":
                point = [rational(value) for value in listed(records.take("point")[0], sizes[0])]
                at = check_point(graph, disjuncts, point)
                records.end()
                return f"sat: the point is in the box, and in real arithmetic the network maps it into disjunct {at}"
            proof = Proof(graph, disjuncts, records, heads=running is None and other is None)
            if running is not None:
                proof.require = lambda state: require_moderate(state, running.largest)
            counts = proof.check()
        except Refused as error:
            raise Refused(str(error) if "record " in str(error) else f"{records.place}: {error}") from None
    proved = f"{counts.bounds} bounds of neurons in {counts.boxes} boxes, and {counts.leaves} leaves"
    return f"{_claimed(given)}; checked: {proved}; {counts.exact} of these inequalities in exact arithmetic"


def _require_header(given: dict[str, Any], files: dict[str, bytes], arithmetic: str | None) -> None:
    """Require of the first record that it speaks of these files, in a way that is known."""
    version, claim, ran = (given[key] for key in ("certificate", "claim", "arithmetic"))
    known = type(version) is int and version == VERSION
    Refused.when(not known, f"version {str(version)[:20]} of the format is not known")
    for what, data in files.items():
        named = f"it speaks of another {what}, whose SHA-256 is {str(given[what])[:64]}"
        Refused.when(given[what] != hashlib.sha256(data).hexdigest(), named)
    Refused.when(claim not in ("sat", "unsat"), f"'{str(claim)[:20]}' is neither sat nor unsat")
    Refused.when(ran is not None and str(ran) not in ARITHMETICS, "the arithmetic is not known")
    expected = arithmetic in (None, ran or "real")
    Refused.when(not expected, f"it is about {str(ran or 'real')[:20]} arithmetic, not about {arithmetic}")
    more = ran is not None or given["joint"] is not None or "other" in files
    Refused.when(claim == "sat" and more, "a claim of sat is about one network in real arithmetic")


def _claimed(given: dict[str, Any]) -> str:
    joint, ran, two = given["joint"], given["arithmetic"], "other" in given
    subject, stored = "the pair of networks" if two else "the network", "in real arithmetic on the stored weights"
    whom = f"no evaluation of {subject} in {ran}" if ran else f"{stored} {subject}"
    if joint is not None:
        whom = f"{whom}, and {stored} no" if ran else f"{stored} every"
        whom += f" network with ReLU or λ-GELU, λ ≥ {', '.join(joint)}, in the place of its activations"
        whom += f"{', with the other network' * two},"
    return f"unsat: {whom} maps {'any' if ran else 'no'} point of the property's boxes into its unsafe set"


def _pairs(first: Graph, second: Graph, given: object) -> list[tuple[int, int]]:
    """The activations that a certificate puts next to each other, by their numbers."""
    sizes = len(first.activations), len(second.activations)
    found = []
    for pair in listed(given):
        i, j = integers(pair, 2)
        found.append((number_of(i, sizes[0], "activation"), number_of(j, sizes[1], "activation")))
    Refused.when(len({j for _, j in found}) < len(found), "an activation is in two pairs")
    return found


def _named(path: Path, read: Callable[[], Made]) -> Made:
    try:
        return read()
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error
