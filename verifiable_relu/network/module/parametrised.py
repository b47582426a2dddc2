"""Weights that a parametrisation of torch computes, or one of torch's old hooks: numbers of the module by definition.

The number meant is the one that ``module.weight`` returns in evaluation mode, and that stays where the parametrisation
is removed. Parametrisations are those of ``torch.nn.utils.parametrize`` (weight normalisation, spectral normalisation
and orthogonal matrices among others); the hooks are ``torch.nn.utils.weight_norm``, ``spectral_norm`` and ``prune``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from verifiable_relu.errors import UnsupportedError

Give = Callable[[Callable[[], Tensor]], Tensor]
"""What a layer is to get in the place of a weight, given the function that computes the weight."""


@contextmanager
def parametrised(module: nn.Module, give: Callable[[], Give]) -> Iterator[None]:
    """Let a function see, or exchange, each weight that a parametrisation or an old hook computes.

    The module itself is run, since not every module can be copied; it is afterwards what it was.

    Args:
        module: with any number of such layers inside.
        give: called once for each weight; makes the function.

    Raises:
        UnsupportedError: if the module comes by further parametrisations meanwhile.
    """
    computing = _computing(module)
    with ExitStack() as stack:
        for part, key in computing:
            if key is None:
                _exchange(stack, part.__dict__, "forward", _given(give(), part.forward))
            else:
                hooks = part._forward_pre_hooks
                _exchange(stack, hooks, key, _hook(give(), hooks[key]))
        yield
    if _computing(module) != computing:
        raise UnsupportedError("it changes its parametrisations while it runs")


def _computing(module: nn.Module) -> list[tuple[nn.Module, Any]]:
    """The parametrisations inside a module, and the layers with an old hook, with the hook's key."""
    return [
        (part, key)
        for part in module.modules()
        for key, hook in [(None, part), *part._forward_pre_hooks.items()]
        if isinstance(hook, ParametrizationList | WeightNorm | SpectralNorm | BasePruningMethod)
    ]


def _exchange(stack: ExitStack, table: Any, key: Any, value: Any) -> None:
    if key in table:
        stack.callback(table.__setitem__, key, table[key])
    else:
        stack.callback(table.pop, key)
    table[key] = value


def _given(give: Give, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: give(compute)


def _hook(give: Give, hook: Any) -> Callable[[nn.Module, Any], None]:
    name = hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name

    def set_weight(layer: nn.Module, inputs: Any) -> None:
        def compute() -> Tensor:
            hook(layer, inputs)
            made: Tensor = getattr(layer, name)
            return made

        setattr(layer, name, give(compute))

    return set_weight


def once() -> Give:
    """A weight that is computed once, and is a constant from then on."""
    made: list[Tensor] = []

    def give(compute: Callable[[], Tensor]) -> Tensor:
        if not made:
            made.append(compute().detach())
        return made[0]

    return give
