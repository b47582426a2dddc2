"""What a study measures of its trainings: patterns, unstable neurons, pruning, and the moments of a training."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.study import measuring
from benchmarks.study.measuring import SPARSITIES, Monitor, prune, settled, train_and_measure
from tests.support.trainings import BASE, PER_EPOCH, blobs
from verifiable_relu.nn import cnn
from verifiable_relu.train.loop import Callback, TrainingStep, build, train
from verifiable_relu.train.options import Options


def test_the_overlap_index_on_small_patterns() -> None:
    first = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 1, 1]], dtype=torch.bool)
    # Distances 1, 5 and 4 of 5 neurons, ⌊5/2⌋ = 2: ½, 1 and 1. The second layer never changes.
    second = torch.ones(3, 4, dtype=torch.bool)
    assert measuring.overlap_index([first]) == pytest.approx(2.5 / 3)
    assert measuring.overlap_index([first, second]) == pytest.approx(2.5 / 6)
    assert measuring.overlap_index([first[:, 1:2]]) == pytest.approx(2 / 3)
    # Of three images, ⌊3/2⌋ = 1: a neuron that is active for one or two of them tells as much apart as can be.
    assert measuring.balance_index(first) == pytest.approx(
        sum(0 < n < 3 for n in first.sum(0).tolist()) / first.shape[1]
    )
    assert measuring.balance_index(torch.eye(4, dtype=torch.bool)) == 0.5
    other = first.clone()
    other[0, 0] = False
    assert measuring.changed([first, second], [other, second]) == pytest.approx(1 / 27)
    assert measuring.relative_change(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0])) == pytest.approx(0.2)


# The moments of a training


def monitored(options: Options, callback: Callback | None = None) -> Monitor:
    """The measurements of a training."""
    data = blobs()
    monitor = Monitor(torch.from_numpy(data.images), options.epochs * PER_EPOCH)
    monitor.look(build(options, data), 0)

    def look(state: TrainingStep) -> None:
        monitor(state)
        if callback is not None:
            callback(state)

    train(options, data, callback=look)
    return monitor


@pytest.mark.thorough
@pytest.mark.parametrize("arm", ["relu", "gelu-swap"])
def test_the_looks_are_at_the_network_of_their_moment(arm: str) -> None:
    options, x = replace(BASE, arm=arm, epochs=2), torch.from_numpy(blobs().images)
    models = [build(options, blobs())]
    points = monitored(options, lambda state: models.append(deepcopy(state.model))).points
    assert len(models) == len(points) == 2 * PER_EPOCH + 1
    for model, point in zip(models, points, strict=True):
        assert point["oui"] == measuring.overlap_index(measuring.patterns(model, x))
    assert points[0]["patterns_changed"] == points[0]["weights_changed"] == 0
    for before, after, point in zip(models, models[1:], points[1:], strict=False):
        flips = [a != b for a, b in zip(measuring.patterns(before, x), measuring.patterns(after, x), strict=True)]
        assert point["patterns_changed"] == pytest.approx(torch.cat(flips, 1).float().mean().item())
        old, new = (torch.cat([p.flatten() for p in m.parameters() if p.ndim == 2]) for m in (before, after))
        assert point["weights_changed"] == pytest.approx(((new - old).norm() / old.norm()).item(), rel=1e-5)


def test_a_training_that_is_resumed_has_the_same_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = blobs()
    _, _, whole = train_and_measure(BASE, data, data, tmp_path / "whole.checkpoint")
    results = whole["results"]
    assert 0 < results["worst_logit_change"] <= results["proven_logit_change"] < 100 * results["worst_logit_change"]
    assert list(results["pruned"]) == ["0.5", "0.7", "0.9"] and 0 < results["patterns_settled"] < 1
    assert abs(results["int8"]["clean"] - results["clean"]) < 0.05
    look = Monitor.look

    def interrupted(self: Monitor, model: nn.Module, step: int) -> None:
        look(self, model, step)
        if step == 2 * PER_EPOCH + 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Monitor, "look", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_and_measure(BASE, data, data, tmp_path / "net.checkpoint")
    monkeypatch.setattr(Monitor, "look", look)
    _, _, resumed = train_and_measure(BASE, data, data, tmp_path / "net.checkpoint")
    assert resumed["results"] == results


def points(*changes: float) -> list[dict[str, float]]:
    return [{"part": k / (len(changes) - 1), "change": change} for k, change in enumerate(changes)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ((0, 1, 1, 1, 1), 0.9),
        ((0, 4, 0, 0, 0), 0.9 / 4),
        ((0, 0, 0, 0, 7), 0.75 + 0.9 / 4),
        # 8, 9 and 10 of 10 at ¼, ½ and ¾.
        ((0, 8, 1, 1, 0), 0.5),
        ((0, 7, 1, 2, 0), 0.625),
        ((0, 0, 0, 0, 0), 0.0),
    ],
)
def test_settled_is_where_nine_tenths_of_the_path_are_made(changes: tuple[float, ...], expected: float) -> None:
    assert settled(points(*changes), "change") == pytest.approx(expected)
    assert settled(points(*changes), "change", most=0.5) <= expected


# Pruning


@pytest.mark.parametrize("sparsity", [*SPARSITIES, 0.0, 1.0])
def test_the_smallest_weights_are_pruned_and_nothing_else(sparsity: float) -> None:
    torch.manual_seed(0)
    model = cnn((2, 6, 6), (5,), (7,), 3, nn.PReLU)
    pruned = prune(model, sparsity)
    before = torch.cat([p.detach().flatten() for p in model.parameters() if p.ndim > 1])
    after = torch.cat([p.detach().flatten() for p in pruned.parameters() if p.ndim > 1])
    gone = after == 0
    assert int(gone.sum()) == round(sparsity * len(before))
    assert torch.equal(after[~gone], before[~gone])
    if 0 < sparsity < 1:
        assert before[gone].abs().max() <= before[~gone].abs().min()
    for name, parameter in model.named_parameters():
        assert parameter.ndim > 1 or torch.equal(parameter, pruned.get_parameter(name)), name
    assert (before != 0).all(), "the model itself is left alone"
