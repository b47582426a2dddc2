"""Adam or SGD with a learning rate of its own for the parameter s of each λ.

λ = 1 + softplus(s/t), so dλ/ds = σ(s/t)/t with σ the logistic function. Adam moves every parameter by about its
learning rate whatever the size of its gradient; a step η_s on s therefore moves λ by about η_s·σ/t. SGD's step is
proportional to the gradient, so that the chain rule enters twice: λ moves by η_s·(σ/t)²·∂L/∂λ. At the paper's t = 0.1
the plain η would move λ five times (Adam) or 25 times (SGD) as far as a weight at s = 0, and hardly at all near λ = 1.

             Adam                      SGD
    raw      c·η                       c·η                        the rate of arXiv 2603.21991
    matched  c·t·η                     c·t²·η                     the chain rule's powers of 1/t are taken out
    natural  c·t·η/max(σ, 0.05)        c·t²·η/max(σ, 0.05)²       λ moves as a weight would, times c, but near λ = 1

The parameter s gets no weight decay, which would pull λ to 1 + ln 2, an arbitrary value.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from verifiable_relu.nn import HardnessGate
from verifiable_relu.train.options import Options

LEAST_SLOPE = 0.05
"""The least σ by which a natural rate is divided."""


def make_optimizer(model: nn.Module, options: Options) -> torch.optim.Optimizer:
    """AdamW or SGD over a model's parameters.

    The groups of parameters are the matrices and kernels, which are decayed, all other parameters but λ's, and for each
    learning rate the λs that have it.
    """
    gates = [module for module in model.modules() if isinstance(module, HardnessGate)]
    own = {id(gate.s) for gate in gates}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in own]
    # Each group costs a call in every step, so that λs of equal learning rates share one group.
    together: dict[Any, list[int]] = defaultdict(list)
    for index, gate in enumerate(gates):
        together[index if options.lam_rate == "natural" else gate.temperature].append(index)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": options.decay, "gate": None},
        {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0, "gate": None},
        *({"params": [gates[i].s for i in same], "weight_decay": 0.0, "gate": same[0]} for same in together.values()),
    ]
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=options.rate, momentum=options.momentum)
    return torch.optim.AdamW(groups, lr=options.rate, betas=(options.beta1, options.beta2), fused=True)


def set_rates(optimizer: torch.optim.Optimizer, model: nn.Module, rate: float, options: Options) -> None:
    """Set the learning rate of every group, for the learning rate η = ``rate`` of the weights."""
    gates = [module for module in model.modules() if isinstance(module, HardnessGate)]
    for group in optimizer.param_groups:
        gate = group["gate"]
        group["lr"] = rate if gate is None else rate_of_s(gates[gate], rate, options)


def rate_of_s(gate: HardnessGate, rate: float, options: Options) -> float:
    """The learning rate η_s of the parameter s of a gate, for the learning rate η = ``rate`` of the weights."""
    raw = options.lam_factor * rate
    if options.lam_rate == "raw":
        return raw
    power = 2 if options.optimizer == "sgd" else 1
    matched = raw * gate.temperature**power
    if options.lam_rate == "matched":
        return matched
    return matched / max(float(torch.sigmoid(gate.s.detach() / gate.temperature)), LEAST_SLOPE) ** power
