"""Train with λ-GELU, harden to ReLU, and prove properties of the network."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verifiable_relu.api import Perturbation as Perturbation
    from verifiable_relu.api import certified_radius as certified_radius
    from verifiable_relu.api import verify as verify
    from verifiable_relu.api import verify_change as verify_change
    from verifiable_relu.api import verify_properties as verify_properties
    from verifiable_relu.api import verify_radii as verify_radii
    from verifiable_relu.hardening import harden as harden
    from verifiable_relu.readers import write_onnx as write_onnx
    from verifiable_relu.report.figures import plot_certified as plot_certified
    from verifiable_relu.report.figures import plot_times as plot_times

# OpenMP's threads wait for one another in busy loops by default. OpenMP reads the variable when torch is loaded, and
# not after; ``settings`` says more.
TORCH_CAME_FIRST = "torch" in sys.modules and "OMP_WAIT_POLICY" not in os.environ
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

COPIED: list[int] = []
"""The processes, from this one's ancestors to itself, that were forked when torch was there."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: COPIED.append(os.getpid()) if "torch" in sys.modules else None)

# oneDNN, torch's library for convolutions, keeps prepared kernels for the last 1,024 shapes by default. Bounds come in
# batches of ever other sizes, and the kernels kept for them took hundreds of MiB without being used again. oneDNN reads
# the variable at the first convolution.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")

__version__ = "0.3.0"
__all__ = [
    "Perturbation",
    "__version__",
    "certified_radius",
    "harden",
    "plot_certified",
    "plot_times",
    "specs",
    "verify",
    "verify_change",
    "verify_properties",
    "verify_radii",
    "write_onnx",
]


_MODULES = {
    **dict.fromkeys(__all__, "api"),
    "harden": "hardening",
    "plot_certified": "report.figures",
    "plot_times": "report.figures",
    "write_onnx": "readers",
}


def specs() -> Path:
    """Return the folder of the networks and properties that come with the package; its README describes them."""
    package = Path(__file__).parent
    # A wheel has the folder inside the package, a checkout next to it.
    return package / "specs" if (package / "specs").is_dir() else package.parent / "specs"


def __getattr__(name: str) -> Any:
    # These import torch, which takes about a second; a command's --help does without it.
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"verifiable_relu.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
