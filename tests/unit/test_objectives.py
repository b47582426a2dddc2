"""The losses against slow references and sampled points, their gradients, and what training with them is good for."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifiable_relu.data import Dataset, load
from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.ir.interval import Interval
from verifiable_relu.nn import LambdaGELU, LambdaSwish, Normalize, cnn, mlp, substitute_relu
from verifiable_relu.nn.gates import Approximate
from verifiable_relu.train import losses
from verifiable_relu.train.loop import accuracy, train
from verifiable_relu.train.losses import objective
from verifiable_relu.train.options import ARMS, Model, Options

HARDNESSES = (1.0, 20.0, 160.0, 1e4)
IBP = Options("x", eps=0.05, certified=0.7, stability=0.3)
CROWN = replace(IBP, certified_by="crown-ibp", warmup=1)
SABR = replace(IBP, certified_by="sabr", attack_steps=2)
Activation = Callable[[], nn.Module]


def small(activation: Activation = LambdaGELU) -> nn.Sequential:
    torch.manual_seed(0)
    return cnn((2, 6, 6), (3, 4), (5,), 3, activation, Normalize((0.2, 0.4), (0.5, 0.7)))


def images(n: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(n, 2, 6, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def loss_of(model: nn.Module, options: Options, fraction: float = 0.5) -> Tensor:
    return objective(model, *images(), options, fraction, torch.Generator().manual_seed(2))[0]


# The attack and the boxes


def test_attack_stays_in_the_ball_and_raises_the_loss() -> None:
    model, (x, y) = small(), images(50)
    point = losses.attacked(model, x, y, 0.1, 5, torch.Generator().manual_seed(0))
    assert (point - x).abs().max() <= 0.1 + 1e-6 and point.min() >= 0 and point.max() <= 1
    assert F.cross_entropy(model(point), y) > F.cross_entropy(model(x), y)
    assert all(p.grad is None for p in model.parameters())


# The bounds


@pytest.mark.combined
@pytest.mark.parametrize("linear", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("lam", HARDNESSES)
def test_bounds_contain_what_the_model_computes(lam: float, linear: float) -> None:
    model, (x, y) = small(lambda: LambdaGELU(lam)), images()
    with torch.no_grad():
        relaxation = losses.bounded(model, losses.ball(x, 0.05))
        worst = losses.worst_logits(relaxation, y, linear)
        for _ in range(100):
            value = (x + 0.05 * torch.randint(-1, 2, x.shape)).clamp(0, 1)
            seen = iter(losses.preactivations(relaxation))
            for module in model:
                if isinstance(module, LambdaGELU):
                    pre = next(seen)
                    inside = pre.lower <= value.flatten(1) + 1e-5, value.flatten(1) <= pre.upper + 1e-5
                    assert all(bool(each.all()) for each in inside)
                value = module(value)
            assert (value - value.gather(1, y[:, None]) <= worst + 1e-5).all()
        assert (worst.gather(1, y[:, None]).abs() < 1e-6).all()


def intervals(model: nn.Sequential, lb: Tensor, ub: Tensor, y: Tensor) -> Tensor:
    """Worst logits of a ReLU network by intervals, in the plainest way."""
    for module in model[:-1]:
        if isinstance(module, nn.Linear | nn.Conv2d):
            weight = module.weight.detach()
            positive, negative = weight.clamp(min=0), weight.clamp(max=0)
            if isinstance(module, nn.Linear):
                lower = lb @ positive.T + ub @ negative.T + module.bias
                upper = ub @ positive.T + lb @ negative.T + module.bias
            else:
                where = (None, module.stride, module.padding)
                offset = module.bias[:, None, None]
                lower = F.conv2d(lb, positive, *where) + F.conv2d(ub, negative, *where) + offset
                upper = F.conv2d(ub, positive, *where) + F.conv2d(lb, negative, *where) + offset
            lb, ub = lower, upper
        else:
            lb, ub = module(lb), module(ub)
    last = model[-1]
    assert isinstance(last, nn.Linear)
    rows = []
    for low, high, right in zip(lb, ub, y, strict=True):
        difference = last.weight - last.weight[right]
        reached = torch.where(difference > 0, difference * high, difference * low).sum(1)
        rows.append(reached + last.bias - last.bias[right])
    return torch.stack(rows)


def test_worst_logits_are_those_of_plain_intervals() -> None:
    model, (x, y) = small(nn.ReLU).double(), images()
    box = losses.ball(x.double(), 0.05)
    with torch.no_grad():
        worst = losses.worst_logits(losses.bounded(model, box), y)
        torch.testing.assert_close(worst, intervals(model, box.lower, box.upper, y))


def test_crown_ibp_is_the_average_of_its_two_bounds() -> None:
    model, (x, y) = small(nn.ReLU), images()
    relaxation = losses.bounded(model, losses.ball(x, 0.02))
    by_intervals, between, by_lines = (losses.worst_logits(relaxation, y, beta) for beta in (0.0, 0.25, 1.0))
    torch.testing.assert_close(between, 0.75 * by_intervals + 0.25 * by_lines)
    other = torch.arange(3) != y[:, None]
    assert (by_lines < by_intervals)[other].all(), "of so small a ball lines know far more"


def test_crown_ibp_ends_as_ibp() -> None:
    model = small()
    ibp, crown = (loss_of(model, options, fraction=1) for options in (IBP, CROWN))
    assert ibp == crown and loss_of(model, IBP) != loss_of(model, CROWN)


@pytest.mark.parametrize("slope", [0.25, -0.5])
def test_intervals_through_prelu_are_exact(slope: float) -> None:
    model = nn.Sequential(nn.PReLU(1, slope))
    lb, ub = torch.tensor([[-2.0, -1.0, 0.5]]), torch.tensor([[-1.0, 2.0, 1.0]])
    found = losses.bounded(model, Interval(lb, ub)).bounds[-1].interval
    values = model(lb + (ub - lb) * torch.linspace(0, 1, 301)[:, None])
    torch.testing.assert_close(found.lower[0], values.amin(0))
    torch.testing.assert_close(found.upper[0], values.amax(0))


def test_swish_is_bounded_as_the_relu_it_becomes() -> None:
    swish, (x, y) = small(lambda: LambdaSwish(2.0)), images()
    box = losses.ball(x, 0.05)
    of_swish, of_relu = (
        losses.worst_logits(losses.bounded(model, box), y) for model in (swish, substitute_relu(swish))
    )
    assert torch.equal(of_swish, of_relu)
    of_swish.sum().backward()
    assert isinstance(swish[2], LambdaSwish)
    assert all(p.grad is not None and p.grad.any() for p in swish.parameters() if p.ndim > 1)


def test_an_activation_without_bounds_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="elu"):
        losses.bounded(small(nn.ELU), losses.ball(images()[0], 0.1))


# Gradients


@pytest.mark.combined
@pytest.mark.parametrize("lam", HARDNESSES)
@pytest.mark.parametrize("options", [IBP, CROWN, SABR], ids=lambda options: options.certified_by)
def test_gradients_reach_weights_and_hardness(options: Options, lam: float) -> None:
    model = small(lambda: LambdaGELU(lam))
    loss_of(model, options).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        # Between λ-GELUs so hard, and ReLU, nothing is left to be gained.
        assert parameter.grad.any() or (name.endswith("s") and lam > 20), name


@pytest.mark.thorough
@pytest.mark.combined
@pytest.mark.parametrize("lam", (1.0, 20.0))
@pytest.mark.parametrize(("linear", "approximate"), [(0.0, "none"), (0.4, "none"), (0.0, "tanh")])
def test_gradients_are_those_of_finite_differences(lam: float, linear: float, approximate: Approximate) -> None:
    torch.manual_seed(3)
    model = mlp([3, 4, 4, 2], lambda: LambdaGELU(lam, approximate=approximate)).double()
    x, y = torch.rand(2, 3).double(), torch.tensor([0, 1])
    names = [name for name, _ in model.named_parameters()]

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self) -> Tensor:
            relaxation = losses.bounded(self.model, Interval(x - 0.05, x + 0.05))
            worst = F.cross_entropy(losses.worst_logits(relaxation, y, linear), y)
            return worst + losses.instability(losses.preactivations(relaxation))

    whole = Loss()

    def loss(*values: Tensor) -> Tensor:
        given = {f"model.{name}": value for name, value in zip(names, values, strict=True)}
        result: Tensor = torch.func.functional_call(whole, given, ())
        return result

    start = tuple(p.detach().clone().requires_grad_(True) for p in model.parameters())
    assert torch.autograd.gradcheck(loss, start, eps=1e-7, atol=1e-5)


@pytest.mark.combined
@pytest.mark.thorough
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("model", get_args(Model))
@pytest.mark.parametrize("by", ["ibp", "crown-ibp", "sabr"])
def test_every_arm_and_model_trains_by_every_bound(arm: str, model: Model, by: str) -> None:
    data = Dataset("x", np.random.default_rng(0).random((40, 1, 8, 8), np.float32), np.arange(40) % 2, (0.5,), (0.3,),
                   np.ones(40, bool))  # fmt: skip
    options = Options("x", arm=arm, model=model, channels=(3,), hidden=(6,), epochs=2, batch=20, eps=0.05, warmup=1,
                      attack_steps=1, certified=0.5, certified_by=by, stability=0.1)  # type: ignore[arg-type]  # fmt: skip
    history = train(options, data).history
    assert len(history) == 2 and all(math.isfinite(epoch["loss"]) for epoch in history)


def test_the_whole_weight_is_the_loss_of_the_worst_logits() -> None:
    whole, (x, y) = replace(IBP, certified=1.0, stability=0.0), images()
    one, other = small(), small()
    loss_of(one, whole, fraction=1).backward()
    F.cross_entropy(losses.worst_logits(losses.bounded(other, losses.ball(x, 0.05)), y), y).backward()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)
    loss_of(one, whole, fraction=0).backward()


# Stability, and the growth of the terms


def test_instability_is_least_where_neurons_are_stable() -> None:
    def of(lb: float, ub: float) -> float:
        return losses.instability([Interval(torch.tensor([[lb]]), torch.tensor([[ub]]))]).item()

    assert of(1, 2) < of(0, 1) < of(-1, 1) < of(-2, 2)
    assert of(-3, -2) == of(2, 3) == pytest.approx(-math.tanh(7))
    both = [Interval(torch.ones(1, 2), torch.ones(1, 2)), Interval(torch.zeros(1, 1), torch.zeros(1, 1))]
    assert losses.instability(both).item() == pytest.approx(-(2 * math.tanh(2) + math.tanh(1)) / 3)


# Options


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"eps": 0.0}, "--certified: needs an --eps"),
        ({"certified_by": "crown"}, "--certified-by: 'crown' is not one of ibp"),
        ({"certified_by": "crown-ibp"}, "--certified-by: needs --warmup"),
        ({"certified_by": "sabr"}, "--certified-by: needs --attack-steps"),
        ({"certified": 0.0, "certified_by": "sabr", "attack_steps": 1}, "--certified-by: needs --certified"),
    ],
)
def test_bad_options_are_named(change: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        replace(IBP, **change)  # type: ignore[arg-type]


# Whole trainings


@pytest.mark.seldom
@pytest.mark.thorough
def test_training_gives_what_it_promises() -> None:
    """Certified images by IBP, and fewer unstable neurons by the term of stability, without loss of accuracy."""
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    data = load("digits", "train")
    x, y = torch.from_numpy(data.images), torch.from_numpy(data.labels)
    plain = Options("digits", hidden=(32, 32), epochs=12, batch=64, eps=0.05, warmup=4, rate=5e-3)
    shares, unstable = [], []
    for options in (plain, replace(plain, certified=0.5), replace(plain, eps=0.02, stability=2.0)):
        hard = substitute_relu(train(options, data).model)
        assert accuracy(hard, x, y) > 0.9
        with torch.no_grad():
            worst = losses.worst_logits(losses.bounded(hard, losses.ball(x, 0.05)), y)
        shares.append((worst.argmax(1) == y).double().mean().item())
        pre = losses.preactivations(losses.bounded(hard, losses.ball(x, 0.02)))
        unstable.append(sum(int(((each.lower < 0) & (each.upper > 0)).sum()) for each in pre))
    assert shares[0] < 0.3 and shares[1] > 0.6 and unstable[2] < 0.6 * unstable[0]
