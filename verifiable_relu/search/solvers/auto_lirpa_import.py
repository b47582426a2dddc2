"""Import of auto_LiRPA as ``library``: version 0.3, written for torch < 1.13, is repaired for newer versions."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.onnx.symbolic_helper
from torch.onnx._internal.torchscript_exporter._globals import GLOBALS

_OLD = version("auto_LiRPA") == "0.3"


@contextmanager
def library_settings(dtype: torch.dtype) -> Iterator[None]:
    """Run the library with a default dtype and without its warnings; restore what it changes of torch."""
    usual, opset = torch.get_default_dtype(), GLOBALS.export_onnx_opset_version
    torch.set_default_dtype(dtype)
    try:
        # The library changes the filters.
        with warnings.catch_warnings(record=True):
            yield
    finally:
        torch.set_default_dtype(usual)
        GLOBALS.export_onnx_opset_version = opset


if _OLD:
    # These it imports or calls of numpy and torch, which no longer have them.
    sys.modules["numpy.lib.arraysetops"] = arrays = ModuleType("arraysetops")
    vars(arrays)["isin"] = np.isin
    vars(torch.onnx.symbolic_helper)["_set_opset_version"] = partial(setattr, GLOBALS, "export_onnx_opset_version")
    graph_node: Any = torch._C.Node
    graph_node.__getitem__ = lambda node, name: getattr(node, node.kindOf(name))(name)

# Its import raises the limit a thousandfold, and installs a handler.
limit, handlers = sys.getrecursionlimit(), list(logging.root.handlers)
with library_settings(torch.get_default_dtype()):
    library: Any = import_module("auto_LiRPA")
sys.setrecursionlimit(limit)
logging.root.handlers = handlers

if _OLD:
    module, transpose = library.BoundedModule, library.bound_ops.BoundTranspose
    members, forward = module._named_members, transpose.forward
    # It has no argument remove_duplicate, and always removes duplicates.
    module._named_members = lambda self, get, prefix="", recurse=True, **_: members(self, get, prefix, recurse)
    transpose.forward = lambda self, x: forward(self, x).contiguous()  # Later operators take views of it.
