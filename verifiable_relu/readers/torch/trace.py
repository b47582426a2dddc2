"""The ATen operators that one call of a torch module applies, as a list without changes in place.

torch's functionalisation, which its compilers rely on, replaces each operator that changes a tensor by one that makes a
new tensor, so that all views of shared memory see the change. A dispatch mode then lists the operators that run on
real numbers. Hooks, parametrisations, functions of autograd and Python's control flow work as always; control flow that
depends on computed numbers is refused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.nn.gates import Hardness
from verifiable_relu.readers.derived import exact_product, exact_sum

_SHAPES = {f"{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")} | {
    f"new_{kind}" for kind in ("empty", "zeros", "ones", "full")
}
"""Operators that take only the shape from a tensor."""

_EXACT = _SHAPES | {
    "abs", "cat", "clamp", "clone", "constant_pad_nd", "copy", "embedding", "fill", "flip", "gather", "index",
    "index_select", "lift_fresh", "masked_fill", "maximum", "minimum", "neg", "relu", "repeat", "roll",
    "slice_scatter", "stack", "_to_copy", "tril", "triu", "unsafe_split", "_unsafe_view", "where",
}  # fmt: skip
"""Operators, besides views, that round no number; a change to a narrower type is what it is asked for."""

_MEMORY = {Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage} | {
    Tensor._typed_storage, Tensor.share_memory_, Tensor.__dlpack__, Tensor.__reduce_ex__, Tensor.__deepcopy__
}  # fmt: skip
"""Functions that give hold of a tensor's numbers without an operator."""

_OTHERS_CODE = os.path.dirname(torch.__file__), os.path.dirname(os.__file__), str(Path(__file__).parents[2])
_CALL = nn.Module._call_impl.__code__
_is_file = cache(os.path.isfile)


@dataclass(frozen=True)
class TracedCall:
    """Call of one operator during a trace.

    Attributes:
        function, op: the operator, and its name in ATen.
        arguments: by their names in ATen's schema, those that were left out included.
        made: the tensor, or the list of tensors, that it returned.
        path: the name of the innermost module that was running, "" for the outermost.
        place: the module, the operator and the user's line of code, for messages.
    """

    function: Any
    op: str
    arguments: dict[str, Any]
    made: Any
    path: str
    place: str

    @cached_property
    def given(self) -> list[Tensor]:
        return tensors(self.arguments)

    @property
    def result(self) -> Tensor:
        """The tensor that it returned, or the first of them."""
        return tensors(self.made)[0]

    @property
    def deciding(self) -> list[Tensor]:
        """The tensors whose numbers reach Python, as such or as the shape of its result."""
        tags = set(self.function.tags)
        if self.op == "index" and torch.Tag.dynamic_output_shape in tags:
            return [t for t in self.given if t.dtype == torch.bool]
        return self.given if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & tags else []

    @property
    def rounds(self) -> bool:
        """True if numbers that it made of constants may be rounded."""
        given, results, a = self.given, tensors(self.made), self.arguments
        if not all(any(t.is_floating_point() for t in part) for part in (given, results)):
            return False
        if self.op in _EXACT or self.function.is_view:
            return False
        if self.op in ("mm", "addmm") and a.get("beta", 1) == 1:
            # Where a factor is zero, nothing is rounded.
            return all(bool(t.any()) for t in given[-2:])
        if self.op not in ("add", "sub", "mul") or a.get("alpha", 1) != 1 or self.result.dtype != torch.float32:
            return True
        operands = (
            v if isinstance(v, Tensor) else torch.tensor(v, dtype=torch.float32) for v in (a["self"], a["other"])
        )
        x, y = (v.detach().cpu().numpy() for v in operands)
        wide = exact_product(x, y) if self.op == "mul" else exact_sum(x, -y if self.op == "sub" else y)
        return wide is None or not bool((self.result.detach().cpu().double().numpy() == wide).all())


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested arguments."""
    found: list[Tensor] = []
    exchanged(value, found.append)
    return found


def exchanged(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return nested arguments with each tensor changed."""
    if isinstance(value, dict):
        return {name: exchanged(each, change) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [exchanged(each, change) for each in value]
    return change(value) if isinstance(value, Tensor) else value


class Trace(TorchDispatchMode):
    """The operators that a module applies to x while the trace is entered.

    Attributes:
        exact: whether constants that the module computes, and rounds, are refused.
        steps: the operators on computed tensors; at the end those that the output depends on.
        output: what the module returned.
        computed, rounded: the identities of tensors that depend on x, and of those that do not and may be rounded.
        constants: the steps that do not depend on x. They stay alive, so that nothing else gets a tensor's identity.
        makers, derived: by the identity of a tensor, the one of these that made it, and the same with derivatives.
        unsteady: the memory of constants that were drawn at random, or written to.
        refusal: the error with which reading ends, once it is known.
    """

    def __init__(self, module: nn.Module, x: Tensor, exact: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = {id(m): name for name, m in module.named_modules()}
        self.exact, self.weights = exact, list(_computed_weights(module)) if exact else []
        self.x = self.output = x
        self.computed, self.rounded, self.unsteady = {id(x)}, set[int](), set[int]()
        self.steps, self.constants = list[TracedCall](), list[TracedCall]()
        self.makers, self.derived = dict[int, TracedCall](), dict[int, Tensor]()
        self.refusal: UnsupportedError | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # What torch would do otherwise imports its compiler, which takes seconds.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        names, defaults = _schema(func)
        arguments = defaults | dict(zip(names, args, strict=False)) | (kwargs or {})
        op = func._schema.name.removeprefix("aten::")
        self.follow(TracedCall(func, op, arguments, made, *self.where(f"aten.{op}")))
        return made

    def follow(self, step: TracedCall) -> None:
        """Add a step, and record what its results depend on."""
        given, found, mutable = step.given, tensors(step.made), step.function._schema.is_mutable
        if any(id(t) in self.computed or self.is_unsteady(t) for t in step.deciding):
            self.refuse(step.place, "the layers that run depend on computed numbers: a network has fixed layers")
        if step.op not in _SHAPES and any(id(t) in self.computed for t in given):
            if mutable:
                self.refuse(step.place, "writes to a tensor in a way that cannot be followed")
            self.steps.append(step)
            self.computed.update(map(id, found))
            return
        self.constants.append(step)
        if mutable or self.is_drawn(step):
            self.unsteady |= {t.untyped_storage()._cdata for t in found}
        if not mutable:
            self.makers |= {id(t): step for t in found if not any(t is each for each in given)}
        if self.exact and (any(id(t) in self.rounded for t in given) or step.rounds):
            self.rounded |= {id(t) for t in found if not any(t.dtype == w.dtype and t.equal(w) for w in self.weights)}

    def is_unsteady(self, tensor: Tensor) -> bool:
        """Return True if a tensor was drawn at random, or written to."""
        return tensor.untyped_storage()._cdata in self.unsteady

    def is_drawn(self, step: TracedCall) -> bool:
        """Return True if a step draws random numbers, or takes a tensor that was drawn, or written to."""
        return torch.Tag.nondeterministic_seeded in step.function.tags or any(map(self.is_unsteady, step.given))

    def refuse(self, place: str, reason: str) -> NoReturn:
        """Raise an UnsupportedError, and keep it: the module may catch the exception."""
        error = UnsupportedError(reason, place=place)
        self.refusal = self.refusal or error
        raise error

    def where(self, function: str) -> tuple[str, str]:
        """Return the name of the innermost running module, and for messages where a function is called there."""
        path, line = "", ""
        frame = sys._getframe(2)
        while frame is not None and frame.f_code is not trace.__code__ and not (path and line):
            file = frame.f_code.co_filename
            if frame.f_code is _CALL:
                path = path or self.names.get(id(frame.f_locals["self"]), "")
            if not line and not file.startswith(_OTHERS_CODE) and _is_file(file):
                line = f", line {frame.f_lineno} of {os.path.basename(file)}"
            frame = frame.f_back  # type: ignore[assignment]
        return path, f"'{path}' ({function}{line})"

    def finish(self, output: Tensor) -> None:
        """Keep the steps that the output depends on.

        Raises:
            UnsupportedError: if one uses random or changing numbers, or rounds to a narrower type.
        """
        needed, kept = {id(output)}, list[TracedCall]()
        for step in reversed(self.steps):
            if any(id(t) in needed for t in tensors(step.made)):
                kept.insert(0, step)
                needed.update(map(id, step.given))
        self.steps, self.output = kept, output
        for step in kept:
            if self.is_drawn(step):
                self.refuse(step.place, "takes random numbers, or what is changed in place while the module runs")
            for tensor in (t for t in step.given if id(t) in self.rounded):
                said = f"a weight or constant is computed by the module in {tensor.dtype}, and rounded: keep it as a "
                said += "parameter or buffer, or register its computation (torch.nn.utils.parametrize)"
                self.refuse(step.place, said)
            kind = step.result.dtype
            widths = [t.dtype.itemsize for t in step.given if id(t) in self.computed and t.is_floating_point()]
            if kind.is_floating_point and kind.itemsize < max(widths, default=0):
                self.refuse(step.place, f"rounds to {kind}: a network is computed in one precision, float32 or float64")

    def differentiable(self, constant: Tensor) -> Tensor:
        """Return a tensor that does not depend on the input, with its derivatives by the module's parameters."""
        step = self.makers.get(id(constant))
        if step is None or id(constant) in self.derived:
            return self.derived.get(id(constant), constant)
        arguments = exchanged(step.arguments, self.differentiable)
        if not any(tensor.requires_grad for tensor in tensors(arguments)):
            return constant
        with torch.enable_grad():
            made = step.function(**arguments)
        self.derived |= {id(old): new for old, new in zip(tensors(step.made), tensors(made), strict=True)}
        return self.derived[id(constant)]


@cache
def _schema(function: Any) -> tuple[list[str], dict[str, Any]]:
    arguments = function._schema.arguments
    return [a.name for a in arguments], {a.name: a.default_value for a in arguments if a.has_default_value()}


def _computed_weights(module: nn.Module) -> Iterator[Tensor]:
    """Yield weights that parametrisations and old hooks compute: as they are rounded, they are the module's numbers."""
    for part in module.modules():
        for name in getattr(part, "parametrizations", {}):
            yield getattr(part, name)
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm):
                yield hook.compute_weight(part)
            elif isinstance(hook, SpectralNorm):
                yield hook.compute_weight(part, do_power_iteration=False)
            elif isinstance(hook, BasePruningMethod):
                yield hook.apply_mask(part)


class _Functions(TorchFunctionMode):
    """Function mode that refuses access to a computed tensor's memory, and decomposes functions as torch does."""

    def __init__(self, into: Trace) -> None:
        super().__init__()
        self.trace = into

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Hardness.forward:
            value, factor = args[0].form()
            # λ is a number of the module, as it is rounded.
            self.trace.rounded.discard(id(factor))
            return value(args[1] * factor) / factor
        if func is F.instance_norm:
            # torch's own merges the batch with the channels.
            if not kwargs.pop("use_input_stats"):
                return F.batch_norm(args[0], training=False, **kwargs)
            return F.group_norm(args[0], args[0].shape[1], kwargs["weight"], kwargs["bias"], kwargs["eps"])
        if func in _MEMORY and any(map(torch._is_functional_tensor, tensors(args))):
            self.trace.refuse(self.trace.where(func.__name__)[1], "it reads the memory of a computed tensor")
        return func(*args, **(kwargs or {}))


def trace(module: nn.Module, x: Tensor, exact: bool = False) -> Trace:
    """Run a module, in the mode that it is in, on x, (batch, …), which is not changed, and return what it did.

    Args:
        module, x: what is run, and on what.
        exact: whether weights and constants that the module computes from others, and rounds, are refused; those of
            parametrisations and old hooks, and λ of gates, are not.

    Raises:
        UnsupportedError: if the module is not a fixed network.
        InputError: if the module fails on x by itself.
    """
    made = Trace(module, x, exact)
    failure: Exception | None = None
    torch._enable_functionalization(reapply_views=True)
    try:
        with made, _Functions(made):
            output = module(torch._to_functional_tensor(x))
            if isinstance(output, Tensor) and torch._is_functional_tensor(output):
                torch._sync(output)  # type: ignore[attr-defined,no-untyped-call]
                output = torch._from_functional_tensor(output)
    except Exception as error:
        failure = error
    finally:
        torch._disable_functionalization()
    if made.refusal is not None:
        raise made.refusal from failure
    if failure is not None:
        said = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
        try:
            with torch.no_grad():
                module(x.clone())
        except Exception:
            raise InputError(f"the module fails for inputs of shape {tuple(x.shape)}: {said}") from failure
        raise UnsupportedError(f"the module cannot be followed: {said}") from failure
    if id(output) not in made.computed:
        raise UnsupportedError(
            f"returns a {type(output).__name__} where one tensor computed from the input is expected"
        )
    made.finish(output)
    return made
