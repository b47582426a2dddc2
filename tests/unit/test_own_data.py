"""Trainings on a user's own arrays."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from verifiable_relu.errors import InputError
from verifiable_relu.train.__main__ import main
from verifiable_relu.train.batches import training_and_test

RNG = np.random.default_rng(0)


def arrays(count: int = 60, shape: tuple[int, ...] = (4, 4)) -> tuple[np.ndarray, np.ndarray]:
    """Images whose brightness is their class."""
    labels = np.arange(count) % 3
    return (0.1 * RNG.random((count, *shape)) + 0.4 * labels.reshape(-1, *[1] * len(shape))), labels


@pytest.mark.parametrize(
    ("shape", "shaped"), [((5,), (5, 1, 1)), ((4, 6), (1, 4, 6)), ((3, 4, 6), (3, 4, 6)), ((1, 4, 4), (1, 4, 4))]
)
def test_every_tenth_image_is_kept_for_the_test(
    shape: tuple[int, ...], shaped: tuple[int, ...], tmp_path: Path
) -> None:
    images, labels = arrays(25, shape)
    np.savez(tmp_path / "own.npz", images=images, labels=labels)
    training, test = training_and_test(str(tmp_path / "own.npz"))
    assert training.images.shape == (23, *shaped) and test.images.shape == (2, *shaped)
    assert training.images.dtype == np.float32 and test.labels.tolist() == [labels[9], labels[19]]
    assert np.allclose(test.images.reshape(2, -1), images[[9, 19]].reshape(2, -1))
    channels = training.images.transpose(1, 0, 2, 3).reshape(shaped[0], -1)
    assert np.allclose(training.mean, channels.mean(1)) and np.allclose(training.std, channels.std(1))
    assert (test.mean, test.std) == (training.mean, training.std) and "SHA-256" in training.note


def test_the_files_own_test_images_are_taken(tmp_path: Path) -> None:
    images, labels = arrays()
    np.savez(tmp_path / "own.npz", images=images, labels=labels, test_images=images[:7], test_labels=labels[:7])
    training, test = training_and_test(str(tmp_path / "own.npz"))
    assert (len(training), len(test), training.classes) == (60, 7, 3)


def test_arrays_of_the_other_byte_order_are_the_same_data(tmp_path: Path) -> None:
    images, labels = arrays(20)
    np.savez(tmp_path / "own.npz", images=images, labels=labels)
    np.savez(tmp_path / "swapped.npz", images=images.astype(">f8"), labels=labels.astype(">i4"))
    expected, found = (training_and_test(str(tmp_path / name))[0] for name in ("own.npz", "swapped.npz"))
    assert found.images.dtype.isnative and np.array_equal(found.images, expected.images)
    assert found.labels.dtype.isnative and np.array_equal(found.labels, expected.labels)


def test_a_pixel_that_never_varies_is_not_divided_by_zero(tmp_path: Path) -> None:
    images, labels = arrays(20, (5,))
    images[:, 2] = 0.25
    np.savez(tmp_path / "own.npz", images=images, labels=labels)
    training, _ = training_and_test(str(tmp_path / "own.npz"))
    assert training.std[2] == 1 and min(training.std) > 0


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"labels": None}, "no array 'labels'"),
        ({"images": np.full((60, 4, 4), 2.0)}, "outside of [0, 1]"),
        ({"images": np.zeros((60, 1, 1, 1, 4))}, "three axes"),
        ({"images": np.zeros((5, 4, 4)), "labels": np.arange(5) % 2}, "none can be kept"),
        ({"labels": np.zeros(60, int)}, "one class"),
        ({"labels": np.array([0, 1, 10**9] * 20)}, "image 2: the label is 1000000000, where classes from 0 to 99,999"),
        ({"labels": np.arange(60) - 1}, "image 0: the label -1 is below 0"),
        ({"labels": np.zeros(60)}, "integers of shape (n,)"),
        ({"images": np.full((60, 4, 4), np.nan)}, "image 0: a pixel is nan"),
        ({"images": np.zeros((0, 4, 4)), "labels": np.zeros(0, int)}, "'images' has shape (0, 4, 4)"),
        ({"test_images": np.zeros((0, 4, 4)), "test_labels": np.zeros(0, int)}, "'test_images' has shape (0, 4, 4)"),
        ({"test_images": np.zeros((3, 5, 5)), "test_labels": np.zeros(3, int)}, "test images of (5, 5)"),
        ({"test_images": np.zeros((3, 4, 4)), "test_labels": np.full(3, 9)}, "label 9"),
        ({"test_images": np.zeros((3, 4, 4))}, "no array 'test_labels'"),
    ],
)
def test_arrays_that_do_not_fit_together_are_named(
    changed: dict[str, np.ndarray | None], words: str, tmp_path: Path
) -> None:
    images, labels = arrays()
    held = {"images": images, "labels": labels, **changed}
    np.savez(tmp_path / "own.npz", **{name: array for name, array in held.items() if array is not None})
    with pytest.raises(InputError) as error:
        training_and_test(str(tmp_path / "own.npz"))
    assert words in str(error.value) and "own.npz" in str(error.value)


def test_the_command_trains_on_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images, labels = arrays(120)
    np.savez(tmp_path / "own.npz", images=images, labels=labels)
    command = ["--data", str(tmp_path / "own.npz"), "--hidden", "8", "--epochs", "6", "--batch", "12", "--rate", "0.02"]
    assert main([*command, "--out", str(tmp_path / "own.onnx")]) == 0
    record = json.loads((tmp_path / "own.json").read_text())
    assert record["training_images"] == 108 and record["results"]["clean"] > 0.8
    shown = capsys.readouterr().out
    assert f"{record['results']['clean']:.2%}" in shown and "result" in shown
