"""The run of a study: what has no record yet is trained, measured and asked, and recorded piece by piece."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from benchmarks.common.records import Records
from benchmarks.study import asking
from benchmarks.study.asking import Answers, Ball, Balls
from benchmarks.study.cells import Cell, Places
from benchmarks.study.state import FAILED, State, gathered, of_seed
from benchmarks.study.suite import INT8, Method, Suite
from benchmarks.study.training import Measuring, Training, data_of, images_of, untrained
from verifiable_relu.campaign.queue import Hand, run_parallel, share
from verifiable_relu.campaign.worker import Job
from verifiable_relu.errors import InputError
from verifiable_relu.files import write_whole
from verifiable_relu.network import read_onnx
from verifiable_relu.network.onnx.running import deployed
from verifiable_relu.train.loop import build
from verifiable_relu.verifiers.registry import limited, make
from verifiable_relu.verifiers.solvers.process import processor_seconds

Say = Callable[[str], None]
"""A function that tells the user one line."""


class Runner:
    """A study in its folder.

    Args:
        suite: the suite.
        places: the folder.
        records: its records, open for this run.
        hands: who trains and answers.
        say: tells the user what is done.
        cells: the trainings of the suite that this run works on; all of them without any.

    Attributes:
        cells: these trainings.
        state: what is done.
    """

    def __init__(
        self,
        suite: Suite,
        places: Places,
        records: Records,
        hands: Sequence[Hand],
        say: Say,
        cells: Sequence[Cell] = (),
    ) -> None:
        self.suite = suite
        self.places = places
        self.records = records
        self.hands = hands
        self.say = say
        self.cells = list(cells) or suite.cells()

    @property
    def state(self) -> State:
        """What the records hold now."""
        return State.of(self.records.all)

    def run(self) -> None:
        """Do all that has no record, seed by seed: trainings, measures, answers.

        Raises:
            InputError: for data, networks or a folder that cannot be used, before anything is trained where possible.
            KeyboardInterrupt: if the user interrupts; the next run goes on from there.
        """
        self.check()
        if self.state.suite is None or self.state.suite["digest"] != self.suite.record["digest"]:
            self.records.append("suite", self.suite.record)
        self.places.networks.mkdir(parents=True, exist_ok=True)
        for half in self.places.networks.glob("*.part"):  # A run that was killed can have left half-written files.
            half.unlink()
        try:
            for seed in sorted({cell.options.seed for cell in self.cells}):
                cells = of_seed(self.cells, seed)
                self.train(cells)
                self.choose(cells)
                self.measure(cells)
                for method in self.suite.methods:
                    self.ask(cells, method)
        finally:
            self.records.replace(gathered(self.records.all))
        self.list_instances()

    def check(self) -> None:
        """Check that all data can be read, that the networks fit them, and that other radii change no training unsaid.

        Raises:
            InputError: if not.
        """
        named = ("network", "arm", "objective", "weight", "seed")
        known = {tuple(each[name] for name in named): each for each in self.state.trainings.values()}
        for cell in self.cells:
            before = known.get(tuple(cell.record[name] for name in named))
            if before is None or before["cell"] == cell.name or not self.suite.by_radii(cell):
                continue
            now = json.loads(json.dumps(asdict(cell.options)))
            if {name for name, value in before["options"].items() if now.get(name, value) != value} == {"eps"}:
                raise InputError(
                    f"{cell.network}: with these radii it would be trained anew, with ε = {now['eps']:g} where it was "
                    f"{before['options']['eps']:g}: say eps = … in [network.training]",
                    path=self.suite.path,
                )
        for cell in {cell.network: cell for cell in self.cells}.values():
            build(cell.options, data_of(cell.source)[0])

    def train(self, cells: Sequence[Cell]) -> None:
        """Train those of the cells whose networks are missing; a training that fails is recorded as such.

        A network that the records know, but whose file is missing, as in a folder of which the records alone were kept,
        is trained again where something is left to ask of it.

        Raises:
            InputError: if it is another network than the recorded one.
        """
        state = self.state
        again = [
            cell
            for cell in cells
            if state.trained(cell) and not self.places.network(cell).is_file() and state.left(self.suite, cell)
        ]
        missing = [*(cell for cell in cells if not state.settled(cell)), *again]
        for cell in cells:
            if state.settled(cell):
                # A run that was killed can have recorded a training and left its checkpoint.
                self.places.checkpoint(cell).unlink(missing_ok=True)
        done = sum(map(state.settled, self.cells))

        def keep(task: Training, result: Any) -> None:
            nonlocal done
            if task.cell in again:
                if isinstance(result, Exception):
                    raise result
                if result.get("files") != state.trainings[task.cell.name]["files"]:
                    self.places.network(task.cell).unlink(missing_ok=True)
                    raise InputError(
                        f"{task.cell.name}: trained again, it is another network than the recorded one: equal seeds on "
                        "another processor, or with other libraries, are not equal networks",
                        path=self.places.folder,
                    )
                self.say(f"{task.cell.name}: trained again, the same as recorded")
                return
            failed = isinstance(result, Exception)
            fields = untrained(task.cell, "failed", f"{type(result).__name__}: {result}") if failed else result
            self.records.append("training", {**task.cell.record, **fields})
            if not failed:
                self.places.checkpoint(task.cell).unlink(missing_ok=True)
            done += not failed
            self.say(f"{done} of {len(self.cells)} trainings: {task.cell.name}: {_of_training(fields)}")

        left = iter([Training(cell, self.places.resolved) for cell in missing])
        share(self.hands, lambda: next(left, None), keep)

    def choose(self, cells: Sequence[Cell]) -> None:
        """Record, for each trained cell, which of the images its network classifies rightly."""
        state = self.state
        for cell in cells:
            asked = self.suite.setting(cell.network).images
            if state.trained(cell) and state.right(cell, asked) is None:
                test = images_of(cell.source)
                images = asking.exact_images(test, asked)
                network = read_onnx(self.places.network(cell))
                numbers = {"images": images.tolist(), "right": asking.right(network, test, images).tolist()}
                about = {"cell": cell.name, "asked": asked, "outputs": network.output_size}
                self.records.append("images", {**about, **numbers})

    def measure(self, cells: Sequence[Cell]) -> None:
        """Measure those of the cells' networks that have no measures; a failure is recorded as such."""
        state = self.state
        known = state.measured
        tasks = []
        for cell in cells:
            setting = self.suite.setting(cell.network)
            right = state.right(cell, setting.images)
            if state.trained(cell) and right is not None and cell.name not in known:
                tasks.append(Measuring(cell, self.places.resolved, tuple(right), setting.eps))

        def keep(task: Measuring, result: Any) -> None:
            if isinstance(result, Exception):
                self.say(f"{task.cell.name}: not measured: {result}")
                found = {"name": FAILED, "value": None, "detail": f"{type(result).__name__}: {result}"}
                self.records.append("measure", {"cell": task.cell.name, **found})
                return
            for name, value in result.items():
                self.records.append("measure", {"cell": task.cell.name, "name": name, "value": value})

        left = iter(tasks)
        share(self.hands, lambda: next(left, None), keep)

    def ask(self, cells: Sequence[Cell], method: Method) -> None:
        """Ask a method about all balls that it has not answered; every answer is recorded as soon as it is known.

        Each is asked by itself, those of all arms in random order (``asking.shuffled``), so that seconds can be
        compared.
        """
        state = self.state
        entries: list[Ball] = []
        about: dict[tuple[str, str], dict[str, Any]] = {}
        for cell in cells:
            if not state.trained(cell):
                continue
            onnx, outputs = self.places.network(cell), state.images[cell.name]["outputs"]
            left = state.open(self.suite, cell, method)
            if method.arithmetic == INT8 and left:
                onnx = self.places.int8(cell)
                digest = asking.int8_file(onnx, self.places.network(cell), cell.source)
                self.records.append("measure", {"cell": cell.name, "name": "int8_file", "value": digest})
            for eps, image in left:
                path = self.places.property(cell, eps, image)
                asking.property_file(path, images_of(cell.source), image, eps, outputs)
                ball = Ball(path.resolve(), onnx.resolve(), method.limit, cell.source, eps, image, outputs)
                entries.append(ball)
                question = {"cell": cell.name, "eps": eps, "method": method.name, "image": image}
                about[str(ball.onnx), str(ball.vnnlib)] = question
        if not entries:
            return
        limits = replace(limited(method.of), clock=processor_seconds)
        prepare = None if method.arithmetic in ("real", INT8) else partial(deployed, arithmetic=method.arithmetic)
        job, keeper = Job(make(method.of), Balls(prepare=prepare), limits=limits), Answers(self.records, about)
        order = asking.shuffled(entries, f"{cells[0].options.seed} {method.name}")
        run_parallel(order, job, self.hands, keeper, alone=True)
        counted = Counter(result.answer for result in keeper.results)
        told = ", ".join(f"{count} {answer}" for answer, count in sorted(counted.items()))
        spent = sum(result.seconds for result in keeper.results)
        self.say(f"seed {cells[0].options.seed}, {method.name}: {told}; {spent:.0f} s")

    def list_instances(self) -> None:
        """Write ``instances.csv``, with which other tools can be asked the same, with the longest time limit."""
        state = self.state
        limit = max(method.limit for method in self.suite.methods)
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        for cell in self.suite.cells():
            setting = self.suite.setting(cell.network)
            for eps in setting.eps:
                for image in state.right(cell, setting.images) or ():
                    files = (self.places.network(cell), self.places.property(cell, eps, image))
                    # The competition's tables name files without .gz.
                    named = (str(path.relative_to(self.places.folder)).removesuffix(".gz") for path in files)
                    rows.writerow([*named, f"{limit:g}"])
        write_whole(self.places.folder / "instances.csv", text.getvalue().encode())


def _of_training(fields: dict[str, Any]) -> str:
    """A training's record in a few words."""
    if fields["status"] != "trained":
        return f"{fields['status']}: {fields['detail']}"
    return f"{100 * fields['results']['clean']:.1f} % clean, {fields['seconds']:.0f} s"
