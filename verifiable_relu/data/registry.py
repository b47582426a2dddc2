"""The table of the data sets; a data set's reader is imported only when the data set is loaded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """The official place of a data set's files.

    Attributes:
        url: the folder that the files are downloaded from, with a trailing slash.
        files: the checksum of each file, as ``sha256:…``, by the file's name.
        archive: whether there is one file, a tar archive that is unpacked.
    """

    url: str
    files: dict[str, str]
    archive: bool = False


@dataclass(frozen=True)
class Entry:
    """A data set of the table.

    Attributes:
        module: the module of its reader in ``verifiable_relu.data``; the module's ``read`` is a ``samples.Reader``.
        source: the official place of its files; None for data that a library brings.
        mean: the mean of each channel of the training images in [0, 1]; empty if the reader computes it.
        std: the standard deviation of each channel, likewise.
        radii: the radii of the L∞ balls that experiments ask about, as text; the middle one is trained for.
    """

    module: str
    source: Source | None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    radii: tuple[str, ...] = ("0.01",)


DATASETS = {
    "mnist": Entry(
        "idx",
        # MNIST's own home (yann.lecun.com/exdb/mnist) refuses automatic downloads; PyTorch's mirror has the same bytes.
        Source(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            {
                "train-images-idx3-ubyte.gz": "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                "train-labels-idx1-ubyte.gz": "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                "t10k-images-idx3-ubyte.gz": "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                "t10k-labels-idx1-ubyte.gz": "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            },
        ),
        mean=(0.1307,),
        std=(0.3081,),
        radii=("0.01", "0.02", "0.03"),
    ),
    "fashion_mnist": Entry(
        "idx",
        # The repository of its authors.
        Source(
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
            {
                "train-images-idx3-ubyte.gz": "sha256:3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                "train-labels-idx1-ubyte.gz": "sha256:a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                "t10k-images-idx3-ubyte.gz": "sha256:346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                "t10k-labels-idx1-ubyte.gz": "sha256:67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            },
        ),
        mean=(0.2860,),
        std=(0.3530,),
        radii=("0.005", "0.01", "0.02"),
    ),
    "cifar10": Entry(
        "cifar",
        Source(
            "https://www.cs.toronto.edu/~kriz/",
            {"cifar-10-binary.tar.gz": "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
            archive=True,
        ),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        radii=("1/255",),
    ),
    "adult": Entry(
        "adult",
        Source(
            "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/",
            {
                "adult.data": "sha256:5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
                "adult.test": "sha256:a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
            },
        ),
    ),
    "digits": Entry("digits", None, mean=(0.3053,), std=(0.3760,)),
}
"""The data sets by name. A new one is an entry of this table, and a module that reads its format."""
