"""What a study would do: its cells, what they have already, and an estimate of the time for the rest."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from benchmarks.common.records import Record
from benchmarks.study.cells import Cell, Places
from benchmarks.study.state import State
from benchmarks.study.suite import Method, Suite
from benchmarks.study.training import data_of
from verifiable_relu.train.loop import build
from verifiable_relu.train.losses import objective

_STEPS = 4
"""The number of steps that a trial of a training takes; the first step is not timed."""


def plan(suite: Suite, places: Places, records: Sequence[Record], jobs: int) -> Iterator[str]:
    """The lines that say what a study would do.

    The time of a training is the mean of the recorded ones of its network and objective; without any, it is estimated
    from a few steps. The time of an answer is the mean of the recorded ones of its network, radius and method; without
    any, it is the time limit, so that the sum is an upper bound.

    Args:
        suite: the suite.
        places: the folder of the study.
        records: its records.
        jobs: the number of processes.

    Raises:
        InputError: for data that cannot be used.
    """
    state = State.of(records)
    cells = suite.cells()
    estimate = _Estimate(suite, state)
    yield f"{suite.name}: {suite.about}"
    yield f"{len(cells)} trainings, in {places.folder}"
    training = answering = 0.0
    trained = answered = asked = 0
    width = max(len(cell.name) for cell in cells)
    for cell in cells:
        record = state.trainings.get(cell.name)
        status = "missing" if record is None else record["status"]
        if record is None and places.checkpoint(cell).is_file():
            status = "begun"
        to_train = 0.0 if state.settled(cell) else estimate.training(cell)
        setting = suite.setting(cell.network)
        right = state.right(cell, setting.images)
        images = range(setting.images) if right is None else right
        done, to_answer = 0, 0.0
        asks = [method for method in suite.methods if method.name in setting.methods and status != "diverged"]
        for method in asks:
            for eps in setting.eps:
                left = [i for i in images if not state.answered((cell.name, eps, method.name, i), method.limit)]
                done += len(images) - len(left)
                to_answer += len(left) * estimate.answer(cell, eps, method) if left else 0.0
        questions = len(images) * len(setting.eps) * len(asks)
        trained, answered, asked = trained + (status == "trained"), answered + done, asked + questions
        training, answering = training + to_train, answering + to_answer
        told = f"{status:8} {done:6} of {questions} answers"
        yield f"  {cell.name:{width}}  {told}{_left(to_train + to_answer)}"
    yield f"{trained} of {len(cells)} are trained, {answered} of at most {asked} questions answered"
    most = " at most" if estimate.bound else ""
    yield (
        f"left: trainings {_time(training / jobs)}, answers{most} {_time(answering / jobs)}, with {jobs} "
        f"process{'es' * (jobs > 1)}"
    )


class _Estimate:
    """Seconds of what is left, by what is recorded.

    Args:
        suite: the suite.
        state: what is recorded.

    Attributes:
        bound: whether the time of some answer is not known and was taken to be the time limit.
    """

    def __init__(self, suite: Suite, state: State) -> None:
        self.bound = False
        self._state = state
        self._tried: dict[tuple[str, str], float] = {}
        network = {cell.name: cell.network for cell in suite.cells()}
        self._known: dict[tuple[str | None, str, str], list[float]] = defaultdict(list)
        for (name, eps, method, _), record in state.answers.items():
            self._known[network.get(name), eps, method].append(record["seconds"])

    def training(self, cell: Cell) -> float:
        """The seconds of a training."""
        key = (cell.network, cell.objective)
        if key not in self._tried:
            known = [
                max(record["wall_seconds"], record["seconds"])  # The former leaves out what came before a resumption.
                for record in self._state.trainings.values()
                if record["status"] == "trained" and (record["network"], record["objective"]) == key
            ]
            self._tried[key] = statistics.fmean(known) if known else _try(cell)
        return self._tried[key]

    def answer(self, cell: Cell, eps: str, method: Method) -> float:
        """The seconds of an answer."""
        known = self._known.get((cell.network, eps, method.name))
        self.bound = self.bound or not known
        return statistics.fmean(known) if known else method.limit


def _try(cell: Cell) -> float:
    """The seconds of a training, by a few steps."""
    training, _ = data_of(cell.source)
    options = cell.options
    model = build(options, training)
    x, y = (torch.from_numpy(array[: options.batch]) for array in (training.images, training.labels))
    generator = torch.Generator().manual_seed(0)
    taken = []
    for _ in range(_STEPS):
        began = time.perf_counter()
        objective(model, x, y, options, 1.0, 1.0, generator)[0].backward()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:]) * options.total_epochs * -(-len(training) // options.batch)


def _left(seconds: float) -> str:
    return f", {_time(seconds)} left" if seconds else ""


def _time(seconds: float) -> str:
    """A time in the unit that suits it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
