"""Random torch modules: compositions of all that is read, and of much that must be refused.

A module's ``forward`` is a list of moves on a list of tensors: each move computes a new tensor from an old one, or
changes one in place. Tensors stay in use after they were changed, looked at through views, or handed to a module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from verifiable_relu.nn import LambdaGELU, Normalize

LARGEST = 1e3
"""Tensors of larger numbers are not built upon: what is compared must not drown in rounding."""

Values = list[Tensor]
Move = Callable[[Values], None]


class Moves(nn.Module):
    """What the moves compute, summed up by a linear map of each of the last tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        self.constants = nn.ParameterList()
        self.heads = nn.ModuleList()
        self.moves: list[Move] = []

    def values(self, x: Tensor) -> Values:
        values = [x]
        for move in self.moves:
            move(values)
        return values

    def forward(self, x: Tensor) -> Tensor:
        values = self.values(x)
        if not self.heads:
            return values[-1]
        shown = values[-len(self.heads) :]
        return sum(head(v.flatten(1)) for head, v in zip(self.heads, shown, strict=True))  # type: ignore[return-value]


@dataclass
class Drawn:
    """A module and what is known of it.

    Attributes:
        module: in any mode, as a whole and in its parts.
        shape: of one input.
        kinds: of the moves and tricks in it.
        bad: those among them that no network can follow.
        exact: whether it is piecewise linear with weights of few bits, so that float64 computes it without rounding.
    """

    module: nn.Module
    shape: tuple[int, ...]
    kinds: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    exact: bool = False


class Doubled(nn.ReLU):
    """A subclass that does something else than its base."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x) * 2


class Training(nn.Module):
    """Something else in training mode."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 3 + 1 if self.training else x * 0.5


class Residual(nn.Module):
    """x + inner(x), with ``+=`` on one of the two."""

    def __init__(self, inner: nn.Module, rng: np.random.Generator) -> None:
        super().__init__()
        self.inner = inner
        self.way = int(rng.integers(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if y.shape != x.shape:
            return y
        if self.way == 0:
            return x + y
        if self.way == 1:
            y += x
            return y
        x += y
        return x


class Scaling(torch.autograd.Function):
    """A function with a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return (x * 2).relu_()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Draw:
    """Draws one module.

    Args:
        rng: decides everything.
        exact: whether to stay piecewise linear, with weights of few bits.
        spoiled: whether to put in one move that no network can follow.
    """

    def __init__(self, rng: np.random.Generator, exact: bool, spoiled: bool) -> None:
        self.rng = rng
        self.exact = exact
        self.spoiled = spoiled
        self.dtype = torch.float64 if exact or rng.random() < 0.6 else torch.float32
        self.shape: tuple[int, ...] = tuple(int(n) for n in ([(4,), (2, 3), (2, 4, 4)][rng.integers(3)]))
        self.moves = Moves()
        self.drawn = Drawn(self.moves, self.shape, exact=exact)

    # --- numbers -----------------------------------------------------------------------------------------------------

    def number(self) -> float:
        """A Python number: of three bits, or any."""
        if self.exact or self.rng.random() < 0.4:
            return float(self.rng.choice([-2, -0.5, 0.25, 0.5, 0.75, 2]))
        return float(self.rng.normal())

    def tensor(self, *shape: int) -> Tensor:
        if self.exact:
            return torch.from_numpy(np.asarray(self.rng.integers(-3, 4, size=shape) / 4.0)).to(self.dtype)
        fan = max(int(np.prod(shape[1:])), 1)
        return torch.from_numpy(np.asarray(self.rng.normal(size=shape) * 1.2 / fan**0.5)).to(self.dtype)

    def constant(self, *shape: int) -> Callable[[], Tensor]:
        """A parameter of the module, live."""
        place = len(self.moves.constants)
        self.moves.constants.append(nn.Parameter(self.tensor(*shape)))
        return lambda: self.moves.constants[place]

    def filled(self, module: nn.Module) -> nn.Module:
        """A module in our precision, its parameters and statistics drawn."""
        module.to(self.dtype)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.ndim:
                    parameter.copy_(self.tensor(*parameter.shape))
            for name, buffer in module.named_buffers():
                if name.endswith("running_mean"):
                    buffer.copy_(self.tensor(*buffer.shape))
                if name.endswith("running_var"):
                    buffer.copy_(self.tensor(*buffer.shape).abs() + 0.5)
        return module

    # --- modules -----------------------------------------------------------------------------------------------------

    def layer(self, shape: tuple[int, ...]) -> tuple[str, nn.Module]:
        """A layer for tensors of a shape, the batch not counted."""
        inplace = bool(self.rng.random() < 0.5)
        slope = self.number()
        choices: list[Callable[[], nn.Module]] = [
            lambda: nn.Linear(shape[-1], int(self.rng.integers(1, 6)), bias=bool(self.rng.random() < 0.7)),
            lambda: nn.Linear(shape[-1], shape[-1]),
            lambda: nn.ReLU(inplace),
            lambda: nn.LeakyReLU(slope, inplace),
            lambda: nn.PReLU(shape[0] if self.rng.random() < 0.5 else 1),
            lambda: nn.Dropout(0.5, inplace),
            nn.Identity,
            nn.Flatten,
            Doubled,
            Training,
        ]
        if not self.exact:
            choices += [nn.GELU, nn.Sigmoid, nn.Tanh, lambda: LambdaGELU(float(1 + 9 * self.rng.random()))]
            choices += [lambda: nn.BatchNorm1d(shape[0]), lambda: Normalize(0.3, 0.7)]
        if len(shape) == 3:
            choices += [self.convolution(shape), self.convolution(shape), lambda: nn.AvgPool2d(2, 1 + inplace)]
            if not self.exact:
                choices += [lambda: nn.BatchNorm2d(shape[0]), lambda: nn.AvgPool2d(3, 2, 1), nn.Dropout2d]
                choices += [lambda: nn.AdaptiveAvgPool2d(1)]
        if len(shape) == 1 and shape[0] in (4, 6):
            choices.append(lambda: nn.Unflatten(1, (1, 2, shape[0] // 2)))
        made = choices[self.rng.integers(len(choices))]()
        return type(made).__name__, self.filled(made)

    def convolution(self, shape: tuple[int, ...]) -> Callable[[], nn.Module]:
        rng = self.rng
        groups = int(rng.choice([g for g in (1, 2) if shape[0] % g == 0]))
        return lambda: nn.Conv2d(
            shape[0],
            groups * int(rng.integers(1, 3)),
            (int(rng.integers(1, 4)), int(rng.integers(1, 4))),
            stride=int(rng.integers(1, 3)),
            padding=(int(rng.integers(2)), int(rng.integers(2))) if rng.random() < 0.8 else "valid",
            dilation=int(rng.integers(1, 3)),
            groups=groups,
            bias=bool(rng.random() < 0.7),
        )

    def module(self, shape: tuple[int, ...]) -> tuple[str, nn.Module]:
        """A layer, alone, in a sequence or around one, with a trick played on it."""
        name, made = self.layer(shape)
        way = self.rng.random()
        if way < 0.15:
            made, name = nn.Sequential(made, nn.ReLU(bool(self.rng.random() < 0.5))), f"Sequential of {name}"
        elif way < 0.3:
            made, name = Residual(made, self.rng), f"Residual of {name}"
        tricks = [self.hook, self.pre_hook, self.hook_in_place, self.weight_norm, self.parametrized, self.pruned]
        tricks += [self.patched]
        if self.rng.random() < 0.4:
            trick = tricks[self.rng.integers(len(tricks))]
            if trick(made):
                self.drawn.kinds.append(trick.__name__)
        return name, made

    def hook(self, module: nn.Module) -> bool:
        factor = self.number()
        module.register_forward_hook(lambda m, inputs, output: output * factor)
        return True

    def pre_hook(self, module: nn.Module) -> bool:
        term = self.number()
        module.register_forward_pre_hook(lambda m, inputs: (inputs[0] + term,))
        return True

    def hook_in_place(self, module: nn.Module) -> bool:
        module.register_forward_hook(lambda m, inputs, output: output.mul_(-1))
        return True

    def weight_norm(self, module: nn.Module) -> bool:
        if not isinstance(module, nn.Linear) or self.exact:
            return False
        parametrizations.weight_norm(module)
        with torch.no_grad():
            module.parametrizations.weight.original0.mul_(2)
        return True

    def parametrized(self, module: nn.Module) -> bool:
        if not isinstance(module, nn.Linear | nn.Conv2d):
            return False

        class Halved(nn.Module):
            def forward(self, weight: Tensor) -> Tensor:
                return weight / 2

        parametrize.register_parametrization(module, "weight", Halved())
        return True

    def pruned(self, module: nn.Module) -> bool:
        if not isinstance(module, nn.Linear | nn.Conv2d):
            return False
        prune.l1_unstructured(module, "weight", 0.3)
        with torch.no_grad():
            # What the hook computed once is stale from here on.
            module.weight_orig.mul_(-0.5)
        return True

    def patched(self, module: nn.Module) -> bool:
        before = module.forward
        module.forward = lambda x: before(x) * -1  # type: ignore[method-assign]
        return True

    # --- moves -------------------------------------------------------------------------------------------------------

    def move(self, values: Values) -> tuple[str, Move]:
        """A move for tensors like ``values``."""
        at = int(self.rng.integers(max(0, len(values) - 4), len(values)))
        shape = tuple(values[at].shape[1:])
        way = self.rng.random()
        if way < 0.35:
            name, made = self.module(shape)
            place = len(self.moves.parts)
            self.moves.parts.append(made)
            return name, lambda v: v.append(self.moves.parts[place](v[at]))
        if way < 0.42 and len(self.moves.parts):
            place = int(self.rng.integers(len(self.moves.parts)))
            return "module called again", lambda v: v.append(self.moves.parts[place](v[at]))
        table = self.functions if way < 0.65 else self.in_place if way < 0.82 else self.views
        options = table(shape, self.partner(values, at))
        name = list(options)[self.rng.integers(len(options))]
        act = options[name]
        return name, lambda v: v.append(act(v[at], v))

    def partner(self, values: Values, at: int) -> int:
        """A tensor of the same shape as that at ``at``, if possible another."""
        same = [i for i, value in enumerate(values) if value.shape == values[at].shape]
        return int(self.rng.choice(same))

    def functions(self, shape: tuple[int, ...], other: int) -> dict[str, Callable[[Tensor, Values], Tensor]]:
        a, b = self.number(), self.number()
        c, w = self.constant(*shape), self.constant(3, shape[-1])
        wide = self.constant(1, *shape)
        square = self.constant(shape[-1], 2)

        def exchanged(x: Tensor, v: Values) -> Tensor:
            y = x * 1
            y.data = x * 2 + 1
            return y

        def late(x: Tensor, v: Values) -> Tensor:
            constant = torch.ones(shape[-1], dtype=x.dtype)
            y = x * constant
            constant.mul_(3)
            return y

        options: dict[str, Callable[[Tensor, Values], Tensor]] = {
            "F.relu": lambda x, v: F.relu(x),
            "torch.relu": lambda x, v: torch.relu(x),
            "F.leaky_relu": lambda x, v: F.leaky_relu(x, a),
            "F.prelu": lambda x, v: F.prelu(x, c().flatten()[:1]),
            "F.linear": lambda x, v: F.linear(x, w()),
            "@": lambda x, v: x @ square(),
            "·number": lambda x, v: x * a,
            "number·": lambda x, v: a * x,
            "+number": lambda x, v: x + a,
            "number−": lambda x, v: a - x,
            "·number+number": lambda x, v: x * a + b,
            "(−number)·number": lambda x, v: (x - a) * b,
            "neg": lambda x, v: -x,
            "−parameter": lambda x, v: x - c(),
            "parameter−": lambda x, v: c() - x,
            "·parameter": lambda x, v: x * wide(),
            "torch.add alpha": lambda x, v: torch.add(x, v[other], alpha=a),
            "torch.sub alpha": lambda x, v: torch.sub(x, v[other], alpha=a),
            "rsub alpha": lambda x, v: torch.rsub(x, c(), alpha=a),
            "sum": lambda x, v: x + v[other],
            "difference": lambda x, v: x - v[other],
            "F.dropout": lambda x, v: F.dropout(x, 0.5, self.moves.training),
            "autograd.Function": lambda x, v: Scaling.apply(x),
            "no_grad": lambda x, v: torch.no_grad()(torch.relu)(x),
            "data exchanged": exchanged,
            "constant changed later": late,
            "type": lambda x, v: x if type(x) is Tensor else -x,
            "zeros_like": lambda x, v: x + torch.zeros_like(x) - torch.full_like(x, a),
        }
        if not self.exact:
            options |= {
                "F.gelu": lambda x, v: F.gelu(x),
                "sigmoid": lambda x, v: x.sigmoid(),
                "tanh": lambda x, v: torch.tanh(x),
                "/number": lambda x, v: x / 3,
                "/parameter": lambda x, v: x.div(c().exp()),
                "F.batch_norm": lambda x, v: F.batch_norm(
                    x, *(v.detach().flatten()[: shape[0]] for v in (c(), c().exp())), training=self.moves.training
                ),
            }
        if len(shape) == 3:
            kernel = self.constant(2, shape[0], 2, 2)
            options["F.conv2d"] = lambda x, v: F.conv2d(x, kernel(), padding=1)
            options["F.avg_pool2d"] = lambda x, v: F.avg_pool2d(x, 2)
        if len(shape) == 1:
            bias = self.constant(2)
            options["addmm"] = lambda x, v: torch.addmm(bias(), x, square())
        return options

    def in_place(self, shape: tuple[int, ...], other: int) -> dict[str, Callable[[Tensor, Values], Tensor]]:
        a = self.number()
        c = self.constant(*shape)

        def assigned(x: Tensor, v: Values) -> Tensor:
            x[:] = v[other] * a
            return x

        def augmented(x: Tensor, v: Values) -> Tensor:
            x += v[other]
            x *= a
            return x

        def out_of_data(x: Tensor, v: Values) -> Tensor:
            x.data.add_(a)
            return x

        options: dict[str, Callable[[Tensor, Values], Tensor]] = {
            "relu_": lambda x, v: x.relu_(),
            "F.relu inplace": lambda x, v: F.relu(x, inplace=True),
            "F.leaky_relu inplace": lambda x, v: F.leaky_relu(x, a, inplace=True),
            "add_": lambda x, v: x.add_(v[other], alpha=a),
            "sub_": lambda x, v: x.sub_(c()),
            "mul_": lambda x, v: x.mul_(a),
            "neg_": lambda x, v: x.neg_(),
            "copy_": lambda x, v: x.copy_(v[other]),
            "x[:] =": assigned,
            "+=": augmented,
            ".data.add_": out_of_data,
            "detach().relu_": lambda x, v: x.detach().relu_(),
            "dropout inplace": lambda x, v: F.dropout(x, 0.5, self.moves.training, inplace=True),
            "view(-1).relu_": lambda x, v: x.flatten(1).relu_(),
        }
        if not self.exact:
            options |= {"tanh_": lambda x, v: x.tanh_(), "sigmoid_": lambda x, v: x.sigmoid_()}
            options["div_"] = lambda x, v: x.div_(3)
        return options

    def views(self, shape: tuple[int, ...], other: int) -> dict[str, Callable[[Tensor, Values], Tensor]]:
        options: dict[str, Callable[[Tensor, Values], Tensor]] = {
            "view": lambda x, v: x.view(x.size(0), -1),
            "reshape": lambda x, v: x.reshape(-1, *reversed(shape)),
            "flatten": lambda x, v: torch.flatten(x, 1),
            "view_as": lambda x, v: x.view_as(v[other]),
            "unsqueeze": lambda x, v: x.unsqueeze(1) if x.ndim < 4 else x,
            "x[:, None]": lambda x, v: x[:, None] if x.ndim < 4 else x[:, :],
            "squeeze": lambda x, v: x.squeeze(1),
            "x[:]": lambda x, v: x[:],
            "data": lambda x, v: x.data,
            "detach": lambda x, v: x.detach(),
            "clone": lambda x, v: x.clone(),
            "contiguous": lambda x, v: x.contiguous(),
            "to": lambda x, v: x.to(self.dtype),
        }
        if len(shape) > 1:
            options["transpose"] = lambda x, v: x.transpose(1, -1)
            options["transpose contiguous"] = lambda x, v: x.transpose(-1, 1).contiguous()
            options["permute"] = lambda x, v: x.permute(0, *range(x.ndim - 1, 0, -1))
        return options

    def spoil(self, shape: tuple[int, ...]) -> tuple[str, Move]:
        """A move that makes no network."""
        moves = self.moves
        a = self.number()

        def counted(x: Tensor) -> Tensor:
            moves.calls = getattr(moves, "calls", 0) + 1  # type: ignore[assignment]
            return x * moves.calls

        def caught(x: Tensor) -> Tensor:
            try:
                return x * float(x.detach().sum())
            except Exception:
                return x

        options: dict[str, Callable[[Tensor], Tensor]] = {
            "if sum > 0": lambda x: x if x.sum() > 0 else -x,
            "item": lambda x: x * x.abs().max().item(),
            "numpy": lambda x: x * float(x.detach().numpy().max()),
            "item, caught": caught,
            "random constant": lambda x: x + torch.rand(shape[-1], dtype=x.dtype),
            "rand_like": lambda x: x + torch.rand_like(x),
            "dropout in evaluation": lambda x: F.dropout(x, 0.5, training=True),
            "batch mean": lambda x: x - x.mean(0),
            "flip": lambda x: x.flip(0),
            "first sample": lambda x: x + x[0],
            "cumsum": lambda x: x.cumsum(0),
            "roll": lambda x: x.roll(1, 0),
            "batch size": lambda x: x / len(x) + a,
            "if one sample": lambda x: x if len(x) == 1 else x * 2,
            "index per sample": lambda x: x + torch.arange(len(x)).reshape(-1, *(1,) * len(shape)).to(x),
            "half": lambda x: x.half().to(x.dtype),
            "bfloat16": lambda x: x.bfloat16().to(x.dtype),
            "int": lambda x: x.int().to(x.dtype),
            "round": lambda x: x.round(),
            "square": lambda x: x * x,
            "softmax": lambda x: x.softmax(-1),
            "softplus": lambda x: F.softplus(x),
            "max": lambda x: x + x.max(),
            "counter": counted,
            "grad mode": lambda x: x if torch.is_grad_enabled() else -x,
            "memory": lambda x: x + float(x.untyped_storage()[0]),
        }
        name = list(options)[self.rng.integers(len(options))]
        act = options[name]
        return name, lambda v: v.append(act(v[-1]))

    # --- all together ------------------------------------------------------------------------------------------------

    def probe(self) -> Values | None:
        """What the moves compute of a few inputs; None if they fail or grow too large."""
        x = torch.full((3, *self.shape), -0.75, dtype=self.dtype)
        x[1:] = 1
        self.moves.eval()
        try:
            with torch.no_grad():
                # What torch says of overlapping memory can depend on the batch.
                self.moves.values(x[:1].clone())
                values = self.moves.values(x)
        except (RuntimeError, ValueError, IndexError):
            return None
        fine = all(bool(v.isfinite().all()) and float(v.abs().max()) < LARGEST and v.ndim < 5 for v in values)
        return values if fine and values[-1].numel() <= 300 else None

    def add(self, name: str, move: Move) -> bool:
        """Take a move, if it works."""
        self.moves.moves.append(move)
        if self.probe() is None:
            self.moves.moves.pop()
            return False
        self.drawn.kinds.append(name)
        return True

    def draw(self) -> Drawn:
        length = int(self.rng.integers(3, 10))
        spoiled_at = int(self.rng.integers(length)) if self.spoiled else -1
        for position in range(length):
            values = self.probe()
            assert values is not None
            if position == spoiled_at:
                name, move = self.spoil(tuple(values[-1].shape[1:]))
                if self.add(name, move):
                    self.drawn.bad.append(name)
            self.add(*self.move(values))
        values = self.probe()
        assert values is not None
        for value in values[-int(self.rng.integers(1, 5)) :]:
            self.moves.heads.append(self.filled(nn.Linear(value[0].numel(), 3)))
        for part in self.moves.modules():
            part.training = bool(self.rng.random() < 0.5)
        return self.drawn


def draw(seed: int) -> Drawn:
    """The module of a seed: of three in a row one is exact, and one is spoiled."""
    rng = np.random.default_rng(seed)
    return Draw(rng, exact=seed % 3 == 1, spoiled=seed % 3 == 2).draw()
