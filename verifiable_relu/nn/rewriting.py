"""The replacement of functions that a module's forward calls, such as ``F.gelu(x)``, by modules.

The forward is traced symbolically by ``torch.fx``, with the module's children as they are. The module then keeps its
class's name and methods, its attributes, hooks, parameters and the names of all of them; only its forward becomes the
traced one, in which the calls of the functions are calls of new child modules.

A trace records one course of the computation. Arguments with defaults that are no tensors keep their default values,
which the traced forward asserts, and what a forward does in training mode alone, such as a dropout, still depends on
the mode: the module is traced in both.
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
from torch.utils._pytree import tree_flatten, tree_unflatten

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.nn.rectifiers import FUNCTIONS, Rectifier, recognise

Make = Callable[[Rectifier, str], nn.Module | None]
"""Makes what takes the place of a rectifier that is called in a certain way; None leaves the call as it is."""

_NAMES = frozenset(name.partition(".")[2] for name in FUNCTIONS.values())


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def replace_calls(module: nn.Module, path: str, make: Make) -> int:
    """Replace the functions of ``FUNCTIONS`` that a module's own forward calls; returns the number of replaced calls.

    Args:
        module: the module, which is changed in place; its children are not looked into.
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
            return 0
        # What torch says first is enough; it may go on for a page.
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UnsupportedError(
            f"its forward calls {', '.join(named)} and cannot be traced by torch.fx ({reason}): call the activation as "
            "a module, such as nn.GELU(), or mask optional parts in another module",
            place=place,
        ) from error
    count = 0
    for node in [node for node in graph.nodes if node.op == "call_function" and node.target in FUNCTIONS]:
        x = _tensor(node)
        found = None if x is None else recognise(partial(_apply, node))
        made = None if found is None else make(found, FUNCTIONS[node.target])
        if x is None or found is None or made is None:
            continue
        if _in_place(node) and len(x.users) > 1:
            raise UnsupportedError(f"{FUNCTIONS[node.target]} changes a tensor that is used again", place=place)
        name = _free_name(module, found.name.replace("-", "_"))
        module.add_module(name, made.train(module.training))
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.call_module(name, (x,)))
        graph.erase_node(node)
        count += 1
    if count:
        _adopt(module, graph)
    return count


def _tensor(node: fx.Node) -> fx.Node | None:
    """The node of the one tensor that a call takes; None if the call has other arguments that are not constant."""
    nodes = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, fx.Node)]
    return nodes[0] if len(nodes) == 1 else None


def _apply(node: fx.Node, x: Tensor) -> Any:
    """The value of a call at a tensor."""
    args = tuple(x if isinstance(value, fx.Node) else value for value in node.args)
    kwargs = {name: x if isinstance(value, fx.Node) else value for name, value in node.kwargs.items()}
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _in_place(node: fx.Node) -> bool:
    return bool(node.kwargs.get("inplace")) or str(getattr(node.target, "__name__", "")).endswith("_")


def _free_name(module: nn.Module, stem: str) -> str:
    number = 0
    while hasattr(module, f"{stem}_{number}"):
        number += 1
    return f"{stem}_{number}"


def _graph(module: nn.Module) -> fx.Graph:
    """The graph of a module's forward, in which what depends on the training mode asks for it.

    Raises:
        Exception: of any class, if the forward cannot be traced.
    """
    if "forward" in vars(module):
        raise InputError("the forward is an attribute of the module, not a method of its class")
    parameters = signature(type(module).forward).parameters
    defaults = {
        name: each.default
        for name, each in parameters.items()
        if each.default is None or isinstance(each.default, bool | int | float | str)
    }
    mode, kept = module.training, [dict(held) for held in _state(module)]
    graphs = []
    try:
        for training in (True, False):
            vars(module)["training"] = training
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                graphs.append(_Tracer().trace(module, concrete_args=dict(defaults)))
    finally:
        # The forward may have kept symbols in place of tensors.
        for held, before in zip(_state(module), kept, strict=True):
            held.clear()
            held.update(before)
        module.training = mode
    graph = _merged(*graphs)
    names = [
        name for name, each in parameters.items() if each.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    ]
    plain = (node for node in graph.nodes if node.op == "placeholder" and not str(node.target).startswith("*"))
    # torch.fx numbers the arguments with defaults; callers name them.
    for node, name in zip(plain, names[1:], strict=True):
        node.target = name
    return graph


def _state(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module._modules, vars(module)


def _merged(training: fx.Graph, evaluation: fx.Graph) -> fx.Graph:
    """One graph for both modes: numbers that are True in training and False in evaluation become the mode itself.

    Raises:
        InputError: if the graphs differ in more.
    """
    ours, theirs = list(training.nodes), list(evaluation.nodes)
    position = {node: i for i, node in enumerate(ours)} | {node: i for i, node in enumerate(theirs)}
    mode: list[fx.Node] = []

    def asked() -> fx.Node:
        if not mode:
            first = next(node for node in ours if node.op != "placeholder")
            with training.inserting_before(first), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "training" is no parameter, buffer or module.
                mode.append(training.get_attr("training"))
        return mode[0]

    def merge(a: Any, b: Any) -> Any:
        if isinstance(a, fx.Node) and isinstance(b, fx.Node) and position[a] == position[b]:
            return a
        if type(a) is type(b):
            if a is True and b is False:
                return asked()
            if isinstance(a, slice):
                return slice(*(merge(getattr(a, end), getattr(b, end)) for end in ("start", "stop", "step")))
            if a is b or a == b:
                return a
        raise InputError(differs)

    differs = "the forward does something else in training mode"
    if [(n.op, str(n.target)) for n in ours] != [(n.op, str(n.target)) for n in theirs]:
        raise InputError(differs)
    for a, b in zip(ours, theirs, strict=True):
        values, shape = tree_flatten((a.args, a.kwargs))
        others, other_shape = tree_flatten((b.args, b.kwargs))
        if shape != other_shape:
            raise InputError(differs)
        a.args, a.kwargs = tree_unflatten(map(merge, values, others), shape)
    return training


def _adopt(module: nn.Module, graph: fx.Graph) -> None:
    """Give a module the forward of a graph, in a subclass of its class that is made for it alone."""
    code = graph.python_code("self")
    names = {name: each.__name__ if isinstance(each, ModuleType) else (each,) for name, each in code.globals.items()}
    module.__class__ = _adopted(type(module), code.src, names)


def _adopted(own: type[nn.Module], source: str, names: dict[str, Any]) -> type[nn.Module]:
    """A subclass of a module's class with a traced forward.

    Args:
        own: the module's class.
        source: the forward, in Python.
        names: what the names in it stand for: modules of Python by their names, others as they are, in a tuple. So they
            can be pickled.
    """
    scope = {name: import_module(each) if isinstance(each, str) else each[0] for name, each in names.items()}
    exec(source, scope)

    def reduced(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        # No name leads to this class: whoever unpickles or copies a module makes the class again.
        return _blank, (own, source, names), self.__getstate__()

    fields = {
        "forward": scope["forward"],
        "__reduce_ex__": reduced,
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
    }
    return type(own.__name__, (own,), fields)


def _blank(own: type[nn.Module], source: str, names: dict[str, Any]) -> nn.Module:
    """A module of an ``_adopted`` class, without a state."""
    made = _adopted(own, source, names)
    return made.__new__(made)


def _named(module: nn.Module) -> set[str]:
    """The names in the code of a module's class, and of the functions that this code names."""
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
