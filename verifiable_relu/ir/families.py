"""Families of networks: the ReLU network together with all smooth networks that it can have come from.

The set has ``Hardened`` in the place of functions that are ReLU in the limit. What bounds prove of it holds for each
member, every layer with a λ of its own (arXiv 2603.21991).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from torch import Tensor

from verifiable_relu.errors import InputError
from verifiable_relu.ir.functions.function import Function
from verifiable_relu.ir.functions.smooth import Hardened, Smooth
from verifiable_relu.ir.linear import Diagonal, Gather
from verifiable_relu.ir.network import Affine, Elementwise, Maximum, Network, Op, whole_ops
from verifiable_relu.rounding import MODERATE, not_above


def harden(network: Network, lam: float | Sequence[float] | None = None) -> Network:
    """Return the set of networks with λ'-GELU, λ' ≥ ``lam``, or ReLU in place of its ReLUs and λ-GELUs.

    λ of a GELU is that with respect to the x before all scalars around it (``find_argument``): GELU(c·x) is c times
    c-GELU of x. That of a ReLU is with respect to its argument.

    Args:
        network: with ReLU or λ-GELU functions, in real arithmetic or as it runs.
        lam: ≥ 1; one number, or one for each layer of such functions. None takes the λ of the network's own λ-GELUs,
            and leaves its ReLUs as they are.

    Raises:
        InputError: if the network has no function to replace, no λ-GELU where ``lam`` is None, ``lam`` does not fit,
            some λ is not known, or the network runs and is none of the set.
    """
    functions = {i: op.function for i, op in enumerate(network.ops) if isinstance(op, Elementwise)}
    for index, function in functions.items():
        if function.kind == "Erf":
            said = "it may be part of a GELU that is spelled out, which has no family here; write the operator Gelu"
            raise InputError(said, place=network.ops[index].place)
    places = [i for i, function in functions.items() if function.kind == "Relu" or _own_lambda(function) is not None]
    if not places:
        raise InputError(f"the network '{network.name}' has neither ReLU nor λ-GELU activations: it has no family")
    if lam is None:
        # A ReLU among λ-GELUs, such as one by which a normalisation is clipped, is one in all members.
        least = {i: own for i in places if (own := _own_lambda(functions[i])) is not None}
        if not least:
            raise InputError(f"the ReLUs of the network '{network.name}' do not tell which λ they come from")
        return _with_functions(network, {i: Hardened(Smooth("GELU", own)) for i, own in least.items()})
    numbers = [float(lam)] * len(places) if isinstance(lam, int | float) else [float(value) for value in lam]
    if len(numbers) != len(places):
        raise InputError(f"{len(numbers)} values of λ for {len(places)} layers of activations")
    if not all(1 <= value < float("inf") for value in numbers):
        raise InputError(f"λ must be a finite number of at least 1, got {numbers}")
    made, notes = dict[int, Function](), list[str]()
    for index, number in zip(places, numbers, strict=True):
        factor, error = _factor(network, index) if functions[index].kind == "GELU" else (Fraction(1), Fraction(0))
        made[index] = Hardened(Smooth("GELU", not_above(Fraction(number) / (factor * (1 + error)))))
        own_lam = factor * Fraction(functions[index].parameters.get("parameter", number))
        if functions[index].kind == "GELU" and own_lam < number:
            name, found = network.ops[index].name, float(own_lam)
            said = f"'{name}' has λ = {found:.9g}, which is not in the family from λ = {number:g} on"
            if network.arithmetic != "real":
                raise InputError(f"{said}: its evaluations in {network.arithmetic} are not bounded")
            notes.append(f"{said}: nothing is said about the file itself")
    return _with_functions(network, made, notes)


def between(smooth: Network, hard: Network) -> Network:
    """Return the set of networks between a smooth one and the one with ReLU in place of some of its functions.

    What bounds prove of it holds for both, and for those with G(λx)/λ, λ ≥ 1, in place of each such function G.

    Args:
        smooth: with functions that are ``gated``.
        hard: the network that a swap made of it. Which functions were swapped is seen from both networks' functions in
            their order; whether all else is the same is for the caller to find out.

    Raises:
        InputError: if the functions are not those of a swap, or none was swapped.
    """
    if len(smooth.activations) != len(hard.activations):
        raise InputError("the swap changes more of the network than activations")
    made = dict[int, Function]()
    for index, other in zip(smooth.activations, hard.activations, strict=True):
        f, g = smooth.ops[index], hard.ops[other]
        assert isinstance(f, Elementwise) and isinstance(g, Elementwise)
        if isinstance(f.function, Smooth) and f.function.gated and g.function.kind == "Relu":
            made[index] = Hardened(f.function)
        elif f.size != g.size or not f.function.is_same(g.function):
            said = f"the change is not bounded where '{g.name}' ({g.function.kind}) takes the place of {f.place}"
            raise InputError(said)
    if not made:
        raise InputError("no activation was swapped")
    return _with_functions(smooth, made)


def least_lambdas(network: Network) -> list[float]:
    """Return the least λ of each layer of a set of networks, as ``harden`` makes it; empty for a single network."""
    found = (op.function for op in network.ops if isinstance(op, Elementwise))
    return [function.least.parameter for function in found if isinstance(function, Hardened)]


def outside_family(network: Network) -> list[str]:
    """Return the names of a set's nonlinear ops that are the same in all of its members."""
    return [
        op.function.kind if isinstance(op, Elementwise) else "a maximum"
        for op in network.ops
        if isinstance(op, Maximum) or (isinstance(op, Elementwise) and not isinstance(op.function, Hardened))
    ]


def _own_lambda(function: Function) -> float | None:
    """Return λ of a λ-GELU, or the least one of a set of them."""
    smooth = function.least if isinstance(function, Hardened) else function
    return smooth.parameter if isinstance(smooth, Smooth) and smooth.kind == "GELU" else None


def _with_functions(network: Network, functions: dict[int, Function], notes: Sequence[str] = ()) -> Network:
    ops = list(network.ops)
    for index, function in functions.items():
        op = ops[index]
        assert isinstance(op, Elementwise)
        ops[index] = replace(op, function=function)
    source = replace(network.source, onnx=None, run=None, repairs=(*network.source.repairs, *notes))
    return replace(network, ops=tuple(ops), source=source)


@dataclass(frozen=True)
class Argument:
    """The argument of a function as factor·x, x being what is before all factors.

    Attributes:
        base: the number of the op that x is made of by ``moves`` alone, the first one last.
        moves: permutations between the two.
        factor: the product of the numbers by which ops between the two multiply or divide.
        error: relative, of ``factor``.
        vague: the name of an op before x that multiplies, too: by several numbers, or by numbers that are
            chosen among others, or another GELU; or nothing.
    """

    base: int
    moves: tuple[Affine, ...] = ()
    factor: Fraction = Fraction(1)
    error: Fraction = Fraction(0)
    vague: str = ""


def one_number(numbers: Tensor) -> Fraction | None:
    """Return the one number that a constant has for all elements; None for several numbers, or infinity.

    Several equal numbers count as several, as they do in certificates.
    """
    first = float(numbers.reshape(-1)[0])
    return Fraction(first) if (numbers.stride() == (0,) or numbers.numel() == 1) and math.isfinite(first) else None


def scalar_factor(op: Op) -> tuple[Fraction, Fraction] | None:
    """Return the one number by which an op multiplies each element, and its relative error; that of x/d is exact."""
    if not (isinstance(op, Affine) and isinstance(op.map, Diagonal)):
        return None
    exact = op.map.divisor is not None
    number = one_number(op.map.weight if op.map.divisor is None else op.map.divisor)
    return None if number is None else (1 / number if exact else number, Fraction(0 if exact else op.weight_error))


def find_argument(ops: Sequence[Op], index: int, runs: bool = False) -> Argument:
    """Trace an op's value back to the x before all factors: the λ of a GELU refers to this x.

    Permutations may stand between. What a factor makes of whole numbers, such as a quantised network's, is no multiple
    of them, and a batch normalisation of several channels is a layer like any other. An inexact offset
    ends the trace, unless the error is the rounding of a network that ``runs``.
    """
    found, moves, chosen = Argument(index), list[Affine](), False
    counted = whole_ops(ops[:index])
    while isinstance(op := ops[index], Affine) and op.bias is None and op.inputs[0] not in counted:
        if op.bias_error is not None and not runs:
            break
        if isinstance(op.map, Gather):
            permutes = (
                op.size == op.map.n_in and len(op.map.index.unique()) == op.size and not bool((op.map.index < 0).any())
            )
            chosen |= not permutes
            moves += [op] if permutes else []
        elif not isinstance(op.map, Diagonal):
            return found
        elif bool((op.map.weight != 1).any()):
            if chosen or (scalar := scalar_factor(op)) is None:
                normalised = bool(op.weight_error) and op.map.divisor is None and not chosen
                return found if normalised else replace(found, vague=op.name)
            factor, error = scalar
            error = (1 + found.error) * (1 + error) - 1
            found = Argument(op.inputs[0], tuple(moves), found.factor * factor, error)
        (index,) = op.inputs
    gelu = isinstance(op, Elementwise) and op.function.kind == "GELU"
    return replace(found, vague=op.name) if gelu else found


def _factor(network: Network, index: int) -> tuple[Fraction, Fraction]:
    """Return the size of the factor of x in a GELU's argument where λ is with respect to x, and its relative error.

    Raises:
        InputError: if the factor is not known, or beyond ``MODERATE``.
    """
    op = network.ops[index]
    rounded = network.arithmetic != "real"
    found = find_argument(network.ops, op.inputs[0], rounded)
    if found.vague and not rounded:
        said = f"its λ is not known: '{found.vague}' before it is a GELU, too, or has several factors for its numbers"
        raise InputError(f"{said}; put a layer between", place=op.place)
    if not MODERATE[0] <= abs(found.factor) <= MODERATE[1]:
        said = f"the factor before it, {float(found.factor):g}, is too small or too large for a family"
        raise InputError(f"{said}; it must be from 2^-40 to 2^40", place=op.place)
    # Errors of what runs are those of its rounding, and the file's numbers are exact.
    return abs(found.factor), Fraction(0) if rounded else found.error
