"""Flat networks of drawn files, of modules of every kind and of competition networks compute what the graphs do."""

from __future__ import annotations

import gzip
import os
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.draws import draws
from tests.support.module_kinds import MODULES, module
from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.ir.enclosure import enclose, formats, sample_points
from verifiable_relu.ir.exact import evaluate_exact, is_evaluable
from verifiable_relu.ir.flatten import flatten
from verifiable_relu.network import Network, from_torch, read_onnx
from verifiable_relu.trust import enclose as before
from verifiable_relu.trust import exact

from .onnx_agreement import cases

FAMILIES = [
    "vnncomp/acasxu/onnx/ACASXU_run2a_1_1_batch_2000.onnx.gz",
    "vnncomp/mnist_fc/onnx/mnist-net_256x4.onnx.gz",
    "vnncomp/oval21/onnx/cifar_deep_kw.onnx.gz",
    "vnncomp/eran_2021/onnx/ffnnSIGMOID__Point_6x200.onnx.gz",
    "vnncomp/tllverifybench/onnx/tllBench_n=2_N=M=16_m=1_instance_1_0.onnx.gz",
    "competition_2026/cifar10_resnet_2021/onnx/resnet_4b.onnx.gz",
    "competition_2026/verivital_2021/onnx/Convnet_maxpool.onnx.gz",
    "competition_2026/cifar_biasfield/onnx/cifar_bias_field_0.onnx.gz",
    "competition_2026/cctsdb_yolo_2023/onnx/patch-1.onnx.gz",
    "competition_2026/traffic_signs_recognition_2023/onnx/3_30_30_QConv_16_3_QConv_32_2_Dense_43_ep_30.onnx.gz",
    "competition_2026/cgan2026/onnx/cGAN_imgSz32_nCh_3_upsample.onnx.gz",
    "competition_2026/ml4acopf_2024/onnx/14_ieee_ml4acopf.onnx.gz",
    "competition_2026/ml4acopf_2024/onnx/14_ieee_ml4acopf-linear-residual.onnx.gz",
    "competition_2026/nn4sys_2023/onnx/mscn_128d_dual.onnx.gz",
    "competition_2026/nn4sys_2023/onnx/pensieve_small_parallel.onnx.gz",
]


def assert_same_values(network: Network) -> None:
    flat, x = flatten(network.limit), sample_points(network.input_shape, torch.float64)[[0, 1, 4, 7]]
    with torch.no_grad():
        expected, found = network(x).flatten(1), flat(x.flatten(1))
    size = 1e-9 * float(expected[expected.isfinite()].abs().max()) if bool(expected.isfinite().any()) else 0.0
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=size, equal_nan=True)
    for kind, places in network.limit.counted.items():
        assert set(places.tolist()) <= set(flat.counted[kind].tolist())
    with torch.no_grad():
        for index in flat.whole:
            value = flat.values(x.flatten(1))[index]
            value = value[value.isfinite()]
            torch.testing.assert_close(value, value.round(), rtol=1e-9, atol=1e-9)


def assert_same_proofs(network: Network, point: list[Fraction], tally: Counter[str]) -> None:
    """The same exact values, and errors that are not much larger."""
    flat = flatten(network)
    assert is_evaluable(flat) >= exact.evaluable(network)
    values = [Fraction(0)] * network.output_size
    if exact.evaluable(network):
        values = evaluate_exact(flat, point)
        assert values == exact.evaluate_exact(network, point)
        tally["exact"] += 1
    assert formats(flat) == before.formats(network)
    for dtype in formats(flat):
        found, other = enclose(flat, point, dtype), before.enclose(network, point, dtype)
        known = np.isfinite(other.value) & np.isfinite(other.error)
        value, error = found.value[known], found.error[known]
        assert (np.abs(value - other.value[known]) <= error + other.error[known]).all()
        assert (error <= 4 * other.error[known]).all()
        tally["enclosed"] += int(known.all())
        if exact.evaluable(network):
            for true, y, error in zip(values, found.value, found.error, strict=True):
                assert not np.isfinite(y) or abs(true - Fraction(*y.as_integer_ratio())) <= Fraction(
                    *error.as_integer_ratio()
                )


def test_drawn_files_mean_the_same() -> None:
    tally: Counter[str] = Counter()
    rng = np.random.default_rng(0)
    for case in cases(draws(300), seed=2):
        try:
            network = read_onnx(case.data)
        except (InputError, UnsupportedError):
            continue
        tally["read"] += 1
        assert_same_values(network)
        numbers = zip(rng.integers(-99, 99, network.input_size), rng.integers(1, 20, network.input_size), strict=True)
        assert_same_proofs(network, [Fraction(int(n), int(d)) for n, d in numbers], tally)
    assert tally["exact"] > tally["read"] / 2 and tally["enclosed"] > tally["read"], tally


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODULES)
def test_modules_mean_the_same(name: str) -> None:
    made, shape = module(name)
    try:
        network = from_torch(made, shape)
    except UnsupportedError as refusal:
        pytest.skip(str(refusal))
    assert_same_values(network)
    if network.input_size <= 100:
        assert_same_proofs(network.limit, [Fraction(n % 7 - 3, 5) for n in range(network.input_size)], Counter())


@pytest.mark.parametrize("name", ["specs/cifar_cnn.onnx", "specs/mnist_cnn.onnx", *FAMILIES])
def test_networks_of_families_mean_the_same(name: str) -> None:
    folder = (
        Path(__file__).parents[2] if name.startswith("specs") else Path(os.environ.get("VERIFIABLE_RELU_DATA", "."))
    )
    path = folder / name
    if not path.is_file():
        pytest.skip(f"needs {name} in the folder that VERIFIABLE_RELU_DATA names")
    data = path.read_bytes()
    assert_same_values(read_onnx(gzip.decompress(data) if name.endswith(".gz") else data))
