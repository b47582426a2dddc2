"""The arms of a comparison of trainings: which activation is trained, and when ReLU takes its place.

A new arm is a row of ``ARMS``, from which the trainer, the commands and the benchmarks take what they need. The module
does not import torch, so that ``--help`` stays quick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Hardness = Literal["none", "learned", "frozen"]
Swap = Literal["never", "switch", "end"]


@dataclass(frozen=True)
class Arm:
    """The activation of a training, and the time at which ReLU replaces it.

    Attributes:
        activation: the name of the activation's class, in ``verifiable_relu.nn`` if the activation has a hardness λ and
            in ``torch.nn`` otherwise.
        about: a line about the arm for the user.
        hardness: ``none`` for an activation without λ. Otherwise λ is annealed from the switch on, and until then
            ``learned``, or ``frozen`` from the start.
        swap: the time at which ReLU replaces the activation: ``never``, at the ``switch`` (the rest of the training
            then fine-tunes the ReLU network), or at the ``end`` of the training.
    """

    activation: str
    about: str
    hardness: Hardness = "none"
    swap: Swap = "end"

    @property
    def ends_in_relu(self) -> bool:
        """Whether the trained network, as it is exported, has ReLU as its activation."""
        return self.activation == "ReLU" or self.swap != "never"


ARMS = {
    "lambda-gelu": Arm("LambdaGELU", "λ-GELU; λ is learned, annealed after the switch; ReLU at the end", "learned"),
    "lambda-gelu-frozen": Arm("LambdaGELU", "λ-GELU; λ is annealed after the switch, never learned", "frozen"),
    "swish": Arm("LambdaSwish", "as lambda-gelu, with Swish at the same distance to ReLU", "learned"),
    "gelu": Arm("GELU", "GELU, never replaced", swap="never"),
    "gelu-swap": Arm("GELU", "GELU; ReLU at the end"),
    "gelu-swap-finetune": Arm("GELU", "GELU until the switch, then ReLU", swap="switch"),
    "relu": Arm("ReLU", "ReLU from the start", swap="never"),
    "prelu": Arm("PReLU", "PReLU, never replaced", swap="never"),
}
"""The arms by name, in the order of the tables. With equal seeds, all arms start from the same weights and see the same
data in the same order."""
