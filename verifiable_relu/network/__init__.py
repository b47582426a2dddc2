"""The network as the verifiers see it; from ONNX and torch, to ONNX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verifiable_relu.network.family import hardened
from verifiable_relu.network.graph import Network
from verifiable_relu.network.onnx import EVERYTHING, Chosen, compare_at, deployed, onnx_bytes, read_onnx, write_onnx

if TYPE_CHECKING:
    from verifiable_relu.network.module import from_torch

__all__ = [
    "EVERYTHING",
    "Chosen",
    "Network",
    "compare_at",
    "deployed",
    "from_torch",
    "hardened",
    "onnx_bytes",
    "read_onnx",
    "write_onnx",
]


def __getattr__(name: str) -> Any:
    """``from_torch``, which a network of a file need not wait for."""
    if name == "from_torch":
        from verifiable_relu.network.module import from_torch

        return from_torch
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
