"""Networks made of networks: exact values of both, and what is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.support import nets
from tests.support.draws import draws
from tests.support.families import NETWORKS
from tests.unit.test_ir_network import point
from verifiable_relu.errors import InputError
from verifiable_relu.ir.exact import evaluate_exact
from verifiable_relu.ir.families import between, harden, least_lambdas, outside_family
from verifiable_relu.ir.functions.piecewise_linear import PiecewiseLinear
from verifiable_relu.ir.functions.smooth import Smooth
from verifiable_relu.ir.functions.steps import StepFunction
from verifiable_relu.ir.linear import Dense, Diagonal, Sparse
from verifiable_relu.ir.network import Affine, Elementwise, Input, Network, Op, Pair, Source, Sum
from verifiable_relu.ir.transform import NetworkPart, combine, matched, without_head, without_repeated
from verifiable_relu.rounding import below

MINUS = Diagonal(torch.tensor([-1.0, -1.0]))


def two(minus: Diagonal = MINUS) -> list[Op]:
    """ReLU of x and of 2x, and the difference between their inputs."""
    twice = Diagonal(torch.tensor([2.0, 2.0]))
    return [
        Input(name="x", size=2),
        Elementwise(name="f", inputs=(0,), size=2, function=PiecewiseLinear()),
        Affine(name="2x", inputs=(0,), size=2, map=twice),
        Affine(name="minus", inputs=(0,), size=2, map=minus),
        Sum(name="apart", inputs=(2, 3), size=2),
        Elementwise(name="g", inputs=(2,), size=2, function=PiecewiseLinear()),
        Sum(name="y", inputs=(1, 5), size=2),
    ]


@pytest.mark.parametrize("pair", [Pair(1, 4, 2), Pair(5, 4, 1), Pair(1, 3, 5), Pair(1, 2, 5), Pair(2, 4, 5)])
def test_a_pair_of_other_ops_is_refused(pair: Pair) -> None:
    with pytest.raises(InputError, match="pair"):
        Network(tuple(two()), Source((2,), (2,)), pairs=(pair,))


def test_a_pair_with_another_difference_is_refused() -> None:
    for minus in (Diagonal(torch.tensor([-1.0, 1.0])), Diagonal(torch.tensor([-1.0, -0.5]))):
        with pytest.raises(InputError, match="pair"):
            Network(tuple(two(minus=minus)), Source((2,), (2,)), pairs=(Pair(1, 4, 5),))


# Several networks as one


def ran(network: Network, x: np.ndarray) -> np.ndarray:
    """Outputs of a sample in float32, by torch."""
    return network(torch.from_numpy(x)[None])[0].numpy()


@pytest.mark.parametrize("kind", range(6))
@pytest.mark.parametrize("seed", range(draws(8)))
def test_values_of_several_networks_are_those_of_each(kind: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    draw = (nets.gaussian, nets.eighths, nets.uneven)[seed % 3](rng)
    first, second = (nets.pieces(rng, draw)[kind] for _ in range(2))
    size = first.input_size + 2
    places = [list(rng.permutation(size)[: first.input_size]) for _ in range(2)] + [list(range(first.input_size))]
    parts = [
        NetworkPart(f"n{i}", net, at) for i, (net, at) in enumerate(zip((first, second, first), places, strict=True))
    ]
    forms = [(([(0, 1), (size, -2)], 3), ([(1, 4)], 0)), (([(0, 1)], -1),) * 2]
    count = 3 * first.output_size + size
    chained = [((((count, 1),), 0), (((0, 1), (count + 1, 5)), 7)), ((((count, 2),), 0),) * 2]
    whole = combine(parts, size, ran, passed=True, products=[*forms, *chained])
    x = point(rng, size)
    values = [y for part in parts for y in evaluate_exact(part.network, [x[i] for i in part.inputs])] + x
    for pair in (*forms, *chained):
        left, right = (sum(c * values[i] for i, c in form) + constant for form, constant in pair)
        values.append(left * right)
    assert evaluate_exact(whole, x) == values
    sample = rng.normal(size=size).astype(np.float32)
    assert whole.source.run is not None
    np.testing.assert_allclose(
        whole.source.run(torch.from_numpy(sample)[None])[0],
        ran(whole, sample),
        rtol=1e-3,
        atol=1e-3 * abs(ran(whole, sample)).max(),
    )
    compared = (1 + bool(matched(first, second))) * len(first.activations)
    assert len(whole.pairs) == compared and whole.source.output_shape == (len(values),)
    for pair in whole.pairs:
        z, moved = (whole.ops[i].inputs[0] for i in (pair.first, pair.second))
        found = whole.values(torch.from_numpy(sample)[None].double())
        torch.testing.assert_close(found[pair.apart], found[moved] - found[z])
    assert not combine(parts, size, ran, paired=False).pairs


def quantised(steps: float, clip: bool) -> Network:
    """A layer whose values are rounded to steps, perhaps clipped at whole numbers, before its ReLU."""
    step, one = torch.full((2,), steps), torch.ones(2)
    layers: list[tuple[object, ...]] = [(Dense(torch.eye(2)),), (Diagonal(1 / step, step),), (StepFunction("Round"),)]
    if clip:
        layers += [
            (Diagonal(one), 128 * one),
            (PiecewiseLinear(),),
            (Diagonal(-one), 255 * one),
            (PiecewiseLinear(),),
            (Diagonal(-one), 127 * one),
        ]
        layers += [(Diagonal(step),), (PiecewiseLinear(),)]
    else:
        layers += [(PiecewiseLinear(),), (Diagonal(step),)]
    return chain(2, *layers)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_quantised_network_is_compared_where_it_does_not_quantise(clip: bool, swapped: bool) -> None:
    plain, whole = chain(2, (Dense(torch.eye(2)),), (PiecewiseLinear(),)), quantised(0.25, clip)
    networks = (whole, plain) if swapped else (plain, whole)
    both = combine([NetworkPart(n, net, (0, 1)) for n, net in zip("fg", networks, strict=True)], 2, ran)
    (pair,) = both.pairs
    relus = [op for op in both.ops if isinstance(op, Elementwise) and op.function.kind == "Relu"]
    assert len(relus) == (4 if clip else 2) and {both.ops[pair.first].name[0], both.ops[pair.second].name[0]} == {
        "f",
        "g",
    }
    x = [Fraction(17, 8), Fraction(-3, 7)]
    assert evaluate_exact(both, x) == [y for net in networks for y in evaluate_exact(net, x)]
    # What is compared counts in the same units.
    values = both.values(torch.tensor([[float(v) for v in x]], dtype=torch.float64))
    assert float((values[pair.first] - values[pair.second]).abs().max()) <= 0.125


def chain(size: int, *made: tuple[object, ...]) -> Network:
    """Ops one after another, each of a map with its bias, or of a function."""
    ops: list[Op] = [Input(name="x", size=size)]
    for number, (of, *rest) in enumerate(made):
        fields = {"name": f"op {number}", "inputs": (number,)}
        if isinstance(of, PiecewiseLinear | Smooth | StepFunction):
            ops.append(Elementwise(function=of, size=ops[-1].size, **fields))  # type: ignore[arg-type]
        else:
            ops.append(Affine(map=of, size=of.n_out, bias=rest[0] if rest else None, **fields))  # type: ignore[attr-defined, arg-type]
    return Network(tuple(ops), Source((size,), (ops[-1].size,)))


def test_what_does_not_fit_together_is_refused() -> None:
    network = chain(2, (PiecewiseLinear(),))
    for other, places, options, said in (
        (replace(network, arithmetic="float32"), (0, 1), {}, "cannot be combined"),
        (network, (0,), {}, "1 inputs"),
    ):
        with pytest.raises(InputError, match=said):
            combine([NetworkPart("a", network, (0, 1)), NetworkPart("b", other, places)], 2, ran, **options)
    with pytest.raises(InputError, match="real numbers"):
        combine([NetworkPart("a", replace(network, arithmetic="float32"), (0, 1))], 2, ran, passed=True)


# Heads


def softmax(count: int, log: bool = False) -> list[tuple[object, ...]]:
    """The ops as which a softmax, or a log softmax, is read."""
    sign = -1.0 if log else 1.0
    minus = [(Diagonal(torch.full((count,), -1.0)),)] if log else []
    if count == 2:
        return [
            (Dense(torch.tensor([[sign, -sign], [-sign, sign]])),),
            (Smooth("Softplus" if log else "Sigmoid"),),
            *minus,
        ]
    pairs = torch.tensor([(j, i) for i in range(count) for j in range(count)])
    weight = torch.where(pairs[:, :1] == pairs[:, 1:], 0.0, torch.tensor([[1.0, -1.0]]))
    sums = [(Sparse(pairs, weight, count),), (Smooth("Exp"),), (Dense(torch.ones(1, count), copies=count),)]
    return [*sums, (Smooth("Log" if log else "Reciprocal"),), *minus]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("log", [False, True])
def test_a_softmax_is_left_out(count: int, log: bool) -> None:
    before = [(Dense(torch.randn(count, 3), 1), torch.randn(count)), (PiecewiseLinear(),)]
    whole = chain(3, *before, *softmax(count, log))
    x = torch.randn(20, 3, dtype=torch.float64)
    found = without_head(whole)
    assert found is not None and len(found.ops) == 3
    expected = (torch.log_softmax if log else torch.softmax)(found(x), 1)
    torch.testing.assert_close(whole(x), expected)
    assert found.source.run is not None
    torch.testing.assert_close(found.source.run(x.float()), whole(x.float()))
    further = chain(3, *before, *softmax(count), (Smooth("Tanh"),))
    assert without_head(further) is not None and len(without_head(further).ops) == 3  # type: ignore[union-attr]


def test_what_may_change_the_order_stays() -> None:
    one = torch.ones(4)
    exps = softmax(4)
    assert isinstance(exps[0][0], Sparse)
    weight = exps[0][0].weight.clone()
    weight[1, 0] *= 1 + 2**-20
    for end in (
        [(Smooth("Square"),)],
        [(Smooth("GELU", 1.0),)],
        [(PiecewiseLinear(),)],
        [*exps, (Diagonal(-one),)],
        [(Sparse(exps[0][0].index, weight, 4),), *exps[1:]],
        [(exps[0][0], torch.full((16,), 1e-6)), *exps[1:]],
        [*exps[:2], (Dense(torch.tensor([[1.0, 1, 1, 2]]), copies=4),), *exps[3:]],
    ):
        assert without_head(chain(4, (Diagonal(2 * one),), *end)) is None


# Repeated neurons


def lattice(rng: np.random.Generator, functions: int = 4, groups: int = 6) -> Network:
    """The maxima of overlapping groups of four affine functions of two inputs, each maximum written by four ReLUs."""
    members = list(itertools.chain(*(rng.choice(functions, 4, replace=False) for _ in range(groups))))
    chosen = torch.zeros(4 * groups, functions)
    chosen[torch.arange(4 * groups), torch.tensor(members)] = 1
    slopes, values = (torch.from_numpy(rng.normal(size=size)) for size in ((functions, 2), functions))
    layers: list[tuple[object, ...]] = [(Dense(slopes), values), (Dense(chosen),)]
    for width in (4 * groups, 2 * groups):
        pairs, four = torch.eye(width // 2), torch.tensor([[1.0, -1.0], [-1.0, 1.0], [1.0, 1.0], [-1.0, -1.0]])
        layers += [(Dense(torch.kron(pairs, four)),), (PiecewiseLinear(),)]
        layers.append((Dense(torch.kron(pairs, torch.tensor([[0.5, 0.5, 0.5, -0.5]]))),))
    return chain(2, *layers)


def twice(rng: np.random.Generator, draw: nets.Weights, factor: float, last: bool) -> Network:
    """A fully connected network with every hidden neuron twice; what multiplies the second is smaller by a factor."""
    layers: list[tuple[object, ...]] = []
    for number, (inputs, outputs) in enumerate(itertools.pairwise((2, 3, 2, 2))):
        weight, bias = draw((outputs, inputs), inputs), draw((outputs,), inputs)
        halves = [weight, weight * factor] if number else [weight]
        wide = torch.cat(halves, 1)
        order = [1, 0, 1] if number == 2 else [*range(outputs)] * 2
        layers += [(Dense(wide[order]), bias[order]), (PiecewiseLinear(),)]
    return chain(2, *layers[: None if last else -1])


@pytest.mark.parametrize("kind", ["lattice", "dyadic", "dyadic, ReLU last", "rounded"])
@pytest.mark.parametrize("seed", range(3))
def test_repeated_neurons_are_left_out_where_nothing_is_rounded(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    if kind == "lattice":
        network = lattice(rng)
    else:
        rounded = kind == "rounded"
        network = twice(
            rng, (nets.gaussian if rounded else nets.eighths)(rng), 2.0**-40 if rounded else 0.5, "last" in kind
        )
    smaller = without_repeated(network)
    assert (smaller is network) == (kind == "rounded")
    assert sum(op.size for op in smaller.ops) <= (0.8 if kind == "lattice" else 1) * sum(op.size for op in network.ops)
    for _ in range(4):
        x = point(rng, 2)
        assert evaluate_exact(smaller, x) == evaluate_exact(network, x)


def test_weights_that_are_not_known_or_wanted_are_not_merged() -> None:
    network = lattice(np.random.default_rng(0))
    for index in (1, 3):
        op = network.ops[index]
        assert isinstance(op, Affine)
        wanted = Dense(op.map.weight.clone().requires_grad_())
        for changed in (replace(op, weight_error=1e-9), replace(op, map=wanted)):
            other = replace(network, ops=(*network.ops[:index], changed, *network.ops[index + 1 :]))
            assert without_repeated(other) is other


# Families


def layers(*functions: object, factor: float = 1.0, error: float = 0.0) -> Network:
    """Dense layers with functions between them, before each a factor of its argument."""
    made: list[tuple[object, ...]] = []
    for function in functions:
        made += [(Dense(torch.ones(2, 2)), torch.ones(2)), (Diagonal(torch.tensor(factor).expand(2)),), (function,)]
    network = chain(2, *made)
    ops = [replace(op, weight_error=error) if isinstance(op, Affine) and op.bias is None else op for op in network.ops]
    return replace(network, ops=tuple(ops))


@pytest.mark.parametrize("name", NETWORKS)
def test_families_have_the_lambda_that_is_asked_for(name: str) -> None:
    network = NETWORKS[name](0)
    count = len(network.activations)
    for lam in (1.0, 7.3, [1 + 2.0**i for i in range(count)]):
        found = harden(network, lam)
        assert least_lambdas(found) == (lam if isinstance(lam, list) else [lam] * count) and not outside_family(found)
        assert found.source.onnx is None and found.limit.digest == network.digest
        assert harden(found).digest == found.digest


def test_lambda_is_that_before_all_factors() -> None:
    gelu = Smooth("GELU", 8.0)
    for factor, least in ((4.0, 2.5), (-4.0, 2.5), (0.5, 20.0), (1.0, 10.0)):
        assert least_lambdas(harden(layers(gelu, factor=factor), 10.0)) == [least]
    assert least_lambdas(harden(layers(PiecewiseLinear(), factor=4.0), 10.0)) == [10.0]
    assert least_lambdas(harden(layers(gelu, PiecewiseLinear(), factor=4.0))) == [8.0]
    # A factor that is known up to an error counts as the largest that it may be; a division is exact.
    assert least_lambdas(harden(layers(gelu, factor=4.0, error=0.25), 10.0)) == [2.0]
    third = torch.tensor(3.0, dtype=torch.float64).expand(2)
    divided = chain(2, (Dense(torch.ones(2, 2)), torch.ones(2)), (Diagonal(1 / third, third),), (gelu,))
    assert Fraction(least_lambdas(harden(divided, 10.0))[0]) in (30, Fraction(below(30.0)))
    assert not harden(layers(gelu, factor=2.0), 10.0).source.repairs
    (note,) = harden(layers(gelu, factor=0.5), 10.0).source.repairs
    assert "λ = 4" in note and "nothing is said about the file itself" in note
    running = replace(layers(gelu, factor=0.5), arithmetic="float32")
    with pytest.raises(InputError, match="not bounded"):
        harden(running, 10.0)


def test_what_is_no_family_is_refused() -> None:
    gelu = Smooth("GELU", 2.0)
    several = Diagonal(torch.tensor([2.0, 3.0]))
    for network, lam, said in (
        (layers(Smooth("Sigmoid")), 2.0, "neither ReLU nor"),
        (layers(PiecewiseLinear()), None, "do not tell which"),
        (layers(gelu), [1.0, 2.0], "2 values of λ for 1"),
        (layers(gelu), 0.5, "at least 1"),
        (layers(gelu), float("inf"), "finite"),
        (layers(gelu, Smooth("Erf")), 2.0, "write the operator Gelu"),
        (layers(gelu, factor=2.0**-41), 2.0, "too small"),
        (chain(2, (Dense(torch.ones(2, 2)),), (several,), (gelu,)), 2.0, "'op 1' before it"),
    ):
        with pytest.raises(InputError, match=said):
            harden(network, lam)


def test_a_swap_is_a_family() -> None:
    smooth, hard = layers(Smooth("SiLU"), Smooth("GELU", 3.0)), layers(PiecewiseLinear(), PiecewiseLinear())
    family = between(smooth, hard)
    functions = [op.function for op in family.ops if isinstance(op, Elementwise)]
    assert [f.parameters for f in functions] == [
        {"function": "SiLU", "parameter": 1.0},
        {"function": "GELU", "parameter": 3.0},
    ]
    half = between(smooth, layers(PiecewiseLinear(), Smooth("GELU", 3.0)))
    assert outside_family(half) == ["GELU"]
    for other, said in (
        (layers(PiecewiseLinear()), "more of the network"),
        (layers(Smooth("SiLU"), Smooth("GELU", 3.0)), "no activation"),
        (layers(PiecewiseLinear(), Smooth("GELU", 2.0)), "takes the place"),
    ):
        with pytest.raises(InputError, match=said):
            between(smooth, other)
