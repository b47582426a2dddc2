"""The training steps and single activations whose time ``activation_cost`` measures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifiable_relu.nn import LambdaGELU, LambdaSwish, cnn, mlp
from verifiable_relu.train.options import Options
from verifiable_relu.train.schedule import make_optimizer, set_rates

LAM = 1.7


def frozen() -> nn.Module:
    """λ-GELU with a frozen λ, as during the annealing."""
    gate = LambdaGELU(LAM)
    gate.freeze()
    return gate


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "nn.GELU": nn.GELU,
    "λ-GELU, learned": lambda: LambdaGELU(LAM),
    "λ-GELU, annealed": frozen,
    "λ-GELU, tanh form": lambda: LambdaGELU(LAM, approximate="tanh"),
    "nn.GELU, tanh form": lambda: nn.GELU("tanh"),
    "λ-Swish, learned": lambda: LambdaSwish(LAM),
    "nn.SiLU": nn.SiLU,
    "nn.ReLU": nn.ReLU,
}
PLAIN = {
    **dict.fromkeys(ACTIVATIONS, "nn.GELU"),
    "λ-GELU, tanh form": "nn.GELU, tanh form",
    "λ-Swish, learned": "nn.SiLU",
}
"""For each activation the same function without a hardness, with which it is compared besides nn.GELU."""

NETWORKS: dict[str, Callable[[Callable[[], nn.Module]], nn.Module]] = {
    "MLP 784-128-128-10": lambda make: mlp([784, 128, 128, 10], make),
    "MLP 784-512-512-10": lambda make: mlp([784, 512, 512, 10], make),
    "CNN 16,32 + 100": lambda make: cnn((1, 28, 28), (16, 32), (100,), 10, make),
}


def training_step(make: Callable[[Callable[[], nn.Module]], nn.Module], activation: str) -> Callable[[], None]:
    """One step of training on a fixed batch, as a function without arguments."""
    torch.manual_seed(0)
    model = make(ACTIVATIONS[activation])
    options = Options("random")
    optimizer = make_optimizer(model, options)
    x, y = torch.rand(128, 1, 28, 28), torch.randint(0, 10, (128,))

    def step() -> None:
        # The rate is small, so that the pre-activations hardly change during the measurement.
        set_rates(optimizer, model, 1e-6, options)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def bare(activation: str, shape: tuple[int, ...]) -> Callable[[], None]:
    """One forward and backward pass through an activation alone, as a function without arguments."""
    torch.manual_seed(0)
    module = ACTIVATIONS[activation]()
    x, gradient = torch.randn(shape, requires_grad=True), torch.randn(shape)

    def step() -> None:
        x.grad = None
        y: Tensor = module(x)
        y.backward(gradient)

    return step


def measure(steps: Sequence[Callable[[], None]], pairs: int) -> list[tuple[float, float, float, float]]:
    """The times of the activations' steps, which take turns.

    Args:
        steps: a step for each of ``ACTIVATIONS``.
        pairs: the number of turns that are measured.

    Returns:
        For each activation the median of its step's processor time in milliseconds, the median ratios to nn.GELU's in
        processor time and in wall-clock time, and the median ratio to its plain form's in processor time.
    """
    cpu: list[list[float]] = [[] for _ in steps]
    wall: list[list[float]] = [[] for _ in steps]
    for turn in range(-max(5, pairs // 10), pairs):
        for place, step in enumerate(steps):
            began = time.process_time(), time.perf_counter()
            step()
            if turn >= 0:
                cpu[place].append(time.process_time() - began[0])
                wall[place].append(time.perf_counter() - began[1])

    def ratio(times: list[list[float]], place: int, base: int) -> float:
        return statistics.median(a / b for a, b in zip(times[place], times[base], strict=True))

    names = list(ACTIVATIONS)
    return [
        (1e3 * statistics.median(cpu[i]), ratio(cpu, i, 0), ratio(wall, i, 0), ratio(cpu, i, names.index(PLAIN[name])))
        for i, name in enumerate(names)
    ]


def cases() -> Mapping[str, Callable[[], list[Callable[[], None]]]]:
    """The cases by name: each a function that makes a step for each of ``ACTIVATIONS``."""
    found: dict[str, Callable[[], list[Callable[[], None]]]] = {
        name: lambda make=make: [training_step(make, each) for each in ACTIVATIONS]  # type: ignore[misc]
        for name, make in NETWORKS.items()
    }
    for shape in ((128, 128), (128, 16, 14, 14)):
        name = f"bare, {' × '.join(map(str, shape))}"
        found[name] = lambda shape=shape: [bare(each, shape) for each in ACTIVATIONS]  # type: ignore[misc]
    return found
