"""Affine forms hold every exact value, whatever the op, the width of the box and the dtype of the generators."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.soundness.kinds import pair
from tests.support import nets
from verifiable_relu.bounds.zonotopes import Zonotopes, mirrors
from verifiable_relu.ir.exact import evaluate_exact
from verifiable_relu.ir.functions.piecewise_linear import PiecewiseLinear
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.linear import Dense
from verifiable_relu.ir.network import Affine, Elementwise, Input, Network, Op, Source

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])


def networks(seed: int) -> list[Network]:
    rng = np.random.default_rng(seed)
    every = (nets.mlp, nets.cnn, nets.residual, nets.normalised)
    made = [make(rng, draw) for draw in (nets.gaussian(rng), nets.uneven(rng)) for make in every]
    draw = nets.gaussian(rng)
    others = (make(rng, draw) for make in (nets.windows, nets.maxima, nets.polynomials))
    return [*made, nets.mlp(rng, draw, "PRelu"), *others]


def box_of(inputs: int, seed: int, width: float, free: int = 2) -> Interval:
    """Two boxes around random centres, in which ``free`` inputs vary."""
    rng = np.random.default_rng(seed)
    center = rng.normal(size=(2, inputs))
    radius = np.where(rng.permutation(inputs) < free, width, 0.0)
    return Interval(torch.from_numpy(center - radius), torch.from_numpy(center + radius))


def varying(box: Interval) -> torch.Tensor:
    return (box.lower < box.upper).any(0).nonzero().squeeze(1)


def forms_of(network: Network, box: Interval, most: int, dtype: torch.dtype) -> Zonotopes:
    symbols = dict.fromkeys(range(len(network.ops)), most)
    return Zonotopes(network, box, varying(box), symbols, dtype)


def corners(box: Interval, sample: int) -> list[list[Fraction]]:
    """The corners of one box, exactly, and one point inside."""
    lower, upper = box.lower[sample].tolist(), box.upper[sample].tolist()
    ends = [sorted({Fraction(a), Fraction(b)}) for a, b in zip(lower, upper, strict=True)]
    inside = [(2 * Fraction(a) + Fraction(b)) / 3 for a, b in zip(lower, upper, strict=True)]
    return [*map(list, itertools.product(*ends)), inside]


def is_lost(network: Network, box: Interval, forms: Zonotopes) -> bool:
    """Return True if some exact value at a corner, or inside, is outside its bounds."""
    held = {**forms.inputs, len(network.ops) - 1: forms.output.interval()}
    for index, bounds in held.items():
        part = Network(network.ops[: index + 1], network.source)
        for sample in range(len(box.lower)):
            for point in corners(box, sample):
                ends = bounds.lower[sample].tolist(), bounds.upper[sample].tolist()
                for low, value, high in zip(ends[0], evaluate_exact(part, point), ends[1], strict=True):
                    if not Fraction(low) <= value <= Fraction(high):
                        return True
    return False


WIDTHS = [(0.0, 64), (1e-13, 64), (0.05, 64), (1.0, 64), (0.5, 0), (0.5, 1)]
CASES = [*((torch.float64, *one) for one in WIDTHS), (torch.float32, 1e-13, 64), (torch.float32, 0.5, 1)]


@pytest.mark.parametrize(("dtype", "width", "most"), CASES)
def test_forms_hold_exact_values_at_corners(dtype: torch.dtype, width: float, most: int) -> None:
    """Forms of few symbols do, too: neurons without one of their own count as errors."""
    for network in networks(0):
        box = box_of(network.input_size, 1, width)
        assert not is_lost(network, box, forms_of(network, box, most, dtype)), network.name


@DTYPES
@pytest.mark.parametrize("width", [1e-9, 0.1, 2.0])
def test_forms_of_curves_hold_sampled_values(width: float, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(5)
    for network in nets.smooth(rng, nets.gaussian(rng)):
        box = box_of(network.input_size, 2, width, free=3)
        shares = torch.rand(300, 1, network.input_size, generator=torch.Generator().manual_seed(0)).double()
        x = torch.cat([shares.round(), shares]) * (box.upper - box.lower) + box.lower
        values = network.values(x.flatten(0, 1))
        for most in (0, 3, 64):
            forms = forms_of(network, box, most, dtype)
            for index, bounds in {**forms.inputs, len(network.ops) - 1: forms.output.interval()}.items():
                z = values[index].unflatten(0, x.shape[:2])
                spare = 1e-13 * (1 + z.abs())
                # Where a function is not defined on all of an interval, nothing is known.
                lost = (z < bounds.lower - spare) | (z > bounds.upper + spare)
                assert not bool(lost.any()), network.name
                assert network.name == "products" or bool(bounds.lower.isfinite().all()), network.name


@DTYPES
def test_linear_bounds_of_rows_hold_exact_values_at_corners(dtype: torch.dtype) -> None:
    for network, width in itertools.product(networks(4)[2:4], (1e-13, 0.3)):
        box = box_of(network.input_size, 6, width)
        matrix = torch.randn(2, 2, network.output_size, generator=torch.Generator().manual_seed(0)).double()
        found = forms_of(network, box, 64, dtype).rows(matrix)
        for sample, number in itertools.product(range(2), range(2)):
            slope = [Fraction(c) for c in found.coefficients[sample, number].tolist()]
            low, high = box.lower[sample].tolist(), box.upper[sample].tolist()
            least = [Fraction(a if c >= 0 else b) for c, a, b in zip(slope, low, high, strict=True)]
            row = [Fraction(c) for c in matrix[sample, number].tolist()]
            for point in corners(box, sample):
                value = sum(c * v for c, v in zip(row, evaluate_exact(network, point), strict=True))
                along = sum(c * (x - m) for c, x, m in zip(slope, point, least, strict=True))
                # The coefficients themselves may be off by some units of roundoff.
                lower = Fraction(float(found.lower[sample, number]))
                assert value >= lower + along * (1 - Fraction(1, 2**45)), network.name


def relu_network(weight: Sequence[Sequence[float]], bias: Sequence[float], after: Sequence[Sequence[float]]) -> Network:
    first = torch.tensor(weight), torch.tensor(bias)
    n = len(bias)
    ops = (
        Input(name="x", size=first[0].shape[1]),
        Affine(name="z", inputs=(0,), size=n, map=Dense(first[0]), bias=first[1]),
        Elementwise(name="r", inputs=(1,), size=n, function=PiecewiseLinear()),
        Affine(name="y", inputs=(2,), size=len(after), map=Dense(torch.tensor(after))),
    )
    return Network(ops, Source((2,), (len(after),)))


@DTYPES
def test_the_difference_of_a_neuron_and_its_negative_is_the_value_before_them(dtype: torch.dtype) -> None:
    network = relu_network([[1.0, 2.0], [-1.0, -2.0]], [0.5, -0.5], [[1.0, -1.0]])
    box = Interval(torch.full((1, 2), -1.0).double(), torch.full((1, 2), 1.0).double())
    output = Zonotopes(network, box, torch.arange(2), dtype=dtype).output.interval()
    assert -2.5 - 1e-5 < float(output.lower) <= -2.5
    assert 3.5 <= float(output.upper) < 3.5 + 1e-5


@DTYPES
def test_mirrored_and_repeated_neurons_hold_exact_values(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(7)
    weight, bias = rng.normal(size=(3, 2)), rng.normal(size=3)
    both = np.concatenate([weight, -weight, weight]), np.concatenate([bias, -bias, bias])
    network = relu_network(both[0].tolist(), both[1].tolist(), rng.normal(size=(2, 9)).tolist())
    for most in (0, 2, 64):
        box = box_of(2, 3, 0.7)
        assert not is_lost(network, box, forms_of(network, box, most, dtype))


def test_neurons_whose_weights_are_not_known_exactly_mirror_nothing() -> None:
    weight = torch.tensor([[1.0, 2.0], [-1.0, -2.0], [1.0, 2.0], [1.0, 2.5]])
    op = Affine(name="", inputs=(0,), size=4, map=Dense(weight), bias=torch.tensor([1.0, -1.0, 1.5, 1.0]))
    found = mirrors(op)
    assert found is not None
    assert found[0].tolist() == [0, 0, 2, 3] and found[1].tolist() == [False, True, False, False]
    assert mirrors(replace(op, weight_error=1e-9)) is None
    assert mirrors(replace(op, bias_error=torch.full((4,), 1e-9))) is None
    assert mirrors(replace(op, bias=torch.tensor([1.0, 1.0, 1.5, 1.0]))) is None


@pytest.mark.parametrize("share", [0.0, 1e-3, 1.0])
def test_differences_of_networks_hold_exact_values_and_are_tight(share: float) -> None:
    network = pair(np.random.default_rng(0), "Relu", share)
    assert network.pairs
    box, n = box_of(network.input_size, 1, 0.4, free=3), network.output_size // 2
    one = torch.eye(n, dtype=torch.float64)
    matrix = torch.cat([torch.cat([one, -one], 1), torch.cat([-one, one], 1)]).expand(2, -1, -1).contiguous()
    for dtype, most in ((torch.float64, 64), (torch.float32, 64), (torch.float64, 1)):
        forms = forms_of(network, box, most, dtype)
        assert not is_lost(network, box, forms)
        # Where the networks are one, so are the outputs; the less they differ, the smaller is what may be between them.
        width = float(-forms.rows(matrix).lower.min()) / float((box.upper - box.lower).max())
        assert width < (1e-4 if not share else 20 * share) + (0.0 if most > 1 else 1.0)


def test_numbers_known_up_to_an_error_widen_forms() -> None:
    network = networks(0)[0]
    box = box_of(network.input_size, 3, 0.1)

    def loosened(op: Op, moved: bool) -> Op:
        if not isinstance(op, Affine) or op.bias is None:
            return op
        if not moved:
            return replace(op, weight_error=1e-3, bias_error=torch.full((op.size,), 1e-3, dtype=torch.float64))
        return replace(op, map=Dense(op.map.weight.double() * (1 - 9e-4)), bias=op.bias.double() + 9e-4)

    loose, moved = (replace(network, ops=tuple(loosened(op, m) for op in network.ops)) for m in (False, True))
    assert not is_lost(moved, box, forms_of(loose, box, 64, torch.float32))
    assert is_lost(moved, box, forms_of(network, box, 64, torch.float32))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinite_bounds_prove_nothing(value: float) -> None:
    for network in networks(0):
        box = Interval(*(torch.full((1, network.input_size), v).double() for v in (-value, value)))
        forms = Zonotopes(network, box, torch.arange(2))
        found = forms.rows(torch.ones(1, 1, network.output_size).double())
        assert not (forms.output.interval().lower > -1e300).any() and not (found.lower > -1e300).any()
