"""Points found during a search, tested as counterexamples."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Network
from verifiable_relu.search.attack import Descent, Pgd
from verifiable_relu.search.bab.tree import Decide
from verifiable_relu.search.outcomes import Outcome, Reason, Trust, claim
from verifiable_relu.search.property_rows import PropertyRows
from verifiable_relu.spec.property import Property

# The descent from points at which relaxations of nodes that are nearly decided are least
_WITNESS_PGD = Pgd(steps=15, step_size=0.2)

Decider = Callable[[int, Tensor], Decide | None]
"""Returns who decides the nodes of a polytope's tree that nothing else closes, given the elementwise op of each neuron
and its number there, (m, 2); None for nobody."""

Judge = Callable[[Network, Property, np.ndarray, str], Outcome | None]
"""Returns what a method claims of a point, if anything: ``outcomes.claim``, or ``outcomes.exact_claim``."""


class WitnessCheck:
    """Test of points found during a search; ``found`` is the claim of the first counterexample.

    Args:
        network: the network.
        prop: the property.
        method: the name of the method that claims.
        decider: of nodes that nothing else closes; None for none.
        judge: of points whose margin is not positive in float64.
    """

    def __init__(
        self, network: Network, prop: Property, method: str, decider: Decider | None = None, judge: Judge = claim
    ) -> None:
        self.decider = decider
        self.found: Outcome | None = None
        self._network, self._prop, self._method, self._judge = network, prop, method, judge
        self._rows = PropertyRows.from_properties([prop], network.output_size)
        # Where the margin is zero, the point may be on an edge that is not part of the unsafe set or of the box.
        strict = any(row.strict for polytope in prop.unsafe for row in polytope)
        self._strict = strict or bool(prop.box.open_lower or prop.box.open_upper)

    def anywhere(self) -> Outcome:
        """Return the outcome of a property whose unsafe set is the whole space: the box's centre is tried."""
        box = self._prop.box
        self._take((box.lower + box.upper) / 2)
        return self.found or Outcome.unknown(Reason.UNCONFIRMED, self._method, "the unsafe set is the whole space")

    def reached(self, points: Tensor, descend: bool = False) -> bool:
        """Return True once a counterexample is known; also tests points (count, inputs), and points on the way down."""
        if descend and self.found is None:
            points, prop = points.cpu(), self._prop
            box = Interval(*(torch.from_numpy(end).expand(points.shape) for end in (prop.box.lower, prop.box.upper)))
            rows = self._rows.take(torch.zeros(len(points), dtype=torch.long))
            points, _ = Descent(_WITNESS_PGD, self._network, box, rows).of_margins(points[None])
        with torch.no_grad():
            margins = self._rows.margins(self._rows.values(self._network(points).cpu()[:, None]))[:, 0]
        least = int(margins.argmin())
        if self.found is None and bool(margins[least] <= 0):
            self._take(points[least].cpu().numpy())
        return self.found is not None

    def near(self, point: Tensor) -> bool:
        """Return True once a counterexample is known; also tests the exact point nearest to one (1, inputs)."""
        if self.found is None:
            self._take(point[0].cpu().numpy())
        return self.found is not None

    def _take(self, point: np.ndarray) -> None:
        claimed = self._judge(self._network, self._prop, point, self._method)
        if claimed is None or claimed.witness is None or claimed.margin is None:
            return
        is_inside = claimed.trust is Trust.EXACT or not self._strict or claimed.margin < 0
        if is_inside and self._prop.box.contains(claimed.witness):
            self.found = claimed
