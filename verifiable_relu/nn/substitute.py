"""The substitution of smooth activations by ReLU, with which a training with λ-GELU ends."""

from __future__ import annotations

from copy import deepcopy

from torch import nn

from verifiable_relu.nn.hardness import HardnessGate

SMOOTH = (HardnessGate, nn.GELU, nn.SiLU)
"""The classes of smooth activations that tend to ReLU for large inputs of either sign, and that ReLU can replace."""


def substitute_relu(model: nn.Module, inplace: bool = False) -> nn.Module:
    """A copy of a model with ``nn.ReLU`` in place of every smooth activation (``SMOOTH``).

    The output of a λ-GELU or λ-Swish changes by at most 0.1699712075/λ (``nn.activation``). The names, order, weights
    and training mode of the modules stay, and a module that is used twice stays one module.

    Args:
        model: the model.
        inplace: whether the model itself is changed and returned, unless it is such an activation itself.
    """
    if isinstance(model, SMOOTH):
        return nn.ReLU().train(model.training)
    copy = model if inplace else deepcopy(model)
    for parent in list(copy.modules()):
        # named_children() would leave out the second name of a module that is used twice.
        for name, child in parent._modules.items():
            if isinstance(child, SMOOTH):
                setattr(parent, name, nn.ReLU().train(child.training))
    return copy
