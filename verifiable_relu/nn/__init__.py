"""Modules for training: λ-GELU and λ-Swish, architectures, and the substitution of smooth activations by ReLU."""

from verifiable_relu.nn.gates import Hardness, LambdaGELU, LambdaSwish
from verifiable_relu.nn.models import Embedded, Normalize, cnn, fixed, mlp
from verifiable_relu.nn.places import substitute_relu

__all__ = [
    "Embedded",
    "Hardness",
    "LambdaGELU",
    "LambdaSwish",
    "Normalize",
    "cnn",
    "fixed",
    "mlp",
    "substitute_relu",
]
