"""Transformations of networks: several combined into one, the head removed, repeated neurons merged.

No transformation rounds: it adds matrices of integers that every precision holds, and exact sums and products of
weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.errors import InputError
from verifiable_relu.ir.functions.function import Function
from verifiable_relu.ir.functions.smooth import Smooth
from verifiable_relu.ir.functions.steps import StepFunction
from verifiable_relu.ir.linear import Dense, Diagonal, Gather, LinearMap, Sparse
from verifiable_relu.ir.network import Affine, Elementwise, Input, Network, Op, Pair, Product, Source, Sum, live
from verifiable_relu.rounding import COMMON_STEP, UNIT

# --- Several networks as one -----------------------------------------------------------------------------------------

Form = tuple[Sequence[tuple[int, int]], int]
"""An affine form Σ coefficient·v_i + constant, of pairs of i and coefficient; its integers are below 2²⁴."""

Replay = Callable[[Network, np.ndarray], np.ndarray]
"""Outputs, flat, of a float32 sample as what a network was made from computes them."""


@dataclass(frozen=True)
class NetworkPart:
    """A network inside another.

    Attributes:
        label: put before the names of its ops.
        network: the network.
        inputs: for each of its inputs the number of the whole network's input that it is.
    """

    label: str
    network: Network
    inputs: Sequence[int]


def combine(
    parts: Sequence[NetworkPart],
    size: int,
    replay: Replay,
    *,
    passed: bool = False,
    products: Sequence[tuple[Form, Form]] = (),
    paired: bool = True,
) -> Network:
    """Return the network that computes several networks at once, on inputs (size,).

    Its outputs are the parts' outputs, one part after the other.

    Args:
        parts: the networks.
        size: the number of inputs.
        replay: runs the parts where the result is run.
        passed: whether the inputs are outputs, too, after those of the parts.
        products: pairs of forms over all earlier outputs, whose products are further outputs.
        paired: whether a part whose functions are those of an earlier one is compared with it (``Network.pairs``).

    Raises:
        InputError: if ``inputs`` do not fit, or a part is not taken as a function of real numbers where that is needed.
    """
    networks = [part.network for part in parts]
    arithmetic = networks[0].arithmetic
    if arithmetic != "real" and (passed or products):
        raise InputError(f"a query that relates inputs or multiplies is about real numbers, not {arithmetic}")
    for part in parts:
        if part.network.arithmetic != arithmetic:
            raise InputError(f"networks in {arithmetic} and in {part.network.arithmetic} cannot be combined")
        if len(part.inputs) != part.network.input_size:
            raise InputError(f"{len(part.inputs)} inputs for the network '{part.network.name}'")
    known = [[matched(first, second) if paired else {} for first in networks[:n]] for n, second in enumerate(networks)]
    build, copied, places, total = _Combination(size), list[dict[int, int]](), list[tuple[int, Sequence[int]]](), 0
    for number, part in enumerate(parts):
        earlier, matches = next(((n, found) for n, found in enumerate(known[number]) if found), (0, {}))
        compared = matches.keys() | {i for later in known[number + 1 :] for i in later[number].values()}
        others = {second: copied[earlier][first] for second, first in matches.items()}
        made, output = build.copy(part, others, compared)
        copied.append(made)
        places.append((output, range(total, total := total + part.network.output_size)))
    output = build.join([*places, *([(0, range(total, total + size))] if passed else [])])
    left = products
    while left:
        # Those at the beginning that are of no product among them.
        count = build.ops[output].size
        level = next(
            (n for n, pair in enumerate(left) if max(i for form, _ in pair for i, _ in form) >= count), len(left)
        )
        output, left = build.multiply(output, left[:level]), left[level:]
    run = partial(_run, parts=tuple(parts), passed=passed, products=products, replay=replay)
    repairs = tuple(f"{part.label}: {sentence}" for part in parts for sentence in part.network.source.repairs)
    source = Source((size,), (build.ops[output].size,), run=run, repairs=repairs)
    return Network(tuple(build.ops), source, " and ".join(part.label for part in parts), arithmetic, tuple(build.pairs))


class _Combination:
    """The ops of several networks on the same inputs, so far, and the pairs among them."""

    def __init__(self, size: int) -> None:
        self.ops: list[Op] = [Input(name="inputs", size=size)]
        self.pairs: list[Pair] = []

    def put(self, op: Op) -> int:
        """Add an op and return its number."""
        self.ops.append(op)
        return len(self.ops) - 1

    def map(self, name: str, source: int, of: LinearMap, bias: Tensor | None = None, error: float = 0.0) -> int:
        """Add an affine op and return its number."""
        return self.put(Affine(name=name, inputs=(source,), size=of.n_out, map=of, bias=bias, weight_error=error))

    def copy(self, part: NetworkPart, others: dict[int, int], compared: set[int]) -> tuple[dict[int, int], int]:
        """Add the ops of a part.

        Args:
            part: the network.
            others: by number in the part, the op here with which an elementwise op is compared.
            compared: numbers in the part of all elementwise ops that are compared with one here or a later one.

        Returns:
            The numbers here of its elementwise ops by those in the part, and the number of its output.
        """
        size, index = self.ops[0].size, torch.tensor(part.inputs)
        same = torch.equal(index, torch.arange(size))
        at = [0 if same else self.map(f"{part.label}/input", 0, Gather(index, size))]
        made = {}
        for number, op in enumerate(part.network.ops[1:], 1):
            step = _step(part.network, number) if number in compared else None
            op = replace(op, name=f"{part.label}/{op.name}", inputs=tuple(at[i] for i in op.inputs))
            if step is not None:
                op = replace(op, inputs=(self.map(f"{op.name}/steps", op.inputs[0], Diagonal(step)),))
            if number in others:
                # The difference between the inputs of an op and of the one with which it is compared.
                (source,), minus = self.ops[others[number]].inputs, Diagonal(torch.full((op.size,), -1.0))
                terms = (*op.inputs, self.map(f"{op.name}/minus", source, minus))
                apart = self.put(Sum(name=f"{op.name}/apart", inputs=terms, size=op.size))
            found = made[number] = self.put(op)
            if number in others:
                self.pairs.append(Pair(others[number], apart, found))
            if step is not None:
                # 1/step is a normal number, off by half a unit in its last place.
                found = self.map(f"{op.name}/numbers", found, Diagonal(1 / step.double(), step), error=float(2 * UNIT))
            at.append(found)
        return made, at[-1]

    def join(self, parts: Sequence[tuple[int, Sequence[int]]]) -> int:
        """Add a vector of the values of some ops, given with their places in it; all places are taken."""
        total = sum(len(places) for _, places in parts)
        if len(parts) == 1 and list(parts[0][1]) == list(range(total)):
            return parts[0][0]
        placed = []
        for source, places in parts:
            index = torch.full((total,), -1)
            index[list(places)] = torch.arange(len(places))
            placed.append(self.map("placed", source, Gather(index, len(places))))
        return placed[0] if len(parts) == 1 else self.put(Sum(name="joined", inputs=tuple(placed), size=total))

    def multiply(self, source: int, pairs: Sequence[tuple[Form, Form]]) -> int:
        """Add the values of an op, and after them the products of pairs of forms over them."""
        count = self.ops[source].size
        squares = [n for n, (first, second) in enumerate(pairs) if first == second]
        others = [n for n in range(len(pairs)) if n not in squares]
        parts: list[tuple[int, Sequence[int]]] = [(source, range(count))]
        for chosen in filter(None, (squares, others)):
            sides = []
            for i in range(2):
                forms = [pairs[n][i] for n in chosen]
                weight, bias = torch.zeros(len(forms), count), torch.tensor([float(c) for _, c in forms])
                for row, (form, _) in enumerate(forms):
                    for j, coefficient in form:
                        weight[row, j] = coefficient
                sides.append(self.map(f"factor {i}", source, Dense(weight), bias))
            if chosen is squares:
                op: Op = Elementwise(name="square", inputs=(sides[0],), size=len(chosen), function=Smooth("Square"))
            else:
                op = Product(name="product", inputs=tuple(sides), size=len(chosen))
            parts.append((self.put(op), [count + n for n in chosen]))
        return self.join(parts)


def _run(
    x: Tensor, parts: Sequence[NetworkPart], passed: bool, products: Sequence[tuple[Form, Form]], replay: Replay
) -> Tensor:
    """Return the outputs (1, outputs) at x (1, size) with the parts' as ``replay`` computes them."""
    point = x.reshape(-1).numpy()
    given = [replay(part.network, point[list(part.inputs)]).astype(float).tolist() for part in parts]
    values = [*(value for each in given for value in each), *(point.tolist() if passed else ())]
    for pair in products:
        values.append(math.prod(sum(c * values[i] for i, c in form) + constant for form, constant in pair))
    return torch.tensor([values], dtype=torch.float64)


def matched(first: Network, second: Network) -> dict[int, int]:
    """Return the pairs of elementwise ops of two networks that may be compared; empty for none.

    If one is quantised, its rounding and saturation ops are skipped, and of the other network's ops the next that
    fits is taken. The choice of pairs decides how tight bounds are, never whether they hold.

    Returns:
        Numbers of the first network's ops by those of the second one's.
    """
    fewer, more = _unquantised(first), _unquantised(second)
    swapped = len(fewer) > len(more)
    if swapped:
        fewer, more = more, fewer
    rest, pairs = iter(more.items()), dict[int, int]()
    for index, op in fewer.items():
        found = next((i for i, other in rest if op.size == other.size and are_alike(op.function, other.function)), None)
        if found is None:
            return {}
        pairs[index if swapped else found] = found if swapped else index
    return pairs


def are_alike(f: Function, g: Function) -> bool:
    """Return True if g(z + d) − f(z) can be bounded: f = g, or both are ReLU or functions that tend to it."""
    same = f.is_same(g) and not isinstance(f, StepFunction)
    return same or all(each.gated or each.limit.kind == "Relu" for each in (f, g))


def _unquantised(network: Network) -> dict[int, Elementwise]:
    """Return the numbers of the elementwise ops that do not belong to a network's quantisation."""
    ops = {i: op for i, op in enumerate(network.ops) if isinstance(op, Elementwise)}
    if not any(isinstance(op.function, StepFunction) for op in ops.values()):
        return ops
    return {i: op for i, op in ops.items() if not (isinstance(op.function, StepFunction) or _saturates(network, op))}


def _saturates(network: Network, op: Op) -> bool:
    """Return True if an op clips steps less the least one, or the greatest one less what that leaves."""
    index, sign = op.inputs[0], 1.0
    while (turned := _turn(source := network.ops[index])) is not None:
        index, sign = source.inputs[0], sign * turned
    clipped = isinstance(source, Elementwise) and (
        isinstance(source.function, StepFunction) or (_is_relu(source) and sign < 0)
    )
    return clipped and index != op.inputs[0]


def _turn(op: Op) -> float | None:
    """Return 1 or −1 if an op multiplies all elements by that, else None."""
    sign = float(op.map.weight[0]) if isinstance(op, Affine) and isinstance(op.map, Diagonal) else 0.0
    same = abs(sign) == 1 and isinstance(op, Affine) and bool((op.map.weight == sign).all())
    return sign if same else None


def _is_relu(op: Op) -> bool:
    return isinstance(op, Elementwise) and op.function.kind == "Relu"


def _step(network: Network, index: int) -> Tensor | None:
    """Return the divisors, (size,), that count the input of a ReLU in steps; None if it is not counted so."""
    step = network.ops[network.ops[index].inputs[0]]
    if not (_is_relu(network.ops[index]) and isinstance(step, Elementwise) and isinstance(step.function, StepFunction)):
        return None
    before = network.ops[step.inputs[0]]
    by = before.map.divisor if isinstance(before, Affine) and isinstance(before.map, Diagonal) else None
    return by if by is not None and bool((by > 0).all()) else None


# --- Heads -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)  # queries of one network are about one without its head, too
def without_head(network: Network) -> Network | None:
    """Return the network without a head that keeps the order of its outputs; None if it has none.

    A head is a softmax or log softmax over all outputs, or an increasing function of each output alone, recognised by
    the ops as which it was read. In real arithmetic the result's outputs compare as those of the network do.
    Counterexamples are replayed in the source of the whole network.
    """
    output = len(network.ops) - 1
    # Below a softmax there may be another increasing function.
    while (before := _before_head(network.ops, output)) is not None:
        output = before
    if output == len(network.ops) - 1:
        return None
    ops, number = live(network.ops, output, network.pairs)
    pairs = tuple(Pair(*(number[i] for i in pair)) for pair in network.pairs if pair.second in number)
    source = network.source
    if source.onnx is None and source.run is None:
        source = replace(source, run=network.limit)
    return replace(network, ops=ops, pairs=pairs, source=source)


def _before_head(ops: Sequence[Op], index: int) -> int | None:
    """Return the number of the op before the head that ends at op ``index``; None if no head ends there."""
    op = ops[index]
    if isinstance(op, Elementwise):
        if op.function.kind == "Reciprocal":
            return _exponents(ops, op.inputs[0])
        # Of two numbers, softmax is the sigmoid of their differences.
        two = _difference_of_two(ops, op.inputs[0], 1.0) if op.function.kind == "Sigmoid" else None
        return two if two is not None else op.inputs[0] if op.function.increasing else None
    turned = _linear(op, Diagonal)
    if turned is None or not bool((turned.weight == -1).all()):
        return None
    # Log softmax is minus the logarithm of the sums of exponentials; of two numbers minus a softplus.
    function = ops[op.inputs[0]]
    if not isinstance(function, Elementwise):
        return None
    if function.function.kind == "Softplus":
        return _difference_of_two(ops, function.inputs[0], -1.0)
    return _exponents(ops, function.inputs[0]) if function.function.kind == "Log" else None


def _linear(op: Op, of: type[LinearMap]) -> LinearMap | None:
    """Return the map of an op that is exactly y = W·x."""
    exact = isinstance(op, Affine) and op.is_exact and op.bias is None
    return op.map if exact and isinstance(op, Affine) and isinstance(op.map, of) else None


def _difference_of_two(ops: Sequence[Op], index: int, sign: float) -> int | None:
    """Return the number of the op of the two x_i of sign·(x_i − the other), if an op is that."""
    found = _linear(ops[index], Dense)
    expected = torch.tensor([[sign, -sign], [-sign, sign]], dtype=torch.float64)
    same = found is not None and ops[index].size == 2 and torch.equal(found.weight.cpu().double(), expected)
    return ops[index].inputs[0] if same else None


def _exponents(ops: Sequence[Op], index: int) -> int | None:
    """Return the number of the op of the x_i of Σ_j exp(x_j − x_i), if an op is that over all of them."""
    count, total = ops[index].size, _linear(ops[index], Dense)
    if total is None or tuple(total.weight.shape) != (1, count) or not bool((total.weight == 1).all()):
        return None
    powers = ops[ops[index].inputs[0]]
    if not (isinstance(powers, Elementwise) and powers.function.kind == "Exp"):
        return None
    apart = ops[powers.inputs[0]]
    differences = _linear(apart, Sparse)
    if not isinstance(differences, Sparse) or apart.size != count**2:
        return None
    first, second = np.divmod(np.arange(count**2), count)
    pairs = torch.from_numpy(np.stack([second, first], 1))
    weight = torch.where(pairs[:, :1] == pairs[:, 1:], 0.0, torch.tensor([[1.0, -1.0]]).double())
    same = torch.equal(differences.index.cpu(), pairs) and torch.equal(differences.weight.cpu().double(), weight)
    return apart.inputs[0] if same and ops[apart.inputs[0]].size == count else None


# --- Repeated neurons ------------------------------------------------------------------------------------------------


def without_repeated(network: Network) -> Network:
    """Return a fully connected ReLU network without repeated neurons, which computes the same function.

    Its weights are in float64. It is the network itself where no neuron is repeated, sums of weights would be rounded,
    or the network has other ops.
    """
    chain, ops = network.ops[1:], [network.ops[0]]
    if not all(op.inputs == (i,) and (_is_relu(op) or _is_plain(op)) for i, op in enumerate(chain)):
        return network
    # The outputs keep their number and order: no dense layer follows whose columns could be added or sorted.
    last = max((index for index, op in enumerate(chain) if isinstance(op, Affine)), default=0)
    # For each neuron of the network its number in the last of the ops.
    place = torch.arange(network.input_size)
    for index, op in enumerate(chain):
        if not isinstance(op, Affine):
            ops.append(replace(op, size=ops[-1].size))
            continue
        weight = _merged_columns(op.map.weight.detach().double(), place, ops[-1].size)
        if weight is None:
            return network
        bias = weight.new_zeros(len(weight)) if op.bias is None else op.bias.detach().double()
        place = torch.arange(len(bias))
        if index < last:
            rows, place = torch.unique(torch.cat([weight, bias[:, None]], 1), dim=0, return_inverse=True)
            weight, bias = rows[:, :-1].contiguous(), rows[:, -1].contiguous()
        ops.append(replace(op, size=len(bias), map=Dense(weight), bias=bias))
    if sum(op.size for op in ops) >= sum(op.size for op in network.ops):
        return network
    source = replace(network.source, onnx=None, run=None, ports={})
    return replace(network, ops=tuple(ops), source=source, pairs=())


def _is_plain(op: Op) -> bool:
    """Return True if an op is a dense layer of known numbers that need no gradient."""
    known = isinstance(op, Affine) and op.is_exact and isinstance(op.map, Dense) and op.map.copies == 1
    wanted = isinstance(op, Affine) and any(t is not None and t.requires_grad for t in (op.map.weight, op.bias))
    return known and not wanted


def _merged_columns(weight: Tensor, place: Tensor, size: int) -> Tensor | None:
    """Return the weights with the columns of repeated neurons added, (rows, size); None where that may not be exact."""
    if size == len(place):
        # Neurons are sorted all the same.
        merged = torch.empty_like(weight)
        merged[:, place] = weight
        return merged
    units = weight[weight != 0] / COMMON_STEP
    if not bool((units == units.round()).all()) or float(weight.abs().sum(1).amax()) >= COMMON_STEP * 2.0**52:
        return None
    return weight.new_zeros(len(weight), size).index_add_(1, place, weight)
