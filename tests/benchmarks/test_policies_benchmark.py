"""benchmarks/training/policies.py: controllers are trained, swapped, asked and screened; boxes hold a closed loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.training import policies_loop, policies_measuring, policies_playing
from benchmarks.training.policies_games import GAMES
from benchmarks.training.policies_measuring import _kept, regions, swapped
from verifiable_relu.ir.interval import Interval
from verifiable_relu.readers import from_torch
from verifiable_relu.spec import read_vnnlib, vnnlib_text


def stepped(states: np.ndarray, forces: np.ndarray) -> np.ndarray:
    """A step of the cart and the pole: accelerations from the two equations of motion, solved as a system."""
    sine, cosine, turn = np.sin(states[:, 2]), np.cos(states[:, 2]), states[:, 3]
    matrix = np.stack([np.full_like(sine, 1.1), 0.05 * cosine, cosine, np.full_like(sine, 0.5 * 4 / 3)], 1)
    right = np.stack([forces + 0.05 * turn**2 * sine, 9.8 * sine], 1)
    found = np.linalg.solve(matrix.reshape(-1, 2, 2), right[..., None])[..., 0]
    moved = np.stack([states[:, 1], found[:, 0], states[:, 3], found[:, 1]], 1)
    return states + 0.02 * moved


def controller(seed: int) -> nn.Sequential:
    """A small network that pushes to where the pole falls, more or less."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).requires_grad_(False)
    net[0].weight[:2] = torch.tensor([[0.0, 0.1, 2.0, 1.0], [0.0, -0.1, -2.0, -1.0]])
    net[2].weight[:] = 0.05 * net[2].weight + torch.tensor([[-1.0, 1.0] + [0.0] * 6, [1.0, -1.0] + [0.0] * 6])
    return net


@pytest.mark.parametrize("force", [-10.0, 10.0])
def test_an_image_holds_the_step_of_every_state(force: float) -> None:
    random = np.random.default_rng(0)
    ends = np.sort(random.uniform(-1, 1, (2, 200, 4)) * [2.4, 3, 0.4, 3], 0)
    low, high = policies_loop.image(*ends, force)
    for _ in range(50):
        at = ends[0] + random.uniform(0, 1, (200, 4)) * (ends[1] - ends[0])
        then = stepped(at, np.full(200, force))
        assert ((low <= then) & (then <= high)).all()
    point = policies_loop.image(ends[0], ends[0], force)
    assert np.allclose(point[0], stepped(ends[0], np.full(200, force)), atol=1e-7) and np.all(
        point[1] - point[0] < 1e-7
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_boxes_hold_the_closed_loop(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Few boxes make many of them one.
    monkeypatch.setattr(policies_loop, "_MOST", 100 if seed else 400)
    net = controller(seed)
    states = np.random.default_rng(seed).uniform(-0.05, 0.05, (200, 4))
    steps = list(policies_loop.paved(from_torch(net, (4,)), 0.05, 4))
    assert len(steps) >= 3
    for low, high in steps:
        right = net(torch.from_numpy(states.astype(np.float32))).argmax(1).numpy()
        states = stepped(states, np.where(right, 10.0, -10.0))
        inside = (low[None] <= states[:, None]) & (states[:, None] <= high[None])
        assert inside.all(2).any(1).all()


def test_regions_are_files_whose_unsafe_outputs_are_those_that_decide_otherwise(tmp_path: Path) -> None:
    for game in GAMES.values():
        for region, prop in zip(game.regions, regions(game), strict=True):
            (tmp_path / "region.vnnlib").write_text(vnnlib_text(prop, comments=[prop.name]))
            (read,) = read_vnnlib(tmp_path / "region.vnnlib").properties
            assert read.digest == prop.digest and (prop.box.lower <= prop.box.upper).all()
            for best in range(game.actions):
                outputs = [1 if action == best else 0 for action in range(game.actions)]
                assert (prop.margin(outputs) > 0) == ((best == region.action) == region.wanted)


def test_what_is_proven_of_the_swap_holds_on_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    smooth = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).requires_grad_(False)
    hard = nn.Sequential(smooth[0], nn.ReLU(), smooth[2])
    low, high = np.array(GAMES["cartpole"].box).T
    states = np.random.default_rng(1).uniform(low, high, (500, 4)).astype(np.float32)
    play = policies_playing.Played([1.0], states)
    monkeypatch.setattr(policies_measuring, "played", lambda *_: play)
    found = swapped(smooth, hard, GAMES["cartpole"], 0)
    x = torch.from_numpy(states)
    changed = smooth(x).argmax(1) != hard(x).argmax(1)
    assert found["proven"] >= (smooth(x) - hard(x)).abs().max().item()
    assert found["visited"] == pytest.approx(changed.double().mean().item())
    assert found["kept"] <= found["kept_each"] <= 1 - found["visited"]
    outputs, change = torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[0.4, 0.0]]).double()
    assert _kept(outputs, Interval(-change, change)) and not _kept(outputs, Interval(-3 * change, change))
