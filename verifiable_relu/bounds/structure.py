"""Facts about a network's graph that bounds of any box use, computed once for each network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from weakref import WeakKeyDictionary

from verifiable_relu.bounds.patches import PATCH_SHARE, PatchGrid
from verifiable_relu.ir.linear import Convolution, Dense, Diagonal, Gather, Image
from verifiable_relu.ir.network import Affine, Elementwise, Input, Maximum, Network, Op, Pair, Product, Sum

LEAVE_OUT = 96
"""From this size on a dense layer's rows may leave out inputs that have one value."""

NONLINEAR = (Elementwise, Product, Maximum)
"""Ops that need bounds of their inputs."""


@dataclass(frozen=True, eq=False)
class NetworkStructure:
    """Facts about the ops of a network, by number.

    Attributes:
        ops: of the network.
        uses: how often each op is an input of another, or compared with another by a pair.
        pairs: by ``Pair.second``.
    """

    ops: tuple[Op, ...]
    uses: tuple[int, ...]
    pairs: Mapping[int, Pair] = field(default_factory=dict)
    _coefficients: dict[int, int] = field(default_factory=dict)

    def bounded_inputs(self, index: int) -> tuple[int, ...]:
        """Return the numbers of the ops by whose intervals a nonlinear op is bounded."""
        pair, inputs = self.pairs.get(index), self.ops[index].inputs
        return tuple(dict.fromkeys(inputs if pair is None else (*inputs, pair.apart)))

    def given(self, index: int, compared: bool = True) -> tuple[int, ...]:
        """Return the numbers of the ops that get rows from the step back through an op."""
        pair, inputs = self.pairs.get(index) if compared else None, self.ops[index].inputs
        return inputs if pair is None else (*inputs, pair.apart, pair.first)

    def compares(self, index: int) -> bool:
        """Return True if an op depends on both ops of a pair: only then does comparing them help."""
        return index in self._comparing

    @cached_property
    def _comparing(self) -> set[int]:
        before: list[set[int]] = []
        for index, op in enumerate(self.ops):
            before.append({index}.union(*(before[i] for i in op.inputs)))
        pairs = [{pair.first, pair.second} for pair in self.pairs.values()]
        return {index for index, mine in enumerate(before) if any(pair <= mine for pair in pairs)}

    @cached_property
    def widest(self) -> int:
        return max(op.size for op in self.ops)

    @cached_property
    def fills_box(self) -> list[bool]:
        """True for each op that only scales, shifts and permutes the input: its values fill a box."""
        found: list[bool] = []
        for op in self.ops:
            one = isinstance(op, Affine) and isinstance(op.map, Diagonal | Gather) and op.map.back_terms <= 1
            found.append(isinstance(op, Input) or (one and found[op.inputs[0]]))
        return found

    @cached_property
    def start(self) -> int:
        """The op at which rows end: the last one up to which values fill a box and one op follows another."""
        index = 0
        while self.uses[index] == 1 and index + 2 < len(self.ops) and self.fills_box[index + 1]:
            index += 1
        return index

    @cached_property
    def exact_by_intervals(self) -> list[bool]:
        """True for each op whose elements intervals bound exactly: it is one affine map of values that fill a box."""
        found: list[bool] = []
        for index, op in enumerate(self.ops):
            affine = isinstance(op, Affine) and self.fills_box[op.inputs[0]]
            moved = isinstance(op, Affine) and isinstance(op.map, Diagonal | Gather) and found[op.inputs[0]]
            found.append(self.fills_box[index] or affine or moved)
        return found

    @cached_property
    def images(self) -> list[Image | None]:
        """The shapes of ops whose values are images: outputs of convolutions, and functions of these."""
        found: list[Image | None] = []
        for op in self.ops:
            if isinstance(op, Affine) and isinstance(op.map, Convolution):
                found.append(op.map.out_shape)
            elif isinstance(op, Elementwise | Sum) or (isinstance(op, Affine) and isinstance(op.map, Diagonal)):
                found.append(found[op.inputs[0]])
            else:
                found.append(None)
        return found

    def coefficients(self, index: int) -> int:
        """Return the most coefficients that a row of one neuron of an op has on its way back."""
        if index not in self._coefficients:
            self._coefficients[index] = self._most_coefficients(index)
        return self._coefficients[index]

    def _most_coefficients(self, index: int) -> int:
        image = self.images[index]
        if image is None:
            return max(op.size for op in self.ops[self.start : index + 1])
        grids: dict[int, PatchGrid | None] = {index: PatchGrid(image[1:], (1, 1), (1, 1), (0, 0))}
        most = 1
        for current in range(index, self.start - 1, -1):
            if current not in grids:
                continue
            op, grid = self.ops[current], grids.pop(current)
            shape = self.images[current]
            if isinstance(op, Affine) and isinstance(op.map, Convolution) and grid is not None:
                grid = grid.before(op.map)
                share, shape = grid.share(op.map.in_shape), op.map.in_shape
                grid = grid if share <= PATCH_SHARE else None
                most = max(most, int(share * math.prod(shape)))
            elif shape is None and current > self.start:
                grid = None
            most = max(most, op.size if grid is None else 1)
            for source in self.given(current):
                before = grids.get(source, grid)
                grids[source] = grid if grid is None or before is None else before.covering(grid)
        return most

    @cached_property
    def last_nonlinear(self) -> int:
        """The last op that needs bounds of its inputs; −1 if there is none."""
        return max((index for index, op in enumerate(self.ops) if isinstance(op, NONLINEAR)), default=-1)

    def is_bounded_by_rows(self, index: int, user: int) -> bool:
        """Return True if rows are to bound the value of an op that is an input of the nonlinear op ``user``.

        For maxima and products, a function of bounded inputs is bounded well enough.
        """
        function = isinstance(self.ops[index], Elementwise | Maximum)
        return not self.exact_by_intervals[index] and (not function or isinstance(self.ops[user], Elementwise))

    def leaves_out(self, index: int) -> bool:
        """Return True if rows of this op come from one dense layer alone, and may leave some neurons out.

        Rows come to the last nonlinear op once only: it is not worth the preparation.
        """
        users = [op for op in self.ops[index + 1 :] if index in op.inputs]
        compared = self.uses[index] != 1 or index in self.pairs
        if compared or len(users) != 1 or not isinstance(users[0], Affine) or index >= self.last_nonlinear:
            return False
        linear = users[0].map
        return isinstance(linear, Dense) and linear.copies == 1 and not linear.is_sparse and linear.n_in >= LEAVE_OUT


_FOUND: WeakKeyDictionary[Network, NetworkStructure] = WeakKeyDictionary()


def structure(network: Network) -> NetworkStructure:
    """Return the structure of a network, made when it is first asked for."""
    if network not in _FOUND:
        _FOUND[network] = NetworkStructure(network.ops, network.uses, {pair.second: pair for pair in network.pairs})
    return _FOUND[network]
