"""What the study ``policies`` measures of a policy: what the swap changes, and what is proven; and a run to screen."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.common.records import Record
from benchmarks.common.script import RUNS
from benchmarks.training.policies_games import GAMES, Game
from benchmarks.training.policies_loop import reached
from benchmarks.training.policies_playing import EARLY, Settings, late, played, trained
from verifiable_relu import Perturbation, verify, verify_properties
from verifiable_relu.bounds.change import substitution_change
from verifiable_relu.ir.interval import Interval
from verifiable_relu.nn import substitute_relu
from verifiable_relu.readers import from_torch, read_onnx, write_onnx
from verifiable_relu.spec import Instance, Property, box_property, write_instances, write_vnnlib
from verifiable_relu.train.loop import Diverged

EPISODES = 50
"""The episodes that a policy plays, started with the same seeds for all arms."""

BALLS, RADII, LIMIT = 50, ("0.001", "0.01"), 10.0
"""The states around which is asked, the radii in units of the game's scales, and the seconds for a question."""

DRAWN = 10_000
"""The states that are drawn from the box of a game, evenly."""

_CLEAR = 1e-6
"""A margin below which a decision that is computed in float64 is not called clear; its error is far smaller."""


def regions(game: Game) -> list[Property]:
    """The regions of a game where it is plain what to do, as properties."""
    found = []
    for region in game.regions:
        low, high = zip(*[(Fraction(str(a)), Fraction(str(b))) for a, b in region.ranges], strict=True)
        others = [j for j in range(game.actions) if j != region.action]
        rows = np.zeros((len(others), game.actions), int)
        for row, other in zip(rows, others, strict=True):
            row[region.action], row[other] = (1, -1) if region.wanted else (-1, 1)
        # Not to take an action is to find another one better: the unsafe set has it at least as good as all.
        unsafe = [([row], [0]) for row in rows.tolist()] if region.wanted else [(rows.tolist(), [0] * len(rows))]
        found.append(box_property(low, high, unsafe=unsafe, name=region.says))
    return found


def measured(title: Mapping[str, Any]) -> Record:
    """Train a policy; returns as ``arms`` what each arm that comes of the training is like, by the arm's name."""
    game, name, seed = GAMES[title["game"]], title["arm"], title["seed"]
    middle: dict[str, Any] = {}
    training, policy, seconds = trained(
        title["game"],
        name,
        Settings(title["rate"], steps=title["steps"]),
        seed,
        swap=lambda smooth, hard: middle.update(swapped(smooth, hard, game, seed)),
    )
    beside = {"training_seconds": seconds, "lam": training.lam}
    if name == "gelu":
        hard = substitute_relu(policy)
        direct = {"swap": swapped(policy, hard, game, seed), **asked(hard, title, "gelu-swap")}
        return {"arms": {"gelu": {**asked(policy, title, "gelu"), **beside}, "gelu-swap": {**direct, **beside}}}
    hard = substitute_relu(policy)
    if name == "lambda-gelu":
        middle = swapped(policy, hard, game, seed)
    return {"arms": {name: {"swap": middle or None, **asked(hard, title, name), **beside}}}


def swapped(smooth: nn.Module, hard: nn.Module, game: Game, seed: int) -> Record:
    """What the swap of ReLU for a policy's activations changes: measured on states, and proven.

    Returns:
        ``before`` and ``after``, the mean returns; ``visited`` and ``drawn``, the parts of states seen by the smooth
        policy and drawn from the box for which it decides otherwise; ``proven``, the bound of the change of any output
        over the box; and the parts of visited states for which it is proven that the decision stays, by the change over
        the box (``kept``) and at the state (``kept_each``).
    """
    began = time.process_time()
    seen = played(smooth, game, EPISODES, seed)
    random = np.random.default_rng(seed)
    low, high = np.array(game.box).T
    drawn = random.uniform(low, high, (DRAWN, len(low))).astype(np.float32)
    states = seen.states[random.choice(len(seen.states), min(DRAWN, len(seen.states)), replace=False)]
    differ = [_decisions(smooth, each) != _decisions(hard, each) for each in (states, drawn)]
    network = from_torch(smooth, low.shape, exact=True)
    whole = substitution_change(network, Interval(*(torch.from_numpy(end)[None] for end in (low, high))))
    points = torch.from_numpy(states[:1000]).double()
    inside = ((points >= torch.from_numpy(low)) & (points <= torch.from_numpy(high))).all(1)
    each = substitution_change(network, Interval(points, points))
    with torch.no_grad():
        outputs = network(points)
    kept = [_kept(outputs, change).numpy() for change in (whole, each)]
    return {
        "before": seen.mean,
        "after": played(hard, game, EPISODES, seed).mean,
        "visited": float(differ[0].mean()),
        "drawn": float(differ[1].mean()),
        "proven": torch.maximum(-whole.lower, whole.upper).max().item(),
        "kept": float((kept[0] & inside.numpy()).mean()),
        "kept_each": float(kept[1].mean()),
        "seconds": time.process_time() - began,
    }


def _decisions(policy: nn.Module, states: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return policy(torch.from_numpy(states)).argmax(1).numpy()


def _kept(outputs: torch.Tensor, change: Interval) -> torch.Tensor:
    """Whether the largest output stays the largest by bounds of the change of each, (states,)."""
    best = outputs.argmax(1, keepdim=True)
    least = outputs + change.lower
    most = (outputs + change.upper).scatter(1, best, -math.inf)
    return least.gather(1, best)[:, 0] - most.amax(1) > _CLEAR


def asked(policy: nn.Module, title: Mapping[str, Any], arm: str) -> Record:
    """The return of a policy as it is deployed, and the answers to questions about it.

    The policy's file, and the files of the regions, go to ``runs/policies`` with a list that ``certify`` reads.
    """
    game, seed = GAMES[title["game"]], title["seed"]
    seen = played(policy, game, EPISODES, seed)
    network = from_torch(policy, (len(game.scales),))
    onnx = _file(title["game"], arm, seed)
    folder = onnx.parent
    folder.mkdir(parents=True, exist_ok=True)
    properties = regions(game)
    files = [folder / f"region_{i}.vnnlib" for i in range(len(properties))]
    write_onnx(network, onnx)
    for prop, file in zip(properties, files, strict=True):
        write_vnnlib(prop, file, comments=[prop.name])
    write_instances(onnx.with_suffix(".csv"), [Instance(onnx, file, LIMIT) for file in files])
    began = time.process_time()
    answers = [result.verdict.value for result in verify_properties(network, properties, timeout=LIMIT)]
    chosen = np.random.default_rng(seed).choice(len(seen.states), BALLS, replace=False)
    states = seen.states[chosen]
    labels = _decisions(policy, states)
    balls = {}
    for radius in RADII:
        eps = [Fraction(radius) * Fraction(str(scale)) for scale in game.scales]
        ball = Perturbation(clip=(-1000, 1000))
        found = verify(network, states, labels, np.array([eps], dtype=object), timeout=LIMIT, perturbation=ball)
        balls[radius] = [result.verdict.value for result in found]
    return {
        "return": seen.mean,
        "regions": answers,
        "balls": {radius: {v: found.count(v) for v in set(found)} for radius, found in balls.items()},
        "question_seconds": time.process_time() - began,
    }


def looped(title: Mapping[str, Any]) -> Record:
    """What is proven of the closed loop of a policy that was trained, from its file."""
    return {"boxes": reached(read_onnx(_file(title["game"], title["arm"], title["seed"])))}


def _file(game: str, arm: str, seed: int) -> Path:
    return RUNS / "policies" / game / f"{arm}_{seed}.onnx"


def drawn(number: int) -> Settings:
    """The settings of a run of the random search."""
    random = np.random.default_rng(number)
    return Settings(
        rate=float(10 ** random.uniform(-4, -1.5)),
        epochs=int(random.choice([1, 2, 4, 8])),
        batches=int(random.choice([2, 4, 8])),
        clip=float(random.uniform(0.05, 0.4)),
        entropy=float(10 ** random.uniform(-4, -1)),
        gae=float(random.uniform(0.8, 1.0)),
    )


def screened(title: Mapping[str, Any]) -> Record:
    """What a run looked like after a tenth of its training, and what it earned in the end."""
    game = GAMES[title["game"]]
    settings = Settings(title["rate"]) if title["rate"] else drawn(title["seed"])
    settings = replace(settings, steps=title["steps"])
    try:
        training, policy, seconds = trained(title["game"], "relu", settings, title["seed"], screened=True)
    except Diverged as error:
        return {"early": None, "return": None, "error": str(error)}
    first = max(1, round(EARLY * training.updates))
    early = {name: float(np.mean([each[name] for each in training.early])) for name in training.early[0]}
    # Patterns are a state, and are taken where it is looked; the others are moves, of which the mean says more.
    early |= {name: value for name, value in training.early[-1].items() if name.startswith("oui")}
    begun = late(training.earned, 0, first)
    return {
        "early": {**early, "return": None if math.isnan(begun) else begun, "log_rate": math.log(settings.rate)},
        "return": played(policy, game, 20, 0).mean,
        "seconds": seconds,
    }
