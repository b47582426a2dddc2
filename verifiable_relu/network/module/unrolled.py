"""What torch computes by operators of their own, as the operators that it consists of by torch's documentation.

Recurrent cells, and recurrent layers over as many steps as the input has, are products, sums and functions; and some
functions are made of others. What stands here takes their place while a module is followed or exported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from verifiable_relu.errors import UnsupportedError

State = tuple[Tensor, ...]
Cell = Callable[..., State]
"""The next state of an input, the state, the two matrices, and the two biases if there are any."""


def _rnn(function: Callable[[Tensor], Tensor]) -> Cell:
    def step(x: Tensor, state: State, wi: Tensor, wh: Tensor, bi: Any = None, bh: Any = None) -> State:
        return (function(F.linear(x, wi, bi) + F.linear(state[0], wh, bh)),)

    return step


def _gru(x: Tensor, state: State, wi: Tensor, wh: Tensor, bi: Any = None, bh: Any = None) -> State:
    (h,) = state
    given, kept = F.linear(x, wi, bi).chunk(3, -1), F.linear(h, wh, bh).chunk(3, -1)
    reset, update = (torch.sigmoid(a + b) for a, b in zip(given[:2], kept[:2], strict=True))
    new = torch.tanh(given[2] + reset * kept[2])
    return (new + update * (h - new),)


def _lstm(
    x: Tensor, state: State, wi: Tensor, wh: Tensor, bi: Any = None, bh: Any = None, projected: Any = None
) -> State:
    h, c = state
    enter, forget, new, leave = (F.linear(x, wi, bi) + F.linear(h, wh, bh)).chunk(4, -1)
    c = torch.sigmoid(forget) * c + torch.sigmoid(enter) * torch.tanh(new)
    h = torch.sigmoid(leave) * torch.tanh(c)
    return (h if projected is None else F.linear(h, projected)), c


_CELLS: dict[str, Cell] = {
    "rnn_tanh": _rnn(torch.tanh),
    "rnn_relu": _rnn(torch.relu),
    "gru": _gru,
    "lstm": _lstm,
}


def _cell(step: Cell, several: bool) -> Callable[..., Any]:
    def run(x: Tensor, state: Any, *weights: Any, **named: Any) -> Any:
        made = step(x, tuple(state) if several else (state,), *weights, **named)
        return made if several else made[0]

    return run


def _layers(step: Cell, several: bool) -> Callable[..., Any]:
    def run(
        x: Tensor,
        state: Any,
        weights: Sequence[Tensor],
        biased: bool,
        layers: int,
        dropout: float,
        train: bool,
        both_ways: bool,
        batch_first: bool,
    ) -> Any:
        if not isinstance(biased, bool):
            raise UnsupportedError("a packed sequence is not supported: give the steps as an axis of a tensor")
        if train and dropout:
            raise UnsupportedError("random numbers are drawn in evaluation mode, too")
        start = tuple(state) if several else (state,)
        axis, ways = int(batch_first), 1 + both_ways
        each = len(weights) // (layers * ways)
        ends: list[State] = []
        for _ in range(layers):
            found = []
            for way in range(ways):
                held = list(weights[len(ends) * each : (len(ends) + 1) * each])
                # A projection stands last, behind biases that may be missing.
                named = {"projected": held.pop()} if each % 2 else {}
                now = tuple(part[len(ends)] for part in start)
                outputs = []
                for one in x.unbind(axis)[:: -1 if way else 1]:
                    now = step(one, now, *held, **named)
                    outputs.append(now[0])
                found.append(torch.stack(outputs[:: -1 if way else 1], axis))
                ends.append(now)
            x = torch.cat(found, -1) if both_ways else found[0]
        return (x, *(torch.stack(part) for part in zip(*ends, strict=True)))

    return run


UNROLLED: dict[Any, Callable[..., Any]] = {
    getattr(torch, f"{name}{kind}"): make(step, name == "lstm")
    for name, step in _CELLS.items()
    for kind, make in (("_cell", _cell), ("", _layers))
}
"""By the functions of torch, what takes their place."""


def _softshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    return torch.relu(x - lambd) - torch.relu(-x - lambd)


def _threshold(x: Tensor, threshold: float, value: float, inplace: bool = False) -> Tensor:
    if threshold != value:
        return torch.where(x > threshold, x, value)
    return torch.relu(x - threshold) + threshold


def _rrelu(
    x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Tensor:
    if training:
        raise UnsupportedError("random numbers are drawn in evaluation mode, too")
    return F.leaky_relu(x, (lower + upper) / 2)


def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    if threshold < 20:
        raise UnsupportedError(f"threshold={threshold}: from there on torch computes another function")
    return F.softplus(x) if beta == 1 else F.softplus(x * beta) / beta


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sinh": lambda x: (torch.exp(x) - torch.exp(-x)) / 2,
    "cosh": lambda x: (torch.exp(x) + torch.exp(-x)) / 2,
    "tan": lambda x: torch.sin(x) * torch.reciprocal(torch.cos(x)),
    "expm1": lambda x: torch.exp(x) - 1,
    "log1p": lambda x: torch.log(1 + x),
}

UNROLLED |= {getattr(of, name): made for name, made in _FUNCTIONS.items() for of in (torch, Tensor)}
UNROLLED |= dict.fromkeys((F.softshrink, torch._C._nn.softshrink), _softshrink)
UNROLLED[F.softplus] = _softplus
UNROLLED |= dict.fromkeys((F.threshold, torch.threshold), _threshold)
UNROLLED |= dict.fromkeys((F.rrelu, torch.rrelu), _rrelu)


class Unrolled(TorchFunctionMode):
    """While it is entered, what is in ``UNROLLED`` is computed step by step."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return UNROLLED.get(func, func)(*args, **(kwargs or {}))
