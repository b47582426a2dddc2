"""Small torch modules of the kinds that people export: one for each layer, function and pattern."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]


class Does(nn.Module):
    """A module that is a function, with layers before and after it that mix what it takes and gives."""

    def __init__(self, function: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.layers = nn.ModuleDict(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, **self.layers) if self.layers else self.function(x)


def conv(inside: int = 2, out: int = 3, **options: Any) -> nn.Conv2d:
    """A convolution of 3×3 kernels, padded unless told otherwise."""
    return nn.Conv2d(inside, out, 3, **{"padding": 1, **options})


class BasicBlock(nn.Module):
    """The block of a small residual network, with a shortcut that has a stride."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv(2, 4, stride=2, bias=False), conv(4, 4, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.BatchNorm2d(4)])
        self.short = nn.Conv2d(2, 4, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.norms[2](self.short(x)))


class Attention(nn.Module):
    """Scaled dot-product attention of heads, with matrices of its own."""

    def __init__(self, heads: int, causal: bool) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in self.maps)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if self.causal:
            scores = scores + torch.full((3, 3), -math.inf).triu(1)
        return (torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2)


class Excited(nn.Module):
    """Channels weighed by a sigmoid of what they are on average."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.inner = conv(2, 4), nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 4), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y * self.inner(y.mean((2, 3)))[:, :, None, None]


def attended(x: Tensor, f: nn.Module) -> Tensor:
    """The output of torch's attention of a sequence to itself, without its weights."""
    found: Tensor = f(x, x, x, need_weights=False)[0]
    return found


def transformer(norm_first: bool) -> nn.Module:
    """Torch's layer of a Transformer, with two heads."""
    return nn.TransformerEncoderLayer(4, 2, 8, activation="gelu", batch_first=True, norm_first=norm_first)


def line(*parts: nn.Module) -> nn.Sequential:
    """Parts of four features between two affine layers."""
    return nn.Sequential(nn.Linear(5, 4), *parts, nn.Linear(4, 2))


def image(*parts: nn.Module, out: int = 3) -> nn.Sequential:
    """Parts between a convolution and the flattening of what they give."""
    return nn.Sequential(conv(2, out), *parts, nn.Flatten())


FLAT: Shape = (5,)
IMAGE: Shape = (2, 6, 6)

MODULES: dict[str, tuple[Callable[[], nn.Module], Shape]] = {
    # Activations of vectors.
    "relu": (lambda: line(nn.ReLU()), FLAT),
    "relu6": (lambda: line(nn.ReLU6()), FLAT),
    "leaky relu": (lambda: line(nn.LeakyReLU(0.2)), FLAT),
    "prelu": (lambda: line(nn.PReLU(4)), FLAT),
    "sigmoid": (lambda: line(nn.Sigmoid()), FLAT),
    "tanh": (lambda: line(nn.Tanh()), FLAT),
    "gelu": (lambda: line(nn.GELU()), FLAT),
    "gelu by tanh": (lambda: line(nn.GELU(approximate="tanh")), FLAT),
    "silu": (lambda: line(nn.SiLU()), FLAT),
    "mish": (lambda: line(nn.Mish()), FLAT),
    "elu": (lambda: line(nn.ELU(0.7)), FLAT),
    "selu": (lambda: line(nn.SELU()), FLAT),
    "celu": (lambda: line(nn.CELU(1.5)), FLAT),
    "softplus": (lambda: line(nn.Softplus()), FLAT),
    "hardswish": (lambda: line(nn.Hardswish()), FLAT),
    "sine and cosine": (lambda: line(Does(lambda x: torch.sin(x) + torch.cos(x))), FLAT),
    "square": (lambda: line(Does(lambda x: x**2)), FLAT),
    "product with itself": (lambda: line(Does(lambda x: x * x + x**3)), FLAT),
    "exponential": (lambda: line(Does(lambda x: torch.exp(-(x**2)))), FLAT),
    "euclidean norm": (lambda: Does(lambda x: torch.sqrt((x * x).sum(1, keepdim=True) + 1)), FLAT),
    "log of a sum of exponentials": (lambda: Does(lambda x: torch.log(torch.exp(x).sum(1))), FLAT),
    "hardtanh": (lambda: line(nn.Hardtanh(-0.5, 0.75)), FLAT),
    "hardsigmoid": (lambda: line(nn.Hardsigmoid()), FLAT),
    "clamp from below": (lambda: line(Does(lambda x: x.clamp(min=-0.25))), FLAT),
    "clamp on both sides": (lambda: line(Does(lambda x: torch.clamp(x, -0.25, 0.5))), FLAT),
    "absolute value": (lambda: line(Does(torch.abs)), FLAT),
    "maximum of two": (lambda: line(Does(lambda x: torch.maximum(x, 1 - x))), FLAT),
    "minimum with a number": (lambda: line(Does(lambda x: torch.minimum(x, torch.tensor(0.3)))), FLAT),
    "maxout": (lambda: line(Does(lambda x: x.reshape(-1, 2, 2).amax(2).repeat(1, 2))), FLAT),
    # Arithmetic.
    "normalisation": (lambda: line(Does(lambda x: (x - 0.3) / 0.7)), FLAT),
    "affine function": (lambda: line(Does(lambda x: 3 - 2 * x)), FLAT),
    "residual": (lambda: line(Does(lambda x, f: x + F.relu(f(x)), f=nn.Linear(4, 4))), FLAT),
    "difference of branches": (lambda: line(Does(lambda x, f: F.relu(x) - f(x), f=nn.Linear(4, 4))), FLAT),
    "matrix from the left": (lambda: Does(lambda x: (torch.ones(2, 5) @ x.unsqueeze(2)).squeeze(2)), FLAT),
    "bilinear with constants": (lambda: Does(lambda x: torch.einsum("bi,oi->bo", x, torch.ones(3, 5))), FLAT),
    "batch norm of vectors": (lambda: line(nn.BatchNorm1d(4), nn.ReLU()), FLAT),
    "dropout": (lambda: line(nn.Dropout(0.3), nn.ReLU()), FLAT),
    "linear without a bias": (lambda: nn.Sequential(nn.Linear(5, 3, bias=False), nn.ReLU()), FLAT),
    # Movements of vectors.
    "concatenation": (lambda: Does(lambda x, f: torch.cat([x, F.relu(f(x))], 1), f=nn.Linear(5, 3)), FLAT),
    "slices": (lambda: Does(lambda x: F.relu(x[:, 1:4]) - x[:, :3]), FLAT),
    "slices with a step": (lambda: Does(lambda x: F.relu(x[:, ::2])), FLAT),
    "chunks": (lambda: Does(lambda x: torch.relu(torch.chunk(x[:, :4], 2, 1)[1])), FLAT),
    "chosen features": (lambda: Does(lambda x: F.relu(x[:, [4, 0, 2]])), FLAT),
    "stack": (lambda: Does(lambda x: torch.stack([x, -x], 1).sum(1) + torch.stack([x, x], 2).mean(2)), FLAT),
    "flip": (lambda: line(Does(lambda x: torch.flip(x, [1]))), FLAT),
    "roll": (lambda: line(Does(lambda x: torch.roll(x, 1, 1))), FLAT),
    "expand": (lambda: Does(lambda x: x.unsqueeze(1).expand(-1, 3, -1).flatten(1)), FLAT),
    "repeat": (lambda: Does(lambda x: F.relu(x.repeat(1, 2))), FLAT),
    "mask": (lambda: Does(lambda x: x.masked_fill(torch.tensor([0, 1, 0, 0, 1]).bool(), 0.5)), FLAT),
    "pad of vectors": (lambda: Does(lambda x: F.relu(F.pad(x, (1, 2), value=0.5))), FLAT),
    "cumulative sum": (lambda: Does(lambda x: torch.cumsum(x, 1)), FLAT),
    # Reductions.
    "mean": (lambda: Does(lambda x: x.mean(1, keepdim=True)), FLAT),
    "sum": (lambda: Does(lambda x: x.sum(-1)), FLAT),
    "largest": (lambda: Does(lambda x: x.amax(1, keepdim=True)), FLAT),
    "smallest": (lambda: Does(lambda x: x.amin(1)), FLAT),
    # Images.
    "cnn": (lambda: image(nn.ReLU(), conv(3, 2, stride=2), nn.ReLU()), IMAGE),
    "basic block": (BasicBlock, IMAGE),
    "max pool": (lambda: image(nn.MaxPool2d(2)), IMAGE),
    "max pool, padded": (lambda: image(nn.MaxPool2d(3, 2, padding=1)), IMAGE),
    "max pool, ceil mode": (lambda: image(nn.MaxPool2d(4, 3, ceil_mode=True), out=1), IMAGE),
    "max pool, dilated": (lambda: image(nn.MaxPool2d(2, 1, dilation=2), out=1), IMAGE),
    "average pool": (lambda: image(nn.AvgPool2d(2)), IMAGE),
    "average pool, padded": (lambda: image(nn.AvgPool2d(3, 2, padding=1)), IMAGE),
    "average pool, padding left out": (lambda: image(nn.AvgPool2d(3, 2, 1, count_include_pad=False)), IMAGE),
    "adaptive average pool": (lambda: image(nn.AdaptiveAvgPool2d(1)), IMAGE),
    "adaptive average pool to a grid": (lambda: image(nn.AdaptiveAvgPool2d((3, 2))), IMAGE),
    "adaptive max pool": (lambda: image(nn.AdaptiveMaxPool2d((2, 2)), out=1), IMAGE),
    "mean of pixels": (lambda: Does(lambda x, f: F.relu(f(x)).mean((2, 3)), f=conv()), IMAGE),
    "grouped convolution": (lambda: image(nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), out=4), IMAGE),
    "depthwise separable": (lambda: image(nn.Conv2d(3, 3, 3, groups=3), nn.ReLU6(), nn.Conv2d(3, 2, 1)), IMAGE),
    "dilated convolution": (lambda: image(nn.Conv2d(3, 2, 2, dilation=2)), IMAGE),
    "convolution padded same": (lambda: image(nn.Conv2d(3, 2, 4, padding="same")), IMAGE),
    "convolution, reflection padding": (lambda: conv(padding_mode="reflect"), IMAGE),
    "convolution, circular padding": (lambda: conv(padding_mode="circular"), IMAGE),
    "zero padding": (lambda: image(nn.ZeroPad2d((1, 0, 2, 1))), IMAGE),
    "replication padding": (lambda: image(nn.ReplicationPad2d(1)), IMAGE),
    "transposed convolution": (lambda: image(nn.ReLU(), nn.ConvTranspose2d(3, 2, 3, stride=2)), (2, 4, 4)),
    "transposed convolution, output padding": (
        lambda: image(nn.ConvTranspose2d(3, 2, 3, 2, padding=1, output_padding=1)), (2, 4, 4)
    ),
    "upsampling, nearest": (lambda: image(nn.Upsample(scale_factor=2), out=1), (2, 4, 4)),
    "upsampling, bilinear": (lambda: image(nn.Upsample(scale_factor=2, mode="bilinear"), out=1), (2, 4, 4)),
    "upsampling, corners aligned": (
        lambda: image(nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), out=1), (2, 4, 4)
    ),
    "pixel shuffle": (lambda: image(nn.PixelShuffle(2), out=4), (2, 4, 4)),
    "pixel unshuffle": (lambda: image(nn.PixelUnshuffle(2)), IMAGE),
    "batch norm": (lambda: image(nn.BatchNorm2d(3), nn.ReLU()), IMAGE),
    "channels last": (lambda: Does(lambda x, f: f(x.permute(0, 2, 3, 1)), f=nn.Linear(2, 3)), IMAGE),
    "dense block": (lambda: Does(lambda x, f: torch.cat([x, F.relu(f(x))], 1), f=conv(2, 2)), IMAGE),
    "global max": (lambda: Does(lambda x, f: f(x).amax((2, 3)), f=conv(2, 2)), (2, 3, 3)),
    # Sequences and volumes.
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.ReLU(), nn.Flatten()), (2, 7)),
    "pools in one dimension": (lambda: nn.Sequential(nn.AvgPool1d(2), nn.MaxPool1d(2, 1)), (2, 7)),
    "conv transpose 1d": (lambda: nn.ConvTranspose1d(2, 3, 4, stride=2), (2, 5)),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(1, 2, 2), nn.ReLU(), nn.AvgPool3d(2, 1)), (1, 3, 3, 4)),
    "patches": (lambda: Does(lambda x, f: f(x).flatten(2).transpose(1, 2), f=nn.Conv2d(2, 3, 2, 2)), IMAGE),
    # Products of computed values.
    "product of two": (lambda: line(Does(lambda x, f: f(x) * torch.tanh(x), f=nn.Linear(4, 4))), FLAT),
    "quotient": (lambda: line(Does(lambda x: x / (1 + x.abs()))), FLAT),
    "reciprocal root": (lambda: line(Does(lambda x: torch.rsqrt(x * x + 1) + 1 / (2 + torch.sigmoid(x)))), FLAT),
    "powers": (lambda: line(Does(lambda x: x**4 - x**5 + (x * x + 1) ** -1 + 2**x)), FLAT),
    "gated": (lambda: Does(lambda x, f, g: F.silu(f(x)) * g(x), f=nn.Linear(5, 3), g=nn.Linear(5, 3)), FLAT),
    "glu": (lambda: nn.Sequential(nn.Linear(5, 6), nn.GLU()), FLAT),
    "softmax": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Softmax(-1), nn.Linear(4, 2)), FLAT),
    "softmax of two": (lambda: nn.Sequential(nn.Linear(5, 2), nn.Softmax(-1), nn.Linear(2, 2)), FLAT),
    "log softmax": (lambda: nn.Sequential(nn.Linear(5, 3), nn.LogSoftmax(-1)), FLAT),
    "softmin": (lambda: nn.Sequential(nn.Linear(5, 3), nn.Softmin(-1)), FLAT),
    "layer norm": (lambda: line(nn.LayerNorm(4), nn.ReLU()), FLAT),
    "layer norm of images": (lambda: image(nn.LayerNorm((3, 4, 4)), nn.ReLU()), (2, 4, 4)),
    "group norm": (lambda: image(nn.GroupNorm(2, 4), nn.ReLU(), out=4), (2, 3, 3)),
    "instance norm": (lambda: image(nn.InstanceNorm2d(3, affine=True), nn.ReLU()), (2, 3, 3)),
    "attention head": (lambda: Attention(1, False), (3, 4)),
    "attention, two heads": (lambda: Attention(2, False), (3, 4)),
    "attention, causal": (lambda: Attention(2, True), (3, 4)),
    "multihead attention": (lambda: Does(attended, f=nn.MultiheadAttention(4, 2, batch_first=True)), (3, 4)),
    "transformer layer": (lambda: transformer(norm_first=True), (3, 4)),
    "transformer layer, normalised last": (lambda: transformer(norm_first=False), (3, 4)),
    "scores by einsum": (lambda: Does(lambda x, f: torch.einsum("bid,bjd->bij", f(x), x), f=nn.Linear(4, 4)), (3, 4)),
    "squeeze and excitation": (lambda: Excited(), (2, 3, 3)),
    "mixer": (lambda: Does(lambda x, f: f(x.transpose(1, 2)).transpose(1, 2), f=nn.Linear(3, 3)), (3, 4)),
}  # fmt: skip


def module(name: str) -> tuple[nn.Module, Shape]:
    """A module in evaluation mode, with weights and statistics that differ, and the shape of one sample."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        make, shape = MODULES[name]
        made = make().eval()
        for part in made.modules():
            if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
                assert part.running_mean is not None and part.running_var is not None
                for tensor in (part.running_mean, part.weight, part.bias):
                    nn.init.normal_(tensor)
                nn.init.uniform_(part.running_var, 0.5, 2)
            if isinstance(part, nn.PReLU):
                nn.init.uniform_(part.weight, -0.5, 1.5)
    assert math.prod(shape) <= 72
    return made, shape
