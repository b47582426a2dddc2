"""Networks from ONNX files and to them."""

from verifiable_relu.network.onnx.read import read_onnx
from verifiable_relu.network.onnx.write import write_onnx

__all__ = ["read_onnx", "write_onnx"]
