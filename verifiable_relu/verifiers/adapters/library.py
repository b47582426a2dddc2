"""The library auto_LiRPA, made to run beside the versions of other packages that this one needs.

Version 0.3 was written for torch < 1.13. Four repairs, made around its import and each of its calls and taken
back afterwards, let it run on today's; any other version that is installed is used as it is.
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
"""Nested calls allowed to the library."""


@cache
def library() -> Any:
    """The package, imported with the repairs that its version needs.

    Raises:
        InputError: if it is missing, or what it imports is.
    """
    try:
        with quiet(torch.get_default_dtype()):
            import auto_LiRPA

            return auto_LiRPA
    except (ImportError, PackageNotFoundError) as error:
        raise InputError(
            f"the method 'auto_lirpa' needs the package auto_LiRPA ({error}): "
            "pip install --no-deps auto_LiRPA==0.3 and pip install 'verifiable-relu[auto-lirpa]'"
        ) from error


@cache
def bounded_module() -> Any:
    """The library's module class, able to stop between two layers and to permute axes."""
    base = library().BoundedModule
    transpose = import_module("auto_LiRPA.bound_ops").BoundTranspose

    class Transpose(transpose):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Tensor:
            # Later steps take views of it.
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
            # Version 0.3 has not heard of remove_duplicate, and always removes them.
            return super()._named_members(get_members_fn, prefix, recurse)

    Interruptible.interrupted = staticmethod(lambda: False)
    return Interruptible


@contextmanager
def quiet(dtype: torch.dtype) -> Iterator[None]:
    """Run the library: in ``dtype``, repaired, its prints dropped, and all global state put back afterwards."""
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(dtype)
        # It recurses from node to node, and its import raises the limit a thousandfold.
        stack.callback(sys.setrecursionlimit, sys.getrecursionlimit())
        sys.setrecursionlimit(max(sys.getrecursionlimit(), _RECURSION))
        # Its import installs a handler for everybody's messages; what it logs as an error it raises as one too.
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
    """What version 0.3 imports and calls, as torch and numpy had it then."""
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
    """What an exception of the library's work stands for: that it breaks down on a network is no fault of ours."""
    if isinstance(error, InputError | OutOfTime | MemoryError) or "allocate memory" in str(error):
        return error
    if isinstance(error, NotImplementedError):
        return UnsupportedError(f"auto_LiRPA: {error}")
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(name.partition(".")[0] == "auto_LiRPA" for name in frames):
        return UnsupportedError(f"auto_LiRPA breaks down on this network: {type(error).__name__}: {error}")
    return error
