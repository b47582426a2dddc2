"""The smooth activations of a model: where they are, and their replacement, by λ-gates or by ReLU.

What a model computes is not all in its code: a compiled kernel may remember an activation by its name. A model is
therefore run where an input is known, and refused if GELU or SiLU still run in it.

A forward that calls a function such as ``F.gelu(x)`` is traced symbolically by ``torch.fx``, with the module's children
as they are. The module then keeps its class's name and methods, its attributes, hooks, parameters and the names of all
of them; only its forward becomes the traced one, in which the calls of the functions are calls of new child modules. A
trace records one course of the computation. Arguments with defaults that are no tensors keep their default values,
which the traced forward asserts. The training mode is asked for when the forward runs, so that a dropout stays one.

A ReLU that took the place of another activation has a buffer that says so, ``MARK``. So weights that were trained for
ReLU are not taken for those of a class with GELU: ``load_state_dict`` names the key that it does not expect. Where the
configuration of a model of ``transformers`` names its activation, ReLU is named there instead; if that is all that the
class needs to make the model with ReLU, there is no mark.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from inspect import Parameter, signature
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn
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

Made = Callable[[Rectifier | Hardness], nn.Module]
"""Makes what takes the place of a smooth activation, or of one that λ has begun to harden."""


@dataclass(frozen=True)
class SmoothActivation:
    """A smooth activation of a model.

    Its ``path`` is the name of the module, "" for the model; for a function, that of the module that calls it.
    ``found`` is the module or the function, ``became`` its replacement; ``why`` says why it was left alone, if it
    was.
    """

    path: str
    found: str
    became: str = ""
    why: str = ""

    def __str__(self) -> str:
        where = self.path or "the model"
        return f"{where}: {self.found} {f'→ {self.became}' if self.became else f'left alone: {self.why}'}"


def replace_smooth(
    model: nn.Module, make: Made, activations: Sequence[str] = HIDDEN
) -> tuple[nn.Module, list[SmoothActivation]]:
    """Replace a model's smooth activations, in place; a model that is an activation itself is replaced as a whole.

    Replaced are modules, functions that are attributes of a module (as in ``nn.TransformerEncoderLayer``), and
    functions that a forward calls. The names, order, weights and training mode of all other modules
    stay, and a module that is used twice stays one module. Returns the model, and its smooth activations in order.

    Raises:
        InputError: if the model is no torch module, for an unknown name of an activation, or an UnsupportedError if a
            forward calls one and cannot be traced, which names the module; the model may be changed in part by then.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"a model is a torch module, not {type(model).__name__}")
    if not isinstance(activations, list | tuple | set | frozenset):
        raise InputError(f"activations are a list of names, not {activations!r:.40}")
    for name in activations:
        if not isinstance(name, str) or name not in RECTIFIERS:
            raise InputError(f"there is no activation {name!r:.40}; there are {', '.join(RECTIFIERS)}")
    if hasattr(model, "_orig_mod"):
        raise InputError("the model is compiled: replace the activations of the model that torch.compile was given")
    replacement = _SmoothReplacement(make, tuple(activations))
    whole = replacement.replacement(model, "")
    if whole is not None:
        return whole, replacement.places
    # Modules that take the place of others are not looked into.
    for path, module in list(model.named_modules()):
        replacement.inside(module, path)
    return model, replacement.places


def substitute_relu(
    model: nn.Module, inplace: bool = False, activations: Sequence[str] = HIDDEN, example: Any = None
) -> nn.Module:
    """Copy a model with ``nn.ReLU`` in place of every smooth activation (``replace_smooth``).

    The output of an activation with a λ changes by at most ``Hardness.supremum``/λ, that of λ-GELU by 0.16997120748/λ.
    With ``inplace``, the model itself is changed and returned, unless it is such an activation. ``activations`` are the
    names of those that are replaced besides those with a λ (``nn.gates.RECTIFIERS``); with ``example`` the model is
    called to find out whether they are replaced, as in ``require_replaced``.

    Raises:
        UnsupportedError: if a forward calls such a function and cannot be traced, or still computes one; the error
            names the module, and the model stays as it was.
        InputError: if the model is no torch module, or for an unknown activation.
    """
    hard, _ = replace_wholly(model if inplace else deepcopy(model), _marked, activations, example)
    _configure(hard, activations)
    kept = not _made_with_relu(hard, activations)
    device = next((parameter.device for parameter in hard.parameters()), None)
    for module in hard.modules():
        # TorchScript's buffers are no dictionary, and nothing of it was replaced.
        mark = None if isinstance(module, torch.jit.ScriptModule) else module._buffers.pop(MARK, None)
        if kept and mark is not None:
            module.register_buffer(MARK, mark.to(device=device))
    return hard


def replace_wholly(
    model: nn.Module, make: Made, activations: Sequence[str], example: Any = None
) -> tuple[nn.Module, list[SmoothActivation]]:
    """Replace as ``replace_smooth``, and find out as ``require_replaced``; a model that is refused stays as it was."""
    require_replaced(*replace_smooth(_twin(model, {}), make, activations), example)
    return replace_smooth(model, make, activations)


def _twin(module: Any, known: dict[int, Any]) -> Any:
    """Return a module with the same tensors and attributes, but modules of its own; nothing of TorchScript is one."""
    if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
        return module
    if id(module) not in known:
        known[id(module)] = twin = object.__new__(type(module))
        vars(twin).update(vars(module), _parameters=dict(module._parameters), _buffers=dict(module._buffers))
        vars(twin)["_modules"] = {name: _twin(child, known) for name, child in module._modules.items()}
    return known[id(module)]


MARK = "relu_in_place_of_another_activation"
"""The name of the buffer, the number 1, of a ReLU that took the place of a smooth activation."""


def _marked(_: Rectifier | Hardness) -> nn.ReLU:
    made = nn.ReLU()
    made.register_buffer(MARK, torch.ones(()))
    return made


def _configure(model: nn.Module, activations: Collection[str]) -> None:
    table = getattr(sys.modules.get("transformers.activations"), "ACT2FN", {})
    for config in (getattr(module, "config", None) for module in model.modules()):
        for key, value in list(getattr(config, "__dict__", {}).items()):
            known = recognise(table[value]) if isinstance(value, str) and value in table else None
            if known is not None and known.name in activations:
                setattr(config, key, "relu")


def _made_with_relu(model: nn.Module, activations: Sequence[str]) -> bool:
    """Return True if a model's class makes it without any of the activations, given the configuration."""
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
    """Watch that records smooth operators outside of λ-gates, with the module in which each runs."""

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
def leftovers(
    model: nn.Module, places: Collection[SmoothActivation], call: Callable[[nn.Module], object]
) -> list[SmoothActivation]:
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
            found.append(SmoothActivation(path, f"aten.{name}", why="ReLU cannot take its place by itself"))
    return found


def require_replaced(model: nn.Module, places: Collection[SmoothActivation], example: Any = None) -> None:
    """Run a model, to make certain that it computes GELU and SiLU no longer, else an UnsupportedError names the module.

    ``example`` is a tensor, or a tuple or mapping of the model's arguments. None takes the inputs that a model, or the
    first of its parts that does so, offers as ``dummy_inputs``, as those of ``transformers`` do; without any, or if the
    model does not take them, nothing is found out.
    """
    offers = (path for path, module in model.named_modules() if hasattr(module, "dummy_inputs"))
    part = next(offers, None) if example is None else ""
    if part is None:
        return
    within = [replace(place, path=place.path.removeprefix(f"{part}.")) for place in places]

    def call(of: nn.Module) -> object:
        given = getattr(of, "dummy_inputs", None) if example is None else example
        if isinstance(given, Mapping):
            return of(**given)
        return of(*given) if isinstance(given, tuple | list) else of(given)

    try:
        leftovers(model.get_submodule(part), within, call)
    except Exception as error:  # A model may not take what its class offers.
        if example is not None or isinstance(error, UnsupportedError):
            raise


class _SmoothReplacement:
    """One pass over a model; ``places`` has what was found so far."""

    def __init__(self, make: Made, activations: Collection[str]) -> None:
        self.make, self.activations = make, activations
        self.places: list[SmoothActivation] = []
        self._made: dict[int, nn.Module | None] = {}

    def replacement(self, module: nn.Module, path: str) -> nn.Module | None:
        """Return the replacement of a module, or None if the module stays."""
        if id(module) not in self._made:
            title, made = _title(module), None
            found = module if isinstance(module, Hardness) else recognise_module(module)
            if found is not None:
                made = self.chosen(path, found, title)
            elif isinstance(module, (*MODULES, *OTHERS)):
                why = "it does not tend to ReLU" if isinstance(module, MODULES) else "ReLU cannot take its place"
                self.places.append(SmoothActivation(path, title, why=why))
            self._made[id(module)] = None if made is None else made.train(module.training)
        return self._made[id(module)]

    def chosen(self, path: str, found: Rectifier | Hardness, title: str) -> nn.Module | None:
        """Return the replacement of an activation, or None if it is not among those to be replaced."""
        if isinstance(found, Rectifier) and found.name not in self.activations:
            why = f"'{found.name}' is not among the activations to harden"
            self.places.append(SmoothActivation(path, title, why=why))
            return None
        made = self.make(found)
        self.places.append(SmoothActivation(path, title, _title(made)))
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
            made = None if child is None else self.replacement(child, f"{path}.{name}".lstrip("."))
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
            _replace_calls(module, path, partial(self.chosen, path))


def _title(module: nn.Module) -> str:
    return type(module).__name__ + (f"({module.extra_repr()})" if module.extra_repr() else "")


_NAMES = frozenset(name.partition(".")[2] for name in FUNCTIONS.values())


def _replace_calls(module: nn.Module, path: str, make: Callable[[Rectifier, str], nn.Module | None]) -> None:
    """Replace the functions of ``FUNCTIONS`` that a module's own forward calls, but not its children's, where wanted.

    Raises an UnsupportedError if the forward may call such a function and cannot be traced.
    """
    place = f"module {path!r} ({type(module).__name__})"
    try:
        graph = _graph(module)
    except Exception as error:  # torch.fx runs the user's code, which may fail in any way on what is no tensor.
        named = sorted(_named(module) & _NAMES)
        if not named:
            return
        # What torch says first is enough; it may go on for a page.
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UnsupportedError(
            f"its forward calls {', '.join(named)} and cannot be traced by torch.fx ({reason}): call the activation as "
            "a module, such as nn.GELU(), or mask optional parts in another module",
            place=place,
        ) from error
    changed = False
    for node in [node for node in graph.nodes if node.op == "call_function" and node.target in FUNCTIONS]:
        inputs = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, fx.Node)]
        found = recognise(partial(_apply, node)) if len(inputs) == 1 else None
        made = None if found is None else make(found, FUNCTIONS[node.target])
        if found is None or made is None:
            continue
        in_place = bool(node.kwargs.get("inplace")) or str(getattr(node.target, "__name__", "")).endswith("_")
        if in_place and len(inputs[0].users) > 1:
            raise UnsupportedError(f"{FUNCTIONS[node.target]} changes a tensor that is used again", place=place)
        stem, number = found.name.replace("-", "_"), 0
        while hasattr(module, f"{stem}_{number}"):
            number += 1
        module.add_module(f"{stem}_{number}", made.train(module.training))
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.call_module(f"{stem}_{number}", (inputs[0],)))
        graph.erase_node(node)
        changed = True
    if changed:
        code = graph.python_code("self")
        names = {n: each.__name__ if isinstance(each, ModuleType) else (each,) for n, each in code.globals.items()}
        module.__class__ = _adopted(type(module), code.src, names)


def _apply(node: fx.Node, x: Tensor) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: x)
    assert callable(node.target)
    return node.target(*args, **kwargs)


class _Tracer(fx.Tracer):
    """A tracer of one module's forward, in training or in evaluation mode, or (None) in either."""

    def __init__(self, training: bool | None) -> None:
        super().__init__()
        self.training = training

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def create_args_for_root(self, *given: Any, **named: Any) -> Any:
        made = super().create_args_for_root(*given, **named)
        unknown = self.training is None
        vars(self.root)["training"] = self.create_proxy("get_attr", "training", (), {}) if unknown else self.training
        return made


def _graph(module: nn.Module) -> fx.Graph:
    """Return the graph of a module's forward, in which what depends on the training mode asks for it.

    Raises:
        Exception: of any class, if the forward cannot be traced.
    """
    if "forward" in vars(module):
        raise InputError("the forward is an attribute of the module, not a method of its class")
    parameters = signature(type(module).forward).parameters
    try:
        graph = _traced(module, None)
    except Exception:
        # The forward branches on the mode: either way must be the same.
        graph, evaluation = _traced(module, True), _traced(module, False)
        if graph.python_code("self").src != evaluation.python_code("self").src:
            raise InputError("the forward does something else in training mode") from None
    names = [
        name for name, each in parameters.items() if each.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    ]
    plain = (node for node in graph.nodes if node.op == "placeholder" and not str(node.target).startswith("*"))
    # torch.fx numbers the arguments with defaults; callers name them.
    for node, name in zip(plain, names[1:], strict=True):
        node.target = name
    return graph


def _traced(module: nn.Module, training: bool | None) -> fx.Graph:
    """Trace a twin of a module, in which the forward may keep symbols in place of tensors."""
    defaults = {
        name: each.default
        for name, each in signature(type(module).forward).parameters.items()
        if each.default is None or isinstance(each.default, bool | int | float | str)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _Tracer(training).trace(_twin(module, {}), concrete_args=defaults)


def _adopted(own: type[nn.Module], source: str, names: dict[str, Any]) -> type[nn.Module]:
    """Make a subclass of a module's class with a traced forward, given as Python and the names in it.

    So that they can be pickled, the names stand for modules of Python by their names, and for others in a tuple.
    """
    scope = {name: import_module(each) if isinstance(each, str) else each[0] for name, each in names.items()}
    exec(source, scope)

    def reduced(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        # No name leads to this class: whoever unpickles or copies a module makes the class again.
        return _blank, (own, source, names), self.__getstate__()

    kept = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(own.__name__, (own,), {**kept, "forward": scope["forward"], "__reduce_ex__": reduced})


def _blank(own: type[nn.Module], source: str, names: dict[str, Any]) -> nn.Module:
    made = _adopted(own, source, names)
    return made.__new__(made)


def _named(module: nn.Module) -> set[str]:
    """Return the names and texts in the code of a module's class, and of the functions that this code names."""
    own = vars(module).get("forward")
    pending: list[Any] = [getattr(own, "__func__", own)]
    for base in type(module).__mro__:
        if not base.__module__.startswith("torch."):
            pending += vars(base).values()
    seen: set[FunctionType] = set()
    found: set[str] = set()
    while pending:
        each = pending.pop()
        each = each.func if isinstance(each, partial) else each
        if not isinstance(each, FunctionType) or each in seen or each.__module__.startswith("torch."):
            continue
        seen.add(each)
        codes = [each.__code__]
        for code in codes:
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
            names = {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
            found |= names
            pending += [each.__globals__[name] for name in names & each.__globals__.keys()]
    return found
