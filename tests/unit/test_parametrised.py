"""Weights that parametrisations and old hooks compute are a module's numbers; others that it computes are not."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from verifiable_relu import verify
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.network import Network
from verifiable_relu.nn import LambdaGELU
from verifiable_relu.readers import from_torch

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

Trick = Callable[[nn.Module], nn.Module]


class Third(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 3


def scaled(layer: nn.Module) -> nn.Module:
    """Two parametrisations in a row, of the weight and of the bias."""
    parametrize.register_parametrization(layer, "bias", Third())
    parametrize.register_parametrization(layer, "weight", Third())
    parametrize.register_parametrization(layer, "weight", Third())
    return layer


def masked(layer: nn.Module) -> nn.Module:
    """A mask of other numbers than 0 and 1."""
    prune.custom_from_mask(layer, "weight", torch.full_like(layer.weight, 0.3))
    return layer


TRICKS: dict[str, tuple[Trick, Callable[[nn.Module], object]]] = {
    "weight norm": (parametrizations.weight_norm, lambda m: parametrize.remove_parametrizations(m, "weight")),
    "spectral norm": (parametrizations.spectral_norm, lambda m: parametrize.remove_parametrizations(m, "weight")),
    "orthogonal": (parametrizations.orthogonal, lambda m: parametrize.remove_parametrizations(m, "weight")),
    "own": (scaled, lambda m: [parametrize.remove_parametrizations(m, name) for name in ("weight", "bias")]),
    "old weight norm": (nn.utils.weight_norm, nn.utils.remove_weight_norm),
    "old spectral norm": (nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
    "pruned": (masked, lambda m: prune.remove(m, "weight")),
}


class Nested(nn.Module):
    """Layers inside of layers, one of them used twice, λ-gates, and a lock, which no copy can be made of."""

    def __init__(self, trick: Trick, *between: nn.Module) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Sequential(trick(nn.Conv2d(1, 4, 2)), LambdaGELU(3.0)), *between, nn.Flatten())
        self.shared, self.last = trick(nn.Linear(4, 4)), trick(nn.Linear(4, 3))
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        h = self.shared(F.relu(self.first(x)))
        found: Tensor = self.last(F.relu(self.shared(F.relu(h))) + h)
        return found


def made(trick: Trick, *between: nn.Module) -> Nested:
    torch.manual_seed(1)
    net = Nested(trick, *between)
    with torch.no_grad():
        # What is computed once for all, as a hook's weight is, is stale from here on.
        for parameter in net.parameters():
            parameter.mul_(1.7)
        net.train()(torch.rand(2, 1, 2, 2))
    return net


def without(net: Nested, remove: Callable[[nn.Module], object]) -> Nested:
    """The module that remains where its parametrisations and hooks are removed."""
    net.eval()
    for layer in (net.first[0][0], net.shared, net.last):
        remove(layer)
    return net.train()


def same(ours: Network, theirs: Network) -> bool:
    return ours.digest == theirs.digest


@pytest.mark.parametrize("name", TRICKS)
@pytest.mark.parametrize("between", [(), (nn.LayerNorm([4, 1, 1]),)], ids=["followed", "exported"])
def test_a_parametrised_weight_is_the_one_that_stays_when_the_parametrisation_is_removed(
    name: str, between: tuple[nn.Module, ...]
) -> None:
    trick, remove = TRICKS[name]
    net, plain = made(trick, *between), without(made(trick, *between), remove)
    x = torch.rand(5, 1, 2, 2)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    parts = [(m.training, dict(m._forward_pre_hooks), set(vars(m))) for m in net.modules()]
    assert same(from_torch(net, (1, 2, 2), exact=True), from_torch(plain, (1, 2, 2), exact=True))
    assert [(m.training, dict(m._forward_pre_hooks), set(vars(m))) for m in net.modules()] == parts
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    with torch.no_grad():
        assert torch.equal(net.eval()(x), plain.eval()(x))


class Forward(nn.Module):
    """A layer whose forward computes with a parametrised weight."""

    def __init__(self, function: Callable[[Forward, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer, self.w = parametrizations.weight_norm(nn.Linear(4, 4)), nn.Parameter(torch.rand(4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Depending(nn.Module):
    """A parametrisation that computes with whatever was put there last."""

    seen = torch.ones(())

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.seen


def depending(m: Forward, x: Tensor) -> Tensor:
    m.layer.parametrizations.bias[0].seen = F.relu(x.flatten()[0] - 100)
    found: Tensor = m.layer(x)
    return found


REFUSED: dict[str, Callable[[Forward, Tensor], Tensor]] = {
    "of a parameter": lambda m, x: m.layer(x) + m.w * 0.3,
    "of a parametrised weight": lambda m, x: F.linear(x, m.layer.weight * 0.3),
    "of a weight and its like": lambda m, x: F.linear(x, m.layer.weight / m.layer.weight.norm()),
    "before what is exported": lambda m, x: F.layer_norm(m.layer(x), (4,)) @ torch.outer(m.w, m.w).div(3),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_constants_that_a_module_computes_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"computed by the module .*parametrize") as caught:
        verify(Forward(REFUSED[name]), np.full((1, 4), 0.5, np.float32), [0], 0.1)
    assert "\n" not in str(caught.value)


def test_a_parametrised_weight_that_depends_on_the_input_is_read_as_what_it_computes() -> None:
    net = Forward(depending)
    parametrize.register_parametrization(net.layer, "bias", Depending())
    network = from_torch(net, (4,), exact=True)
    for first in (0.5, 101.0):
        x = torch.tensor([[first, 0.5, -1.0, 2.0]])
        torch.testing.assert_close(network(x.double()).float(), net(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: F.linear(x, m.layer.weight.mul(1).mul_(0.3)),
        lambda m, x: F.layer_norm(parametrised_meanwhile(m, x), (4,)),
    ],
)
def test_a_module_that_changes_its_own_tensors_as_it_runs_is_refused(
    function: Callable[[Forward, Tensor], Tensor],
) -> None:
    with pytest.raises(UnsupportedError, match="changed in place while the module runs"):
        from_torch(Forward(function), (4,), exact=True)


def parametrised_meanwhile(m: Forward, x: Tensor) -> Tensor:
    if not parametrize.is_parametrized(m.layer, "bias"):
        parametrize.register_parametrization(m.layer, "bias", Depending())
    return depending(m, x)


def test_a_parametrised_weight_that_is_called_for_is_one_of_the_module() -> None:
    for function in (lambda m, x: F.linear(x, m.layer.weight), lambda m, x: x @ m.layer.parametrizations.weight().t()):
        net = Forward(function)
        (op,) = from_torch(net, (4,), exact=True).ops[1:]
        assert torch.equal(op.map.weight, net.layer.weight)  # type: ignore[attr-defined]
