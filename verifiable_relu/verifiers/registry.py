"""The table of the methods; a method's module is imported only when its verifier is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

from verifiable_relu.errors import InputError, missing

if TYPE_CHECKING:
    from verifiable_relu.verifiers.base import Verifier


@dataclass(frozen=True)
class Method:
    """A method of the table.

    Attributes:
        module: the module of its verifier, in ``verifiable_relu.verifiers``.
        verifier: the name of the verifier's class in that module.
        options: the keyword arguments with which the verifier is this method.
        device: whether the verifier has an argument ``device``, any torch device; otherwise it runs on the CPU.
        memory: whether the verifier has an argument ``memory``, the bytes that its bounds may hold at once.
        processes: whether the verifier has an argument ``processes``, how many of them may share the work on a query.
        needs: the modules that the verifier imports and that an installation without extras lacks.
        install: what pip must be told to install them.
    """

    module: str
    verifier: str
    options: Mapping[str, Any] = field(default_factory=dict)
    device: bool = False
    memory: bool = False
    processes: bool = False
    needs: Sequence[str] = ()
    install: str = ""


def _auto_lirpa(**options: Any) -> Method:
    needs = ("auto_LiRPA", "appdirs", "packaging", "yaml", "tqdm")
    install = "appdirs packaging pyyaml setuptools tqdm, and pip install --no-deps auto_LiRPA==0.3"
    return Method("adapters.auto_lirpa", "AutoLirpa", options, needs=needs, install=install)


METHODS = {
    "auto": Method("portfolio", "Auto", device=True, memory=True, processes=True),
    "attack": Method("attack", "Attack", device=True),
    "ibp": Method("incomplete", "Ibp", device=True, memory=True),
    "crown-ibp": Method("incomplete", "CrownIbp", device=True, memory=True),
    "crown": Method("incomplete", "Crown", device=True, memory=True),
    "alpha-crown": Method("incomplete", "AlphaCrown", device=True, memory=True),
    "split": Method("split", "InputSplit", device=True, memory=True, processes=True),
    "bab": Method("bab", "Bab", memory=True, processes=True),
    "milp": Method("milp", "Milp"),
    "smt": Method("smt", "Smt"),
    "smt-exact": Method("smt", "Smt", {"whole": True}),
    "marabou": Method(
        "adapters.marabou",
        "Marabou",
        needs=("maraboupy",),
        install="maraboupy, for which there are wheels up to Python 3.12.0",
    ),
    "auto_lirpa": _auto_lirpa(),
    "auto_lirpa-ibp": _auto_lirpa(bound="ibp"),
    "auto_lirpa-crown": _auto_lirpa(bound="crown"),
    "auto_lirpa-alpha-crown": _auto_lirpa(bound="alpha-crown"),
}
"""The methods by name. A new one is an entry of this table, and a class that fulfils ``verifiers.base.Verifier``."""


def methods() -> tuple[str, ...]:
    """The names of the methods, in the order of the table."""
    return tuple(METHODS)


def make(name: str, device: str = "cpu", memory: int | None = None, processes: int = 1) -> Verifier:
    """The verifier of a method, with the method's options.

    Args:
        name: the name of the method.
        device: the torch device on which the verifier runs.
        memory: the bytes that the verifier's bounds may hold at once; None leaves the verifier's own limit.
        processes: how many processes may share the work on a query; a method that cannot share it uses one.

    Raises:
        InputError: if there is no such method, if it does not run on ``device``, if it takes no limit of memory,
            or if a package that it needs is not installed.
    """
    method = METHODS.get(name)
    if method is None:
        raise InputError(f"unknown method '{name}'; there are {', '.join(METHODS)}")
    if device != "cpu" and not method.device:
        raise InputError(f"the method '{name}' runs on the CPU only")
    if memory is not None and not method.memory:
        limited = ", ".join(other for other, row in METHODS.items() if row.memory)
        raise InputError(f"the method '{name}' takes no limit of memory; these do: {limited}")
    if not all(find_spec(module) for module in method.needs):
        raise missing(f"the method '{name}'", method.install)
    options = dict(method.options)
    if method.device:
        options["device"] = device
    if memory is not None:
        options["memory"] = memory
    if method.processes:
        options["processes"] = processes
    module = import_module(f"verifiable_relu.verifiers.{method.module}")
    return cast("Verifier", getattr(module, method.verifier)(**options))
