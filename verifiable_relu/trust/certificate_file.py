"""Certificates as files; ``docs/certificates.md`` says what they mean.

Nothing is computed but the encoding of numbers, all of which are float64 and are written without rounding.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.nodes import FUNCTIONS, LeakyRelu, Relu
from verifiable_relu.readers.onnx.model import sort
from verifiable_relu.trust.certificate import Branches, Cover, Leaf, Plain, Plane, Proof, Tighter, Tree

VERSION = 4

_ACTIVATIONS = {
    *(name for kind in (Relu, LeakyRelu) for name in kind.certified),
    *(name for function in FUNCTIONS.values() for name in function.certified),
}
"""The operators whose outputs name activations. MaxPool's names one a round."""

_STEPS = {"Round": 1, "Sign": 1, "QuantizeLinear": 3}
"""Operators that jump, and how many activations they are."""

_SAYS = {
    "unsat": "No point of the property's boxes is mapped into its unsafe set by the network's stored weights "
    "in real arithmetic.",
    "joint": "No point of the property's boxes is mapped into its unsafe set by any network that has ReLU or λ-GELU, "
    "λ at least its number in 'joint', in the place of each activation, and the other weights as stored, in real "
    "arithmetic.",
    "runs": "No point of the property's boxes is mapped into its unsafe set by any evaluation of the network in the "
    "arithmetic of 'arithmetic'.",
    "two": "No point of the property's boxes is mapped into its unsafe set, of the outputs of both networks, the first "
    "one's before the other's; 'joint' and 'arithmetic' say what else is meant.",
    "sat": "The point is in a box of the property, and the network's stored weights map it into the unsafe set "
    "in real arithmetic.",
}


def write_unsat(
    path: Path,
    network: bytes,
    prop: bytes,
    proofs: Sequence[tuple[int, Proof | Cover]],
    joint: Sequence[Fraction] = (),
    arithmetic: str = "real",
    other: tuple[bytes, Sequence[tuple[int, int]]] | None = None,
) -> None:
    """Write a certificate that no box reaches the unsafe set.

    Args:
        path: the file, which is gzipped.
        network, prop: the bytes of the ONNX and the VNN-LIB file, unpacked.
        proofs: of all queries that the property makes, each with the number of its box among the property's different
            boxes, in their order.
        joint: of a family, the least λ of each activation.
        arithmetic: of what runs the network (``Network.arithmetic``), of which the proofs are.
        other: of two networks the second one's file, and which activations of both stand beside each other, by number.

    Raises:
        UnsupportedError: if a number is out of the format's range, or an activation is not known to the format.
    """
    names = _activations(network)
    head = _head("unsat", network, prop)
    if arithmetic != "real":
        head |= {"says": _SAYS["runs"], "arithmetic": arithmetic}
    if joint:
        head |= {"says": _SAYS["joint"], "joint": [str(value) for value in joint]}
    if other is not None:
        data, pairs = other
        beside = {j for _, j in pairs}
        names += [name for j, name in enumerate(_activations(data)) for _ in range(1 + (j in beside))]
        more = {"other": hashlib.sha256(data).hexdigest(), "beside": [list(pair) for pair in pairs]}
        head |= {**more, "says": _SAYS["two"]}
    parts = (record for box, proof in proofs if proof.polytopes for record in _part(box, names, proof))
    _write(path, head, parts)


def write_sat(path: Path, network: bytes, prop: bytes, point: Sequence[Fraction]) -> None:
    """Write a certificate that a point is a counterexample; the arguments are those of ``write_unsat``."""
    _write(path, _head("sat", network, prop), iter([{"point": [str(value) for value in point]}]))


def _head(claim: str, network: bytes, prop: bytes) -> dict[str, Any]:
    digests = {"network": hashlib.sha256(network).hexdigest(), "property": hashlib.sha256(prop).hexdigest()}
    return {"certificate": VERSION, "claim": claim, **digests, "says": _SAYS[claim]}


def _write(path: Path, head: dict[str, Any], records: Iterator[dict[str, Any]]) -> None:
    count = 1
    with gzip.open(path, "wt", compresslevel=4, encoding="ascii", newline="\n") as file:
        file.write(json.dumps(head) + "\n")
        for record in records:
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
            count += 1
        file.write(json.dumps({"end": count}) + "\n")


def _activations(network: bytes) -> list[str]:
    """Return the outputs of the activations that the network's output depends on, in the order of reading."""
    graph = onnx.load_from_string(network).graph
    sort(graph)
    needed = {graph.output[0].name}
    found = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            if node.op_type in _ACTIVATIONS:
                found.append(node.output[0])
            if node.op_type in _STEPS:
                found += [node.output[0]] * _STEPS[node.op_type]
            if node.op_type == "MaxPool":
                (kernel,) = (attribute.ints for attribute in node.attribute if attribute.name == "kernel_shape")
                found += [node.output[0]] * (math.prod(kernel) - 1).bit_length()
    return found[::-1]


def _part(box: int, names: list[str], proof: Proof | Cover) -> Iterator[dict[str, Any]]:
    rows = [
        [{"y": [[i, str(c)] for i, c in row.coefficients], "most": str(row.bound)} for row in polytope]
        for polytope in proof.polytopes
    ]
    yield {"part": {"box": box, "polytopes": rows}}
    if isinstance(proof, Proof):
        yield from _root(names, proof)
        return
    for step in halvings(proof.lower, proof.upper):
        if isinstance(step, tuple):
            exponent, mantissa = encoded(np.array([step[1]]))
            yield {"halve": [step[0], mantissa, exponent]}
        elif isinstance(inner := proof.proofs[step], Proof):
            yield from _root(names, inner)
        else:
            yield {"zonotope": list(inner)}


def _root(names: list[str], proof: Proof) -> Iterator[dict[str, Any]]:
    # Of a network whose head was left out, the last activations of the file are the head's.
    if len(names) < len(proof.claims):
        raise UnsupportedError(f"the file has {len(names)} activations, the network {len(proof.claims)}")
    yield {"root": len(proof.claims)}
    for name, claim in zip(names, proof.claims, strict=False):
        bounds = {"lower": encoded(claim.lower), "upper": encoded(claim.upper)}
        alone = {} if claim.alone is None else {"alone": claim.alone.tolist()}
        yield {"activation": name, **bounds, "slopes": encoded(claim.slopes), **alone}
        for own in claim.own:
            yield {"row": [own.neuron, own.sign], "slopes": encoded(own.slopes)}
        if claim.maxima is not None:
            below, above = (entries.tolist() for entries in claim.maxima)
            yield {"maximum": name, "below": below, "above": above}
    for each in proof.excluded:
        for tighter in each.tighter:
            bounds = {"rows": tighter.rows.ravel().tolist(), "least": encoded(tighter.least)}
            yield {"tighter": tighter.activation, **bounds, **_shared(tighter)}
            for tree in tighter.trees:
                yield from _nodes(tree)
        if isinstance(each.proof, Plain):
            yield {"plain": encoded(each.proof.rows), "slopes": encoded(each.proof.slopes)}
        else:
            yield _shared(each.proof)
            yield from _planes(each.proof.planes)
            yield from _nodes(each.proof.branches)


def _shared(tree: Tree | Tighter) -> dict[str, Any]:
    runs = groupby(tree.neurons, key=itemgetter(0))
    groups = [(activation, [neuron for _, neuron in run]) for activation, run in runs]
    return {"tree": encoded(tree.slopes), "neurons": groups, "chords": list(tree.chords)}


def _planes(planes: Sequence[Plane]) -> Iterator[dict[str, Any]]:
    """Planes; the terms of one are left out where they are those of the plane before."""
    before: list[int] | None = None
    for plane in planes:
        record = {"plane": list(plane.neuron), "parts": encoded(plane.parts), "bends": encoded(plane.bends)}
        terms = plane.terms.tolist()
        yield record if terms == before else {**record, "terms": terms}
        before = terms


def halvings(lower: np.ndarray, upper: np.ndarray) -> Iterator[tuple[int, float] | int]:
    """Yield how halving makes boxes (boxes, inputs) of the whole: input and place of each cut, or a box's number.

    What is below a cut comes before what is above it. Wherever a cut goes through no box, it may come first.

    Raises:
        UnsupportedError: if halving makes no such boxes.
    """
    waiting = [np.arange(len(lower))]
    while waiting:
        members = waiting.pop()
        if len(members) == 1:
            yield int(members[0])
            continue
        for place in range(lower.shape[1]):
            order = np.argsort(lower[members, place], kind="stable")
            low, high = lower[members[order], place], np.maximum.accumulate(upper[members[order], place])
            inside = (low > low[0]) & (low < high[-1])
            cuts = np.flatnonzero(inside[1:] & (low[1:] >= high[:-1])) + 1
            if len(cuts):
                cut = cuts[np.abs(cuts - len(members) // 2).argmin()]
                yield place, float(low[cut])
                waiting += [members[order[cut:]], members[order[:cut]]]
                break
        else:
            raise UnsupportedError("the boxes of a proof do not come from halving")


def _nodes(tree: Branches) -> Iterator[dict[str, Any]]:
    """A tree in preorder. Wherever all leaves of a part of it are on a side of one cut, that cut may come first."""
    leaves = tree.leaves
    matrix = np.zeros((len(leaves), len(tree.cuts)), np.int8)
    for at, leaf in enumerate(leaves):
        matrix[at, leaf.splits] = leaf.sides
    waiting = [(np.arange(len(leaves)), np.ones(len(tree.cuts), bool))]
    while waiting:
        members, left = waiting.pop()
        if len(members) == 1 and not (matrix[members[0]] != 0)[left].any():
            yield _leaf(leaves[members[0]])
            continue
        common = left & (matrix[members] != 0).all(0)
        if not len(members) or not common.any():
            raise UnsupportedError("the leaves of a tree do not cover it")
        chosen = int(common.argmax())
        neuron, point = tree.cuts[chosen]
        exponent, mantissa = encoded(np.array([point or 0.0]))
        yield {"split": neuron if point is None else [neuron, mantissa, exponent]}
        rest = left.copy()
        rest[chosen] = False
        for side in (-1, 1):
            waiting.append((members[matrix[members, chosen] == side], rest))


def _leaf(leaf: Leaf) -> dict[str, Any]:
    exponent, *mantissas = encoded(leaf.multipliers)
    pairs = [number for pair in zip(leaf.neurons.tolist(), mantissas, strict=True) for number in pair]
    return {"leaf": [exponent, *pairs]} | ({"rows": encoded(leaf.rows)} if len(leaf.rows) > 1 else {})


def encoded(values: np.ndarray) -> list[int]:
    """Return [exponent, mantissa, …] of float64 numbers mantissa·2^exponent, as short as they allow.

    Raises:
        UnsupportedError: if some are not finite, or not of one scale.
    """
    flat = np.asarray(values, np.float64).ravel()
    if not np.isfinite(flat).all():
        raise UnsupportedError("a number of the certificate is not finite")
    fraction, exponent = np.frexp(flat)
    used = fraction != 0
    if not used.any():
        return [0, *[0] * len(flat)]
    # As integers of 53 bits, the zeros at whose ends belong to the exponent.
    whole = np.ldexp(fraction[used], 53).astype(np.int64)
    trailing = np.log2((whole & -whole).astype(np.float64)).astype(np.int64)
    least = int((exponent[used] - 53 + trailing).min())
    if not -900 <= least <= 900 or float(np.abs(flat).max()) > np.ldexp(1.0, min(least + 53, 1000)):
        raise UnsupportedError("numbers of the certificate differ too much in size")
    return [least, *np.ldexp(flat, -least).astype(np.int64).tolist()]
