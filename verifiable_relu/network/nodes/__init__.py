"""The kinds of node of a network: affine maps, activations, and what moves or adds numbers."""

from verifiable_relu.network.nodes.activations import (
    Activation,
    Gelu,
    Hardened,
    LeakyRelu,
    Relu,
    Sigmoid,
    Tanh,
)
from verifiable_relu.network.nodes.affine import Affine, Conv2d, Linear, Scale, Sparse
from verifiable_relu.network.nodes.node import Add, Input, Node, Permute, Reshape, Shape

__all__ = [
    "Activation",
    "Add",
    "Affine",
    "Conv2d",
    "Gelu",
    "Hardened",
    "Input",
    "LeakyRelu",
    "Linear",
    "Node",
    "Permute",
    "Relu",
    "Reshape",
    "Scale",
    "Shape",
    "Sigmoid",
    "Sparse",
    "Tanh",
]
