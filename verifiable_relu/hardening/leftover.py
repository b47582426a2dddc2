"""The smooth operators that a model still computes once its activations are replaced by ReLU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.nn.places import Place
from verifiable_relu.train.batches import Batch
from verifiable_relu.train.swap import Outputs

_MISSED = {"gelu", "silu"}
"""The operators that are always activations of hidden layers."""

_OTHERS = {"mish", "hardswish", "elu", "softplus", "sigmoid", "tanh", "erf", "_softmax", "native_layer_norm"}
"""The operators that may make up an activation, or are none that ReLU can replace."""


class _Watch(TorchDispatchMode):
    """A record of the smooth operators that run, with the module that each runs in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[tuple[str, str], None] = {}
        self._stack: list[str] = [""]
        self._hooks: list[Any] = []
        for path, module in model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(partial(self._enter, path)))
            self._hooks.append(module.register_forward_hook(self._leave, always_call=True))

    def _enter(self, path: str, module: nn.Module, inputs: Any) -> None:
        self._stack.append(path)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._stack.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__.removesuffix("_")
        if name in _MISSED | _OTHERS:
            self.found[self._stack[-1], name] = None
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()


@torch.no_grad()
def leftovers(hard: nn.Module, batch: Batch, outputs: Outputs) -> list[Place]:
    """The smooth operators that a model computes for a batch, by the modules that call them.

    Args:
        hard: a model whose activations were replaced by ReLU.
        batch: a batch of the user's data.
        outputs: runs the model.

    Raises:
        UnsupportedError: if GELU or SiLU are among them; the error names the module.
    """
    hard.eval()
    with _Watch(hard) as watch:
        outputs(hard, batch)
    modules = dict(hard.named_modules())
    places = []
    for path, name in watch.found:
        if name in _MISSED:
            place = f"module {path!r} ({type(modules[path]).__name__})"
            raise UnsupportedError(
                f"it computes {name} in a way that is not found in its code: call the activation as a module",
                place=place,
            )
        if not type(modules[path]).__module__.startswith("torch.nn."):
            places.append(Place(path, f"aten.{name}", why="ReLU cannot take its place by itself"))
    return places
