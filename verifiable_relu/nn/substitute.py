"""The substitution of smooth activations by ReLU that ends the hardening."""

from __future__ import annotations

from copy import deepcopy

from torch import nn

from verifiable_relu.nn.hardness import HardnessGate


def substitute_relu(model: nn.Module, inplace: bool = False) -> nn.Module:
    """A copy of ``model`` with ``nn.ReLU`` for every λ-GELU, λ-Swish and ``nn.GELU``, all else as it was.

    A layer's output changes by at most 0.1699712075/λ per neuron (``nn.activation``). Names, order, weights,
    training mode and modules that are used twice are kept. With ``inplace``, ``model`` itself is changed and returned
    (unless it is such an activation).
    """
    if isinstance(model, HardnessGate | nn.GELU):
        return nn.ReLU().train(model.training)
    copy = model if inplace else deepcopy(model)
    for parent in list(copy.modules()):
        # Not named_children(), which passes over the second name of a module that is used twice.
        for name, child in parent._modules.items():
            if isinstance(child, HardnessGate | nn.GELU):
                setattr(parent, name, nn.ReLU().train(child.training))
    return copy
