"""Printable names of what records name by identifiers."""

from __future__ import annotations

import re

NAMES = {
    "lambda-gelu": "λ-GELU, hardened",
    "lambda-gelu-frozen": "λ-GELU, λ not learned",
    "swish": "λ-Swish, hardened",
    "gelu": "GELU",
    "gelu-swap": "GELU, swapped",
    "gelu-swap-finetune": "GELU, swapped, fine-tuned",
    "gelu-swap-finetune-extra": "GELU, swapped, fine-tuned longer",
    "relu": "ReLU",
    "prelu": "PReLU",
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "adult": "Adult",
    "digits": "digits",
    "mlp": "MLP",
    "cnn": "CNN",
    "crown": "CROWN",
    "alpha-crown": "α-CROWN",
    "ibp": "IBP",
    "milp": "MILP",
    "smt": "SMT",
    "bab": "branch and bound",
    "split": "input split",
}
"""The printable name of each identifier that is more than its words."""


def spoken(text: str) -> str:
    """A text with identifiers, parted by ", ", as a reader expects it; what has no name keeps its words."""
    return ", ".join(_word(part) for part in text.split(", "))


def _word(part: str) -> str:
    if part in NAMES:
        return NAMES[part]
    first, blank, rest = part.partition(" ")
    return NAMES.get(first, first.replace("_", " ")) + blank + rest


def natural(text: str) -> list[str | int]:
    """A key by which texts are sorted as a reader expects it, numbers in them as numbers."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", text))]
