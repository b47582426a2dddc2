"""The import and the calls of auto_LiRPA, with repairs for the versions of torch and numpy that this package needs.

Version 0.3 of the library was written for torch < 1.13. Four repairs, which are in place only during the library's
import and its calls, let it run with newer versions. Any other version of the library is used as it is.
"""

from __future__ import annotations

import io
import logging
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.errors import InputError, OutOfTime, UnsupportedError

_RECURSION = 20_000
"""The most nested calls that Python allows during a call of the library, which recurses from node to node."""


@cache
def library() -> Any:
    """The package auto_LiRPA, imported with the repairs that its version needs.

    Raises:
        InputError: if it cannot be imported.
    """
    try:
        with quiet(torch.get_default_dtype()):
            import auto_LiRPA

            return auto_LiRPA
    except (ImportError, PackageNotFoundError) as error:
        raise InputError(f"auto_LiRPA cannot be imported: {error}") from error


@cache
def bounded_module() -> Any:
    """The library's module class, extended such that it can stop between two layers and permute axes."""
    base = library().BoundedModule
    transpose = import_module("auto_LiRPA.bound_ops").BoundTranspose

    class Transpose(transpose):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Tensor:
            # Later operators of the library take views of the result.
            return super().forward(x).contiguous()

    class Interruptible(base):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, custom_ops={"onnx::Transpose": Transpose}, **options)

        def compute_intermediate_bounds(self, *arguments: Any, **options: Any) -> Any:
            if self.interrupted():
                raise OutOfTime
            return super().compute_intermediate_bounds(*arguments, **options)

        def _named_members(
            self, get_members_fn: Any, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
        ) -> Any:
            # Version 0.3 has no argument remove_duplicate, and always removes duplicates.
            return super()._named_members(get_members_fn, prefix, recurse)

    Interruptible.interrupted = staticmethod(lambda: False)
    return Interruptible


@contextmanager
def quiet(dtype: torch.dtype) -> Iterator[None]:
    """The context in which the library runs, which restores all global state afterwards.

    Within the context, torch's default dtype is ``dtype``, the repairs are in place, and what the library prints, warns
    or logs is dropped.
    """
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(dtype)
        # The library recurses from node to node, and its import raises Python's limit a thousandfold.
        stack.callback(sys.setrecursionlimit, sys.getrecursionlimit())
        sys.setrecursionlimit(max(sys.getrecursionlimit(), _RECURSION))
        # The library's import installs a handler on the root logger. Errors that it logs are raised as exceptions too.
        stack.callback(setattr, logging.root, "handlers", list(logging.root.handlers))
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        stack.enter_context(redirect_stdout(io.StringIO()))
        stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("ignore")
        if version("auto_LiRPA") == "0.3":
            stack.enter_context(_repaired())
        yield


@contextmanager
def _repaired() -> Iterator[None]:
    """The context in which torch and numpy have the modules and functions that version 0.3 imports and calls."""
    import torch.onnx.symbolic_helper
    from torch.onnx._internal.torchscript_exporter._globals import GLOBALS

    def set_opset_version(number: int) -> None:
        GLOBALS.export_onnx_opset_version = number

    def attribute(node: Any, name: str) -> Any:
        return getattr(node, node.kindOf(name))(name)

    sets = ModuleType("numpy.lib.arraysetops")
    sets.isin = np.isin  # type: ignore[attr-defined]
    with ExitStack() as stack:
        stack.callback(set_opset_version, GLOBALS.export_onnx_opset_version)
        sys.modules[sets.__name__] = sets
        stack.callback(sys.modules.pop, sets.__name__)
        stack.enter_context(
            patch.object(torch.onnx.symbolic_helper, "_set_opset_version", set_opset_version, create=True)
        )
        stack.enter_context(patch.object(torch._C.Node, "__getitem__", attribute, create=True))
        yield


def explained(error: Exception) -> Exception:
    """The exception to report in place of one that a call of the library raised.

    A failure within the library's own code becomes an UnsupportedError: the library does not take the network. Want of
    memory or time, bad input, and exceptions outside of the library's code stay as they are.
    """
    if isinstance(error, InputError | OutOfTime | MemoryError) or "allocate memory" in str(error):
        return error
    if isinstance(error, NotImplementedError):
        return UnsupportedError(f"auto_LiRPA: {error}")
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(name.partition(".")[0] == "auto_LiRPA" for name in frames):
        return UnsupportedError(f"auto_LiRPA fails on this network: {type(error).__name__}: {error}")
    return error
