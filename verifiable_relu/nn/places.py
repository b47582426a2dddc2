"""The smooth activations of a model: where they are, and their replacement, by λ-gates or by ReLU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

from torch import nn

from verifiable_relu.errors import InputError
from verifiable_relu.nn.gates import Hardness
from verifiable_relu.nn.rectifiers import (
    FUNCTIONS,
    HIDDEN,
    MODULES,
    OTHERS,
    RECTIFIERS,
    Rectifier,
    recognise,
    recognise_module,
)
from verifiable_relu.nn.rewriting import replace_calls

Made = Callable[[Rectifier | Hardness], nn.Module]
"""Makes what takes the place of a smooth activation, or of one that λ has begun to harden."""


@dataclass(frozen=True)
class Place:
    """A smooth activation of a model.

    Attributes:
        path: the name of the module; for a function, of the module that calls it. The model itself has the name "".
        found: the module or the function.
        became: what took its place; empty if it was left alone.
        why: why it was left alone; empty if it was replaced.
    """

    path: str
    found: str
    became: str = ""
    why: str = ""

    def __str__(self) -> str:
        where = self.path or "the model"
        return f"{where}: {self.found} {f'→ {self.became}' if self.became else f'left alone: {self.why}'}"


def replace_smooth(model: nn.Module, make: Made, activations: Sequence[str] = HIDDEN) -> tuple[nn.Module, list[Place]]:
    """Replace a model's smooth activations, in place; a model that is an activation itself is replaced as a whole.

    Replaced are modules, functions that are attributes of a module (as in ``nn.TransformerEncoderLayer``), and
    functions that a forward calls (``nn.rewriting``). The names, order, weights and training mode of all other modules
    stay, and a module that is used twice stays one module.

    Args:
        model: the model.
        make: makes a replacement.
        activations: the names, in ``RECTIFIERS``, of the activations that are replaced.

    Returns:
        The model, and its smooth activations in the order of the modules.

    Raises:
        InputError: for an unknown name of an activation.
        UnsupportedError: if a forward calls such a function and cannot be traced; the error names the module.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"a model is a torch module, not {type(model).__name__}")
    if not isinstance(activations, list | tuple | set | frozenset):
        raise InputError(f"activations are a list of names, not {activations!r:.40}")
    for name in activations:
        if not isinstance(name, str) or name not in RECTIFIERS:
            raise InputError(f"there is no activation {name!r:.40} to harden; there are {', '.join(RECTIFIERS)}")
    if hasattr(model, "_orig_mod"):
        raise InputError("the model is compiled: replace the activations of the model that torch.compile was given")
    replacement = _Replacement(make, tuple(activations))
    whole = replacement.of(model, "")
    if whole is not None:
        return whole, replacement.places
    # Modules that take the place of others are not looked into.
    for path, module in list(model.named_modules()):
        replacement.inside(module, path)
    return model, replacement.places


def substitute_relu(model: nn.Module, inplace: bool = False, activations: Sequence[str] = HIDDEN) -> nn.Module:
    """A copy of a model with ``nn.ReLU`` in place of every smooth activation (``replace_smooth``).

    Replaced are activations with a λ, and GELU, SiLU, Mish and Hardswish, whether they are modules or functions that a
    forward calls. The output of an activation with a λ changes by at most ``Hardness.supremum``/λ, that of
    λ-GELU by 0.16997120748/λ. The names, order, weights and training mode of the modules stay, and a module that
    is used twice stays one module.

    Args:
        model: the model.
        inplace: whether the model itself is changed and returned, unless it is such an activation itself.
        activations: the names of the activations that are replaced (``nn.rectifiers.RECTIFIERS``).

    Raises:
        UnsupportedError: if a forward calls such a function and cannot be traced; the error names the module.
        InputError: if the model is no torch module, or for an unknown activation.
    """
    return replace_smooth(model if inplace else deepcopy(model), lambda _: nn.ReLU(), activations)[0]


class _Replacement:
    """One pass over a model.

    Attributes:
        places: what was found so far.
    """

    def __init__(self, make: Made, activations: Collection[str]) -> None:
        self.make = make
        self.activations = activations
        self.places: list[Place] = []
        self._made: dict[int, nn.Module | None] = {}

    def of(self, module: nn.Module, path: str) -> nn.Module | None:
        """What takes the place of a module, or None if the module stays."""
        if id(module) not in self._made:
            made = self._replaced(module, path)
            self._made[id(module)] = None if made is None else made.train(module.training)
        return self._made[id(module)]

    def _replaced(self, module: nn.Module, path: str) -> nn.Module | None:
        title = _title(module)
        if isinstance(module, Hardness):
            made = self.make(module)
            self.places.append(Place(path, title, _title(made)))
            return made
        found = recognise_module(module)
        if found is not None:
            return self.chosen(path, found, title)
        if isinstance(module, (*MODULES, *OTHERS)):
            why = "it does not tend to ReLU" if isinstance(module, MODULES) else "ReLU cannot take its place"
            self.places.append(Place(path, title, why=why))
        return None

    def chosen(self, path: str, found: Rectifier, title: str) -> nn.Module | None:
        """What takes the place of a rectifier, or None if it is not among those that are replaced."""
        if found.name not in self.activations:
            self.places.append(Place(path, title, why=f"'{found.name}' is not among the activations to harden"))
            return None
        made = self.make(found)
        self.places.append(Place(path, title, _title(made)))
        return made

    def inside(self, module: nn.Module, path: str) -> None:
        """Replace the children and attributes of a module that are activations, and those that its forward calls."""
        if isinstance(module, Hardness) or self._made.get(id(module)) is not None:
            return
        # named_children() would leave out the second name of a module that is used twice.
        for name, child in list(module._modules.items()):
            made = None if child is None else self.of(child, f"{path}.{name}".lstrip("."))
            if made is not None:
                setattr(module, name, made)
        for name, function in list(vars(module).items()):
            plain = function.func if isinstance(function, partial) else function
            if not (callable(plain) and isinstance(plain, Hashable) and plain in FUNCTIONS):
                continue
            found = recognise(function)
            made = None if found is None else self.chosen(f"{path}.{name}".lstrip("."), found, FUNCTIONS[plain])
            if made is not None:
                setattr(module, name, made.train(module.training))
                if isinstance(module, nn.TransformerEncoderLayer):
                    # The layer's fused kernel would compute the activation that it remembers by this number.
                    module.activation_relu_or_gelu = 0
        if not type(module).__module__.startswith("torch.nn."):
            replace_calls(module, path, partial(self.chosen, path))


def _title(module: nn.Module) -> str:
    return type(module).__name__ + (f"({module.extra_repr()})" if module.extra_repr() else "")
