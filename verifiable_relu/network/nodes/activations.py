"""Activations: element-wise non-linear nodes of one input, and all that is known of each function.

An activation is ``Kinked`` (ReLU and its like), a ``Curve`` (one row of ``FUNCTIONS``), a ``Step`` (one row of
``STEPS``), the ``Identity``, or a set of them (``Hardened``). A new curve is one row here; ``bounds.activations`` has
better lines for some, ``trust.enclose`` checks each with code of its own, and certificates take those that ``check``
knows.

What a row says of a function's slope is all that bound propagation needs: between two neighbouring bends the slope only
rises or only falls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from verifiable_relu.network.nodes.node import Node, Shape
from verifiable_relu.rounding import divisor

_ROOT_2_PI = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


@dataclass(frozen=True)
class Function:
    """A function of one variable and, where it has one, a positive parameter, both tensors.

    Attributes:
        value: f(x, parameter), with a relative error of a few units in the last place, and an absolute one of a few
            unit roundoffs where ``absolute`` says so.
        slope: f′(x, parameter); at a bend where it jumps either of its values.
        rising: whether the slope only rises, or else only falls, before the first bend, between each two neighbouring
            bends, and after the last.
        bends: where f turns from convex to concave or back, or its slope jumps, in order.
        turns: where f turns from falling to rising or back; each is a point where f is flat, or a bend.
        steepest: the largest |f′| for a parameter of 1, infinite if there is none.
        absolute: the absolute error of ``value`` in unit roundoffs is this many times that of one operation.
        period: after which bends and turns repeat; they are those of one period then. None if they do not.
        stretched: whether f(x, λ) = f(λx, 1)/λ, so that bends and turns are those for λ = 1 divided by λ.
        increasing: whether f increases everywhere.
        least: a number that f(x) is never below, whatever rounding makes of it.
        most: a number that f(x) is never above.
        partial: whether f is not defined, or not finite, for some x.
        zero: f(x) ≥ 0 for every x ≥ ``zero`` and f(x) ≤ 0 for every x ≤ ``zero``; None if there is no such number.
        one_from: a number from which on f(x) ≥ 1; None if there is none that matters.
        one_to: a number from which on f(x) ≤ 1, likewise.
        gated: whether f(x) = x·P(x) with a P that never falls, from 0 to 1, and 1 − P(x) ≤ P(−x) for x ≥ 0. Then
            0 ≤ ReLU(x) − f(x) ≤ −f(−|x|), and x·P(λx) never falls as λ > 0 grows.
        operator: of ONNX that computes f; empty where several are needed.
        versions: the opsets in which the definitions of the operator began that are read as f without more ado.
        attribute: the operator's, of 1 by default, that is the parameter.
        certified: the operators of ONNX whose outputs name f's neurons in certificates; none where the checker does not
            know f.
    """

    value: Callable[[Tensor, Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]
    rising: tuple[bool, ...]
    bends: tuple[float, ...] = ()
    turns: tuple[float, ...] = ()
    steepest: float = math.inf
    absolute: float = 0.0
    period: float | None = None
    stretched: bool = False
    increasing: bool = False
    least: float = -math.inf
    most: float = math.inf
    partial: bool = False
    zero: float | None = None
    one_from: float | None = None
    one_to: float | None = None
    gated: bool = False
    operator: str = ""
    versions: tuple[int, ...] = ()
    attribute: str = ""
    certified: tuple[str, ...] = ()


def _silu(x: Tensor, _: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _silu_slope(x: Tensor, _: Tensor) -> Tensor:
    return torch.sigmoid(x) * (1 + x * torch.sigmoid(-x))


def _softplus(x: Tensor, _: Tensor) -> Tensor:
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def _mish(x: Tensor, p: Tensor) -> Tensor:
    return x * torch.tanh(_softplus(x, p))


def _mish_slope(x: Tensor, p: Tensor) -> Tensor:
    t = torch.tanh(_softplus(x, p))
    return t + x * (1 - t) * (1 + t) * torch.sigmoid(x)


def _inner(x: Tensor) -> Tensor:
    """Twice the argument of the hyperbolic tangent by which GELU is approximated."""
    return 2 * _ROOT_2_PI * (x + _CUBIC * x * x * x)


def _tanh_gelu(x: Tensor, _: Tensor) -> Tensor:
    # ½·(1 + tanh(z)) = σ(2z), which keeps its relative accuracy where z is negative.
    return x * torch.sigmoid(_inner(x))


def _tanh_gelu_slope(x: Tensor, _: Tensor) -> Tensor:
    z = _inner(x)
    # Where σ(−z) is 0, x·z′ may be infinite.
    steep = (torch.sigmoid(-z) * x).clamp(-1e30, 1e30) * (2 * _ROOT_2_PI * (1 + 3 * _CUBIC * x * x)).clamp(max=1e30)
    return torch.sigmoid(z) * (1 + steep)


def _elu(x: Tensor, alpha: Tensor) -> Tensor:
    return torch.where(x > 0, x, alpha * torch.expm1(x.clamp(max=0)))


def _elu_slope(x: Tensor, alpha: Tensor) -> Tensor:
    return torch.where(x > 0, torch.ones_like(x), alpha * torch.exp(x.clamp(max=0)))


def _hard_swish(x: Tensor, _: Tensor) -> Tensor:
    return x * (x + 3).clamp(0, 6) / 6


def _hard_swish_slope(x: Tensor, _: Tensor) -> Tensor:
    return torch.where(x <= -3, 0.0, torch.where(x >= 3, 1.0, (2 * x + 3) / 6))


def _asinh(x: Tensor, _: Tensor) -> Tensor:
    size = x.abs()
    near = size.clamp(max=_FAR)
    near = torch.log1p(near + near * (near / (1 + torch.sqrt(1 + near * near))))
    return torch.where(size > _FAR, torch.log(size.clamp(min=1)) + math.log(2), near).copysign(x)


def _acosh(x: Tensor, _: Tensor) -> Tensor:
    above = x - 1
    near = above.clamp(0, _FAR)
    near = torch.log1p(near + torch.sqrt(near * (near + 2)))
    found = torch.where(above > _FAR, torch.log(x.clamp(min=1)) + math.log(2), near)
    return torch.where(above >= 0, found, torch.nan)


_FAR = 1e9
"""From here on asinh and arcosh are ln(2x), up to 1/(4x²); squares of what is less do not overflow."""


def _tanh_slope(x: Tensor, _: Tensor) -> Tensor:
    # 1 − tanh(x)², without cancellation.
    return 4 * torch.sigmoid(2 * x) * torch.sigmoid(-2 * x)


def _gelu_slope(x: Tensor, lam: Tensor) -> Tensor:
    t = lam * x
    return 0.5 * torch.special.erfc(-t / math.sqrt(2)) + t * torch.exp(-0.5 * t * t) / math.sqrt(2 * math.pi)


def _power(x: Tensor, exponent: Tensor) -> Tensor:
    return torch.where(x < 0, torch.nan, x**exponent)


def _power_slope(x: Tensor, exponent: Tensor) -> Tensor:
    return torch.where(x < 0, torch.nan, exponent * x ** (exponent - 1))


_RECTIFIER = (False, True, False)
"""Concave, convex, concave."""

FUNCTIONS: dict[str, Function] = {
    "Sigmoid": Function(
        lambda x, _: torch.sigmoid(x),
        lambda x, _: torch.sigmoid(x) * torch.sigmoid(-x),
        (True, False),
        bends=(0.0,),
        steepest=0.25,
        increasing=True,
        operator="Sigmoid",
        versions=(6, 13),
        certified=("Sigmoid",),
        least=0.0,
        most=1.0,
    ),
    "Tanh": Function(
        lambda x, _: torch.tanh(x),
        _tanh_slope,
        (True, False),
        bends=(0.0,),
        steepest=1.0,
        increasing=True,
        operator="Tanh",
        versions=(6, 13),
        certified=("Tanh",),
        least=-1.0,
        most=1.0,
        zero=0.0,
    ),
    # λ-GELU, x·Φ(λx). Files may write it with the error function, whose outputs then name its neurons.
    "GELU": Function(
        lambda x, lam: F.gelu(lam * x) / lam,
        _gelu_slope,
        _RECTIFIER,
        bends=(-math.sqrt(2), math.sqrt(2)),
        turns=(-0.7517915246935645,),
        steepest=1.13,
        # torch computes 1 + erf, which leaves the roundoff of 1 for negative numbers.
        absolute=1.0,
        stretched=True,
        gated=True,
        certified=("Gelu", "Erf"),
        zero=0.0,
    ),
    "SiLU": Function(
        _silu,
        _silu_slope,
        _RECTIFIER,
        bends=(-2.3993572805154677, 2.3993572805154677),
        turns=(-1.2784645427610738,),
        steepest=1.09984,
        gated=True,
        zero=0.0,
    ),
    # P(x) = tanh(softplus(x)). With w = eˣ, 1 − P(x) = 2/(w² + 2w + 2) and P(−x) = (2w + 1)/(2w² + 2w + 1).
    "Mish": Function(
        _mish,
        _mish_slope,
        _RECTIFIER,
        bends=(-2.2563763963607931, 1.4905711794854285),
        turns=(-1.1924312145154952,),
        steepest=1.0885,
        gated=True,
        operator="Mish",
        versions=(18, 22),
        zero=0.0,
    ),
    "tanh-GELU": Function(
        _tanh_gelu,
        _tanh_gelu_slope,
        _RECTIFIER,
        bends=(-1.4185040087908284, 1.4185040087908284),
        turns=(-0.75246142207101626,),
        steepest=1.13,
        absolute=1.0,
        gated=True,
        zero=0.0,
    ),
    # Libraries compute exp(x) − 1 as it is written, which is off by a roundoff of 1 next to 0.
    "ELU": Function(
        _elu,
        _elu_slope,
        (True, True),
        bends=(0.0,),
        steepest=1.0,
        absolute=1.0,
        increasing=True,
        operator="Elu",
        versions=(6, 22),
        attribute="alpha",
        zero=0.0,
    ),
    "Softplus": Function(
        _softplus,
        lambda x, _: torch.sigmoid(x),
        (True,),
        steepest=1.0,
        increasing=True,
        operator="Softplus",
        versions=(1, 22),
        least=0.0,
    ),
    "Softsign": Function(
        lambda x, _: x / (1 + x.abs()),
        lambda x, _: (1 + x.abs()) ** -2,
        (True, False),
        bends=(0.0,),
        steepest=1.0,
        increasing=True,
        operator="Softsign",
        versions=(1, 22),
        least=-1.0,
        most=1.0,
        zero=0.0,
    ),
    "HardSwish": Function(
        _hard_swish,
        _hard_swish_slope,
        (True, True, True),
        bends=(-3.0, 3.0),
        turns=(-1.5,),
        steepest=1.5,
        gated=True,
        operator="HardSwish",
        versions=(14, 22),
        zero=0.0,
    ),
    "Erf": Function(
        lambda x, _: torch.erf(x),
        lambda x, _: 2 / math.sqrt(math.pi) * torch.exp(-x * x),
        (True, False),
        bends=(0.0,),
        steepest=1.1284,
        increasing=True,
        operator="Erf",
        versions=(9, 13),
        least=-1.0,
        most=1.0,
        zero=0.0,
    ),
    "Atan": Function(
        lambda x, _: torch.atan(x),
        lambda x, _: 1 / (1 + x * x),
        (True, False),
        bends=(0.0,),
        steepest=1.0,
        increasing=True,
        operator="Atan",
        versions=(7, 22),
        zero=0.0,
    ),
    # Outside of [−1, 1], (−1, 1) or [1, ∞), where it is not defined, a function is NaN, and nothing is known of it.
    "Asin": Function(
        lambda x, _: torch.asin(x),
        lambda x, _: 1 / torch.sqrt(((1 - x) * (1 + x)).clamp(min=0)),
        (False, True),
        bends=(0.0,),
        operator="Asin",
        versions=(7, 22),
        partial=True,
        zero=0.0,
    ),
    "Acos": Function(
        lambda x, _: torch.acos(x),
        lambda x, _: -1 / torch.sqrt(((1 - x) * (1 + x)).clamp(min=0)),
        (True, False),
        bends=(0.0,),
        operator="Acos",
        versions=(7, 22),
        partial=True,
        least=0.0,
    ),
    "Atanh": Function(
        lambda x, _: torch.atanh(x),
        lambda x, _: 1 / ((1 - x) * (1 + x)).clamp(min=0),
        (False, True),
        bends=(0.0,),
        operator="Atanh",
        versions=(9, 22),
        partial=True,
        zero=0.0,
    ),
    "Acosh": Function(
        _acosh,
        lambda x, _: 1 / (torch.sqrt((x - 1).clamp(min=0)) * torch.sqrt(x + 1)),
        (False,),
        operator="Acosh",
        versions=(9, 22),
        partial=True,
        least=0.0,
    ),
    "Asinh": Function(
        _asinh,
        lambda x, _: torch.where(x.abs() > _FAR, 1 / x.abs(), 1 / torch.sqrt(1 + x * x)),
        (True, False),
        bends=(0.0,),
        steepest=1.0,
        increasing=True,
        operator="Asinh",
        versions=(9, 22),
        zero=0.0,
    ),
    "Exp": Function(
        lambda x, _: torch.exp(x),
        lambda x, _: torch.exp(x),
        (True,),
        increasing=True,
        operator="Exp",
        versions=(6, 13),
        least=0.0,
        one_from=0.0,
    ),
    "Square": Function(lambda x, _: x * x, lambda x, _: 2 * x, (True,), turns=(0.0,), least=0.0),
    "Cube": Function(
        lambda x, _: x * x * x, lambda x, _: 3 * x * x, (False, True), bends=(0.0,), increasing=True, zero=0.0
    ),
    "Log": Function(
        lambda x, _: torch.log(x),
        lambda x, _: 1 / x,
        (False,),
        partial=True,
        zero=1.0,
        operator="Log",
        versions=(6, 13),
    ),
    "Sqrt": Function(
        lambda x, _: torch.sqrt(x),
        lambda x, _: 0.5 / torch.sqrt(x),
        (False,),
        partial=True,
        least=0.0,
        operator="Sqrt",
        versions=(6, 13),
    ),
    "Reciprocal": Function(
        # At 0, nothing is known: an interval about 0 has NaN for an image.
        lambda x, _: torch.where(x == 0, torch.nan, 1 / x),
        lambda x, _: -1 / (x * x),
        (False, True),
        bends=(0.0,),
        turns=(0.0,),
        operator="Reciprocal",
        versions=(6, 13),
        partial=True,
        zero=0.0,
        one_to=1.0,
    ),
    "InverseRoot": Function(
        lambda x, _: 1 / torch.sqrt(x),
        lambda x, _: -0.5 / (x * torch.sqrt(x)),
        (True,),
        partial=True,
        least=0.0,
        one_to=1.0,
    ),
    # x^p for x ≥ 0 and a p that is no whole number: above 1 it is convex, below 1 concave.
    "Power": Function(_power, _power_slope, (True,), partial=True, least=0.0),
    "Root": Function(_power, _power_slope, (False,), partial=True, least=0.0),
    "Sin": Function(
        lambda x, _: torch.sin(x),
        lambda x, _: torch.cos(x),
        (True, False, True),
        bends=(0.0, math.pi),
        turns=(math.pi / 2, 3 * math.pi / 2),
        steepest=1.0,
        absolute=1.0,
        period=2 * math.pi,
        operator="Sin",
        versions=(7, 22),
        least=-1.0,
        most=1.0,
    ),
    "Cos": Function(
        lambda x, _: torch.cos(x),
        lambda x, _: -torch.sin(x),
        (False, True, False),
        bends=(math.pi / 2, 3 * math.pi / 2),
        turns=(0.0, math.pi),
        steepest=1.0,
        absolute=1.0,
        period=2 * math.pi,
        operator="Cos",
        versions=(7, 22),
        least=-1.0,
        most=1.0,
    ),
}
"""By the name that nodes have for them. The parameter is α of ELU, λ of GELU, and the exponent of powers and roots; the
others take none: 1 is given."""


@dataclass(frozen=True)
class Steps:
    """A function of one variable that never falls, and is constant but where it jumps from a whole number to a next.

    Attributes:
        value: f(x), which rounds nothing.
        band: numbers b and a with x − b ≤ f(x) ≤ x + a; None where f jumps at 0 alone.
        operator: of ONNX that computes f; empty where several are needed.
        versions: the opsets in which the definitions of the operator began that are read as f.
    """

    value: Callable[[Tensor], Tensor]
    band: tuple[float, float] | None
    operator: str = ""
    versions: tuple[int, ...] = ()


STEPS: dict[str, Steps] = {
    # torch takes the sign of what is no number for 0, from which something could be proved.
    "Sign": Steps(lambda x: torch.where(x.isnan(), x, x.sign()), None, "Sign", (9, 13)),
    "Floor": Steps(torch.floor, (1.0, 0.0), "Floor", (6, 13)),
    "Ceil": Steps(torch.ceil, (0.0, 1.0), "Ceil", (6, 13)),
    # Halves go to the even neighbour.
    "Round": Steps(torch.round, (0.5, 0.5), "Round", (11, 22)),
    "Truncate": Steps(torch.trunc, (1.0, 1.0)),
}
"""By the name that nodes have for them."""


class Activation(Node):
    """An element-wise non-linear node of one input.

    ``certified``: the operators of ONNX whose outputs name the node's neurons in certificates; none where the checker
    does not know the activation.
    """

    certified: tuple[str, ...] = ()


class Kinked(Activation):
    """A piecewise-linear activation with one kink, at zero: f(x) = max(x, 0) + below·min(x, 0).

    Its neurons are in one of two phases, *active* (x ≥ 0, f(x) = x) and *inactive* (x ≤ 0, f(x) = below·x). A network
    of such activations has exact rational values, and a finite case distinction decides every property of it.
    """

    @property
    def below(self) -> Tensor:
        """The slope below zero, broadcastable to ``shape``."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, kw_only=True)
class Relu(Kinked):
    op = "Relu"
    certified = ("Relu", "Abs")

    @property
    def below(self) -> Tensor:
        return torch.zeros((), device="cpu")

    def forward(self, *xs: Tensor) -> Tensor:
        return F.relu(xs[0])


@dataclass(frozen=True, eq=False, kw_only=True)
class LeakyRelu(Kinked):
    """max(x, 0) + slope·min(x, 0). ``slope`` is broadcastable to ``shape``: LeakyReLU (scalar) and PReLU."""

    op = "LeakyRelu"
    certified = ("LeakyRelu", "PRelu")
    slope: Tensor

    @property
    def below(self) -> Tensor:
        return self.slope

    def forward(self, *xs: Tensor) -> Tensor:
        return torch.where(xs[0] >= 0, xs[0], self.slope * xs[0])


@dataclass(frozen=True, eq=False, kw_only=True)
class Identity(Activation):
    """x itself. What multiplies two computed values needs good bounds of both, and an activation's input gets them."""

    op = "Identity"

    def forward(self, *xs: Tensor) -> Tensor:
        return xs[0]


class Curve(Activation):
    """A function of one variable: the row ``function`` of ``FUNCTIONS`` with a positive scalar ``parameter``."""

    function: str
    parameter: Tensor

    @property
    def known(self) -> Function:
        """What is known of the function."""
        return FUNCTIONS[self.function]

    @property
    def certified(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.known.certified

    def forward(self, *xs: Tensor) -> Tensor:
        return self.known.value(xs[0], self.parameter)


@dataclass(frozen=True, eq=False, kw_only=True)
class Sigmoid(Curve):
    op = "Sigmoid"
    function = "Sigmoid"
    parameter = torch.ones(())


@dataclass(frozen=True, eq=False, kw_only=True)
class Tanh(Curve):
    op = "Tanh"
    function = "Tanh"
    parameter = torch.ones(())


@dataclass(frozen=True, eq=False, kw_only=True)
class Gelu(Curve):
    """λ-GELU, f(x; λ) = x·Φ(λx) = GELU(λx)/λ (arXiv 2603.21991); λ = 1 is GELU. ``lam`` is a scalar tensor."""

    op = "Gelu"
    function = "GELU"
    lam: Tensor

    @property
    def parameter(self) -> Tensor:  # type: ignore[override]
        return self.lam


@dataclass(frozen=True, eq=False, kw_only=True)
class Smooth(Curve):
    """Any function, by its name in ``FUNCTIONS``; ``parameter`` is a positive scalar tensor."""

    op = "Smooth"
    function: str
    parameter: Tensor

    @property
    def place(self) -> str:
        return f"node '{self.name}' ({self.function})"


@dataclass(frozen=True, eq=False, kw_only=True)
class Step(Activation):
    """A function that is constant but where it jumps: the row ``function`` of ``STEPS``."""

    op = "Step"
    function: str

    @property
    def certified(self) -> tuple[str, ...]:  # type: ignore[override]
        return {"Round": ("QuantizeLinear", "Round"), "Sign": ("Sign",)}.get(self.function, ())

    @property
    def known(self) -> Steps:
        """What is known of the function."""
        return STEPS[self.function]

    @property
    def place(self) -> str:
        return f"node '{self.name}' ({self.function})"

    def forward(self, *xs: Tensor) -> Tensor:
        (x,) = xs
        found = self.known.value(x.detach())
        if not x.requires_grad:
            return found
        # A search that follows slopes would stand still: it gets those of a function that rises where steps do.
        rising = x if self.known.band else x / divisor(x.abs() + x.detach().abs().mean())
        return found + (rising - rising.detach())


@dataclass(frozen=True, eq=False, kw_only=True)
class Hardened(Activation):
    """ReLU and every λ'-GELU with λ' ≥ ``lam`` at once: a set of networks, of which ``forward`` runs ReLU's.

    x·Φ(λx) never falls as λ grows, so all of them lie between λ-GELU at ``lam`` and ReLU (arXiv 2603.21991). Bounds
    cover the whole set; a counterexample speaks of its limit, the ReLU network (``Network.limit``).

    Another ``function`` that is ``gated`` has a ``lam`` of 1: the set is that of G(λx)/λ with λ ≥ 1.
    """

    op = "Hardened"
    lam: Tensor
    function: str = "GELU"

    @property
    def certified(self) -> tuple[str, ...]:  # type: ignore[override]
        return Relu.certified + FUNCTIONS["GELU"].certified if self.function == "GELU" else ()

    @property
    def least(self) -> Curve:
        """The smooth function that is the least of the set."""
        if self.function == "GELU":
            return Gelu(name=self.name, inputs=self.inputs, shape=self.shape, lam=self.lam)
        return Smooth(name=self.name, inputs=self.inputs, shape=self.shape, function=self.function, parameter=self.lam)

    def forward(self, *xs: Tensor) -> Tensor:
        return F.relu(xs[0])

    @property
    def limit(self) -> Node:
        return Relu(name=self.name, inputs=self.inputs, shape=self.shape)


def curve(function: str, name: str, inputs: tuple[int, ...], shape: Shape, parameter: float = 1.0) -> Curve:
    """A node of a function, by its name in ``FUNCTIONS``."""
    if function in ("Sigmoid", "Tanh"):
        return (Sigmoid if function == "Sigmoid" else Tanh)(name=name, inputs=inputs, shape=shape)
    number = torch.tensor(parameter, dtype=torch.float64)
    single = number.float()
    number = single if bool(single == number) else number
    return Smooth(name=name, inputs=inputs, shape=shape, function=function, parameter=number)


RECTIFIERS = (Relu, Gelu, Hardened)
"""ReLU, and what tends to it."""


def gated(node: Node) -> bool:
    """Whether a node is ReLU or one of the functions that lie below it as ``Function.gated`` says."""
    return isinstance(node, RECTIFIERS) or (isinstance(node, Curve) and node.known.gated)


def same(f: Activation, g: Activation) -> bool:
    """Whether two curves are the same function."""
    if not isinstance(f, Curve) or not isinstance(g, Curve):
        return False
    return f.function == g.function and torch.equal(f.parameter, g.parameter)


def alike(f: Activation, g: Activation) -> bool:
    """Whether something is known of g(z + d) − f(z): two of ReLU and what lies below it, or the same function."""
    if gated(f) and gated(g):
        return True
    if isinstance(f, LeakyRelu) and isinstance(g, LeakyRelu):
        return torch.equal(f.slope, g.slope)
    return same(f, g)
