"""The files of the networks on which speed is measured."""

from __future__ import annotations

from pathlib import Path

from benchmarks.common.script import ROOT, data_folder
from verifiable_relu.errors import InputError
from verifiable_relu.files import on_disk

_PLACES = {
    "mnist_mlp": "specs/mnist_mlp.onnx",
    "cifar_cnn": "specs/cifar_cnn.onnx",
    "mnist_6x100": "benchmarks/nets/mnist_6x100.onnx.gz",
    "cifar_residual": "benchmarks/nets/cifar_residual.onnx.gz",
    "mnist_256x2": "data:vnncomp/mnist_fc/onnx/mnist-net_256x2.onnx.gz",
    "mnist_9x200": "data:vnncomp/eran_2021/onnx/mnist_relu_9_200.onnx.gz",
    "cifar_base_kw": "data:vnncomp/oval21/onnx/cifar_base_kw.onnx.gz",
    "cifar_wide_kw": "data:vnncomp/oval21/onnx/cifar_wide_kw.onnx.gz",
}
"""For each name a path in the clone or, after ``data:``, a path in the folder that VERIFIABLE_RELU_DATA names."""


def network_file(name: str) -> Path:
    """The path of one of the networks.

    Raises:
        InputError: if the file does not exist; the error names it.
    """
    place = _PLACES[name]
    path = data_folder() / place.removeprefix("data:") if place.startswith("data:") else ROOT / place
    if not on_disk(path).is_file():
        raise InputError("no such file", path=path)
    return path
