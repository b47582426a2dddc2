"""The check of a claimed counterexample: in real arithmetic on the network's own weights, and by a replay.

The replay runs the network's source: its file in onnxruntime, or its module in torch.

Neither check knows how the counterexample was found. Both must confirm it before the verdict is *sat*. Where a network
stands for a runtime's evaluations (``Network.arithmetic``), a counterexample is an evaluation that one can run: in
onnxruntime, or operator by operator in torch, and real arithmetic is not used.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.execution.replay import evaluations, replay
from verifiable_relu.ir.enclosure import Enclosed, enclose, formats
from verifiable_relu.ir.exact import evaluate_exact, is_evaluable, multiplications
from verifiable_relu.ir.network import Network
from verifiable_relu.rounding import above, below
from verifiable_relu.spec.property import Property, nearest

EXACT_PRODUCTS = 4_000_000
"""The most multiplications with which a network is evaluated exactly straight away, which takes about 0.5 s.

With more, the network is evaluated in float64 with error bounds first, and exactly only where these leave doubt.
"""

NEAR = 2.0**-10
"""The part of the largest exact output by which the replay may differ where a point is confirmed in spite of it."""


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


def confirm(network: Network, prop: Property, witness: Sequence[Fraction]) -> Confirmation:
    """Check a claimed counterexample; a wrong claim is a ``Confirmation`` that says so, never an exception.

    Only the exact point must lie in the box: onnxruntime takes the point rounded to float32, which may lie outside a
    box whose bounds are no float32 numbers.

    Args:
        network: the network; of a set of networks the limit is meant.
        prop: the property.
        witness: (input_size,).
    """
    network = network.limit
    if len(witness) != network.input_size:
        return Confirmation(False, f"the point has {len(witness)} coordinates, the network {network.input_size} inputs")
    # A coordinate beyond float32 becomes infinite; the point is then not confirmed.
    with np.errstate(over="ignore"):
        rounded = np.array([float(v) for v in witness]).astype(np.float32)
    if network.arithmetic != "real":
        if any(Fraction(float(near)) != v for near, v in zip(rounded, witness, strict=True)) or not prop.admits(
            witness
        ):
            return Confirmation(False, "the box has no point of float32 numbers there")
        return _evaluated(network, prop, rounded)
    if not prop.admits(witness):
        return Confirmation(False, f"the point is outside the {'box' if prop.ball is None else 'ball'}")
    judged = Confirmation(False)
    try:
        judged = _judge(network, prop, witness)
        judged = replace(judged, replayed=replay(network, rounded))
    except UnsupportedError as error:
        return replace(judged, confirmed=False, detail=str(error))
    assert judged.replayed is not None
    repeated, confirmed = _is_unsafe(prop, judged.replayed), judged.confirmed
    if confirmed and repeated:
        return judged
    if confirmed and _touches(prop, judged.outputs, judged.replayed):
        # Floating-point numbers cannot be expected to hit a set that exact outputs only touch.
        detail = "the exact outputs reach the boundary of the unsafe set, which the replay in float32 misses"
    elif confirmed:
        confirmed, detail = False, "real arithmetic confirms the counterexample, the replay does not"
    elif repeated:
        detail = f"the replay confirms the counterexample, real arithmetic does not: {judged.detail}"
    else:
        detail = f"neither real arithmetic nor the replay confirms the counterexample: {judged.detail}"
    return replace(judged, confirmed=confirmed, detail=detail)


def _judge(network: Network, prop: Property, x: Sequence[Fraction]) -> Confirmation:
    """Return the confirmation of a point by real arithmetic; a margin that stays open counts as not violated."""
    exactly = is_evaluable(network)
    if exactly and multiplications(network) <= EXACT_PRODUCTS:
        return _at(prop, evaluate_exact(network, x))
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
    if exactly:
        return _at(prop, evaluate_exact(network, x))
    said = f"arithmetic with error bounds leaves its margin between {nearest(low):.6g} and {nearest(high):.6g}"
    return Confirmation(False, f"{said}, and this network has no exact evaluation", margin=nearest(high))


def _at(prop: Property, outputs: Sequence[Fraction]) -> Confirmation:
    """Return the confirmation of a point by its exact outputs."""
    margin, violated = nearest(prop.margin(outputs)), prop.violated(outputs)
    return Confirmation(violated, "" if violated else f"its exact margin is {margin:.6g}", True, margin, tuple(outputs))


def margin_range(prop: Property, y: Enclosed) -> tuple[Fraction | float, Fraction | float]:
    """Return a lower and an upper bound of a property's margin at the true outputs that ``y`` encloses.

    The bounds are computed in rational arithmetic, so that the errors of ``y`` alone widen the range.

    Returns:
        (lower, upper); (−inf, inf) if an output or its error is not finite.
    """
    if not (np.isfinite(y.value).all() and np.isfinite(y.error).all()):
        return -math.inf, math.inf
    center, error = ([Fraction(*v.as_integer_ratio()) for v in part] for part in (y.value, y.error))
    low: Fraction | float = math.inf
    high: Fraction | float = math.inf
    for polytope in prop.unsafe:
        slacks = [row.slack(center) for row in polytope]
        spreads = [sum((abs(c) * error[i] for i, c in row.coefficients), Fraction(0)) for row in polytope]
        low = min(low, max(map(operator.sub, slacks, spreads), default=-math.inf))
        high = min(high, max(map(operator.add, slacks, spreads), default=-math.inf))
    return low, high


def _is_unsafe(prop: Property, outputs: np.ndarray) -> bool:
    return bool(np.isfinite(outputs).all()) and prop.violated([Fraction(float(v)) for v in outputs])


def _touches(prop: Property, outputs: Sequence[Fraction] | None, replayed: np.ndarray) -> bool:
    """Return True if exact outputs lie on the boundary of the unsafe set, and the replay's are close to them."""
    if outputs is None or prop.margin(outputs) != 0:
        return False
    exact = np.array([float(v) for v in outputs])
    return bool((np.abs(replayed - exact) <= NEAR * np.abs(exact).max(initial=1.0)).all())


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


def _evaluated(network: Network, prop: Property, x: np.ndarray) -> Confirmation:
    """Check that an evaluation in the network's arithmetic maps a point of float32 numbers into the unsafe set."""
    said: list[str] = []
    best = Confirmation(False, f"there is no evaluation in {network.arithmetic} to be run here")
    for name, evaluate in evaluations(network, x):
        try:
            outputs = evaluate()
        except UnsupportedError as error:
            best = best if said else Confirmation(False, str(error))
            continue
        violated = _is_unsafe(prop, outputs)
        said.append(f"{name} {'finds' if violated else 'does not find'} it unsafe")
        if violated and not best.confirmed:
            exactly = tuple(Fraction(float(v)) for v in outputs)
            best = Confirmation(True, "", True, nearest(prop.margin(exactly)), exactly, outputs)
        elif not best.confirmed:
            best = Confirmation(False, "no evaluation that was run maps the point into the unsafe set")
    differ = best.confirmed and any("does not" in each for each in said)
    return replace(best, detail=f"evaluations differ at the point: {', '.join(said)}") if differ else best
