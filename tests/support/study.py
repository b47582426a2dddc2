"""Records of a study that nobody has made, with a truth that is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from verifiable_relu.train.options import Options

Record = dict[str, Any]

EPS = ("1/255", "2/255")
METHODS = ("crown", "auto")
ARMS = ("lambda-gelu", "relu", "gelu-swap")
LIMIT = 5.0

Answer = Callable[[str, float, int, int, str, str], tuple[str, float]]
"""A function of arm, weight, seed, image, ε and method, to a verdict and its seconds."""


def claim(name: str, **fields: Any) -> Record:
    """A claim on ``certified`` of lambda-gelu against relu, with other ``fields``."""
    base = {
        "name": name, "says": f"Claim {name}.", "network": "net", "arm": "lambda-gelu", "against": "relu",
        "objective": "plain", "weight": 0.0, "measure": "certified", "eps": "1/255", "method": "auto",
        "expected": "more",
    }  # fmt: skip
    return {**base, **fields}


def suite(seeds: int, claims: Sequence[Record] = (), weights: Sequence[float] = (0.0,)) -> Record:
    """The record of a suite of one network."""
    network = {"name": "net", "data": "digits", "eps": list(EPS), "images": 20, "seeds": seeds, "arms": list(ARMS)}
    network["methods"] = list(METHODS)
    described = {
        "about": "Is it so?", "tuning": "None.", "cut": "Much.", "networks": [{**network, "training": {}}],
        "arms": list(ARMS), "variants": [],
        "objectives": [{"name": "plain", "option": "l1", "weights": list(weights), "training": {}}],
        "methods": [{"name": method, "limit": LIMIT} for method in METHODS], "claims": list(claims),
    }  # fmt: skip
    return {"kind": "suite", "name": "made", "digest": "", "suite": described, "text": ""}


def network(
    arm: str,
    seed: int,
    right: Sequence[int],
    answer: Answer,
    *,
    weight: float = 0.0,
    images: int = 20,
    results: Mapping[str, Any] | None = None,
    measures: Mapping[str, Any] | None = None,
) -> list[Record]:
    """The records of one trained network and of all its answers."""
    cell = f"net_{arm}_{weight}_{seed}"
    training = {
        "kind": "training", "cell": cell, "network": "net", "data": "digits", "architecture": "MLP", "arm": arm,
        "objective": "plain", "weight": weight, "seed": seed, "status": "trained", "detail": "",
        "options": asdict(Options("digits", arm=arm, seed=seed)),
        "results": {"clean": len(right) / images, "lam_learned": [], "monitor": [], **(results or {})},
        "epochs": [{"lam": [], "accuracy": 0.5}],
    }  # fmt: skip
    made: list[Record] = [
        training,
        {"kind": "images", "cell": cell, "images": list(range(images)), "right": list(right)},
    ]
    for eps in EPS:
        for method in METHODS:
            for image in right:
                verdict, seconds = answer(arm, weight, seed, image, eps, method)
                made.append(
                    {
                        "kind": "answer", "cell": cell, "eps": eps, "method": method, "image": image,
                        "verdict": verdict, "seconds": seconds, "subproblems": int(100 * seconds), "limit": LIMIT,
                    }
                )  # fmt: skip
    for name, value in (measures or {}).items():
        made.append({"kind": "measure", "cell": cell, "name": name, "value": value})
    return made


def failed(arm: str, seed: int) -> Record:
    """The record of a training that diverged."""
    (training, *_) = network(arm, seed, (), lambda *_: ("unknown", 0.0))
    return {**training, "status": "diverged", "detail": "the loss is infinite or NaN", "results": {}, "epochs": []}
