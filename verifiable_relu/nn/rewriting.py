"""The replacement of functions that a module's forward calls, such as ``F.gelu(x)``, by modules.

The forward is traced symbolically by ``torch.fx``, with the module's children as they are. The module then keeps its
class's name and methods, its attributes, hooks, parameters and the names of all of them; only its forward becomes the
traced one, in which the calls of the functions are calls of new child modules.

A trace records one course of the computation. Arguments with defaults that are no tensors keep their default values,
which the traced forward asserts. The training mode is asked for when the forward runs, so that a dropout stays one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from inspect import Parameter, signature
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, fx, nn

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.nn.gates import FUNCTIONS, Rectifier, recognise

Make = Callable[[Rectifier, str], nn.Module | None]
"""Makes what takes the place of a rectifier that is called in a certain way; None leaves the call as it is."""

_NAMES = frozenset(name.partition(".")[2] for name in FUNCTIONS.values())


def replace_calls(module: nn.Module, path: str, make: Make) -> None:
    """Replace the functions of ``FUNCTIONS`` that a module's own forward calls, in place.

    Args:
        module: the module; its children are not looked into.
        path: the module's name for messages.
        make: asked for each call, with the rectifier that the call computes and a text that names the call.

    Raises:
        UnsupportedError: if the forward may call such a function and cannot be traced; the error names the module.
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
    args = tuple(x if isinstance(value, fx.Node) else value for value in node.args)
    kwargs = {name: x if isinstance(value, fx.Node) else value for name, value in node.kwargs.items()}
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
    """Trace a module, and undo what its forward has kept: symbols in place of tensors."""
    defaults = {
        name: each.default
        for name, each in signature(type(module).forward).parameters.items()
        if each.default is None or isinstance(each.default, bool | int | float | str)
    }
    held = module._parameters, module._buffers, module._modules, vars(module)
    before = [dict(each) for each in held]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _Tracer(training).trace(module, concrete_args=defaults)
    finally:
        for each, items in zip(held, before, strict=True):
            each.clear()
            each.update(items)


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
    """Return the names in the code of a module's class, and of the functions that this code names."""
    own = vars(module).get("forward")
    pending: list[Any] = [own.__func__ if isinstance(own, MethodType) else own]
    for base in type(module).__mro__:
        if not base.__module__.startswith("torch."):
            pending += vars(base).values()
    seen: set[int] = set()
    found: set[str] = set()
    while pending:
        each = pending.pop()
        if isinstance(each, partial):
            each = each.func
        if not isinstance(each, FunctionType) or id(each) in seen or each.__module__.startswith("torch."):
            continue
        seen.add(id(each))
        names = set(_names(each.__code__))
        found |= names
        pending += [each.__globals__[name] for name in names if name in each.__globals__]
    return found


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str):
            yield constant
