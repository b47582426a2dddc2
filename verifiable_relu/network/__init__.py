"""The network as the verifiers see it; from ONNX and torch, to ONNX."""

from verifiable_relu.network.family import hardened
from verifiable_relu.network.graph import Network
from verifiable_relu.network.module import from_torch
from verifiable_relu.network.read import read_onnx
from verifiable_relu.network.write import write_onnx

__all__ = ["Network", "from_torch", "hardened", "read_onnx", "write_onnx"]
