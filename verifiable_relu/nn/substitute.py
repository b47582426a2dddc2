"""The substitution of smooth activations by ReLU, with which a training with λ-GELU ends."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from torch import nn

from verifiable_relu.nn.hardness import Hardness
from verifiable_relu.nn.places import replace_smooth
from verifiable_relu.nn.rectifiers import HIDDEN, Rectifier


def substitute_relu(model: nn.Module, inplace: bool = False, activations: Sequence[str] = HIDDEN) -> nn.Module:
    """A copy of a model with ``nn.ReLU`` in place of every smooth activation (``nn.places.replace_smooth``).

    Replaced are activations with a λ, and GELU, SiLU, Mish and Hardswish, whether they are modules or functions that a
    forward calls. The output of an activation with a λ changes by at most ``Hardness.supremum``/λ, that of
    λ-GELU by 0.16997120748/λ. The names, order, weights and training mode of the modules stay, and a module that
    is used twice stays one module.

    Args:
        model: the model.
        inplace: whether the model itself is changed and returned, unless it is such an activation itself.
        activations: the names of the activations that are replaced (``nn.rectifiers.RECTIFIERS``).

    Raises:
        UnsupportedError: if a forward calls such a function and cannot be traced; the error names the module.
        InputError: if the model is no torch module, or for an unknown activation.
    """
    return replace_smooth(model if inplace else deepcopy(model), _relu, activations)[0]


def _relu(_: Rectifier | Hardness) -> nn.Module:
    return nn.ReLU()
