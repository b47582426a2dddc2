"""The file that describes a study: networks, arms, objectives, methods and the claims that are declared beforehand.

A suite is a TOML file, read by ``msgspec`` into the classes below; what they do not know is an error that names its
place. Options of trainings are checked when a training is planned (``training.options_of``), so that the records of a
finished study keep their tables when the trainer loses an option.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from benchmarks.study.measures import COSTS, MEASURES
from verifiable_relu.command_line import fraction
from verifiable_relu.errors import InputError
from verifiable_relu.files import read_text

SUITES = Path(__file__).parents[1] / "suites"
"""The folder of the suites."""

INT8 = "int8"
"""The arithmetic of a method that is asked about the int8 file made of a network."""

LARGEST = 1 << 20
"""The most bytes of a suite."""

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+-]{0,60}$")]
Names = Annotated[tuple[str, ...], Meta(min_length=1)]
Count = Annotated[int, Meta(gt=0, le=1_000_000)]
Training = dict[str, Any]


class Setting(NamedTuple):
    """An arm with an objective of some weight on one network: what is compared over seeds."""

    network: str
    objective: str
    weight: float
    arm: str


class Cell(NamedTuple):
    """One training of a study."""

    network: str
    objective: str
    weight: float
    arm: str
    seed: int

    @property
    def name(self) -> str:
        """The name of the cell in records, and of its files without suffix."""
        aim = f"{self.objective}-{self.weight:g}" if self.weight else self.objective
        return f"{self.network}_{self.arm}_{aim}_seed{self.seed}"


class Architecture(Struct, frozen=True, forbid_unknown_fields=True):
    """An architecture on a data set, and the questions about it; what it leaves out is the suite's.

    Attributes:
        name: its name in records and tables.
        data: the name of a data set, or an ``.npz`` file relative to the suite.
        eps: the radii of the L∞ balls, as text.
        images: the number of test images that are asked about; the first exact ones are taken.
        seeds: the seeds from 0 on by their number, or a list of seeds.
        arms: the names of the arms.
        methods: the names of the methods.
        training: options of its trainings.
    """

    name: Name
    data: str
    eps: Names
    images: int = 0
    seeds: int | tuple[int, ...] = ()
    arms: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    training: Training = {}


class Arm(Struct, frozen=True, forbid_unknown_fields=True):
    """An arm of the suite's own: the trainer's arm ``of`` with options that go before all others."""

    name: Name
    of: str
    training: Training = {}


class Objective(Struct, frozen=True, forbid_unknown_fields=True):
    """What is minimised: ``option`` is the option of the training that takes each of the ``weights``."""

    name: Name
    option: str = ""
    weights: tuple[float, ...] = (0.0,)
    training: Training = {}


class Method(Struct, frozen=True, forbid_unknown_fields=True):
    """A method of verification with its limit in seconds of processor time, and the arithmetic of what runs."""

    name: str
    limit: Annotated[float, Meta(gt=0)]
    arithmetic: str = "real"

    @property
    def label(self) -> str:
        """The name in records, tables and claims."""
        return self.name if self.arithmetic == "real" else f"{self.name}-{self.arithmetic}"


class Claim(Struct, frozen=True, forbid_unknown_fields=True):
    """A comparison of two arms that is declared before anything is measured.

    Attributes:
        name: the name of its row.
        says: the claim in words.
        network: the network.
        arm: the arm that the claim is about.
        against: the arm with which it is compared.
        measure: one of ``measures.MEASURES``.
        expected: the expected outcome.
        eps: the radius, for a measure that has one.
        method: the method, for a measure that has one.
        objective: the objective; the suite's first one if empty.
        weight: the weight of the objective; its first one if None.
        against_network: the network of the other arm; empty for the same network.
        margin: the largest difference that counts as none, above 0; for costs the largest ratio, above 1.
    """

    name: Name
    says: str
    network: str
    arm: str
    against: str
    measure: str
    expected: Literal["more", "fewer", "no difference"]
    eps: str = ""
    method: str = ""
    objective: str = ""
    weight: float | None = None
    against_network: str = ""
    margin: Annotated[float, Meta(ge=0)] = 0.0


class Suite(Struct, frozen=True, forbid_unknown_fields=True):
    """A study, as its file describes it; ``about``, ``tuning`` and ``cut`` are for readers."""

    about: str
    tuning: str
    cut: str
    arms: Names
    seeds: int | tuple[int, ...]
    images: Count
    network: Annotated[tuple[Architecture, ...], Meta(min_length=1)]
    objective: Annotated[tuple[Objective, ...], Meta(min_length=1)]
    method: Annotated[tuple[Method, ...], Meta(min_length=1)]
    training: Training = {}
    arm: tuple[Arm, ...] = ()
    claim: tuple[Claim, ...] = ()

    def settings(self) -> list[Setting]:
        """All settings, in the order of the file."""
        return [
            Setting(network.name, objective.name, weight, arm)
            for network, objective in product(self.network, self.objective)
            for weight, arm in product(objective.weights, network.arms)
        ]

    def cells(self) -> list[Cell]:
        """All trainings, the first seed first: a study that is stopped has few seeds of all arms."""
        seeds: dict[str, tuple[int, ...]] = {each.name: each.seeds for each in self.network}  # type: ignore[misc]
        every = sorted({seed for of_network in seeds.values() for seed in of_network})
        return [Cell(*each, seed) for seed in every for each in self.settings() if seed in seeds[each.network]]

    def architecture(self, name: str) -> Architecture:
        """The architecture of a name."""
        return next(each for each in self.network if each.name == name)


def read(place: str | Path) -> tuple[Suite, str]:
    """Read a suite from a path, or by the name of one in ``SUITES``.

    Returns:
        The suite, complete and checked, and its name.

    Raises:
        InputError: if the file cannot be read or is no suite; the error names the place in it.
    """
    shipped = SUITES / f"{place}.toml"
    path = shipped if "/" not in str(place) and len(str(place)) < 100 and shipped.is_file() else Path(place)
    text = read_text(path, LARGEST)
    try:
        suite = _complete(msgspec.toml.decode(text, type=Suite))
        _check(suite)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InputError(str(error), path=path) from None
    return suite, path.stem


def _complete(suite: Suite) -> Suite:
    """The suite with every value that an architecture or a claim leaves out."""
    replace, labels = msgspec.structs.replace, tuple(each.label for each in suite.method)
    networks = tuple(
        replace(
            each,
            images=each.images or suite.images,
            seeds=_seeds(each.seeds or suite.seeds),
            arms=each.arms or suite.arms,
            methods=each.methods or labels,
            training={**suite.training, **each.training},
        )
        for each in suite.network
    )
    weights: Mapping[str, float] = {each.name: each.weights[0] for each in suite.objective}
    first = suite.objective[0].name
    claims = tuple(
        replace(each, objective=each.objective or first, weight=weights.get(each.objective or first, 0.0))
        if each.weight is None
        else replace(each, objective=each.objective or first)
        for each in suite.claim
    )
    return replace(suite, network=networks, claim=claims)


def _seeds(given: int | tuple[int, ...]) -> tuple[int, ...]:
    return tuple(range(given)) if isinstance(given, int) else given


def _check(suite: Suite) -> None:
    """Check what the classes cannot: names that must differ, or be those of something in the suite.

    Raises:
        ValueError: says what is wrong, and where.
    """
    labels, settings = [each.label for each in suite.method], set(suite.settings())
    for kind in ("network", "objective", "arm", "claim"):
        _different([each.name for each in getattr(suite, kind)], kind)
    _different(labels, "method")
    for network in suite.network:
        _known(network.methods, labels, f"network {network.name}: methods")
        _different((*network.seeds,), f"network {network.name}: seeds")  # type: ignore[misc]
        if not all(0 < fraction(eps) < 1 for eps in network.eps):
            raise ValueError(f"network {network.name}: eps must be radii between 0 and 1")
    for claim in suite.claim:
        place = f"claim {claim.name}"
        _known([claim.measure], MEASURES, f"{place}: measure")
        for name, arm in ((claim.network, claim.arm), (claim.against_network or claim.network, claim.against)):
            if Setting(name, claim.objective, claim.weight or 0.0, arm) not in settings:
                raise ValueError(f"{place}: no setting {name}, {claim.objective} {claim.weight:g}, {arm}")
            has = suite.architecture(name)
            for key, there in (("eps", has.eps), ("method", has.methods)):
                if key in MEASURES[claim.measure]:
                    _known([getattr(claim, key)], there, f"{place}: {key}")
        if claim.margin and (claim.expected != "no difference" or (claim.measure in COSTS and claim.margin <= 1)):
            raise ValueError(f"{place}: a margin belongs to 'no difference'; that of a cost is a ratio above 1")


def _different(names: Iterable[Any], kind: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{kind}: '{name}' stands there twice")


def _known(names: Iterable[str], there: Iterable[str], place: str) -> None:
    for name in names:
        if name not in there:
            raise ValueError(f"{place}: '{name}' is none of {', '.join(there)}")
