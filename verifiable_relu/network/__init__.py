"""The network as the verifiers see it; from ONNX and torch, to ONNX."""

from verifiable_relu.network.family import hardened
from verifiable_relu.network.graph import Network
from verifiable_relu.network.module import from_torch
from verifiable_relu.network.onnx import EVERYTHING, Chosen, compare_at, onnx_bytes, read_onnx, write_onnx

__all__ = [
    "EVERYTHING",
    "Chosen",
    "Network",
    "compare_at",
    "from_torch",
    "hardened",
    "onnx_bytes",
    "read_onnx",
    "write_onnx",
]
