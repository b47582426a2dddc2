"""The training of one cell of a study and what is measured of its network: no other module calls the trainer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.common.crown import bounded, unstable
from benchmarks.common.questions import clean, first_exact
from benchmarks.common.records import Record, versioned_key
from benchmarks.study.measuring import train_and_measure
from benchmarks.study.suite import Cell, Suite
from verifiable_relu.data import DATASETS, VALIDATION, Dataset, load, training_and_test
from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.files import write_whole
from verifiable_relu.ir.families import harden
from verifiable_relu.ir.linear import Convolution, Dense
from verifiable_relu.ir.network import Affine, Network
from verifiable_relu.readers import read_onnx
from verifiable_relu.search.batch import answers
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Verdict
from verifiable_relu.search.registry import make
from verifiable_relu.spec import Query, linf_properties
from verifiable_relu.train.export import CALIBRATED, quantize, written
from verifiable_relu.train.loop import Diverged, build
from verifiable_relu.train.losses import ball
from verifiable_relu.train.options import ARMS, Options, number

EARLY = 0.1
"""The fraction of a training after which activation patterns and accuracy are compared with its outcome."""

MEASURED = 50
"""The number of images, the first ones, over which bounds are computed."""

HARDNESSES = (160, 20, 5)
"""The values of λ for which networks are certified jointly with all smooth ones whose λ' is at least λ."""

JOINT_SECONDS = 2.0
"""The time limit for each image's joint certificate."""

BATCH = 10
"""The number of images whose bounds are computed at once."""


def source_of(suite_path: Path, data: str) -> str:
    """The data of an architecture as the trainer takes it: a name, or a path, which is relative to the suite."""
    plain = data.removesuffix(VALIDATION)
    return str((suite_path.parent / data).resolve()) if plain.endswith(".npz") else data


@lru_cache(maxsize=1)
def data_of(source: str) -> tuple[Dataset, Dataset]:
    """The training images and the test images of a data set, which a process keeps for its next task."""
    return training_and_test(source)


@lru_cache(maxsize=8)
def images_of(source: str) -> Dataset:
    """The test images of a data set, which a process keeps."""
    return load(source, "test") if source in DATASETS else data_of(source)[1]


def options_of(suite: Suite, cell: Cell) -> Options:
    """The options of a training: those of the arm go first, then those of the objective and of the network.

    Its ε is the middle radius of the questions unless the suite gives one.

    Raises:
        InputError: for options with which no network can be trained.
    """
    network, place = suite.architecture(cell.network), ", ".join(map(str, cell))
    objective = next(each for each in suite.objective if each.name == cell.objective)
    own = {each.name: each for each in suite.arm}
    arm, changed = (own[cell.arm].of, own[cell.arm].training) if cell.arm in own else (cell.arm, {})
    values = {"eps": network.eps[len(network.eps) // 2], **network.training, **objective.training}
    values |= {objective.option: cell.weight} if objective.option else {}
    values |= changed
    known = {field.name for field in fields(Options)}
    if unknown := sorted(values.keys() - (known - {"data", "arm", "seed"})):
        raise InputError(f"{place}: '{unknown[0]}' is no option of a training that a suite can set")
    if arm not in ARMS:
        raise InputError(f"{place}: '{arm}' is none of {', '.join(ARMS)}")
    if isinstance(values["eps"], str):
        values["eps"] = number(values["eps"])
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    try:
        return Options(network.data, **{**given, "arm": arm, "seed": cell.seed})
    except InputError as error:
        raise InputError(f"{place}: {error}") from None
    except TypeError as error:
        raise InputError(f"{place}: {error}") from None


def key_of(options: Options) -> Record:
    """The key of a training, but for its seed."""
    values = {name: value for name, value in asdict(options).items() if name not in ("arm", "seed")}
    return versioned_key(options.arm, values, {**asdict(Options(options.data)), "data": None})


def check(options: Options, source: str) -> None:
    """Check that data can be read and that a network fits them.

    Raises:
        InputError: if not.
    """
    build(options, data_of(source)[0])


@dataclass(frozen=True)
class TrainingTask:
    """The task of training a cell's network, writing it and measuring it.

    Attributes:
        cell: the cell.
        options: the options of the training.
        source: the data (``source_of``).
        folder: the folder of the networks.
        images: the number of test images that are asked about.
        radii: the radii of the balls, as text.
    """

    cell: Cell
    options: Options
    source: str
    folder: Path
    images: int
    radii: tuple[str, ...]

    @property
    def network(self) -> Path:
        """The file of the network."""
        return self.folder / f"{self.cell.name}.onnx"

    @property
    def checkpoint(self) -> Path:
        """The file from which a training that was interrupted resumes."""
        return self.folder / f"{self.cell.name}.checkpoint"

    def __call__(self) -> Record:
        """Train, resuming from the checkpoint if there is one, and measure; the checkpoint is kept.

        Returns:
            The fields of the record. The ``status`` is ``trained``, or ``diverged`` if the loss became infinite or NaN.
        """
        training, test = data_of(self.source)
        about = {**self.cell._asdict(), "key": key_of(self.options)}
        try:
            trained, hard, record = train_and_measure(self.options, training, test, self.checkpoint)
        except Diverged as error:
            return {**about, "status": "diverged", "detail": str(error)}
        self._write(self.network, hard, training)
        if ARMS[self.options.arm].swap == "end":
            # λ-Swish is not read, and so cannot be written.
            with suppress(UnsupportedError):
                self._write(self.folder / f"{self.cell.name}-smooth.onnx", trained.model.eval(), training)
        network = read_onnx(self.network)
        chosen = first_exact(test, self.images)
        right = chosen[clean(network, test.images[chosen], test.labels[chosen])]
        return {
            **about,
            "status": "trained",
            "detail": record["note"],
            "seconds": record["seconds"],
            "results": {**numbers(record), **measure(network, test, right[:MEASURED], self.radii)},
            "asked": self.images,
            "images": chosen.tolist(),
            "right": right.tolist(),
        }

    def _write(self, path: Path, model: nn.Module, data: Dataset) -> None:
        write_whole(path, written(model, data.images.shape[1:]))

    def int8(self) -> Path:
        """The file of the int8 network, which is made of the network unless it is there."""
        path = self.folder / f"{self.cell.name}.int8.onnx"
        if not path.is_file():
            calibration = data_of(self.source)[0].images[:CALIBRATED]
            write_whole(path, quantize(self.network.read_bytes(), calibration))
        return path


def numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a training by name (``measures.NUMBERS``), and λ of each layer when the annealing began."""
    results, options, epochs = record["results"], record["options"], record["epochs"]
    learned = results.get("lam_learned") or []
    point: Mapping[str, Any] = next((each for each in results.get("monitor", ()) if each["part"] >= EARLY), {})
    found = {
        "clean_test": results["clean"],
        "oui_early": point.get("oui"),
        "oui_batch_early": point.get("oui_batch"),
        "accuracy_early": epochs[math.ceil(EARLY * len(epochs)) - 1]["accuracy"] if epochs else None,
        "rate": options["rate"],
        # λ is a float32 number: a difference below its resolution is no drift.
        "drift": round(statistics.fmean(abs(lam - options["lam_init"]) for lam in learned), 6) if learned else None,
        "int8": (results.get("int8") or {}).get("clean"),
        **{f"pruned_{part}": value for part, value in results.get("pruned", {}).items()},
        "lam_learned": learned or None,
    }
    same = ("patterns_settled", "weights_settled", "clean_before_substitution", "clean_after_substitution")
    changes = ("mean_logit_change", "worst_logit_change", "proven_logit_change", "flipped_predictions")
    found |= {name: results.get(name) for name in (*same, *changes)}
    return {name: value for name, value in found.items() if value is not None}


@torch.no_grad()
def measure(network: Network, test: Dataset, few: np.ndarray, radii: Sequence[str]) -> dict[str, Any]:
    """The measures of a network on images that it classifies rightly.

    Returns:
        ``norm``: the Frobenius norm of all matrices and kernels together; ``unstable``: by radius the mean number per
        image of neurons in each layer that CROWN's bounds leave unstable; ``joint`` at the middle radius, of networks
        whose activations are all ReLU.
    """
    maps = [op.map for op in network.ops if isinstance(op, Affine) and isinstance(op.map, Dense | Convolution)]
    weights = [each.weight.detach().double().norm().item() for each in maps]
    found: dict[str, Any] = {"norm": math.hypot(*weights), "unstable": {}}
    for eps in radii if len(few) else ():
        totals = dict.fromkeys(network.activations, 0)
        for x in torch.from_numpy(test.images[few]).double().split(BATCH):
            for index, open_ in unstable(bounded(network, ball(x, float(Fraction(eps))))).items():
                totals[index] += int(open_.sum())
        found["unstable"][eps] = [total / len(few) for total in totals.values()]
    if len(few) and all(network.ops[index].place.endswith("(Relu)") for index in network.activations):
        found["joint"] = joint(network, test.images[few], test.labels[few], radii[len(radii) // 2])
    return found


def joint(network: Network, images: np.ndarray, labels: np.ndarray, eps: str) -> dict[str, Any]:
    """The images that CROWN certifies for the ReLU network and all smooth networks with λ' ≥ λ at once.

    Returns:
        ``eps``; ``images``, their number; and the number that is certified by λ, as text, and ``inf``: ReLU alone.
    """
    properties = linf_properties(images, labels, Fraction(eps), network.output_size)
    found: dict[str, Any] = {"eps": eps, "images": len(images)}
    for lam in (None, *HARDNESSES):
        asked = network if lam is None else harden(network, lam)
        outcomes = answers(make("crown"), [Query(asked, prop) for prop in properties], TimeBudget(JOINT_SECONDS))
        found["inf" if lam is None else str(lam)] = sum(o.verdict is Verdict.UNSAT for o in outcomes)
    return found
