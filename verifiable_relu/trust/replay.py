"""The check of a claimed counterexample: by real arithmetic on the network's own weights, and by a run.

What runs is what the network was read from: its file in onnxruntime, or the module in torch.

Neither check knows how the counterexample was found. Both must confirm it before the verdict is *sat*. Where a network
is taken as what runs it computes (``Network.arithmetic``), a counterexample is an evaluation that somebody can run: in
onnxruntime, or operator by operator in torch, and real arithmetic is not asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.dispatch import Table
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Add, Affine, Conv2d, Linear, Node, Sparse
from verifiable_relu.network.source import replay
from verifiable_relu.rounding import above, below
from verifiable_relu.spec.property import Property, Query, nearest
from verifiable_relu.trust.confirmation import margin_range
from verifiable_relu.trust.enclose import enclose, formats
from verifiable_relu.trust.exact import evaluable, evaluate_exact, multiplications

_EXACT_PRODUCTS = 4_000_000
"""The most multiplications with which a network is evaluated exactly straight away, which takes about 0.5 s.

With more, the network is evaluated in float64 with error bounds first, and exactly only where these leave doubt.
"""


@dataclass(frozen=True)
class Confirmation:
    """Result of checking a claimed counterexample.

    It is confirmed where three conditions hold: the point is in the box, its outputs in real arithmetic are in the
    unsafe set, and so are the outputs of the replay (``replay``), in its own floating-point format. Where the exact
    outputs lie on the boundary of the set, it is enough that those of the replay are close to them.

    Attributes:
        detail: which condition failed, and by how much; a note where a point is confirmed though the replay misses.
        exact: whether rational arithmetic computed the outputs. If not, float64 did, with a proven error bound, and
            the point is confirmed only where every margin within that bound is negative.
        margin: the margin in real arithmetic, rounded to a float; where it is known as a range, the range's upper end.
        outputs: the exact outputs; None where rational arithmetic did not compute them.
        replayed: the outputs of the replay, flat; None where there was none, or it failed.
    """

    confirmed: bool
    detail: str = ""
    exact: bool = False
    margin: float | None = None
    outputs: tuple[Fraction, ...] | None = None
    replayed: np.ndarray | None = None


def _judge(network: Network, prop: Property, x: Sequence[Fraction]) -> Confirmation:
    """Return what real arithmetic says of a point; a margin that is still open counts as not violated."""
    exactly = evaluable(network)
    if not exactly or multiplications(network) > _EXACT_PRODUCTS:
        for dtype in formats(network):
            y = enclose(network, x, dtype)
            if not y.error.any() and np.isfinite(y.value).all():
                return _at(prop, [Fraction(*v.as_integer_ratio()) for v in y.value])
            low, high = margin_range(prop, y)
            if high < 0:
                return Confirmation(True, margin=nearest(high))
            if low > 0:
                said = f"its margin in real arithmetic is at least {nearest(low):.6g}"
                return Confirmation(False, said, margin=nearest(high))
        if not exactly:
            said = (
                f"arithmetic with error bounds leaves its margin between {nearest(low):.6g} and {nearest(high):.6g}, "
                "and this network has no exact evaluation"
            )
            return Confirmation(False, said, margin=nearest(high))
    return _at(prop, evaluate_exact(network, x))


def _at(prop: Property, outputs: Sequence[Fraction]) -> Confirmation:
    """Return what exact outputs say."""
    margin, violated = nearest(prop.margin(outputs)), prop.violated(outputs)
    return Confirmation(violated, "" if violated else f"its exact margin is {margin:.6g}", True, margin, tuple(outputs))


def confirm(query: Query, witness: Sequence[Fraction]) -> Confirmation:
    """Check a claimed counterexample; a wrong claim is a ``Confirmation`` that says so, never an exception.

    Only the exact point must lie in the box: onnxruntime takes the point rounded to float32, which may lie outside a
    box whose bounds are no float32 numbers.

    Args:
        query: the network and the property.
        witness: the input variables in row-major order.
    """
    network, prop = query.network.limit, query.property
    if network.arithmetic != "real":
        return _evaluated(query, witness)
    if len(witness) != network.input_size:
        return Confirmation(False, f"the point has {len(witness)} coordinates, the network {network.input_size} inputs")
    if not prop.admits(witness):
        return Confirmation(
            False, "the point is outside the box" if prop.ball is None else "the point is outside the ball"
        )
    try:
        judged = _judge(network, prop, witness)
    except UnsupportedError as error:
        return Confirmation(False, str(error))
    # A coordinate beyond float32 becomes infinite; the point is then not confirmed.
    with np.errstate(over="ignore"):
        rounded = np.array([float(v) for v in witness]).astype(np.float32)
    try:
        replayed = replay(network, rounded)
    except UnsupportedError as error:
        return replace(judged, confirmed=False, detail=str(error))
    judged = replace(judged, replayed=replayed)
    finite = bool(np.isfinite(replayed).all())
    repeated = finite and prop.violated([Fraction(float(v)) for v in replayed])
    if judged.confirmed and repeated:
        return judged
    if judged.confirmed and _reached(prop, judged.outputs, replayed):
        # Floating-point numbers cannot be expected to hit a set that exact outputs only touch.
        detail = "the exact outputs reach the boundary of the unsafe set, which the replay in float32 misses"
        return replace(judged, detail=detail)
    if judged.confirmed:
        detail = "real arithmetic confirms the counterexample, the replay does not"
    elif repeated:
        detail = f"the replay confirms the counterexample, real arithmetic does not: {judged.detail}"
    else:
        detail = f"neither real arithmetic nor the replay confirms the counterexample: {judged.detail}"
    return replace(judged, confirmed=False, detail=detail)


_NEAR = 2.0**-10
"""The part of the largest exact output by which the replay may differ where a point is confirmed in spite of it."""


def _reached(prop: Property, outputs: Sequence[Fraction] | None, replayed: np.ndarray) -> bool:
    """Return True if exact outputs lie on the boundary of the unsafe set, and the replay's are close to them."""
    if outputs is None or prop.margin(outputs) != 0:
        return False
    exact = np.array([float(v) for v in outputs])
    return bool((np.abs(replayed - exact) <= _NEAR * np.abs(exact).max(initial=1.0)).all())


def representable(prop: Property, point: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """Return the float32 numbers next to those of a point, within the box where it has one."""
    found = []
    for i, value in enumerate(point):
        low, high = prop.box.bounds(i)
        nearest_one = np.float32(float(value))
        near = (nearest_one, above(nearest_one), below(nearest_one))
        fitting = (Fraction(float(v)) for v in near if np.isfinite(v) and low <= Fraction(float(v)) <= high)
        found.append(next(fitting, Fraction(value)))
    return tuple(found)


def _evaluated(query: Query, witness: Sequence[Fraction]) -> Confirmation:
    """Check that an evaluation in the network's arithmetic maps a point of float32 numbers into the unsafe set."""
    network, prop = query.network, query.property
    x = np.array([float(v) for v in witness]).astype(np.float32)
    if any(Fraction(float(found)) != v for found, v in zip(x, witness, strict=True)) or not prop.admits(witness):
        return Confirmation(False, "the box has no point of float32 numbers there")
    said: list[str] = []
    best = Confirmation(False, f"there is no evaluation in {network.arithmetic} to be run here")
    for name, evaluate in EVALUATIONS.items():
        try:
            outputs = evaluate(network, x)
        except UnsupportedError as error:
            best = best if said else Confirmation(False, str(error))
            continue
        if outputs is None:
            continue
        finite = bool(np.isfinite(outputs).all())
        exactly = [Fraction(float(v)) for v in outputs] if finite else []
        violated = finite and prop.violated(exactly)
        said.append(f"{name} {'finds' if violated else 'does not find'} it unsafe")
        if violated and not best.confirmed:
            best = Confirmation(True, "", True, nearest(prop.margin(exactly)), tuple(exactly), outputs)
        elif not best.confirmed:
            best = Confirmation(False, "no evaluation that was run maps the point into the unsafe set")
    differ = best.confirmed and any("does not" in each for each in said)
    return replace(best, detail=f"evaluations differ at the point: {', '.join(said)}") if differ else best


@torch.no_grad()
def _by_operators(network: Network, x: np.ndarray) -> np.ndarray | None:
    """Return the outputs as torch computes them in float32, operator by operator, with operands and results rounded.

    Returns:
        The outputs, flat; None where the nodes are no operators: a maximum of the file is several of them.
    """
    if not all(OPERATORS[node][0](network, node) for node in network.nodes[1:]):
        return None
    operand, result = ROUNDED[network.arithmetic]
    values = [result(torch.from_numpy(x).reshape(1, *network.input_shape))]
    for node in network.to(torch.float32).nodes[1:]:
        inputs = [values[i] for i in node.inputs]
        if OPERATORS[node][1]:
            inputs, node = [operand(each) for each in inputs], node.map_tensors(operand)
        values.append(result(node.forward(*inputs)))
    return values[-1].numpy().reshape(-1)


def _sums(network: Network, node: Add) -> bool:
    # The summands of a sum that the file has are off by its rounding; a maximum is a sum here, and none there.
    return all(getattr(network.nodes[source], "weight_error", 0) for source in node.inputs)


def _gathers(network: Network, node: Sparse) -> bool:
    alone = ((node.weight != 0).sum(1) <= 1).all() & (node.weight.abs() <= 1).all()
    return bool(node.weight_error or alone)


OPERATORS: Table[tuple[Callable[[Network, Any], bool], bool]] = Table(
    "the run operator by operator",
    {
        Add: (_sums, False),
        **dict.fromkeys((Linear, Conv2d), (lambda network, node: bool(node.weight_error), True)),
        Affine: (lambda network, node: bool(node.weight_error), False),
        Sparse: (_gathers, False),
        Node: (lambda network, node: True, False),
    },
)
"""Predicate of nodes whose forward pass is an evaluation: they round as the model says, or compute nothing; and whether
a node is a product of matrices, whose operands are rounded."""


def _cut(x: Tensor) -> Tensor:
    return (x.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)


ROUNDED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "float32": (lambda x: x, lambda x: x),
    "tf32": (_cut, lambda x: x),
    "bfloat16": (lambda x: x, lambda x: x.bfloat16().float()),
    "float16": (lambda x: x, lambda x: x.half().float()),
}
"""How an arithmetic rounds float32 operands of products of matrices, and results."""

EVALUATIONS: dict[str, Callable[[Network, np.ndarray], np.ndarray | None]] = {
    "onnxruntime": lambda network, x: replay(network, x) if network.arithmetic == "float32" else None,
    "torch, operator by operator,": _by_operators,
}
"""The evaluations that can be run here, by name; None where one is none in the network's arithmetic."""
