"""The kinds of node of a network: affine maps, activations, products, and what moves or adds numbers."""

from verifiable_relu.network.nodes.activations import (
    FUNCTIONS,
    Activation,
    Curve,
    Function,
    Gelu,
    Hardened,
    Identity,
    Kinked,
    LeakyRelu,
    Relu,
    Sigmoid,
    Smooth,
    Tanh,
    curve,
)
from verifiable_relu.network.nodes.affine import Affine, Conv2d, Linear, Scale, Sparse
from verifiable_relu.network.nodes.bilinear import Bilinear, MatMul, Product
from verifiable_relu.network.nodes.node import Add, Input, Maximum, Node, Permute, Reshape, Shape

__all__ = [
    "FUNCTIONS",
    "Activation",
    "Add",
    "Affine",
    "Bilinear",
    "Conv2d",
    "Curve",
    "Function",
    "Gelu",
    "Hardened",
    "Identity",
    "Input",
    "Kinked",
    "LeakyRelu",
    "Linear",
    "MatMul",
    "Maximum",
    "Node",
    "Permute",
    "Product",
    "Relu",
    "Reshape",
    "Scale",
    "Shape",
    "Sigmoid",
    "Smooth",
    "Sparse",
    "Tanh",
    "curve",
]
