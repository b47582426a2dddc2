"""The file that describes a study: which networks are trained, in which arms, and what they are asked."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.study.cells import VARIANTS, Cell, variant_options
from benchmarks.study.outcomes import CLAIMED, COSTS
from benchmarks.study.toml_table import Keys, count, number, one_of, positive, text, texts
from verifiable_relu.arguments import fraction
from verifiable_relu.data import DATASETS, VALIDATION
from verifiable_relu.errors import InputError
from verifiable_relu.rounding import ARITHMETICS
from verifiable_relu.train.options import Options
from verifiable_relu.train.options import number as radius
from verifiable_relu.verifiers.registry import methods

SHIPPED = Path(__file__).parents[1] / "suites"
"""The folder of the suites."""

EXPECTED = ("more", "fewer", "no difference")
"""What a claim can expect of its arm, compared with another one."""

INT8 = "int8"
"""The arithmetic of a method that is asked about the int8 file made of a network (``train.export.quantize``)."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]{0,60}")


@dataclass(frozen=True)
class Architecture:
    """An architecture on a data set, and the questions about it.

    Attributes:
        name: its name in records and tables.
        data: the name of a data set, or an ``.npz`` file as the suite names it.
        eps: the radii of the L∞ balls, as text.
        images: the number of test images that are asked about, the first exact ones.
        seeds: the seeds.
        arms: the names of the variants, of the trainer or of the suite's own (``Variant``).
        methods: the names of the methods that are asked.
        training: the options of its trainings, by name.
    """

    name: str
    data: str
    eps: tuple[str, ...]
    images: int
    seeds: tuple[int, ...]
    arms: tuple[str, ...]
    methods: tuple[str, ...]
    training: Mapping[str, Any]


@dataclass(frozen=True)
class Objective:
    """What is minimised in training.

    Attributes:
        name: its name in records and tables.
        option: the option of the training that has the objective's weight; empty for an objective without one.
        weights: the values of that option; (0.0,) for an objective without a weight.
        training: the options of its trainings, by name; they go before those of the setting.
    """

    name: str
    option: str
    weights: tuple[float, ...]
    training: Mapping[str, Any]


@dataclass(frozen=True)
class Variant:
    """An arm of a suite's own: one of the trainer's with other options.

    Attributes:
        name: its name in records and tables.
        of: the variant (``cells.VARIANTS``) that it is.
        training: the options of its trainings, by name; they go before those of setting and objective.
    """

    name: str
    of: str
    training: Mapping[str, Any]


@dataclass(frozen=True)
class Method:
    """A method of verification.

    Attributes:
        name: its name in records and tables: that of the verifier, with the arithmetic unless that is ``real``.
        limit: the seconds of processor time for each image.
        of: the verifier's name (``verifiers.registry``).
        arithmetic: that of what runs the network (``network.onnx.running.deployed``), or ``INT8``.
    """

    name: str
    limit: float
    of: str
    arithmetic: str


@dataclass(frozen=True)
class Claim:
    """A comparison of two arms that is announced before anything is measured.

    Attributes:
        name: the name of its row.
        says: the claim in words.
        network: the name of the setting.
        arm: the variant that the claim is about.
        against: the variant with which it is compared.
        against_network: the setting of that variant; empty for the same setting.
        objective: the name of the objective.
        weight: the weight of the objective.
        measure: one of ``outcomes.CLAIMED``.
        eps: the radius; empty for a measure without one.
        method: the name of the method; empty for a measure without one.
        expected: one of ``EXPECTED``.
        margin: the largest difference that counts as none; of ``outcomes.COSTS`` the largest ratio, above 1. Given for
            claims that expect no difference; 0 for none.
    """

    name: str
    says: str
    network: str
    arm: str
    against: str
    objective: str
    weight: float
    measure: str
    eps: str
    method: str
    expected: str
    against_network: str = ""
    margin: float = 0.0


@dataclass(frozen=True)
class Suite:
    """A study, as its file describes it.

    Attributes:
        path: the file.
        text: its text.
        about: what the study asks.
        tuning: how much each arm was tuned.
        cut: what was left out, and why.
        settings: the architectures on their data.
        variants: the suite's own arms, by name.
        objectives: the objectives.
        methods: the methods of verification, in the order in which they are asked.
        claims: the family of claims over which p-values are corrected.
    """

    path: Path
    text: str
    about: str
    tuning: str
    cut: str
    settings: tuple[Architecture, ...]
    variants: Mapping[str, Variant]
    objectives: tuple[Objective, ...]
    methods: tuple[Method, ...]
    claims: tuple[Claim, ...]

    @property
    def name(self) -> str:
        """The name of the study."""
        return self.path.stem

    @property
    def record(self) -> dict[str, Any]:
        """The record of the suite."""
        described = {
            "about": self.about,
            "tuning": self.tuning,
            "cut": self.cut,
            "networks": [asdict(each) for each in self.settings],
            "arms": list(dict.fromkeys(arm for each in self.settings for arm in each.arms)),
            "variants": [asdict(each) for each in self.variants.values()],
            "objectives": [asdict(each) for each in self.objectives],
            "methods": [asdict(each) for each in self.methods],
            "claims": [asdict(each) for each in self.claims],
        }
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        return {"name": self.name, "digest": digest, "suite": described, "text": self.text}

    def setting(self, name: str) -> Architecture:
        """The setting of a name."""
        return next(each for each in self.settings if each.name == name)

    def variant(self, arm: str) -> Variant:
        """The arm of a name, one of the suite's own or of the trainer's."""
        return self.variants.get(arm) or Variant(arm, arm, {})

    def source(self, setting: Architecture) -> str:
        """The data of a setting as the trainer takes it: a name, or a file's path, which is relative to the suite."""
        plain = setting.data.removesuffix(VALIDATION)
        return str((self.path.parent / setting.data).resolve()) if plain.endswith(".npz") else setting.data

    def by_radii(self, cell: Cell) -> bool:
        """Whether the ε of a cell's training is not given, and follows from the radii of its questions."""
        aim = next(each for each in self.objectives if each.name == cell.objective)
        given = (self.setting(cell.network).training, aim.training, self.variant(cell.arm).training)
        return not any("eps" in each for each in given)

    def cells(self) -> list[Cell]:
        """All trainings, those of the first seed first: a study that is stopped has few seeds of all arms."""
        made = []
        for seed in sorted({seed for setting in self.settings for seed in setting.seeds}):
            for setting, objective in product(self.settings, self.objectives):
                if seed in setting.seeds:
                    for weight, arm in product(objective.weights, setting.arms):
                        options = _options(setting, objective, weight, self.variant(arm), seed)
                        source = self.source(setting)
                        made.append(Cell(setting.name, arm, objective.name, weight, options, source))
        return made


def find(name: str) -> Path:
    """The file of a suite: a path, or the name of a suite that comes with the package."""
    shipped = SHIPPED / f"{name}.toml"
    return shipped if re.fullmatch("[a-z0-9_]+", name) and os.path.isfile(shipped) else Path(name)


def read(path: Path) -> Suite:
    """Read a suite.

    Raises:
        InputError: if the file cannot be read or is no suite; the error names the line.
    """
    table = Keys.read(path)
    about, tuning, cut = (table.take(key, text) for key in ("about", "tuning", "cut"))
    changed = table.tables("arm")
    own = [_variant(each) for each in changed]
    _different(changed, [each.name for each in own])
    variants = {each.name: each for each in own}
    read_arms = _some_of((*VARIANTS, *variants))
    arms = table.take("arms", read_arms)
    seeds, images = table.take("seeds", _seeds), table.take("images", count)
    shared = table.table("training")
    common = _training(shared)
    settings, objectives = [], []
    asked = []
    ways = table.tables("method")
    for each in ways:
        of, arithmetic = each.take("name", one_of(methods())), each.take("arithmetic", one_of(_RUN), "real")
        asked.append(Method(_asked(of, arithmetic), each.take("limit", positive), of, arithmetic))
        each.done()
    every = tuple(method.name for method in asked)
    trained, aimed = table.tables("network"), table.tables("objective")
    networks, aims = [each.table("training") for each in trained], [each.table("training") for each in aimed]
    for each, options in zip(trained, networks, strict=True):
        settings.append(
            Architecture(
                each.take("name", _name),
                each.take("data", _data),
                each.take("eps", _radii),
                each.take("images", count, images),
                each.take("seeds", _seeds, seeds),
                each.take("arms", read_arms, arms),
                each.take("methods", _some_of(every), every),
                {**common, **_training(options)},
            )
        )
        each.done()
    for each, options in zip(aimed, aims, strict=True):
        name, option = each.take("name", _name), each.take("option", one_of(_WEIGHTED), "")
        weights = each.take("weights", _numbers) if option else (0.0,)
        objectives.append(Objective(name, option, weights, _training(options)))
        each.done()
    announced = table.tables("claim")
    for key, listed in (("network", trained), ("objective", aimed), ("method", ways)):
        if not listed:
            raise table.error(f"there is no [[{key}]]")
    claims = [_claim(each, settings, objectives) for each in announced]
    _different(trained, [each.name for each in settings])
    _different(aimed, [each.name for each in objectives])
    _different(ways, every)
    _different(announced, [claim.name for claim in claims])
    table.done()
    found = Suite(
        path, table.text, about, tuning, cut, tuple(settings), variants, tuple(objectives), tuple(asked), tuple(claims)
    )
    for (setting, of_network), (objective, aim) in product(
        zip(settings, networks, strict=True), zip(objectives, aims, strict=True)
    ):
        _check_options(found, setting, objective, (aim, of_network, shared))
    return found


_RUN = ("real", *ARITHMETICS, INT8)
"""The arithmetics of methods."""


def _asked(verifier: str, arithmetic: str) -> str:
    """The name of a method."""
    return verifier if arithmetic == "real" else f"{verifier}-{arithmetic}"


_WEIGHTED = ("certified", "stability", "l1", "decay")
"""The options that can be the weight of an objective."""


def _variant(table: Keys) -> Variant:
    """The arm that a table describes.

    Raises:
        InputError: for the name of an arm of the trainer.
    """
    name, of = table.take("name", _name), table.take("of", one_of(tuple(VARIANTS)))
    if name in VARIANTS:
        raise table.error(f"'{name}' is an arm of the trainer", "name")
    found = Variant(name, of, _training(table.table("training")))
    table.done()
    return found


def _claim(table: Keys, settings: list[Architecture], objectives: list[Objective]) -> Claim:
    """The claim that a table describes.

    Raises:
        InputError: if the claim is about something that the study does not have.
    """
    name, says = table.take("name", _name), table.take("says", text)
    network = table.take("network", one_of([each.name for each in settings]))
    setting = next(each for each in settings if each.name == network)
    beside = table.take("against_network", one_of([each.name for each in settings]), network)
    other = next(each for each in settings if each.name == beside)
    arm, against = table.take("arm", one_of(setting.arms)), table.take("against", one_of(other.arms))
    shared = tuple(each for each in setting.eps if each in other.eps)
    asked = tuple(each for each in setting.methods if each in other.methods)
    aim = table.take("objective", one_of([each.name for each in objectives]), objectives[0].name)
    weights = next(each for each in objectives if each.name == aim).weights
    weight = table.take("weight", number, weights[0])
    if weight not in weights:
        raise table.error(f"the objective '{aim}' has no weight {weight:g}", "weight")
    measure = table.take("measure", one_of(tuple(CLAIMED)))
    eps = table.take("eps", one_of(shared)) if "eps" in CLAIMED[measure] else ""
    method = table.take("method", one_of(asked)) if "method" in CLAIMED[measure] else ""
    expected = table.take("expected", one_of(EXPECTED))
    margin = table.take("margin", positive, 0.0)
    if margin and expected != "no difference":
        raise table.error("a margin belongs to a claim that expects no difference", "margin")
    if margin and measure in COSTS and margin <= 1:
        raise table.error(f"the margin of {measure} is a ratio, above 1", "margin")
    table.done()
    named = "" if beside == network else beside
    return Claim(name, says, network, arm, against, aim, weight, measure, eps, method, expected, named, margin)


def _options(setting: Architecture, objective: Objective, weight: float, arm: Variant, seed: int) -> Options:
    """The options of a training; ε is the middle radius of the questions unless the suite says otherwise.

    Raises:
        InputError: for options with which no network can be trained.
    """
    values = {"eps": radius(setting.eps[len(setting.eps) // 2]), **setting.training, **objective.training}
    if objective.option:
        values[objective.option] = weight
    return replace(variant_options(arm.of, Options(setting.data, **{**values, **arm.training})), seed=seed)


def _check_options(suite: Suite, setting: Architecture, objective: Objective, tables: Sequence[Keys]) -> None:
    """Check the options of all trainings of a setting with an objective.

    Args:
        suite: the suite.
        setting: the setting.
        objective: the objective.
        tables: the tables of options; the first one that has an option decides on it.

    Raises:
        InputError: for options with which no network can be trained.
    """
    for weight, arm in product(objective.weights, setting.arms):
        try:
            _options(setting, objective, weight, suite.variant(arm), 0)
        except InputError as error:
            option = (error.place or "").lstrip("-").replace("-", "_")
            table = next((each for each in tables if option in each.names), tables[0])
            about = f"{setting.name}, {objective.name}, {arm}: {option}: {error.message}"
            raise table.error(about, option) from None


_OPTIONS = {field.name: field.default for field in fields(Options) if field.name not in ("data", "arm", "seed")}
"""The options of trainings that a suite can set, with their defaults."""


def _training(table: Keys) -> dict[str, Any]:
    """The options of trainings that a table gives.

    Raises:
        InputError: for an unknown option, or a value of the wrong kind.
    """
    found = {name: table.take(name, _option(_OPTIONS[name])) for name in _OPTIONS if name in table.names}
    if unknown := sorted(table.names - found.keys()):
        raise table.error(f"'{unknown[0]}' is no option of a training that a suite can set", unknown[0])
    return found


def _option(default: object) -> Any:
    """The reader of an option, by the kind of its default."""

    def read_option(value: object) -> Any:
        if isinstance(default, tuple):
            if not isinstance(value, list):
                raise ValueError("must be a list of whole numbers")
            return tuple(count(each) for each in value)
        if isinstance(default, float):
            return radius(value) if isinstance(value, str) else number(value)
        if type(value) is not type(default):
            raise ValueError(f"must be a {_KINDS[type(default)]}")
        return value

    return read_option


_KINDS: dict[type, str] = {bool: "true or false", int: "whole number", str: "text"}


def _name(value: object) -> str:
    if not _NAME.fullmatch(text(value)):
        raise ValueError("must be a name of letters, digits, '.', '+' and '-'")
    return text(value)


def _data(value: object) -> str:
    plain = text(value).removesuffix(VALIDATION)
    if not plain.endswith(".npz") and plain not in DATASETS:
        raise ValueError(f"'{value}' is no .npz file and none of {', '.join(DATASETS)}")
    return text(value)


def _some_of(names: Sequence[str]) -> Callable[[object], tuple[str, ...]]:
    read_one = one_of(names)
    return lambda value: tuple(read_one(each) for each in texts(value))


def _seeds(value: object) -> tuple[int, ...]:
    """The seeds from 0 on, given by their number, or those of a list."""
    if not isinstance(value, list):
        return tuple(range(count(value)))
    if not value or len(set(value)) < len(value) or any(type(each) is not int or each < 0 for each in value):
        raise ValueError("must be a number of seeds, or a list of different seeds, of at least 0 each")
    return tuple(value)


def _radii(value: object) -> tuple[str, ...]:
    for each in texts(value):
        if not 0 < fraction(each) < 1:
            raise ValueError("must be radii between 0 and 1")
    return texts(value)


def _numbers(value: object) -> tuple[float, ...]:
    if not isinstance(value, list) or not value or len({number(each) for each in value}) < len(value):
        raise ValueError("must be a list of different numbers")
    return tuple(number(each) for each in value)


def _different(tables: Sequence[Keys], names: Sequence[str]) -> None:
    """Check that the tables of an array have different names.

    Raises:
        InputError: for a name that an earlier table has.
    """
    for i, name in enumerate(names):
        if name in names[:i]:
            raise tables[i].error(f"there is another '{name}' before", "name")
