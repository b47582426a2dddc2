"""Hardening a module in the style of PyTorch Lightning: its own training step and optimizers are used.

    python examples/lightning_like.py [FOLDER]

The class below has the methods of a ``LightningModule`` that matter here; with Lightning installed, derive from that.
In Lightning's own ``Trainer``, a callback whose ``on_train_batch_start`` calls ``Annealing.step`` does the same.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifiable_relu import harden, verify


class Block(nn.Module):
    """A residual block with SiLU as a module, and dropout as a function that asks for the training mode."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.act(self.linear(x)), 0.05, self.training)


class Classifier(nn.Module):
    """A classifier with a training step, a validation step and optimizers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 16), nn.SiLU(), Block(16), Block(16), nn.Linear(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y, label_smoothing=0.02)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def disc(count: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of points of the unit square, and whether each lies in the disc of radius 0.35 around the centre."""
    points = torch.rand(count, 2)
    inside = ((points - 0.5).norm(dim=1) < 0.35).long()
    return list(zip(points.split(64), inside.split(64), strict=True))


def main(folder: Path) -> dict[str, float]:
    """Run the example; returns the share of certified points and the accuracy after hardening."""
    torch.manual_seed(0)
    module, batches = Classifier(), disc(2000)
    optimizer = module.configure_optimizers()
    for _ in range(20):
        for index, batch in enumerate(batches):
            optimizer.zero_grad()
            module.training_step(batch, index).backward()
            optimizer.step()

    least: list[float] = []
    hardened = harden(
        module,
        batches,
        epochs=12,
        loss=lambda model, batch: model.training_step(batch, 0),
        optimizer=lambda model: model.configure_optimizers(),
        callbacks=[lambda step: least.append(min(step.lam))],
    )
    print(hardened)
    hardened.write(folder / "lightning.onnx")
    (x, y), *_ = disc(20)
    answers = [result.answer for result in verify(hardened.model, x, y, eps=0.005, timeout=10)]
    print(f"λ grew from {least[0]:.2f} to {least[-1]:.0f}; certified: {answers.count('unsat')} of {len(answers)}")
    return {"certified": answers.count("unsat") / len(answers), "accuracy": hardened.change.accuracy or 0.0}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
