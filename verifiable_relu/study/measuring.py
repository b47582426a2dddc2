"""The measures of a trained network of a study, in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from verifiable_relu.network import read_onnx
from verifiable_relu.study.cells import Cell, Places
from verifiable_relu.study.training import images_of


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

    def __call__(self) -> dict[str, Any]:
        """The measures by name (``measures.measure_network``).

        Raises:
            InputError: for data or networks that cannot be read.
        """
        from verifiable_relu.study.measures import measure_network

        smooth = self.places.smooth(self.cell)
        return measure_network(
            read_onnx(self.places.network(self.cell)),
            read_onnx(smooth) if smooth.is_file() else None,
            self.cell.options,
            images_of(self.cell.source),
            np.array(self.images, dtype=int),
            self.radii,
        )
