"""The methods by name, a row each. Only the chosen one is imported, so that naming them costs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from verifiable_relu.errors import InputError

if TYPE_CHECKING:
    from verifiable_relu.verifiers.base import Verifier


@dataclass(frozen=True)
class Method:
    """Where a method's verifier is, and what the user may choose for it.

    Attributes:
        module: its module in ``verifiable_relu.verifiers``.
        verifier: the class of the verifier there.
        options: keyword arguments that make it this method.
        device: whether it runs on any torch device, as its argument ``device``; otherwise it runs on the CPU.
        memory: whether what its bounds hold at once can be limited, by its argument ``memory`` in bytes.
    """

    module: str
    verifier: str
    options: Mapping[str, Any] = field(default_factory=dict)
    device: bool = False
    memory: bool = False


METHODS = {
    "auto": Method("portfolio", "Auto", device=True, memory=True),
    "attack": Method("attack", "Attack", device=True),
    "ibp": Method("incomplete", "Ibp", device=True, memory=True),
    "crown-ibp": Method("incomplete", "CrownIbp", device=True, memory=True),
    "crown": Method("incomplete", "Crown", device=True, memory=True),
    "alpha-crown": Method("incomplete", "AlphaCrown", device=True, memory=True),
    "split": Method("input_split", "InputSplit", device=True, memory=True),
    "bab": Method("bab", "Bab", memory=True),
    "milp": Method("milp", "Milp"),
    "smt": Method("lazy", "LazySmt"),
    "smt-exact": Method("smt", "Smt"),
    "auto_lirpa": Method("adapters.auto_lirpa", "AutoLirpa"),
    "auto_lirpa-ibp": Method("adapters.auto_lirpa", "AutoLirpa", {"bound": "ibp"}),
    "auto_lirpa-crown": Method("adapters.auto_lirpa", "AutoLirpa", {"bound": "crown"}),
    "auto_lirpa-alpha-crown": Method("adapters.auto_lirpa", "AutoLirpa", {"bound": "alpha-crown"}),
}
"""A new method is a row here, and a class that fulfils ``verifiers.base.Verifier``."""


def methods() -> tuple[str, ...]:
    """The names that :func:`make` knows."""
    return tuple(METHODS)


def make(name: str, device: str = "cpu", memory: int | None = None) -> Verifier:
    """A verifier with default options, by name.

    Args:
        name: one of :func:`methods`.
        device: where it runs.
        memory: a limit in bytes on what its bounds hold at once; None leaves the method's own.

    Raises:
        InputError: if there is no such method, it does not run on ``device``, or it takes no limit of memory.
    """
    method = METHODS.get(name)
    if method is None:
        raise InputError(f"unknown method '{name}'; there are {', '.join(METHODS)}")
    if device != "cpu" and not method.device:
        raise InputError(f"the method '{name}' runs on the CPU only")
    if memory is not None and not method.memory:
        limited = ", ".join(other for other, row in METHODS.items() if row.memory)
        raise InputError(f"the method '{name}' takes no limit of memory; these do: {limited}")
    options = dict(method.options)
    if method.device:
        options["device"] = device
    if memory is not None:
        options["memory"] = memory
    module = import_module(f"verifiable_relu.verifiers.{method.module}")
    return cast("Verifier", getattr(module, method.verifier)(**options))
