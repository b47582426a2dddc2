"""A trace by way of torch's exporter: an ONNX file in memory, read as any other.

The exporter runs the steps of the trace again, on one sample. Weights and constants that the module has computed are
numbers there, nothing is changed in place, and what Python looked at has been decided before.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.network import Network
from verifiable_relu.readers import read_onnx
from verifiable_relu.readers.torch.trace import Trace, TracedCall, exchanged, tensors


def exported(trace: Trace, name: str) -> Network:
    """The network of the file that torch's exporter writes of a trace of one sample.

    Raises:
        UnsupportedError: if the steps cannot be exported.
        InputError: if the file cannot be read.
    """
    file, silence = io.BytesIO(), io.StringIO()
    options = {"training": torch.onnx.TrainingMode.PRESERVE, "do_constant_folding": False, "dynamo": False}
    # What it logs of a failure goes to the screen past Python's streams.
    log = torch._C._jit_onnx_log
    logging.disable(logging.WARNING)
    torch._C._jit_onnx_log = lambda *what: None
    try:
        with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(_Again(trace).eval(), (trace.x.clone(),), file, **options)  # type: ignore[arg-type]
    except Exception as error:  # the exporter's exceptions share no narrower base
        raise UnsupportedError("torch cannot export the module") from error
    finally:
        logging.disable(logging.NOTSET)
        torch._C._jit_onnx_log = log
    return read_onnx(file.getvalue(), name)


class _Again(nn.Module):
    """The steps of a trace as a module."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace
        self.constants = {id(t): t.detach() for step in trace.steps for t in step.given}

    def forward(self, x: Tensor) -> Tensor:
        values = {**self.constants, id(self.trace.x): x}
        for step in self.trace.steps:
            arguments = exchanged(step.arguments, lambda t: values[id(t)])
            made = _form(step)(SimpleNamespace(**arguments))
            values.update({id(old): new for old, new in zip(tensors(step.made), tensors(made), strict=False)})
        return values[id(self.trace.output)]


Form = Callable[[Any], Any]


def _form(step: TracedCall) -> Form:
    """The operator of a step, of its arguments by name, in the form that the exporter knows."""
    if step.op.startswith("upsample_"):
        return lambda a: _upsampled(a, step.op.removeprefix("upsample_")[:-2])
    return _FORMS.get(step.op, lambda a: step.function(**vars(a)))


def _upsampled(a: Any, mode: str) -> Tensor:
    scales = [value for name, value in vars(a).items() if name.startswith("scales")]
    how = {"size": a.output_size} if None in scales else {"scale_factor": scales}
    return F.interpolate(a.self, mode=mode, align_corners=getattr(a, "align_corners", None), **how)


def _adaptive_avg_pool2d(a: Any) -> Tensor:
    """The means over windows that overlap, or differ in size, where the sides are no multiples of the output's."""
    sides = [
        [slice(i * n // m, -(-(i + 1) * n // m)) for i in range(m)]
        for n, m in zip(map(int, a.self.shape[2:]), a.output_size, strict=True)
    ]
    parts = [a.self[:, :, rows, columns].mean((2, 3)) for rows, columns in itertools.product(*sides)]
    return torch.stack(parts, 2).reshape(*a.self.shape[:2], *a.output_size)


def _softplus(a: Any) -> Tensor:
    if a.threshold < 20:
        raise UnsupportedError(f"threshold={a.threshold}: from there on torch computes another function")
    return F.softplus(a.self) if a.beta == 1 else F.softplus(a.self * a.beta) / a.beta


_FORMS: dict[str, Form] = {
    **dict.fromkeys(("_softmax", "_safe_softmax"), lambda a: torch.softmax(a.self, a.dim)),
    "_log_softmax": lambda a: torch.log_softmax(a.self, a.dim),
    "_prelu_kernel": lambda a: F.prelu(a.self, a.weight.flatten()),
    **dict.fromkeys(("view", "_unsafe_view"), lambda a: a.self.reshape(a.size)),
    "_to_copy": lambda a: a.self.to(a.dtype or a.self.dtype),
    "_adaptive_avg_pool2d": _adaptive_avg_pool2d,
    "native_layer_norm": lambda a: F.layer_norm(a.input, a.normalized_shape, a.weight, a.bias, a.eps),
    "native_group_norm": lambda a: F.group_norm(a.input, a.group, a.weight, a.bias, a.eps),
    "native_batch_norm": lambda a: F.batch_norm(
        a.input, a.running_mean, a.running_var, a.weight, a.bias, a.training, eps=a.eps
    ),
    "max_pool2d_with_indices": lambda a: F.max_pool2d(
        a.self, a.kernel_size, a.stride or None, a.padding, a.dilation, a.ceil_mode
    ),
    "log_sigmoid_forward": lambda a: F.logsigmoid(a.self),
    "elu": lambda a: F.elu(a.self * a.input_scale, a.alpha) * a.scale,
    "softplus": _softplus,
    "threshold": lambda a: torch.where(a.self > a.threshold, a.self, a.value),
    "softshrink": lambda a: torch.relu(a.self - a.lambd) - torch.relu(-a.self - a.lambd),
    "sinh": lambda a: (torch.exp(a.self) - torch.exp(-a.self)) / 2,
    "cosh": lambda a: (torch.exp(a.self) + torch.exp(-a.self)) / 2,
    "tan": lambda a: torch.sin(a.self) * torch.reciprocal(torch.cos(a.self)),
    "expm1": lambda a: torch.exp(a.self) - 1,
    "log1p": lambda a: torch.log(1 + a.self),
}
"""By the operator's name, its form for the exporter; functions that it does not know, by those that they consist of."""
