"""Small vision Transformers: patches of an image, attention and feed-forward blocks with normalisation in front.

The architecture is that of Dosovitskiy et al., An Image is Worth 16x16 Words, arXiv 2010.11929, with the mean over all
tokens in place of a class token (Beyer et al., arXiv 2205.01580). A model is a sequence of its stages, so that the
inputs of a block are the outputs of the stages in front of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Patches(nn.Module):
    """An image (n, channels, height, width) as tokens (n, tokens, width of a token), by patches and their places."""

    def __init__(self, shape: tuple[int, int, int], patch: int, width: int) -> None:
        super().__init__()
        channels, height, breadth = shape
        if height % patch or breadth % patch:
            raise ValueError(f"images of {height}×{breadth} pixels are not made of patches of {patch}×{patch}")
        self.embed = nn.Conv2d(channels, width, patch, stride=patch)
        self.places = nn.Parameter(torch.randn(height // patch * (breadth // patch), width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x).flatten(2).transpose(1, 2) + self.places


class Attention(nn.Module):
    """x + out(attention(norm(x))): each token takes in what it attends to, by the softmax of scaled products."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        queries, keys, values = (
            part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        weights = torch.softmax(queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1]), -1)
        return x + self.out((weights @ values).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """x + second(act(first(norm(x)))), for each token alone."""

    def __init__(self, width: int, hidden: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.act = activation()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.act(self.first(self.norm(x))))


class Classes(nn.Module):
    """The outputs of a linear map of the mean of all tokens."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(x.mean(1))
        return y


def vit(
    shape: tuple[int, int, int],
    patch: int,
    width: int,
    heads: int,
    hidden: int,
    layers: int,
    classes: int,
    activation: Callable[[], nn.Module] = nn.GELU,
) -> nn.Sequential:
    """Make a vision Transformer: ``Patches``, then ``Attention`` and ``FeedForward`` by turns, then ``Classes``.

    Images have the shape (channels, height, width), tokens ``width`` numbers and feed-forward blocks ``hidden`` ones;
    ``layers`` is the number of pairs of blocks.
    """
    blocks: list[nn.Module] = []
    for _ in range(layers):
        blocks += [Attention(width, heads), FeedForward(width, hidden, activation)]
    return nn.Sequential(Patches(shape, patch, width), *blocks, Classes(width, classes))
