"""The arms of a comparison of trainings: which activation is trained, and when ReLU takes its place.

A new arm is a row of ``ARMS``: the trainer, the commands and the benchmarks read what they need from there. No torch
is imported, so that ``--help`` stays quick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Hardness = Literal["none", "learned", "frozen"]
Swap = Literal["never", "switch", "end"]


@dataclass(frozen=True)
class Arm:
    """An activation and its replacement by ReLU.

    Attributes:
        activation: the class in ``verifiable_relu.nn`` or ``torch.nn`` that every hidden layer gets.
        about: one line for people.
        hardness: whether the activation has a hardness λ, which is annealed from the switch on, and whether λ is
            ``learned`` until then or ``frozen`` from the start.
        swap: when ReLU takes the activation's place: ``never``, at the ``switch`` (the rest of the training then
            fine-tunes the ReLU network), or at the ``end`` of the training.
    """

    activation: str
    about: str
    hardness: Hardness = "none"
    swap: Swap = "end"

    @property
    def ends_in_relu(self) -> bool:
        """Whether the network that the training leaves has ReLU for its activation."""
        return self.activation == "ReLU" or self.swap != "never"


ARMS = {
    "lambda-gelu": Arm("LambdaGELU", "λ-GELU; λ is learned, annealed after the switch; ReLU at the end", "learned"),
    "lambda-gelu-frozen": Arm("LambdaGELU", "the same annealing of a λ that was never learned", "frozen"),
    "swish": Arm("LambdaSwish", "as lambda-gelu, with Swish of equal distance to ReLU", "learned"),
    "gelu-swap": Arm("GELU", "GELU, ReLU at the end"),
    "gelu-swap-finetune": Arm("GELU", "GELU until the switch, ReLU from there on", swap="switch"),
    "relu": Arm("ReLU", "ReLU from the start", swap="never"),
    "prelu": Arm("PReLU", "PReLU, which is never replaced", swap="never"),
}
"""By name, in the order in which tables show them. Arms of equal seeds share initial weights and order of the data."""
