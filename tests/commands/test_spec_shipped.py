"""The properties in specs/: all there, listed, and about real images that their networks classify rightly."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.support.draws import some
from verifiable_relu.certify import main as certify
from verifiable_relu.data import Dataset, load
from verifiable_relu.files import on_disk, read_text
from verifiable_relu.ir.network import Network
from verifiable_relu.readers import read_onnx
from verifiable_relu.spec import Query, find_network, limits, linf_properties, queries, read_vnnlib
from verifiable_relu.spec.__main__ import DECIMALS
from verifiable_relu.spec.find import Instance, read_instances

SPECS = Path(__file__).parents[2] / "specs"
ROWS = read_instances(SPECS / "instances.csv")
HEAD = re.compile(r"; L-infinity robustness: (\w+) test image (\d+), label (\d), eps (\S+)")


@cache
def network(path: Path) -> Network:
    return read_onnx(path)


@cache
def dataset(name: str) -> Dataset:
    return load(name, "test")


@pytest.mark.quick
def test_every_property_is_listed_once_and_the_folder_is_small() -> None:
    listed = [on_disk(row.vnnlib).name for row in ROWS]
    assert sorted(listed) == sorted(path.name for path in SPECS.iterdir() if ".vnnlib" in path.name)
    assert (SPECS / "cifar_eps.vnnlib").is_file()
    assert sum(path.stat().st_size for path in SPECS.iterdir()) < 2.5e6


@pytest.mark.parametrize("row", list(some(ROWS)), ids=lambda row: row.vnnlib.stem)
def test_a_property_fits_its_network_and_the_image_it_names(row: Instance, request: pytest.FixtureRequest) -> None:
    spec = read_vnnlib(on_disk(row.vnnlib))
    found = find_network(spec)
    assert found.samefile(row.onnx)
    (query,) = queries(spec, network(found))
    said = HEAD.match(read_text(spec.path, limits.BYTES))
    assert said
    name, index, label, eps = said[1], int(said[2]), int(said[3]), Fraction(said[4])

    request.getfixturevalue("data")
    test = dataset(name)
    assert test.exact[index] and test.labels[index] == label
    image = test.images[index]
    with torch.inference_mode():
        assert network(found)(torch.from_numpy(image.reshape(1, -1))).argmax() == label
    (ball,) = linf_properties(image[None], [label], eps, 10, decimals=DECIMALS)
    assert query.digest == Query(query.network, ball).digest


@pytest.mark.quick
def test_a_shipped_property_is_proved(capsys: pytest.CaptureFixture[str]) -> None:
    assert certify(["--spec", str(SPECS / "cifar_eps.vnnlib"), "--quiet"]) == 0
    assert capsys.readouterr().out == "unsat\n"
