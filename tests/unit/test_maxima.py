"""Maxima relaxed by one candidate below and one above: bounds, their lines, and their records in certificates."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from tests.soundness import page_checker
from tests.support.certificates import Case, Records, checked, excluded, proven, written
from tests.support.exact import exact_values
from tests.support.solver_cases import ball, row
from tests.unit.test_check_kinds import of_operators
from verifiable_relu.bounds import Ascent, Bounds, ascend, crown_relaxation, interval_bounds, neurons
from verifiable_relu.bounds.maxima import Between
from verifiable_relu.check import Refused
from verifiable_relu.network import Network, read_onnx
from verifiable_relu.network.family import hardened
from verifiable_relu.network.nodes import Hardened, Maximum
from verifiable_relu.verifiers.incomplete import Crown

WINDOWS: dict[str, dict[str, Any]] = {
    "apart": {"kernel_shape": [2, 2], "strides": [2, 2]},
    "over each other": {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]},
    "with gaps": {"kernel_shape": [2, 2], "dilations": [2, 3], "pads": [0, 1, 1, 0]},
    "in two rounds": {"kernel_shape": [1, 3], "strides": [1, 2]},
}


def pooled(seed: int, attributes: dict[str, Any], behind: bool) -> bytes:
    """Convolution, ReLU before or behind a MaxPool, convolution, MaxPool, dense layer."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape) / np.sqrt(np.prod(shape[1:]))  # noqa: E731
    first = [helper.make_node("Relu", ["z"], ["r"]), helper.make_node("MaxPool", ["r"], ["p"], **attributes)]
    if behind:
        first = [helper.make_node("MaxPool", ["z"], ["r"], **attributes), helper.make_node("Relu", ["r"], ["p"])]
    nodes = [
        helper.make_node("Conv", ["x", "v", "b"], ["z"]),
        *first,
        helper.make_node("Conv", ["p", "c"], ["h"], pads=[1, 1, 0, 0]),
        helper.make_node("MaxPool", ["h"], ["q"], kernel_shape=[2, 2]),
        helper.make_node("Flatten", ["q"], ["f"]),
    ]
    weights = {"v": normal(3, 1, 2, 2), "b": rng.normal(size=3) / 4, "c": normal(2, 3, 2, 2)}
    inner = of_operators(*nodes, helper.make_node("Identity", ["f"], ["y"]), inputs=(1, 1, 7, 7), **weights)
    weights["w"] = normal(read_onnx(inner).output_size, 3)
    return of_operators(*nodes, helper.make_node("Gemm", ["f", "w"], ["y"]), inputs=(1, 1, 7, 7), **weights)


def drawn(seed: int) -> tuple[Network, Bounds]:
    """A network in float64, and boxes of four sizes about random points."""
    network = read_onnx(pooled(seed, list(WINDOWS.values())[seed % 4], bool(seed % 2))).to(torch.float64)
    generator = torch.Generator().manual_seed(seed)
    center = torch.rand(4, *network.input_shape, generator=generator, dtype=torch.float64)
    eps = torch.tensor([0.0, 0.01, 0.1, 0.5], dtype=torch.float64).reshape(4, *[1] * len(network.input_shape))
    return network, Bounds(center - eps, center + eps)


def points(box: Bounds, seed: int) -> Tensor:
    """(points, boxes, *shape) within boxes, the first half at corners."""
    share = torch.rand(40, *box.lower.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    share[:20] = share[:20].round()
    return torch.lerp(box.lower.expand_as(share), box.upper.expand_as(share), share)


def sides(lower: Callable[[Tensor, Tensor], Tensor], network: Network, boxes: int) -> Bounds:
    """Bounds of all outputs, by a function that bounds rows of boxes from below."""
    eye = torch.eye(network.output_size, dtype=torch.float64).repeat(boxes, 1)
    sample = torch.arange(boxes).repeat_interleave(network.output_size)
    return Bounds(lower(eye, sample).reshape(boxes, -1), -lower(-eye, sample).reshape(boxes, -1))


@pytest.mark.parametrize("seed", range(4))
def test_bounds_hold_at_points_of_the_box(seed: int) -> None:
    """CROWN's, those over the tournament's bounds, and α-CROWN's; of all nodes, and in float64 at a point."""
    network, box = drawn(seed)
    x = points(box, seed)
    values = [v.unflatten(0, x.shape[:2]) for v in network.values(x.flatten(0, 1))]
    for options in ({}, {"exact": True}, {"search": neurons(Ascent(steps=3))}):
        found = crown_relaxation(network, box, **options)
        for index, value in enumerate(values):
            bounds, slack = found.bounds(index), 1e-12 * (1 + value.abs())
            assert bool(((value >= bounds.lower - slack) & (value <= bounds.upper + slack)).all()), index
        for lower in (
            found.outputs,
            lambda rows, sample: ascend(found, len(network.nodes) - 1, rows, sample, Ascent(steps=3)).lower,  # noqa: B023
        ):
            ours = sides(lower, network, 4)
            slack = 1e-12 * (1 + values[-1].abs())
            assert bool(((values[-1] >= ours.lower - slack) & (values[-1] <= ours.upper + slack)).all())


def test_bounds_hold_exactly() -> None:
    """At points, where what rounding leaves of a bound is all that there is: in rational arithmetic."""
    for seed in range(2):
        network, box = drawn(seed)
        found = sides(crown_relaxation(network, box).outputs, network, 4)
        exact = exact_values(network, [Fraction(v) for v in box.lower[0].flatten().tolist()])[-1].flatten()
        for low, value, high in zip(found.lower[0].tolist(), exact, found.upper[0].tolist(), strict=True):
            assert Fraction(low) <= value <= Fraction(high)
            assert high - low < 1e-10


@pytest.mark.parametrize("seed", range(10))
def test_lines_hold_at_every_corner_and_are_nowhere_above_the_largest_end(seed: int) -> None:
    """In rational arithmetic, but for what rounding makes of the line's own numbers."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 6))
    ends = np.sort(rng.integers(-4, 5, (2, count)).astype(float), 0)
    box = Bounds(*(torch.from_numpy(end)[None] for end in ends))
    node = Maximum(name="m", inputs=(0, 1), shape=(1,), candidates=torch.arange(count)[:, None])
    between = Between.of(node, box)
    low, high = int(between.low), int(between.high)
    slope, top = Fraction(float(between.slope)), Fraction(float(between.top))
    slack = Fraction(1, 2**48)
    for corner in itertools.product(*ends.T):
        x = [Fraction(v) for v in corner]
        assert x[low] <= max(x) <= slope * x[high] + top + slack
        assert slope * x[high] + top <= Fraction(ends[1].max()) + slack
    assert ends[0][low] == ends[0].max()
    others = max(end for i, end in enumerate(ends[1]) if i != high)
    if ends[0][high] >= others:
        assert (low, slope, top) == (high, 1, 0) or ends[0][high] == ends[1][high]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A certificate by CROWN of a network with two MaxPools."""
    data = pooled(3, WINDOWS["over each other"], True)
    network = read_onnx(data).to(torch.float64)
    x = np.full(49, 0.5)
    box = ball(x, 0.02)
    ends = [torch.from_numpy(end).reshape(1, *network.input_shape) for end in (box.lower, box.upper)]
    least = float(sides(crown_relaxation(network, Bounds(*ends)).outputs, network, 1).lower[0, 2])
    prop = excluded(box, (row({2: 1}, float(np.floor(least * 1000 - 1) / 1000)),))
    return proven(tmp_path_factory.mktemp("maxima"), data, prop, Crown(record=True))


def said(case: Case, changed: Records, folder: Path) -> str | None:
    """Why both checkers refuse a certificate; None if they accept it."""
    reasons = []
    try:
        checked(folder, case, written(changed))
    except Refused as error:
        reasons.append(str(error))
    try:
        page_checker.check(written(changed), case.network, case.prop)
    except page_checker.Refused as error:
        reasons.append(str(error))
    assert len(reasons) != 1, reasons
    return reasons[0] if reasons else None


@pytest.mark.thorough
def test_windows_are_recorded_and_checked(case: Case, tmp_path: Path) -> None:
    windows = [place for place, record in enumerate(case.records) if "maximum" in record]
    assert len(windows) == 2
    assert said(case, case.records, tmp_path) is None
    without = [record for record in case.records if "maximum" not in record]
    assert said(case, without, tmp_path) is not None


@pytest.mark.thorough
def test_other_entries_are_judged_alike(case: Case, tmp_path: Path) -> None:
    """Any rival bounds a maximum below, and any above with the line that the checkers make for it."""
    rng = np.random.default_rng(1)
    changed = copy.deepcopy(case.records)
    for record in changed:
        for side in ("below", "above") if "maximum" in record else ():
            for place in rng.integers(0, len(record[side]), 3):
                record[side][place] = int(rng.integers(0, 3))
    said(case, changed, tmp_path)


@pytest.mark.thorough
def test_windows_before_their_activations_are_refused(case: Case, tmp_path: Path) -> None:
    place = [at for at, record in enumerate(case.records) if "maximum" in record][1]
    changed = list(case.records)
    window = changed.pop(place)
    before = max(at for at in range(place) if "activation" in changed[at])
    changed.insert(before, window)
    reason = said(case, changed, tmp_path)
    assert reason is not None and "end here" in reason


def test_maxima_are_the_same_in_all_members_of_a_family() -> None:
    network = read_onnx(pooled(0, WINDOWS["apart"], False))
    family = hardened(network, 4.0)
    changed = {i for i, node in enumerate(family.nodes) if isinstance(node, Hardened)}
    assert changed == {i for i in network.activations if i not in network.spared}
    assert len(changed) == 1


@pytest.mark.parametrize("name", ["Max", "Min"])
@pytest.mark.parametrize("count", [2, 3])
def test_intervals_of_an_extreme_of_computed_values_are_those_of_the_extreme_of_intervals(
    name: str, count: int
) -> None:
    """max(l₁, l₂) ≤ max(x, y) ≤ max(u₁, u₂), by numpy, and nothing of a sampled value is left out by either bound."""
    rng = np.random.default_rng(count)
    weights = [rng.normal(size=(4, 3)).astype(np.float32).astype(float) for _ in range(count)]
    names = [f"y{i}" for i in range(count)]
    nodes = [helper.make_node("MatMul", ["x", f"w{i}"], [y]) for i, y in enumerate(names)]
    graph = helper.make_graph(
        [*nodes, helper.make_node(name, names, ["out"])],
        "extreme",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, [1, 3])],
        [numpy_helper.from_array(w.astype(np.float32), f"w{i}") for i, w in enumerate(weights)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    network = read_onnx(model.SerializeToString()).to(torch.float64)
    center = torch.from_numpy(rng.normal(size=(6, 4)))
    radius = torch.from_numpy(rng.random((6, 1)))
    box = Bounds(center - radius, center + radius)
    spread = [radius.numpy() * np.abs(w).sum(0) for w in weights]
    ends = [np.stack([center.numpy() @ w + sign * s for w, s in zip(weights, spread, strict=True)]) for sign in (-1, 1)]
    low, high = (getattr(end, name.lower())(0) for end in ends)
    found = interval_bounds(network, box)[-1]
    np.testing.assert_allclose(found.lower.numpy().reshape(6, 3), low, atol=1e-12)
    np.testing.assert_allclose(found.upper.numpy().reshape(6, 3), high, atol=1e-12)
    rows = torch.eye(3, dtype=torch.float64).repeat(6, 1)
    relaxation = crown_relaxation(network, box)
    lines = [sign * relaxation.outputs(sign * rows).reshape(6, 3) for sign in (1, -1)]
    t = torch.from_numpy(rng.choice([-1.0, 1.0, 0.3], size=(400, 6, 4)))
    x = center + t * radius
    y = getattr(np.stack([x.numpy() @ w for w in weights]), name.lower())(0)
    for lower, upper in ((found.lower, found.upper), lines):
        assert (lower.reshape(6, 3).numpy() <= y.min(0) + 1e-12).all()
        assert (y.max(0) - 1e-12 <= upper.reshape(6, 3).numpy()).all()
