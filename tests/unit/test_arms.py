"""The arms of the comparison: their common data, the replacement by ReLU, and the measurements."""

import json
import math
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from verifiable_relu.data import Dataset
from verifiable_relu.errors import InputError
from verifiable_relu.nn import HardnessGate, substitute_relu
from verifiable_relu.nn.gates import SUPREMUM
from verifiable_relu.train import loop, monitor, schedule
from verifiable_relu.train.export import export, finish
from verifiable_relu.train.loop import Progress, build, measure_swap, train
from verifiable_relu.train.monitor import settled
from verifiable_relu.train.options import ARMS, Model, Options
from verifiable_relu.train.swap import measure

PER_EPOCH = 4


def blobs() -> Dataset:
    """Two hundred noisy images of three classes."""
    random = np.random.default_rng(1)
    centres = random.random((3, 1, 4, 4))
    labels = random.integers(0, 3, 200)
    images = np.clip(centres[labels] + random.normal(0, 0.15, (200, 1, 4, 4)), 0, 1).astype(np.float32)
    return Dataset("blobs", images, labels, (0.5,), (0.3,), np.ones(200, bool))


BASE = Options("blobs", hidden=(12, 12), epochs=4, batch=50, rate=2e-2, eps=0.02, seed=5)
FINETUNED = replace(BASE, arm="gelu-swap-finetune")
EXTRA = replace(FINETUNED, finetune_extra=3)


def stop_at(last: int) -> Progress:
    """A progress that interrupts the training after the step ``last``."""

    def stop(step: int, _: str) -> None:
        if step == last:
            raise KeyboardInterrupt

    return stop


def types(model: nn.Sequential) -> list[str]:
    return [type(module).__name__ for module in model]


@pytest.mark.seldom
@pytest.mark.thorough
def test_arms_share_weights_order_and_points(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[torch.Tensor]] = {arm: [] for arm in ARMS}
    weights = {}
    real = loop.objective
    for arm, points in seen.items():

        def record(model: nn.Sequential, x: torch.Tensor, *rest: object, points: list[torch.Tensor] = points) -> object:
            points.append(x)
            return real(model, x, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(loop, "objective", record)
        options = replace(BASE, arm=arm, crop=1, flip=True)
        initial = build(options, blobs())
        weights[arm] = [initial[index].weight for index in (2, 4, 6)]
        train(options, blobs())
    for arm, points in seen.items():
        assert len(points) == 4 * PER_EPOCH, arm
        assert all(torch.equal(a, b) for a, b in zip(points, seen["relu"], strict=True)), arm
        assert all(torch.equal(a, b) for a, b in zip(weights[arm], weights["relu"], strict=True)), arm


@pytest.mark.thorough
@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_learns_and_becomes_its_network(arm: str, tmp_path: Path) -> None:
    data = blobs()
    options = replace(BASE, arm=arm, epochs=8)
    trained = train(options, data)
    results = export(trained, options, data, data, tmp_path / "net.onnx")
    assert results["clean"] > 0.9
    assert ("clean_after_substitution" in results) == (ARMS[arm].swap != "never")
    for name in ("int8", "int8_per_tensor"):
        assert abs(results[name]["clean"] - results["clean"]) < 0.03 and results[name]["calibration_images"] == 200
        assert 0 < results[name]["mean_logit_change"] < 0.1
    assert list(results["pruned"]) == ["0.5", "0.7", "0.9"] and results["pruned"]["0.5"] > 0.6
    hard, record = finish(trained, options, data, data)
    assert types(hard)[3] == ("ReLU" if ARMS[arm].ends_in_relu else ARMS[arm].activation)
    lam = np.array([epoch["lam"] for epoch in record["epochs"]])
    if options.anneals:
        assert lam.shape == (8, 2) and lam[-1] == pytest.approx([160, 160], rel=1e-5)
        assert len(results["lam_learned"]) == 2
    else:
        assert lam.shape == (8, 0) and results["lam_learned"] == []
    assert all(0 < point["unstable"] < 24 for point in results["monitor"])
    assert json.loads((tmp_path / "net.json").read_text())["results"]["clean"] == results["clean"]


@pytest.mark.thorough
def test_a_frozen_lambda_moves_only_by_the_schedule() -> None:
    learned, frozen = (train(replace(BASE, arm=arm), blobs()) for arm in ("lambda-gelu", "lambda-gelu-frozen"))
    assert frozen.history[0]["lam"] == pytest.approx([BASE.lam_init] * 2) and frozen.learned == frozen.history[0]["lam"]
    assert learned.history[0]["lam"] != frozen.history[0]["lam"]
    expected = schedule.hardness("log", BASE.lam_init, 160, 1 / 3)
    assert frozen.history[1]["lam"] == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.seldom
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["linear", "log", "inverse"])
def test_a_ramp_that_learns_goes_on_from_what_was_learned(
    name: schedule.Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves: list[tuple[float, float]] = []
    real = HardnessGate.set_lam

    def record(gate: HardnessGate, value: float) -> None:
        moves.append((gate.lam.item(), value))
        real(gate, value)

    options = replace(BASE, hidden=(12,), schedule=name, ramp="learning", lam_target=30.0)
    frozen = train(replace(options, ramp="frozen"), blobs())
    monkeypatch.setattr(HardnessGate, "set_lam", record)
    learning = train(options, blobs())
    ramp, last = moves[-1 - 3 * PER_EPOCH : -1], moves[-1]
    assert last[1] == 30 and len(ramp) == 3 * PER_EPOCH
    for left, (before, value) in zip(range(len(ramp), 0, -1), ramp, strict=True):
        assert value == pytest.approx(schedule.hardness(name, before, 30, 1 / left), rel=1e-6)
    learned_steps = [abs(before - value) for (_, value), (before, _) in pairwise(ramp)]
    assert max(learned_steps) > 1e-3
    assert learning.history[-1]["lam"] == pytest.approx([30], rel=1e-5)
    assert learning.history[0] | {"seconds": 0} == frozen.history[0] | {"seconds": 0}


@pytest.mark.seldom
@pytest.mark.parametrize(("switch", "first"), [(0.0, 0), (0.1, 1), (0.5, 2), (0.75, 3), (0.99, 3)])
def test_lambda_grows_from_the_epoch_of_the_switch_on(switch: float, first: int) -> None:
    options = replace(BASE, switch=switch, arm="lambda-gelu-frozen", schedule="linear")
    assert options.first_annealed == first
    lam = [epoch["lam"][0] for epoch in train(options, blobs()).history]
    assert [value > BASE.lam_init + 1e-3 for value in lam] == [epoch >= first for epoch in range(4)]


@pytest.mark.parametrize(
    ("on", "tolerance", "expected"),
    [("gate", 0.005, 159.577), ("function", 2e-5, 158.114), ("supremum", 1e-3, 169.971)],
)
def test_targets_from_a_tolerance_are_the_distances_meant(on: str, tolerance: float, expected: float) -> None:
    lam = replace(BASE, tolerance=tolerance, tolerance_on=on).target
    assert lam == pytest.approx(expected, rel=1e-5)
    x = torch.linspace(-8 / lam, 8 / lam, 200_001, dtype=torch.float64)
    step = (x[1] - x[0]).item()
    gate = torch.special.ndtr(lam * x)
    distance = {
        "gate": (gate - (x > 0).double()).abs().sum().item() * step,
        "function": (torch.relu(x) - x * gate).sum().item() * step,
        "supremum": (torch.relu(x) - x * gate).max().item(),
    }[on]
    assert distance == pytest.approx(tolerance, rel=1e-4)
    with pytest.raises(InputError, match="--tolerance: asks for a λ below 1"):
        replace(BASE, tolerance=2.0)


@pytest.mark.thorough
def test_fine_tuning_at_equal_total_epochs_swaps_at_the_switch() -> None:
    trained = train(FINETUNED, blobs())
    assert len(trained.history) == 4 and trained.swap is not None and trained.swapped == 1
    assert types(trained.model)[3] == "ReLU"


@pytest.mark.seldom
@pytest.mark.thorough
def test_extra_fine_tuning_begins_where_direct_swap_ends() -> None:
    data = blobs()
    plain, extra = train(replace(BASE, arm="gelu-swap"), data), train(EXTRA, data, test=data)
    assert len(extra.history) == 7 and extra.swap is not None and extra.swapped == 4
    direct = measure_swap(plain.model, substitute_relu(plain.model), data)
    assert direct == extra.swap
    rates = [schedule.rate_at(EXTRA, step, PER_EPOCH) for step in range(7 * PER_EPOCH)]
    assert rates[: 4 * PER_EPOCH] == [schedule.rate_at(BASE, step, PER_EPOCH) for step in range(4 * PER_EPOCH)]
    again = rates[4 * PER_EPOCH :]
    assert again == sorted(again, reverse=True) and 0.9 * 2e-3 < again[0] <= 2e-3 and 0 < again[-1] < 2e-4
    with pytest.raises(InputError, match="--arm: must be gelu-swap-finetune"):
        replace(BASE, finetune_extra=1)


@pytest.mark.seldom
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "at"),
    [
        (FINETUNED, 2),
        (EXTRA, 4 * PER_EPOCH - 1),
        (replace(BASE, ramp="learning"), 4 * PER_EPOCH - 1),
        (replace(BASE, optimizer="sgd"), 2),
    ],
)
def test_resumed_arms_are_the_uninterrupted_ones(options: Options, at: int, tmp_path: Path) -> None:
    saved = tmp_path / "net.checkpoint"
    whole = train(options, blobs())

    stopped = options.total_epochs * PER_EPOCH >= PER_EPOCH + at
    if stopped:
        with pytest.raises(KeyboardInterrupt):
            train(options, blobs(), saved, stop_at(PER_EPOCH + at))
    resumed = train(options, blobs(), saved)
    assert whole.monitor == resumed.monitor
    assert whole.swap == resumed.swap and whole.learned == resumed.learned
    assert types(whole.model) == types(resumed.model)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


@pytest.mark.thorough
def test_a_checkpoint_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    saved = tmp_path / "net.checkpoint"
    whole = train(FINETUNED, blobs())
    with pytest.raises(KeyboardInterrupt):
        train(FINETUNED, blobs(), saved, stop_at(2 * PER_EPOCH + 2))
    content = torch.load(saved, weights_only=True)
    swap = content["state"]["swap"]
    content["state"]["swap"] = {
        "epoch": 1,
        "images": swap["samples"],
        "clean_before": swap["accuracy_smooth"],
        "clean_after": swap["accuracy"],
        "mean_change": swap["mean"],
        "worst_change": swap["worst"],
        "flipped": swap["flipped"],
        "proven_change": swap["proven"],
    }
    torch.save(content, saved)
    resumed = train(FINETUNED, blobs(), saved)
    assert resumed.swap == whole.swap and resumed.swapped == 1
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


# What the replacement does


def test_the_measured_disruption_is_exact_on_two_images() -> None:
    """One neuron z = x, logits (2a + 0.05, 0) for its activation a: GELU(±1) = ±Φ(±1)."""
    last = nn.Linear(1, 2)
    first = nn.Linear(1, 1)
    with torch.no_grad():
        first.weight.fill_(1)
        first.bias.zero_()
        last.weight.copy_(torch.tensor([[2.0], [0.0]]))
        last.bias.copy_(torch.tensor([0.05, 0.0]))
    smooth = nn.Sequential(nn.Flatten(), first, nn.GELU(), last)
    images, labels = torch.tensor([[1.0], [-1.0]]), torch.tensor([0, 0])
    swap = measure(smooth, substitute_relu(smooth), [(images, labels)], region=(0.0, 1.0))
    gap = 0.15865525393145707  # Φ(−1), by which GELU lies below ReLU at both
    assert swap.mean == pytest.approx(2 * gap / 2, rel=1e-6) and swap.worst == pytest.approx(2 * gap)
    assert (swap.accuracy_smooth, swap.accuracy, swap.flipped, swap.samples) == (0.5, 1.0, 1, 2)
    # On [0, 1] the largest gap is the supremum, at 0.75.
    assert swap.proven is not None
    assert 2 * SUPREMUM <= swap.proven <= 2 * SUPREMUM * (1 + 1e-6)


@pytest.mark.parametrize("arm", ["lambda-gelu", "gelu-swap", "swish"])
def test_the_measured_disruption_is_within_the_proven_one(arm: str) -> None:
    data = blobs()
    options = replace(BASE, arm=arm, epochs=2)
    _, record = finish(train(options, data), options, data, data)
    results = record["results"]
    assert 0 < results["mean_logit_change"] < results["worst_logit_change"] <= results["proven_logit_change"]
    assert results["worst_logit_change"] > 0.01 * results["proven_logit_change"]


# Patterns


def test_the_overlap_index_on_small_patterns() -> None:
    first = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 1, 1]], dtype=torch.bool)
    # Distances 1, 5 and 4 of 5 neurons, ⌊5/2⌋ = 2: ½, 1 and 1. The second layer never changes.
    second = torch.ones(3, 4, dtype=torch.bool)
    assert monitor.overlap_index([first]) == pytest.approx(2.5 / 3)
    assert monitor.overlap_index([first, second]) == pytest.approx(2.5 / 6)
    assert monitor.overlap_index([first[:, 1:2]]) == pytest.approx(2 / 3)
    # Of three images, ⌊3/2⌋ = 1: a neuron that is active for one or two of them tells as much apart as can be.
    assert monitor.balance_index(first) == pytest.approx(sum(0 < n < 3 for n in first.sum(0).tolist()) / first.shape[1])
    assert monitor.balance_index(torch.eye(4, dtype=torch.bool)) == 0.5
    other = first.clone()
    other[0, 0] = False
    assert monitor.changed([first, second], [other, second]) == pytest.approx(1 / 27)
    assert monitor.relative_change(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0])) == pytest.approx(0.2)


def test_patterns_are_the_signs_of_the_pre_activations() -> None:
    model = build(BASE, blobs())
    x = torch.from_numpy(blobs().images)
    first, second = monitor.patterns(model, x)
    assert torch.equal(first, model[:3](x) > 0) and torch.equal(second, model[:5](x) > 0)


@pytest.mark.parametrize("eps", [0.02, 0.1])
def test_unstable_neurons_are_those_of_the_relu_network_by_intervals(eps: float) -> None:
    model = build(replace(BASE, arm="gelu-swap"), blobs())
    x = torch.from_numpy(blobs().images)
    lb, ub = (x - eps).clamp(0, 1), (x + eps).clamp(0, 1)
    count = 0
    for layer in [nn.Flatten(), *model]:
        if isinstance(layer, nn.Linear):
            lb, ub = (
                low @ layer.weight.clamp_min(0).T + high @ layer.weight.clamp_max(0).T + layer.bias
                for low, high in ((lb, ub), (ub, lb))
            )
        elif isinstance(layer, nn.GELU):
            count += int(((lb < 0) & (ub > 0)).sum())
            lb, ub = lb.relu(), ub.relu()
        else:
            lb, ub = layer(lb), layer(ub)
    assert monitor.unstable_neurons(model, x, eps) == pytest.approx(count / len(x), abs=0.011)
    assert 0 < count < 24 * len(x)


# Monitors


@pytest.mark.thorough
def test_there_is_a_look_at_each_twentieth_of_a_training() -> None:
    for options in (replace(BASE, epochs=11), replace(EXTRA, epochs=8)):
        steps = 11 * PER_EPOCH
        points = train(options, blobs()).monitor
        assert [point["step"] for point in points] == [math.ceil(k * steps / 20) for k in range(21)]
        assert [point["part"] for point in points] == [point["step"] / steps for point in points]
    short = train(replace(BASE, epochs=2), blobs()).monitor
    assert [point["step"] for point in short] == list(range(9))


def models_of(options: Options, data: Dataset, patch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Copies of the network before each step of its training, and after the last."""
    seen: list[nn.Module] = []
    real = loop.objective

    def keep(model: nn.Module, *rest: object) -> object:
        seen.append(deepcopy(model))
        return real(model, *rest)  # type: ignore[arg-type]

    patch.setattr(loop, "objective", keep)
    last = train(options, data).model
    return [*seen, last]


@pytest.mark.thorough
@pytest.mark.parametrize("arm", ["relu", "gelu-swap"])
def test_the_looks_are_at_the_network_of_their_moment(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = blobs()
    options = replace(BASE, arm=arm, epochs=2)
    points = train(options, data).monitor
    models = models_of(options, data, monkeypatch)
    x = torch.from_numpy(data.images)
    assert len(models) == len(points) == 2 * PER_EPOCH + 1
    for model, point in zip(models, points, strict=True):
        assert point["oui"] == monitor.overlap_index(monitor.patterns(model, x))
        assert point["unstable"] == monitor.unstable_neurons(model, x, options.eps)
    assert points[0]["patterns_changed"] == points[0]["weights_changed"] == 0
    for before, after, point in zip(models, models[1:], points[1:], strict=False):
        flips = [a != b for a, b in zip(monitor.patterns(before, x), monitor.patterns(after, x), strict=True)]
        assert point["patterns_changed"] == pytest.approx(torch.cat(flips, 1).float().mean().item())
        old, new = (torch.cat([p.flatten() for p in m.parameters() if p.ndim == 2]) for m in (before, after))
        assert point["weights_changed"] == pytest.approx(((new - old).norm() / old.norm()).item(), rel=1e-5)


def test_the_last_look_sees_the_hardened_network() -> None:
    trained = train(BASE, blobs())
    x = torch.from_numpy(blobs().images)
    assert trained.monitor[-1]["lam"] == trained.history[-1]["lam"] == pytest.approx([160, 160], rel=1e-5)
    assert trained.monitor[-1]["oui"] == monitor.overlap_index(monitor.patterns(trained.model, x))
    at_ends = [point["lam"] for point in trained.monitor if point["step"] in (4, 8, 12)]
    assert at_ends == [epoch["lam"] for epoch in trained.history[:3]]


@pytest.mark.thorough
def test_patterns_settle_with_the_weights() -> None:
    points = train(replace(BASE, epochs=10), blobs()).monitor
    assert all(0 < point["oui"] <= 1 for point in points)
    for name in ("patterns_changed", "weights_changed"):
        early, late = (sum(point[name] for point in part) for part in (points[:6], points[-5:]))
        assert early > 3 * late
        assert 0.1 < settled(points, name) < 0.9


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


# Networks of fixed layers

SMALL = replace(BASE, model="resnet", width=0.25, epochs=2, batch=100, rate=5e-3)
"""Two steps an epoch."""


@pytest.mark.seldom
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "arm"),
    # One arm of each way to swap; ``test_every_arm_learns_and_becomes_its_network`` has all of them.
    [("cnn7", "lambda-gelu"), ("resnet", "gelu-swap-finetune"), ("resnet", "prelu")],
)
def test_fixed_networks_train_with_every_swap(model: Model, arm: str, tmp_path: Path) -> None:
    data = blobs()
    options = replace(SMALL, model=model, width=0.25 if model == "resnet" else 0.03, arm=arm)
    trained = train(options, data)
    results = export(trained, options, data, data, tmp_path / "net.onnx")
    layers = 7 if model == "resnet" else 6
    if options.anneals:
        assert trained.history[-1]["lam"] == pytest.approx([160] * layers, rel=1e-5)
    x = torch.from_numpy(data.images)
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: data.images})
    hard = substitute_relu(trained.model)
    torch.testing.assert_close(torch.from_numpy(y), hard(x).detach(), rtol=1e-5, atol=1e-5)
    assert len(monitor.patterns(hard, x)) == layers
    assert results["clean"] == (y.argmax(1) == data.labels).mean()
    assert results["not_refuted_of_these"] <= results["clean_of_these"] and len(results["monitor"]) == 5
    assert abs(results["int8"]["clean"] - results["clean"]) < 0.1


def test_patterns_of_a_residual_network_are_in_the_order_of_its_layers() -> None:
    model = build(SMALL, blobs())
    x = torch.from_numpy(blobs().images)
    found = monitor.patterns(model, x)
    entering = model[:2](x)  # Normalisation, convolution
    block = model[3]
    within = block.first(model[2](entering))
    leaving = model[2](entering) + block.second(block.inner(within))
    for expected, active in zip((entering, within, leaving), found, strict=False):
        assert torch.equal(active, expected.flatten(1) > 0)
    assert len(found) == 7


@pytest.mark.seldom
@pytest.mark.thorough
@pytest.mark.parametrize("model", ["cnn5", "cnn7", "resnet"])
def test_fixed_networks_are_trained_with_certified_terms_and_resumed(model: Model, tmp_path: Path) -> None:
    options = replace(SMALL, model=model, width=0.05, certified=0.5, stability=0.01, arm="gelu-swap-finetune")
    whole = train(options, blobs())
    with pytest.raises(KeyboardInterrupt):
        train(options, blobs(), tmp_path / "net", stop_at(3))
    resumed = train(options, blobs(), tmp_path / "net")
    assert whole.monitor == resumed.monitor and whole.swap == resumed.swap
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_batch_normalisation_learns_in_training_and_is_fixed_elsewhere() -> None:
    data = blobs()
    options = replace(SMALL, model="cnn7", width=0.03, eps=0.0, epochs=1, arm="gelu-swap-finetune")
    trained = train(options, data)
    seen = [module.num_batches_tracked for module in trained.model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert [int(n) for n in seen] == [2] * 5, "neither the monitor nor the replacement moves the averages"
    with pytest.raises(InputError, match="--batch: the last step of an epoch has one image"):
        train(replace(options, batch=199), data)
    with pytest.raises(InputError, match="--model: a 4×4 kernel does not fit the 1×1 input"):
        build(replace(BASE, model="cnn"), replace(data, images=data.images[:, :, :1, :1]))
    with pytest.raises(InputError, match="--width: must be a positive number"):
        replace(SMALL, width=0.0)
