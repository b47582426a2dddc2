"""The substitution of smooth activations by ReLU that ends the hardening."""

from __future__ import annotations

from copy import deepcopy

from torch import nn

from verifiable_relu.nn.activation import LambdaGELU


def substitute_relu(model: nn.Module) -> nn.Module:
    """A copy of ``model`` with every ``LambdaGELU`` and ``nn.GELU`` replaced by ``nn.ReLU``, all else as it was.

    A layer's output changes by at most 0.1699712075/λ per neuron (``nn.activation``). Names, order, weights,
    training mode and modules that are used twice are kept.
    """
    if isinstance(model, LambdaGELU | nn.GELU):
        return nn.ReLU().train(model.training)
    copy = deepcopy(model)
    for parent in list(copy.modules()):
        # Not named_children(), which passes over the second name of a module that is used twice.
        for name, child in parent._modules.items():
            if isinstance(child, LambdaGELU | nn.GELU):
                setattr(parent, name, nn.ReLU().train(child.training))
    return copy
