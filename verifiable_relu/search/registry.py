"""The table of the methods; a method's module is imported only when its verifier is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

from verifiable_relu.errors import InputError, missing

if TYPE_CHECKING:
    from verifiable_relu.search.batch import Verifier
    from verifiable_relu.search.budget import TimeBudget


@dataclass(frozen=True)
class Method:
    """A method of the table."""

    module: str  # The module of its verifier, in ``verifiable_relu``
    verifier: str  # The name of the verifier's class in that module
    options: Mapping[str, Any] = field(default_factory=dict)  # Keyword arguments with which the verifier is this method
    limits: tuple[str, ...] = ()  # Of ``TimeBudget``: device, memory, processes; others run on the CPU alone
    attacks: bool = True  # It looks for counterexamples; bounds by themselves only prove
    proves: bool = True  # It proves; an attack only refutes
    needs: Sequence[str] = ()  # Modules that the verifier imports and that an installation without extras lacks
    install: str = ""  # What pip must be told to install them


_ALL = "device", "memory", "processes"
_BOUNDS: dict[str, Any] = {"limits": ("device", "memory"), "attacks": False}
_AUTO_LIRPA = Method(
    "search.solvers.auto_lirpa",
    "AutoLirpa",
    attacks=False,
    needs=("auto_LiRPA", "appdirs", "packaging", "yaml", "tqdm"),
    install="appdirs packaging pyyaml setuptools tqdm, and pip install --no-deps auto_LiRPA==0.3",
)

_MARABOU = "maraboupy, for which there are wheels up to Python 3.12.0"

METHODS = {
    "auto": Method("search.portfolio", "Auto", limits=_ALL),
    "attack": Method("search.attack", "Attack", limits=("device",), proves=False),
    "ibp": Method("search.bounding", "Crown", {"name": "ibp", "by_crown": False, "linear": False}, **_BOUNDS),
    # Linear bounds of the output over interval bounds of every pre-activation (arXiv 1906.06316)
    "crown-ibp": Method("search.bounding", "Crown", {"name": "crown-ibp", "by_crown": False}, **_BOUNDS),
    "crown": Method("search.bounding", "Crown", **_BOUNDS),
    "alpha-crown": Method("search.bounding", "AlphaCrown", **_BOUNDS),
    "alpha-crown-tight": Method("search.bounding", "AlphaCrownTight", **_BOUNDS),
    "split": Method("search.split", "InputSplit", limits=_ALL),
    "bab": Method("search.bab.verifier", "Bab", limits=_ALL),
    "milp": Method("search.solvers.milp", "Milp"),
    "smt": Method("search.solvers.smt", "Smt"),
    "smt-exact": Method("search.solvers.smt", "Smt", {"whole": True}),
    "marabou": Method("search.solvers.marabou", "Marabou", needs=("maraboupy",), install=_MARABOU),
    "auto_lirpa": _AUTO_LIRPA,
    **{f"auto_lirpa-{name}": replace(_AUTO_LIRPA, options={"bound": name}) for name in ("ibp", "crown", "alpha-crown")},
}
"""The methods by name. A new one is an entry of this table, and a class that fulfils ``search.batch.Verifier``."""


def methods() -> tuple[str, ...]:
    """Return the names of the methods, in the order of the table."""
    return tuple(METHODS)


def make(name: str) -> Verifier:
    """Return the verifier of a method, with the method's options.

    Raises:
        InputError: if there is no such method, or if a package that it needs is not installed.
    """
    method = _method(name)
    if not all(find_spec(module) for module in method.needs):
        raise missing(f"the method '{name}'", method.install)
    module = import_module(f"verifiable_relu.{method.module}")
    return cast("Verifier", getattr(module, method.verifier)(**method.options))


def limited(name: str, device: str = "cpu", memory: int | None = None, processes: int = 1) -> TimeBudget:
    """Return the limits of a method's work, but for its time.

    Args:
        name: the name of the method.
        device: as of ``TimeBudget``.
        processes: as of ``TimeBudget``; a method that cannot share work uses one process.
        memory: the bytes that its bounds may hold at once; None for a limit of the method's own.

    Raises:
        InputError: if there is no such method, if it does not run on ``device``, or if it takes no limit of memory.
    """
    takes = _method(name).limits
    if device != "cpu" and "device" not in takes:
        raise InputError(f"the method '{name}' runs on the CPU only")
    if memory is not None and "memory" not in takes:
        others = ", ".join(other for other, row in METHODS.items() if "memory" in row.limits)
        raise InputError(f"the method '{name}' takes no limit of memory; these do: {others}")
    from verifiable_relu.search.budget import TimeBudget

    # How many processes share the work changes no record's key.
    limits = TimeBudget(device=device, named=tuple(limit for limit in takes if limit != "processes"))
    limits = limits if memory is None else replace(limits, memory=memory)
    return replace(limits, processes=processes) if "processes" in takes else limits


def _method(name: str) -> Method:
    if name not in METHODS:
        raise InputError(f"unknown method '{name}'; there are {', '.join(METHODS)}")
    return METHODS[name]
