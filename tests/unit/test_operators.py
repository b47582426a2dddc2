"""Operators of files: values against onnxruntime and fractions, intervals and rows, and what methods decide."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import numpy as np
import onnx.parser
import pytest
import torch
from onnx.helper import make_node as node

from tests.support.asking import claims
from tests.support.exact import exact_outputs
from tests.support.nets import as_fractions
from tests.support.onnx_files import onnx_file
from tests.support.solver_cases import row
from verifiable_relu.bounds.backward import Relaxation
from verifiable_relu.bounds.linear_bounds import bound_by_crown, lower_of_rows
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.execution.replay import replay
from verifiable_relu.ir.enclosure import enclose
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Affine, Network
from verifiable_relu.readers import read_onnx
from verifiable_relu.search.batch import answers
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Reason, Verdict
from verifiable_relu.search.portfolio import Auto
from verifiable_relu.search.registry import make
from verifiable_relu.search.split import InputSplit
from verifiable_relu.spec.property import Box, Property, Query

HALVES = "a, b = Split <axis = 1> (x)"
JUMPING: dict[str, str] = {
    "Sign": "y = Sign(x)",
    "Floor": "y = Floor(x)",
    "Ceil": "y = Ceil(x)",
    "Round": "y = Round(x)",
    "Truncate": "i = Cast <to = 7> (x) y = Cast <to = 1> (i)",
    "to bool": "i = Cast <to = 9> (x) y = Cast <to = 1> (i)",
    "Sign of a sum": "w = Constant <value = float {0.25}> () s = Sign(x) t = Add(s, w) y = Sign(t)",
    "Greater": f"{HALVES} c = Greater(a, b) y = Cast <to = 1> (c)",
    "LessOrEqual": f"{HALVES} c = LessOrEqual(a, b) y = Cast <to = 1> (c)",
    "Equal": f"{HALVES} c = Equal(a, b) y = Cast <to = 1> (c)",
    "whole Greater": f"{HALVES} i = Cast <to = 6> (a) j = Cast <to = 6> (b) c = Greater(i, j) y = Cast <to = 1> (c)",
    "truth": f"""{HALVES} z = Constant <value = float {{0.0}}> () p = Greater(a, z) q = Less(b, z) n = Not(p)
        c = And(n, q) d = Or(p, q) e = Xor(c, d) f = And(d, p) g = Concat <axis = 1> (c, d, e, f)
        y = Cast <to = 1> (g)""",
    "Where of constants": """k = Constant <value = float[2] {0.5, -3.0}> () z = Constant <value = float {0.1}> ()
        s = ReduceSum(x, h) c = Greater(s, z) y = Where(c, k, z)""",
    "ArgMax": "i = ArgMax <axis = 1> (x) y = Cast <to = 1> (i)",
    "last ArgMin": "i = ArgMin <axis = 1, select_last_index = 1> (x) y = Cast <to = 1> (i)",
    "ArgMax of an increasing function": "t = Tanh(x) i = ArgMax <axis = 1> (t) y = Cast <to = 1> (i)",
    "OneHot": """r = Round(x) i = Cast <to = 7> (r) d = Constant <value = int64 {3}> ()
        v = Constant <value = float[2] {-1.0, 2.0}> () y = OneHot(i, d, v)""",
    "Slice from a number that is gathered": """i = Cast <to = 7> (x) a, k, rest = Split <axis = 1> (x, parts)
        f = Cast <to = 7> (a) o = Constant <value = int64 {0}> () w = Constant <value = int64 {1}> () n = Clip(f, o, w)
        p = Squeeze(n, h) g = Gather <axis = 1> (i, p) s = Squeeze(g, h) e = Constant <value = int64[1] {9}> ()
        d = Constant <value = float[6] {1.0, 2.0, 4.0, 8.0, 16.0, 32.0}> () l = Slice(d, s, e) t = ReduceSum(l)
        y = Mul(t, rest)""",
}
TABLE = """i, k, rest = Split <axis = 1> (x, parts) f = Cast <to = 7> (i) low = Constant <value = int64 {0}> ()
    top = Constant <value = int64 {3}> () q = Clip(f, low, top)
    c = Constant <value = float[4, 2] {3.0, -1.0, 0.5, 2.0, -4.0, 1.5, 7.0, -2.5}> ()"""
TABLES: dict[str, str] = {
    "Gather of a constant": f"{TABLE} g = Gather <axis = 0> (c, q) z = Squeeze(g, h) y = Mul(z, rest)",
    "Gather of a computed tensor": f"""{TABLE} one = Constant <value = int64 {{1}}> () n = Clip(f, low, one)
        p = Squeeze(n, h) g = Gather <axis = 1> (rest, p) y = Mul(g, rest)""",
}
SMOOTH: dict[str, str] = {
    "product": f"{HALVES} y = Mul(a, b)",
    "product of a value with itself": "y = Mul(x, x)",
    "quotient": f"""{HALVES} s = Mul(b, b) w = Constant <value = float {{0.5}}> () d = Add(s, w) y = Div(a, d)""",
    "matrices": "s = Reshape(x, m) p = MatMul(s, s) y = Reshape(p, u)",
    "softmax": "y = Softmax <axis = 1> (x)",
    "one minus softmax": "w = Constant <value = float {1.0}> () s = Softmax <axis = 1> (x) d = Sub(w, s) y = Sqrt(d)",
    "log softmax": "y = LogSoftmax <axis = 1> (x)",
    "attention": """s = Reshape(x, m) p = Transpose <perm = [1, 0]> (s) q = MatMul(s, p) r = Softmax <axis = -1> (q)
        v = MatMul(r, s) y = Reshape(v, u)""",
    "norm": "s = Mul(x, x) d = ReduceSum(s, h) y = Sqrt(d)",
    "root of |x|": "s = Abs(x) y = Sqrt(s)",
    "power 1.5 of relu": "w = Constant <value = float {1.5}> () r = Relu(x) y = Pow(r, w)",
    "cube": "w = Constant <value = float {3.0}> () y = Pow(x, w)",
    "log-sum-exp": "e = Exp(x) s = ReduceSum(e, h) y = Log(s)",
    "reciprocal of 1 + relu": "w = Constant <value = float {1.0}> () r = Relu(x) d = Add(r, w) y = Reciprocal(d)",
}


@cache
def network(body: str) -> Network:
    output = "float[n, m, k] y" if "OneHot" in body else "float[n, m] y"
    stored = "int64[1] h = {1}, int64[2] m = {2, 2}, int64[2] u = {1, 4}, int64[3] parts = {1, 1, 2}"
    head = f'<ir_version: 8, opset_import: ["": 16]> g (float[1, 4] x) => ({output}) <{stored}>'
    return read_onnx(onnx.parser.parse_model(f"{head} {{ {body} }}").SerializeToString())


@dataclass(frozen=True)
class Known:
    """Points, and the exact outputs there."""

    points: np.ndarray
    outputs: list[list[Fraction]]


@cache
def known(name: str) -> Known:
    net, rng = network({**JUMPING, **TABLES, **SMOOTH}[name]), np.random.default_rng(0)
    points = np.concatenate([rng.integers(-5, 6, (14, 4)) / 2, rng.normal(size=(14, 4)) * 2]).astype(np.float32)
    if name in TABLES:
        points[:, 0] = rng.uniform(0, 3.9, 28)
    return Known(points, [exact_outputs(net, as_fractions(x)) for x in points])


@pytest.mark.parametrize("name", [*JUMPING, *TABLES, *SMOOTH])
def test_values_are_those_of_onnxruntime_and_enclosed(name: str) -> None:
    net, given = network({**JUMPING, **TABLES, **SMOOTH}[name]), known(name)
    for x, y in zip(given.points, given.outputs, strict=True):
        true = np.array([float(v) for v in y])
        np.testing.assert_allclose(replay(net, x), true, rtol=1e-4, atol=0 if name in JUMPING else 1e-4)
        found = enclose(net, as_fractions(x))
        assert (np.abs(found.value - true) <= found.error + 1e-15 * np.abs(true)).all()


@pytest.mark.parametrize("name", [*JUMPING, *TABLES, *SMOOTH])
@torch.no_grad()
def test_bounds_hold_at_points_of_boxes(name: str) -> None:
    net, given, rng = network({**JUMPING, **TABLES, **SMOOTH}[name]), known(name), np.random.default_rng(1)
    rows = torch.cat([torch.eye(net.output_size), -torch.eye(net.output_size)]).double()
    first, second = given.points[:14], given.points[14:]
    ends = np.minimum(first, second).astype(float), np.maximum(first, second).astype(float)
    box = Interval(*(torch.from_numpy(end) for end in ends))
    drawn = np.clip(ends[0] + (ends[1] - ends[0]) * rng.integers(0, 5, (3, 14, 4)) / 4, *ends)
    values = [[exact_outputs(net, as_fractions(x)) for x in drawn[:, sample]] for sample in range(14)]
    for sample, (low, high) in enumerate(zip(*ends, strict=True)):
        inside = ((low <= given.points) & (given.points <= high)).all(1)
        values[sample] += [y for y, within in zip(given.outputs, inside, strict=True) if within]
    for dtype in (torch.float64, torch.float32):
        relaxation = bound_by_crown(Relaxation(net, box, dtype=dtype))
        lower = lower_of_rows(relaxation, rows.repeat(14, 1))[0].view(14, -1).tolist()
        interval = relaxation.bounds[-1].interval
        for sample in range(14):
            low, high = interval.lower[sample].tolist(), interval.upper[sample].tolist()
            for y in values[sample]:
                assert all(not a > v and not b < v for a, v, b in zip(low, y, high, strict=True))
                signed = [*y, *(-v for v in y)]
                assert all(not bound > v for bound, v in zip(lower[sample], signed, strict=True))


@pytest.mark.parametrize("name", ["softmax", "norm", "root of |x|", "power 1.5 of relu"])
def test_what_is_never_negative_has_bounds_of_a_domain(name: str) -> None:
    """A root, a logarithm or a power may follow, of which nothing would be known if an end were a little below 0."""
    net = network(SMOOTH[name])
    for width in (0.0, 1e-3, 100.0):
        box = Interval(torch.full((1, 4), -width).double(), torch.full((1, 4), width).double())
        found = bound_by_crown(Relaxation(net, box)).bounds[-1].interval
        assert bool(((found.lower >= -1e-9) & found.upper.isfinite()).all())
        assert "softmax" not in name or float(found.upper.max()) <= 1 + 1e-12


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (0.0, 1.0), (-1.0, 0.0), (0.0, 0.0), (-1e-300, 1e300)])
def test_of_a_quotient_nothing_is_known_where_the_divisor_may_be_zero(low: float, high: float) -> None:
    net = network("y = Reciprocal(x)")
    box = Interval(*(torch.full((1, 4), end, dtype=torch.float64) for end in (low, high)))
    relaxation = bound_by_crown(Relaxation(net, box))
    found = relaxation.bounds[-1].interval
    assert not bool((found.lower > -1e6).any() | (found.upper < 1e6).any())
    rows = torch.cat([torch.eye(4), -torch.eye(4)]).double()
    assert not bool((lower_of_rows(relaxation, rows)[0] > -1e6).any())


@pytest.mark.parametrize("name", TABLES)
def test_whole_values_have_whole_ends_and_are_split_so(name: str) -> None:
    net = network(TABLES[name])
    box = Interval(*(torch.tensor([[a, 0.5, 0.5, 0.75]]).double() for a in (0.25, 2.5)))
    relaxation = Relaxation(net, box).advance()
    for index in net.whole:
        x = relaxation.bounds[index].interval
        assert torch.equal(x.lower, x.lower.round()) and torch.equal(x.upper, x.upper.round())
    assert net.whole and {int(v) for places in net.integer_inputs.values() for v in places} <= {0}
    points = [(Fraction(i), Fraction(1, 2), Fraction(1, 2), Fraction(3, 4)) for i in range(3)]
    least = min(exact_outputs(net, x)[0] for x in points)
    asked = Box(*(end[0].numpy() for end in (box.lower, box.upper)))
    for bound, verdict in ((least - Fraction(1, 100), Verdict.UNSAT), (least + Fraction(1, 100), Verdict.SAT)):
        query = Query(net, Property(asked, ((row({0: 1}, bound),),)))
        for method in (InputSplit(), Auto()):
            assert answers(method, [query], TimeBudget(20.0))[0].verdict is verdict


REFUSED = {
    "i = Cast <to = 7> (x) k = Cast <to = 7> (x) j = Div(i, k) y = Cast <to = 1> (j)": "on computed whole numbers",
    "i = Cast <to = 7> (x) j = ReduceMean(i) y = Cast <to = 1> (j)": "on computed whole numbers",
    "i = Cast <to = 2> (x) y = Cast <to = 1> (i)": "casts a computed value to another type",
    "w = Constant <value = float {99.0}> () y = Pow(x, w)": "the exponent 99",
}


@pytest.mark.parametrize(("body", "reason"), REFUSED.items())
def test_what_means_something_else_is_refused(body: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        network(body)


def query(net: Network, bound: float, reach: float = 1.0, low: float | None = None) -> Query:
    """Whether the first output can be at most a number."""
    box = Box(np.full(4, -reach if low is None else low), np.full(4, reach))
    return Query(net, Property(box, ((row({0: 1}, Fraction(bound)),),)))


@pytest.mark.parametrize(("most", "verdict"), [(46_000.0, Verdict.UNSAT), (1e5, Verdict.UNKNOWN)])
def test_nothing_is_proved_where_32_bits_may_wrap_around(most: float, verdict: Verdict) -> None:
    """The square of a whole number is below 0 in onnxruntime where it exceeds 2³¹."""
    net = network("i = Cast <to = 6> (x) j = Mul(i, i) y = Cast <to = 1> (j)")
    assert replay(net, np.full(4, 50_000, np.float32))[0] < 0
    assert answers(make("crown"), [query(net, -1, most, 0.0)])[0].verdict is verdict


def test_splitting_inputs_decides_what_no_line_does() -> None:
    """sign(d) + sign(1/2 − d) is never below 0, and 0 for most d; neurons that jump are not split."""
    net = network(f"""{HALVES} z = Constant <value = float {{0.5}}> () d = Sub(a, b) s = Sign(d) e = Sub(z, d)
        t = Sign(e) y = Add(s, t)""")
    no, yes = answers(Auto(), [query(net, -0.5), query(net, 0.0)], TimeBudget(20.0))
    assert (no.verdict, no.method, yes.verdict) == (Verdict.UNSAT, "split", Verdict.SAT)


@pytest.mark.parametrize("method", ["bab", "milp", "smt", "smt-exact", "auto", "crown", "split"])
def test_products_are_decided_by_bounds_and_refused_by_methods_of_phases(method: str) -> None:
    net = network(SMOOTH["product"])
    high, low = claims(make(method), [query(net, bound, 1.5, 1.0) for bound in (1.5, 0.5)], 10.0)
    if method in ("auto", "crown", "split"):
        assert low.verdict is Verdict.UNSAT
        assert high.verdict is (Verdict.UNKNOWN if method == "crown" else Verdict.SAT)
    elif low.verdict is Verdict.UNKNOWN:
        assert low.reason is Reason.UNSUPPORTED and "piecewise-linear" in low.detail


def test_a_jump_at_a_whole_number_that_is_computed_is_known() -> None:
    """At x₀ = 3, 1/3 + … is not known to be whole, but 1·x₀ − 3 is 0, at which the sign is 0."""
    net = network("""k = Constant <value = float[4] {3.0, 1.0, -2.0, 0.0}> () f = Floor(x) d = Sub(f, k) s = Sign(d)
        y = ReduceSum(s, h)""")
    box = Interval(*(torch.tensor([[3.25, 1.5, -1.75, 0.5]]).double() for _ in range(2)))
    found = bound_by_crown(Relaxation(net, box)).bounds[-1].interval
    assert float(found.lower) == float(found.upper) == 0


@pytest.mark.parametrize("opset", [11, 13])
def test_axes_need_not_be_sorted_where_constants_get_or_lose_them(opset: int) -> None:
    axes = np.array([3, 0])
    more = ["a"] if opset > 11 else []
    named: dict[str, np.ndarray] = {} if more else {"axes": axes}
    nodes = [
        node("Unsqueeze", ["k", *more], ["wide"], **named),
        node("Squeeze", ["wide", *more], ["narrow"], **named),
        node("Unsqueeze", ["narrow", *more], ["again"], **named),
        node("Add", ["x", "again"], ["y"]),
    ]
    shape = [1, 2, 3, 1, 4]
    data = onnx_file(nodes, {"x": shape}, {"y": shape}, opset=opset, k=np.arange(24.0).reshape(2, 3, 4), a=axes)
    found = read_onnx(data)(torch.zeros(1, 24, dtype=torch.float64))
    assert found.tolist() == [list(range(24))]


TENTHS = [[Fraction(float(np.float32(0.1 * (3 * i + j + 1)))) for j in range(3)] for i in range(2)]
FIRST = TENTHS[0]


@pytest.mark.parametrize(
    ("made", "others", "expected"),
    [
        (node("ReduceSum", ["c", "o0"], ["k"]), [[]], sum(map(sum, TENTHS))),
        (node("ReduceMean", ["c"], ["k"], axes=[1]), [], sum(FIRST) / 3),
        (node("ReduceSumSquare", ["c"], ["k"]), [], sum(v * v for row in TENTHS for v in row)),
        (node("Gemm", ["c", "o0", "o1"], ["k"], alpha=0.5), [[[3.0], [1.0], [2.0]], [7.0]],
         (3 * FIRST[0] + FIRST[1] + 2 * FIRST[2]) / 2 + 7),
        (node("Pow", ["c", "o0"], ["k"]), [3.0], FIRST[0] ** 3),
        (node("Pow", ["c", "o0"], ["k"]), [0.0], Fraction(1)),
        (node("Clip", ["c", "o0"], ["k"]), [0.25], Fraction(1, 4)),
        (node("Div", ["c", "o0"], ["k"]), [3.0], FIRST[0] / 3),
    ],
    ids=lambda value: getattr(value, "op_type", ""),
)  # fmt: skip
def test_constants_are_computed_as_fractions(made: onnx.NodeProto, others: list[object], expected: Fraction) -> None:
    stored = {f"o{i}": np.asarray(other, np.int64 if other == [] else np.float32) for i, other in enumerate(others)}
    nodes = [made, node("Flatten", ["k"], ["f"], axis=0), node("Gather", ["f", "zero"], ["g"], axis=1)]
    data = onnx_file(
        [*nodes, node("Mul", ["x", "g"], ["y"])], {"x": [1, 1]}, {"y": [1, 1]}, opset=13, zero=[0], c=TENTHS, **stored
    )
    factor = read_onnx(data).ops[1]
    assert isinstance(factor, Affine)
    found, error = Fraction(float(factor.map.weight.double())), Fraction(factor.weight_error)
    assert abs(found - expected) <= error * abs(found) <= abs(found) / 2**51
