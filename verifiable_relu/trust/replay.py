"""Judging a counterexample: exact evaluation in the network's own numbers, and a replay by onnxruntime.

Neither knows how the counterexample was found. Both must agree before *sat* is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.graph import Network
from verifiable_relu.runtime import kept_session
from verifiable_relu.spec.property import Property, Query, nearest
from verifiable_relu.trust.enclose import enclose, margin_range
from verifiable_relu.trust.exact import evaluable, evaluate_exact, multiplications

_EXACT_PRODUCTS = 4_000_000
"""Up to so many multiplications a network is evaluated exactly at once (half a second); above, only if need be."""

_DTYPES = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}


@dataclass(frozen=True)
class Confirmation:
    """What became of a claimed counterexample.

    Attributes:
        confirmed: whether the point is in the box, real arithmetic puts its outputs into the unsafe set, and so
            does onnxruntime in the file's own floating point.
        detail: the first of these that failed; empty if confirmed.
        exact: whether real arithmetic was exact. If not, it was a float64 evaluation whose proven error bound
            leaves no doubt: the whole range of possible margins is negative.
        margin: the margin in real arithmetic, rounded to float; without exactness the upper end of its range.
        outputs: the exact outputs, where they were computed.
        replayed: onnxruntime's outputs, flat.
    """

    confirmed: bool
    detail: str = ""
    exact: bool = False
    margin: float | None = None
    outputs: tuple[Fraction, ...] | None = None
    replayed: np.ndarray | None = None


@lru_cache(maxsize=8)
def _written(network: Network) -> bytes:
    """The ONNX file of a network that was made from torch."""
    # Imported here, because networks that came from a file never need writing.
    from verifiable_relu.network import write_onnx

    return write_onnx(network)


def replay(network: Network, x: np.ndarray) -> np.ndarray:
    """The network's outputs at a float32 point as onnxruntime computes them from the ONNX file.

    Args:
        network: read from an ONNX file, or anything that can be written as one.
        x: float32, one sample of any shape with ``input_size`` elements; widened if the file wants doubles.

    Returns:
        The outputs, flat, in the file's own dtype.

    Raises:
        UnsupportedError: if onnxruntime does not run the file.
    """
    shape = (1, *network.input_shape) if network.batched else network.input_shape
    try:
        loaded = kept_session(network.onnx if network.onnx is not None else _written(network))
        (declared,) = loaded.get_inputs()
        sample = np.asarray(x, np.float32).reshape(shape).astype(_DTYPES[declared.type])
        (outputs, *_) = loaded.run(None, {declared.name: sample})
    except Exception as error:
        raise UnsupportedError(f"onnxruntime cannot run the network '{network.name}': {error}") from error
    return np.asarray(outputs).reshape(-1)


@dataclass(frozen=True)
class _Judgement:
    violated: bool
    exact: bool
    margin: float | None
    outputs: tuple[Fraction, ...] | None
    detail: str = ""


def _judge(network: Network, prop: Property, x: Sequence[Fraction]) -> _Judgement:
    """Whether real arithmetic puts the outputs at x into the unsafe set."""
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
    """Judge a claimed counterexample (see :class:`Confirmation`); never raises for a bad one.

    The box is demanded of the exact point alone: replay rounds it to float32, which may leave a box whose
    decimals are no float32 numbers. The latest judgement is kept: who claims a counterexample often asks first, and
    who records it asks for the same one.
    """
    return _confirmation(query, tuple(witness))


@lru_cache(maxsize=1)
def _confirmation(query: Query, witness: tuple[Fraction, ...]) -> Confirmation:
    network, prop = query.network.limit, query.property
    if len(witness) != network.input_size:
        return Confirmation(False, f"the point has {len(witness)} coordinates, the network {network.input_size} inputs")
    if not prop.box.contains(witness):
        return Confirmation(False, "the point is outside the box")
    try:
        judged = _judge(network, prop, witness)
    except UnsupportedError as error:
        return Confirmation(False, str(error))
    # What overflows float32 becomes infinite, and is not confirmed.
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
            detail = "real arithmetic confirms the counterexample, onnxruntime's replay does not"
        case False, True:
            detail = f"onnxruntime's replay confirms the counterexample, real arithmetic does not: {judged.detail}"
        case _:
            detail = f"neither real arithmetic nor onnxruntime's replay confirms the counterexample: {judged.detail}"
    return Confirmation(judged.violated and repeated, detail, judged.exact, judged.margin, judged.outputs, replayed)
