"""What is known of one query before anything is split, and the trees that start there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from verifiable_relu.bounds import Relaxation
from verifiable_relu.bounds.rounding import unit_roundoff
from verifiable_relu.errors import OutOfTime
from verifiable_relu.spec.property import Query, RowBatch
from verifiable_relu.verifiers.bab.folding import OWN, Folded, Rows
from verifiable_relu.verifiers.bab.strip import Slopes, Strip
from verifiable_relu.verifiers.bab.tree import Search, Tree


def tree_bytes(inputs: int, neurons: int) -> int:
    """About the memory that a tree takes before it has open nodes, by how many inputs vary and neurons are unstable."""
    return 16 * (neurons + 1) * (inputs + neurons + 1)


@dataclass(frozen=True, eq=False)
class Part:
    """One polytope of the unsafe set that bounds do not exclude.

    Attributes:
        rows: its rows, A·y − b as forms of e and r, the one with the largest lower bound first.
        scale: (rows,) what each row was multiplied with to have integer coefficients.
        slopes: (m,) of the relaxation that is best for the first row.
        order: (rows,) which row of the polytope each is.
    """

    rows: Rows
    scale: Tensor
    slopes: Tensor
    order: Tensor


class System:
    """The folded system of one query, and the slopes of its relaxations.

    Args:
        query: whose network has been bounded.
        relaxation: these bounds.
        sample: the query's box in them.
        polytopes: which polytopes of the unsafe set are to be excluded; none of them is empty.
        slopes: the search for slopes.
        stop: asked now and then.

    Attributes:
        folded: the unstable neurons.
        neurons: their pre-activations.
        parts: the polytopes, the one with the least bound first.

    Raises:
        OutOfTime: once ``stop`` says so.
    """

    def __init__(
        self,
        query: Query,
        relaxation: Relaxation,
        sample: int,
        polytopes: list[int],
        slopes: Slopes,
        stop: Callable[[], bool],
    ) -> None:
        self.folded = Folded(relaxation, sample, query.property.box)
        self.neurons = self.folded.neurons(stop)
        if len(self.neurons.constant) < self.folded.size or stop():
            raise OutOfTime
        rows = RowBatch.of([query.property], query.network.output_size)
        kept = torch.isin(rows.polytope, torch.tensor(polytopes)).nonzero().squeeze(1)
        forms, bound = self.folded.outputs(rows.matrix[kept]), rows.bound[kept]
        rounding = OWN * unit_roundoff(torch.float64) * (forms.constant.abs() + bound.abs())
        forms = Rows(forms.inputs, forms.neurons, forms.constant - bound, forms.error + rounding)
        found, lower = slopes.search(self.folded, self.neurons, forms, stop)
        if stop():
            raise OutOfTime
        parts = []
        for polytope in polytopes:
            mine = (rows.polytope[kept] == polytope).nonzero().squeeze(1)
            order = lower[mine].argsort(descending=True)
            mine = mine[order]
            part = Part(forms[mine], rows.scale[kept][mine], found[mine[0]], order)
            parts.append((float(lower[mine[0]]), polytope, part))
        self.parts = {polytope: part for _, polytope, part in sorted(parts, key=lambda p: p[:2])}

    def tree(
        self, polytope: int, reached: Callable[[Tensor], bool], left: Callable[[], float], search: Search, memory: int
    ) -> Tree:
        """The tree for one polytope; the arguments are those of ``Tree``."""
        part = self.parts[polytope]
        strip = Strip(self.folded, self.neurons, part.rows, part.slopes)
        return Tree(strip, self.neurons, part.rows, part.scale, reached, left, search, memory)
