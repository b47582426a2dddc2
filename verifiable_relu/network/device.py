"""The devices that networks run on, by name."""

from __future__ import annotations

import torch

from verifiable_relu.errors import InputError


def device(name: str) -> str:
    """The torch device of a name, of which it is certain that it exists; ``auto`` is a GPU if there is one.

    Raises:
        InputError: if torch does not have it.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    require_device(name)
    return name


def require_device(name: str) -> None:
    """Make certain that torch has the device, and that numbers come back from it (``meta`` holds none).

    Raises:
        InputError: if it does not.
    """
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError) as error:
        # What torch says first is enough; it goes on for a page.
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise InputError(f"no device '{name}': {reason}") from None
