"""Modules of every kind that is read: where sampling finds a change of class, the answer is *sat*."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifiable_relu import verify

VECTOR, IMAGE, TOKENS = (6,), (2, 6, 6), (5, 6)


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Last(nn.Module):
    """The memory format that vision models ask for, and a permutation to it and back."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


class Steps(nn.Module):
    """A recurrent layer, or a cell for each step, of which the last output counts."""

    def __init__(self, made: nn.Module) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.made, nn.RNNBase):
            found: Tensor = self.made(x)[0]
            return found[:, -1]
        state = None
        for each in x.unbind(1):
            state = self.made(each, state)
        return state[0] if isinstance(state, tuple) else state  # type: ignore[return-value]


def of(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Function(function)


def after(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(Last(), make())


KINDS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "mean": (VECTOR, of(lambda x: x - x.mean(1, keepdim=True))),
    "var": (VECTOR, of(lambda x: x - x.var(1, keepdim=True))),
    "std": (VECTOR, of(lambda x: x.abs() - x.std(1, keepdim=True))),
    "mean of tokens": (TOKENS, of(lambda x: x.mean(1))),
    "sum": (TOKENS, of(lambda x: x.sum(1))),
    "mean over space": ((2, 7, 7), of(lambda x: x.mean((2, 3)))),
    "layer norm": (TOKENS, lambda: nn.LayerNorm((5, 6))),
    "group norm": ((6, 3, 3), lambda: nn.GroupNorm(2, 6)),
    "instance norm": (IMAGE, lambda: nn.InstanceNorm2d(2)),
    "batch norm": (IMAGE, lambda: nn.BatchNorm2d(2)),
    "normalize": (VECTOR, of(lambda x: F.normalize(x))),
    "average pooling": (IMAGE, lambda: nn.AvgPool2d(3, 2, 1)),
    "average pooling, channels last": (IMAGE, after(lambda: nn.AvgPool2d(3))),
    "average pooling of a row": ((2, 9), lambda: nn.AvgPool1d(3)),
    "adaptive pooling": (IMAGE, lambda: nn.AdaptiveAvgPool2d(2)),
    "adaptive pooling, uneven": ((2, 7, 5), lambda: nn.AdaptiveAvgPool2d((3, 2))),
    "adaptive pooling, channels last": (IMAGE, after(lambda: nn.AdaptiveAvgPool2d(1))),
    "adaptive pooling of a row": ((2, 7), lambda: nn.AdaptiveAvgPool1d(1)),
    "max pooling": (IMAGE, lambda: nn.MaxPool2d(3, 2)),
    "nearest": (IMAGE, lambda: nn.Upsample(scale_factor=2)),
    "bilinear": (IMAGE, lambda: nn.Upsample(scale_factor=3, mode="bilinear")),
    "bicubic": (IMAGE, lambda: nn.Upsample(size=7, mode="bicubic")),
    "softmax": (VECTOR, lambda: nn.Softmax(1)),
    "log softmax": (VECTOR, lambda: nn.LogSoftmax(1)),
    "GELU by tanh": (VECTOR, lambda: nn.GELU("tanh")),
    "CELU": (VECTOR, lambda: nn.CELU(0.7)),
    **{f.__name__: (VECTOR, f) for f in (nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.SELU, nn.Softplus, nn.Softsign)},
    **{f.__name__: (VECTOR, f) for f in (nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.LogSigmoid, nn.PReLU)},
    **{f.__name__: (VECTOR, f) for f in (nn.Softshrink,)},
    **{f.__name__: (VECTOR, of(f)) for f in (torch.exp, torch.sin, torch.cos, torch.atan, torch.erf)},
    **{f.__name__: (VECTOR, of(f)) for f in (torch.sinh, torch.cosh, torch.tan, torch.expm1)},
    **{f.__name__: (VECTOR, of(lambda x, f=f: f(torch.tanh(x)))) for f in (torch.asin, torch.acos, torch.atanh)},
    "asinh": (VECTOR, of(torch.asinh)),
    "acosh": (VECTOR, of(lambda x: torch.acosh(x.relu() + 1.1))),
    "log1p": (VECTOR, of(lambda x: torch.log1p(x.relu()))),
    "a power": (VECTOR, of(lambda x: (x.abs() + 0.1) ** 1.3)),
    "a threshold": (VECTOR, lambda: nn.Threshold(0.1, 0.1)),
    "a third": (VECTOR, of(lambda x: x / 3)),
    "a cube": (VECTOR, of(lambda x: x**3)),
    "a product": (VECTOR, of(lambda x: x[:, :3] * x[:, 3:])),
    "a matrix of products": (TOKENS, of(lambda x: x @ x.transpose(1, 2))),
    "a maximum": (VECTOR, of(lambda x: torch.maximum(x[:, :3], x[:, 3:]))),
    "attention": (TOKENS, lambda: nn.TransformerEncoderLayer(6, 2, 12, batch_first=True, dropout=0)),
    "RNN": (TOKENS, lambda: Steps(nn.RNN(6, 3, 2, "relu", batch_first=True))),
    "RNN cell": (TOKENS, lambda: Steps(nn.RNNCell(6, 3))),
    "GRU": ((2, 3), lambda: Steps(nn.GRU(3, 2, batch_first=True, bidirectional=True))),
    "GRU cell": ((2, 3), lambda: Steps(nn.GRUCell(3, 2, bias=False))),
    "LSTM": ((2, 3), lambda: Steps(nn.LSTM(3, 2, batch_first=True))),
    "LSTM cell": ((2, 3), lambda: Steps(nn.LSTMCell(3, 2))),
    "convolution": (IMAGE, lambda: nn.ConvTranspose2d(2, 3, 3, 2)),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_sampling_finds_is_found_and_confirmed(name: str) -> None:
    shape, make = KINDS[name]
    torch.manual_seed(3)
    size = math.prod(shape)
    body = nn.Sequential(nn.Flatten(), nn.Linear(size, size), nn.Unflatten(1, shape), make(), nn.Flatten()).eval()
    x, samples = torch.rand(1, *shape), torch.rand(500, *shape)
    with torch.no_grad():
        head = nn.Linear(body(x).shape[1], 3)
        head.bias -= head(body(samples)).mean(0)
        model = nn.Sequential(body, head).eval()
        label = model(x).argmax(1)
        assert bool((model(samples).argmax(1) != label).any()), "the case is none"
    (result,) = verify(model, x, label, Fraction(1), timeout=20)
    assert result.answer == "sat", result.detail
