"""Bounds of a network's outputs over bounds of its neurons that are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from verifiable_relu.bounds import TUNING, Ascent, Bounds, Relaxation, Tuning, ascend, neurons, preactivation_bounds
from verifiable_relu.network.graph import Network


def linear_lower_bounds(
    network: Network,
    box: Bounds,
    preactivations: Mapping[int, Bounds],
    matrix: Tensor,
    sample: Tensor | None = None,
    *,
    float32: bool = False,
    tuning: Tuning = TUNING,
    **options: Any,
) -> Tensor:
    """CROWN's lower bounds (R,) of matrix·y over the box; the options are those of ``Relaxation.outputs``."""
    return Relaxation(network, box, preactivations, float32, tuning=tuning).outputs(matrix, sample, **options)


def alpha_lower_bounds(
    network: Network,
    box: Bounds,
    preactivations: Mapping[int, Bounds],
    matrix: Tensor,
    sample: Tensor,
    ascent: Ascent | None = None,
    **options: Any,
) -> Tensor:
    """Those of α-CROWN, the bounds of pre-activations taken as they are; the options are those of ``ascend``."""
    relaxation = Relaxation(network, box, preactivations)
    relaxation.advance(network.last_activation)
    rows = matrix.to(box.lower).reshape(len(matrix), *network.output_shape)
    return ascend(relaxation, len(network.nodes) - 1, rows, sample, ascent or Ascent(), **options).lower


def alpha_preactivation_bounds(
    network: Network, box: Bounds, ascent: Ascent, stop: Callable[[], bool] | None = None
) -> dict[int, Bounds]:
    """``preactivation_bounds`` with slopes optimised for either side of every neuron that CROWN leaves unstable."""
    return preactivation_bounds(network, box, stop=stop, search=neurons(ascent, stop=stop))


def both_signs(outputs: int, batch: int) -> tuple[Tensor, Tensor]:
    """Rows for every output and its negative, of every sample, and the sample of each."""
    eye = torch.eye(outputs, dtype=torch.float64)
    return torch.cat([eye, -eye]).repeat(batch, 1), torch.arange(batch).repeat_interleave(2 * outputs)
