"""What is computed once and kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

Made = TypeVar("Made")


class Once:
    """Values by key, each made when it is first asked for."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What ``make`` returned for the key when the key was new."""
        if key not in self._made:
            # A tensor made in inference mode could not take part in a gradient later.
            with torch.inference_mode(False):
                self._made[key] = make()
        found: Made = self._made[key]
        return found
