"""The hardening of a trained model: its smooth activations become ReLU by fine-tuning while λ grows."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verifiable_relu.hardening.loop import Hardened as Hardened
    from verifiable_relu.hardening.loop import Step as Step
    from verifiable_relu.hardening.loop import harden as harden
    from verifiable_relu.hardening.loop import soften as soften
    from verifiable_relu.nn.places import Place as Place
    from verifiable_relu.train.schedule import Annealing as Annealing
    from verifiable_relu.train.swap import Change as Change

_HOMES = {
    "Annealing": "train.schedule",
    "Change": "train.swap",
    "Hardened": "hardening.loop",
    "Place": "nn.places",
    "Step": "hardening.loop",
    "harden": "hardening.loop",
    "soften": "hardening.loop",
}
__all__ = ["Annealing", "Change", "Hardened", "Place", "Step", "harden", "soften"]


def __getattr__(name: str) -> Any:
    # These import torch; a command's --help does without it.
    if name in _HOMES:
        return getattr(import_module(f"verifiable_relu.{_HOMES[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
