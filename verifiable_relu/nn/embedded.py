"""Modules that take tokens, as functions of the tokens' embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from verifiable_relu.errors import InputError


class Embedded(nn.Module):
    """A module that takes tokens, as a function of what one of its embeddings makes of them.

    It takes (batch, positions, width), or the same as vectors, and runs the module on ``tokens`` with that in place of
    the embedding's result. All else that the module makes of tokens, such as a mask, is that of ``tokens``.

    Args:
        module, embedding: takes whole numbers, (batch, positions), and the part of it that embeds them, called once.
        tokens: (positions,), about which is asked.

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
        ``choices`` has for each position the tokens that may stand there, by default ``tokens`` alone.

        Raises:
            InputError: if there are not as many choices as positions, or some are empty or no tokens.
        """
        given = list(self.tokens[:, None]) if choices is None else list(choices)
        sets = [self.embedding.weight[self._known(each)] for each in given]
        if len(sets) != len(self.tokens) or not all(len(each) for each in sets):
            raise InputError(f"for each of {len(self.tokens)} positions the tokens that may stand there are expected")
        return torch.stack([each.amin(0) for each in sets]), torch.stack([each.amax(0) for each in sets])
