"""The builder of flat networks, merging, and today's nodes for ops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import helper

from tests.support.onnx_files import onnx_file
from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.ir.network import Affine, Elementwise, Network, Source
from verifiable_relu.readers.builder import Builder, Value
from verifiable_relu.readers.onnx.read import read_flat
from verifiable_relu.readers.simplify import finished, simplified

RNG = np.random.default_rng(0)
node = helper.make_node


def built(build: Builder, output: Value, shape: tuple[int, ...]) -> Network:
    """The network of a value, not merged."""
    ops, last = finished(build, output)
    assert last == len(ops) - 1
    return Network(tuple(ops), Source(shape, output.shape))


def test_moves_compose_without_ops_until_one_needs_its_input_in_place() -> None:
    build = Builder((2, 3, 4))
    x = build.transposed(Value(0, (2, 3, 4)), (2, 0, 1)).reshaped((4, 6))
    x = build.moved(x, np.pad(np.arange(24).reshape(4, 6)[1:, ::2] + 1, 1) - 1)
    assert len(build.ops) == 1
    network = built(build, build.relu(x), (2, 3, 4))
    assert [type(op).__name__ for op in network.ops] == ["Input", "Affine", "Elementwise"]
    sample = RNG.normal(size=(2, 3, 4))
    expected = np.pad(sample.transpose(2, 0, 1).reshape(4, 6)[1:, ::2], 1).clip(0)
    assert (network(torch.from_numpy(sample.reshape(1, -1))).numpy().reshape(expected.shape) == expected).all()


def test_a_permutation_before_a_matrix_is_one_of_its_columns() -> None:
    build, weight = Builder((2, 3)), torch.from_numpy(RNG.normal(size=(5, 6)))
    network = built(build, build.dense(build.transposed(Value(0, (2, 3)), (1, 0)).reshaped((1, 6)), weight), (2, 3))
    sample = RNG.normal(size=(2, 3))
    assert len(network.ops) == 2
    found = network(torch.from_numpy(sample.reshape(1, -1)))[0]
    torch.testing.assert_close(found, weight @ torch.from_numpy(sample.T.reshape(-1).copy()))


@pytest.mark.parametrize(
    ("left", "right"), [((4,), (4,)), ((2, 1, 3, 4), (5, 4, 2)), ((3, 4), (4,)), ((4,), (2, 4, 3))]
)
def test_matrix_products_are_those_of_numpy(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    sizes = int(np.prod(left)), int(np.prod(right))
    build, numbers = Builder((sum(sizes),)), np.arange(sum(sizes))
    x = build.moved(Value(0, (sum(sizes),)), numbers[: sizes[0]].reshape(left))
    y = build.moved(Value(0, (sum(sizes),)), numbers[sizes[0] :].reshape(right))
    product = build.matmul(x, y)
    sample = RNG.normal(size=sum(sizes))
    expected = np.matmul(*(part.reshape(s) for part, s in zip(np.split(sample, sizes[:1]), (left, right), strict=True)))
    network = built(build, product, (sum(sizes),))
    found = network(torch.from_numpy(sample[None]))
    np.testing.assert_allclose(found.numpy().reshape(expected.shape), expected, rtol=1e-12, atol=1e-12)


def test_what_does_not_fit_is_refused() -> None:
    build, x = Builder((2, 3)), Value(0, (2, 3))
    with pytest.raises(InputError, match=r"reshapes \(2, 3\) to \(4,\)"):
        x.reshaped((4,))
    with pytest.raises(UnsupportedError, match="broadcasts"):
        build.scale(x, torch.ones(4, 3))
    with pytest.raises(InputError, match="does not fit inputs"):
        build.dense(x, torch.ones(2, 2))
    with pytest.raises(InputError, match="larger than the padded inputs"):
        build.convolution(x.reshaped((1, 2, 3)), torch.ones(1, 1, 4, 1), None)
    with pytest.raises(InputError, match="divides by zero"):
        build.divided(x, torch.zeros(()))


def test_numbers_that_one_map_cannot_hold_exactly_are_two_maps() -> None:
    build, x = Builder((3,)), Value(0, (3,))
    build.scale(x, torch.tensor(0.3), shift=torch.tensor(0.7), center=torch.tensor(0.1))
    assert [float(op.bias[0]) for op in build.ops[1:]] == [-float(torch.tensor(0.1)), float(torch.tensor(0.7))]  # type: ignore[attr-defined]
    third, error = build.divided(x, torch.tensor(3.0)), build.ops[-1].weight_error  # type: ignore[attr-defined]
    assert third.op == len(build.ops) - 1 and 0 < error <= 2.0**-53


def test_whole_numbers_are_known_as_such() -> None:
    build, x = Builder((3,)), Value(0, (3,))
    rounded = build.function(x, "Round")
    assert not build.is_whole(x) and build.is_whole(rounded)
    assert build.is_whole(build.relu(build.scale(rounded, 3.0, shift=-2.0)))
    assert not build.is_whole(build.scale(rounded, 0.5))


def test_a_normalisation_is_a_shift_and_a_factor_with_an_error() -> None:
    stored = {name: RNG.uniform(0.5, 2, 3) for name in ("scale", "shift", "mean", "variance")}
    data = onnx_file(
        [node("BatchNormalization", ["x", *stored], ["y"])], {"x": [1, 3, 2, 2]}, {"y": [1, 3, 2, 2]}, **stored
    )
    flat, _ = read_flat(data, "n")
    assert len(flat.ops) == 3 and not flat.ops[1].weight_error < 0 < flat.ops[2].weight_error  # type: ignore[attr-defined]


@pytest.mark.parametrize("spelling", ["erf", "gelu"])
def test_a_gelu_of_a_multiple_is_a_multiple_of_a_hard_one_behind_moves(spelling: str) -> None:
    inside = [node("Mul", ["x", "three"], ["a"]), node("Transpose", ["a"], ["t"], perm=[0, 2, 1])]
    if spelling == "gelu":
        nodes = [*inside, node("Gelu", ["t"], ["y"])]
    else:
        nodes = [
            *inside,
            node("Mul", ["t", "root"], ["k"]),
            node("Erf", ["k"], ["e"]),
            node("Add", ["e", "one"], ["o"]),
            node("Mul", ["t", "o"], ["d"]),
            node("Mul", ["d", "half"], ["y"]),
        ]
    numbers = {"three": 3.0, "root": 0.5**0.5, "one": 1.0, "half": 0.5}
    data = onnx_file(nodes, {"x": [1, 2, 3]}, {"y": [1, 3, 2]}, opset=20, **numbers)
    flat, _ = read_flat(data, "n")
    (function,) = [op.function for op in flat.ops if isinstance(op, Elementwise)]
    assert function.kind == "GELU" and float(function.parameters["parameter"]) == pytest.approx(3, rel=1e-6)
    factor = flat.ops[-1]
    assert isinstance(factor, Affine) and float(factor.map.weight[0]) == 3


def test_neighbours_are_merged_where_that_is_exact() -> None:
    build, x = Builder((3,)), Value(0, (3,))
    dense = build.dense(x, torch.eye(3))
    merged = simplified(*finished(build, build.scale(build.scale(dense, shift=torch.arange(3.0)), 1.0)))
    assert len(merged) == 2 and merged[1].bias.tolist() == [0, 1, 2]  # type: ignore[attr-defined]
    build = Builder((3,))
    inverse = build.function(build.function(build.scale(build.scale(x, 0.1), 0.1), "Sqrt"), "Reciprocal")
    ops = simplified(*finished(build, inverse))
    assert len(ops) == 3 and ops[2].function.kind == "InverseRoot"  # type: ignore[attr-defined]
    assert float(ops[1].map.weight[0]) == float(torch.tensor(0.1)) ** 2  # type: ignore[attr-defined]
    assert len(simplified(*finished(Builder((3,)), x))) == 2


def test_a_concatenation_of_constants_and_two_values_is_a_sum_of_gathers() -> None:
    build = Builder((2,))
    x, y = Value(0, (2,)), build.relu(Value(0, (2,)))
    numbers = np.array([-1, 0, 1, -1, -1]), np.array([-1, -1, -1, 1, 0])
    joined = build.joined([(x, numbers[0]), (y, numbers[1])], np.array([7.0, 0, 0, 0, 0]), (5,))
    network = built(build, joined, (2,))
    assert network(torch.tensor([[-1.0, 2.0]])).tolist() == [[7, -1, 2, 2, 0]]
    assert [type(op).__name__ for op in network.ops[2:]] == ["Affine", "Affine", "Sum"]
