"""Architectures as ``nn.Sequential``, with the normalisation of the data as their first module; modules of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from verifiable_relu.errors import InputError
from verifiable_relu.nn.gates import LambdaGELU

Make = Callable[[], nn.Module]  # Makes an activation


class Normalize(nn.Module):
    """The normalisation (x − mean)/std per channel, with which a network takes inputs in [0, 1].

    Both are float32 buffers, shaped () for one number and (channels, 1, 1) for one of each channel; a ValueError if
    ``std`` is not positive and finite, or ``mean`` not finite.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float] | float, std: Sequence[float] | float) -> None:
        super().__init__()
        for name, value in (("mean", mean), ("std", std)):
            number = torch.as_tensor(value, dtype=torch.float32)
            self.register_buffer(name, number.reshape(()) if number.numel() == 1 else number.reshape(-1, 1, 1))
        if not (self.mean.isfinite().all() and self.std.isfinite().all() and (self.std > 0).all()):
            raise ValueError(f"the mean must be finite and the std positive and finite, got {mean} and {std}")

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


class Residual(nn.Module):
    """The residual block x ↦ act(x + conv(act(conv(x)))), with 3×3 kernels that keep channels, height and width."""

    def __init__(self, channels: int, activation: Make) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.inner = activation()
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.outer = activation()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.outer(x + self.second(self.inner(self.first(x))))
        return y


_WIDE = tuple((channels, 3, stride, 1) for channels, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (128, 1)))

LAYOUTS: dict[str, tuple[tuple[tuple[int, int, int, int], ...], tuple[int, ...]]] = {
    "cnn3": (((16, 5, 2, 2), (32, 4, 2, 1)), ()),
    "cnn5": (((16, 3, 1, 1), (16, 4, 2, 1), (32, 4, 2, 1)), (512,)),
    "cnn7": (_WIDE, (512,)),
    "resnet": (((8, 3, 2, 1), (16, 3, 2, 1)), (64,)),
}
"""Networks of fixed layers: channels, kernel, stride and padding of their convolutions, and sizes of hidden layers.

``cnn7`` has batch normalisations, and ``resnet`` a residual block after each convolution.
CNN3 and CNN5 are those of Mao et al., Understanding Certified Training with Interval Bound Propagation, arXiv
2306.10426, in the form of the published code, without batch normalisation. CNN7 is the large network of Gowal et al.,
arXiv 1810.12715, with the batch normalisations of Shi et al., Fast Certified Robust Training with Short Warmup, arXiv
2103.17245; it is the CNN7 of Müller et al. (SABR), arXiv 2210.04871.
"""


def mlp(sizes: Sequence[int], activation: Make = LambdaGELU, normalize: Normalize | None = None) -> nn.Sequential:
    """Make a fully connected network: Flatten, then Linear and an activation for each hidden layer, then Linear.

    ``sizes`` are those of the input, of each hidden layer and of the output; ``normalize`` comes before all else.
    """
    return _network(sizes[:1], (), sizes[1:-1], sizes[-1], activation, normalize)


def cnn(
    input_shape: tuple[int, int, int],
    channels: Sequence[int],
    hidden: Sequence[int],
    classes: int,
    activation: Make = LambdaGELU,
    normalize: Normalize | None = None,
) -> nn.Sequential:
    """Make a network of 4×4 convolutions of stride 2, which halve an even height and width, then as ``mlp``.

    ``input_shape`` is (channels, height, width); each convolution has output ``channels``, and each fully connected
    layer before the output a size in ``hidden``. Raises a ValueError if a padded input is smaller than its kernel.
    """
    convolutions = [(outputs, 4, 2, 1) for outputs in channels]
    return _network(input_shape, convolutions, hidden, classes, activation, normalize)


def fixed(
    name: str,
    input_shape: tuple[int, int, int],
    classes: int,
    activation: Make = LambdaGELU,
    normalize: Normalize | None = None,
) -> nn.Sequential:
    """Make the network of fixed layers with a name in ``LAYOUTS``; the rest is as in ``cnn``."""
    kinds = name == "cnn7", name == "resnet"
    return _network(input_shape, *LAYOUTS[name], classes, activation, normalize, *kinds)


def _network(
    input_shape: Sequence[int],
    convolutions: Sequence[tuple[int, int, int, int]],
    hidden: Sequence[int],
    classes: int,
    activation: Make,
    normalize: Normalize | None,
    batch_norm: bool = False,
    blocks: bool = False,
) -> nn.Sequential:
    """Convolutions without pooling, then fully connected layers; an activation after each layer but the last."""
    modules: list[nn.Module] = [] if normalize is None else [normalize]
    inputs, *size = input_shape
    for channels, kernel, stride, padding in convolutions:
        if min(size) + 2 * padding < kernel:
            fits = "×".join(map(str, size))
            raise ValueError(f"a {kernel}×{kernel} kernel does not fit the {fits} input of a layer")
        modules.append(nn.Conv2d(inputs, channels, kernel, stride, padding))
        modules += [nn.BatchNorm2d(channels)] if batch_norm else []
        modules.append(activation())
        modules += [Residual(channels, activation)] if blocks else []
        inputs, size = channels, [(n + 2 * padding - kernel) // stride + 1 for n in size]
    modules.append(nn.Flatten())
    inputs *= math.prod(size)
    for outputs in hidden:
        modules.append(nn.Linear(inputs, outputs))
        modules += [nn.BatchNorm1d(outputs)] if batch_norm else []
        modules.append(activation())
        inputs = outputs
    return nn.Sequential(*modules, nn.Linear(inputs, classes))


class Embedded(nn.Module):
    """A module that takes tokens, as a function of what one of its embeddings makes of them.

    It takes (batch, positions, width), or the same as vectors, and runs the module, which takes whole numbers (batch,
    positions), on ``tokens`` (positions,) with that in place of the result of the embedding, a part of it that is
    called once. All else that the module makes of tokens, such as a mask, is that of ``tokens``.

    Raises:
        InputError: if the embedding is no part of the module, or a token is none of its numbers.
    """

    tokens: Tensor

    def __init__(self, module: nn.Module, embedding: nn.Embedding, tokens: Tensor | Sequence[int]) -> None:
        super().__init__()
        if not any(part is embedding for part in module.modules()):
            raise InputError("the embedding is no part of the module")
        self.module, self.embedding = module, embedding
        self.register_buffer("tokens", self._known(tokens), persistent=False)

    def _known(self, tokens: Tensor | Sequence[int]) -> Tensor:
        found = torch.as_tensor(tokens, dtype=torch.long, device=self.embedding.weight.device)
        if found.ndim != 1 or not bool(((found >= 0) & (found < self.embedding.num_embeddings)).all()):
            raise InputError(f"tokens are a vector of numbers from 0 to {self.embedding.num_embeddings - 1}")
        return found

    def forward(self, x: Tensor) -> Tensor:
        embedded = x.reshape(len(x), len(self.tokens), -1)
        hook = self.embedding.register_forward_hook(lambda *called: embedded)
        try:
            made: Tensor = self.module(self.tokens.expand(len(x), -1))
            return made
        finally:
            hook.remove()

    @torch.no_grad()
    def box(self, choices: Sequence[Tensor | Sequence[int]] | None = None) -> tuple[Tensor, Tensor]:
        """Return the smallest box of embeddings of a set of tokens: both ends, (positions, width) each.

        What is proved of the box is proved of every sentence of these tokens; a counterexample in it need be none.
        ``choices`` has for each position the tokens that may stand there, by default ``tokens`` alone; others are an
        InputError.
        """
        given = list(self.tokens[:, None]) if choices is None else list(choices)
        sets = [self.embedding.weight[self._known(each)] for each in given]
        if len(sets) != len(self.tokens) or not all(len(each) for each in sets):
            raise InputError(f"for each of {len(self.tokens)} positions the tokens that may stand there are expected")
        return torch.stack([each.amin(0) for each in sets]), torch.stack([each.amax(0) for each in sets])
