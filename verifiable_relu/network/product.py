"""Several networks as one: inputs that may be shared, and all outputs after one another, with products of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from verifiable_relu.errors import InputError
from verifiable_relu.network.build import Builder
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import RECTIFIERS, Activation, Beside, Gelu, Node, Relu, Scale, Step, alike, curve
from verifiable_relu.network.source import replay

Form = tuple[Sequence[tuple[int, int]], int]
"""An affine form Σ coefficient·v_i + constant, of pairs of i and coefficient; its integers are below 2²⁴."""


@dataclass(frozen=True)
class NetworkPart:
    """A network of a product.

    Attributes:
        label: put before the names of the network's nodes.
        network: the network.
        inputs: for each element of the network's input, in row-major order, the product's input that it is.
    """

    label: str
    network: Network
    inputs: Sequence[int]


def product(
    parts: Sequence[NetworkPart],
    size: int,
    passed: bool = False,
    products: Sequence[tuple[Form, Form]] = (),
    beside: bool = True,
) -> Network:
    """The network that computes several networks at once, on inputs (size,).

    Its outputs are those of the parts, one after the other, each in row-major order, with ``passed`` its own inputs
    after them, and then ``products``: each of two forms over the outputs before it. A part whose activations are those
    of an earlier one stands beside it (``bounds.beside``): bounds know how its neurons differ from those. What is added
    to the parts are matrices of integers that every precision holds, so that nothing is rounded, and factors before
    and behind a ReLU that counts steps. What runs the parts runs it (``run``).

    Raises:
        InputError: if ``inputs`` do not fit, or a part is not taken as a function of real numbers.
    """
    build, arithmetic = Builder((size,)), parts[0].network.arithmetic
    if arithmetic != "real" and (passed or products):
        raise InputError(f"a query that relates inputs or multiplies is about real numbers, not {arithmetic}")
    total = sum(part.network.output_size for part in parts) + size * passed
    summands, start = [], 0
    placed: list[dict[int, int]] = []
    networks = [part.network for part in parts]
    known = [[matched(first, second) if beside else {} for first in networks[:n]] for n, second in enumerate(networks)]
    for number, part in enumerate(parts):
        if part.network.arithmetic != arithmetic:
            raise InputError(f"networks in {arithmetic} and in {part.network.arithmetic} are not joined")
        if len(part.inputs) != part.network.input_size:
            raise InputError(f"{len(part.inputs)} inputs for the network '{part.network.name}'")
        at = 0
        if list(part.inputs) != list(range(size)):
            at = build.linear(0, _ones(range(len(part.inputs)), part.inputs, len(part.inputs), size), None, "inputs")
        at = build.reshape(at, part.network.input_shape, f"{part.label}/input")
        earlier, pairs = next(((n, pairs) for n, pairs in enumerate(known[number]) if pairs), (0, {}))
        others = {place for later in known[number + 1 :] for place in later[number].values()}
        places, made = {0: at}, {}
        for index, node in enumerate(part.network.nodes[1:], 1):
            moved = replace(node, name=f"{part.label}/{node.name}", inputs=tuple(places[i] for i in node.inputs))
            step = _step(part.network, node) if index in others or index in pairs else None
            if step is not None:
                moved = replace(moved, inputs=(build.scale(moved.inputs[0], f"{moved.name}/steps", scale=step),))
            places[index] = made[index] = build.append(moved)
            if index in pairs:
                other = placed[earlier][pairs[index]]
                (source,), (apart,) = build.nodes[other].inputs, moved.inputs
                minus = build.scale(source, f"{moved.name}/minus", scale=-torch.ones(()))
                three = (build.add(apart, minus, f"{moved.name}/apart"), other, places[index])
                places[index] = build.append(Beside(name=f"{moved.name}/beside", inputs=three, shape=node.shape))
            if step is not None:
                places[index] = build.quotient(places[index], f"{moved.name}/numbers", step)
        placed.append(made)
        count = part.network.output_size
        flat = build.reshape(places[len(part.network.nodes) - 1], (count,), f"{part.label}/output")
        summands.append((flat, range(start, start + count)))
        start += count
    if passed:
        summands.append((0, range(start, total)))
    output = _placed(build, summands, total)
    left = products
    while left:
        # Those at the beginning that are of no product among them.
        count = build.size(output)
        level = next((n for n, pair in enumerate(left) if _reach(pair) >= count), len(left))
        output, left = _multiplied(build, output, left[:level]), left[level:]
    name = " and ".join(part.label for part in parts)
    mended = tuple(f"{part.label}: {sentence}" for part in parts for sentence in part.network.mended)
    run = partial(_run, parts=parts, passed=passed, pairs=products)
    return replace(build.network(output, name=name), arithmetic=arithmetic, mended=mended, run=run)


def matched(first: Network, second: Network) -> dict[int, int]:
    """Beside which activations of a first network those of a second one may stand, by their numbers; empty for none.

    All of them where both have the same build. Where one is quantised, its steps and saturations are nobody's partners.
    Which ones stand beside each other decides how close bounds are, and never whether they hold.
    """
    if isomorphic(first, second):
        return {i: i for i in first.activations}
    fewer, more = (_unquantised(network) for network in (first, second))
    swapped = len(fewer) > len(more)
    if swapped:
        fewer, more = more, fewer
    rest, pairs = iter(more), dict[int, int]()
    for index, f in fewer:
        found = next((i for i, g in rest if f.shape == g.shape and alike(f, g)), None)
        if found is None:
            return {}
        pairs[index if swapped else found] = found if swapped else index
    return pairs


def rectified(first: Network, second: Network) -> list[tuple[int, int]]:
    """The activations that ``matched`` puts beside each other, each by its number among those of its network.

    None where some are others than ReLU and λ-GELU, λ-GELU with the same λ twice, or ReLUs that count steps: of these
    certificates know no difference.
    """
    pairs = matched(first, second)
    for j, i in pairs.items():
        f, g = first.nodes[i], second.nodes[j]
        both = isinstance(f, RECTIFIERS) and isinstance(g, RECTIFIERS)
        same = isinstance(f, Gelu) and isinstance(g, Gelu) and torch.equal(f.lam, g.lam)
        if same or not both or _step(first, f) is not None or _step(second, g) is not None:
            return []
    ones, twos = ({index: n for n, index in enumerate(network.activations)} for network in (first, second))
    return [(ones[i], twos[j]) for j, i in pairs.items()]


def _unquantised(network: Network) -> list[tuple[int, Activation]]:
    """The activations of a network, with their numbers, that are no part of how it quantises."""
    found = []
    for index in network.activations:
        node = network.nodes[index]
        assert isinstance(node, Activation)
        within = isinstance(node, Step)
        if isinstance(before := network.nodes[node.inputs[0]], Scale):
            # A saturation: of the steps less the least one, or of the greatest one less what that leaves.
            source = network.nodes[before.inputs[0]]
            within |= isinstance(source, Step) or (isinstance(source, Relu) and bool((before.scale == -1).all()))
        if not within:
            found.append((index, node))
    return found


def _step(network: Network, node: Node) -> Tensor | None:
    """By what the input of a ReLU was divided to be counted in steps; None if it is as the file has it."""
    step = network.nodes[node.inputs[0]]
    before = network.nodes[step.inputs[0]] if isinstance(step, Step) else None
    by = before.divisor if isinstance(node, Relu) and isinstance(before, Scale) else None
    return by if by is not None and bool((by > 0).all()) else None


def isomorphic(first: Network, second: Network) -> bool:
    """Whether two networks have the same nodes but for their numbers, and activations that can be compared."""
    pairs = list(zip(first.nodes, second.nodes, strict=False))
    both = len(first.nodes) == len(second.nodes) and all((f.inputs, f.shape) == (g.inputs, g.shape) for f, g in pairs)
    return both and all(
        alike(f, g) if isinstance(f, Activation) and isinstance(g, Activation) else type(f) is type(g) for f, g in pairs
    )


def _run(x: Tensor, parts: Sequence[NetworkPart], passed: bool, pairs: Sequence[tuple[Form, Form]]) -> Tensor:
    """The product's outputs (1, …) at x (1, size), float32, with the parts' as what runs them computes them."""
    point = x.reshape(-1)
    given = [replay(part.network, point[list(part.inputs)].numpy()).astype(float).tolist() for part in parts]
    values = [*(value for each in given for value in each), *(point.tolist() if passed else ())]
    for pair in pairs:
        values.append(math.prod(sum(c * values[i] for i, c in form) + constant for form, constant in pair))
    return torch.tensor([values], dtype=torch.float64)


def _reach(pair: tuple[Form, Form]) -> int:
    return max(i for form, _ in pair for i, _ in form)


def _multiplied(build: Builder, x: int, pairs: Sequence[tuple[Form, Form]]) -> int:
    """The values of a node (n,), and after them the products of pairs of forms over them."""
    count = build.size(x)
    squares = [n for n, (first, second) in enumerate(pairs) if first == second]
    others = [n for n in range(len(pairs)) if n not in set(squares)]
    summands = [(x, list(range(count)))]
    if squares:
        side = _forms(build, x, [pairs[n][0] for n in squares], "root")
        node = build.append(curve("Square", "square", (side,), build.shape(side)))
        summands.append((node, [count + n for n in squares]))
    if others:
        left, right = (_forms(build, x, [pairs[n][side] for n in others], f"factor {side}") for side in (0, 1))
        summands.append((build.product(left, right, "product"), [count + n for n in others]))
    return _placed(build, summands, count + len(pairs))


def _forms(build: Builder, x: int, forms: Sequence[Form], name: str) -> int:
    """The values of forms over the values of a node."""
    weight, bias = torch.zeros(len(forms), build.size(x)), torch.tensor([float(constant) for _, constant in forms])
    for row, (form, _) in enumerate(forms):
        for i, c in form:
            weight[row, i] = c
    return build.linear(x, weight, bias, name)


def _placed(build: Builder, summands: Sequence[tuple[int, Sequence[int]]], total: int) -> int:
    """A vector of ``total`` values that has those of some nodes at the places that are given with each."""
    output, *others = (
        build.linear(node, _ones(places, range(len(places)), total, len(places)), None, "placed")
        for node, places in summands
    )
    for other in others:
        output = build.add(output, other, "joined")
    return output


def _ones(rows: Sequence[int], columns: Sequence[int], height: int, width: int) -> Tensor:
    """The matrix with ones at (rows, columns) and zeros elsewhere, which every precision holds."""
    matrix = torch.zeros(height, width)
    matrix[list(rows), list(columns)] = 1
    return matrix
