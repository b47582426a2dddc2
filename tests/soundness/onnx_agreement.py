"""Does what ``read_onnx`` makes of a file agree with the file? Two referees that share no code with the reader say so.

The referees are onnxruntime (onnx's own reference evaluator where onnxruntime has no kernel) and the rational evaluator
of ``onnx_exact``. Tolerances come from the magnitudes of the intermediate values, which are computed for each file and
point: the unit roundoff times ``ROUNDINGS`` times what the output would be without cancellation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from verifiable_relu.errors import InputError
from verifiable_relu.ir.exact import evaluate_exact, is_evaluable
from verifiable_relu.ir.network import Affine, Network
from verifiable_relu.readers import read_onnx

from . import onnx_exact
from .onnx_graphs import Case, graph

# After the package, which switches onnxruntime's telemetry off before onnxruntime is first imported.
import onnxruntime  # isort: skip

ROUNDINGS = 64
POINTS = 3
LARGEST = 5_000
"""Files whose values have more entries in all are not compared: rational numbers are slow."""
LONGEST_LINE = 500
"""Most characters of an error message."""

onnxruntime.set_default_logger_severity(4)


def _session(data: bytes, level: Any) -> onnxruntime.InferenceSession:
    """Load a file with one thread, optimised as the level says."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = level
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


class Source:
    """A file as onnxruntime, or onnx's reference evaluator, runs it.

    Attributes:
        session: onnxruntime without optimisation; None if it lacks an operator.
        default: onnxruntime as it comes, with its own optimisations; None if it fails to optimise the file.

    Raises:
        ValueError: if onnx's checker or onnxruntime refuses the file, with the first line of what they say.
    """

    def __init__(self, data: bytes) -> None:
        try:
            self.model = onnx.load_model_from_string(data)
            lacking = [output for output in self.model.graph.output if not output.type.tensor_type.HasField("shape")]
            for output in lacking:
                # Such files are read: what follows from the operators stands for what is not said.
                inferred = onnx.shape_inference.infer_shapes(self.model).graph.output
                output.CopyFrom(next(other for other in inferred if other.name == output.name))
            onnx.checker.check_model(self.model if lacking else data, full_check=True)
        except Exception as refusal:
            raise ValueError("onnx.checker: " + " ".join(str(refusal).split())[:200]) from refusal
        self.session = self.default = None
        try:
            self.session = _session(data, onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)
        except Exception as refusal:
            if type(refusal).__name__ != "NotImplemented":
                raise ValueError("onnxruntime: " + " ".join(str(refusal).split())[:200]) from refusal
        # A version may fail to optimise a file that it runs.
        with suppress(Exception):
            self.default = _session(data, onnxruntime.SessionOptions().graph_optimization_level)
        stored = {tensor.name for tensor in self.model.graph.initializer}
        self.inputs = [declared for declared in self.model.graph.input if declared.name not in stored]

    @property
    def runner(self) -> str:
        return "onnxruntime" if self.session is not None else "onnx.reference"

    def reference(self) -> ReferenceEvaluator:
        plain = onnx.ModelProto()
        plain.CopyFrom(self.model)
        for opset in plain.opset_import:  # the reference evaluator does not know the domain's other name
            opset.domain = "" if opset.domain == "ai.onnx" else opset.domain
        return ReferenceEvaluator(plain)

    @property
    def trusted_by_reference(self) -> bool:
        """Whether onnx's reference evaluator is right.

        In old opsets it normalises batches as in training, and MaxPool with ``auto_pad`` has another shape there.
        """
        old = next(o.version for o in self.model.opset_import if o.domain in ("", "ai.onnx")) < 14
        wrong = {"MaxPool", "BatchNormalization"} if old else {"MaxPool"}
        return all(node.op_type not in wrong for node in self.model.graph.node)

    @property
    def trusted(self) -> bool:
        """Whether the runner is a referee."""
        return self.session is not None or self.trusted_by_reference

    @property
    def dtype(self) -> np.dtype:
        """The type of the first input."""
        return onnx.helper.tensor_dtype_to_np_dtype(self.inputs[0].type.tensor_type.elem_type)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first input, every size that is no number taken as 1."""
        dims = self.inputs[0].type.tensor_type.shape.dim
        return tuple(dim.dim_value if dim.HasField("dim_value") else 1 for dim in dims)

    @property
    def double(self) -> bool:
        """Whether no value of the file is of a type narrower than float64."""
        graph = onnx.shape_inference.infer_shapes(self.model).graph
        infos = [*graph.input, *graph.value_info, *graph.output]
        return all(i.type.tensor_type.elem_type not in (TensorProto.FLOAT, TensorProto.FLOAT16) for i in infos)

    def run(self, x: np.ndarray, default: bool = False) -> np.ndarray:
        """Return the first output at a point, by the session without optimisation or the default one."""
        feed = {self.inputs[0].name: x.astype(self.dtype)}
        with np.errstate(all="ignore"):
            made = ((self.default if default else self.session) or self.reference()).run(None, feed)
        return np.asarray(made[0])


def points(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """``POINTS`` points with coordinates that are multiples of 1/8: near zero, near one, and larger."""
    rng = np.random.default_rng(seed)
    made = [np.round(rng.normal(size=shape) * scale * 8) / 8 for scale in (1.0, 3.0, 40.0)]
    return np.stack(made[:POINTS])


@dataclass(frozen=True)
class Disagreement:
    """What is wrong: a kind to count by, and the particulars."""

    kind: str
    detail: str


def bad_line(error: InputError) -> str | None:
    """What keeps the text of an error from being one printable line of bounded length."""
    text = str(error)
    if len(text) > LONGEST_LINE:
        return f"{len(text)} characters"
    if not text.strip() or not all(c.isprintable() for c in text):
        return f"a character that is not printable: {text[:80]!r}"
    return None


@dataclass
class Judgement:
    """One file: was it refused, and by whom; else on what do readings of it disagree?"""

    refused: str | None = None
    invalid: str | None = None
    disagreements: list[Disagreement] = field(default_factory=list)
    compared: Counter[str] = field(default_factory=Counter)


def judge(data: bytes, seed: int = 0) -> Judgement:
    """Read a file and compare; exceptions that are no InputError are disagreements too."""
    found = Judgement()

    def disagree(kind: str, detail: object) -> None:
        found.disagreements.append(Disagreement(kind, " ".join(str(detail).split())[:300]))

    network = None
    try:
        network = read_onnx(data)
    except InputError as error:
        found.refused = error.message
        if (fault := bad_line(error)) is not None:
            disagree("an error that is not one line", fault)
    except Exception as error:  # the reader promises that there is no other
        disagree(f"exception {type(error).__name__}", error)
    if network is None and not found.disagreements and found.refused is not None:
        return found
    try:
        source = Source(data)
    except ValueError as refusal:
        found.invalid = str(refusal)
        if network is not None:
            disagree("read though " + found.invalid.split(":")[0] + " refuses it", found.invalid)
        return found
    if network is not None:
        for one in differences(network, source, seed, found.compared):
            disagree(one.kind, one.detail)
    return found


def differences(network: Network, source: Source, seed: int, compared: Counter[str]) -> Iterator[Disagreement]:
    """Where a network and its file disagree, at a few points."""
    if len(source.inputs) != 1 or len(source.model.graph.output) != 1:
        yield from several(network, source, seed, compared)
        return
    shape = source.shape
    if min(shape, default=1) < 1:
        yield Disagreement("read though a size is not positive", shape)
        return
    if network.source.input_shape != (shape[1:] if network.source.batched else shape):
        yield Disagreement("another input shape", f"{network.source.input_shape}, of the file {shape}")
        return
    if sum(op.size for op in network.ops) > LARGEST:
        compared["too large"] += 1
        return
    xs = points(shape, seed)
    ours = network(torch.from_numpy(xs.reshape(len(xs), -1))).double().numpy()
    unit = 2.0**-53 if source.double and source.runner == "onnxruntime" else 2.0**-24
    least, most = (1e-280, 1e290) if source.double else (1e-34, 1e37)
    for x, mine in zip(xs, ours, strict=True):
        try:
            size = onnx_exact.magnitudes(source.model, {source.inputs[0].name: x})
            true = onnx_exact.exact(source.model, {source.inputs[0].name: x})
        except onnx_exact.UnknownOperatorError as error:
            yield from roughly(mine, x, source, error, compared)
            return
        except Exception as error:
            yield Disagreement("referee: the rational evaluator fails", f"{type(error).__name__}: {error}")
            return
        output = source.model.graph.output[0].name
        expected, reach = true[output].reshape(-1), size[output].reshape(-1).astype(np.float64)
        if len(expected) != mine.size:
            yield Disagreement("another output size", f"{mine.size} instead of {len(expected)}")
            return
        reals = [v.array for v in true.values.values() if v.kind in onnx_exact.REALS]
        entries = [abs(float(v)) if abs(v) < 10**300 else np.inf for array in reals for v in array.reshape(-1) if v]
        largest = max(
            (float(np.max(v.array)) for v in size.values.values() if v.array.size and v.kind in onnx_exact.REALS),
            default=0.0,
        )
        smallest = min(entries, default=1.0)
        floats = np.array([float(v) if abs(v) < 10**300 else np.inf for v in expected])

        def furthest(found: np.ndarray, tolerance: np.ndarray, floats: np.ndarray = floats) -> str | None:
            with np.errstate(all="ignore"):
                off = np.abs(found - floats)
                bad = ~(off <= tolerance)
            if not bad.any():
                return None
            at = int(np.argmax(np.where(bad, off / np.maximum(tolerance, 1e-300), 0)))
            return f"{found[at]!r} instead of {floats[at]!r}, tolerance {tolerance[at]:.3g}"

        if least < smallest and largest < most and source.trusted:
            try:
                theirs = source.run(x).astype(np.float64).reshape(-1)
            except Exception as error:
                if source.session is not None:
                    yield Disagreement("read though onnxruntime cannot run it", error)
                    return
                theirs = floats  # the reference evaluator knows less than the standard
            else:
                compared[source.runner] += 1
            if detail := furthest(theirs, ROUNDINGS * unit * reach):
                yield Disagreement(f"referees: {source.runner} against rational evaluation", detail)
                return
            if source.default is not None:
                compared["onnxruntime, default options"] += 1
                optimised = source.run(x, default=True).astype(np.float64).reshape(-1)
                if detail := furthest(optimised, ROUNDINGS * unit * reach):
                    yield Disagreement("onnxruntime with default options against rational evaluation", detail)
                    return
        if smallest > 1e-280 and largest < 1e290:
            compared["float64"] += 1
            error = doubt(network)
            if error > 1e-12:
                yield Disagreement("weights are known too roughly", error)
            if detail := furthest(mine, ROUNDINGS * (2.0**-53 + min(error, 1e-12)) * reach):
                kind = "another value" if furthest(mine, ROUNDINGS * 2.0**-24 * reach) else "a value to fewer digits"
                yield Disagreement(kind, f"at {x.reshape(-1).tolist()[:6]}: {detail}")
                return
        if is_evaluable(network):
            compared["exact"] += 1
            found = evaluate_exact(network, [Fraction(float(v)) for v in x.reshape(-1)])
            wrong = [(p, q) for p, q in zip(found, expected, strict=True) if p != q]
            if wrong or not true.values[output].exact:
                what = (
                    "said to be exact and is not" if true.values[output].exact else "said to be exact and is irrational"
                )
                difference = float(abs(wrong[0][0] - wrong[0][1])) if wrong else 0.0
                yield Disagreement(what, f"off by {difference:.3g}")
                return


def doubt(network: Network) -> float:
    """The largest relative error of a weight or bias."""
    found = [0.0]
    for op in network.ops:
        if isinstance(op, Affine):
            found.append(op.weight_error)
            if op.bias is not None and op.bias_error is not None:
                found.append(float((op.bias_error / op.bias.double().abs().clamp(min=1e-300)).max()))
    return max(found)


def several(network: Network, source: Source, seed: int, compared: Counter[str]) -> Iterator[Disagreement]:
    """The comparison with the source alone, where the file has several inputs or outputs."""
    shapes = [tuple(dim.dim_value or 1 for dim in declared.type.tensor_type.shape.dim) for declared in source.inputs]
    if sum(map(math.prod, shapes)) != network.input_size:
        yield Disagreement("another number of inputs", f"{network.input_size} for {shapes}")
        return
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    outputs = [o.name for o in source.model.graph.output if o.type.tensor_type.elem_type in (1, 10, 11)]
    for x in points((network.input_size,), seed):
        parts = zip(source.inputs, shapes, np.split(x, ends), strict=True)
        feed = {declared.name: part.reshape(shape).astype(source.dtype) for declared, shape, part in parts}
        mine = network(torch.from_numpy(x.reshape(1, -1))).double().numpy().reshape(-1)
        try:
            with np.errstate(all="ignore"):
                made = (source.session or source.reference()).run(outputs, feed)
        except Exception as error:
            yield Disagreement(f"read though {source.runner} cannot run it", error)
            return
        theirs = np.concatenate([np.asarray(one).astype(np.float64).reshape(-1) for one in made])
        compared["several inputs or outputs"] += 1
        if not _near(mine, theirs):
            yield Disagreement(f"another value than that of {source.runner}", f"{mine[:4]}, {theirs[:4]}")
            return


def _near(mine: np.ndarray, theirs: np.ndarray) -> bool:
    """Whether values computed in floating point differ by no more than rounding in float32 explains."""
    if theirs.shape != mine.shape:
        return False
    # What is divided by zero has no value; floating point has several for it.
    either = np.isfinite(theirs) | np.isfinite(mine)
    with np.errstate(all="ignore"):
        return bool(np.allclose(theirs[either], mine[either], rtol=1e-3, atol=1e-3))


def roughly(
    mine: np.ndarray, x: np.ndarray, source: Source, unknown: Exception, compared: Counter[str]
) -> Iterator[Disagreement]:
    """The comparison with the source alone, where the rational evaluator does not know an operator."""
    try:
        theirs = source.run(x).astype(np.float64).reshape(-1)
    except Exception as error:
        yield Disagreement(f"no referee: {source.runner} cannot run it, and {unknown}", error)
        return
    compared["source alone"] += 1
    if not _near(mine, theirs):
        yield Disagreement(f"another value than that of {source.runner}", f"{unknown}: {mine[:4]}, {theirs[:4]}")


def cases(count: int, seed: int) -> Iterator[Case]:
    return (graph(seed * 1_000_000 + index) for index in range(count))
