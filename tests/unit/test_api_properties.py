"""What ``verify`` can be asked beyond L∞ balls of one radius, and the radii up to which images are proved."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from tests.support.asking import claims
from tests.support.nets import Chain
from verifiable_relu import (
    Perturbation,
    certified_radius,
    plot_certified,
    plot_times,
    verify,
    verify_properties,
    verify_radii,
)
from verifiable_relu.campaign import Result
from verifiable_relu.errors import InputError
from verifiable_relu.readers import from_torch, write_onnx
from verifiable_relu.search.balls import InBalls
from verifiable_relu.search.bounding import Crown
from verifiable_relu.search.outcomes import Trust, Verdict
from verifiable_relu.spec import Ball, Property, Query, box_property, linf_properties, write_vnnlib
from verifiable_relu.spec.property import Box, Row

WIDE = (-100, 100)


def linear(weights: list[list[float]], bias: list[float]) -> nn.Sequential:
    """A linear classifier behind a layer of ReLUs that are always active on the inputs asked about."""
    size = len(weights[0])
    first, last = nn.Linear(size, size), nn.Linear(size, len(weights))
    with torch.no_grad():
        first.weight.copy_(torch.eye(size))
        first.bias.fill_(64)
        last.weight.copy_(torch.tensor(weights))
        last.bias.copy_(torch.tensor(bias) - 64 * torch.tensor(weights).sum(1))
    return nn.Sequential(first, nn.ReLU(), last)


PLANE = linear([[3.0, 4.0], [0.0, 0.0]], [0.0, 1.0])
"""Class 0 if 3a + 4b > 1."""


def answers(results: list[Result]) -> list[str]:
    return [result.answer for result in results]


@pytest.mark.parametrize(("norm", "dual"), [(1, 4.0), ("l2", 5.0), (2.0, 5.0), (math.inf, 7.0)])
def test_the_radius_of_a_linear_classifier_is_the_margin_over_the_dual_norm(norm: Any, dual: float) -> None:
    x = np.array([[1.0, 2.0]])
    exact = 10 / dual  # 3 + 8 − 1 is the margin.
    inside, outside = exact * (1 - 1e-6), exact * (1 + 1e-2)
    (proved,) = verify(PLANE, x, [0], inside, "crown", perturbation=Perturbation(clip=WIDE, norm=norm))
    assert proved.answer == "unsat" and proved.trust is Trust.ROUNDED and proved.margin is not None
    assert proved.margin <= (exact - inside) * dual + 1e-9
    (refuted,) = verify(PLANE, x, [0], outside, perturbation=Perturbation(clip=WIDE, norm=norm))
    assert refuted.answer == "sat" and refuted.counterexample is not None
    assert np.linalg.norm(refuted.counterexample.astype(float) - x[0], float(dual and _order(norm))) <= outside
    ball = Perturbation(clip=WIDE, norm=norm)
    found = certified_radius(PLANE, x, [0], upper=7, tolerance=Fraction(1, 64), method="auto", perturbation=ball)
    assert found.certified[0] <= exact <= found.refuted[0] <= found.certified[0] + 0.2


def _order(norm: Any) -> float:
    return {"l2": 2.0}.get(norm, norm)


def test_balls_are_never_proved_that_hold_a_counterexample() -> None:
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    for order in (1, 2):
        net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
        x = rng.uniform(0.3, 0.7, (12, 4))
        with torch.no_grad():
            labels = net(torch.from_numpy(x)).argmax(1).numpy()
        radii = rng.uniform(0.02, 0.6, 12)
        results = verify(net, x, labels, radii, timeout=10, perturbation=Perturbation(norm=order))
        assert set(answers(results)) >= {"sat", "unsat"}
        for center, label, radius, result in zip(x, labels, radii, results, strict=True):
            d = (
                rng.standard_normal((4000, 4))
                if order == 2
                else rng.exponential(size=(4000, 4)) * rng.choice([-1, 1], (4000, 4))
            )
            d *= radius / np.linalg.norm(d, order, axis=1, keepdims=True) * (1 - 1e-9)
            points = np.clip(center + d, 0, 1)
            with torch.no_grad():
                wrong = (net(torch.from_numpy(points)).argmax(1).numpy() != label).any()
            assert not (wrong and result.answer == "unsat")
            if result.answer == "sat":
                ball = Ball(center, Fraction(float(radius)), order)
                assert result.witness is not None and ball.contains(result.witness)


def test_a_ball_is_part_of_the_question() -> None:
    (plain,) = linf_properties(np.array([[0.5, 0.5]]), [0], Fraction(1, 4), 2)
    round_ = Property(plain.box, plain.unsafe, ball=Ball(np.array([0.5, 0.5]), Fraction(1, 4), 2))
    diamond = Property(plain.box, plain.unsafe, ball=Ball(np.array([0.5, 0.5]), Fraction(1, 4), 1))
    assert len({plain.digest, round_.digest, diamond.digest}) == 3
    corner = (Fraction(3, 4), Fraction(3, 4))
    edge = (Fraction(13, 20), Fraction(7, 10))  # A triangle of sides 3, 4 and 5.
    assert plain.admits(corner) and not round_.admits(corner)
    assert round_.admits(edge) and not diamond.admits(edge)
    with pytest.raises(InputError, match="cannot describe an L1 or L2 ball"):
        write_vnnlib(round_, "nowhere.vnnlib")


@pytest.mark.thorough
def test_radii_of_images_and_pixels_and_masks() -> None:
    # The sum of four pixels decides: class 1 from 2 on.
    net = linear([[0.0] * 4, [1.0] * 4], [2.0, 0.0])
    images = np.full((3, 1, 2, 2), 0.375)
    net = nn.Sequential(nn.Flatten(), *net)

    def said(eps: Any, **more: Any) -> list[str]:
        return answers(verify(net, images, [0, 0, 0], eps, **more))

    assert said([0.1, Fraction(1, 8), 0.2]) == ["unsat", "sat", "sat"]
    assert said(np.array([0.1, 0.12, 0.13])) == ["unsat", "unsat", "sat"]
    pixels = np.zeros((3, 1, 2, 2))
    pixels[:, 0, 0, :] = np.array([0.2, 0.25, 0.3])[:, None]
    assert said(pixels) == said(torch.tensor(pixels)) == ["unsat", "sat", "sat"]
    mask = np.array([[True, False], [False, False]])
    ball, fewer = Perturbation(mask=mask), Perturbation(mask=np.stack([mask[None], mask[None] * False, mask[None]]))
    assert said(0.49, perturbation=ball) == ["unsat"] * 3 and said(0.5, perturbation=ball) == ["sat"] * 3
    assert said(0.5, perturbation=fewer) == ["sat", "unsat", "sat"]


def test_targets() -> None:
    net = linear([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], [0.0, 0.0, 0.25])
    x = np.array([[0.75, 0.5]])  # The outputs are the inputs, and 1/4.
    assert answers(verify(net, x, [0], 0.2)) == ["sat"]
    assert answers(verify(net, x, eps=0.2, perturbation=Perturbation(targets=[1]))) == ["sat"]
    assert answers(verify(net, x, eps=0.2, perturbation=Perturbation(targets=[2]))) == ["unsat"]
    assert answers(verify(net, x, [0], eps=0.5, perturbation=Perturbation(targets=[2]))) == ["sat"]


@pytest.mark.thorough
def test_masks_and_targets_stay_with_their_images_where_others_are_decided() -> None:
    """Of two inputs, the larger one's class is predicted; every image drops out at another radius."""
    net = linear([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], [0.0, 0.0, -9.0])
    x, labels = np.array([[0.5, 0.5], [0.75, 0.5], [0.875, 0.25], [0.75, 0.5]]), [0, 0, 0, 0]
    mask = np.array([[True, True], [True, True], [True, False], [False, False]])
    ball = Perturbation(mask=mask)
    found = certified_radius(net, x, labels, method="auto", perturbation=ball)
    known = [0.0, 0.125, 0.625, 1.0]
    assert (found.certified <= known).all() and (found.certified >= np.array(known) - 1e-3).all()
    several = verify_radii(net, x, labels, [0, 0.25, 0.5, 0.75], perturbation=ball)
    assert [answers(row) for row in several] == [
        ["sat"] + ["sat" if r >= k else "unsat" for k in known[1:]] for r in (0, 0.25, 0.5, 0.75)
    ]
    targets = [2, 1, 1, 2]
    found = certified_radius(net, x[[1, 1, 2, 2]], labels, method="auto", perturbation=Perturbation(targets=targets))
    assert found.certified == pytest.approx([1, 0.125, 0.3125, 1], abs=1e-3)


def test_a_normalisation_that_is_not_part_of_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(2, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    images, eps = torch.rand(4, 2, 3, 3), 0.02
    mean, std = [0.25, 0.5], [0.5, 0.25]
    labels = body((images - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]).argmax(1)
    write_onnx(from_torch(body, (2, 3, 3)), tmp_path / "n.onnx")
    both = [verify(m, images, labels, eps, "crown", normalize=(mean, std)) for m in (body, tmp_path / "n.onnx")]
    assert [r.margin for r in both[0]] == pytest.approx([r.margin for r in both[1]], rel=1e-6)
    with torch.no_grad():
        for image, result in zip(images, both[0], strict=True):
            points = (image + eps * (2 * torch.rand(500, 2, 3, 3) - 1)).clamp(0, 1)
            out = body((points - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None])
            label = out[0].argmax() if result.answer != "unsat" else labels[list(both[0]).index(result)]
            gap = (out[:, label, None] - out)[:, [i for i in range(3) if i != label]].min()
            assert result.answer != "unsat" or gap >= (result.margin or 0) - 1e-5
    assert set(answers(both[0])) >= {"unsat"}


def test_boxes_polytopes_and_files(tmp_path: Path) -> None:
    box = [0, Fraction(1, 4)], [1, 1]
    # Outputs are 3a + 4b, and 1.
    reached = box_property(*box, unsafe=([[1, 0]], [Fraction(1)]))
    missed = box_property(*box, unsafe=[([[1, 0]], [0.75]), ([[-1, 0], [0, 1]], [-7.5, 2])])
    held = box_property(*box, safe=([[1, 0], [-1, 0]], [7, -1]))
    broken = box_property(*box, safe=([[1, 0], [-1, 0]], [6.5, -1]))
    results = verify_properties(PLANE, [reached, missed, held, broken])
    assert answers(results) == ["sat", "unsat", "unsat", "sat"]
    assert results[0].witness == (0, Fraction(1, 4)), "the one point where the bound is reached"
    write_vnnlib(missed, tmp_path / "p.vnnlib")
    assert answers(verify_properties(PLANE, tmp_path / "p.vnnlib")) == ["unsat"]
    write_vnnlib(missed, tmp_path / "q.vnnlib", "2.0")
    assert answers(verify_properties(PLANE, [broken, str(tmp_path / "q.vnnlib")])) == ["sat", "unsat"]


def test_several_radii_are_each_answered_from_the_last() -> None:
    x = np.array([[1.0, 2.0], [0.25, 0.5], [0.0, 0.0]])
    found = verify_radii(PLANE, x, [0, 0, 0], [2, "1/8", 1, 0.125], method="auto", perturbation=Perturbation(clip=WIDE))
    assert [answers(each) for each in found] == [
        ["sat", "sat", "sat"], ["unsat", "unsat", "sat"], ["unsat", "sat", "sat"], ["unsat", "unsat", "sat"]
    ]  # fmt: skip
    assert found[0][1] is found[2][1], "a counterexample is kept for larger radii"
    axes = Figure().subplots()
    assert plot_certified(["1/8", 1, 2], {"plane": [found[1], found[2], found[0]]}, ax=axes) is axes
    assert [line.get_ydata().tolist() for line in axes.lines] == [pytest.approx([2 / 3, 1 / 3, 0])] * 2  # type: ignore[union-attr]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]  # type: ignore[union-attr]
    assert labels == ["plane: certified", "hollow: not refuted"]
    with pytest.raises(InputError, match="plane has results for 1 of 2 radii"):
        plot_certified(["1/8", 1], {"plane": found[:1]}, ax=axes)
    times = plot_times({"plane": found[1], "others": found[0]}, ax=Figure().subplots())
    assert [line.get_xdata().tolist() for line in times.lines] == [[1, 2, 3]] * 2  # type: ignore[union-attr]
    radii = certified_radius(PLANE, x, [0, 0, 0], upper=1, method="auto", perturbation=Perturbation(clip=WIDE))
    assert radii.certified[0] == 1 and radii.refuted[0] == math.inf
    assert radii.certified[1] == pytest.approx(1.75 / 7, abs=1e-3) and radii.certified[1] <= 1.75 / 7
    assert radii.certified[2] == 0 and radii.refuted[2] == 0


X = np.array([[0.5, 0.5]])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (lambda: verify(PLANE, X, [0]), "eps are needed"),
        (lambda: verify(PLANE, X, eps=0.1), "labels"),
        (lambda: verify(PLANE, None), "verify_properties"),
        (lambda: verify(PLANE, X, [0], [0.1, 0.2]), "2 radii for 1 images.*verify_radii"),
        (lambda: verify(PLANE, X, [0], [[0.1, 0.2, 0.3]]), "does not fit images"),
        (lambda: verify(PLANE, X, [0], 0.1, perturbation=Perturbation(mask=[True, True], norm=2)), "for norm=inf"),
        (lambda: verify(PLANE, X, [0], [[0.1, 0.2]], perturbation=Perturbation(norm=2)), "one for each image"),
        (lambda: verify_properties(PLANE, []), "no property is given"),
        (lambda: verify_properties(PLANE, "nowhere.vnnlib"), "nowhere.vnnlib"),
        (lambda: verify_properties(PLANE, box_property([0], [1], unsafe=([[1]], [0]))), "shape|input"),
        (lambda: box_property([0], [1, 2], unsafe=([[1]], [0])), "1 lower and 2 upper"),
        (lambda: box_property([0], [1]), "either the unsafe or the safe"),
        (lambda: box_property([1], [0], safe=([[1]], [0])), "empty"),
        (lambda: box_property([0], [1], safe=([[1]], [0, 1])), "A has the shape"),
        (lambda: box_property([0], [1], safe=3), "a pair"),
        (lambda: verify_radii(PLANE, X, [0], []), "no radii"),
        (lambda: verify_radii(PLANE, X, [0], 0.1), "list of numbers"),
        (lambda: certified_radius(PLANE, X, [0], upper=0), "positive"),
        (lambda: certified_radius(PLANE, X, [0, 1]), "2 labels for 1 images"),
    ],
)  # fmt: skip
def test_bad_arguments_are_one_clear_line(asked: Callable[[], object], said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        asked()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scale", [1.0, 1e-170, 1e170])
def test_slopes_of_which_the_squares_are_lost_have_a_norm(scale: float) -> None:
    chain = Chain(2)
    chain.linear(torch.tensor([[3.0, 4.0]], dtype=torch.float64) * scale, torch.zeros(1, dtype=torch.float64))
    network = chain.network("sum")
    box, ball = Box(np.full(2, -1.0), np.full(2, 1.0)), Ball(np.zeros(2), Fraction(1), 2)
    # The sum is least at −(0.6, 0.8), where it is −5.
    for least, verdict in ((-5.01, Verdict.UNSAT), (-4.99, Verdict.SAT), (-2.0, Verdict.SAT)):
        unsafe = ((Row(((0, Fraction(1)),), Fraction(least * scale)),),)
        (found,) = claims(InBalls(Crown()), [Query(network, Property(box, unsafe, ball=ball))], 10.0)
        assert found.verdict in ((verdict,) if verdict is Verdict.UNSAT else (verdict, Verdict.UNKNOWN))
