"""Public data sets, read from their official files, and a user's own arrays: images in [0, 1] and labels.

The environment variable ``VERIFIABLE_RELU_DATA`` names a folder with a folder for each data set, of the data set's
name. Without the variable, or if the data set has no folder there, the files are downloaded once into the user's cache
folder and verified by checksum. The module does not import numpy, so that ``--help`` stays quick.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from verifiable_relu.errors import InputError, missing

if TYPE_CHECKING:
    import numpy as np

    from verifiable_relu.data.readers import Samples

Split = Literal["train", "test"]

VARIABLE = "VERIFIABLE_RELU_DATA"

VALIDATION = ":validation"
"""The suffix of a data set's name or a file's path whose training images stand for the test images, too."""


@dataclass(frozen=True)
class DatasetEntry:
    """A data set of the table.

    ``reader`` is the function of ``data.readers`` that reads it; ``mean`` and ``std`` are those of each channel of the
    training images in [0, 1], empty if the reader computes them. Its ``files``, by name with their SHA-256, come from
    the folder ``url`` with a trailing slash, empty for data that a library brings; an ``archive`` is one tar file.
    """

    reader: str
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    url: str = ""
    files: dict[str, str] = field(default_factory=dict)
    archive: bool = False


DATASETS = {
    "mnist": DatasetEntry(
        "idx",
        mean=(0.1307,),
        std=(0.3081,),
        # MNIST's own home (yann.lecun.com/exdb/mnist) refuses automatic downloads; PyTorch's mirror has the same bytes.
        url="https://ossci-datasets.s3.amazonaws.com/mnist/",
        files={
            "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        },
    ),
    "fashion_mnist": DatasetEntry(
        "idx",
        mean=(0.2860,),
        std=(0.3530,),
        url="https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        files={
            "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        },
    ),
    "cifar10": DatasetEntry(
        "cifar",
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        url="https://www.cs.toronto.edu/~kriz/",
        files={"cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
        archive=True,
    ),
    "adult": DatasetEntry(
        "adult",
        url="https://archive.ics.uci.edu/ml/machine-learning-databases/adult/",
        files={
            "adult.data": "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
            "adult.test": "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
        },
    ),
    "digits": DatasetEntry("digits", mean=(0.3053,), std=(0.3760,)),
}
"""The data sets by name. A new one is an entry of this table, and, for a new format, a function of ``data.readers``."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """One split of a data set.

    The normalisation is kept as numbers rather than applied, so that it can become part of a network.

    Attributes:
        name: the name given to ``load``, or that of the file.
        images: float32 (n, channels, height, width) in [0, 1]; (n, features, 1, 1) for a table.
        labels: int64 (n,).
        mean, std: of each channel of the training images; 0 and 1 for a channel that needs no normalisation.
        exact: bool (n,), False for images whose pixels are known to differ from the official ones. Experiments on
            single images should leave these out.
        note: a remark, such as that some of the images are missing; mostly empty.
    """

    name: str
    images: np.ndarray
    labels: np.ndarray
    mean: tuple[float, ...]
    std: tuple[float, ...]
    exact: np.ndarray
    note: str = ""

    @property
    def classes(self) -> int:
        """The number of classes."""
        return int(self.labels.max()) + 1

    def __len__(self) -> int:
        return len(self.labels)


def load(source: str, split: Split) -> Dataset:
    """Read a split of a data set in ``DATASETS``, in the official order of its samples, or of an ``.npz`` file.

    The images of a file (``readers.npz``) keep their shape and type, and no normalisation is known of them. Raises an
    InputError if the name or the split is unknown, if a file is missing or damaged, which the error names, and for data
    that need scikit-learn (``digits``) or, to be downloaded, pooch.
    """
    if split not in ("train", "test"):
        raise InputError(f"no split '{split}'; there are train and test")
    from verifiable_relu.data import readers

    if source.endswith(".npz"):
        held = readers.npz(Path(source))
        if len(held) < 2 and split == "test":
            raise InputError("there is no array 'test_images'", path=source)
        return _dataset(Path(source).stem, held[split == "test"])
    if source not in DATASETS:
        raise InputError(f"no data set '{source}'; there are {', '.join(DATASETS)}")
    entry = DATASETS[source]
    samples: readers.Samples = getattr(readers, entry.reader)(_folder(source, entry), split)
    moments = samples.moments or (entry.mean, entry.std)
    return _dataset(source, replace(samples, images=samples.images.astype("float32"), moments=moments))


def _dataset(name: str, samples: Samples) -> Dataset:
    import numpy as np

    exact = np.ones(len(samples.labels), bool) if samples.exact is None else samples.exact
    mean, std = samples.moments or ((), ())
    return Dataset(name, samples.images, samples.labels.astype(np.int64), mean, std, exact, samples.note)


_EVERY = 10  # Where there are no test images, one image in this number is one
_MOST_CLASSES = 100_000  # The most of a file; the network has an output for each number up to the largest label


def training_and_test(source: str) -> tuple[Dataset, Dataset]:
    """Return the images to train on and those to test on, (n, channels, height, width) each.

    ``source`` is that of ``load``. Images of a file may have one to three axes; without test images, every tenth image
    is kept for the test. With ``VALIDATION`` at the end of the source, every tenth training image stands for the test
    images. Raises an InputError if it cannot be read, or its arrays do not fit together.
    """
    plain = source.removesuffix(VALIDATION)
    if is_own := plain.endswith(".npz"):
        training, test = _own_splits(plain)
    else:
        training = load(plain, "train")
    if plain != source:
        return _hold_out(training, plain, "validation", "training image stands for the test images")
    return training, test if is_own else load(plain, "test")


def _own_splits(path: str) -> tuple[Dataset, Dataset]:
    """Return the training and the test images of a file, which fit together, with their moments."""
    import numpy as np

    from verifiable_relu.data import readers

    training, *tests = (_dataset(Path(path).stem, samples) for samples in readers.npz(Path(path)))
    if training.classes > _MOST_CLASSES:
        index = training.labels.argmax()
        said = f"the label is {training.labels[index]}, where classes from 0 to {_MOST_CLASSES - 1:,} are expected"
        raise InputError(said, path=path, place=f"image {index}")
    training, test = (training, *tests) if tests else _hold_out(training, path, "test", "image is a test image")
    shape = training.images.shape[1:]
    for is_bad, said in (
        (test.images.shape[1:] != shape, f"images of shape {shape}, but test images of {test.images.shape[1:]}"),
        (test.classes > training.classes, f"the test label {test.labels.max()} is beyond all labels"),
        (training.classes < 2, "there is one class only"),
        (len(shape) > 3, f"images of shape {shape} have more than three axes"),
    ):
        if is_bad:
            raise InputError(said, path=path)
    # Tables become (n, features, 1, 1).
    shape = (1, *shape) if len(shape) == 2 else (*shape, *[1] * (3 - len(shape)))
    pixels, theirs = (each.images.reshape(len(each), *shape).astype(np.float32) for each in (training, test))
    mean, std = pixels.mean((0, 2, 3), dtype=np.float64), pixels.std((0, 2, 3), dtype=np.float64)
    moments = tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist())
    kept, held = (
        Dataset(each.name, images, each.labels, *moments, each.exact, training.note)
        for each, images in ((training, pixels), (test, theirs))
    )
    return kept, held


def _hold_out(data: Dataset, source: str, purpose: str, note: str) -> tuple[Dataset, Dataset]:
    """Return nine tenths of a data set and every tenth sample; the ``note`` says of these what they are."""
    held = [index % _EVERY == _EVERY - 1 for index in range(len(data))]
    if not any(held):
        raise InputError(f"{len(data)} images are too few to keep some for the {purpose}", path=source)
    note = "; ".join(filter(None, (data.note, f"every {_EVERY}th {note}")))
    kept, chosen = (
        replace(data, images=data.images[of], labels=data.labels[of], exact=data.exact[of], note=note)
        for of in ([not each for each in held], held)
    )
    return kept, chosen


def _folder(name: str, entry: DatasetEntry) -> Path:
    """Return the folder with the files of a data set, which are downloaded and verified if need be."""
    named = os.environ.get(VARIABLE, "")
    if not entry.url or (named and (Path(named) / name).is_dir()):
        return Path(named) / name
    try:
        import pooch
    except ModuleNotFoundError:
        raise missing(f"a data set that no folder of {VARIABLE} has", "pooch") from None
    folder = Path(pooch.os_cache("verifiable_relu")) / name
    processor = pooch.Untar(extract_dir=".") if entry.archive else None
    for file, checksum in entry.files.items():
        try:
            pooch.retrieve(entry.url + file, f"sha256:{checksum}", fname=file, path=folder, processor=processor)
        except (OSError, ValueError) as error:
            raise InputError(
                f"the file cannot be downloaded from {entry.url} ({error}); {VARIABLE} can name a folder that has it",
                path=folder / file,
            ) from error
    return folder
