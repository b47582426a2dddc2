"""Train with λ-GELU, harden to ReLU, and prove properties of the network."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verifiable_relu.api import verify as verify

# OpenMP's threads wait for one another by spinning. Where other processes (or other guests of a virtual machine) want
# the cores too, that made everything up to fifty times slower here. It is read when torch is loaded, and not after.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# torch's library for convolutions keeps what it has prepared, for 1,024 shapes by default. Rows of bounds come in ever
# other numbers: it held hundreds of MiB that were not asked for again. Read at the first convolution.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")

__version__ = "0.2.0"
__all__ = ["__version__", "verify"]


def __getattr__(name: str) -> Any:
    # torch comes with it, which a command's --help should not wait for.
    if name == "verify":
        from verifiable_relu.api import verify

        return verify
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
