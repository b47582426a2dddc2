"""The last step back, through a convolution of the inputs, without the inputs' coefficients as an image.

A row's least value over the box of the inputs is −|A|·radius, where |A| and the radius may be taken in any order: so
the coefficients stay in the cells of one stride in which the convolution's adjoint leaves them (``operators.cells``).
"""

from __future__ import annotations

import math

from torch import Tensor

from verifiable_relu.bounds.float32 import Float32
from verifiable_relu.bounds.forward import NodeBounds
from verifiable_relu.bounds.lines import of_samples
from verifiable_relu.bounds.operators import ConvolutionOperator, sums
from verifiable_relu.bounds.rows import Chunk, Restricted, Rows, Stepped
from verifiable_relu.bounds.slack import Slack
from verifiable_relu.bounds.tuning import Tuning
from verifiable_relu.bounds.window import Window
from verifiable_relu.network.nodes import Shape


class LastConvolution:
    """A stepper through a convolution of the node at which rows end, in float32.

    Args:
        bounds: the nodes' bounds.
        slack: what rounding may change.
        float32: which coefficients are in float32.
        tuning: of sums in float32.
    """

    def __init__(self, bounds: NodeBounds, slack: Slack, float32: Float32, tuning: Tuning) -> None:
        self._bounds, self._slack, self._float32, self._tuning = bounds, slack, float32, tuning
        self._cells: dict[int, Tensor] = {}

    def operator(self, index: int) -> ConvolutionOperator | None:
        """The operator of node ``index`` if that is a convolution of the inputs at which rows can end, else None."""
        network, start = self._bounds.network, self._bounds.start
        if not self._float32.holds(index) or network.nodes[index].inputs != (start,) or network.uses[start] != 1:
            return None
        operator = self._bounds.operators.find(index)
        return operator if isinstance(operator, ConvolutionOperator) else None

    def radius(self, operator: ConvolutionOperator, seen: Shape) -> Tensor:
        """The radius of the inputs in cells, for sums over an image or ``seen`` cells, (channels, height, width)."""
        whole = operator.cells_shape(operator.node.shape[1:])
        # Sums in windows may be deeper, where their length has no factors.
        terms = max(math.prod(whole), math.prod(seen), key=lambda n: sums.depth(n, self._tuning))
        if terms not in self._cells:
            shape = self._bounds.network.nodes[self._bounds.start].shape
            self._cells[terms] = operator.image_in_cells(self._slack.end(terms).unflatten(1, shape))
        return self._cells[terms]

    def step(self, index: int, rows: Rows, chunk: Chunk) -> Stepped | None:
        """The least values of dense rows of node ``index``."""
        if isinstance(rows, Window | Restricted) or not chunk.rounded or chunk.coefficients:
            return None
        operator = self.operator(index)
        if operator is None:
            return None
        cells = operator.cells(rows.reshape(-1, *operator.node.shape))
        radius = of_samples(self.radius(operator, operator.cells_shape(operator.node.shape[1:])), chunk.sample)
        products = cells.abs_().unflatten(0, (chunk.groups, chunk.each)).mul_(radius[:, None])
        return Stepped(-sums.last_axes(products, 3, self._tuning))
