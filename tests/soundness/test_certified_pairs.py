"""Certificates about two networks: what the checker takes for differences holds everywhere, and forgeries fail."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import ndtr

from tests.support.certificates import Records, records, written
from tests.support.draws import draws
from tests.support.solver_cases import ball, mlp
from verifiable_relu.api.changing import differences, unsafe
from verifiable_relu.campaign.certificates import beside
from verifiable_relu.check import BadInput, Refused, check
from verifiable_relu.check.arithmetic import FLOAT
from verifiable_relu.check.curves import family, gelu, same
from verifiable_relu.check.graph import (
    ActivationNode,
    AffineNode,
    DifferenceNode,
    Graph,
    InputNode,
    SmoothNode,
    side_by_side,
)
from verifiable_relu.check.least import of_box
from verifiable_relu.check.lines import CheckedRelaxation, CurvedNeurons, Signed
from verifiable_relu.check.model import read_model
from verifiable_relu.network import hardened, read_onnx, write_onnx
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Gelu
from verifiable_relu.network.product import NetworkPart, product
from verifiable_relu.spec.property import Box, Property
from verifiable_relu.spec.specfile import vnnlib_text
from verifiable_relu.trust.certificate_file import write_unsat


def pair(seed: int, smooth: bool = False, share: float = 0.01) -> tuple[Network, Network]:
    """A network, with λ-GELU or ReLU, and one with ReLU and other weights."""
    rng = np.random.default_rng(seed)
    second = mlp(rng, (3, 7, 6, 2))

    def moved(t: torch.Tensor) -> torch.Tensor:
        return (t * (1 + share * torch.from_numpy(rng.normal(size=t.shape)))).to(t.dtype)

    nodes = [node.map_tensors(moved) for node in second.nodes]
    for index in second.activations if smooth else ():
        node = nodes[index]
        nodes[index] = Gelu(name=node.name, inputs=node.inputs, shape=node.shape, lam=torch.tensor(8.0))
    return replace(second, nodes=tuple(nodes), onnx=None, run=None), second


def sampled(networks: tuple[Network, ...], box: Box, count: int = 4000) -> np.ndarray:
    """(points, outputs) differences of the second and the first network's outputs, in float64."""
    rng = np.random.default_rng(9)
    shares = np.concatenate([rng.random((count, box.size)), rng.integers(0, 2, (count, box.size))])
    x = torch.from_numpy(box.lower + shares * (box.upper - box.lower))
    one, two = (network.to(torch.float64)(x) for network in networks)
    return (two - one).numpy()


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("share", [0.001, 0.05, 1.0])
def test_no_difference_is_beyond_what_any_slopes_say(smooth: bool, share: float) -> None:
    """The checker's own walk, with random slopes and random neurons alone, over bounds by intervals."""
    for seed in range(draws(4)):
        rng, networks = np.random.default_rng(seed), pair(seed, smooth, share)
        box = ball(rng.normal(size=3), float(rng.choice([0.05, 0.5, 2.0])))
        one, two = (read_model(write_onnx(network)) for network in networks)
        graph = side_by_side(one, two, [(0, 0), (1, 1)])
        found = CheckedRelaxation(graph, box.lower, box.upper)
        for number in graph.activations:
            node = graph.nodes[number]
            found.claim(number, *found.ends(node.source))  # type: ignore[union-attr]
            if isinstance(node, DifferenceNode):
                known = found.neurons[number]
                assert isinstance(known, CurvedNeurons)
                known.alone[rng.random(node.size) < 0.2] = 1
        seen = sampled(networks, box)
        rows = np.concatenate([-np.eye(2), np.eye(2)], 1)
        for _ in range(5):
            lines = Signed(rng.choice([0.0, 0.5, 1.0, rng.random()], found.slopes))
            for sign in (1, -1):
                form = found.pulled({graph.output: sign * rows}, lines)
                least = of_box(found, form, lines, FLOAT)
                assert (least.value - least.slack <= (sign * seen).min(0) + 1e-12).all()


@pytest.mark.parametrize("kinds", ["ReLU ReLU", "GELU ReLU", "ReLU GELU", "GELU family"])
def test_differences_of_single_activations_are_within_the_checkers_bounds(kinds: str) -> None:
    """At points (z, z′) of bounds of both, by functions of scipy's."""
    hardness = 3.0
    curves = {"GELU": same(gelu(hardness / np.sqrt(2))), "family": family(hardness)}
    functions = {
        "ReLU": [lambda z: np.maximum(z, 0)],
        "GELU": [lambda z: z * ndtr(hardness * z)],
        "family": [lambda z: z * ndtr(hardness * z), lambda z: z * ndtr(2 * hardness * z), lambda z: np.maximum(z, 0)],
    }

    def node(kind: str, at: int) -> ActivationNode | SmoothNode:
        if kind == "ReLU":
            return ActivationNode(at, np.zeros(1), kind)
        return SmoothNode(at, 1, kind, "Gelu" if kind == "GELU" else kind, curves[kind])

    one, two = (
        Graph([InputNode(2), AffineNode([(0, np.eye(2)[[at]])], np.zeros(1)), node(kind, 1)], 2)
        for at, kind in enumerate(kinds.split())
    )
    graph = side_by_side(one, two, [(0, 0)])
    rng, f, g = np.random.default_rng(1), *graph.activations[:2]
    for _ in range(draws(200)):
        middle = rng.normal(size=(2, 1)) * rng.choice([0, 0.3])
        ends = np.sort(rng.normal(size=(2, 2)) * rng.choice([0.05, 0.3, 2]) + middle)
        found = CheckedRelaxation(graph, ends[:, 0], ends[:, 1])
        for at, number in enumerate((f, g)):
            found.claim(number, ends[at, :1], ends[at, 1:])
        z, other = (ends[at, 0] + np.append(rng.random(300), [0, 1]) * (ends[at, 1] - ends[at, 0]) for at in (0, 1))
        z, other = np.meshgrid(z, other)
        d = other - z
        within = d.min() + (d.max() - d.min()) * np.sort(rng.choice([0, 1, *rng.random(2)], 2, replace=False))
        number = graph.activations[2]
        found.claim(number, within[:1], within[1:])
        known, t = found.neurons[number], np.array([rng.choice([0, 1, rng.random()])])
        assert isinstance(known, CurvedNeurons)
        held = (d >= within[0]) & (d <= within[1])
        for first in functions[kinds.split()[0]]:
            for second in functions[kinds.split()[1]]:
                rest = (second(other) - first(z) - t * d)[held]
                assert (known.curve.least(*(np.array([end]) for end in within), t) <= rest + 1e-14).all()
                assert (rest - 1e-14 <= known.curve.most(*(np.array([end]) for end in within), t)).all()


@dataclass(frozen=True)
class Files:
    """Files of a certificate of two networks, and its records."""

    folder: Path
    records: Records

    def checked(self, changed: Records, net: str = "a.onnx", other: str = "b.onnx") -> str:
        (self.folder / "c").write_bytes(written(changed))
        return check(self.folder / "c", self.folder / net, self.folder / "p.vnnlib", None, self.folder / other)


def made(folder: Path, networks: tuple[Network, Network], box: Box, most: Fraction, family: float = 0) -> Files:
    one, other = networks
    for name, network in zip(("a.onnx", "b.onnx"), networks, strict=True):
        (folder / name).write_bytes(write_onnx(network))
    one, other = read_onnx(folder / "a.onnx"), read_onnx(folder / "b.onnx")
    if family:
        one = hardened(one, family)
    prop = Property(box, unsafe(one.output_size, most), "p")
    pairs, proof = beside(one, other, prop, 10.0)
    assert proof is not None and pairs == [(0, 0), (1, 1)]
    (folder / "p.vnnlib").write_text(vnnlib_text(prop))
    joint = [Fraction(family)] * 2 if family else []
    data = [(folder / name).read_bytes() for name in ("a.onnx", "b.onnx", "p.vnnlib")]
    write_unsat(folder / "made", data[0], data[2], [(0, proof)], joint, other=(data[1], pairs))
    return Files(folder, records(folder / "made"))


def proven(networks: tuple[Network, Network], box: Box) -> float:
    """The largest difference that bounds do not exclude."""
    size = box.size
    both = product([NetworkPart("f", networks[0], range(size)), NetworkPart("g", networks[1], range(size))], size)
    found = differences(both, [Property(box, ())])
    return float(torch.maximum(-found.lower, found.upper).max())


@pytest.mark.parametrize(("smooth", "family"), [(False, 0.0), (True, 0.0), (True, 8.0), (False, 20.0)])
def test_what_is_proven_is_accepted_and_what_is_not_so_is_refused(smooth: bool, family: float, tmp_path: Path) -> None:
    """Of a smaller difference than one that is attained, with bounds, slopes and neurons changed at random."""
    networks, box = pair(3, smooth), ball(np.zeros(3), 0.25)
    one = hardened(networks[0], family) if family else networks[0]
    files = made(
        tmp_path, networks, box, Fraction(round(proven((one, networks[1]), box) * 1.001 * 2**20), 2**20), family
    )
    assert files.checked(files.records).startswith("unsat: ")
    seen = float(np.abs(sampled(networks, box)).max())
    below = Fraction(int(seen * 0.999 * 2**20), 2**20)
    prop = vnnlib_text(Property(box, unsafe(2, below), "p")).encode()
    (tmp_path / "p.vnnlib").write_bytes(prop)
    with pytest.raises(Refused, match="another property"):
        files.checked(files.records)
    part = files.records[1]["part"]
    asked = [[row | {"most": str(-below)} for row in rows] for rows in part["polytopes"]]
    head = files.records[0] | {"property": hashlib.sha256(prop).hexdigest()}
    forged = [head, {"part": part | {"polytopes": asked}}, *files.records[2:]]
    places = [i for i, record in enumerate(forged) if "slopes" in record]
    rng = np.random.default_rng(5)
    for _ in range(draws(60)):
        changed = [dict(record) for record in forged]
        for i in rng.choice(places, int(rng.integers(0, 4)), replace=False):
            for key, sign in (("lower", 1), ("upper", -1), ("slopes", 0)):
                if key in changed[i]:
                    exponent, *mantissas = changed[i][key]
                    size = float(rng.choice([0.5, 0.02, 0.001])) / 2.0**exponent
                    by = rng.integers(0, 2, len(mantissas)) * (sign or rng.choice([-1, 1], len(mantissas)))
                    changed[i][key] = [
                        exponent,
                        *(m + int(b * size) for m, b in zip(mantissas, by.tolist(), strict=True)),
                    ]
            if "alone" in changed[i]:
                changed[i]["alone"] = [int(n) for n in np.flatnonzero(rng.random(6) < 0.5)]
        with pytest.raises((Refused, BadInput)):
            files.checked(changed)


def test_other_files_pairs_and_claims_are_refused(tmp_path: Path) -> None:
    networks, box = pair(4), ball(np.zeros(3), 0.25)
    files = made(tmp_path, networks, box, Fraction(round(proven(networks, box) * 1.01 * 2**20), 2**20))
    head, *rest = files.records
    with pytest.raises(Refused, match="another network"):
        files.checked(files.records, net="b.onnx", other="a.onnx")
    with pytest.raises(Refused, match="another other network"):
        files.checked(files.records, other="a.onnx")
    third = pair(4, share=0.5)[0]
    (tmp_path / "third.onnx").write_bytes(write_onnx(third))
    moved = head | {"other": hashlib.sha256((tmp_path / "third.onnx").read_bytes()).hexdigest()}
    with pytest.raises(Refused, match="not proven"):
        files.checked([moved, *rest], other="third.onnx")
    for pairs in ([[0, 1], [1, 0]], [[0, 0]], [], [[0, 0], [1, 2]], [[0]], "all", [[0, 0], [1, 1.0]]):
        with pytest.raises((Refused, BadInput)):
            files.checked([head | {"beside": pairs}, *rest])
    with pytest.raises(Refused):
        check(tmp_path / "c", tmp_path / "a.onnx", tmp_path / "p.vnnlib")
    at = next(i for i, record in enumerate(files.records) if "alone" in record)
    for alone in ([99], [-1], "0", None):
        changed = [*files.records]
        changed[at] = changed[at] | {"alone": alone}
        with pytest.raises(Refused):
            files.checked(changed)
    with pytest.raises((Refused, BadInput)):
        files.checked([head | {"claim": "sat"}, {"point": ["0", "0", "0"]}, {"end": 2}])


def test_claimed_bounds_of_both_values_bound_their_difference(tmp_path: Path) -> None:
    """What lines of differences do not prove of unlike networks may follow from what is claimed of each."""
    for seed in range(draws(40)):
        rng = np.random.default_rng(seed)
        networks = mlp(rng, (4, 8, 8, 2)), mlp(rng, (4, 8, 8, 2))
        box = ball(rng.normal(size=4), float(rng.choice([0.01, 0.1, 0.5])))
        most = Fraction(round(proven(networks, box) * 1.001 * 2**20) + 1, 2**20)
        files = made(tmp_path, networks, box, most)
        assert files.checked(files.records).startswith("unsat: ")
