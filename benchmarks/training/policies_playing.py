"""The games of the study ``policies`` and the training of a policy by PPO, in the training loop of the package.

PPO is Schulman et al., Proximal Policy Optimization Algorithms, arXiv 1707.06347, with generalised advantages (arXiv
1506.02438). A pass of the loop is an update: it plays, and then takes a few epochs of small batches of what was played.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.study.measuring import balance_index, changed, overlap_index, patterns
from benchmarks.training.policies_games import GAMES, PLAYERS, ROLLOUT, Game
from verifiable_relu.errors import InputError
from verifiable_relu.nn import mlp, substitute_relu
from verifiable_relu.train.loop import Annealing, Diverged, activation, fit, make_optimizer, set_rates
from verifiable_relu.train.options import ARMS, Options

SWITCH, ANNEALED = 0.5, 0.9
"""The parts of the training at which λ's growth begins, or ReLU takes GELU's place, and at which λ has grown."""

EARLY = 0.1
"""The part of the training after which screening looks."""

DISCOUNT = 0.99


def environment(game: Game) -> Any:
    """A new environment of a game.

    Raises:
        InputError: if what it needs is not installed.
    """
    try:
        import gymnasium

        return gymnasium.make(game.environment, disable_env_checker=True)
    except Exception as error:  # gymnasium has an error of its own for a game whose parts are missing.
        raise InputError(
            f'{game.environment} cannot be played: pip install "verifiable-relu[policies]" ({error})'
        ) from error


class Agent(nn.Module):
    """The policy and the estimate of what it will earn, both of observations divided by the game's scales."""

    def __init__(self, game: Game, options: Options) -> None:
        super().__init__()
        inputs = len(game.scales)
        plain = nn.ReLU if options.arm == "relu" else nn.GELU
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(options.seed)
            self.actor = mlp([inputs, *options.hidden, game.actions], partial(activation, options))
            self.critic = mlp([inputs, *options.hidden, 1], plain)
            for net, last in ((self.actor, 0.01), (self.critic, 1.0)):
                linear = [module for module in net if isinstance(module, nn.Linear)]
                for layer in linear:
                    nn.init.orthogonal_(layer.weight, last if layer is linear[-1] else math.sqrt(2))
                    nn.init.zeros_(layer.bias)


@dataclass(frozen=True)
class Settings:
    """The settings of PPO, six of which a random search draws."""

    rate: float = 1e-3
    epochs: int = 4
    batches: int = 4
    clip: float = 0.2
    entropy: float = 0.01
    gae: float = 0.95
    steps: int = 100_000


@dataclass
class Training:
    """The training of a policy, as ``train.loop.fit`` asks for its parts.

    Attributes:
        earned: the return of each episode that ended, with the number of its update.
        early: per update of the first tenth, for screening: how far the policy moved, and the patterns of its neurons.
        lam: λ of the policy's layers when their growth began.
        swap: called with the policy before and after the swap in the middle of a training.
    """

    game: Game
    options: Options
    settings: Settings
    screened: bool = False
    swap: Callable[[nn.Module, nn.Module], None] = lambda smooth, hard: None
    earned: list[tuple[int, float]] = field(default_factory=list)
    early: list[dict[str, float]] = field(default_factory=list)
    lam: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.agent = Agent(self.game, self.options)
        self.updates = self.settings.steps // (PLAYERS * ROLLOUT)
        self.each = self.settings.epochs * self.settings.batches
        self.optimizer = make_optimizer(self.agent, self.options)
        clipped = partial(nn.utils.clip_grad_norm_, list(self.agent.parameters()), 0.5)
        self.optimizer.register_step_pre_hook(lambda *_: (clipped(), None)[1])
        self.random = torch.Generator().manual_seed(self.options.seed)
        self.players = [environment(self.game) for _ in range(PLAYERS)]
        starts = [player.reset(seed=self.options.seed * PLAYERS + i)[0] for i, player in enumerate(self.players)]
        self.scales = np.array(self.game.scales, np.float32)
        self.seen = np.stack(starts) / self.scales
        self.totals = np.zeros(PLAYERS)
        self.annealing: Annealing | None = None
        self.moved: list[tuple[float, float]] = []
        self.before_update: list[list[Tensor]] = []

    def run(self) -> nn.Module:
        """Train; returns the policy, of observations as they are."""
        for _ in fit(self.agent, self.updates, self.begin, self.loss, self.optimizer, self.before):
            self.look()
        for player in self.players:
            player.close()
        return self.policy()

    def policy(self) -> nn.Module:
        """A copy of the policy, in evaluation mode, into whose weights the scales of the observations have gone."""
        made = deepcopy(self.agent.actor).eval()
        first = next(module for module in made if isinstance(module, nn.Linear))
        with torch.no_grad():
            first.weight /= torch.from_numpy(self.scales)
        return made.requires_grad_(False)

    def begin(self, update: int) -> list[Tensor]:
        """Change the activation where that is due, and play; returns the small batches of the update."""
        arm = ARMS[self.options.arm]
        if update == round(SWITCH * self.updates):
            if arm.anneals:
                growing = self.each * (round(ANNEALED * self.updates) - update)
                self.annealing = Annealing(self.agent.actor, growing, self.options.lam_target, self.options.schedule)
                self.lam = self.annealing.start
            elif arm.swap == "switch":
                smooth = self.policy()
                substitute_relu(self.agent.actor, inplace=True)
                self.swap(smooth, self.policy())
        self.play(update)
        if self.watched:
            self.before_update = self.patterns()
        parts = [torch.randperm(len(self.states), generator=self.random) for _ in range(self.settings.epochs)]
        return list(chain.from_iterable(part.chunk(self.settings.batches) for part in parts))

    @torch.inference_mode()
    def play(self, update: int) -> None:
        """Play ``ROLLOUT`` steps, and estimate the advantage of every action taken."""
        actor, critic = self.agent.actor.eval(), self.agent.critic.eval()
        states, actions, chances, rewards, ends = [], [], [], [], []
        for _ in range(ROLLOUT):
            seen = torch.from_numpy(self.seen)
            chance = actor(seen).log_softmax(1)
            if not chance.isfinite().all():
                raise Diverged("an output of the policy is infinite or NaN", place=f"update {update}")
            action = torch.multinomial(chance.exp(), 1, generator=self.random)
            states.append(seen)
            actions.append(action[:, 0])
            chances.append(chance.gather(1, action)[:, 0])
            reward, end, following = np.zeros(PLAYERS), np.zeros(PLAYERS), np.empty_like(self.seen)
            for i, (player, chosen) in enumerate(zip(self.players, action[:, 0].tolist(), strict=True)):
                found, reward[i], over, late, _ = player.step(chosen)
                self.totals[i] += reward[i]
                if over or late:
                    if not over:
                        # The clock ended the episode, not the policy: what was still to be earned counts.
                        last = torch.from_numpy(found / self.scales)[None]
                        reward[i] += DISCOUNT * critic(last).item()
                    end[i] = 1
                    self.earned.append((update, self.totals[i]))
                    self.totals[i] = 0
                    found = player.reset()[0]
                following[i] = found / self.scales
            rewards.append(reward)
            ends.append(end)
            self.seen = following
        values = critic(torch.cat([*states, torch.from_numpy(self.seen)])).view(-1, PLAYERS).numpy()
        gained, gains = np.zeros(PLAYERS), np.empty((ROLLOUT, PLAYERS), np.float32)
        for t in reversed(range(ROLLOUT)):
            later = DISCOUNT * (1 - ends[t])
            gained = rewards[t] + later * values[t + 1] - values[t] + later * self.settings.gae * gained
            gains[t] = gained
        self.gains = torch.from_numpy(gains.ravel()).clone()
        self.aims = self.gains + torch.from_numpy(values[:-1].ravel())
        self.states, self.actions, self.chances = (torch.cat(each).clone() for each in (states, actions, chances))

    def before(self, step: int) -> None:
        """Set λ and the learning rates, which fall to 0 along a line."""
        if self.annealing is not None and self.annealing.taken < self.annealing.steps:
            self.annealing.step()
        left = 1 - step / (self.updates * self.each)
        set_rates(self.optimizer, self.settings.rate * left, self.options)

    def loss(self, model: nn.Module, chosen: Tensor) -> Tensor:
        """PPO's loss on a small batch."""
        states, gains, clip = self.states[chosen], self.gains[chosen], self.settings.clip
        chances = self.agent.actor(states).log_softmax(1)
        move = chances.gather(1, self.actions[chosen][:, None])[:, 0] - self.chances[chosen]
        ratio = move.exp()
        gains = (gains - gains.mean()) / (gains.std() + 1e-8)
        policy = -torch.minimum(ratio * gains, ratio.clamp(1 - clip, 1 + clip) * gains).mean()
        value = (self.agent.critic(states)[:, 0] - self.aims[chosen]).square().mean() / 2
        spread = -(chances.exp() * chances).sum(1).mean()
        if self.watched:
            with torch.no_grad():
                outside = ((ratio - 1).abs() > clip).float().mean().item()
                self.moved.append((outside, (ratio - 1 - move).mean().item()))
        return policy + value / 2 - self.settings.entropy * spread

    @property
    def watched(self) -> bool:
        """Whether this is an update that screening looks at."""
        return self.screened and len(self.early) < max(1, round(EARLY * self.updates))

    def patterns(self) -> list[list[Tensor]]:
        """Of policy and estimate, the patterns of their neurons on 256 of the states that were played."""
        probes = self.states[:: len(self.states) // 256]
        return [patterns(net, probes) for net in (self.agent.actor, self.agent.critic)]

    def look(self) -> None:
        """Measure what an update changed, if screening looks at it."""
        if not self.watched:
            return
        clipped, moved = zip(*self.moved, strict=True)
        self.moved = []
        found = {"clip": float(np.mean(clipped)), "kl": float(np.mean(moved))}
        for name, before, now in zip(("actor", "critic"), self.before_update, self.patterns(), strict=True):
            found |= {
                f"flips_{name}": changed(before, now),
                f"oui_{name}": balance_index(now[-1]),
                f"oui_pairs_{name}": overlap_index(now),
            }
        self.early.append(found)


@dataclass(frozen=True)
class Played:
    """Episodes that a policy played: their returns, and the states that it saw (n, inputs)."""

    returns: list[float]
    states: np.ndarray

    @property
    def mean(self) -> float:
        """The mean return."""
        return float(np.mean(self.returns))


@torch.inference_mode()
def played(policy: nn.Module, game: Game, episodes: int, seed: int) -> Played:
    """Episodes of a policy that always takes the action of the largest output, started with equal seeds for all."""
    players = [environment(game) for _ in range(episodes)]
    seen = [player.reset(seed=1_000_000 * (seed + 1) + i)[0] for i, player in enumerate(players)]
    totals, going, states = np.zeros(episodes), list(range(episodes)), []
    while going:
        now = np.stack([seen[i] for i in going])
        states.append(now)
        left = []
        for i, action in zip(going, policy(torch.from_numpy(now)).argmax(1).tolist(), strict=True):
            seen[i], reward, over, late, _ = players[i].step(action)
            totals[i] += reward
            if not (over or late):
                left.append(i)
        going = left
    for player in players:
        player.close()
    return Played(totals.tolist(), np.concatenate(states))


def options(arm: str, settings: Settings, seed: int) -> Options:
    """The options of a training of the package that say what a policy's activation, λ and optimizer are."""
    return Options("states", hidden=(64, 64), arm=arm, rate=settings.rate, decay=0.0, seed=seed)


def trained(
    game: str, arm: str, settings: Settings, seed: int, screened: bool = False, **watching: Any
) -> tuple[Training, nn.Module, float]:
    """A training with its policy and its processor seconds."""
    began = time.process_time()
    training = Training(GAMES[game], options(arm, settings, seed), settings, screened, **watching)
    return training, training.run(), time.process_time() - began


def late(earned: Sequence[tuple[int, float]], first: int, end: int) -> float:
    """The mean return of the episodes that ended in the updates from ``first`` up to ``end``; NaN without one."""
    found = [total for update, total in earned if first <= update < end]
    return float(np.mean(found)) if found else math.nan
