"""The smooth activations of a model: where they are, and their replacement, by λ-gates or by ReLU.

What a model computes is not all in its code: a compiled kernel may remember an activation by its name. A model is
therefore run where an input is known, and refused if GELU or SiLU still run in it.

A ReLU that took the place of another activation has a buffer that says so, ``MARK``. So weights that were trained for
ReLU are not taken for those of a class with GELU: ``load_state_dict`` names the key that it does not expect. Where the
configuration of a model of ``transformers`` names its activation, ReLU is named there instead; if that is all that the
class needs to make the model with ReLU, there is no mark.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.nn.gates import (
    FUNCTIONS,
    HIDDEN,
    MODULES,
    OTHERS,
    RECTIFIERS,
    Hardness,
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
    stay, and a module that is used twice stays one module. Returns the model, and its smooth activations in order.

    Raises:
        InputError: for an unknown name of an activation, or an UnsupportedError if a forward calls one and cannot be
            traced; the error names the module, and the model stays as it was.
    """
    _require_module(model)
    if not isinstance(activations, list | tuple | set | frozenset):
        raise InputError(f"activations are a list of names, not {activations!r:.40}")
    for name in activations:
        if not isinstance(name, str) or name not in RECTIFIERS:
            raise InputError(f"there is no activation {name!r:.40} to harden; there are {', '.join(RECTIFIERS)}")
    if hasattr(model, "_orig_mod"):
        raise InputError("the model is compiled: replace the activations of the model that torch.compile was given")
    replacement = _Replacement(make, tuple(activations))
    with all_or_nothing(model):
        whole = replacement.of(model, "")
        if whole is not None:
            return whole, replacement.places
        # Modules that take the place of others are not looked into.
        for path, module in list(model.named_modules()):
            replacement.inside(module, path)
    return model, replacement.places


def _require_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"a model is a torch module, not {type(model).__name__}")


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Give a model back its modules, classes, attributes and configurations if what changes them fails.

    Values of tensors are not kept: nothing here changes them.
    """
    _require_module(model)
    # Nothing of TorchScript is replaced, and its attributes are no dictionaries.
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    classes = [(module, type(module)) for module in modules]
    held = [each for module in modules for each in (module._parameters, module._buffers, module._modules, vars(module))]
    held += [vars(config) for config in _configurations(model)]
    before = [(each, dict(each)) for each in held]
    learned = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        for module, own in classes:
            # A class of the user may have a ``__setattr__`` of its own.
            object.__setattr__(module, "__class__", own)
        for each, items in before:
            each.clear()
            each.update(items)
        for parameter, was in learned:
            if parameter.requires_grad != was:
                parameter.requires_grad_(was)
        raise


def _configurations(model: nn.Module) -> list[Any]:
    found = (getattr(module, "config", None) for module in model.modules())
    return [config for config in found if isinstance(getattr(config, "__dict__", None), dict)]


def substitute_relu(
    model: nn.Module, inplace: bool = False, activations: Sequence[str] = HIDDEN, example: Any = None
) -> nn.Module:
    """Copy a model with ``nn.ReLU`` in place of every smooth activation (``replace_smooth``).

    The output of an activation with a λ changes by at most ``Hardness.supremum``/λ, that of λ-GELU by 0.16997120748/λ.

    Args:
        inplace: True changes and returns the model itself, unless it is such an activation.
        activations: the names of those that are replaced besides those with a λ (``nn.gates.RECTIFIERS``).
        example: what the model is called with to find out whether they are replaced, as in ``require_replaced``.

    Raises:
        UnsupportedError: if a forward calls such a function and cannot be traced, or still computes one; the error
            names the module, and the model stays as it was.
        InputError: if the model is no torch module, or for an unknown activation.
    """
    _require_module(model)
    changed = model if inplace else deepcopy(model)
    with all_or_nothing(changed):
        hard, places = replace_smooth(changed, _marked, activations)
        require_replaced(hard, places, example)
        _configure(hard, activations)
        kept = not _made_with_relu(hard, activations)
        device = next((parameter.device for parameter in hard.parameters()), None)
        for module in hard.modules():
            # TorchScript's buffers are no dictionary, and nothing of it was replaced.
            mark = None if isinstance(module, torch.jit.ScriptModule) else module._buffers.pop(MARK, None)
            if kept and mark is not None:
                module.register_buffer(MARK, mark.to(device=device))
    return hard


MARK = "relu_in_place_of_another_activation"
"""The name of the buffer, the number 1, of a ReLU that took the place of a smooth activation."""


def _marked(_: Rectifier | Hardness) -> nn.ReLU:
    made = nn.ReLU()
    made.register_buffer(MARK, torch.ones(()))
    return made


def _configure(model: nn.Module, activations: Collection[str]) -> None:
    table = getattr(sys.modules.get("transformers.activations"), "ACT2FN", {})
    for config in _configurations(model):
        for key, value in list(vars(config).items()):
            known = recognise(table[value]) if isinstance(value, str) and value in table else None
            if known is not None and known.name in activations:
                setattr(config, key, "relu")


def _made_with_relu(model: nn.Module, activations: Sequence[str]) -> bool:
    """Return True if a model's class, given the model's configuration, makes it without any of the activations."""
    if not hasattr(model, "config"):
        return False
    try:
        with torch.device("meta"):
            again = type(model)(deepcopy(model.config))
        return not any(place.became for place in replace_smooth(again, _marked, activations)[1])
    except Exception:  # Classes of the user take what they like.
        return False


_MISSED = {"gelu", "silu"}
"""The operators that are always activations of hidden layers."""

_SMOOTH = {"mish", "hardswish", "elu", "softplus", "sigmoid", "tanh", "erf", "_softmax", "native_layer_norm"}
"""The operators that may make up an activation, or are none that ReLU can replace."""


class _Watch(TorchDispatchMode):
    """A record of the smooth operators that run outside of λ-gates, with the module that each runs in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[tuple[str, str], None] = {}
        self._stack: list[tuple[str, bool]] = [("", False)]
        self._hooks: list[Any] = []
        for path, module in model.named_modules():
            # TorchScript takes no hooks: what it computes counts as its parent's.
            if not isinstance(module, torch.jit.ScriptModule):
                enter = partial(lambda path, module, _: self._stack.append((path, isinstance(module, Hardness))), path)
                self._hooks.append(module.register_forward_pre_hook(enter))
                self._hooks.append(module.register_forward_hook(self._leave, always_call=True))

    def _leave(self, *_: object) -> None:
        self._stack.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__.removesuffix("_")
        path, gate = self._stack[-1]
        if name in _MISSED | _SMOOTH and not gate:
            self.found[path, name] = None
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and each of its modules back into the mode that it had."""
    # Modules that torch.jit.freeze made have no mode.
    modes = {module: module.training for module in model.modules() if hasattr(module, "training")}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@torch.no_grad()
def leftovers(model: nn.Module, places: Collection[Place], call: Callable[[nn.Module], object]) -> list[Place]:
    """Return the smooth operators that a model still computes when ``call`` runs it, by the modules that call them.

    Raises:
        UnsupportedError: if GELU or SiLU are among them, other than at places left alone; names the module.
    """
    modules = dict(model.named_modules())
    with evaluating(model), _Watch(model) as watch:
        call(model)
    found = []
    for path, name in watch.found:
        if name in _MISSED and path not in {place.path for place in places if place.why}:
            raise UnsupportedError(
                f"it computes {name} in a way that is not found in its code: call the activation as a module",
                place=f"module {path!r} ({type(modules[path]).__name__})",
            )
        if not type(modules[path]).__module__.startswith("torch.nn."):
            found.append(Place(path, f"aten.{name}", why="ReLU cannot take its place by itself"))
    return found


def require_replaced(model: nn.Module, places: Collection[Place], example: Any = None) -> None:
    """Run a model, to make certain that it computes GELU and SiLU no longer, else an UnsupportedError names the module.

    Args:
        example: a tensor, or a tuple or mapping of the model's arguments. None takes the inputs that a model, or the
            first of its parts that does so, offers as ``dummy_inputs``, as those of ``transformers`` do; without any,
            or if the model does not take them, nothing is found out.
    """
    if example is not None:
        leftovers(model, places, partial(_call, example))
        return
    part = next((path for path, module in model.named_modules() if hasattr(module, "dummy_inputs")), None)
    if part is None:
        return
    whole = model.get_submodule(part)
    within = [replace(place, path=place.path.removeprefix(f"{part}.")) for place in places]
    try:
        leftovers(whole, within, partial(_call, getattr(whole, "dummy_inputs", None)))
    except UnsupportedError:
        raise
    except Exception:  # A model may not take what its class offers.
        return


def _call(example: Any, model: nn.Module) -> object:
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple | list) else model(example)


class _Replacement:
    """One pass over a model; ``places`` has what was found so far."""

    def __init__(self, make: Made, activations: Collection[str]) -> None:
        self.make, self.activations = make, activations
        self.places: list[Place] = []
        self._made: dict[int, nn.Module | None] = {}

    def of(self, module: nn.Module, path: str) -> nn.Module | None:
        """Return what takes the place of a module, or None if the module stays."""
        if id(module) not in self._made:
            title, made = _title(module), None
            found = module if isinstance(module, Hardness) else recognise_module(module)
            if found is not None:
                made = self.chosen(path, found, title)
            elif isinstance(module, (*MODULES, *OTHERS)):
                why = "it does not tend to ReLU" if isinstance(module, MODULES) else "ReLU cannot take its place"
                self.places.append(Place(path, title, why=why))
            self._made[id(module)] = None if made is None else made.train(module.training)
        return self._made[id(module)]

    def chosen(self, path: str, found: Rectifier | Hardness, title: str) -> nn.Module | None:
        """Return what takes the place of an activation, or None if it is not among those that are replaced."""
        if isinstance(found, Rectifier) and found.name not in self.activations:
            self.places.append(Place(path, title, why=f"'{found.name}' is not among the activations to harden"))
            return None
        made = self.make(found)
        self.places.append(Place(path, title, _title(made)))
        return made

    def inside(self, module: nn.Module, path: str) -> None:
        """Replace the children and attributes of a module that are activations, and those that its forward calls."""
        if isinstance(module, Hardness) or self._made.get(id(module)) is not None:
            return
        if isinstance(module, torch.jit.ScriptModule):
            operators = set(re.findall(r"aten::(\w+?)_?\(", str(getattr(module, "inlined_graph", ""))))
            named = sorted(operators & {name.partition("-")[0] for name in self.activations})
            if named:
                raise InputError(
                    f"it is TorchScript, in which {', '.join(named)} cannot be replaced: replace the activations of "
                    "the module that torch.jit.script or torch.jit.trace was given",
                    place=f"module {path!r}" if path else "the model",
                )
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
