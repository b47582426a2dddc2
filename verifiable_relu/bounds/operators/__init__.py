"""Products with the weights of affine maps, as fast as bound propagation needs them."""

from verifiable_relu.bounds.operators.convolution import ConvolutionOperator
from verifiable_relu.bounds.operators.dense import DenseOperator
from verifiable_relu.bounds.operators.operator import Operator
from verifiable_relu.bounds.operators.prepared import Operators, prepared

__all__ = ["ConvolutionOperator", "DenseOperator", "Operator", "Operators", "prepared"]
