"""Operators on single elements: moves, sums and products, functions of one variable, comparisons and choices.

Operators that only move elements are run, in the standard's reference evaluator, on the numbers of their
inputs' elements in place of the elements. The result says for each element where it comes from.

A truth value is 0 or 1, and numbers of an integer type are numbers; one beyond the range of its type has no meaning in
the standard, and is the number here. With the sign s of a difference d, d > 0 is max(s, 0) and d = 0 is 1 − |s|. Where
d is a whole number whatever the input is, nothing needs to jump: d > 0 is min(max(d, 0), 1), and d = 0 is
max(1 − |d|, 0), which rounding errors of d hardly change.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.functions.curves import CURVES
from verifiable_relu.ir.functions.steps import STEPS
from verifiable_relu.ir.linear import Diagonal
from verifiable_relu.ir.network import Affine, Elementwise
from verifiable_relu.readers.builder import Value, as_tensor, tensor
from verifiable_relu.readers.derived import Derived, logarithm, rounded
from verifiable_relu.readers.onnx.call import NodeCall, Result, converts, operands
from verifiable_relu.readers.onnx.constants import numbered_places
from verifiable_relu.rounding import SOFTPLUS_SHARE, largest

FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)
WHOLE = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)

FAR = 2.0**12
"""Beyond it, an end is not added to and subtracted from values: rounding, relative to the end, would drown them.

The form for nearer ends has one use of the value instead of two, and so has tighter intervals.
"""

# Moves

SINCE_21 = (21, 23, 24, 25)
"""Since opset 21 these versions of the operators below have added nothing but element types."""


def moved(call: NodeCall, data: Sequence[int]) -> list[Result]:
    """Return the results of an operator that moves elements: it is run on the elements' numbers, from 1 on.

    ``data`` are the places of the inputs whose elements are moved, −1 for all; the others must be constants.
    """
    call.refuse(reduction=b"none")
    is_moved = [given is not None and (i in data or -1 in data) for i, given in enumerate(call.inputs)]
    inputs = [given if is_moved[i] else call.optional(i) for i, given in enumerate(call.inputs)]
    sources = [given for given, moves in zip(inputs, is_moved, strict=True) if given is not None and moves]
    node = onnx.NodeProto()
    node.CopyFrom(call.node)
    # Old versions of Pad name a number in an attribute.
    del node.attribute[:]
    node.attribute.extend(attribute for attribute in call.node.attribute if attribute.name != "value")
    found = numbered_places(node, inputs, is_moved, call.opset)
    if call.op.startswith("Scatter"):
        first, last = math.prod(sources[0].shape) + 1, sum(math.prod(given.shape) for given in sources)
        if not np.isin(np.arange(first, last + 1), found[0]).all():
            raise UnsupportedError("writes one element twice")
    return [_placed(call, sources, numbers) for numbers in found]


def _placed(call: NodeCall, sources: Sequence[Result], numbers: np.ndarray) -> Result:
    """Return the tensor of the elements with these numbers, 0 standing for the node's own number."""
    if isinstance(sources[0], Value) and np.array_equal(numbers.reshape(-1), np.arange(1, sources[0].size + 1)):
        return sources[0].reshaped(numbers.shape)
    starts = list(itertools.accumulate((math.prod(given.shape) for given in sources), initial=0))
    if numbers.dtype.kind not in "iu" or (numbers.size and not 0 <= numbers.min() <= numbers.max() <= starts[-1]):
        raise UnsupportedError("combines numbers where it is expected to move them")
    flat = numbers.reshape(-1).astype(np.int64)
    rest = np.where(flat == 0, np.float32(call.get("value", 0.0)), np.float32(0))
    parts: list[tuple[Value, np.ndarray]] = []
    for start, end, given in zip(starts, starts[1:], sources, strict=False):
        mine = (flat > start) & (flat <= end)
        if mine.any() and isinstance(given, Value):
            parts.append((given, np.where(mine, flat - start - 1, -1)))
        elif mine.any():
            rest = np.where(mine, given.reshape(-1)[np.where(mine, flat - start - 1, 0)], rest)  # type: ignore[union-attr]
    return call.build.joined(parts, rest, numbers.shape) if parts else rest.reshape(numbers.shape)


for _operator, _versions, _data in (
    ("CenterCropPad", (18,), (0,)),
    ("Compress", (9, 11, 28), (0,)),
    ("Concat", (1, 4, 11, 13), (-1,)),
    ("DepthToSpace", (1, 11, 13, 28), (0,)),
    ("Expand", (8, 13), (0,)),
    ("Flatten", (1, 9, 11, 13, *SINCE_21), (0,)),
    ("Gather", (1, 11, 13), (0,)),
    ("GatherElements", (11, 13), (0,)),
    ("GatherND", (11, 12, 13), (0,)),
    ("Pad", (2, 11, 13, 18, 19, *SINCE_21), (0, 2)),
    ("Reshape", (5, 13, 14, 19, *SINCE_21), (0,)),
    ("ReverseSequence", (10, 28), (0,)),
    ("ScatterElements", (11, 13, 16, 18), (0, 2)),
    ("ScatterND", (11, 13, 16, 18), (0, 2)),
    ("Slice", (1, 10, 11, 13), (0,)),
    ("SpaceToDepth", (1, 13, 28), (0,)),
    ("Split", (2, 11, 13, 18), (0,)),
    ("Squeeze", (1, 11, 13, *SINCE_21), (0,)),
    ("Tile", (6, 13), (0,)),
    ("Transpose", (1, 13, *SINCE_21), (0,)),
    ("Trilu", (14,), (0,)),
    ("Unsqueeze", (1, 11, 13, *SINCE_21), (0,)),
):
    converts(_operator, *_versions)(functools.partial(moved, data=_data))

converts("Identity", 1, 13, 14, 16, 19, *SINCE_21)(NodeCall.value)


@converts("Dropout", 7, 10, 12, 13, 22)
def _dropout(call: NodeCall) -> Value:
    if (training := call.optional(2)) is not None and bool(training.any()):
        raise UnsupportedError("in training mode")
    return call.value()


# Sums, products and extremes of several operands, at least one of them computed


def _combined(
    call: NodeCall,
    terms: Sequence[Result | None],
    with_constant: Callable[[Value, Tensor], Value],
    with_value: Callable[[Value, Value], Value],
) -> Value:
    """Return what an operator that commutes makes of its operands: computed ones first, then constants."""
    total, *rest = sorted(terms, key=lambda term: not isinstance(term, Value))
    for term in rest:
        x, y = operands(call.build, total, term)
        assert isinstance(x, Value)
        total = with_value(x, y) if isinstance(y, Value) else with_constant(x, y)
    assert isinstance(total, Value)
    return total


def added(call: NodeCall, *terms: Result | None, error: float = 0.0) -> Value:
    """Return the sum of operands; ``error``: relative, of the constant ones."""
    return _combined(call, terms, lambda x, y: call.build.scale(x, shift=y, shift_error=error), call.build.sum)


def times(call: NodeCall, *factors: Result | None) -> Value:
    """Return the product of operands."""
    return _combined(call, factors, call.build.scale, call.build.product)


def difference(call: NodeCall, left: Result | None, right: Result | None) -> Value:
    """Return left − right; whole numbers stay known as such."""
    x, y = operands(call.build, left, right)
    if isinstance(y, Value):
        negative = call.build.scale(y, -1.0, shift=None if isinstance(x, Value) else x)
        return call.build.sum(x, negative) if isinstance(x, Value) else negative
    assert isinstance(x, Value)
    return call.build.scale(x, center=y)


def _extreme(call: NodeCall, sign: float) -> Value:
    def larger(x: Value, y: Value) -> Value:
        found = call.build.larger(*(v if sign > 0 else call.build.scale(v, sign) for v in (x, y)))
        return found if sign > 0 else call.build.scale(found, sign)

    return _combined(call, call.inputs, lambda x, y: bounded(call, x, y, sign), larger)


converts("Add", 7, 13, 14)(lambda call: added(call, *call.inputs))
converts("Sub", 7, 13, 14)(lambda call: difference(call, *call.inputs))
converts("Mul", 7, 13, 14)(lambda call: times(call, *call.inputs))
converts("Sum", 6, 8, 13)(lambda call: added(call, *call.inputs))
converts("Mean", 6, 8, 13)(lambda c: c.build.divided(added(c, *c.inputs), len(c.inputs)))
converts("Max", 6, 8, 12, 13, group="maxima")(functools.partial(_extreme, sign=1))
converts("Min", 6, 8, 12, 13, group="maxima")(functools.partial(_extreme, sign=-1))
converts("Neg", 6, 13)(lambda call: call.build.scale(call.value(), -1.0))
# Nothing is proved of what is no number, whatever a file does about it.
converts("IsNaN", 9, 13, 20)(lambda call: np.zeros(call.value().shape, np.bool_))


@converts("Div", 7, 13, 14)
def _div(call: NodeCall) -> Value:
    x, y = operands(call.build, *call.inputs)
    if isinstance(y, Value):
        inverse = call.build.function(y, "Reciprocal")
        return call.build.product(x, inverse) if isinstance(x, Value) else call.build.scale(inverse, x)
    assert isinstance(x, Value)
    return call.build.divided(x, y)


# Ends of an interval


def bounded(call: NodeCall, x: Value, end: Any, sign: float) -> Value:
    """Return max(x, end), or min(x, end) for ``sign`` −1, the end being broadcast to the shape of x.

    Ends without effect are allowed: −inf in a maximum, inf in a minimum.
    """
    end = as_tensor(end)
    if bool((end == -sign * torch.inf).all()):
        return x
    if not bool(torch.isfinite(end).all()):
        raise UnsupportedError("an end that is not finite")
    build, turn = call.build, torch.full_like(end, sign)
    if bool((end.abs() > FAR).any()):
        # x + s·relu(s·(end − x)).
        beyond = build.relu(build.scale(x, -turn, center=end))
        return build.sum(x, build.scale(beyond, turn))
    # end + s·relu(s·(x − end)).
    return build.scale(build.relu(build.scale(x, turn, center=end)), turn, shift=end)


def clipped(call: NodeCall, x: Value, low: Tensor | float, high: Tensor | float) -> Value:
    """Return min(max(x, low), high) for numbers low ≤ high; others mean different things in versions of the operator.

    The largest number of an end's type, which stands for infinity in many files, bounds nothing, nor does its negative.
    """
    low, high = as_tensor(low), as_tensor(high)
    if bool((low > high).any()):
        raise UnsupportedError(f"clips to nothing, [{float(low)}, {float(high)}]")
    low, high = (torch.where(end.abs() >= largest(end.dtype), end.sign() * torch.inf, end) for end in (low, high))
    return bounded(call, bounded(call, x, low, 1), high, -1)


@converts("Clip", 6, 11, 12, 13, group="maxima")
def _clip(call: NodeCall) -> Value:
    ends = [call.get("min", None), call.get("max", None)] if call.version < 11 else [call.optional(1), call.optional(2)]
    low, high = (
        tensor(np.asarray(end, end.dtype if isinstance(end, np.ndarray) else np.float32).reshape(()))
        for end in (none if end is None else end for end, none in zip(ends, (-np.inf, np.inf), strict=True))
    )
    return clipped(call, call.value(), low, high)


@converts("HardSigmoid", 6, 22, group="maxima")
def _hard_sigmoid(call: NodeCall) -> Value:
    line = call.build.scale(call.value(), call.get("alpha", 0.2), shift=call.get("beta", 0.5))
    return clipped(call, line, 0.0, 1.0)


# Functions of one variable

converts("Relu", 6, 13, 14, group="pieces")(lambda call: call.build.relu(call.value()))
converts("LeakyRelu", 6, 16, group="pieces")(lambda call: call.build.leaky(call.value(), call.get("alpha", 0.01)))
converts("PRelu", 7, 9, 16, group="pieces")(lambda call: call.build.leaky(call.value(), tensor(call.constant(1))))
converts("Abs", 6, 13, group="maxima")(lambda call: call.build.size_of(call.value()))


def _curve(call: NodeCall, kind: str, attribute: str, default: float = 1.0) -> Value:
    parameter = call.get(attribute, default)
    if not parameter > 0:
        raise UnsupportedError(f"its attribute {attribute} = {parameter}")
    return call.build.function(call.value(), kind, parameter)


def stepped(call: NodeCall, kind: str) -> Value:
    """Return a function that jumps of the node's first input; whole numbers are left as they are."""
    x = call.value()
    return x if kind != "Sign" and call.build.is_whole(x) else call.build.function(x, kind)


for _kind, _row in CURVES.items():
    if _row.operator:
        _read = functools.partial(_curve, kind=_kind, attribute=_row.attribute)
        converts(_row.operator, *_row.versions, group="smooth")(_read)
for _kind, _step in STEPS.items():
    if _step.operator:
        converts(_step.operator, *_step.versions, group="steps")(functools.partial(stepped, kind=_kind))


_GELUS = {b"none": "GELU", b"tanh": "tanh-GELU"}
converts("Gelu", 20, group="smooth")(lambda c: c.build.function(c.value(), c.choice("approximate", b"none", _GELUS)))


@converts("Selu", 6, 22, group="smooth")
def _selu(call: NodeCall) -> Value:
    # Attributes are float32 numbers, their defaults too.
    return call.build.scale(_curve(call, "ELU", "alpha", 1.6732631921768188), call.get("gamma", 1.0507010221481323))


@converts("Celu", 12, 28, group="smooth")
def _celu(call: NodeCall) -> Value:
    # max(x, 0) + min(0, α·(exp(x/α) − 1)) is α·ELU(x/α).
    if not (alpha := call.get("alpha", 1.0)) > 0:
        raise UnsupportedError(f"its attribute alpha = {alpha}")
    inside = call.build.divided(call.value(), alpha)
    return call.build.scale(call.build.function(inside, "ELU"), alpha)


@converts("Swish", 24, group="smooth")
def _swish(call: NodeCall) -> Value:
    # x·σ(α·x) is SiLU(α·x)/α.
    alpha = call.get("alpha", 1.0)
    if alpha == 0:
        return call.build.scale(call.value(), 0.5)
    found = call.build.function(call.build.scale(call.value(), alpha), "SiLU")
    return call.build.divided(found, alpha)


@converts("ThresholdedRelu", 10, 22, group="steps")
def _thresholded_relu(call: NodeCall) -> Value:
    # x where x > α, else 0: relu(x − α) + α·[x > α].
    alpha = call.get("alpha", 1.0)
    beyond = call.build.scale(call.value(), shift=-alpha)
    above = call.build.relu(beyond)
    return call.build.sum(above, call.build.scale(is_positive(call, beyond), alpha)) if alpha else above


MAX_POWER = 64
"""The largest exponent that is read."""

_POWERS = {-1.0: "Reciprocal", -0.5: "InverseRoot", 0.5: "Sqrt", 2.0: "Square", 3.0: "Cube"}
"""The functions that are powers, by their exponents."""


@converts("Pow", 7, 12, 13, 15, group="smooth")
def _pow(call: NodeCall) -> Result:
    base = call.inputs[0]
    if isinstance(base, np.ndarray):
        # a to a computed exponent is exp(x·log a).
        if not bool((base > 0).all()):
            raise UnsupportedError("powers of a number that is not positive")
        number, error = rounded(logarithm(Derived.from_numbers(base)))
        return call.build.function(call.build.scale(call.value(1), number, error=error), "Exp")
    given, x, build = call.constant(1), call.value(), call.build
    if len(set(given.reshape(-1).tolist())) != 1 or given.ndim > len(x.shape):
        raise UnsupportedError("different exponents, or an exponent that enlarges its base")
    exponent = float(given.reshape(-1)[0])
    if exponent in _POWERS:
        return build.function(x, _POWERS[exponent])
    if exponent == 0:
        return np.ones(x.shape, np.float32)
    if not abs(exponent) <= MAX_POWER:
        raise UnsupportedError(f"the exponent {exponent:g}, where numbers up to ±{MAX_POWER} are read")
    if exponent == int(exponent):
        power = _power(call, x, int(abs(exponent)))
    else:
        power = build.function(x, "Power" if abs(exponent) > 1 else "Root", abs(exponent))
    return power if exponent > 0 else build.function(power, "Reciprocal")


def _power(call: NodeCall, x: Value, exponent: int) -> Value:
    """Return x to a positive whole exponent, by squares, cubes and one product for what is left."""
    for factor, kind in ((2, "Square"), (3, "Cube")):
        if exponent % factor == 0:
            return call.build.function(_power(call, x, exponent // factor), kind)
    return x if exponent == 1 else call.build.product(x, _power(call, x, exponent - 1))


# Comparisons and truth values


def inverse(call: NodeCall, x: Value) -> Value:
    """Return 1 − x."""
    return call.build.scale(x, -1.0, shift=1.0)


def is_positive(call: NodeCall, x: Value) -> Value:
    """Return whether x > 0, element by element."""
    if call.build.is_whole(x):
        return bounded(call, bounded(call, x, 0.0, 1), 1.0, -1)
    return call.build.relu(call.build.function(x, "Sign"))


def is_zero(call: NodeCall, x: Value) -> Value:
    """Return whether x = 0, element by element."""
    if call.build.is_whole(x):
        return call.build.relu(inverse(call, call.build.size_of(x)))
    return inverse(call, call.build.size_of(call.build.function(x, "Sign")))


def _compared(call: NodeCall, test: Callable[[NodeCall, Value], Value], turned: bool, inverted: bool) -> Value:
    found = test(call, difference(call, *(call.inputs[::-1] if turned else call.inputs)))
    return inverse(call, found) if inverted else found


for _operator, _versions, _test, _turned, _inverted in (
    ("Greater", (7, 9, 13), is_positive, False, False),
    ("Less", (7, 9, 13), is_positive, True, False),
    ("GreaterOrEqual", (12, 16), is_positive, True, True),
    ("LessOrEqual", (12, 16), is_positive, False, True),
    ("Equal", (7, 11, 13, 19), is_zero, False, False),
):
    _read = functools.partial(_compared, test=_test, turned=_turned, inverted=_inverted)
    converts(_operator, *_versions, group="steps")(_read)

_LESS_ONE = np.asarray(-1, np.float32)
converts("Not", 1)(lambda call: inverse(call, call.value()))
converts("And", 7, group="maxima")(lambda call: call.build.relu(added(call, added(call, *call.inputs), _LESS_ONE)))
converts("Or", 7, group="maxima")(lambda call: bounded(call, added(call, *call.inputs), 1.0, -1))
converts("Xor", 7, group="maxima")(lambda call: call.build.size_of(difference(call, *call.inputs)))


@converts("Cast", 6, 9, 13, 19, *SINCE_21, 28, group="steps")
def _cast(call: NodeCall) -> Value:
    # A cast to float32 rounds what onnxruntime computes, as each of its operations does, and is no function of its own.
    to = call.get("to", None)
    if to in FLOATS:
        return call.value()
    if to in WHOLE:
        return stepped(call, "Truncate")
    if to == onnx.TensorProto.BOOL:
        return inverse(call, is_zero(call, call.value()))
    known = ", ".join(onnx.TensorProto.DataType.Name(kind).lower() for kind in (*FLOATS, *WHOLE))
    raise UnsupportedError(f"casts a computed value to another type than {known} or bool")


@converts("Where", 9, 16, group="products")
def _where(call: NodeCall) -> Result:
    condition, chosen, other = call.inputs
    if not isinstance(condition, Value):
        return moved(call, (1, 2))[0]
    if isinstance(chosen, Value) and isinstance(other, Value) and _is_softplus(call, condition, chosen, other):
        share, error = SOFTPLUS_SHARE
        return call.build.scale(other, torch.tensor(share, dtype=torch.float64), error=error)
    return added(call, times(call, condition, chosen), times(call, inverse(call, condition), other))


def _is_softplus(call: NodeCall, condition: Value, x: Value, other: Value) -> bool:
    """Return True where x stands for softplus(x) if x > c, c ≥ 20, as exporters spell it, and softplus(x) if not.

    x is less than softplus(x) by a factor between 1 and 1 − e⁻ᶜ/c: the factor is stored as 1 − 2⁻³⁴, which is off by no
    more than 2⁻³³.
    """
    ops, chain = call.build.ops, [call.build.ops[condition.op]]
    while len(chain) < 3 and isinstance(chain[-1], Elementwise):
        chain.append(ops[chain[-1].inputs[0]])
    shift, function = chain[-1], ops[other.op]
    kinds = [op.function.kind for op in (*chain[:2], function) if isinstance(op, Elementwise)]
    if kinds != ["Relu", "Sign", "Softplus"] or not (isinstance(shift, Affine) and isinstance(shift.map, Diagonal)):
        return False
    above = shift.is_exact and shift.bias is not None and ((shift.map.weight == 1) & (shift.bias <= -20)).all()
    in_order = condition.index is None and other.index is None and condition.shape == other.shape == x.shape
    return bool(above) and in_order and shift.inputs == function.inputs == (call.build.in_place(x),)
