"""Hardening a model in the style of Hugging Face's transformers: named arguments in, a loss and logits out.

    python examples/hugging_face_like.py [FOLDER]

The classes below are written as those of ``transformers`` are: activations by name from a table, ``labels`` among the
arguments, an output object. They are found by what they compute, whatever they are called.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifiable_relu import harden, verify


class NewGELUActivation(nn.Module):
    """GELU by tanh, written out as in GPT-2."""

    def forward(self, input: Tensor) -> Tensor:
        inner = math.sqrt(2.0 / math.pi) * (input + 0.044715 * torch.pow(input, 3.0))
        return 0.5 * input * (1.0 + torch.tanh(inner))


ACT2FN = {"gelu": F.gelu, "gelu_new": NewGELUActivation()}


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class Intermediate(nn.Module):
    def __init__(self, width: int, hidden_act: str) -> None:
        super().__init__()
        self.dense_in = nn.Linear(width, 2 * width)
        self.dense_out = nn.Linear(2 * width, width)
        self.intermediate_act_fn = ACT2FN[hidden_act]

    def forward(self, hidden_states: Tensor, head_mask: Tensor | None = None) -> Tensor:
        hidden = self.intermediate_act_fn(self.dense_in(hidden_states))
        if head_mask is not None:
            hidden = hidden * head_mask
        return hidden_states + self.dense_out(hidden)


class ForClassification(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Linear(2, 12)
        self.layer = nn.ModuleList([Intermediate(12, "gelu"), Intermediate(12, "gelu_new")])
        self.classifier = nn.Linear(12, 2)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Output:
        hidden = self.embeddings(inputs)
        for layer in self.layer:
            hidden = layer(hidden)
        logits = self.classifier(hidden)
        return Output(None if labels is None else F.cross_entropy(logits, labels), logits)


class Logits(nn.Module):
    """The model as a network of one input tensor and one output tensor, which is what is verified."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


def disc(count: int) -> list[dict[str, Tensor]]:
    """Batches of points of the unit square, and whether each lies in the disc of radius 0.35 around the centre."""
    points = torch.rand(count, 2)
    inside = ((points - 0.5).norm(dim=1) < 0.35).long()
    return [{"inputs": x, "labels": y} for x, y in zip(points.split(64), inside.split(64), strict=True)]


def main(folder: Path) -> dict[str, float]:
    """Run the example; returns the share of certified points and the accuracy after hardening."""
    torch.manual_seed(0)
    model, batches = ForClassification(), disc(2000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(20):
        for batch in batches:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()

    hardened = harden(model, batches, epochs=12)
    print(hardened)
    logits = Logits(hardened.model)
    test = disc(20)[0]
    answers = [result.answer for result in verify(logits, test["inputs"], test["labels"], eps=0.005, timeout=10)]
    print(f"certified: {answers.count('unsat')} of {len(answers)}")
    # The names of the weights are the model's own: they fit its class with ReLU written in place of GELU.
    torch.save(hardened.model.state_dict(), folder / "hugging_face.pt")
    return {"certified": answers.count("unsat") / len(answers), "accuracy": hardened.change.accuracy or 0.0}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
