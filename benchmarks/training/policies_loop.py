"""More than one step: does a policy keep CartPole within its bounds for k steps, from every state of a box?

*Proven* is by boxes from step to step. Of each box, bounds of the network say which actions can be taken; where both
can be, the box is halved a few times, and what is still open takes both. The next boxes are the images by the
equations of gymnasium's CartPole (``cartpole.py``, Euler's method) in interval arithmetic. *Refuted* is a state of the
box from which gymnasium itself ends the episode within k steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.common.crown import bounded
from benchmarks.training.policies_games import GAMES
from benchmarks.training.policies_playing import environment
from verifiable_relu.bounds.linear_bounds import lower_of_rows
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.execution.model import as_executed
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.network import Network

STEPS = {0.05: 25, 0.1: 10, 0.15: 10, 0.2: 10}
"""The most steps, by half the width of the box around 0; with 0.05, it has all states at which episodes begin."""

_ENDS = np.array([2.4, math.inf, 12 * 2 * math.pi / 360, math.inf])
"""The bounds of position and angle, beyond which an episode ends."""

_MOST, _HALVED, _DRAWN, _FORCE, _TAU = 2_000, 12, 2_000, 10.0, 0.02
"""The most boxes of a step; how often a box is halved; states drawn to refute; the force, and the seconds of a step."""

_SLACK = 1e-9
"""What boxes gain at each end and step, relative to 1 + |end|.

A step takes less than 100 operations in float64, here and in gymnasium, on numbers below 1,000 while boxes are within
the bounds; each errs by a part of 2⁻⁵³, which makes 10⁻¹¹ together. An observation is the state in float32, which errs
by a part of 2⁻²⁴: the network is asked about boxes that are larger by that (``_decided``).
"""

Ends = tuple[np.ndarray, np.ndarray]
"""The lower and the upper ends of intervals."""


def reached(network: Network) -> dict[str, Any]:
    """What is proven and refuted of a policy for each width: the number of steps, of boxes, and the processor seconds.

    Returns:
        By width, ``proven``, the most steps after which no episode has ended, ``refuted``, the fewest after which one
        has (None if none was found), ``boxes`` of the last step, and ``seconds``.
    """
    try:
        single = as_executed(network, "float32")
    except UnsupportedError:
        # How runtimes round GELU is not modelled: what is said of it is said of real arithmetic.
        single = network
    found = {}
    for width, steps in STEPS.items():
        began = time.process_time()
        proven, boxes = 0, 1
        for step, (low, _) in enumerate(paved(single, width, steps), 1):
            proven, boxes = step, len(low)
        refuted = _refuted(network, width, steps)
        seconds = time.process_time() - began
        found[str(width)] = {"proven": proven, "refuted": refuted, "boxes": boxes, "seconds": seconds}
    return found


def paved(network: Network, width: float, steps: int) -> Iterator[Ends]:
    """Boxes (n, 4) that hold every state after each step, as long as all are within the bounds."""
    low, high = np.full((1, 4), -width), np.full((1, 4), width)
    for _ in range(steps):
        low, high, left, right = _parted(network, low, high)
        images = [image(low[to], high[to], force) for to, force in ((left, -_FORCE), (right, _FORCE)) if to.any()]
        low, high = (np.concatenate(ends) for ends in zip(*images, strict=True))
        if (low < -_ENDS).any() or (high > _ENDS).any():
            return
        low, high = _merged(low, high)
        yield low, high


def _parted(network: Network, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, ...]:
    """The boxes, halved where both actions can be taken, and which of them can be followed by left, and by right."""
    done: list[tuple[np.ndarray, ...]] = []
    for round_ in range(_HALVED + 1):
        left, right = _decided(network, low, high)
        open_ = left & right
        if round_ == _HALVED or 2 * open_.sum() + sum(len(each[0]) for each in done) > _MOST:
            open_[:] = False
        done.append(tuple(each[~open_] for each in (low, high, left, right)))
        low, high = low[open_], high[open_]
        if not len(low):
            break
        axis = (high - low).argmax(1)
        rows, middle = np.arange(len(low)), (low + high) / 2
        first, second = high.copy(), low.copy()
        first[rows, axis] = second[rows, axis] = middle[rows, axis]
        low, high = np.concatenate([low, second]), np.concatenate([first, high])
    parted = [np.concatenate(each) for each in zip(*done, strict=True)]
    return parted[0], parted[1], parted[2], parted[3]


def _decided(network: Network, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whether the network, as it runs in float32, can push left, and right, within each box."""
    seen = 2.0**-23 * np.maximum(abs(low), abs(high)) + 1e-40
    relaxation = bounded(network, Interval(torch.from_numpy(low - seen), torch.from_numpy(high + seen)))
    rows = torch.tensor([[-1.0, 1.0], [1.0, -1.0]], dtype=torch.float64).repeat(len(low), 1)
    least = lower_of_rows(relaxation, rows)[0].view(-1, 2).numpy()
    # The first of equal outputs is taken, which is left; strict bounds leave a tie open.
    return ~(least[:, 0] > 0), ~(least[:, 1] > 0)


def image(low: np.ndarray, high: np.ndarray, force: float) -> Ends:
    """Boxes that hold where every state of boxes (n, 4) is after a step with a force; angles are below a right one."""
    if (abs(np.stack([low[:, 2], high[:, 2]])) >= math.pi / 2).any():
        raise ValueError("the pole is below the cart")
    (x, v, angle, turn) = ((low[:, i], high[:, i]) for i in range(4))
    sine = np.sin(angle[0]), np.sin(angle[1])
    cosines = np.cos(angle[0]), np.cos(angle[1])
    across = (angle[0] < 0) & (angle[1] > 0)
    cosine = np.minimum(*cosines), np.where(across, 1.0, np.maximum(*cosines))
    square = _product(turn, turn)
    square = np.where((turn[0] < 0) & (turn[1] > 0), 0.0, square[0]), square[1]
    swung = _scaled(_product(square, sine), 0.05)
    pushed = (force + swung[0]) / 1.1, (force + swung[1]) / 1.1
    crossed = _product(cosine, pushed)
    above = 9.8 * sine[0] - crossed[1], 9.8 * sine[1] - crossed[0]
    below = 0.5 * (4 / 3 - 0.1 * cosine[1] ** 2 / 1.1), 0.5 * (4 / 3 - 0.1 * cosine[0] ** 2 / 1.1)
    turned = _product(above, (1 / below[1], 1 / below[0]))
    back = _scaled(_product(turned, cosine), 0.05 / 1.1)
    moved = pushed[0] - back[1], pushed[1] - back[0]
    pairs = ((x, v), (v, moved), (angle, turn), (turn, turned))
    least, most = (np.stack([at[end] + _TAU * by[end] for at, by in pairs], 1) for end in (0, 1))
    return least - _SLACK * (1 + abs(least)), most + _SLACK * (1 + abs(most))


def _product(a: Ends, b: Ends) -> Ends:
    products = np.stack([a[i] * b[j] for i in (0, 1) for j in (0, 1)])
    return products.min(0), products.max(0)


def _scaled(a: Ends, by: float) -> Ends:
    return a[0] * by, a[1] * by


def _merged(low: np.ndarray, high: np.ndarray) -> Ends:
    """As many boxes as ``_MOST`` at most: those with near middles become one, which holds them."""
    cells = 64.0
    while len(low) > _MOST / 4:
        span = np.maximum(high.max(0) - low.min(0), 1e-12)
        near = np.floor(((low + high) / 2 - low.min(0)) / span * cells)
        _, which = np.unique(near, axis=0, return_inverse=True)
        count = int(which.max()) + 1
        merged = np.full((count, 4), np.inf), np.full((count, 4), -np.inf)
        np.minimum.at(merged[0], which.ravel(), low)
        np.maximum.at(merged[1], which.ravel(), high)
        low, high = merged
        cells /= 2
    return low, high


def _refuted(policy: Network, width: float, steps: int) -> int | None:
    """The fewest steps after which gymnasium ends an episode that begins in the box; None if no state was found."""
    random = np.random.default_rng(0)
    states = random.uniform(-width, width, (_DRAWN, 4))
    # Most of what ends early begins at a corner.
    states[::2] = np.sign(states[::2]) * width
    now, outside = states.copy(), np.full(len(states), steps + 1)
    for step in range(1, steps + 1):
        with torch.inference_mode():
            right = policy(torch.from_numpy(now.astype(np.float32))).argmax(1).numpy().astype(bool)
        for to, force in ((~right, -_FORCE), (right, _FORCE)):
            if to.any():
                now[to] = image(now[to], now[to], force)[0]
        gone = (abs(now) > _ENDS).any(1)
        outside[gone & (outside > steps)] = step
        now[gone] = 0
    player = environment(GAMES["cartpole"]).unwrapped
    for first in np.argsort(outside, kind="stable")[:10]:
        if outside[first] <= steps and (found := fallen(player, policy, states[first], steps)):
            return found
    return None


def fallen(player: Any, policy: Network, state: np.ndarray, steps: int) -> int | None:
    """The steps after which gymnasium ends an episode that begins at a state; None if ``steps`` do not."""
    player.reset()
    player.state = np.array(state, np.float64)
    for step in range(1, steps + 1):
        with torch.inference_mode():
            seen = torch.from_numpy(np.array(player.state, np.float32))[None]
        if player.step(int(policy(seen).argmax()))[2]:
            return step
    return None
