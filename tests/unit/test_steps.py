"""Operators that jump, decide or count: against onnxruntime and rational arithmetic, their bounds, what they decide."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import onnx.parser
import pytest
import torch

from tests.support import exact
from tests.support.asking import claims
from tests.support.solver_cases import row
from verifiable_relu.bounds import crown_relaxation
from verifiable_relu.bounds.tuning import Bounds
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network import Network, read_onnx
from verifiable_relu.network.graph import Network as Graph
from verifiable_relu.network.source import replay
from verifiable_relu.spec.property import Box, Property, Query
from verifiable_relu.trust.enclose import enclose
from verifiable_relu.trust.exact import evaluable, evaluate_exact
from verifiable_relu.trust.replay import confirm
from verifiable_relu.verifiers.attack import Attack
from verifiable_relu.verifiers.auto import Auto
from verifiable_relu.verifiers.bab import Bab
from verifiable_relu.verifiers.base import Verdict
from verifiable_relu.verifiers.batch import answers
from verifiable_relu.verifiers.incomplete import Crown

HALVES = "a, b = Split <axis = 1> (x)"
CASES: dict[str, str] = {
    "Sign": "y = Sign(x)",
    "Floor": "y = Floor(x)",
    "Ceil": "y = Ceil(x)",
    "Round": "y = Round(x)",
    "Truncate": "i = Cast <to = 7> (x) y = Cast <to = 1> (i)",
    "to bool": "i = Cast <to = 9> (x) y = Cast <to = 1> (i)",
    "Sign of a sum": "w = Constant <value = float {0.25}> () s = Sign(x) t = Add(s, w) y = Sign(t)",
    "Greater": f"{HALVES} c = Greater(a, b) y = Cast <to = 1> (c)",
    "Less": f"{HALVES} c = Less(a, b) y = Cast <to = 1> (c)",
    "GreaterOrEqual": f"{HALVES} c = GreaterOrEqual(a, b) y = Cast <to = 1> (c)",
    "LessOrEqual": f"{HALVES} c = LessOrEqual(a, b) y = Cast <to = 1> (c)",
    "Equal": f"{HALVES} c = Equal(a, b) y = Cast <to = 1> (c)",
    "whole Greater": f"{HALVES} i = Cast <to = 6> (a) j = Cast <to = 6> (b) c = Greater(i, j) y = Cast <to = 1> (c)",
    "whole Equal": f"{HALVES} i = Cast <to = 7> (a) j = Cast <to = 7> (b) c = Equal(i, j) y = Cast <to = 1> (c)",
    "truth": f"""{HALVES} z = Constant <value = float {{0.0}}> () p = Greater(a, z) q = Less(b, z) n = Not(p)
        c = And(n, q) d = Or(p, q) e = Xor(c, d) f = And(d, p) g = Concat <axis = 1> (c, d, e, f)
        y = Cast <to = 1> (g)""",
    "Where of constants": """k = Constant <value = float[2] {0.5, -3.0}> () z = Constant <value = float {0.1}> ()
        s = ReduceSum(x, h) c = Greater(s, z) y = Where(c, k, z)""",
    "ArgMax": "i = ArgMax <axis = 1> (x) y = Cast <to = 1> (i)",
    "last ArgMax": "i = ArgMax <axis = 1, select_last_index = 1> (x) y = Cast <to = 1> (i)",
    "ArgMin": "i = ArgMin <axis = -1, keepdims = 0> (x) j = Cast <to = 1> (i) y = Unsqueeze(j, h)",
    "last ArgMin": "i = ArgMin <axis = 1, select_last_index = 1> (x) y = Cast <to = 1> (i)",
    "ArgMax of an increasing function": "t = Tanh(x) i = ArgMax <axis = 1> (t) y = Cast <to = 1> (i)",
    "OneHot": """r = Round(x) i = Cast <to = 7> (r) d = Constant <value = int64 {3}> ()
        v = Constant <value = float[2] {-1.0, 2.0}> () y = OneHot(i, d, v)""",
    "a count": f"{HALVES} c = Equal(a, b) i = Cast <to = 7> (c) y = ReduceSum(i, h)",
}
WHOLE = ("a count",)


def network(body: str, kind: str = "float") -> Network:
    output = f"{kind}[n, m, k] y" if "OneHot" in body else f"{kind}[n, m] y"
    head = f'<ir_version: 8, opset_import: ["": 16]> g (float[1, 4] x) => ({output}) <int64[1] h = {{1}}>'
    model = onnx.parser.parse_model(f"{head} {{ {body} }}")
    return read_onnx(model.SerializeToString())


NETWORKS: dict[str, Network] = {}


def of(name: str) -> Network:
    if name not in NETWORKS:
        NETWORKS[name] = network(CASES[name], "int64" if name in WHOLE else "float")
    return NETWORKS[name]


@pytest.mark.parametrize("name", CASES)
def test_values_and_bounds(name: str) -> None:
    """At points on the jumps and beside them: the file, both evaluations, and bounds over boxes about them."""
    net, rng = of(name), np.random.default_rng(0)
    points = np.concatenate([rng.integers(-5, 6, (20, 4)) / 2, rng.normal(size=(8, 4)) * 2]).astype(np.float32)
    rational = [[Fraction(float(v)) for v in x] for x in points]
    found = [exact.exact_outputs(net, x) for x in rational]
    for x, point, y in zip(points, rational, found, strict=True):
        assert np.array_equal(replay(net, x).astype(np.float64), [float(v) for v in y])
        if evaluable(net):
            assert evaluate_exact(net, point) == y
        about = enclose(net, point)
        assert (np.abs(about.value - [float(v) for v in y]) <= about.error).all()
    rows = torch.cat([torch.eye(net.output_size), -torch.eye(net.output_size)]).double()
    for first, second in zip(points[:14], points[14:], strict=True):
        ends = np.minimum(first, second), np.maximum(first, second)
        wide = net.to(torch.float64)
        box = Bounds(*(torch.from_numpy(end).double().reshape(1, 4) for end in ends))
        lower = crown_relaxation(wide, box).lower(len(net.nodes) - 1, rows, torch.zeros(len(rows), dtype=torch.long))
        inside = [y for x, y in zip(points, found, strict=True) if (ends[0] <= x).all() and (x <= ends[1]).all()]
        # Rounding may take a sum beyond an end.
        drawn = np.clip(ends[0] + (ends[1] - ends[0]) * rng.integers(0, 5, (12, 4)).astype(np.float32) / 4, *ends)
        for y in (*inside, *(exact.exact_outputs(net, [Fraction(float(v)) for v in x]) for x in drawn)):
            values = rows @ torch.tensor([float(v) for v in y], dtype=torch.float64)
            assert bool((lower[0] <= values).all())


REFUSED = {
    "i = Cast <to = 7> (x) k = Cast <to = 7> (x) j = Div(i, k) y = Cast <to = 1> (j)": "of computed whole numbers",
    "i = Cast <to = 7> (x) j = ReduceMean(i) y = Cast <to = 1> (j)": "of computed whole numbers",
    "i = Cast <to = 2> (x) y = Cast <to = 1> (i)": "casts a computed value to another type",
}


@pytest.mark.parametrize(("body", "reason"), REFUSED.items())
def test_what_means_something_else_of_whole_numbers_is_refused(body: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        network(body)


def query(net: Graph, bound: float) -> Query:
    """Whether the first output can be at most a number."""
    box = Box(np.full(4, -1.0), np.full(4, 1.0))
    return Query(net, Property(box, ((row({0: 1}, Fraction(bound)),),)))


@pytest.mark.parametrize(("most", "verdict"), [(46_000.0, Verdict.UNSAT), (1e5, Verdict.UNKNOWN)])
def test_nothing_is_proved_where_32_bits_may_wrap_around(most: float, verdict: Verdict) -> None:
    """The square of a whole number is below 0 in onnxruntime where it exceeds 2³¹."""
    net = network("i = Cast <to = 6> (x) j = Mul(i, i) y = Cast <to = 1> (j)")
    assert replay(net, np.full(4, 50_000, np.float32))[0] < 0
    box = Box(np.zeros(4), np.full(4, most))
    (found,) = answers(Crown(), [Query(net, Property(box, ((row({0: 1}, Fraction(-1)),),)))])
    assert found.verdict is verdict


VALLEY = f"""{HALVES} z = Constant <value = float {{0.5}}> () d = Sub(a, b) s = Sign(d) e = Sub(z, d) t = Sign(e)
    y = Add(s, t)"""


def test_splitting_inputs_decides_what_no_line_does() -> None:
    """sign(d) + sign(1/2 − d) is never below 0, and 0 for most d; neurons that jump are not split."""
    net = network(VALLEY)
    assert not Bab().takes(net) and not net.piecewise_linear
    (no,) = claims(Auto(), [query(net, -0.5)], 20.0)
    assert no.verdict is Verdict.UNSAT and no.method == "split"
    (yes,) = claims(Auto(), [query(net, 0.0)], 20.0)
    assert yes.verdict is Verdict.SAT and yes.witness is not None
    assert confirm(query(net, 0.0), yes.witness).confirmed


def test_the_attack_goes_where_steps_lead() -> None:
    """Of 2^4 corners one makes all four signs 1, and hardly a point does that is drawn at random."""
    net = network(
        "k = Constant <value = float[4] {0.9, -0.9, 0.9, 0.9}> () d = Sub(x, k) s = Sign(d) y = ReduceSum(s, h)"
    )
    turned = Query(net, Property(query(net, 0.0).property.box, ((row({0: -1}, Fraction(-4)),),)))
    (found,) = claims(Attack(), [turned], 20.0)
    assert found.verdict is Verdict.SAT and found.witness is not None
    assert confirm(turned, found.witness).confirmed
