"""The readers of data sets, on files that the tests write and on official ones, and of a user's own arrays."""

import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from verifiable_relu.data import load, training_and_test
from verifiable_relu.errors import InputError

ROOT = os.environ.get("VERIFIABLE_RELU_DATA")


def idx(array: np.ndarray, kind: int = 8) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two 'test' images of 28×28, the labels compressed."""
    monkeypatch.setenv("VERIFIABLE_RELU_DATA", str(tmp_path))
    folder = tmp_path / "mnist"
    folder.mkdir()
    images = np.arange(2 * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(2, 28, 28)
    (folder / "t10k-images-idx3-ubyte").write_bytes(idx(images))
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.array([3, 9], np.uint8)), mtime=0))
    return folder


def test_mnist_is_read_from_its_files(mnist: Path) -> None:
    data = load("mnist", "test")
    assert data.images.shape == (2, 1, 28, 28) and data.images.dtype == np.float32
    assert data.images[0, 0, 9, 3] == np.float32(255) / np.float32(255) and data.images[0, 0, 0, 1] == np.float32(
        1 / 255
    )
    assert data.labels.tolist() == [3, 9] and data.labels.dtype == np.int64 and data.exact.all()


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("t10k-images-idx3-ubyte", None, "no such file"),
        ("t10k-images-idx3-ubyte", b"PK\3\4", "not an IDX file"),
        ("t10k-images-idx3-ubyte", b"\0\0\x08\3\0", "ends within its header"),
        ("t10k-images-idx3-ubyte", idx(np.zeros((2, 28, 28), np.uint8))[:-1], "1583 bytes, but its shape"),
        ("t10k-images-idx3-ubyte", idx(np.zeros((2, 28, 28), np.uint8), kind=0x0D), "0x0d"),
        ("t10k-labels-idx1-ubyte.gz", gzip.compress(idx(np.zeros(3, np.uint8)), mtime=0), "3 labels for 2 images"),
        ("t10k-labels-idx1-ubyte.gz", b"not gzip", "damaged gzip file"),
    ],
)
def test_damaged_files_of_mnist_are_refused(mnist: Path, file: str, content: bytes | None, words: str) -> None:
    (mnist / file).unlink()
    if content is not None:
        (mnist / file).write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        load("mnist", "test")
    assert str(mnist / file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with batches 1 and 3, of two images each."""
    monkeypatch.setenv("VERIFIABLE_RELU_DATA", str(tmp_path))
    folder = tmp_path / "cifar10" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for number in (1, 3):
        records = np.full((2, 3073), 10 * number, np.uint8)
        records[:, 0] = number
        records[1, 1 + 1024 + 32] = 255  # green, second row, first column
        (folder / f"data_batch_{number}.bin").write_bytes(records.tobytes())
    return folder


def test_cifar_is_read_from_its_files(cifar: Path) -> None:
    data = load("cifar10", "train")
    assert data.images.shape == (4, 3, 32, 32) and data.labels.tolist() == [1, 1, 3, 3]
    assert data.images[1, 1, 1, 0] == 1 and data.images[0].max() == np.float32(10 / 255)
    assert data.note == "2 of 5 training batches, 4 images"
    path = cifar / "data_batch_3.bin"
    path.with_suffix(".bin.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    path.unlink()
    assert load("cifar10", "train").labels.tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "0 bytes"), (b"\1" * 3072, "3073-byte"), (b"\12" + bytes(3072), "record 0.*label is 10")],
)
def test_damaged_files_of_cifar_are_refused(cifar: Path, content: bytes, words: str) -> None:
    (cifar / "data_batch_3.bin").write_bytes(content)
    with pytest.raises(InputError, match=words):
        load("cifar10", "train")
    with pytest.raises(InputError, match=r"test_batch\.bin: no such file"):
        load("cifar10", "test")


def test_inexact_images_are_marked(cifar: Path) -> None:
    listed = cifar.parent / "train_lossy_indices.txt"
    listed.write_text("# official indices\n1\n20000\n40000\n")
    assert load("cifar10", "train").exact.tolist() == [True, False, False, True]
    listed.write_text("1\nthree\n")
    with pytest.raises(InputError, match="line 2: 'three'"):
        load("cifar10", "train")


ROWS = """39, State-gov, 10, Bachelors, 13, Never-married, Adm-clerical, Husband, White, Male, 0, 0, 40, Peru, <=50K
19, ?, 30, Bachelors, 9, Never-married, Sales, Husband, White, Female, 500, 0, 20, Peru, >50K

"""


@pytest.fixture
def adult(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two training rows, and two test rows: one like the second, one unlike any."""
    monkeypatch.setenv("VERIFIABLE_RELU_DATA", str(tmp_path))
    folder = tmp_path / "adult"
    folder.mkdir()
    (folder / "adult.data").write_text(ROWS)
    second = ROWS.splitlines()[1]
    unlike = second.replace("19", "99").replace("Sales", "Armed-Forces").replace(">50K", "<=50K")
    (folder / "adult.test").write_text(f"|1x3 Cross validator\n{second}.\n{unlike}.\n\n")
    return folder


def test_adult_is_read_from_its_files(adult: Path) -> None:
    train, test = load("adult", "train"), load("adult", "test")
    # age | 2 workclasses, "?" first | fnlwgt | 1 | education-num | 1 | 2 | 1 | 1 | 2 | gain | loss | hours | 1
    assert train.images[:, :, 0, 0].tolist() == [
        [1, 0, 1, 0, 1, 1, 1, 1, 0, 1, 1, 0, 1, 0, 0, 1, 1],
        [0, 1, 0, 1, 1, 0, 1, 0, 1, 1, 1, 1, 0, 1, 0, 0, 1],
    ]
    assert train.labels.tolist() == [0, 1] and train.classes == 2 and train.images.dtype == np.float32
    assert np.array_equal(test.images[0], train.images[1]) and test.labels.tolist() == [1, 0]
    assert test.images[1, 0] == 1 and test.images[1, 7:9].sum() == 0
    assert train.mean == test.mean and train.mean[:3] == (0.5, 0.0, 0.0) and train.std[:3] == (0.5, 1.0, 1.0)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("Peru, >50K", "Peru, >60K", "line 2.*'>60K' is neither"),
        ("19, ?", "19", "line 2.*14 entries where 15"),
        ("19, ?", "young, ?", "column age.*young"),
        (ROWS, "", "no rows"),
    ],
)
def test_damaged_files_of_adult_are_refused(adult: Path, old: str, new: str, words: str) -> None:
    (adult / "adult.data").write_text(ROWS.replace(old, new))
    with pytest.raises(InputError, match=words):
        load("adult", "train")


def test_unknown_data_sets_are_refused() -> None:
    with pytest.raises(InputError, match="no data set 'imagenet'; there are mnist"):
        load("imagenet", "test")
    with pytest.raises(InputError, match="no split 'val'"):
        load("mnist", "val")  # type: ignore[arg-type]


def test_digits_are_those_of_scikit_learn() -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    train, test = load("digits", "train"), load("digits", "test")
    assert len(train) == 1347 and len(test) == 450 and train.images.max() == 1 and train.classes == 10
    assert train.images.mean() == pytest.approx(train.mean[0], abs=1e-3)
    assert train.images.std() == pytest.approx(train.std[0], abs=1e-3)


OFFICIAL = {
    "mnist": [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
    "fashion_mnist": [1000] * 10,
    "cifar10": [1000] * 10,
    "adult": [16_281 - 3_846, 3_846],
}
"""The numbers of test samples of each class."""


@pytest.mark.parametrize("name", OFFICIAL)
def test_the_official_files_are_read(name: str) -> None:
    if ROOT is None or not (Path(ROOT) / name).is_dir():
        pytest.skip(f"VERIFIABLE_RELU_DATA names no folder with {name}")
    data = load(name, "test")
    assert np.bincount(data.labels).tolist() == OFFICIAL[name]
    assert data.images.min() == 0 and data.images.max() == 1
    if name == "adult":
        assert data.images.shape[1:] == (108, 1, 1)
        assert (data.images[:, np.array(data.std) == 1].sum(1) <= 8).all(), "at most one of each of eight categories"
        return
    np.testing.assert_allclose(data.images.mean((0, 2, 3)), data.mean, atol=5e-3)
    np.testing.assert_allclose(data.images.std((0, 2, 3)), data.std, atol=5e-3)


# A user's own arrays

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


def test_the_files_own_test_images_are_taken_in_any_order_of_bytes(tmp_path: Path) -> None:
    images, labels = arrays(60, (5,))
    images[:, 2] = 0.25
    np.savez(tmp_path / "own.npz", images=images, labels=labels, test_images=images[:7], test_labels=labels[:7])
    np.savez(tmp_path / "swapped.npz", images=images.astype(">f8"), labels=labels.astype(">i4"))
    training, test = training_and_test(str(tmp_path / "own.npz"))
    swapped, _ = training_and_test(str(tmp_path / "swapped.npz"))
    assert (len(training), len(test), training.classes) == (60, 7, 3)
    assert swapped.images.dtype.isnative and np.array_equal(swapped.images[:9], training.images[:9])
    assert training.std[2] == 1 and min(training.std) > 0, "a pixel that never varies is not divided by zero"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"labels": None}, "no array 'labels'"),
        ({"images": np.full((60, 4, 4), 2.0)}, "outside of [0, 1]"),
        ({"images": np.zeros((60, 1, 1, 1, 4))}, "three axes"),
        ({"images": np.zeros((5, 4, 4)), "labels": np.arange(5) % 2}, "too few to keep"),
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
