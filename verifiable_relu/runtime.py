"""The only way in which this package imports and starts onnxruntime.

The official builds of onnxruntime, from version 1.29 on, report to their maker: on import they write an identifier of
the machine and a database of events below the user's cache folder, and upload these events later. The environment
variable ``ORT_DISABLE_TELEMETRY`` prevents all of it, but is read once, on import (onnxruntime's ``Privacy.md``);
``disable_telemetry_events`` comes too late for the files.
"""

from __future__ import annotations

import os
from functools import lru_cache
from importlib import import_module
from typing import Any


def load(part: str = "") -> Any:
    """Return the module onnxruntime, or a submodule of it such as ``quantization``, imported with its telemetry off.

    The environment variable, which stays set, has no effect on an onnxruntime that another library imported before.
    """
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    module = import_module("onnxruntime")
    # On Windows, a build can report by the system's own tracing, which only this function switches off.
    module.disable_telemetry_events()
    return import_module(f"onnxruntime.{part}") if part else module


def session(model: bytes, threads: int = 1, precise: bool = False, optimised: bool = True) -> Any:
    """Return an ``onnxruntime.InferenceSession`` of an ONNX file's content, which runs on the CPU.

    It logs fatal errors only: other errors are raised as exceptions, of classes of onnxruntime that share no narrower
    base than ``Exception``, and log lines would carry names from the file to the terminal unescaped. With ``precise``,
    sums of int8 products are exact on processors without VNNI, too, where sums of two products saturate at 16 bits by
    default; unless ``optimised``, operators run one by one as the file has them.
    """
    onnxruntime = load()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4
    if precise:
        options.add_session_config_entry("session.x64quantprecision", "1")
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@lru_cache(maxsize=2)
def kept_session(model: bytes, precise: bool = False, optimised: bool = True) -> Any:
    """Return the ``session`` of a file's content; keep the last two, and no more: large networks fill memory."""
    return session(model, precise=precise, optimised=optimised)
