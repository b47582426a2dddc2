"""Public data sets, read from their official files as arrays in [0, 1]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verifiable_relu.data.dataset import Dataset as Dataset
    from verifiable_relu.data.dataset import load as load

__all__ = ["Dataset", "load"]


def __getattr__(name: str) -> Any:
    # ``dataset`` imports numpy, for which a command's --help, which lists the data sets, need not wait.
    if name in __all__:
        from verifiable_relu.data import dataset

        return getattr(dataset, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
