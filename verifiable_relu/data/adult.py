"""UCI Adult: does a person earn over 50,000 dollars a year? 32,561 rows to train on, 16,281 to test on.

Source: Becker and Kohavi, Adult, UCI Machine Learning Repository, 1996 (``adult.names`` describes the columns; its
missing values are marked "?", which counts as one more category here). Categories become one input each (one-hot);
numbers are scaled to [0, 1] by their least and greatest value among the training rows, and cut off there.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from verifiable_relu.data.samples import Samples, Split
from verifiable_relu.data.sources import LARGEST, either
from verifiable_relu.errors import InputError
from verifiable_relu.files import read_text

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
    """The 14 entries of each row as text, and the labels (n,), 1 for over 50,000 dollars.

    Empty lines and the line with "|" that begins ``adult.test`` are passed over.

    Raises:
        InputError: if the file is missing or no text, or a row has another number of entries or another label.
    """
    rows, labels = [], []
    for number, line in enumerate(read_text(path, LARGEST).splitlines(), 1):
        if not line.strip() or line.startswith("|"):
            continue
        *row, label = (entry.strip() for entry in line.split(","))
        if len(row) != len(COLUMNS):
            message = f"{len(row) + 1} entries where {len(COLUMNS) + 1} are expected"
            raise InputError(message, path=path, place=f"line {number}")
        if label.removesuffix(".") not in LABELS:
            raise InputError(f"'{label}' is neither <=50K nor >50K", path=path, place=f"line {number}")
        rows.append(tuple(row))
        labels.append(LABELS[label.removesuffix(".")])
    if not rows:
        raise InputError("no rows", path=path)
    return rows, np.array(labels)


def read(folder: Path | None, split: Split) -> Samples:
    """The split's inputs (n, features, 1, 1) in [0, 1], its labels, and the moments that standardise each input.

    The inputs of a category are left as they are: mean 0, deviation 1.

    Raises:
        InputError: if a file is missing or damaged; it names the line or the column.
    """
    assert folder is not None
    source, test = either(folder, "adult.data"), either(folder, "adult.test")
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
        raise InputError("a number that is NaN or infinite", path=path, place=f"column {column}")
    return numbers
