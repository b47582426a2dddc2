"""The training of a cell of a study, and the measures of its network, each in a process of its own."""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from benchmarks.study.cells import Cell, Places
from verifiable_relu.campaign.worker import Ask
from verifiable_relu.data import DATASETS, Dataset, load
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.files import write_whole
from verifiable_relu.network import read_onnx
from verifiable_relu.train.batches import training_and_test
from verifiable_relu.train.export import finish, written
from verifiable_relu.train.loop import Diverged, train
from verifiable_relu.train.options import ARMS


@lru_cache(maxsize=1)
def data_of(source: str) -> tuple[Dataset, Dataset]:
    """The training images and the test images of a data set, which a process keeps for its next task.

    Raises:
        InputError: if the data cannot be read.
    """
    return training_and_test(source)


@lru_cache(maxsize=8)
def images_of(source: str) -> Dataset:
    """The test images of a data set, which are kept.

    Raises:
        InputError: if the data cannot be read.
    """
    return load(source, "test") if source in DATASETS else data_of(source)[1]


@dataclass(frozen=True)
class Training:
    """The task of training a cell's network and writing it.

    Attributes:
        cell: the cell.
        places: the folder of the study.
    """

    cell: Cell
    places: Places

    def __call__(self, ask: Ask | None = None) -> dict[str, Any]:
        """Train, resuming from the checkpoint if there is one, and write the networks; the checkpoint is kept.

        Returns:
            The fields of the record that follow those of the cell. The ``status`` is ``trained``, or ``diverged`` if
            the loss became infinite or NaN; without a network there are no results.

        Raises:
            InputError: for data or a checkpoint that cannot be used.
        """
        began, used = time.perf_counter(), time.process_time()
        options, places = self.cell.options, self.places
        training, test = data_of(self.cell.source)
        try:
            trained = train(options, training, places.checkpoint(self.cell), test=test)
        except Diverged as error:
            return untrained(self.cell, "diverged", str(error))
        hard, record = finish(trained, options, training, test)
        shape = training.images.shape[1:]
        files = {"onnx": _written(places.network(self.cell), hard, shape)}
        if ARMS[options.arm].swap == "end":
            # λ-Swish is not read, and so cannot be written.
            with suppress(UnsupportedError):
                files["smooth"] = _written(places.smooth(self.cell), trained.model.eval(), shape)
        return {
            "status": "trained",
            "detail": record["note"],
            "seconds": record["seconds"],
            "wall_seconds": round(time.perf_counter() - began, 1),
            "processor_seconds": round(time.process_time() - used, 1),
            **{name: record[name] for name in ("options", "training_images", "results", "epochs")},
            "files": files,
        }


def untrained(cell: Cell, status: str, detail: str) -> dict[str, Any]:
    """The fields of the record of a training without a network, with the ``status`` ``diverged`` or ``failed``."""
    return {"status": status, "detail": detail, "options": asdict(cell.options), "results": {}, "epochs": []}


def _written(path: Path, model: nn.Module, shape: tuple[int, ...]) -> str:
    """Write a network, completely or not at all; returns the SHA-256 of the file."""
    data = written(model, shape)
    write_whole(path, data)
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Measuring:
    """The task of measuring a cell's network.

    Attributes:
        cell: the cell.
        places: the folder of the study.
        images: the test images that the network is asked about, which it classifies rightly.
        radii: the radii of the balls, as text.
    """

    cell: Cell
    places: Places
    images: tuple[int, ...]
    radii: tuple[str, ...]

    def __call__(self, ask: Ask | None = None) -> dict[str, Any]:
        """The measures by name (``measures.measure_network``).

        Raises:
            InputError: for data or networks that cannot be read.
        """
        from benchmarks.study.measures import measure_network

        smooth = self.places.smooth(self.cell)
        return measure_network(
            read_onnx(self.places.network(self.cell)),
            read_onnx(smooth) if smooth.is_file() else None,
            self.cell.options,
            images_of(self.cell.source),
            np.array(self.images, dtype=int),
            self.radii,
        )
