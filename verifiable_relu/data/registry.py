"""The data sets, a row each. Only the reader of the chosen one is imported, so that naming them costs nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """A data set's home.

    Attributes:
        url: the folder that the files are downloaded from, with a trailing slash.
        files: name → checksum, as ``sha256:…``.
        archive: whether the one file is a tar archive whose members are the data.
    """

    url: str
    files: dict[str, str]
    archive: bool = False


@dataclass(frozen=True)
class Row:
    """A data set.

    Attributes:
        module: its reader's module in ``verifiable_relu.data``, whose function ``read`` is a ``samples.Reader``.
        source: the home of its files; None for data that a library brings.
        mean, std: per channel, over the training images in [0, 1]; empty where the reader works them out.
        radii: radii of L∞ balls, as text, that experiments ask about; networks are trained for the middle one.
    """

    module: str
    source: Source | None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    radii: tuple[str, ...] = ("0.01",)


DATASETS = {
    "mnist": Row(
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
    "fashion_mnist": Row(
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
    "cifar10": Row(
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
    "adult": Row(
        "adult",
        Source(
            "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/",
            {
                "adult.data": "sha256:5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
                "adult.test": "sha256:a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
            },
        ),
    ),
    "digits": Row("digits", None, mean=(0.3053,), std=(0.3760,)),
}
"""A new data set is a row here, and a module that reads its format."""
