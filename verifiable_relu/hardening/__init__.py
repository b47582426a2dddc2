"""The hardening of a trained model: its smooth activations become ReLU by fine-tuning while λ grows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verifiable_relu.hardening.loop import HardenedModel as HardenedModel
    from verifiable_relu.hardening.loop import harden as harden
    from verifiable_relu.hardening.loop import soften as soften
    from verifiable_relu.nn.places import SmoothActivation as SmoothActivation
    from verifiable_relu.train.batches import SubstitutionEffect as SubstitutionEffect
    from verifiable_relu.train.loop import Annealing as Annealing
    from verifiable_relu.train.loop import TrainingStep as TrainingStep

__all__ = ["Annealing", "HardenedModel", "SmoothActivation", "SubstitutionEffect", "TrainingStep", "harden", "soften"]


def __getattr__(name: str) -> Any:
    # The loop imports torch; a command's --help does without it.
    if name in __all__:
        from verifiable_relu.hardening import loop

        return getattr(loop, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
