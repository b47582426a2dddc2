"""Networks from ONNX files and to them."""

from verifiable_relu.network.onnx.compare import compare_at
from verifiable_relu.network.onnx.read import onnx_bytes, read_onnx
from verifiable_relu.network.onnx.running import deployed
from verifiable_relu.network.onnx.write import write_onnx
from verifiable_relu.readers.onnx.model import EVERYTHING, Chosen

__all__ = ["EVERYTHING", "Chosen", "compare_at", "deployed", "onnx_bytes", "read_onnx", "write_onnx"]
