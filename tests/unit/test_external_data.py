"""Networks whose numbers lie in a file beside the ONNX file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from verifiable_relu.errors import InputError
from verifiable_relu.readers import read_onnx

WEIGHT = np.arange(12, dtype=np.float32).reshape(4, 3) / 8


def model(**entries: str) -> onnx.ModelProto:
    """x·WEIGHT, its weight in another file as the entries say."""
    weight = numpy_helper.from_array(WEIGHT, "w")
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        weight.external_data.add(key=key, value=value)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 4))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 3))],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def written(folder: Path, **entries: str) -> Path:
    path = folder / "net.onnx"
    path.write_bytes(model(**entries).SerializeToString())
    return path


@pytest.mark.parametrize("location", ["net.onnx.data", "./weights.bin", "parts/weights.bin"])
def test_data_beside_the_file_is_read(location: str, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / location).write_bytes(b"12345678" + WEIGHT.tobytes() + b"more")
    network = read_onnx(written(tmp_path, location=location, offset="8", length="48"))
    found = network(torch.ones(1, 4))
    np.testing.assert_array_equal(found[0], WEIGHT.sum(0))
    (tmp_path / location).unlink()
    assert read_onnx(network.source.onnx).digest == network.digest


def _outside(folder: Path) -> Path:
    (folder.parent / "secret").write_bytes(WEIGHT.tobytes())
    return folder.parent / "secret"


def _linked(folder: Path) -> str:
    (folder / "link").symlink_to(_outside(folder))
    return "link"


def _linked_folder(folder: Path) -> str:
    _outside(folder)
    (folder / "up").symlink_to(folder.parent)
    return "up/secret"


ELSEWHERE: dict[str, Callable[[Path], str]] = {
    "the folder above": lambda folder: f"../{_outside(folder).name}",
    "through a folder and back": lambda folder: f"parts/../../{_outside(folder).name}",
    "an absolute path": lambda folder: str(_outside(folder)),
    "a link to a file elsewhere": _linked,
    "a link to a folder elsewhere": _linked_folder,
    "another machine": lambda folder: "//host/share/secret",
    "a drive": lambda folder: "C:secret",
    "backward slashes": lambda folder: "..\\secret",
    "a folder": lambda folder: "parts",
    "no name": lambda folder: "",
    "a null character": lambda folder: "sec\0ret",
    "the folder itself": lambda folder: ".",
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_data_elsewhere_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "parts").mkdir(parents=True)
    path = written(folder, location=ELSEWHERE[name](folder))
    with pytest.raises(InputError, match="'w'") as caught:
        read_onnx(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "entries",
    [{"offset": "48"}, {"length": "47"}, {"length": "49"}, {"offset": "-8"}, {"offset": "1e1"}, {"offset": "9" * 30}],
)
def test_data_that_is_too_short_or_badly_named_is_refused(entries: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(WEIGHT.tobytes())
    with pytest.raises(InputError, match=r"\bw\b"):
        read_onnx(written(tmp_path, location="data", **entries))


def test_data_of_bytes_without_a_folder_is_refused() -> None:
    with pytest.raises(InputError, match=r"'w'.*another file"):
        read_onnx(model(location="data").SerializeToString())
