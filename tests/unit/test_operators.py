"""The products of bound propagation with weights of affine maps: each fast way against the plain one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.draws import draws
from verifiable_relu.bounds import sums
from verifiable_relu.bounds.operators import DenseOperator
from verifiable_relu.bounds.tuning import PLAIN, TUNING
from verifiable_relu.network.nodes import Linear


def test_mostly_zero_weights_are_multiplied_as_sparse_matrices() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(160, 200, generator=generator) * (torch.rand(160, 200, generator=generator) < 0.01)
    bias = torch.randn(160, generator=generator)
    node = Linear(name="fc", inputs=(0,), shape=(160,), weight=weight, bias=bias)
    operator = DenseOperator(node, TUNING)
    assert operator.sparse and not DenseOperator(node, PLAIN).sparse
    x = torch.randn(3, 200, generator=generator, requires_grad=True)
    a = torch.randn(3, 160, generator=generator, requires_grad=True)
    torch.testing.assert_close(operator.forward(x), x @ weight.T + bias)
    torch.testing.assert_close(operator.linear(x), x @ weight.T)
    torch.testing.assert_close(operator.absolute(x), x @ weight.abs().T)
    torch.testing.assert_close(operator.adjoint(a, (200,)), a @ weight)
    torch.testing.assert_close(operator.adjoint(a[:, None], (200,)), (a @ weight)[:, None])
    (operator.adjoint(a, (200,)).square().sum() + operator.linear(x).square().sum()).backward()
    torch.testing.assert_close(a.grad, 2 * (a @ weight @ weight.T).detach())
    torch.testing.assert_close(x.grad, 2 * (x @ weight.T @ weight).detach())
    assert not DenseOperator(replace(node, weight=weight.clone().requires_grad_()), TUNING).sparse
    assert not DenseOperator(replace(node, weight=torch.ones(160, 200)), TUNING).sparse


@pytest.mark.parametrize("least", (1, 8, 48, 96))
@pytest.mark.parametrize("count", (1, 2, 7, 95, 96, 97, 100, 192, 194, 509, 784, 3072))
def test_numbers_are_summed_in_lines_of_the_least_length_that_divides_their_number(count: int, least: int) -> None:
    lines, length = sums.lines(count, least)
    assert lines * length == count and length >= min(count, least)
    assert not any(count % n == 0 for n in range(min(count, least), length))
    for first, second in (sums.steps(lines, 16), sums.steps(lines, 1)):
        assert first * second == lines


@pytest.mark.parametrize("seed", range(draws(20)))
def test_products_of_rows_are_those_of_each_row(seed: int) -> None:
    """Products with one or several groups and rows are those of each row alone."""
    rng = np.random.default_rng(seed)
    groups, each, size = (int(n) for n in rng.integers(1, 5, 3))

    def whole(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(-9, 10, shape)).double()

    a, other = whole(groups, each, size), whole(groups, each, size)
    for held in {1, groups}:
        values, more = whole(held, size), whole(held, size)
        expected = (a * values[:, None]).sum(2)
        assert torch.equal(sums.dot(a, values), expected)
        assert torch.equal(sums.dot(a, values, (other, more)), expected + (other * more[:, None]).sum(2))
