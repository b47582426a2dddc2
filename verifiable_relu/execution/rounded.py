"""Ops with the errors of the rounding that a runtime does: an arithmetic of ``rounding.ARITHMETICS`` as error terms.

What is proved of the result holds for every evaluation of a file: at each input, what the runtime computes is what the
ops compute with some weights and biases within their errors (``Affine.weight_error``, ``Affine.bias_error``). An
operator of the file stays what it is, so nothing may be simplified before: two operators that cancel each other in real
arithmetic do not in a runtime. The model, op by op:

- **W·x + b** has the error of ``RuntimeArithmetic.relative`` on every product and on b. The number of terms counts
  those of the affine operators right before it as well, since a runtime may fuse a product, a bias, a batch
  normalisation and a residual sum into one sum in any order. A sum of computed values has the error on each.
- **What compares or moves numbers** computes them as they are.
- **Whole numbers** that a quantised operator computes are exact. Before one is rounded to a whole number it is off by
  ``rounding.tie`` more than by its division by the scale.
- **Sigmoid, Tanh and Erf** are off by ``rounding.ELEMENTARY``, GELU by that part of its argument, Exp by that part of
  itself, and by the rounding of their result; Softmax by that and by the error of a sum of its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.functions.piecewise_linear import PiecewiseLinear
from verifiable_relu.ir.functions.steps import StepFunction
from verifiable_relu.ir.linear import Diagonal, Gather
from verifiable_relu.ir.network import Affine, Elementwise, Op, Product, Sum, whole_ops
from verifiable_relu.readers.derived import both
from verifiable_relu.rounding import ELEMENTARY, FEW, RuntimeArithmetic, tie, tiny

_UNWEIGHTED = ("AveragePool", "GlobalAveragePool", "Mean", "ReduceMean", "ReduceSum")
"""Operators that store no weights: the numbers that they multiply by are their own."""


@dataclass(frozen=True)
class Operator:
    """An operator of a file as its rounding depends on it.

    Attributes:
        kind: in ONNX.
        place: what to call it in an error message.
        rounds: whether its result is rounded.
        quantises: whether it multiplies or divides by scales, beyond what it does with whole numbers.
        numbers, span: of one that rounds to whole numbers, how many its type has, and Σ 2·N_i·s_i of what it sums
            (``rounding.tie``).
        computes_stored: whether it makes other numbers of those that the file stores, or multiplies with numbers that
            are not in the file.
    """

    kind: str
    place: str
    rounds: bool
    quantises: bool
    numbers: int
    span: Fraction
    computes_stored: bool


def with_rounding(
    ops: Sequence[Op], output: int, operators: Mapping[int, Operator], by: RuntimeArithmetic
) -> tuple[list[Op], int]:
    """Return ops with the errors of their rounding, and the number of the output.

    Args:
        ops: as a file was read, operator by operator; the first is the input.
        output: the number of the output's op.
        operators: of each op, by its number; none of the input and of moves after the last operator.
        by: the arithmetic.

    Raises:
        UnsupportedError: if the rounding of an op is not modelled, or the output is a number of the input.
        OverflowError: if a sum is so long that its rounding has no bound.
    """
    counted = whole_ops(ops)
    if by.result:
        ops = [_narrowed(op, operators[i], by) if i in operators else op for i, op in enumerate(ops)]
    made = _Rounding(by, ops)
    at: list[int] = []
    # Whether an op has numbers of the input as they were given.
    given: list[bool] = []

    def is_factor(index: int) -> bool:
        """Return True for the second of two ops as which scale·(x − center) + shift was read."""
        operator = operators.get(index)
        normalises = operator is not None and operator.kind == "BatchNormalization"
        return normalises and ops[index].inputs == (index - 1,) and operators.get(index - 1) is operator

    for index, op in enumerate(ops):
        operator = operators.get(index)
        moved = replace(op, inputs=tuple(at[i] for i in op.inputs))
        if operator is None or not operator.rounds:
            found = made.add(moved, 0 if isinstance(op, Elementwise) else made.before(moved))
            found = found if index else made.result(found)
        elif operator.quantises and index in counted:
            steps = isinstance(op, Elementwise) and isinstance(op.function, StepFunction)
            found = made.add(made.before_step(moved, operator) if steps else moved)
        elif operator.kind == "Softmax":
            found = made.add(moved)
            if operators.get(index + 1) is not operator:
                found = made.result(made.noise(found, by.relative(op.size), ELEMENTARY))
        elif isinstance(moved, Affine):
            found = made.affine(moved, is_shift=is_factor(index + 1), is_factor=is_factor(index))
        else:
            found = made.result(made.rounded(moved, operator))
        at.append(found)
        given.append(not (operator and operator.rounds) and (not index or any(given[i] for i in op.inputs)))
    if given[output]:
        raise UnsupportedError("an output is a copy of an input, for which runtimes are not modelled: add an operator")
    return made.ops, at[output]


class _Rounding:
    """Ops with the errors of their rounding, one after another.

    Attributes:
        by: the arithmetic.
        ops: so far.
        terms: how many terms the affine operators up to each op sum.
        small: whether some product of weights that follow each other may be below the smallest normal number.
    """

    def __init__(self, by: RuntimeArithmetic, ops: Sequence[Op]) -> None:
        self.by = by
        weights = [op.map.weight for op in ops if isinstance(op, Affine)]
        least = (float(w[w != 0].abs().amin()) for w in weights if bool((w != 0).any()))
        self.small = math.prod(min(1.0, weight) for weight in least) < tiny(torch.float32)
        self.ops: list[Op] = []
        self.terms: list[int] = []

    def before(self, op: Op) -> int:
        """Return how many terms the affine operators right before an op sum."""
        return max((self.terms[i] for i in op.inputs), default=0)

    def add(self, op: Op, terms: int = 0) -> int:
        """Add an op as it is; returns its number."""
        self.ops.append(op)
        self.terms.append(terms)
        return len(self.ops) - 1

    def affine(self, op: Affine, is_shift: bool, is_factor: bool) -> int:
        """Add an affine op of an operator that rounds.

        Args:
            op: the op.
            is_shift, is_factor: whether it is the first, or the second, of two ops as which a batch normalisation,
                scale·(x − center) + shift, was read. That is a sum of scale·x, −scale·center and shift: with errors of
                the weights and the bias of x − center, and of the bias after it, each of the three has its own.
        """
        if isinstance(op.map, Gather) and op.is_exact and op.bias is None:
            return self.add(op, self.before(op))
        terms = self.before(op) + (0 if is_factor else 2 if is_shift else max(1, op.map.terms))
        row = 2 * float(op.map.abs_apply(torch.ones(1, op.map.n_in, dtype=torch.float64)).amax())
        part, lost = self.by.relative(terms), self.by.lost(terms, row, self.small)
        found = self._off(op, 0.0 if is_factor else part, part, lost, terms)
        return found if is_shift else self.result(found)

    def noise(
        self, source: int, relative: float, absolute: float = 0.0, factor: float = 1.0, small: bool = False
    ) -> int:
        """Add the value of an op times 1 + δ, |δ| ≤ ``relative``, plus an error of at most ``absolute``.

        ``factor`` is twice the size of the weight that the value is a product with, where that is large; ``small``:
        whether it is a product with one that may be below the smallest normal number.
        """
        op = self.ops[source]
        same = Affine(name=op.name, inputs=(source,), size=op.size, map=Diagonal(torch.ones(()).expand(op.size)))
        return self._off(
            same, relative, relative, self.by.lost(1, factor, small or self.small) + absolute, self.terms[source]
        )

    def result(self, source: int) -> int:
        """Return what is kept of the result of an operator."""
        return self.noise(source, float(self.by.result)) if self.by.result else source

    def _off(self, op: Affine, weights: float, bias: float, absolute: float, terms: int) -> int:
        """Add an op whose weights and bias b are off by parts of themselves more, and b by an absolute error, too."""
        known = torch.zeros((), dtype=torch.float64) if op.bias_error is None else op.bias_error
        size = known if op.bias is None else known + op.bias.double().abs()
        error = (FEW * (known + bias * size + absolute)).expand(op.size)
        return self.add(replace(op, weight_error=both(op.weight_error, weights), bias_error=error), terms)

    def before_step(self, op: Op, operator: Operator) -> Op:
        """Let the quotients that a quantising operator rounds to whole numbers be off."""
        (source,) = op.inputs
        division = self.ops[source]
        assert isinstance(division, Affine) and isinstance(division.map, Diagonal) and division.map.divisor is not None
        scale = float(division.map.divisor.abs().min())
        off = tie(operator.numbers, operator.span / Fraction(scale))
        return replace(op, inputs=(self.noise(source, self.by.relative(1), off, factor=max(1.0, 2 / scale)),))

    def rounded(self, op: Op, operator: Operator) -> int:
        """Add an op of an operator that rounds, which is not affine.

        Raises:
            UnsupportedError: if its rounding is not modelled.
        """
        relative, absolute = self.by.relative(1), 0.0
        if isinstance(op, Sum):
            terms = self.before(op) + len(op.inputs) - 1
            part = self.by.relative(terms)
            return self.add(replace(op, inputs=tuple(self.noise(source, part) for source in op.inputs)), terms)
        if isinstance(op, Product):
            if operator.kind not in ("Mul", "QLinearMul"):
                raise UnsupportedError("the rounding of products of computed matrices is not modelled", place=op.place)
            return self.noise(self.add(op), relative)
        assert isinstance(op, Elementwise)
        kind = op.function.kind
        if kind in ("GELU", "tanh-GELU"):
            # x·(1 + δ) − x is what it is off by.
            (source,) = op.inputs
            minus = Diagonal(-torch.ones(()).expand(op.size))
            opposite = self.add(Affine(name=op.name, inputs=(source,), size=op.size, map=minus))
            parts = (self.add(op), self.noise(source, ELEMENTARY), opposite)
            return self.noise(self.add(Sum(name=op.name, inputs=parts, size=op.size)), relative)
        if kind in ("Sigmoid", "Tanh", "Erf"):
            absolute = ELEMENTARY
        elif kind == "Exp":
            relative = both(relative, ELEMENTARY)
        elif not isinstance(op.function, PiecewiseLinear):
            raise UnsupportedError(f"the rounding of {kind} is not modelled", place=op.place)
        return self.noise(self.add(op), relative, absolute, small=isinstance(op.function, PiecewiseLinear))


def _narrowed(op: Op, operator: Operator, by: RuntimeArithmetic) -> Op:
    """Return an op of an operator whose stored numbers are rounded to a narrower format.

    Raises:
        UnsupportedError: if it has other numbers than those that the operator stores.
    """
    if operator.kind in _UNWEIGHTED:
        return op
    if operator.computes_stored:
        said = f"numbers that are computed from stored ones are not modelled in {by.name}"
        raise UnsupportedError(said, place=operator.place)

    def rounded(numbers: Tensor) -> Tensor:
        found = numbers.to(getattr(torch, by.name)).to(numbers.dtype)
        if not bool(found.isfinite().all()):
            raise UnsupportedError(f"a stored number is beyond the range of {by.name}", place=operator.place)
        return found

    if isinstance(op, Elementwise) and isinstance(op.function, PiecewiseLinear):
        return replace(op, function=PiecewiseLinear(rounded(op.function.slope_below)))
    if not isinstance(op, Affine):
        return op
    bias = None if op.bias is None else rounded(op.bias)
    return replace(op, map=op.map.with_weight(rounded(op.map.weight)), bias=bias)
