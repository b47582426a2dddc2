"""Smooth activations in the checker of certificates: enclosures of curves, their ONNX forms, families of networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from onnx import helper

from tests.soundness.check_agreement import judge
from tests.support.asking import claims
from tests.support.certificates import Case, checked, excluded, one_point, records, written
from tests.support.draws import draws
from tests.support.onnx_files import onnx_file
from tests.support.solver_cases import ball, chain, row
from verifiable_relu.check import BadInput, Refused
from verifiable_relu.check import curves as checker
from verifiable_relu.network import hardened, read_onnx, write_onnx
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Gelu, Hardened, Input, Linear, Node, Relu, Sigmoid, Tanh
from verifiable_relu.spec.property import Property, Query
from verifiable_relu.spec.specfile import vnnlib_text
from verifiable_relu.trust.certificate_file import write_unsat
from verifiable_relu.verifiers.auto import prove
from verifiable_relu.verifiers.bab import Bab
from verifiable_relu.verifiers.bab.refine import Refinement
from verifiable_relu.verifiers.bab.search import Schedule
from verifiable_relu.verifiers.base import Verdict

Real = Callable[[Any], Any]


def gelu(scale: float) -> Real:
    return lambda z: z * (1 + mpmath.erf(mpmath.mpf(scale) * z)) / 2


CURVES: dict[str, tuple[checker.FunctionBand, Real, Real]] = {
    "sigmoid": (checker.SIGMOID, *[lambda z: 1 / (1 + mpmath.exp(-z))] * 2),
    "tanh": (checker.TANH, *[mpmath.tanh] * 2),
    **{f"gelu {k}": (checker.same(checker.gelu(k)), *[gelu(k)] * 2) for k in (0.70710678, 113.0)},
    "family 1": (checker.family(1.0), gelu(0.5**0.5), lambda z: max(z, 0)),
    "family 160": (checker.family(160.0), gelu(160 * 0.5**0.5), lambda z: max(z, 0)),
}
"""Curves of the checker, and the functions under and over them."""


def points(rng: np.random.Generator, scale: float, count: int) -> np.ndarray:
    """Numbers of very different sizes, zero and the functions' bends among them."""
    sizes = rng.choice([1e-300, 1e-9, 0.1, 1, 3, 8, 40, 900], count)
    bends = rng.choice([0.0, 2**-0.5, 1.0, 6.0, -6.0, -1.0], count) * (1 + rng.choice([0, 1e-15, -1e-12], count))
    found: np.ndarray = np.where(rng.random(count) < 0.2, bends, rng.normal(size=count) * sizes) / scale
    return found


@pytest.mark.parametrize("name", CURVES)
def test_values_and_slopes_are_off_by_less_than_a_quarter_of_what_is_said(name: str) -> None:
    curve, *functions = CURVES[name]
    scale = float(name.split()[1]) if " " in name else 1.0
    z = points(np.random.default_rng(0), scale, draws(30))
    with mpmath.workdps(60):
        for function, real in zip((curve.lower, curve.upper), functions, strict=True):
            if function is checker.RELU:
                continue
            (values, errors), (slopes, off) = function.values(z)
            for x, value, error, slope, other in zip(z, values, errors, slopes, off, strict=True):
                assert abs(real(mpmath.mpf(x)) - mpmath.mpf(value)) <= 0.25 * error, x
                assert abs(mpmath.diff(real, mpmath.mpf(x)) - mpmath.mpf(slope)) <= 0.25 * other + 1e-30, x


@pytest.mark.parametrize("name", CURVES)
def test_remainders_beside_lines_are_enclosed_and_hardly_wider(name: str) -> None:
    """For random slopes, those far out of range too: no point of the interval is beyond, and some point is near."""
    curve, *functions = CURVES[name]
    scale = float(name.split()[1]) if " " in name else 1.0
    rng = np.random.default_rng(1)
    ends = np.sort(np.stack([points(rng, scale, draws(15)), points(rng, scale, draws(15))]), 0)
    ends[1] = np.where(rng.random(len(ends[1])) < 0.1, ends[0], ends[1])
    t = rng.choice([0.0, 0.1, 0.25, 0.9, 1.0, 1.1289, -0.1, 5.0, -1e6], (2, ends.shape[1]))
    t[1] += rng.uniform(-0.01, 0.01, ends.shape[1])
    bounds = curve.least(*ends, t), curve.most(*ends, t)
    shares = np.concatenate([np.linspace(0, 1, 25), rng.uniform(size=10), np.geomspace(1e-9, 1, 15)])
    with mpmath.workdps(40):
        for j, (low, high) in enumerate(ends.T):
            where = [*(low + shares * (high - low)), *(high - shares * (high - low)), 0.0, 0.84 / scale, -0.84 / scale]
            inside = [mpmath.mpf(x) for x in where if low <= x <= high]
            for found, real, side in zip(bounds, functions, (1, -1), strict=True):
                for i in range(2):
                    values = [side * (real(x) - mpmath.mpf(t[i, j]) * x) for x in inside]
                    assert side * mpmath.mpf(found[i, j]) <= min(values), (low, high, t[i, j])
                    coarse = (1.2 + abs(t[i, j])) * (high - low) / 24 + 1e-9 * (1 + abs(t[i, j])) * max(
                        abs(low), abs(high)
                    )
                    assert min(values) - side * found[i, j] <= coarse + 1e-12, (low, high, t[i, j])


def test_signs_beside_lines_are_enclosed_as_they_are() -> None:
    """Attained, or come near to, at an end, at 0 or beside it."""
    rng = np.random.default_rng(2)
    ends = np.sort(np.concatenate([rng.normal(size=(2, 300)), rng.choice([-1.0, 0.0, 0.5], (2, 300))], 1), 0)
    low, high = ends
    t = np.concatenate([rng.normal(size=(1, 600)) * 4.0 ** rng.integers(-5, 6, 600), np.zeros((1, 600))])
    least, most = checker.SIGNS.least(low, high, t), checker.SIGNS.most(low, high, t)
    tiny = np.full_like(low, 1e-300)
    points = np.stack([low, high, *(low + s * (high - low) for s in rng.random((9, 1))), 0 * low, tiny, -tiny])
    inside = (points >= low) & (points <= high)
    values = np.where(inside, np.sign(points), np.nan)[:, None] - t * np.where(inside, points, 0)[:, None]
    size = 1 + np.abs(t) * np.maximum(np.abs(low), np.abs(high))
    for bound, found, sign in ((least, np.nanmin(values, 0), 1), (most, np.nanmax(values, 0), -1)):
        assert (sign * (found - bound) >= 0).all()
        assert (sign * (found - bound) <= 1e-14 * size).all()


def test_ends_that_overflow_are_not_enclosed() -> None:
    huge, steep = np.array([1e308]), np.array([1e300])
    with np.errstate(all="ignore"):
        for curve, *_ in CURVES.values():
            for bound in (curve.least(-huge, huge, steep), -curve.most(-huge, huge, steep)):
                assert not (bound > -1e308).any()


def spelled(text: str) -> bytes:
    """A file of operators on scalars and on a vector x of three entries: "Op input input, …"; the last one is y.

    The output of operator i is called vi.
    """
    steps = [step.split() for step in text.split(", ")]
    outputs = [*(f"v{i}" for i in range(len(steps) - 1)), "y"]
    nodes = [helper.make_node(op, given, [output]) for (op, *given), output in zip(steps, outputs, strict=True)]
    return onnx_file(nodes, {"x": [1, 3]}, {"y": [1, 3]}, 20, **SCALARS)


SCALARS = {"root": 1.4142135, "inverse": 0.70710677, "one": 1.0, "half": 0.5, "two": 2.0, "hard": 5.5, "less": -0.3}
ERF = "Div x root, Erf v0, Add v1 one"
SPELLED = {
    "x times half": f"{ERF}, Mul x v2, Mul v3 half",
    "half of x first": f"{ERF}, Mul half x, Mul v3 v2",
    "half of the gate first": f"{ERF}, Mul v2 half, Mul v3 x",
    "the constant first": "Mul inverse x, Erf v0, Add one v1, Mul v2 x, Mul v3 half",
    "hard": "Mul x hard, Div v0 root, Erf v1, Add v2 one, Mul v0 v3, Mul v4 half, Div v5 hard",
    "hard without its quotient": "Mul x hard, Mul v0 inverse, Erf v1, Mul v2 two, Add v3 two, Mul v4 x",
    "the operator": "Mul x one, Gelu v0, Div v1 one",
    "the operator, hard": "Mul x hard, Gelu v0, Div v1 hard",
}
NO_GELU = {
    "another summand": "Div x root, Erf v0, Add v1 two, Mul x v2",
    "no summand": "Div x root, Erf v0, Mul x v1",
    "a gate by itself": ERF,
    "a gate of −x": "Mul x less, Erf v0, Add v1 one, Mul x v2",
    "a gate of another value": "Add x half, Erf v0, Add v1 one, Mul x v2",
    "a square": "Mul x x",
    "two gates": f"{ERF}, Mul v2 v2",
}


@pytest.mark.parametrize("name", [*SPELLED, *NO_GELU])
def test_gelu_is_read_however_it_is_spelled_and_what_is_nearly_gelu_is_refused(name: str) -> None:
    found = judge(spelled((SPELLED | NO_GELU)[name]))
    assert not found.disagreements
    assert (found.refused is None) == (name in SPELLED)
    assert found.compared["enclosed"] or name in NO_GELU


MULTIPLES = {
    "twice": "Mul x two, Gelu v0",
    "by a root": "Div x root, Gelu v0",
    "twice, and half of it": "Mul x two, Gelu v0, Div v1 two",
    "hard, and half of it": "Mul x hard, Gelu v0, Mul v1 half",
    "in two steps": "Mul x less, Mul v0 less, Gelu v1",
    "of a value that is read elsewhere": "Mul x two, Gelu v0, Add v0 v1",
    "spelled": SPELLED["hard"],
}


@pytest.mark.parametrize("lam", [None, 1.5])
@pytest.mark.parametrize("name", MULTIPLES)
def test_certificates_speak_of_what_gelu_is_a_function_of(name: str, lam: float | None, tmp_path: Path) -> None:
    """Whoever wrote them: the input before all multiplications by scalars."""
    data = spelled(MULTIPLES[name])
    network = read_onnx(data) if lam is None else hardened(read_onnx(data), lam)
    (at,) = network.activations
    assert network.nodes[at].inputs == (0,)
    prop = excluded(ball(np.zeros(3), 1.0), (row({0: -1, 1: -1, 2: -1}, -90),))
    text, proof = vnnlib_text(prop).encode(), prove(Query(network, prop), 60.0)
    assert proof is not None
    write_unsat(tmp_path / "made", data, text, [(0, proof)], [] if lam is None else [Fraction(lam)])
    case = Case(data, text, records(tmp_path / "made"))
    assert checked(tmp_path, case, written(case.records)).startswith("unsat")


KINDS: dict[str, tuple[Callable[[], dict[str, Any]], type[Node], float | None]] = {
    "sigmoid": (dict, Sigmoid, None),
    "tanh": (dict, Tanh, None),
    "gelu": (lambda: {"lam": torch.tensor(3.0)}, Gelu, None),
    "relu, joint": (dict, Relu, 4.0),
    "gelu, joint": (lambda: {"lam": torch.tensor(9.0)}, Gelu, 6.0),
}
HARDER = (1.0, 1.5, 10.0, 1e4)
"""Members of a family are compared at so many times its λ."""


@cache
def posed(kind: str, radius: float, spare: float) -> tuple[Network, np.ndarray, float, bytes, Property]:
    """A network, points of a box, about the least value of y_0 − y_1 there, the file, and that it is not much less.

    Args:
        kind: of ``KINDS``.
        radius: of the box.
        spare: how much less.
    """
    options, made, lam = KINDS[kind]
    rng = np.random.default_rng(2)
    nodes: list[Node] = [Input(name="x", inputs=(), shape=(2,))]
    sizes = (2, 4, 3, 2)
    for layer, (before, after) in enumerate(pairwise(sizes)):
        if layer:
            nodes.append(made(name=f"a{layer}", inputs=(len(nodes) - 1,), shape=(before,), **options()))
        weight, bias = (torch.from_numpy(rng.normal(size=s).astype(np.float32)) for s in ((after, before), after))
        nodes.append(Linear(name=f"f{layer}", inputs=(len(nodes) - 1,), shape=(after,), weight=weight, bias=bias))
    data = write_onnx(chain(nodes))
    network = read_onnx(data)
    grid = np.stack(np.meshgrid(*[np.linspace(-radius, radius, 41)] * 2), -1).reshape(-1, 2)
    whole = network if lam is None else hardened(network, lam)
    value = min(float((y[:, 0] - y[:, 1]).min()) for member in members(whole) for y in [evaluated(member, grid)])
    prop = excluded(ball(np.zeros(2), radius), (row({0: 1, 1: -1}, Fraction(round((value - spare) * 1024), 1024)),))
    return whole, grid, value, data, prop


Posed = tuple[Network, np.ndarray, float, Case]
Made = Callable[[Path, str], Posed]


def certified(folder: Path, question: tuple[Network, np.ndarray, float, bytes, Property], proof: Any) -> Posed:
    whole, grid, value, data, prop = question
    assert proof is not None
    text = vnnlib_text(prop).encode()
    joint = [Fraction(float(node.lam)) for node in whole.nodes if isinstance(node, Hardened)]
    write_unsat(folder / "made", data, text, [(0, proof)], joint)
    return whole, grid, value, Case(data, text, records(folder / "made"))


@cache
def proven(folder: Path, kind: str) -> Posed:
    """A question that bounds answer."""
    question = posed(kind, 0.125, 60 / 1024)
    return certified(folder, question, prove(Query(question[0], question[4]), 5.0))


WIDE = {"sigmoid": (2.0, 0.06), "tanh": (1.5, 0.12), "gelu": (1.0, 0.25), "gelu, joint": (0.5, 0.25)}
"""The radius, and the spare, of questions that bounds do not answer."""


@cache
def branched(folder: Path, kind: str) -> Posed:
    """A question that a tree answers, after bounds of neurons have been made tighter by trees of their own."""
    question = posed(kind, *WIDE.get(kind, (0.5, 0.25)))
    bab = Bab(record=True, rounds=Schedule(Refinement(leaves=8), first=0, patience=0))
    (outcome,) = claims(bab, [Query(question[0], question[4])], 600.0)
    assert outcome.verdict is Verdict.UNSAT, outcome
    return certified(folder, question, outcome.proof)


def members(network: Network) -> list[Network]:
    """Networks of a family, ReLU's among them; a network that is none by itself."""
    lam = {i: node.lam for i, node in enumerate(network.nodes) if isinstance(node, Hardened)}
    if not lam:
        return [network]
    found = []
    for factors in [*((f,) * len(lam) for f in HARDER), (1.0, 1e4), (1e4, 1.0), ()]:
        nodes = list(network.nodes)
        for at, i in enumerate(lam):
            kept = {"name": nodes[i].name, "inputs": nodes[i].inputs, "shape": nodes[i].shape}
            nodes[i] = Gelu(**kept, lam=lam[i] * factors[at]) if factors else Relu(**kept)
        found.append(replace(network, nodes=tuple(nodes)))
    return found


def evaluated(network: Network, x: np.ndarray) -> np.ndarray:
    found: np.ndarray = network.to(torch.float64)(torch.from_numpy(x)).numpy()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("curves")


@pytest.mark.combined
@pytest.mark.parametrize("made", [proven, branched])
@pytest.mark.parametrize("kind", KINDS)
def test_proofs_of_networks_with_curves_are_accepted(kind: str, made: Made, folder: Path) -> None:
    case = made(folder, kind)[3]
    assert any("tree" in record for record in case.records) == (made is branched)
    said = checked(folder, case, written(case.records))
    assert said.startswith("unsat: ")
    assert ("every network with ReLU or λ-GELU, λ ≥ " in said) == ("joint" in kind)


@pytest.mark.thorough
def test_curves_are_split_and_their_bounds_made_tighter(folder: Path) -> None:
    every = [record for kind in KINDS for record in branched(folder, kind)[3].records]
    assert sum("split" in record for record in every) > 20
    assert sum("tighter" in record for record in every) > 1


def test_points_of_networks_with_curves_are_enclosed(folder: Path) -> None:
    _, grid, _, case = proven(folder, "tanh")
    network = read_onnx(case.network)
    y = evaluated(network, grid)
    least = float((y[:, 0] - y[:, 1]).min())
    point = [Fraction(float(v)) for v in grid[(y[:, 0] - y[:, 1]).argmin()]]
    for beside, reached in ((1e-9, True), (-1e-9, False)):
        rows = (row({0: 1, 1: -1}, Fraction(least) + Fraction(beside)),)
        prop = vnnlib_text(excluded(ball(np.zeros(2), 0.125), rows)).encode()
        certificate = written(one_point(case.network, prop, point))
        if reached:
            assert checked(folder, replace(case, prop=prop), certificate).startswith("sat: ")
        else:
            with pytest.raises((Refused, BadInput), match="in no disjunct"):
                checked(folder, replace(case, prop=prop), certificate)
