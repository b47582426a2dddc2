"""CROWN and α-CROWN: bounds of unstable neurons by rows of coefficients, and the search for the slopes of lines.

CROWN bounds every unstable neuron's pre-activation, layer after layer. α-CROWN chooses lines by gradient ascent on the
bound itself, row by row.

Source: Xu et al., Fast and Complete: Enabling Complete Verification with Rapid and Massively Parallel Incomplete
Verifiers, arXiv 2011.13824, section 3.2. Every choice of slopes is sound, so the search may run in float32 and
without regard to rounding; what it found is then bounded once more, in the relaxation's dtype, rounding included.

The ascent is Adam's (Kingma and Ba, arXiv 1412.6980, algorithm 1). torch's optimizers cannot drop rows, and importing
them takes as long as importing the rest of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verifiable_relu.bounds.activations import unstable
from verifiable_relu.bounds.beside import secants
from verifiable_relu.bounds.forward import intersect, rough
from verifiable_relu.bounds.relaxation import Relaxation
from verifiable_relu.bounds.tuning import MEMORY, TUNING, Bounds, Lines, Tuning, chunk_size, groups
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import (
    Activation,
    Affine,
    Beside,
    Bilinear,
    Input,
    Linear,
    Maximum,
    Node,
    Permute,
    Relu,
    Reshape,
    Scale,
    Shape,
    Sparse,
)

_DECAY = 0.999
"""Heuristic: what a step keeps of the mean of squared gradients."""

_LEAST = 1e-12
"""Heuristic: what is added to the size of gradients, by which steps are divided."""

_LEAST_SLOPE = 1e-8
"""Heuristic: the same for slopes."""


class Moments:
    """The means of a parameter's gradients and of their squares by which Adam steps; those of newer ones count more.

    Args:
        parameter: of any shape.

    Attributes:
        first: the mean of the gradients, which is too small by the factor ``share`` at first.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.first = torch.zeros_like(parameter)
        self._second = torch.zeros_like(parameter)
        self._steps = 0

    @property
    def share(self) -> float:
        """What part of the mean the gradients so far make up."""
        return float(1 - 0.9**self._steps)

    def take(self, gradient: Tensor, least: float = _LEAST) -> Tensor:
        """Count one more gradient; returns the size of all, by which a step is divided, ``least`` added."""
        self._steps += 1
        self.first.lerp_(gradient, 0.1)
        self._second.mul_(_DECAY).addcmul_(gradient, gradient, value=0.001)
        return (self._second / (1 - _DECAY**self._steps)).sqrt_().add_(least)

    def narrow(self, keep: Tensor) -> None:
        """Go on with some of the rows: ``keep`` (rows,) bool."""
        self.first, self._second = self.first[keep], self._second[keep]


class Adam:
    """Slopes, (rows, slopes), that ascend along their gradients and stay within [0, 1].

    Args:
        value: where they start; changed in place.

    Attributes:
        value: where they are.
        counted: how many steps are part of the mean.
    """

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.counted = 0
        self._moments = Moments(value)
        self._sum = torch.zeros_like(value)

    def narrow(self, keep: Tensor) -> None:
        """Go on with some of the rows: ``keep`` (rows,) bool."""
        self.value, self._sum = self.value[keep], self._sum[keep]
        self._moments.narrow(keep)

    def step(self, gradient: Tensor, rate: float, counts: bool) -> None:
        """Take one step along the gradient."""
        size = self._moments.take(gradient, _LEAST_SLOPE)
        self.value.addcdiv_(self._moments.first, size, value=rate / self._moments.share).clamp_(0, 1)
        if counts:
            self._sum += self.value
            self.counted += 1

    def mean(self) -> Tensor:
        """The mean of the slopes after each step that counts.

        Source: Polyak and Juditsky, SIAM J. Control Optim. 30 (1992), 838-855.
        """
        return self._sum / self.counted


Search = Callable[[Relaxation, int, Tensor, Tensor, Tensor], Tensor]
"""Bounds sign·(neurons of a node) from below: of (relaxation, node, neuron, sign, sample), all three (R,)."""


def crown_relaxation(
    network: Network,
    box: Bounds,
    *,
    known: Mapping[int, Bounds] | None = None,
    crown: bool = True,
    done: float = -1,
    exact: bool = False,
    memory: int = MEMORY,
    stop: Callable[[], bool] | None = None,
    search: Search | None = None,
    max_unstable: int | None = None,
    float32: bool = False,
    tuning: Tuning = TUNING,
    coarse: Callable[[int, Bounds], Bounds] | None = None,
    only: Mapping[int, Tensor] | None = None,
) -> Relaxation:
    """A relaxation whose unstable neurons' pre-activations have been bounded by CROWN.

    Args:
        network: in the dtype and on the device of ``box``.
        box: the inputs, shaped (batch, *input_shape).
        known: bounds of activations' inputs, by activation node index: of these, only neurons that are unstable by them
            are bounded again.
        crown: whether to bound unstable neurons by CROWN; without, only ``search`` does.
        done: of the inputs of activations up to this node, what CROWN says is known.
        exact: whether neurons of which maxima are made are bounded so, too; by default they keep their intervals
            (``Network.spared``).
        memory: a limit in bytes on the coefficients held at once.
        stop: asked between chunks; once it returns True the rest keeps its interval bounds, which are looser and just
            as sound.
        search: better bounds for the neurons that CROWN leaves unstable (``neurons``).
        max_unstable: a layer of which more neurons are unstable keeps its intervals, sample by sample: a box in which
            nearly everything is unstable is bounded badly whatever it costs. By default no layer does.
        float32: coefficients in float32 (``Relaxation``).
        tuning: thresholds.
        coarse: makes bounds of an activation's input, given with its index, looser before anything else is bounded
            with them.
        only: the neurons that are to be bounded so, by activation node index (1, neurons) bool (``needed``); None
            stands for all.
    """
    relaxation = Relaxation(network, box, known, float32, tuning=tuning)
    relaxation.reached = done
    plain, alone = _exact_by_intervals(network), coarse is not None

    def tighten(index: int, bounds: Bounds) -> Bounds:
        if plain[network.nodes[index].inputs[0]] or (index in network.spared and not exact):
            return bounds
        mine = None if only is None else only.get(index)
        if (crown and index > done) or index in network.spared:
            bounds = _Layer(relaxation, index, bounds, mine, max_unstable, memory, stop, alone=alone).tightened()
            if crown and not (stop is not None and stop()):
                relaxation.reached = index
        if search is not None:
            bounds = _Layer(relaxation, index, bounds, mine, max_unstable, memory, stop, search, alone).tightened()
        return bounds

    if coarse is None:
        relaxation.advance(network.last_activation, tighten)
    else:
        relaxation.advance(network.last_activation, lambda index, bounds: coarse(index, tighten(index, bounds)))
    return relaxation


def preactivation_bounds(
    network: Network,
    box: Bounds,
    *,
    exact: bool = False,
    memory: int = MEMORY,
    stop: Callable[[], bool] | None = None,
    search: Search | None = None,
    float32: bool = False,
    tuning: Tuning = TUNING,
) -> dict[int, Bounds]:
    """CROWN bounds of every activation's input, by activation node index, each (batch, *shape).

    Neurons that intervals already prove stable are not bounded again. The arguments are those of ``crown_relaxation``.
    """
    options = {"exact": exact, "memory": memory, "stop": stop, "search": search, "float32": float32, "tuning": tuning}
    return crown_relaxation(network, box, **options).pre  # type: ignore[arg-type]


class _Layer:
    """The neurons of one activation's input that are to be bounded anew.

    The lower line of a ReLU is chosen by the bounds that rows have found alone. If the tighter interval took part, it
    could change the choice for the worse; with the same choice, it can only tighten what follows.

    Args:
        relaxation: advanced to the activation.
        index: the activation.
        bounds: of its input so far.
        only: (1, neurons) bool, those that are to be bounded; None stands for all.
        max_unstable: the most unstable neurons of a sample, if its neurons are to be bounded at all.
        memory: a limit in bytes on the coefficients held at once.
        stop: asked between chunks.
        search: what bounds rows; by default CROWN's lines.
        alone: whether neurons that are the same difference are each bounded by rows of their own, since what proves
            the bounds is recorded.
    """

    def __init__(
        self,
        relaxation: Relaxation,
        index: int,
        bounds: Bounds,
        only: Tensor | None,
        max_unstable: int | None,
        memory: int,
        stop: Callable[[], bool] | None,
        search: Search | None = None,
        alone: bool = False,
    ) -> None:
        node = relaxation.network.nodes[index]
        assert isinstance(node, Activation | Beside)
        self.relaxation, self.index, self.node, self.bounds = relaxation, index, node, bounds
        self.source = node.inputs[0]
        self.stop, self.search, self.alone = stop, search, alone
        chosen = unstable(node, bounds).flatten(1)
        if isinstance(node, Beside):
            chosen = chosen & secants(relaxation.nodes, node).free.flatten(1)
        if only is not None:
            chosen = chosen & only.to(chosen.device)
        if max_unstable is not None:
            chosen = chosen & (chosen.sum(1, keepdim=True) <= max_unstable)
        self.chosen = chosen
        # Lower bounds of every neuron and of its negative.
        self.both = torch.stack([bounds.lower.flatten(1), -bounds.upper.flatten(1)])
        tuning, narrow = relaxation.tuning, relaxation.backward.float32.last_node > relaxation.nodes.start
        windowed = search is None and len(bounds.lower.shape) == 4
        copies = tuning.windowed_copies if windowed else tuning.copies
        # Coefficients in float32 take half the memory.
        self.size = chunk_size(relaxation.network, self.both, memory, tuning, copies / 2 if narrow else copies)

    def tightened(self) -> Bounds:
        """The bounds, intersected with lower and upper bounds of the chosen neurons that rows find."""
        places = self.chosen.flatten().nonzero().squeeze(1)
        self._improve(torch.cat([places, places + self.chosen.numel()]))
        low, high = (side.reshape(self.bounds.lower.shape) for side in self.both.unbind())
        if isinstance(self.node, Relu):
            self.relaxation.lines.identity_lower[self.index] = low > high
        return intersect(self.bounds, Bounds(low, -high))

    def _improve(self, places: Tensor) -> None:
        """Bound what lies at these places of ``both``, flattened, anew."""
        node, found = self.relaxation.network.nodes[self.source], self.both.view(-1)
        if self.alone or not (isinstance(node, Sparse) and node.differences) or not len(places):
            self._bound(places)
            return
        # Of a − b and b − a, as a softmax has them, one side of each says what the other side of the other does.
        total, neurons = self.chosen.numel(), self.chosen.shape[1]
        neuron, sign = places % neurons, 1 - 2 * (places // total)
        index, order = node.index.to(places.device)[neuron].sort(1)
        weight = node.weight.to(places.device)[neuron].long().gather(1, order) * sign[:, None]
        said = torch.cat([(places % total // neurons)[:, None], index, weight], 1)
        _, same = said.unique(dim=0, return_inverse=True)
        first = torch.full((int(same.max()) + 1,), len(places)).to(places)
        first.scatter_reduce_(0, same, torch.arange(len(places)).to(places), "amin")
        self._bound(places[first])
        found.index_copy_(0, places, torch.maximum(found[places], found[places[first]][same]))

    def _bound(self, places: Tensor) -> None:
        """Bound what lies at these places by rows."""
        samples, total, neurons = self.relaxation.samples, self.chosen.numel(), self.chosen.shape[1]
        sample = places // neurons % samples if samples > 1 else None
        one = self.both.new_ones(())
        for part, mine in groups(places.shape[0], sample, self.size, samples):
            if self.stop is not None and self.stop():
                return
            place = places[part]
            neuron, sign = place % neurons, torch.where(place < total, one, -one)
            if self.search is None:
                found = self.relaxation.neurons(self.source, neuron, sign, mine)
            else:
                every = torch.zeros_like(place) if sample is None else sample[part]
                found = self.search(self.relaxation, self.source, neuron, sign, every)
            # Rows that overflowed say nothing; what intervals say of the neurons holds all the same.
            self.both.view(-1).index_copy_(0, place, found.masked_fill(found.isnan(), -torch.inf))


def signed(network: Network, index: int, neuron: Tensor, sign: Tensor) -> tuple[int, Tensor, Tensor | None]:
    """sign·(neurons of node ``index``) as rows of a target node, and constants, typed like ``sign``.

    ``neuron`` and ``sign``, ±1, are (R,). A neuron of a linear layer is its row of the weights.
    """
    node = network.nodes[index]
    if isinstance(node, Linear) and len(node.shape) == 1 and not node.weight_error:
        return node.inputs[0], node.weight[neuron] * sign[:, None], node.bias[neuron] * sign
    ones = sign.new_zeros(len(neuron), node.size).scatter(1, neuron[:, None], sign[:, None])
    return index, ones.reshape(-1, *node.shape), None


def interval_is_exact(network: Network, index: int) -> bool:
    """Whether interval arithmetic bounds every neuron of the node exactly (one affine map on a box)."""
    return _exact_by_intervals(network)[index]


def _exact_by_intervals(network: Network) -> tuple[bool, ...]:
    """Whether intervals bound a node exactly, for every node: its values fill a box, or are an affine map of a box."""

    def find() -> tuple[bool, ...]:
        shaped: list[bool] = []
        exact: list[bool] = []
        for node in network.nodes:
            moves = isinstance(node, Scale | Reshape | Permute)
            before = bool(node.inputs) and shaped[node.inputs[0]]
            shaped.append(isinstance(node, Input) or (before and (moves or isinstance(node, Activation))))
            exact.append(exact[node.inputs[0]] if moves else shaped[-1] or (before and isinstance(node, Affine)))
        return tuple(exact)

    return network.once(interval_is_exact, find)


@dataclass(frozen=True)
class Ascent:
    """How slopes are searched for.

    Attributes:
        steps: of Adam.
        rate: of the first step; slopes live in [0, 1].
        decay: what the rate is multiplied with after every step.
        patience: rows that need no better bound are dropped every so many steps.
    """

    steps: int = 20
    rate: float = 0.5
    decay: float = 0.98
    patience: int = 4


@dataclass(frozen=True)
class Ascended:
    """What a search has found, row by row.

    Attributes:
        lower: (R,) lower bounds, rounding accounted for, never below those of the relaxation's own lines by more than
            rounding.
        slopes: the slopes with which ``lower`` was computed, (R, neurons of all activations on the way, in node
            order, and then of products), in the dtype of the search; None where they were not to be kept.
    """

    lower: Tensor
    slopes: Tensor | None = None


def ascend(
    relaxation: Relaxation,
    target: int,
    rows: Tensor,
    sample: Tensor,
    ascent: Ascent,
    *,
    constant: Tensor | None = None,
    keep: bool = False,
    settled: Callable[[Tensor, Tensor], Tensor] | None = None,
    memory: int = MEMORY,
    stop: Callable[[], bool] | None = None,
) -> Ascended:
    """Lower bounds of rows·y + constant with optimised slopes, y being the value of node ``target``.

    Args:
        relaxation: advanced to the target.
        target: the node.
        rows: (R, *shape of the target).
        sample: (R,) the sample of each row.
        ascent: the options of the search.
        constant: (R,), by default 0.
        keep: whether the slopes are wanted, too.
        settled: given row numbers (n,) and the best bounds found for them (n,), tells which of them need no
            better one: (n,) bool. Rows that are asked about together are never split over several calls.
        memory: a limit in bytes on what is held at once.
        stop: asked before every step; once it returns True the best slopes so far are taken.
    """
    constant = rows.new_zeros(len(rows)) if constant is None else constant
    searched = [*_involved(relaxation, target), *_products(relaxation, target)]
    depth = sum(math.prod(_choices(relaxation.network.nodes[i])) for i in searched)
    widest = max(node.size for node in relaxation.network.nodes)
    tuning = relaxation.tuning
    working = min(memory, tuning.search_bytes)
    size = max(1, working // (rows.element_size() * tuning.search_copies * (depth + widest)))
    parts: list[Ascended] = []
    for first in range(0, len(rows), size):
        part = slice(first, min(len(rows), first + size))
        number = torch.arange(part.start, part.stop, device=rows.device)
        search = SlopeSearch(relaxation, target, rows[part], sample[part], constant[part], ascent)
        mine = None if settled is None else (lambda at, best, number=number: settled(number[at], best))
        search.run(mine, stop)
        parts.append(search.proven(keep))
    if len(parts) == 1:
        return parts[0]
    lower = torch.cat([rows.new_zeros(0), *(part.lower for part in parts)])
    if not keep or not parts:
        return Ascended(lower)
    return Ascended(lower, torch.cat([part.slopes for part in parts if part.slopes is not None]))


def neurons(ascent: Ascent, *, memory: int = MEMORY, stop: Callable[[], bool] | None = None) -> Search:
    """``ascend`` as ``crown_relaxation`` asks for it: better bounds of single neurons."""

    def search(relaxation: Relaxation, index: int, neuron: Tensor, sign: Tensor, sample: Tensor) -> Tensor:
        target, rows, constant = signed(relaxation.network, index, neuron, sign)
        found = ascend(relaxation, target, rows, sample, ascent, constant=constant, memory=memory, stop=stop)
        return found.lower

    return search


def _passed(relaxation: Relaxation, target: int) -> list[int]:
    """The nodes that a row of ``target`` passes on its way back."""
    nodes = relaxation.network.nodes
    reached = {target}
    for index in range(target, -1, -1):
        if index in reached:
            reached.update(nodes[index].seen_through)
    return sorted(reached)


def _involved(relaxation: Relaxation, target: int) -> list[int]:
    """The activations that a row of ``target`` passes on its way back."""
    return [i for i in _passed(relaxation, target) if isinstance(relaxation.network.nodes[i], Activation)]


def _products(relaxation: Relaxation, target: int) -> list[int]:
    """The products that a row of ``target`` passes on its way back, and whose planes are searched for."""
    most, found = relaxation.tuning.search_pairs, []
    for index in _passed(relaxation, target):
        node = relaxation.network.nodes[index]
        if isinstance(node, Bilinear) and math.prod(node.pairs) <= most:
            found.append(index)
    return found


def _choices(node: Node) -> Shape:
    """The shape of what a row chooses at a node: a slope of each neuron, or a plane of each product."""
    return node.pairs if isinstance(node, Bilinear) else node.shape


class SlopeSearch:
    """The slopes of one chunk of rows, (rows, neurons of all activations on the way, one after another).

    After them come the choices of planes at the products on the way, 0 and 1 being McCormick's. In float32, or in
    float64 where float32 does not hold the weights.
    """

    def __init__(
        self, relaxation: Relaxation, target: int, rows: Tensor, sample: Tensor, constant: Tensor, ascent: Ascent
    ) -> None:
        self.relaxation = relaxation
        self.target = target
        self.rows, self.sample, self.constant = rows, sample, constant
        self.ascent = ascent
        self.activations, self.products = _involved(relaxation, target), _products(relaxation, target)
        self.shapes = [_choices(relaxation.network.nodes[i]) for i in (*self.activations, *self.products)]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        network, self.dtype = rough(relaxation.network, rows.device)

        def narrow(bounds: Bounds) -> Bounds:
            return Bounds(bounds.lower.to(self.dtype), bounds.upper.to(self.dtype))

        # Planes of products are over the bounds of their factors.
        known = {index: narrow(bounds) for index, bounds in relaxation.pre.items()} if self.products else None
        self.rough = Relaxation(network, narrow(relaxation.box), known)
        for index, node in enumerate(network.nodes[: target + 1]):
            if isinstance(node, Maximum | Beside):
                self.rough.backward.shifted.lend(index, relaxation.backward.shifted)
        self.best = rows.new_full((len(rows),), -torch.inf, dtype=self.dtype)
        starts, fixed, free = [], [], []
        for index in self.activations:
            common = relaxation.lines.of(index).lower_slope.to(self.dtype).flatten(1)
            if self._relu(index):
                free.append(relaxation.lines.free(index).to(self.dtype).flatten(1))
                starts.append(common * free[-1])
                fixed.append(common - starts[-1])
            else:
                free.append(torch.ones_like(common))
                starts.append(0.5 * free[-1])
                fixed.append(torch.zeros_like(common))
        for index in self.products:
            size = math.prod(_choices(relaxation.network.nodes[index]))
            free.append(rows.new_ones(relaxation.samples, size, dtype=self.dtype))
            starts.append(0.5 * free[-1])
            fixed.append(torch.zeros_like(free[-1]))
        none = rows.new_zeros(relaxation.samples, 0, dtype=self.dtype)
        start, self.fixed, self.free = (torch.cat([none, *t], 1) for t in (starts, fixed, free))
        self.slopes = start.index_select(0, sample)

    def _relu(self, index: int) -> bool:
        return isinstance(self.relaxation.network.nodes[index], Relu)

    def run(self, settled: Callable[[Tensor, Tensor], Tensor] | None, stop: Callable[[], bool] | None) -> None:
        """Ascend; the best slopes of every row are kept, the mean of the later half of all included."""
        if not self.sizes:
            return
        at = torch.arange(len(self.rows), device=self.rows.device)
        slopes = Adam(self.slopes.clone())
        view = self._view(at)
        rate = self.ascent.rate
        for step in range(self.ascent.steps + 1):
            if stop is not None and stop():
                return
            values, gradient = view(slopes.value)
            self.keep(at, values, slopes.value)
            if step == self.ascent.steps:
                break
            going = None
            if settled is not None and step % self.ascent.patience == 0:
                going = ~settled(at, self.best[at])
                if not bool(going.any()):
                    return
            slopes.step(gradient(), rate, counts=2 * step >= self.ascent.steps)
            if going is not None and not bool(going.all()):
                at = at[going]
                slopes.narrow(going)
                view = self._view(at)
            rate *= self.ascent.decay
        # Steps of this size go to and fro about a maximum at which the bound has a kink.
        if slopes.counted and not (stop is not None and stop()):
            mean = slopes.mean()
            self.keep(at, view(mean)[0], mean)

    def _each(self, slopes: Tensor) -> dict[int, Tensor]:
        """The part of every activation, (rows, *shape), and of every product, (rows, *pairs)."""
        parts = zip((*self.activations, *self.products), self.shapes, slopes.split(self.sizes, 1), strict=True)
        return {index: part.reshape(len(slopes), *shape) for index, shape, part in parts}

    def _tilts(self, each: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The planes of products, as ``Relaxation.lower`` takes them."""
        return {index: 2 * each[index] - 1 for index in self.products}

    def _view(self, at: Tensor) -> Callable[[Tensor], tuple[Tensor, Callable[[], Tensor]]]:
        """The bounds of the rows ``at`` as a function of their slopes, and a function that gives their gradient."""
        sample = self.sample[at]
        rows, constant = self.rows[at].to(self.dtype), self.constant[at].to(self.dtype)
        fixed, free = self.fixed.index_select(0, sample), self.free.index_select(0, sample)
        common = {
            index: Lines(*(t.to(self.dtype).index_select(0, sample) for t in self.relaxation.lines.of(index).parts()))
            for index in self.activations
            if self._relu(index)
        }

        def bounds(slopes: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
            lines, leaves, chosen = {}, {}, {}
            each = self._each(torch.addcmul(fixed, free, slopes))
            tilts = self._tilts(each)
            for index, part in each.items():
                if index in tilts:
                    continue
                if index in common:
                    lines[index] = replace(common[index], lower_slope=part)
                    continue
                with torch.enable_grad():
                    leaves[index] = part.to(self.rows.dtype).requires_grad_()
                    chosen[index] = self.relaxation.lines.chosen(index, sample, leaves[index]).parts()
                lines[index] = Lines(*(t.detach().to(self.dtype) for t in chosen[index]))
            record: dict[int, Tensor] = {}
            with torch.no_grad():
                values, reached = self.rough.lower(
                    self.target,
                    rows,
                    sample,
                    constant=constant,
                    lines=lines,
                    tilts=tilts,
                    rounded=False,
                    record=record,
                    coefficients=True,
                )
            assert reached is not None

            def gradient() -> Tensor:
                with torch.no_grad():
                    moved, by_tilts = self._by_lines(lines, tilts, record, sample, reached)
                parts = [slopes.new_zeros(len(slopes), 0)]
                for index, size in zip((*self.activations, *self.products), self.sizes, strict=True):
                    if index in by_tilts:
                        parts.append(2 * by_tilts[index].flatten(1))
                    elif index not in moved:
                        parts.append(slopes.new_zeros(len(slopes), size))
                    elif index in common:
                        parts.append(moved[index][0].flatten(1))
                    else:
                        pairs = zip(chosen[index], moved[index], strict=True)
                        outputs, given = zip(*((c, m.to(c)) for c, m in pairs if c.requires_grad), strict=True)
                        (found,) = torch.autograd.grad(outputs, leaves[index], given)
                        parts.append(found.flatten(1).to(self.dtype))
                return torch.cat(parts, 1) * free

            return values, gradient

        return bounds

    def _by_lines(
        self,
        lines: Mapping[int, Lines],
        tilts: Mapping[int, Tensor],
        record: Mapping[int, Tensor],
        sample: Tensor,
        reached: Tensor,
    ) -> tuple[dict[int, tuple[Tensor, Tensor, Tensor, Tensor]], dict[int, Tensor]]:
        """Derivatives of every row's bound by its lines' slopes and offsets, in the order of ``Lines``, and its tilts.

        A bound is the least value over the box of a linear function that the rows' coefficients make of the lines. By
        the envelope theorem only its value at the minimiser x counts: going forward from there through the lines that
        were taken, a neuron with the coefficient a and the pre-activation z contributes a⁺·(lower line at z) +
        a⁻·(upper line at z).
        """
        network, entry = self.rough.network, self.rough.nodes.start
        center, radius = self.rough.nodes.ball(entry)
        point = center.index_select(0, sample) - reached.sign() * radius.index_select(0, sample)
        values = {entry: point.reshape(len(point), *network.nodes[entry].shape)}
        found, by_tilts = {}, {}
        for index in range(entry + 1, max(record, default=0) + 1):
            node = network.nodes[index]
            if isinstance(node, Beside) and index not in record and node.inputs[2] in values:
                values[index] = values[node.inputs[2]]
                continue
            if isinstance(node, Beside) and index in record:
                aside = self.rough.backward.shifted.aside(index, False).of_samples(sample)
                taken = aside.at([values.get(i) for i in node.inputs], record[index])
                values[index] = taken.reshape(-1, *node.shape)
                continue
            if index in network.spared or any(i not in values for i in node.seen_through):
                continue
            if isinstance(node, Bilinear) and index in record:
                a = record[index].reshape(len(point), *node.shape)
                values[index], slope = self._plane(node, [values[i] for i in node.inputs], a, tilts.get(index), sample)
                if slope is not None:
                    by_tilts[index] = slope
            elif index in network.maxima:
                if index in record:
                    between = self.rough.backward.shifted.between(index, False).of_samples(sample)
                    taken = between.at(values[node.inputs[0]], record[index])
                    values[index] = taken.reshape(-1, *node.shape)
            elif not isinstance(node, Activation):
                values[index] = node.forward(*(values[i] for i in node.inputs))
            elif index in record:
                z, mine = values[node.inputs[0]], lines[index]
                above = record[index].reshape(z.shape)
                below = above.clamp(max=0)
                above = above - below
                found[index] = (above * z, above, below * z, below)
                low = torch.addcmul(mine.lower_offset, mine.lower_slope, z)
                high = torch.addcmul(mine.upper_offset, mine.upper_slope, z)
                values[index] = torch.where(below < 0, high, low)
        return found, by_tilts

    def _plane(
        self, node: Bilinear, values: Sequence[Tensor], a: Tensor, tilt: Tensor | None, sample: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """What rows a, (rows, *shape), take for a product at values of its factors, and the bound's slopes by tilts.

        The distances d₁ and d₂ of the factors from their points contribute |a|·t·r₂·d₁ + a·t·r₁·d₂ (``kinds``).
        """
        nodes = self.rough.nodes
        (x, y), (r, s) = ([of(i).index_select(0, sample) for i in node.inputs] for of in (nodes.point, nodes.radius))
        first, second = values[0] - x, values[1] - y
        side = torch.where(a < 0, -1.0, 1.0).to(a)
        value = node.forward(values[0], y) + node.forward(x, second) - side * node.forward(r, s)
        if tilt is None:
            return value, None
        by_first, by_second = node.paired(first, s), node.paired(r, second)
        value = value + node.summed(tilt * (node.spread(side) * by_first + by_second))
        return value, node.spread(a.abs()) * by_first + node.spread(a) * by_second

    def keep(self, at: Tensor, values: Tensor, slopes: Tensor) -> None:
        """Take the slopes of those of the rows ``at`` whose bounds are better than the best so far."""
        better = values > self.best[at]
        chosen = at[better]
        self.best[chosen] = values[better]
        self.slopes[chosen] = slopes[better]

    def proven(self, keep: bool) -> Ascended:
        """The bounds of the best slopes, rounding accounted for; ``keep``: with the slopes."""
        each = {index: chosen.to(self.rows.dtype) for index, chosen in self._each(self.slopes).items()}
        lines = {index: self.relaxation.lines.chosen(index, self.sample, each[index]) for index in self.activations}
        found = self.relaxation.lower(
            self.target, self.rows, self.sample, constant=self.constant, lines=lines, tilts=self._tilts(each)
        )[0]
        # The search starts from CROWN's own lines for ReLU alone.
        if not all(self._relu(index) for index in self.activations):
            common = self.relaxation.lower(self.target, self.rows, self.sample, constant=self.constant)[0]
            found = torch.maximum(found, common)
        return Ascended(found, self.slopes if keep else None)
