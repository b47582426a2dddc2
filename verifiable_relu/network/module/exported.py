"""A module by way of torch's own exporter: an ONNX file in memory, read as any other.

The exporter runs the module on one sample and writes down the operators that it applies. That Python does not look at
computed numbers on the way is made certain before (``capture``).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.graph import Network
from verifiable_relu.network.module.parametrised import once, parametrised
from verifiable_relu.network.onnx import read_onnx

_AS_IT_IS: dict[bool, dict[str, Any]] = {
    False: {"training": torch.onnx.TrainingMode.PRESERVE, "do_constant_folding": False},
    True: {"optimize": False},
}
"""Options with which each of the exporters computes nothing in advance."""


def exported(module: nn.Module, x: Tensor, name: str, exact: bool = False) -> Network:
    """The network of the file that torch's exporter writes.

    Args:
        module: in evaluation mode.
        x: one sample, (1, *input_shape).
        name: of the network.
        exact: whether the exporter may compute nothing in advance, such as convolutions with the batch normalisation
            after them, which it rounds; weights of ``parametrised`` layers are constants of the file.

    Raises:
        UnsupportedError: if the module cannot be exported.
        InputError: if the file cannot be read.
    """
    if exact:
        with parametrised(module, once), torch.no_grad():
            # What is traced from here on finds the weights computed.
            module(x.clone())
            return _written(module, x, name, _AS_IT_IS)
    return _written(module, x, name, {False: {}, True: {}})


def _written(module: nn.Module, x: Tensor, name: str, options: dict[bool, dict[str, Any]]) -> Network:
    # The exporter that is torch's default knows more operators; the other takes a tenth of the time and no further
    # package.
    ways = [False, True] if importlib.util.find_spec("onnxscript") else [False]
    for dynamo in ways:
        file, silence = io.BytesIO(), io.StringIO()
        logging.disable(logging.WARNING)
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
                warnings.simplefilter("ignore")
                torch.onnx.export(module, (x.clone(),), file, dynamo=dynamo, **options[dynamo])  # type: ignore[arg-type]
        except Exception as error:  # the exporter's exceptions share no narrower base
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        else:
            return read_onnx(file.getvalue(), name)
        finally:
            logging.disable(logging.NOTSET)
    raise UnsupportedError(f"torch cannot export the module: {why}")
