"""The flat network against the graph network that it is made of: exactly, to within proved errors, and in torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import nets
from tests.support.draws import draws
from tests.support.exact import exact_outputs
from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.ir.enclosure import enclose, find_difference, formats, sample_points
from verifiable_relu.ir.exact import evaluate_exact, is_evaluable, multiplications
from verifiable_relu.ir.flatten import flatten
from verifiable_relu.ir.functions.hardened import Hardened
from verifiable_relu.ir.functions.kinked import Kinked
from verifiable_relu.ir.functions.smooth import Smooth
from verifiable_relu.ir.functions.steps import StepFunction
from verifiable_relu.ir.linear import Dense, Diagonal, Gather
from verifiable_relu.ir.network import Affine, Elementwise, Input, Maximum, Network, Op, Product, Source, Sum, live
from verifiable_relu.network import graph, nodes
from verifiable_relu.network.agreement import parting
from verifiable_relu.network.build import Builder
from verifiable_relu.network.product import NetworkPart, product
from verifiable_relu.trust.enclose import enclose as enclose_graph
from verifiable_relu.trust.exact import evaluate_exact as evaluate_graph


def polynomials(rng: np.random.Generator, draw: nets.Weights) -> graph.Network:
    """Products of numbers and of matrices, of permuted inputs and of each other, with ReLUs between them."""
    chain = nets.Chain((2, 4))
    turned = chain.add(nodes.Permute, (4, 2), axes=(1, 0))
    square = chain.add(nodes.MatMul, (4, 4), turned, 0, inner=2)
    sums = chain.linear(draw((3, 4), 4), draw((3,), 4), square)
    other = chain.linear(draw((3, 4), 4), draw((3,), 4), chain.add(nodes.Relu, (4, 4), square))
    chain.add(nodes.Add, (4, 3), chain.add(nodes.Product, (4, 3), sums, other), sums)
    return chain.network("polynomials")


def divisions(rng: np.random.Generator, draw: nets.Weights) -> graph.Network:
    """Constants subtracted, multiplied and added, and divisions by numbers whose reciprocals are rounded."""
    build = Builder((2, 3))
    x = build.scale(0, "normalise", center=draw((1, 3), 1), scale=draw((2, 1), 1), shift=draw((2, 3), 1))
    x = build.quotient(x, "twelfths", torch.tensor([[12.0], [0.7]]))
    x = build.activation(x, nodes.Relu, "relu")
    x = build.scale(build.quotient(x, "sevenths", torch.tensor(-7.0)), "moved", shift=torch.tensor(0.25))
    return build.network(build.scale(x, "negative", scale=torch.tensor(-1.0)), name="divisions")


Make = Callable[[np.random.Generator, nets.Weights], graph.Network]
MAKE: dict[str, Make] = {
    **{f"pieces {i}": lambda rng, draw, i=i: nets.pieces(rng, draw)[i] for i in range(7)},  # type: ignore[misc]
    **{make.__name__: make for make in (nets.windows, nets.maxima, nets.extremes, polynomials, divisions)},
}
over_networks = pytest.mark.parametrize("name", MAKE)


def point(rng: np.random.Generator, size: int) -> list[Fraction]:
    return [
        Fraction(int(n), int(d)) for n, d in zip(rng.integers(-99, 99, size), rng.integers(1, 50, size), strict=True)
    ]


@over_networks
@pytest.mark.parametrize("seed", range(draws(8)))
def test_values_are_those_of_the_graph(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    draw = (nets.gaussian, nets.eighths, nets.uneven)[seed % 3](rng)
    network = MAKE[name](rng, draw)
    flat, x = flatten(network), point(rng, network.input_size)
    exact = evaluate_exact(flat, x)
    assert exact == (evaluate_graph(network, x) if name == "divisions" else exact_outputs(network, x))
    assert is_evaluable(flat) and multiplications(flat) > 0
    points = torch.from_numpy(rng.normal(size=(5, network.input_size)))
    expected = network(points.reshape(5, *network.input_shape)).flatten(1)
    torch.testing.assert_close(flat(points), expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))
    for dtype in formats(flat):
        found, before = enclose(flat, x, dtype), enclose_graph(network, x, dtype)
        pairs = zip(exact, found.value, found.error, strict=True)
        assert all(abs(t - Fraction(*y.as_integer_ratio())) <= Fraction(*e.as_integer_ratio()) for t, y, e in pairs)
        # What was one node is rounded twice: a matrix product of computed values, and a Scale with a centre.
        assert (
            found.error <= {"polynomials": 3, "pieces 2": 1.3, "divisions": 1.3}.get(name, 1.01) * before.error
        ).all()


@pytest.mark.parametrize("error", [0.0, 1e-6])
def test_numbers_that_are_off_are_bounded(error: float) -> None:
    """Numbers within the errors of a Scale have outputs within those of the flat ops."""
    rng = np.random.default_rng(0)
    center, scale, shift = (torch.from_numpy(rng.normal(size=3)) for _ in range(3))
    kind = {"inputs": (0,), "shape": (3,), "weight_error": error, "offset_terms": 0.5 if error else 0.0}
    node = nodes.Scale(name="s", center=center, scale=scale, shift=shift, **kind)  # type: ignore[arg-type]
    flat = flatten(graph.Network((nodes.Input(name="x", inputs=(), shape=(3,)), node)))
    assert is_evaluable(flat) == (not error)
    if error:
        ops, exact = [op for op in flat.ops if isinstance(op, Affine)], Fraction(error)
        assert [op.weight_error for op in ops] == [0, error]
        # Where a runtime rounds, the products of the scale with x and with the center are off by different numbers.
        apart = (scale * center).tolist()
        for op, stored, terms in zip(ops, (center, shift), (0, 1), strict=True):
            assert op.bias_error is not None
            for found, b, more in zip(op.bias_error.tolist(), stored.tolist(), apart, strict=True):
                true = exact * (abs(Fraction(b)) + terms * (Fraction(1, 2) + abs(Fraction(more))))
                assert true <= Fraction(found) <= true * (1 + Fraction(1, 10**12))
    x = point(rng, 3)
    found = enclose(flat, x)
    for signs in np.array(np.meshgrid(*[[-1, 1]] * 3)).reshape(3, -1).T if error else [(0, 0, 0)]:
        true_center, true_scale, true_shift = (
            [Fraction(v) * (1 + sign * Fraction(error)) for v in part.tolist()]
            for sign, part in zip(map(int, signs), (center, scale, shift), strict=True)
        )
        for i in range(3):
            true = true_scale[i] * (x[i] - true_center[i]) + true_shift[i]
            for more in (-1, 0, 1):
                off = true + more * Fraction(error) / 2 - Fraction(float(found.value[i]))
                assert abs(off) <= Fraction(float(found.error[i]))


def affine(name: str, source: int, of: Dense | Diagonal | Gather, bias: Tensor | None = None) -> Affine:
    return Affine(name=name, inputs=(source,), size=of.n_out, map=of, bias=bias)


def network(*ops: Op) -> Network:
    return Network((Input(name="x", size=2), *ops), Source((2,), (ops[-1].size,)))


@pytest.mark.parametrize("seed", range(draws(16)))
def test_errors_are_passed_on(seed: int) -> None:
    """Exact values of networks whose numbers are off by as much as they may be lie within the errors."""
    rng = np.random.default_rng(seed)
    weight, bias = torch.from_numpy(rng.normal(size=(4, 4))), torch.from_numpy(rng.normal(size=4))
    off, error = torch.from_numpy(rng.uniform(0, 0.1, 4)), float(rng.choice([0, 2.0**-7]))
    candidates = torch.from_numpy(rng.integers(0, 4, size=(3, 4)))

    def made(sign: Tensor, exactly: bool) -> list[Op]:
        """Each sign is that of an error of a row, or of its bias."""
        rows = Dense(weight * (1 + error * sign[:4, None]) if exactly else weight)
        sizes = {} if exactly else {"weight_error": error, "bias_error": off}
        first = Affine(name="a", inputs=(0,), size=4, map=rows, bias=bias + off * sign[4:] * exactly, **sizes)  # type: ignore[arg-type]
        return [Input(name="x", size=4), first]

    rest: dict[str, Op] = {
        "maximum": Maximum(name="y", inputs=(1,), size=4, candidates=candidates),
        "product": Product(name="y", inputs=(1, 0), size=4),
        "square": Product(name="y", inputs=(1, 1), size=4),
        "sum": Sum(name="y", inputs=(1, 0, 1), size=4),
        "leaky": Elementwise(name="y", inputs=(1,), size=4, function=Kinked(torch.tensor(-3.0))),
        "dense": affine("y", 1, Dense(weight)),
        "moved": affine("y", 1, Gather(torch.tensor([3, -1, 0, 3]), 4), torch.tensor([0.0, 1.0, 0.0, 0.0])),
    }
    x = [Fraction(float(v)) for v in rng.normal(size=4)]
    for name, op in rest.items():
        source = Source((4,), (4,))
        found = enclose(Network((*made(torch.zeros(8), False), op), source), x)
        for _ in range(8):
            sign = torch.from_numpy(rng.choice([-1.0, 1.0], size=8))
            true = evaluate_exact(Network((*made(sign, True), op), source), x)
            for t, y, e in zip(true, found.value.tolist(), found.error.tolist(), strict=True):
                assert abs(t - Fraction(y)) <= Fraction(e) + Fraction(1, 10**14), name


def small() -> Network:
    """max(relu(x), x₀·x₁), element by element, of a padded concatenation."""
    return network(
        affine("w", 0, Dense(torch.tensor([[1.0, -2.0], [3.0, 0.5]])), torch.tensor([0.5, 1.0])),
        Elementwise(name="r", inputs=(1,), size=2, function=Kinked()),
        affine("turned", 0, Gather(torch.tensor([1, 0]), 2)),
        Product(name="p", inputs=(0, 3), size=2),
        affine("first", 2, Gather(torch.tensor([0, 1, -1, -1]), 2)),
        affine("second", 4, Gather(torch.tensor([-1, -1, 0, 1]), 2)),
        Sum(name="both", inputs=(5, 6), size=4),
        Maximum(name="m", inputs=(7,), size=2, candidates=torch.tensor([[0, 1], [2, 3]])),
    )


def test_a_digest_follows_every_number_and_the_wiring() -> None:
    ops = small().ops
    assert small().digest == small().digest
    one = [network(affine("w", 0, Dense(torch.ones(1, 2)), bias)) for bias in (torch.ones(1), torch.ones(()).expand(1))]
    assert one[0].digest == one[1].digest
    assert replace(small(), name="other").digest == small().digest
    changes: list[tuple[int, dict[str, object]]] = [
        (1, {"map": Dense(torch.tensor([[1.0, -2.0], [3.0, 0.5000001]]))}),
        (1, {"map": Dense(torch.tensor([[1.0, -2.0], [3.0, 0.5]]).double())}),
        (1, {"bias": None}),
        (1, {"weight_error": 1e-9}),
        (1, {"bias_error": torch.zeros(2)}),
        (2, {"function": Kinked(torch.tensor(0.1))}),
        (2, {"inputs": (0,)}),
        (3, {"map": Gather(torch.tensor([0, 1]), 2)}),
        (3, {"map": Diagonal(torch.ones(2))}),
        (3, {"map": Diagonal(torch.ones(2), torch.ones(2))}),
        (8, {"candidates": torch.tensor([[0, 1], [3, 2]])}),
    ]
    digests = {small().digest}
    for index, change in changes:
        changed = [*ops]
        changed[index] = replace(ops[index], **change)  # type: ignore[arg-type]
        digests.add(replace(small(), ops=tuple(changed)).digest)
    assert len(digests) == len(changes) + 1


def test_what_bounds_and_searches_ask_of_a_network() -> None:
    net = small()
    assert (net.input_size, net.output_size, net.activations, net.uses[0]) == (2, 2, (2,), 3)
    assert net.widest == (4, 4, 4, 4, 4, 4, 4, 4, 2)
    assert net.curved is net.ops[4] and not net.piecewise_linear and net.limit is net
    ops, number = live(net.ops, 6)
    assert [op.name for op in ops] == ["x", "turned", "p", "second"] and number == {0: 0, 3: 1, 4: 2, 6: 3}
    shorter = replace(net, ops=ops)
    x = torch.tensor([[2.0, 3.0]])
    assert shorter(x).tolist() == [[0.0, 0.0, 6.0, 6.0]] and net(x).tolist() == [[6.0, 8.5]]


def test_whole_numbers_are_those_of_steps_and_what_is_made_of_them() -> None:
    pick = affine("pick", 0, Gather(torch.tensor([2, -1, 0]), 4), torch.tensor([0.0, 0.5, 0.0]))
    floor = Elementwise(name="floor", inputs=(1,), size=3, function=StepFunction("Floor"))
    weight = torch.tensor([[1.0, -2.0, 3.0]])
    ops: list[Op] = [
        Input(name="x", size=4),
        pick,
        floor,
        affine("whole", 2, Dense(weight), torch.tensor([7.0])),
        affine("half", 2, Dense(weight / 2)),
        Elementwise(name="leaky", inputs=(3,), size=1, function=Kinked(torch.tensor(-2.0))),
        Elementwise(name="square", inputs=(5,), size=1, function=Smooth("Square")),
        Elementwise(name="exp", inputs=(6,), size=1, function=Smooth("Exp")),
        affine("other", 0, Gather(torch.tensor([1]), 4)),
        Sum(name="sum", inputs=(4, 7, 8), size=1),
    ]
    net = Network(tuple(ops), Source((4,), (1,)))
    assert net.whole == {2, 3, 5, 6}
    # Input 3 matters nowhere, input 1 in a sum; those that others take, too, are no longer counted.
    assert {kind: places.tolist() for kind, places in net.counted.items()} == {"Floor": [0, 2]}
    for change in (
        {1: replace(pick, bias=torch.tensor([0.5, 0.0, 0.0]))},
        {1: replace(pick, bias_error=torch.zeros(3))},
        {2: replace(floor, function=StepFunction("Sign"))},
        {8: replace(ops[8], map=Dense(torch.ones(1, 4)))},  # type: ignore[call-arg]
    ):
        other = Network(tuple(change.get(i, op) for i, op in enumerate(ops)), net.source)
        assert not other.counted


def test_a_family_is_evaluated_as_its_limit() -> None:
    family = network(Elementwise(name="f", inputs=(0,), size=2, function=Hardened(Smooth("GELU", 3.0))))
    family = replace(family, source=replace(family.source, onnx=b"file"))
    limit = family.limit
    assert limit.source.onnx is None and limit.limit is limit and limit.digest != family.digest
    assert limit.piecewise_linear and not family.piecewise_linear and not is_evaluable(family)
    assert evaluate_exact(limit, [Fraction(-1, 3), Fraction(2, 7)]) == [0, Fraction(2, 7)]
    with pytest.raises(UnsupportedError, match="set of activations"):
        enclose(family, [Fraction(0), Fraction(1)])


def test_networks_beside_each_other_name_their_pairs() -> None:
    rng = np.random.default_rng(0)
    first, second = (nets.mlp(rng, nets.gaussian(rng)) for _ in range(2))
    whole = product([NetworkPart("f", first, (0, 1, 2)), NetworkPart("g", second, (0, 1, 2))], 3)
    flat = flatten(whole)
    assert len(flat.pairs) == 2
    for pair in flat.pairs:
        f, g = flat.ops[pair.first], flat.ops[pair.second]
        assert isinstance(f, Elementwise) and isinstance(g, Elementwise) and f.name[2:] == g.name[2:]
    x = point(rng, 3)
    assert evaluate_exact(flat, x) == evaluate_graph(first, x) + evaluate_graph(second, x)


def test_a_network_refuses_what_it_cannot_mean() -> None:
    one = affine("w", 0, Dense(torch.ones(1, 2)))
    with pytest.raises(InputError, match="starts with its input"):
        Network((one,), Source((2,), (1,)))
    for bad in (replace(one, inputs=(1,)), replace(one, inputs=())):
        with pytest.raises(InputError, match="does not come before"):
            network(bad)
    for numbers in ({"map": Dense(torch.tensor([[1.0, math.nan]]))}, {"bias": torch.tensor([math.inf])}):
        with pytest.raises(InputError, match="NaN or infinity"):
            network(replace(one, **numbers))
    leaky = Elementwise(name="r", inputs=(0,), size=2, function=Kinked(torch.tensor([0.1, math.nan])))
    with pytest.raises(InputError, match="NaN or infinity"):
        network(leaky)
    with pytest.raises(InputError, match=r"\(1, 2, 1\) where \(batch, 2\)"):
        network(one)(torch.zeros(1, 2, 1))
    off = network(replace(one, weight_error=1e-9))
    assert not is_evaluable(off)
    with pytest.raises(UnsupportedError, match="rational"):
        evaluate_exact(off, [Fraction(1), Fraction(2)])


def test_what_nothing_needs_is_dropped() -> None:
    rng = np.random.default_rng(1)
    graphs = nets.maxima(rng, nets.gaussian(rng))
    # Some windows of a pool have fewer candidates than others.
    fewer = [
        replace(n, candidates=torch.cat([n.candidates, torch.full((1, 5), -1)])) if isinstance(n, nodes.Maximum) else n
        for n in graphs.nodes
    ]
    flat = flatten(replace(graphs, nodes=tuple(fewer)))
    for x in (point(rng, 4) for _ in range(20)):
        assert evaluate_exact(flat, x) == evaluate_graph(graphs, x)
    # The ReLUs by which a maximum is defined a second time are gone.
    rest = ["Maximum", "Affine", "Elementwise"] * 2
    assert [type(op).__name__ for op in flat.ops] == ["Input", "Affine", *rest, "Affine"]
    for first, second in pairwise(flat.ops):
        assert second.inputs == (flat.ops.index(first),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(draws(8)))
def test_rounding_explains_a_right_network_and_no_wrong_one(dtype: torch.dtype, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for name in MAKE:
        graphs = MAKE[name](rng, nets.gaussian(rng))
        flat = flatten(graphs)
        x = sample_points(graphs.input_shape, dtype)
        seen = {len(flat.ops) - 1: graphs(x).flatten(1)}
        unit = torch.finfo(dtype).eps / 2
        assert find_difference(flat.ops, x.flatten(1), seen, unit) is None
        # Of an output that is wrong both say by how much it may be off.
        off = {index: value + 1e6 for index, value in seen.items()}
        found = find_difference(flat.ops, x.flatten(1), off, unit)
        nodes_off = {len(graphs.nodes) - 1: off[len(flat.ops) - 1].reshape(len(x), *graphs.output_shape)}
        before = parting(graphs.nodes, x, nodes_off, unit)
        assert found is not None and before is not None and found.bound <= 1.5 * before.bound
        # Every op of a right network is right, and one that is a thousandth off is named.
        every = dict(enumerate(flat.values(x.flatten(1))))
        assert find_difference(flat.ops, x.flatten(1), every, unit) is None
        wrong = next(i for i, op in enumerate(flat.ops) if isinstance(op, Affine) and not isinstance(op.map, Gather))
        every[wrong] = every[wrong] * 1.001
        found = find_difference(flat.ops, x.flatten(1), every, unit)
        assert found is not None and found.op is flat.ops[wrong] and found.bound < abs(found.expected - found.found)
