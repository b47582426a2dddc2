"""Adam with a rate of its own for the parameter s behind each λ.

λ = 1 + softplus(s/t), so dλ/ds = σ(s/t)/t with σ the logistic function. Adam moves every parameter by about its
learning rate whatever the size of its gradient; a step η_s on s therefore moves λ by about η_s·σ/t. At the paper's
t = 0.1 the plain η would move λ five times as far as a weight at s = 0, and hardly at all near λ = 1.

    raw      η_s = c·η                      the rate of arXiv 2603.21991, whatever the optimiser
    matched  η_s = c·t·η                    λ moves by c·η·σ: the chain rule's 1/t is taken out
    natural  η_s = c·t·η/max(σ, 0.05)       λ moves by c·η itself, but near λ = 1, where σ → 0

(For SGD, whose step is proportional to the gradient, the chain rule enters twice and t² and σ² would stand here.)
s is never decayed: decay would pull λ to 1 + ln 2, which means nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from verifiable_relu.nn import LambdaGELU
from verifiable_relu.train.options import Options

LEAST_SLOPE = 0.05


def make_optimizer(model: nn.Module, options: Options) -> torch.optim.AdamW:
    """AdamW with three kinds of groups: matrices and kernels (decayed), biases, and one group for each λ."""
    gates = [module for module in model.modules() if isinstance(module, LambdaGELU)]
    own = {id(gate.s) for gate in gates}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in own]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": options.decay, "gate": None},
        {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0, "gate": None},
        *({"params": [gate.s], "weight_decay": 0.0, "gate": index} for index, gate in enumerate(gates)),
    ]
    return torch.optim.AdamW(groups, lr=options.rate)


def set_rates(optimizer: torch.optim.Optimizer, model: nn.Module, rate: float, options: Options) -> None:
    """Give every group its learning rate for η = ``rate``."""
    gates = [module for module in model.modules() if isinstance(module, LambdaGELU)]
    for group in optimizer.param_groups:
        gate = group["gate"]
        group["lr"] = rate if gate is None else rate_of_s(gates[gate], rate, options)


def rate_of_s(gate: LambdaGELU, rate: float, options: Options) -> float:
    """η_s for η = ``rate``, by ``options.lam_rate``."""
    raw = options.lam_factor * rate
    if options.lam_rate == "raw":
        return raw
    matched = raw * gate.temperature
    if options.lam_rate == "matched":
        return matched
    return matched / max(float(torch.sigmoid(gate.s.detach() / gate.temperature)), LEAST_SLOPE)
