"""Linear maps against the dense matrix of their entries, and against exact integers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from verifiable_relu.ir import linear
from verifiable_relu.ir.linear import Convolution, Dense, Diagonal, Gather, LinearMap, Sparse


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _few(out: int, inner: int) -> Tensor:
    return torch.where(_random(out, inner, seed=1) > 2.2, _random(out, inner), 0.0)


MAPS: dict[str, LinearMap] = {
    "dense": Dense(_random(4, 7)),
    "dense float64": Dense(_random(4, 7).double() / 3),
    "copies": Dense(_random(4, 3), copies=5),
    "dense, few weights": Dense(_few(150, 160)),
    "diagonal": Diagonal(_random(9)),
    "permutation": Gather(torch.tensor([2, 0, 1, 3]), 4),
    "padding and slice": Gather(torch.tensor([-1, 4, 2, -1]), 6),
    "repetition": Gather(torch.tensor([1, 1, -1, 0, 1, 3]), 5),
    "sparse": Sparse(
        torch.tensor([[0, 3], [3, 1], [2, 2], [3, 0]]), _random(4, 2) * torch.tensor([1, 0, 1, 1])[:, None], 5
    ),
    "convolution": Convolution(_random(4, 2, 3, 3), (2, 6, 5), padding=(1, 1, 1, 1)),
    "stride": Convolution(_random(4, 2, 3, 3), (2, 7, 8), stride=(2, 2), padding=(1, 0, 1, 2)),
    "stride 3, rest": Convolution(_random(2, 2, 2, 4), (2, 9, 11), stride=(3, 3)),
    "unequal strides": Convolution(_random(3, 2, 2, 3), (2, 7, 8), stride=(2, 1), padding=(0, 1, 1, 0)),
    "dilation": Convolution(_random(3, 2, 3, 2), (2, 8, 7), stride=(2, 2), padding=(2, 1, 0, 1), dilation=(2, 3)),
    "groups": Convolution(_random(6, 2, 3, 2), (4, 5, 6), stride=(1, 2), padding=(1, 1, 0, 1), groups=2),
    "depthwise": Convolution(_random(4, 1, 2, 2), (4, 6, 6), stride=(2, 2), groups=4),
}
over_maps = pytest.mark.parametrize("name", MAPS)


def _matrix(of: LinearMap) -> Tensor:
    rows, columns, weights = of.entries()
    assert bool((weights != 0).all())
    return torch.zeros(of.n_out, of.n_in, dtype=torch.float64).index_put_((rows, columns), weights.double(), True)


def _reference(name: str) -> Tensor:
    """The matrix by torch's own operators, one column at a time."""
    of, unit = MAPS[name], torch.eye(MAPS[name].n_in, dtype=torch.float64)
    weight = of.weight.double()
    if isinstance(of, Convolution):
        top, left, bottom, right = of.padding
        image = torch.nn.functional.pad(unit.view(-1, *of.in_shape), (left, right, top, bottom))
        columns = torch.nn.functional.conv2d(image, weight, None, of.stride, 0, of.dilation, of.groups).flatten(1)
    elif isinstance(of, Dense):
        columns = torch.nn.functional.linear(unit.unflatten(1, (of.copies, -1)), weight).flatten(1)
    elif isinstance(of, Diagonal):
        columns = unit * weight
    elif isinstance(of, Gather):
        columns = torch.stack([unit[:, i] * (i >= 0) for i in of.index], 1)
    else:
        assert isinstance(of, Sparse)
        columns = torch.stack([unit[:, i] @ w for i, w in zip(of.index, weight, strict=True)], 1)
    return columns.T


@over_maps
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("products", [False, True])
def test_products_are_those_of_the_matrix(
    name: str, dtype: torch.dtype, products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if products:
        # As on a device whose library may transform convolutions; in parts of one sample.
        monkeypatch.setattr(linear, "_sums_directly", lambda x: False)
        monkeypatch.setattr(linear, "PATCH_ENTRIES", 1)
    of, matrix = MAPS[name], _reference(name)
    x, a = _random(3, of.n_in).to(dtype), _random(6, of.n_out, seed=2).to(dtype)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(_matrix(of), matrix, rtol=0, atol=0)
    for found, expected in (
        (of.apply(x), x.double() @ matrix.T),
        (of.abs_apply(x), x.double() @ matrix.abs().T),
        (of.transpose(a), a.double() @ matrix),
    ):
        assert found.dtype == dtype and found.is_contiguous()
        torch.testing.assert_close(found.double(), expected, **close)
    index = torch.randint(of.n_out, (5,), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(of.rows(index, dtype), matrix[index].to(dtype), rtol=0, atol=0)


@over_maps
def test_numpy_product_of_other_numbers_is_exact(name: str) -> None:
    of = MAPS[name]
    generator = np.random.default_rng(0)
    signs = torch.from_numpy(generator.integers(1, 4, of.weight.shape)) if not isinstance(of, Gather) else torch.ones(1)
    # Zeros of the layout stay zeros, so that the entries are those of the same positions.
    whole = torch.where(of.weight == 0, 0, signs).double()
    x = np.array([int(v) * 10**30 + 1 for v in generator.integers(-9, 9, of.n_in)], dtype=object)
    numbers = np.frompyfunc(int, 1, 1)(whole.numpy())
    found = of.product(np.asarray(numbers, dtype=object), x)
    expected = [Fraction(0)] * of.n_out
    kept, of.weight = of.weight, whole
    try:
        for row, column, weight in zip(*(part.tolist() for part in of.entries()), strict=True):
            expected[row] += int(weight) * x[column]
    finally:
        of.weight = kept
    assert found.shape == (of.n_out,) and all(isinstance(v, int) for v in found)
    assert list(found) == expected


@over_maps
def test_sums_have_no_more_terms_than_the_map_says(name: str) -> None:
    of, used = MAPS[name], _matrix(MAPS[name]) != 0
    assert int(used.sum(1).max()) <= max(of.terms, 1) and int(used.sum(0).max()) <= max(of.back_terms, 1)
    whole = {0.0, 1.0, -1.0}.issuperset(_matrix(of).flatten().tolist())
    assert of.terms or (whole and int(used.sum(1).max()) <= 1)
    assert of.back_terms or (whole and int(used.sum(0).max()) <= 1)
    if isinstance(of, Convolution) and name in ("convolution", "stride", "dilation"):
        assert int(used.sum(0).max()) == of.back_terms


@over_maps
def test_a_map_takes_part_in_gradients_after_inference(name: str) -> None:
    fresh = type(MAPS[name]).__new__(type(MAPS[name]))
    fresh.__dict__.update(MAPS[name].__dict__ | {"_cache": linear.TensorCache()})
    with torch.inference_mode():
        fresh.apply(torch.ones(1, fresh.n_in)), fresh.transpose(torch.ones(1, fresh.n_out))
    x = torch.ones(2, fresh.n_in, requires_grad=True)
    fresh.apply(x).sum().backward()
    torch.testing.assert_close(x.grad.double(), _matrix(fresh).sum(0).expand(2, -1), rtol=1e-5, atol=1e-5)
    a = torch.ones(2, fresh.n_out, requires_grad=True)
    fresh.transpose(a).sum().backward()
    torch.testing.assert_close(a.grad.double(), _matrix(fresh).sum(1).expand(2, -1), rtol=1e-5, atol=1e-5)


def test_nothing_is_read_where_a_gather_has_no_element() -> None:
    padded = Gather(torch.tensor([-1, 0]), 1)
    assert padded.apply(torch.tensor([[torch.inf]])).tolist() == [[0.0, torch.inf]]
    assert padded.transpose(torch.tensor([[torch.inf, 1.0]])).tolist() == [[1.0]]


def test_the_error_of_weights_in_another_dtype() -> None:
    assert Dense(_random(2, 3)).conversion_error(torch.float64) == 0
    third = Dense(torch.tensor([[1 / 3, 2.0]], dtype=torch.float64))
    assert 0 < third.conversion_error(torch.float32) <= 2.0**-24
    for lost in (1e-300, 1e-39, 1e300):
        assert Dense(torch.tensor([[lost]], dtype=torch.float64)).conversion_error(torch.float32) == torch.inf
