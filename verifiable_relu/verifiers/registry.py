"""The methods by name. Only the chosen one is imported, so that naming them costs nothing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from verifiable_relu.errors import InputError

if TYPE_CHECKING:
    from verifiable_relu.verifiers.base import Verifier

_METHODS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "auto": ("portfolio", "Auto", {}),
    "attack": ("attack", "Attack", {}),
    "ibp": ("incomplete", "Ibp", {}),
    "crown-ibp": ("incomplete", "CrownIbp", {}),
    "crown": ("incomplete", "Crown", {}),
    "alpha-crown": ("incomplete", "AlphaCrown", {}),
    "split": ("input_split", "InputSplit", {}),
    "bab": ("bab", "Bab", {}),
    "milp": ("milp", "Milp", {}),
    "smt": ("smt", "Smt", {}),
    "auto_lirpa": ("adapters.auto_lirpa", "AutoLirpa", {}),
    "auto_lirpa-ibp": ("adapters.auto_lirpa", "AutoLirpa", {"bound": "ibp"}),
    "auto_lirpa-crown": ("adapters.auto_lirpa", "AutoLirpa", {"bound": "crown"}),
    "auto_lirpa-alpha-crown": ("adapters.auto_lirpa", "AutoLirpa", {"bound": "alpha-crown"}),
}

_ON_DEVICE = ("auto", "attack", "ibp", "crown-ibp", "crown", "alpha-crown", "split")
"""Methods that run on any torch device; the others run on the CPU."""

_LIMITED = ("auto", "ibp", "crown-ibp", "crown", "alpha-crown", "split", "bab")
"""Methods whose memory the user can limit."""


def methods() -> tuple[str, ...]:
    """The names that :func:`make` knows."""
    return tuple(_METHODS)


def make(name: str, device: str = "cpu", memory: int | None = None) -> Verifier:
    """A verifier with default options, by name.

    Args:
        name: one of :func:`methods`.
        device: where it runs.
        memory: a limit in bytes on what its bounds hold at once; None leaves the method's own.

    Raises:
        InputError: if there is no such method, it does not run on ``device``, or it takes no limit of memory.
    """
    if name not in _METHODS:
        raise InputError(f"unknown method '{name}'; there are {', '.join(_METHODS)}")
    if device != "cpu" and name not in _ON_DEVICE:
        raise InputError(f"the method '{name}' runs on the CPU only")
    if memory is not None and name not in _LIMITED:
        raise InputError(f"the method '{name}' takes no limit of memory; these do: {', '.join(_LIMITED)}")
    module, kind, options = _METHODS[name]
    if name in _ON_DEVICE:
        options = {**options, "device": device}
    if memory is not None:
        options = {**options, "memory": memory}
    return cast("Verifier", getattr(import_module(f"verifiable_relu.verifiers.{module}"), kind)(**options))
