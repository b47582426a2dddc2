"""Does what the checker of certificates makes of an ONNX file agree with the file?

The referees are those of ``onnx_agreement``. A file that onnx itself or onnxruntime refuses has no meaning that
a certificate could speak of: the checker is to refuse it, too.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from verifiable_relu.check import BadInput, Refused
from verifiable_relu.check.checker import enclosed, evaluated
from verifiable_relu.check.graph import Graph
from verifiable_relu.check.model import read_model

from . import onnx_exact
from .onnx_agreement import LARGEST, Disagreement, Judgement, Source, points


def judge(data: bytes, seed: int = 0) -> Judgement:
    """Read a file with the checker's reader, and compare; exceptions that are no BadInput are disagreements too."""
    found = Judgement()

    def disagree(kind: str, detail: object) -> None:
        found.disagreements.append(Disagreement(kind, " ".join(str(detail).split())[:300]))

    try:
        graph = read_model(data)
    except BadInput as error:
        found.refused = str(error)
        return found
    except Exception as error:  # the reader promises that there is no other
        disagree(f"exception {type(error).__name__}", error)
        return found
    try:
        source = Source(data)
    except ValueError as refusal:
        found.invalid = str(refusal)
        disagree("read though " + found.invalid.split(":")[0] + " refuses it", found.invalid)
        return found
    if len(source.inputs) != 1 or len(source.model.graph.output) != 1:
        disagree("read though there is not one input and one output", len(source.inputs))
        return found
    if sum(node.size for node in graph.nodes) <= LARGEST:
        try:
            for x in points(source.shape, seed):
                if (one := _at(graph, source, x, found)) is not None:
                    found.disagreements.append(one)
                    break
        except Exception as error:
            disagree(f"read though a referee fails by {type(error).__name__}", error)
    return found


def _at(graph: Graph, source: Source, x: np.ndarray, found: Judgement) -> Disagreement | None:
    """What disagrees at a point."""
    point = [Fraction(float(value)) for value in x.ravel()]
    try:
        ours, ends = evaluated(graph, point), enclosed(graph, point)
    except Refused:
        found.compared["too large"] += 1
        return None
    except Exception as error:
        return Disagreement(f"exception {type(error).__name__} at a point", str(error)[:200])
    try:
        result = onnx_exact.exact(source.model, {source.inputs[0].name: x})
    except onnx_exact.UnknownOperatorError:
        theirs = source.run(x).astype(np.float64).ravel()
        found.compared["source alone"] += 1
        agree = len(theirs) == len(ends) and np.allclose(theirs, [float(v) for v, _ in ends], rtol=1e-3, atol=1e-3)
        return None if agree else Disagreement("another value than that of " + source.runner, f"{theirs[:4]}")
    expected = result[source.model.graph.output[0].name].ravel().tolist()
    found.compared["enclosed" if ours is None else "exact"] += 1
    # Beside 1, the evaluator has curves to 60 digits; the checker has what is left of a GELU far below 0.
    off = 0 if ours is not None else Fraction(1, 10**50)
    inside = all(low - off <= value <= high + off for (low, high), value in zip(ends, expected, strict=True))
    if not inside or (ours is not None and ours != [Fraction(value) for value in expected]):
        return Disagreement("another value", f"{[float(v) for v, _ in ends[:4]]}, {[float(v) for v in expected[:4]]}")
    # The rational evaluator does not run what onnxruntime refuses only when it runs.
    if source.session is not None:
        try:
            source.run(x)
        except Exception as error:
            return Disagreement("read though onnxruntime cannot run it", str(error)[:300])
    return None
