"""λ-GELU, model builders, and the substitution of smooth activations by ReLU."""

from verifiable_relu.nn.activation import LambdaGELU
from verifiable_relu.nn.models import Normalize, cnn, mlp
from verifiable_relu.nn.substitute import substitute_relu

__all__ = ["LambdaGELU", "Normalize", "cnn", "mlp", "substitute_relu"]
