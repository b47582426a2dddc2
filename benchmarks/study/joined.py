"""The records of a study, joined: each network with its training, its answers and its measures."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from benchmarks.common.records import Record
from benchmarks.study.outcomes import SHARES, number
from benchmarks.study.state import State
from benchmarks.study.statistics import par2
from verifiable_relu.errors import missing
from verifiable_relu.train.options import ARMS
from verifiable_relu.verifiers.registry import METHODS


class Setting(NamedTuple):
    """What is compared over seeds: an arm with an objective of a weight, on one architecture and its data."""

    network: str
    objective: str
    weight: float
    arm: str


def attacks(method: str) -> bool:
    """Whether a method looks for counterexamples: bounds by themselves only prove."""
    return METHODS[_verifier(method)].attacks


def proves(method: str) -> bool:
    """Whether a method proves: the attack only refutes."""
    return METHODS[_verifier(method)].proves


def runs(method: str) -> bool:
    """Whether a method looks for counterexamples in another arithmetic than that of real numbers."""
    return method not in METHODS and attacks(method)


def _verifier(method: str) -> str:
    """The verifier of a method, whose name may end with an arithmetic (``suite.Method``)."""
    return method if method in METHODS else method.rpartition("-")[0]


@dataclass(frozen=True)
class Cell:
    """A network of a study; what has no record yet is empty.

    Attributes:
        training: the record of its training.
        images: the test images that it is asked about.
        right: those that it classifies rightly; only of these the answers are recorded.
        answers: the record of each image's answer, by radius and method.
        measures: the values that were measured, by name.
        methods: the methods that it is asked with, the strongest one last.
    """

    training: Record
    images: tuple[int, ...] = ()
    right: frozenset[int] = frozenset()
    answers: Mapping[tuple[str, str], Mapping[int, Record]] = field(default_factory=dict)
    measures: Mapping[str, Any] = field(default_factory=dict)
    methods: tuple[str, ...] = ()

    @property
    def setting(self) -> Setting:
        """The setting whose seed the network is."""
        return Setting(*(self.training[name] for name in Setting._fields))

    @property
    def real(self) -> tuple[str, ...]:
        """Those of the methods that ask in real arithmetic."""
        return tuple(method for method in self.methods if method in METHODS)

    @property
    def seed(self) -> int:
        """The seed of the training."""
        return int(self.training["seed"])

    def complete(self, eps: str, method: str = "") -> bool:
        """Whether a method, or without a name every method in real arithmetic, has answered for all images."""
        names = (method,) if method in self.methods else () if method else self.real
        return bool(self.images and names) and all(
            self.right <= self.answers.get((eps, name), {}).keys() for name in names
        )

    def said(self, verdict: str, eps: str, method: str = "") -> frozenset[int] | None:
        """The images for which a method has this verdict, or without a name any in real arithmetic; None until all are
        answered.

        A method whose answers are not complete does not say how many images it would prove, and a number of images so
        far is no accuracy.
        """
        if not self.complete(eps, method):
            return None
        names = (method,) if method else self.real
        return frozenset(
            image
            for name in names
            for image, answer in self.answers.get((eps, name), {}).items()
            if answer["verdict"] == verdict
        )

    def holds(self, measure: str, eps: str = "", method: str = "") -> Mapping[int, bool] | None:
        """For each image whether it is classified rightly and, beyond ``clean``, withstands; None if it is unknown.

        Args:
            measure: ``clean``; ``attacked``: the method does not refute it, unknown if none looks for counterexamples;
                ``certified``: the method proves it.
            eps: the radius.
            method: the method; without a name, any in real arithmetic.
        """
        if not self.images:
            return None
        found: frozenset[int] | None
        if measure == "clean":
            found = self.right
        elif measure == "attacked":
            asked = (method,) if method else self.real
            refuted = self.said("sat", eps, method) if any(map(attacks, asked)) else None
            found = None if refuted is None else self.right - refuted
        else:
            found = self.said("unsat", eps, method)
        return None if found is None else {image: image in found for image in self.images}

    def value(self, measure: str, eps: str = "", method: str = "") -> float | None:
        """A number of the network; None where the records do not have it.

        Args:
            measure: one of ``outcomes.SHARES``, the fraction of the asked images that ``holds``; ``unstable``, the mean
                number of unstable neurons per image; ``norm``, the Frobenius norm of all matrices and kernels together;
                ``joint_`` with a λ, the fraction of images that are certified for all λ' ≥ λ; or one of
                ``outcomes.NUMBERS``.
            eps: the radius, for the first two.
            method: the method, for ``certified``.
        """
        if measure in SHARES:
            found = self.holds(measure, eps, method)
            return None if found is None else sum(found.values()) / len(found)
        if measure == "unstable":
            layers = self.unstable(eps)
            return None if layers is None else math.fsum(layers)
        if measure == "norm":
            norms = self.measures.get("weight_norms")
            return None if norms is None else math.hypot(*norms)
        if measure.startswith("joint_"):
            joint = self.measures.get("joint")
            return joint[measure.removeprefix("joint_")] / joint["images"] if joint and joint["images"] else None
        return number(self.training, measure)

    def costs(self, name: str, eps: str, method: str) -> Mapping[int, float] | None:
        """The cost of each rightly classified image; None until all are answered.

        Args:
            name: ``seconds``, in which an undecided image counts twice the limit (``par2``); or ``subproblems``, which
                an undecided image and one whose number is unknown do not have.
            eps: the radius.
            method: the method.
        """
        if not self.complete(eps, method):
            return None
        answers = self.answers.get((eps, method), {})
        asked = {image: answer for image, answer in answers.items() if image in self.right}
        decided = {image: answer["verdict"] != "unknown" for image, answer in asked.items()}
        if name == "seconds":
            return {image: par2(a["seconds"], decided[image], a["limit"]) for image, a in asked.items()}
        return {
            image: float(answer[name])
            for image, answer in asked.items()
            if decided[image] and answer.get(name) is not None
        }

    def unstable(self, eps: str) -> Sequence[float] | None:
        """The mean number of unstable neurons of each layer, per image; None if it was not measured."""
        return (self.measures.get("unstable") or {}).get(eps)


@dataclass(frozen=True)
class Study:
    """All records of a study.

    Attributes:
        name: its name.
        suite: the suite, as its record has it; empty without one.
        cells: the networks that were trained or failed, in the order of their seeds.
        notes: the commands and machines of its runs.
    """

    name: str
    suite: Record
    cells: tuple[Cell, ...]
    notes: tuple[str, ...]

    @cached_property
    def settings(self) -> Mapping[Setting, Sequence[Cell]]:
        """The trained cells by setting: all settings of the suite, in its order, and after them any others."""
        groups: dict[Setting, list[Cell]] = {}
        for network in self.suite.get("networks", ()):
            for objective in self.suite["objectives"]:
                for weight in objective["weights"]:
                    for arm in network["arms"]:
                        groups[Setting(network["name"], objective["name"], weight, arm)] = []
        for cell in self.cells:
            group = groups.setdefault(cell.setting, [])
            if cell.training["status"] == "trained":
                group.append(cell)
        return groups

    def group(self, setting: Setting) -> dict[int, Cell]:
        """The trained cells of a setting by seed."""
        return {cell.seed: cell for cell in self.settings.get(setting, ())}

    def failed(self, setting: Setting) -> int:
        """The number of seeds of a setting whose training diverged or failed."""
        return sum(cell.setting == setting and cell.training["status"] != "trained" for cell in self.cells)

    @property
    def networks(self) -> list[str]:
        """The names of the networks, in the suite's order."""
        return list(dict.fromkeys(setting.network for setting in self.settings))

    def arms(self, network: str) -> list[str]:
        """The arms of a network, in the suite's order."""
        return list(dict.fromkeys(setting.arm for setting in self.settings if setting.network == network))

    def hardened(self, arm: str) -> bool:
        """Whether an arm trains an activation with a hardness λ; False for an arm without a training."""
        trained = next((cell.training["options"]["arm"] for cell in self.cells if cell.setting.arm == arm), None)
        return trained is not None and ARMS[trained].hardness != "none"

    def radii(self, network: str) -> list[str]:
        """The radii at which a network is asked, as text, in the suite's order."""
        for each in self.suite.get("networks", ()):
            if each["name"] == network:
                return list(each["eps"])
        asked = [eps for cell in self.cells if cell.setting.network == network for eps, _ in cell.answers]
        return list(dict.fromkeys(asked))

    def planned(self, network: str) -> int:
        """The number of seeds that the suite asks for; without a suite, of those that there are."""
        for each in self.suite.get("networks", ()):
            if each["name"] == network:
                seeds = each["seeds"]  # Records of version 0.2 have their number.
                return seeds if isinstance(seeds, int) else len(seeds)
        return len({cell.seed for cell in self.cells if cell.setting.network == network})

    @property
    def methods(self) -> tuple[str, ...]:
        """All methods, in the suite's order."""
        named = [each["name"] for each in self.suite.get("methods", ())]
        return tuple(dict.fromkeys([*named, *(method for cell in self.cells for method in cell.methods)]))

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with a row for each answer.

        Its columns are those of ``Setting``, ``seed``, and the fields of answers in the records (docs/study.md).

        Raises:
            InputError: if pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise missing("to_pandas", "pandas") from None
        return pandas.DataFrame(
            {**cell.setting._asdict(), "seed": cell.seed, **answer}
            for cell in self.cells
            for answers in cell.answers.values()
            for answer in answers.values()
        ).drop(columns="kind", errors="ignore")

    @property
    def timed(self) -> bool:
        """Whether seconds can be compared: each question was asked by itself, in random order over the arms.

        The suites of records from before that have no arms of their own in them. Their questions were asked in batches
        that share their time evenly, and shrink along the list: their seconds are void.
        """
        return "variants" in self.suite

    def asked_with(self, network: str) -> tuple[str, ...]:
        """The methods with which a network is asked, the strongest one last."""
        return next((cell.methods for cell in self.cells if cell.setting.network == network), ())


def joined(records: Sequence[Record]) -> Study:
    """The study of a list of records, complete or not; a later record of the same thing replaces an earlier one."""
    state = State.of(records)
    answers: dict[str, dict[tuple[str, str], dict[int, Record]]] = defaultdict(lambda: defaultdict(dict))
    for (name, eps, method, image), answer in state.answers.items():
        answers[name][eps, method][image] = answer
    measures: dict[str, dict[str, Any]] = defaultdict(dict)
    for (name, measure), record in state.measures.items():
        measures[name][measure] = record["value"]
    suite: Record = state.suite or {}
    described = suite.get("suite", {})
    methods = {each["name"]: tuple(each["methods"]) for each in described.get("networks", ())}
    cells = [
        Cell(
            training,
            tuple(state.images.get(name, {}).get("images", ())),
            frozenset(state.images.get(name, {}).get("right", ())),
            answers[name],
            measures[name],
            methods.get(training["network"]) or tuple(dict.fromkeys(method for _, method in answers[name])),
        )
        for name, training in state.trainings.items()
    ]
    notes = tuple(dict.fromkeys(record["text"] for record in state.notes))
    return Study(suite.get("name", "study"), described, tuple(sorted(cells, key=lambda c: c.seed)), notes)
