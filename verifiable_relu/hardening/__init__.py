"""The hardening of a trained model: its smooth activations become ReLU by fine-tuning while λ grows."""

from verifiable_relu.hardening.annealing import Annealing, soften
from verifiable_relu.hardening.change import Change
from verifiable_relu.hardening.loop import Hardened, Step, harden
from verifiable_relu.nn.places import Place

__all__ = ["Annealing", "Change", "Hardened", "Place", "Step", "harden", "soften"]
