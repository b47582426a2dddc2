"""Networks: exact values, values to within proved errors, what is asked of them, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import nets
from tests.support.draws import draws
from tests.support.exact import exact_outputs
from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.ir.enclosure import Enclosed, enclose, find_difference, formats, sample_points, whole
from verifiable_relu.ir.exact import evaluate_exact, is_evaluable, multiplications
from verifiable_relu.ir.functions.piecewise_linear import PiecewiseLinear
from verifiable_relu.ir.functions.smooth import Hardened, Smooth
from verifiable_relu.ir.linear import Dense, Diagonal, Gather
from verifiable_relu.ir.network import Affine, Elementwise, Input, Maximum, Network, Op, Product, Source, Sum

Make = Callable[[np.random.Generator, nets.Draw], Network]
MAKE: dict[str, Make] = {
    **{f"pieces {i}": lambda rng, draw, i=i: nets.pieces(rng, draw)[i] for i in range(7)},  # type: ignore[misc]
    **{make.__name__: make for make in (nets.windows, nets.maxima, nets.extremes, nets.polynomials, nets.divisions)},
}
over_networks = pytest.mark.parametrize("name", MAKE)


def point(rng: np.random.Generator, size: int) -> list[Fraction]:
    return [
        Fraction(int(n), int(d)) for n, d in zip(rng.integers(-99, 99, size), rng.integers(1, 50, size), strict=True)
    ]


@over_networks
@pytest.mark.parametrize("seed", range(draws(8)))
def test_values_are_exact_and_enclosed(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    network = MAKE[name](rng, (nets.gaussian, nets.eighths, nets.uneven)[seed % 3](rng))
    x = point(rng, network.input_size)
    exact = evaluate_exact(network, x)
    assert exact == exact_outputs(network, x) and is_evaluable(network) and multiplications(network) > 0
    size = max(map(abs, exact)) + Fraction(1, 10**6)
    for dtype in formats(network):
        found = enclose(network, x, dtype)
        pairs = zip(exact, found.value, found.error, strict=True)
        assert all(abs(t - Fraction(*y.as_integer_ratio())) <= Fraction(*e.as_integer_ratio()) for t, y, e in pairs)
        assert seed % 3 == 2 or float(found.error.max()) <= 1e4 * float(np.finfo(dtype).eps) * float(size)


@pytest.mark.parametrize("seed", range(draws(20)))
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.longdouble])
def test_a_whole_number_is_never_taken_for_another(seed: int, dtype: type[np.floating]) -> None:
    rng = np.random.default_rng(seed)
    true = rng.integers(-9, 10, 2000)
    value = true + rng.choice([0, 1e-3, 0.3, 0.49, 0.7, 3.0]) * rng.uniform(-1, 1, 2000)
    value = value.astype(dtype)
    error = np.abs(value - true) * rng.choice([1.0, 1.0001, 1.7, 20.0], 2000).astype(dtype) + dtype(1e-6)
    found = whole(Enclosed(value, error))
    assert (np.abs(found.value - true) <= found.error).all()
    exact = found.error == 0
    assert exact.any() and (found.value[exact] == true[exact]).all()
    assert (found.value[~exact] == value[~exact]).all() and (found.error[~exact] == error[~exact]).all()


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
        "leaky": Elementwise(name="y", inputs=(1,), size=4, function=PiecewiseLinear(torch.tensor(-3.0))),
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
        Elementwise(name="r", inputs=(1,), size=2, function=PiecewiseLinear()),
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
        (2, {"function": PiecewiseLinear(torch.tensor(0.1))}),
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


def test_a_family_is_evaluated_as_its_limit() -> None:
    family = network(Elementwise(name="f", inputs=(0,), size=2, function=Hardened(Smooth("GELU", 3.0))))
    family = replace(family, source=replace(family.source, onnx=b"file"))
    limit = family.limit
    assert limit.source.onnx is None and limit.limit is limit and limit.digest != family.digest
    assert limit.piecewise_linear and not family.piecewise_linear and not is_evaluable(family)
    assert evaluate_exact(limit, [Fraction(-1, 3), Fraction(2, 7)]) == [0, Fraction(2, 7)]
    with pytest.raises(UnsupportedError, match="set of activations"):
        enclose(family, [Fraction(0), Fraction(1)])


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
    leaky = Elementwise(name="r", inputs=(0,), size=2, function=PiecewiseLinear(torch.tensor([0.1, math.nan])))
    with pytest.raises(InputError, match="NaN or infinity"):
        network(leaky)
    with pytest.raises(InputError, match=r"\(1, 2, 1\) where \(batch, 2\)"):
        network(one)(torch.zeros(1, 2, 1))
    off = network(replace(one, weight_error=1e-9))
    assert not is_evaluable(off)
    with pytest.raises(UnsupportedError, match="rational"):
        evaluate_exact(off, [Fraction(1), Fraction(2)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(draws(8)))
def test_rounding_explains_a_right_network_and_no_wrong_one(dtype: torch.dtype, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for name in MAKE:
        network = MAKE[name](rng, nets.gaussian(rng))
        x = sample_points(network.source.input_shape, dtype).flatten(1)
        unit, every = torch.finfo(dtype).eps / 2, dict(enumerate(network.values(x)))
        assert find_difference(network.ops, x, every, unit) is None
        # Of an output that is wrong is said by how much it may be off; an op that is a thousandth off is named.
        found = find_difference(network.ops, x, {len(every) - 1: every[len(every) - 1] + 1e6}, unit)
        assert found is not None and found.bound < 1e3
        wrong = next(i for i, op in enumerate(network.ops) if isinstance(op, Affine) and not isinstance(op.map, Gather))
        every[wrong] = every[wrong] * 1.001
        found = find_difference(network.ops, x, every, unit)
        assert found is not None and found.op is network.ops[wrong] and found.bound < abs(found.expected - found.found)
