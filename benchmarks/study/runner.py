"""The run of a study: what has no record yet is trained, measured and asked, and recorded piece by piece."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.records import Record, Records, of, upgraded
from benchmarks.study import asking, training
from benchmarks.study.asking import Question
from benchmarks.study.suite import INT8, Cell, Method, Suite
from benchmarks.study.training import TrainingTask
from verifiable_relu.errors import InputError

Task = Callable[[], Record]


class Runner:
    """A study in its folder.

    Args:
        suite: the suite.
        path: its file, to which data files are relative.
        folder: the folder of records and networks.
        records: the records, open for this run.
        jobs: the number of processes that train and answer; 1 works in this one.
        say: tells the user one line.
        cells: the trainings that this run works on.
    """

    def __init__(
        self,
        suite: Suite,
        path: Path,
        folder: Path,
        records: Records,
        jobs: int,
        say: Callable[[str], None],
        cells: Sequence[Cell],
    ) -> None:
        self.suite, self.records, self.jobs, self.say = suite, records, jobs, say
        self.tasks = []
        for cell in cells:
            network = suite.architecture(cell.network)
            source = training.source_of(path, network.data)
            options = training.options_of(suite, cell)
            about = (options, source, folder / "networks", network.images, network.eps)
            self.tasks.append(TrainingTask(cell, *about))

    @property
    def trainings(self) -> dict[str, Record]:
        """The latest record of each training, by the name of its cell."""
        return {Cell(*(each[name] for name in Cell._fields)).name: each for each in self.records.of("training")}

    def run(self) -> None:
        """Do all that has no record, seed by seed: first trainings, then answers, method by method.

        Raises:
            InputError: for data, records or a folder that cannot be used.
            KeyboardInterrupt: if the user interrupts; the next run goes on from there.
        """
        self.check()
        for seed in sorted({task.cell.seed for task in self.tasks}):
            tasks = [task for task in self.tasks if task.cell.seed == seed]
            self.train(tasks)
            for method in self.suite.method:
                self.ask(tasks, method)

    def check(self) -> None:
        """Check the data, and that recorded trainings are those that the suite describes.

        Raises:
            InputError: if not.
        """
        known = self.trainings
        for task in self.tasks:
            record = known.get(task.cell.name)
            if record is None:
                continue
            if upgraded(record["key"]) != training.key_of(task.options):
                raise InputError(f"{task.cell.name} was trained with other options: take another folder (--out)")
            if record.get("asked", task.images) != task.images:
                raise InputError(
                    f"{task.cell.name} was asked about {record['asked']} images: take another folder (--out)"
                )
        for task in {task.cell.network: task for task in self.tasks}.values():
            training.check(task.options, task.source)
            task.folder.mkdir(parents=True, exist_ok=True)
            for half in task.folder.glob("*.part"):  # A run that was killed can have left half-written files.
                half.unlink()

    def train(self, tasks: Sequence[TrainingTask]) -> None:
        """Train the networks that have no record; a training that fails is recorded, and the next run repeats it."""
        known = self.trainings
        missing = [task for task in tasks if known.get(task.cell.name, {"status": "failed"})["status"] == "failed"]
        for task, result in done_by(self.jobs, missing):
            if isinstance(result, Exception):
                about = {**task.cell._asdict(), "key": training.key_of(task.options), "status": "failed"}
                result = {**about, "detail": f"{type(result).__name__}: {result}"}
            self.records.append("training", result)
            if result["status"] != "failed":
                task.checkpoint.unlink(missing_ok=True)
            told = f"{100 * result['results']['clean_test']:.1f} % clean" if "results" in result else result["detail"]
            self.say(f"{task.cell.name}: {result['status']}, {told}")

    def open(self, tasks: Sequence[TrainingTask], method: Method) -> Iterator[Question]:
        """The questions to a method that have no answer, or none that is final."""
        known = {
            (r["cell"], r["eps"], r["image"]): r for r in of(self.records.all, "answer") if r["method"] == method.label
        }
        trainings = self.trainings
        for task in tasks:
            record = trainings.get(task.cell.name, {})
            if (
                record.get("status") != "trained"
                or method.label not in self.suite.architecture(task.cell.network).methods
            ):
                continue
            left = [
                (eps, image)
                for eps in task.radii
                for image in record["right"]
                if not asking.is_final(known.get((task.cell.name, eps, image)), method.limit)
            ]
            if left and not task.network.is_file():
                raise InputError("no such file: the networks of these records were not kept", path=task.network)
            onnx = task.int8() if left and method.arithmetic == INT8 else task.network
            yield from (Question(task.cell.name, onnx, method, task.source, eps, image) for eps, image in left)

    def ask(self, tasks: Sequence[TrainingTask], method: Method) -> None:
        """Ask a method all that is open; every answer is recorded as soon as it is known."""
        seed, counted = tasks[0].cell.seed, Counter[str]()
        for question, result in done_by(self.jobs, asking.shuffled(self.open(tasks, method), f"{seed} {method.label}")):
            found = asking.failed(question, result) if isinstance(result, Exception) else result
            self.records.append("answer", found)
            counted[found["verdict"]] += 1
        if counted:
            told = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counted.items()))
            self.say(f"seed {seed}, {method.label}: {told}")


def done_by(jobs: int, tasks: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Do tasks in processes of one thread each; yields each with its result, or the exception that it ended with.

    Raises:
        InputError: if a process dies.
        KeyboardInterrupt: if the user interrupts.
    """
    if jobs == 1 or not tasks:
        for task in tasks:
            yield task, _attempt(task)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context, initializer=partial(torch.set_num_threads, 1))
    waiting, running = iter(tasks), dict[Future[Any], Any]()
    try:
        # Two for each process, so that none waits, and an interrupt leaves little behind.
        while True:
            for task in islice(waiting, 2 * jobs - len(running)):
                running[pool.submit(_attempt, task)] = task
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()
    except BrokenProcessPool:
        raise InputError("a process died; the same command goes on from here") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _attempt(task: Task) -> Record | Exception:
    try:
        return task()
    except Exception as error:
        return error
