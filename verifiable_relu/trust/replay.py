"""The check of a claimed counterexample: by real arithmetic on the network's own weights, and by a run.

What runs is what the network was read from: its file in onnxruntime, or the module in torch.

Neither check knows how the counterexample was found. Both must confirm it before the verdict is *sat*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import torch

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.graph import Network
from verifiable_relu.runtime import kept_session
from verifiable_relu.spec.property import Property, Query, nearest
from verifiable_relu.trust.enclose import enclose, margin_range
from verifiable_relu.trust.exact import evaluable, evaluate_exact, multiplications

_EXACT_PRODUCTS = 4_000_000
"""The most multiplications with which a network is evaluated exactly straight away, which takes about 0.5 s.

With more, the network is evaluated in float64 with error bounds first, and exactly only where these leave doubt.
"""

_DTYPES = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}


@dataclass(frozen=True)
class Confirmation:
    """The result of checking a claimed counterexample.

    Attributes:
        confirmed: whether three conditions hold: the point is in the box, its outputs in real arithmetic are in the
            unsafe set, and so are the outputs of the replay (``replay``), in its own floating-point format.
        detail: which condition failed, and by how much; empty if confirmed.
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


@lru_cache(maxsize=8)
def _written(network: Network) -> bytes | None:
    """The content of an ONNX file written for a network that was not read from one; None if none can be written."""
    # Imported here to spare the start-up of commands, whose networks come from files and are never written.
    from verifiable_relu.network import write_onnx

    try:
        return write_onnx(network, rounded=True)
    except UnsupportedError:
        return None


def replay(network: Network, x: np.ndarray) -> np.ndarray:
    """The network's outputs at a float32 point, as they are computed where it is used.

    A module that it was read from is run itself. Otherwise onnxruntime runs the file that it was read from, or one that
    is written for it; where none can be written, torch evaluates the network in float32.

    Args:
        network: with one input.
        x: one sample of any shape with ``input_size`` elements, float32; converted to the input dtype that the module
            or file declares.

    Returns:
        The outputs, flat, in their own dtype.

    Raises:
        UnsupportedError: if the module or the file does not run.
    """
    shape = (1, *network.input_shape) if network.batched else network.input_shape
    sample = np.asarray(x, np.float32).reshape(shape)
    run, by = network.run, "onnxruntime" if network.run is None else "torch"
    try:
        if run is None:
            data = network.onnx if network.onnx is not None else _written(network)
            if data is not None:
                loaded = kept_session(data)
                (declared,) = loaded.get_inputs()
                (outputs, *_) = loaded.run(None, {declared.name: sample.astype(_DTYPES[declared.type])})
                return np.asarray(outputs).reshape(-1)
            run = network
        outputs = run(torch.from_numpy(sample.reshape(1, *network.input_shape))).numpy()
    except Exception as error:
        raise UnsupportedError(f"{by} cannot run the network '{network.name}': {error}") from error
    return np.asarray(outputs).reshape(-1)


@dataclass(frozen=True)
class _Judgement:
    """What real arithmetic says of a point; the fields mean the same as those of ``Confirmation``."""

    violated: bool
    exact: bool
    margin: float | None
    outputs: tuple[Fraction, ...] | None
    detail: str = ""


def _judge(network: Network, prop: Property, x: Sequence[Fraction]) -> _Judgement:
    """Whether the outputs at x are in the unsafe set in real arithmetic; a margin that is still open counts as no."""
    exactly = evaluable(network)
    if not exactly or multiplications(network) > _EXACT_PRODUCTS:
        low, high = margin_range(prop, enclose(network, x))
        if high < 0:
            return _Judgement(True, False, nearest(high), None)
        if low > 0:
            return _Judgement(
                False, False, nearest(high), None, f"its margin in real arithmetic is at least {nearest(low):.6g}"
            )
        if not exactly:
            return _Judgement(
                False,
                False,
                nearest(high),
                None,
                f"float64 leaves its margin between {nearest(low):.6g} and {nearest(high):.6g}, "
                "and this network has no exact evaluation",
            )
    outputs = tuple(evaluate_exact(network, x))
    margin = nearest(prop.margin(outputs))
    violated = prop.violated(outputs)
    return _Judgement(violated, True, margin, outputs, "" if violated else f"its exact margin is {margin:.6g}")


def confirm(query: Query, witness: Sequence[Fraction]) -> Confirmation:
    """Check a claimed counterexample; a wrong claim is a ``Confirmation`` that says so, never an exception.

    Only the exact point must lie in the box: onnxruntime takes the point rounded to float32, which may lie outside a
    box whose bounds are no float32 numbers.

    Args:
        query: the network and the property.
        witness: the input variables in row-major order.
    """
    network, prop = query.network.limit, query.property
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
        return Confirmation(False, str(error), judged.exact, judged.margin, judged.outputs)
    finite = bool(np.isfinite(replayed).all())
    repeated = finite and prop.violated([Fraction(float(v)) for v in replayed])
    match judged.violated, repeated:
        case True, True:
            detail = ""
        case True, False:
            detail = "real arithmetic confirms the counterexample, the replay does not"
        case False, True:
            detail = f"the replay confirms the counterexample, real arithmetic does not: {judged.detail}"
        case _:
            detail = f"neither real arithmetic nor the replay confirms the counterexample: {judged.detail}"
    return Confirmation(judged.violated and repeated, detail, judged.exact, judged.margin, judged.outputs, replayed)
