"""Modules for training: λ-GELU and λ-Swish, architectures, and the substitution of smooth activations by ReLU."""

from verifiable_relu.nn.activation import LambdaGELU
from verifiable_relu.nn.hardness import HardnessGate
from verifiable_relu.nn.models import Normalize, cnn, fixed, mlp, resnet
from verifiable_relu.nn.substitute import substitute_relu
from verifiable_relu.nn.swish import LambdaSwish

__all__ = [
    "HardnessGate",
    "LambdaGELU",
    "LambdaSwish",
    "Normalize",
    "cnn",
    "fixed",
    "mlp",
    "resnet",
    "substitute_relu",
]
