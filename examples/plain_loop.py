"""From a GELU network to a certified ReLU network, with ``harden`` and with a training loop of one's own.

    python examples/plain_loop.py [FOLDER]

Points of the unit square are classified by whether they lie in a disc. The files go to FOLDER (by default the present
one): the hardened network as ONNX, and a robustness property in VNN-LIB for each tested point.
"""

import sys
from fractions import Fraction
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifiable_relu import harden, verify
from verifiable_relu.hardening import Annealing, soften
from verifiable_relu.nn import substitute_relu
from verifiable_relu.spec import linf_properties, write_vnnlib


class Net(nn.Module):
    """A network that calls F.gelu in its forward, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 24)
        self.second = nn.Linear(24, 24)
        self.last = nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        x = F.gelu(self.second(x))
        return self.last(x)


def disc(count: int) -> tuple[Tensor, Tensor]:
    """Points of the unit square, and whether each lies in the disc of radius 0.35 around the centre."""
    points = torch.rand(count, 2)
    return points, ((points - 0.5).norm(dim=1) < 0.35).long()


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    """A plain training loop."""
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for _ in range(epochs):
        for chosen in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()


def with_one_call(model: nn.Module, folder: Path) -> list[str]:
    """The ten lines: harden, write the network and its properties, certify."""
    data, (x, y) = disc(4000), disc(20)
    hardened = harden(model, data, epochs=15, region=(0, 1), progress=True)
    print(hardened)
    hardened.write(folder / "disc.onnx")
    for prop in linf_properties(x.numpy(), y.tolist(), Fraction(1, 100), classes=2):
        write_vnnlib(prop, folder / f"{prop.name}.vnnlib")
    results = verify(hardened.model, x, y, eps=Fraction(1, 100), timeout=10)
    return [result.answer for result in results]


def with_a_loop_of_ones_own(model: nn.Module) -> nn.Module:
    """The same in a training loop of one's own: gates in, λ grows with each step, ReLU in."""
    x, y = disc(2000)
    model, _ = soften(model)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    batches, epochs = list(torch.arange(len(x)).split(64)), 12
    annealing = Annealing(model, epochs * len(batches))
    for _ in range(epochs):
        for chosen in batches:
            annealing.step()
            optimizer.zero_grad()
            F.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
    return substitute_relu(model)


def main(folder: Path) -> dict[str, float]:
    """Run the example; returns the share of certified points, and the accuracies of both hardened networks."""
    torch.manual_seed(0)
    model = Net()
    train(model, *disc(2000), epochs=20)
    answers = with_one_call(model, folder)
    other = with_a_loop_of_ones_own(model)
    x, y = disc(1000)
    accuracy = (other(x).argmax(1) == y).float().mean().item()
    print(f"certified: {answers.count('unsat')} of {len(answers)}; the loop of one's own: accuracy {accuracy:.1%}")
    return {"certified": answers.count("unsat") / len(answers), "accuracy": accuracy}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
