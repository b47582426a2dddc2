"""The games of the study ``policies``: what their numbers mean, and what a good controller does where."""

from __future__ import annotations

import math
from dataclasses import dataclass

PLAYERS, ROLLOUT = 16, 64
"""How many episodes are played at once, and the steps of each between two updates."""

Range = tuple[float, float]


@dataclass(frozen=True)
class Region:
    """A part of a game, as ranges of the observation, where the ``action`` must be taken, or must not be."""

    says: str
    ranges: tuple[Range, ...]
    action: int
    wanted: bool = True

    def mirrored(self, signs: tuple[int, ...], actions: tuple[int, ...], says: str) -> Region:
        """The same on the other side: numbers with the sign −1 change theirs, and actions their places."""
        ranges = [(a, b) if sign > 0 else (-b, -a) for (a, b), sign in zip(self.ranges, signs, strict=True)]
        return Region(says, tuple(ranges), actions[self.action], self.wanted)


@dataclass(frozen=True)
class Game:
    """A game with few actions.

    Attributes:
        environment: its name in gymnasium.
        scales: the sizes of the numbers of the observation; trainings divide by them, and ε is in them.
        box: the range of each number over which the swap of an activation is judged.
        good: the return from which a training ended well.
        margin: the difference of two returns up to which they count as equal.
        steps, rate: of trainings that are not screened.
        regions: where it is plain what to do.
    """

    environment: str
    actions: int
    scales: tuple[float, ...]
    box: tuple[Range, ...]
    good: float
    margin: float
    steps: int
    rate: float
    regions: tuple[Region, ...]


def _both(region: Region, signs: tuple[int, ...], actions: tuple[int, ...]) -> tuple[Region, Region]:
    return region, region.mirrored(signs, actions, region.says.translate(str.maketrans("RL", "LR")))


_CART, _CART_SIDES = ((-0.5, 0.5), (-0.5, 0.5)), (-1, -1, -1, -1)
_POLE = [((0.05, 0.1), (0.2, 0.6)), ((0.05, 0.1), (0.6, 1.0)), ((0.1, 0.15), (0.2, 0.6)), ((0.1, 0.15), (0.6, 1.0))]
_TWO, _AIR = (1.0, 1.0), ((0.0, 0.0), (0.0, 0.0))
_LANDER_SIDES, _LANDER_ACTIONS = (-1, 1, -1, 1, -1, -1, 1, 1), (0, 3, 2, 1)
_STRAIGHT = ((0.95, 1.0), (-0.2, 0.2), (0.95, 1.0), (-0.2, 0.2))

GAMES = {
    "cartpole": Game(
        "CartPole-v1",
        2,
        (2.4, 2.0, 0.2095, 2.0),
        ((-2.4, 2.4), (-3.0, 3.0), (-0.2095, 0.2095), (-3.0, 3.0)),
        475,
        25,
        60_000,
        1e-3,
        (
            *(
                each
                for angle, turn in _POLE
                for each in _both(
                    Region("the pole leans R and falls R: push R", (*_CART, angle, turn), 1), _CART_SIDES, (1, 0)
                )
            ),
            *_both(
                Region("the pole leans R, and falls R fast: push R", (*_CART, (0.15, 0.2), (1.0, 1.5)), 1),
                _CART_SIDES,
                (1, 0),
            ),
        ),
    ),
    "acrobot": Game(
        "Acrobot-v1",
        3,
        (1.0, 1.0, 1.0, 1.0, 4 * math.pi, 9 * math.pi),
        (*((-1.0, 1.0),) * 4, (-4 * math.pi, 4 * math.pi), (-9 * math.pi, 9 * math.pi)),
        -100,
        5,
        60_000,
        2e-3,
        tuple(
            each
            for turn in ((0.5, 1.0), (1.0, 2.0), (2.0, 4.0))
            for each in _both(
                Region(
                    "it hangs straight and the joint turns R: no torque L", (*_STRAIGHT, (-0.5, 0.5), turn), 0, False
                ),
                (1, -1, 1, -1, -1, -1),
                (2, 1, 0),
            )
        ),
    ),
    "lander": Game(
        "LunarLander-v3",
        4,
        (1.0, 1.0, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0),
        ((-1.0, 1.0), (0.0, 1.5), (-1.0, 1.0), (-1.5, 0.5), (-0.5, 0.5), (-1.0, 1.0), (0.0, 1.0), (0.0, 1.0)),
        200,
        20,
        200_000,
        1e-3,
        (
            *_both(
                # The engine on one side turns the craft to the other.
                Region(
                    "it is tilted L and turns L: not the engine that turns it L",
                    ((-0.3, 0.3), (0.5, 1.0), (-0.2, 0.2), (-0.5, 0.0), (0.2, 0.4), (0.2, 0.5), *_AIR),
                    1,
                    False,
                ),
                _LANDER_SIDES,
                _LANDER_ACTIONS,
            ),
            Region(
                "it falls fast, upright, above the pad: the main engine",
                ((-0.1, 0.1), (0.1, 0.3), (-0.1, 0.1), (-1.0, -0.6), (-0.05, 0.05), (-0.1, 0.1), *_AIR),
                2,
            ),
            Region(
                "it falls very fast, upright, high: the main engine",
                ((-0.2, 0.2), (0.3, 0.8), (-0.2, 0.2), (-1.5, -1.0), (-0.05, 0.05), (-0.1, 0.1), *_AIR),
                2,
            ),
            Region(
                "it rises: not the main engine",
                ((-0.3, 0.3), (0.8, 1.4), (-0.2, 0.2), (0.1, 0.4), (-0.1, 0.1), (-0.1, 0.1), *_AIR),
                2,
                False,
            ),
            Region(
                "it stands on both legs: not the main engine",
                ((-0.1, 0.1), (-0.02, 0.02), (-0.02, 0.02), (-0.02, 0.02), (-0.02, 0.02), (-0.02, 0.02), _TWO, _TWO),
                2,
                False,
            ),
        ),
    ),
}
"""The games by name."""
