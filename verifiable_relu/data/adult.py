"""The reader of UCI Adult, whose question is whether a person earns over 50,000 dollars a year.

The data set has 32,561 rows for training and 16,281 for testing. Source: Becker and Kohavi, Adult, UCI Machine Learning
Repository, 1996, whose file ``adult.names`` describes the columns. Each category becomes one input (one-hot), and the
mark "?" of a missing value counts as a category. Numbers are scaled linearly such that the least and the greatest value
among the training rows become 0 and 1, and are clipped to [0, 1].
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from verifiable_relu.data.samples import Samples, Split
from verifiable_relu.data.sources import LARGEST
from verifiable_relu.errors import InputError
from verifiable_relu.files import on_disk, read_text

COLUMNS = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
    "native-country",
)
NUMBERS = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
LABELS = {"<=50K": 0, ">50K": 1}


def read_rows(path: Path) -> tuple[list[tuple[str, ...]], np.ndarray]:
    """The 14 entries of each row as text, and the labels (n,), which are 1 for over 50,000 dollars.

    Empty lines and lines that begin with "|", such as the first of ``adult.test``, are skipped.

    Raises:
        InputError: if the file is missing or no text, or if a row has another number of entries or another label.
    """
    rows, labels = [], []
    for number, line in enumerate(read_text(path, LARGEST).splitlines(), 1):
        if not line.strip() or line.startswith("|"):
            continue
        *row, label = (entry.strip() for entry in line.split(","))
        if len(row) != len(COLUMNS):
            message = f"the row has {len(row) + 1} entries where {len(COLUMNS) + 1} are expected"
            raise InputError(message, path=path, place=f"line {number}")
        if label.removesuffix(".") not in LABELS:
            raise InputError(f"'{label}' is neither <=50K nor >50K", path=path, place=f"line {number}")
        rows.append(tuple(row))
        labels.append(LABELS[label.removesuffix(".")])
    if not rows:
        raise InputError("the file has no rows", path=path)
    return rows, np.array(labels)


def read(folder: Path | None, split: Split) -> Samples:
    """The samples of a split: inputs (n, features, 1, 1) in [0, 1], labels, and moments that standardise the inputs.

    The moments of an input that stands for a category are mean 0 and deviation 1, which leave it as it is.

    Raises:
        InputError: if a file is missing or damaged; the error names the line or the column.
    """
    assert folder is not None
    source, test = on_disk(folder / "adult.data"), on_disk(folder / "adult.test")
    training, labels = read_rows(source)
    wanted = training
    if split == "test":
        wanted, labels = read_rows(test)
    parts: list[np.ndarray] = []
    means: list[float] = []
    deviations: list[float] = []
    for index, column in enumerate(COLUMNS):
        known = [row[index] for row in training]
        asked = [row[index] for row in wanted]
        if column in NUMBERS:
            seen = _numbers(known, column, source)
            least, width = seen.min(), max(np.ptp(seen), 1.0)
            values = (_numbers(asked, column, source if wanted is training else test) - least) / width
            parts.append(values.clip(0, 1)[:, None])
            scaled = (seen - least) / width
            means.append(float(scaled.mean()))
            deviations.append(float(scaled.std()) or 1.0)
        else:
            categories = np.array(sorted(set(known)))
            parts.append(np.array(asked)[:, None] == categories)
            means += [0.0] * len(categories)
            deviations += [1.0] * len(categories)
    inputs = np.concatenate(parts, 1)[:, :, None, None]
    return Samples(inputs, labels, moments=(tuple(means), tuple(deviations)))


def _numbers(entries: list[str], column: str, path: Path) -> np.ndarray:
    try:
        numbers = np.array(entries, float)
    except ValueError as error:
        raise InputError(str(error), path=path, place=f"column {column}") from None
    if not np.isfinite(numbers).all():
        raise InputError("a number is NaN or infinite", path=path, place=f"column {column}")
    return numbers
