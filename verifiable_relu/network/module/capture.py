"""What a torch module computes, as a list of ATen operators: the module itself is run, and followed as it runs.

The input is a tensor that records each operator applied to it (``Traced``, through torch's own ``__torch_dispatch__``)
and also carries the numbers, so that every operator is really executed. Hooks, parametrisations, a changed
``forward`` and Python's control flow therefore do what they always do. What does not depend on the input is computed
by torch as usual and enters the list as a tensor that autograd still follows.

Refused is what would let the course of the computation depend on computed numbers (``if x.sum() > 0``, ``item()``),
any operator that the caller does not know, and any access to memory that goes past the operators.

In-place operators are recorded as what they compute. Tensors with one memory (views) see each other's changes: each
remembers which state of the memory it has seen, and reads the memory anew once that has changed.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.network.derived import exact_product, exact_sum
from verifiable_relu.network.module.unrolled import UNROLLED
from verifiable_relu.nn.gates import HardnessGate, Sharpened

_GATES = (HardnessGate.forward, Sharpened.forward)
"""What torch calls where a gate gets a tensor that is recorded."""

GATE = "hardness_gate"
"""The name under which a λ-GELU is recorded: one operator of the arguments ``gate`` and ``self``."""


class NotFollowed(UnsupportedError):
    """A module does what its own record has no operator for, and nothing that forbids to read it."""


@dataclass(frozen=True)
class Ref:
    """The value with this index, in the arguments of a step."""

    index: int


@dataclass(frozen=True)
class Step:
    """One operator, which computes the value whose index is the step's place in the list plus one.

    Attributes:
        op: the operator's name in ATen, of an in-place one without its underscore.
        arguments: by their names in ATen's schema, with ``Ref`` for computed values; constants as they are.
        shape, dtype: of the result, the batch axis included.
        path: the name of the innermost module that was running, "" for the outermost.
        observed: the result's numbers; None if they were not asked for.
        line: of the user's code that called it, as ``_Recorder.line`` says it.
    """

    op: str
    arguments: dict[str, Any]
    shape: tuple[int, ...]
    dtype: torch.dtype
    path: str
    observed: Tensor | None
    line: str = ""

    @property
    def label(self) -> str:
        """What the nodes are called that the step becomes."""
        return self.path or self.op

    @property
    def place(self) -> str:
        """Where the step comes from, for messages."""
        return place_of(self.path, self.op, self.line)


@dataclass
class Program:
    """The steps that lead from the input (value 0) to the value ``output``.

    Attributes:
        constants: each tensor that steps use and that does not depend on the input, with torch's count of the
            changes that it had seen, and the step's place.
    """

    steps: list[Step] = field(default_factory=list)
    output: int = 0
    constants: list[tuple[Tensor, int, str]] = field(default_factory=list)

    def require_unchanged(self) -> None:
        """Make certain that the constants still are what they were when they were used.

        Raises:
            UnsupportedError: if one was changed in place.
        """
        for tensor, seen, place in self.constants:
            if version(tensor) != seen:
                raise UnsupportedError("a tensor is changed in place after it was used", place=place)


def place_of(path: str, op: str, line: str = "") -> str:
    """Where something happened, for messages: the module, the operator and the line of code."""
    return f"'{path}' ({op if op == GATE else f'aten.{op}'}{line})"


def version(tensor: Tensor) -> int:
    """How often a tensor was changed in place, as far as torch counts it."""
    return -1 if tensor.is_inference() else tensor._version


Kind = TypeVar("Kind", bound=Tensor)


def harmless(result: Any) -> bool:
    """Whether what a function of a computed tensor returned is a tensor, or tells no more than shapes and kinds."""
    if isinstance(result, tuple | list):
        return all(map(harmless, result))
    kinds = (Tensor, int, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(NotImplemented))
    return result is None or isinstance(result, kinds)


def of_kind(arguments: Any, kind: type[Kind]) -> Iterator[Kind]:
    """The tensors of a kind in nested arguments."""
    if isinstance(arguments, kind):
        yield arguments
    elif isinstance(arguments, list | tuple):
        for each in arguments:
            yield from of_kind(each, kind)
    elif isinstance(arguments, dict):
        yield from of_kind(list(arguments.values()), kind)


def exchanged(arguments: Any, change: Callable[[Tensor], Any]) -> Any:
    """Nested arguments with each tensor changed."""
    if isinstance(arguments, Tensor):
        return change(arguments)
    if isinstance(arguments, list | tuple):
        return [exchanged(each, change) for each in arguments]
    if isinstance(arguments, dict):
        return {key: exchanged(value, change) for key, value in arguments.items()}
    return arguments


@cache
def schema(func: Any) -> tuple[tuple[str, ...], dict[str, Any], frozenset[str]]:
    """The names of an operator's arguments, their defaults, and which it writes to."""
    arguments = func._schema.arguments
    return (
        tuple(a.name for a in arguments),
        {a.name: a.default_value for a in arguments if a.has_default_value()},
        frozenset(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write),
    )


Give = Callable[[Callable[[], Tensor]], Tensor]
"""What a layer is to get in the place of a weight, given the function that computes the weight."""


@contextmanager
def parametrised(module: nn.Module, give: Callable[[], Give]) -> Iterator[None]:
    """Let a function see, or exchange, each weight that a parametrisation or an old hook computes.

    The module itself is run, since not every module can be copied; it is afterwards what it was.

    Args:
        module: with any number of such layers inside.
        give: called once for each weight; makes the function.

    Raises:
        UnsupportedError: if the module comes by further parametrisations meanwhile.
    """
    computing = _computing(module)
    with ExitStack() as stack:
        for part, key in computing:
            if key is None:
                _exchange(stack, part.__dict__, "forward", _given(give(), part.forward))
            else:
                hooks = part._forward_pre_hooks
                _exchange(stack, hooks, key, _hook(give(), hooks[key]))
        yield
    if _computing(module) != computing:
        raise UnsupportedError("it changes its parametrisations while it runs")


def _computing(module: nn.Module) -> list[tuple[nn.Module, Any]]:
    """The parametrisations inside a module, and the layers with an old hook, with the hook's key."""
    return [
        (part, key)
        for part in module.modules()
        for key, hook in [(None, part), *part._forward_pre_hooks.items()]
        if isinstance(hook, ParametrizationList | WeightNorm | SpectralNorm | BasePruningMethod)
    ]


def _exchange(stack: ExitStack, table: Any, key: Any, value: Any) -> None:
    if key in table:
        stack.callback(table.__setitem__, key, table[key])
    else:
        stack.callback(table.pop, key)
    table[key] = value


def _given(give: Give, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: give(compute)


def _hook(give: Give, hook: Any) -> Callable[[nn.Module, Any], None]:
    name = hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name

    def set_weight(layer: nn.Module, inputs: Any) -> None:
        def compute() -> Tensor:
            hook(layer, inputs)
            made: Tensor = getattr(layer, name)
            return made

        setattr(layer, name, give(compute))

    return set_weight


def once() -> Give:
    """A weight that is computed once, and is a constant from then on."""
    made: list[Tensor] = []

    def give(compute: Callable[[], Tensor]) -> Tensor:
        if not made:
            made.append(compute().detach())
        return made[0]

    return give


_FRESH = frozenset({"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"})
"""Operators that take only the shape from a tensor."""

_NUMBERS = frozenset(
    {"item", "_local_scalar_dense", "is_nonzero", "equal", "allclose", "isclose", "nonzero", "any", "all", "argmin"}
)
"""Operators by which a computed number usually comes to decide what is computed."""

_RANKS = frozenset({"sort", "argsort", "topk", "median", "nanmedian", "kthvalue", "mode", "quantile", "searchsorted"})
"""Operators that sort numbers, or select by rank."""

_EXACT = frozenset(
    {"abs", "alias", "as_strided", "cat", "chunk", "clamp", "clone", "constant_pad_nd", "contiguous", "copy", "detach"}
    | {
        "diag_embed",
        "diagonal",
        "embedding",
        "expand",
        "fill",
        "flip",
        "gather",
        "index",
        "index_select",
        "lift_fresh",
        "masked_fill",
    }
    | {"maximum", "minimum", "narrow", "neg", "ones_like", "permute", "relu", "repeat", "reshape", "_reshape_alias"}
    | {"resize", "roll", "select", "set", "slice", "split", "split_with_sizes", "squeeze", "stack", "t", "_to_copy"}
    | {"transpose", "tril", "triu", "unbind", "unfold", "_unsafe_view", "unsqueeze", "view", "where", "zero"}
    | {"zeros_like", *_FRESH}
)
"""Operators that round no number; a change to a narrower type is what it is asked for."""


_FACTORS = {"linear": slice(2), "mm": slice(2), "matmul": slice(2), "addmm": slice(1, 3)}
"""The operators of two factors, and which of their arguments these are: where one is zero, nothing is rounded."""


@dataclass
class _Memory:
    """The state of a storage that holds computed values: how often it was written to, and what was written last.

    ``unknown`` names an operator that is not known and wrote to it.
    """

    storage: torch.UntypedStorage
    version: int = 0
    index: int = -1
    layout: Tensor | None = None
    unknown: str = ""


def _as_it_is(x: Any, size: Any, stride: Any, storage_offset: int | None = None) -> bool:
    """Whether ``as_strided`` gives every element the place that it has already."""
    kept = all(a == b for a, b, count in zip(stride, x.stride(), size, strict=False) if count > 1)
    return kept and tuple(size) == tuple(x.shape) and storage_offset in (None, x.storage_offset())


class Traced(Tensor):
    """A computed tensor that records what is done to it. Its own memory is empty; ``carried`` has the numbers."""

    recorder: _Recorder
    carried: Tensor
    number: int
    version: int
    memory: _Memory

    @staticmethod
    def of(recorder: _Recorder, real: Tensor, index: int) -> Traced:
        """The value ``index``, whose numbers are those of ``real``."""
        made: Traced = Tensor._make_wrapper_subclass(
            Traced,
            real.shape,
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device=real.device,
        )
        made.recorder, made.carried, made.number = recorder, real, index
        made.memory = recorder.memory(real)
        made.version = made.memory.version
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Met by ``_Functions`` before it comes here, but for TorchScript.
        kwargs = kwargs or {}
        return next(of_kind((args, kwargs), Traced)).recorder.function(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError("a computed tensor is used after the module has returned")


class _Derived(Exception):
    """What torch takes an operator apart into has numbers of its own, rounded: weights of an interpolation, say."""


class _Functions(TorchFunctionMode):
    """Hands torch's functions of computed tensors on to the operators that they consist of.

    Args:
        recorder: that meets the operators.
    """

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if next(of_kind((args, kwargs), Traced), None) is None:
            return func(*args, **kwargs)
        return self.recorder.function(func, args, kwargs)


_FORBIDDEN = frozenset(
    {Tensor.data_ptr, Tensor.share_memory_, Tensor.is_shared, Tensor.pin_memory, Tensor.__reduce_ex__}
    | {Tensor.data.__set__, Tensor.grad.__set__}  # type: ignore[attr-defined,union-attr]
)
"""What gives hold of a tensor's memory, or exchanges it, without an operator."""


class _Recorder(TorchDispatchMode):
    """Makes a program of the operators that are applied while it is entered.

    Args:
        module: that is to be run.
        dtype: of the input.
        operators: the names of those that may be recorded.
        observe: whether the numbers are kept.
        exact: whether constants that the module computes, and rounds, are refused.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype, operators: Collection[str], observe: bool, exact: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.program = Program()
        self.input_dtype = dtype
        self.operators = operators
        self.observe = observe
        self.exact = exact
        self.rounded: dict[int, torch.UntypedStorage] = {}
        self.taken_apart = 0
        self.refusal: UnsupportedError | None = None
        self.unfollowed: NotFollowed | None = None
        self.memories: dict[int, _Memory] = {}
        self.names = {id(m): name for name, m in module.named_modules()}

    def memory(self, real: Tensor) -> _Memory:
        """The memory that a tensor lives in."""
        storage = real.untyped_storage()
        return self.memories.setdefault(storage._cdata, _Memory(storage))

    def refuse(self, op: str, reason: str) -> NoReturn:
        """Stop. The refusal is kept, too: the module may catch what is raised."""
        path, _ = self.where()
        error = UnsupportedError(reason, place=place_of(path, op, self.line()))
        self.refusal = self.refusal or error
        raise error

    def where(self) -> tuple[str, str]:
        """The name of the innermost running module, and its class if it is one of torch's own."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code is _CALL:
                module = frame.f_locals["self"]
                own = type(module).__module__.startswith("torch.nn.")
                return self.names.get(id(module), ""), type(module).__name__ if own else ""
            frame = frame.f_back  # type: ignore[assignment]
        return "", ""

    def line(self) -> str:
        """The innermost line of code that is the user's; empty where the module has none of its own."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not capture.__code__:
            file = frame.f_code.co_filename
            if os.path.isfile(file) and not file.startswith(_OTHERS_CODE):
                return f", line {frame.f_lineno} of {os.path.basename(file)}"
            frame = frame.f_back  # type: ignore[assignment]
        return ""

    def function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one of torch's functions of computed tensors, so that the operators that it consists of are recorded."""
        if func in _FORBIDDEN:
            self.refuse(func.__name__, "the memory of a computed tensor cannot be had")
        if func in _GATES and getattr(args[0], "approximate", "") != "none":
            # Its operators come here one by one. λ is a number of the module, or a tensor with its derivative.
            value, factor = args[0].form()
            number = factor.item() if self.exact else factor
            return value(args[1] * number) / number
        # Below autograd, operators arrive whole: ``linear``, not the products that it is made of.
        with torch._C.DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd():
            if func is HardnessGate.forward:
                return self.gate(*args, **kwargs)
            try:
                result = UNROLLED.get(func, func)(*args, **kwargs)
            except UnsupportedError as error:
                if self.refusal is None and error.place is None:
                    self.refuse(func.__name__, error.message)
                raise
        if not harmless(result):
            self.refuse(func.__name__, f"a {type(result).__name__} made of a computed tensor")
        return result

    def gate(self, gate: HardnessGate, x: Tensor) -> Tensor:
        """Record a gate of exact GELU as one operator."""
        if not isinstance(x, Traced):
            raise TypeError("a gate that itself depends on the input")
        real = HardnessGate.forward(gate, x.carried)
        return self.append(GATE, {"gate": gate, "self": Ref(self.read(x))}, real)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # What torch would do otherwise imports its compiler, which takes seconds.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if next(of_kind((args, kwargs), Traced), None) is None:
            result = func(*args, **kwargs)
            if self.exact and self.rounds(func, args, kwargs, result):
                self.rounded |= {s._cdata: s for s in map(Tensor.untyped_storage, of_kind(result, Tensor))}
            return result
        return self.record(func, args, kwargs)

    def rounds(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        """Whether numbers that an operator made of constants may be rounded, or come from such."""
        given = list(of_kind((args, kwargs), Tensor))
        if any(tensor.untyped_storage()._cdata in self.rounded for tensor in given):
            return True
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        floating = any(tensor.is_floating_point() for tensor in given)
        if not floating or name in _EXACT or not any(t.is_floating_point() for t in of_kind(result, Tensor)):
            return False
        if any(not bool(each.any()) for each in args[_FACTORS[name]]) if name in _FACTORS else False:
            return False
        if name not in ("add", "sub", "mul") or len(args) != 2 or kwargs or result.dtype != torch.float32:
            return True
        kinds = [value.dtype if isinstance(value, Tensor) else torch.float32 for value in args]
        first, second = (torch.as_tensor(v, dtype=k).detach().cpu().numpy() for v, k in zip(args, kinds, strict=True))
        signed = -second if name == "sub" else second
        wide = exact_product(first, second) if name == "mul" else exact_sum(first, signed)
        return wide is None or not bool((result.detach().cpu().double().numpy() == wide).all())

    def require_stored(self, op: str, value: Tensor) -> None:
        """Refuse a constant that the module has computed, and rounded."""
        if value.untyped_storage()._cdata in self.rounded:
            if self.taken_apart:
                raise _Derived
            self.refuse(
                op,
                f"a weight or constant is computed by the module in {value.dtype}, and rounded: keep it as a parameter "
                "or buffer, or register its computation (torch.nn.utils.parametrize)",
            )

    def parametrised(self, compute: Callable[[], Tensor]) -> Tensor:
        """A weight that a parametrisation computes: as it was rounded, it is one of the module's own numbers."""
        made = compute()
        if isinstance(made, Traced):
            self.refuse("weight", "a parametrised weight depends on the input")
        self.rounded.pop(made.untyped_storage()._cdata, None)
        return made

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record and execute an operator, or what it is made of, or refuse it."""
        name = func._schema.name.removeprefix("aten::")
        op = name if name.startswith("_") else name.removesuffix("_")
        if name in _FRESH:
            return func(*exchanged(args, _numbers), **exchanged(kwargs, _numbers))
        if op == "as_strided" and _as_it_is(*args, **kwargs):
            # So torch marks what it pools as channels-last; strides of axes of length 1 mean nothing.
            return args[0] if name.endswith("_") else self.record(torch.ops.aten.alias.default, args[:1], {})
        if op not in self.operators:
            self.taken_apart += 1
            try:
                with self:
                    made = func.decompose(*args, **kwargs)
            except _Derived:
                made = NotImplemented
            finally:
                self.taken_apart -= 1
            return self.unknown(op, func, args, kwargs) if made is NotImplemented else made
        names, defaults, written = schema(func)
        given = defaults | dict(zip(names, args, strict=False)) | kwargs
        target = given[names[0]]
        if written and (written != {names[0]} or not name.endswith("_") or not isinstance(target, Traced)):
            self.refuse(name, "writes to a tensor that is not computed from the input")
        given = exchanged(given, self.operand)
        before = (target.carried.shape, target.carried.stride()) if written else None
        real = func(*exchanged(args, _numbers), **exchanged(kwargs, _numbers))
        if not isinstance(real, Tensor):
            self.refuse(op, "makes several tensors")
        made = self.append(op, given, real)
        if not written:
            return made
        if (real.shape, real.stride()) != before:
            self.refuse(name, "changes a tensor's shape in place")
        return self.overwritten(target, made.number)

    def operand(self, value: Tensor) -> Ref | Tensor:
        """A tensor as the argument of a step."""
        return Ref(self.read(value)) if isinstance(value, Traced) else value

    def append(self, op: str, arguments: dict[str, Any], real: Tensor) -> Traced:
        """Add a step that has computed ``real``."""
        path, line, narrowest = self.where()[0], self.line(), 0

        def note(value: Any) -> None:
            nonlocal narrowest
            if isinstance(value, Ref):
                narrowest = max(narrowest, self.dtype(value.index).itemsize)
            elif isinstance(value, Tensor):
                self.require_stored(op, value)
                self.program.constants.append((value, version(value), place_of(path, op, line)))

        for value in arguments.values():
            for each in value if isinstance(value, list) else (value,):
                note(each)
        narrowed = real.dtype not in (torch.float32, torch.float64) or real.dtype.itemsize < narrowest
        if narrowed and self.unfollowed is None:
            said = f"rounds to {real.dtype}: a network is computed in one precision, float32 or float64"
            if op != "_to_copy" or real.dtype.is_floating_point or real.dtype.is_complex:
                self.refuse(op, said)
            # A file has whole numbers and truth values.
            self.unfollowed = NotFollowed(said, place=place_of(path, op, line))
        observed = real.detach().clone() if self.observe else None
        self.program.steps.append(Step(op, arguments, tuple(real.shape), real.dtype, path, observed, line))
        return Traced.of(self, real, len(self.program.steps))

    def dtype(self, index: int) -> torch.dtype:
        return self.program.steps[index - 1].dtype if index else self.input_dtype

    def unknown(self, op: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute an operator that is not known, and go on: what forbids to read the module at all may yet come."""
        path, kind = self.where()
        if op in _NUMBERS:
            self.refuse(op, "what is computed depends on computed numbers; a network is a fixed sequence of layers")
        if op in _RANKS:
            self.refuse(op, "sorts numbers or selects them by rank, which is not supported")
        names, _, written = schema(func)
        target = args[0] if args else None
        if written and not (written == {names[0]} and func._schema.name.endswith("_") and isinstance(target, Traced)):
            self.refuse(op, f"{kind or op} is not supported")
        for value in of_kind((args, kwargs), Tensor):
            if isinstance(value, Traced):
                self.require_fresh(value)
            else:
                self.require_stored(op, value)
        self.unfollowed = self.unfollowed or NotFollowed(
            f"{kind or op} is not supported", place=place_of(path, op, self.line())
        )

        def watched(real: Tensor) -> Traced:
            self.program.steps.append(Step(op, {}, tuple(real.shape), real.dtype, path, None))
            return Traced.of(self, real, len(self.program.steps))

        made = exchanged(func(*exchanged(args, _numbers), **exchanged(kwargs, _numbers)), watched)
        if not written or not isinstance(target, Traced):
            return made
        target.memory.unknown = f"{kind or op}"
        return self.overwritten(target, made.number)

    def overwritten(self, target: Traced, index: int) -> Traced:
        """Note that ``target``, in place, is now the value ``index``."""
        memory = target.memory
        memory.version += 1
        memory.index, memory.layout = index, target.carried
        target.number, target.version = index, memory.version
        return target

    def require_fresh(self, x: Traced) -> None:
        """Refuse a view of memory that an operator which is not known has changed: torch's exporter misreads them."""
        if x.version != x.memory.version and x.memory.unknown:
            self.refuse("view", f"{x.memory.unknown} changes a tensor in place, of which another view is used after it")

    def read(self, x: Traced) -> int:
        """The index of what a tensor holds now."""
        self.require_fresh(x)
        if x.version != x.memory.version:
            written = x.memory.layout
            assert written is not None
            to, back = self.order(written), self.order(x.carried)
            index = self.permuted(x.memory.index, written, to)
            flat = written.permute(to).reshape([x.carried.shape[axis] for axis in back])
            index = self.added("view", index, flat, size=list(flat.shape))
            inverse = sorted(range(len(back)), key=back.__getitem__)
            x.number, x.version = self.permuted(index, flat, inverse), x.memory.version
        return x.number

    def order(self, real: Tensor) -> list[int]:
        """The axes of a tensor as they lie in memory, the batch first."""
        axes = [0, *sorted(range(1, real.ndim), key=real.stride().__getitem__, reverse=True)]
        length, filled = math.prod(real.shape), math.prod(real.shape) * real.itemsize
        dense = real.storage_offset() == 0 and filled == real.untyped_storage().nbytes()
        for axis in axes:
            length //= max(real.shape[axis], 1)
            dense = dense and (real.shape[axis] == 1 or real.stride(axis) == length)
        if not dense:
            self.refuse(
                "view", "a part of a tensor is changed in place (torch.onnx.export may write a file that can be read)"
            )
        return axes

    def permuted(self, index: int, real: Tensor, axes: list[int]) -> int:
        return index if axes == sorted(axes) else self.added("permute", index, real.permute(axes), dims=axes)

    def added(self, op: str, index: int, real: Tensor, **arguments: Any) -> int:
        return self.append(op, {"self": Ref(index), **arguments}, real).number


_OTHERS_CODE = (os.path.dirname(torch.__file__), os.path.dirname(contextlib.__file__), str(Path(__file__).parents[2]))
"""Where the code of torch, of Python and of this package is."""

_CALL = inspect.unwrap(nn.Module._call_impl).__code__


def _numbers(value: Tensor) -> Tensor:
    return value.carried if isinstance(value, Traced) else value


def capture(
    module: nn.Module, x: Tensor, operators: Collection[str], observe: bool = True, exact: bool = False
) -> Program:
    """Run a module on x, (batch, …), and return what it did.

    Args:
        module: as it is to be run: in evaluation mode, where that is wanted.
        x: a batch of inputs; it is not changed.
        operators: the names of the ATen operators that the caller knows, and ``GATE``.
        observe: whether steps keep the numbers that they computed.
        exact: whether weights and constants that the module computes from others, and rounds, are refused; those of
            ``parametrised`` layers are not.

    Raises:
        UnsupportedError: if the module does what the program could not repeat.
        InputError: if the module fails on x by itself.
    """
    recorder = _Recorder(module, x.dtype, operators, observe, exact)
    start = Traced.of(recorder, x.clone(), 0)
    failure: Exception | None = None
    try:
        weights = parametrised(module, lambda: recorder.parametrised) if exact else nullcontext()
        with weights, recorder, _Functions(recorder):
            output = module(start)
    except Exception as error:
        failure = error
    if recorder.refusal is not None:
        raise recorder.refusal from failure
    if failure is not None:
        raise _explained(module, x, failure) from failure
    if not isinstance(output, Traced):
        raise UnsupportedError(
            f"returns a {type(output).__name__} where one tensor computed from the input is expected"
        )
    recorder.program.output = recorder.read(output)
    if recorder.refusal is not None:
        raise recorder.refusal
    recorder.program.require_unchanged()
    if recorder.unfollowed is not None:
        raise recorder.unfollowed
    return recorder.program


def _explained(module: nn.Module, x: Tensor, failure: Exception) -> InputError:
    """Why a module could not be followed: because it fails, or because it does so only when it is followed."""
    try:
        with torch.no_grad():
            module(x.clone())
    except Exception as error:
        return InputError(f"the module fails for inputs of shape {tuple(x.shape)}: {_brief(error)}")
    return UnsupportedError(f"the module cannot be followed: {_brief(failure)}")


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
