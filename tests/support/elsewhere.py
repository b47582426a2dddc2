"""A pretended torch device, whose tensors compute on the CPU and refuse to be combined with tensors of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda")


class _There(Tensor):
    """A tensor on the pretended device."""


class Elsewhere(TorchFunctionMode):
    """The context within which torch has ``DEVICE``.

    As on a real device, only ``to`` and the like move tensors, and what exists for the CPU alone fails: a numpy array
    of a tensor, the library for convolutions. Indices of the device's tensors may be on the CPU. Numbers may not,
    though some functions of real devices take them.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", str(func))
        there = any(_is_there(t) for t in _tensors((args, kwargs)))
        if func == Tensor.device.__get__ and there:  # type: ignore[attr-defined]
            return DEVICE
        if name == "_has_compatible_shallow_copy_type":
            # Then a module's parameters are made anew on their way to a device.
            return False
        with torch._C.DisableTorchFunctionSubclass():
            if name in ("to", "cpu", "cuda"):
                return _moved(name, *args, *kwargs.values())
            if name == "__deepcopy__" and there:
                return _copied(*args)
            if there:
                _check(name, func, args, kwargs)
            elsewhere = there or ("device" in kwargs and torch.device(kwargs["device"] or "cpu").type == DEVICE.type)
            kwargs = {key: value for key, value in kwargs.items() if key != "device"}
            found = func(*args, **kwargs)
        return tree_map(_on_device, found) if elsewhere and not isinstance(found, torch.Size) else found


def _check(name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise the error that a real device raises if tensors of different devices are combined."""
    if name in ("numpy", "__array__") or "mkldnn" in str(func):
        raise TypeError(f"{name} of a tensor on {DEVICE}")
    indexed = name in ("__getitem__", "__setitem__") and isinstance(args[0], _There)
    if not all(_is_there(t) for t in _tensors(args[2:] if indexed else (args, kwargs))):
        raise RuntimeError(f"{name} of tensors on {DEVICE} and on the CPU")


def _moved(name: str, own: Tensor, *wanted: Any) -> Tensor:
    """A tensor moved to the device and dtype of the arguments, which name them or give another tensor as an example."""
    stays = name == "to" and not isinstance(own, _There)
    device, dtype = torch.device("cpu") if stays or name == "cpu" else DEVICE, own.dtype
    for value in wanted:
        if isinstance(value, str | torch.device):
            device = torch.device(value)
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, Tensor):
            device, dtype = (DEVICE if isinstance(value, _There) else value.device), value.dtype
    found = own.to(dtype)
    if device.type == DEVICE.type:
        return _on_device(found)  # type: ignore[no-any-return]
    return found.as_subclass(Tensor) if isinstance(found, _There) else found


def _copied(own: Tensor, memo: dict[int, Any]) -> Tensor:
    """A deep copy of a tensor; the copy of a parameter is a parameter."""
    memo[id(own)] = made = own.detach().clone().as_subclass(_There).requires_grad_(own.requires_grad)
    made._is_param = isinstance(own, nn.Parameter)  # type: ignore[attr-defined]
    return made


def _tensors(values: Any) -> Iterator[Tensor]:
    return (t for t in tree_leaves(values) if isinstance(t, Tensor))


def _is_there(tensor: Tensor) -> bool:
    """Return True for a tensor on the device; torch's functional tensors, which stand for others, are there, too."""
    marked = isinstance(tensor, _There) or getattr(tensor, "is_marked_there", False)
    return marked or torch._is_functional_tensor(tensor)


def _on_device(value: Any) -> Any:
    if not isinstance(value, Tensor) or _is_there(value):
        return value
    if value.layout is torch.strided:
        return value.as_subclass(_There)
    # Sparse tensors are of no other class.
    value.is_marked_there = True  # type: ignore[attr-defined]
    return value
