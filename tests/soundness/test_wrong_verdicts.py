"""Networks and properties that were once answered wrongly: now rightly, or with an honest unknown, by every method."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import claims
from tests.support.draws import some
from verifiable_relu.readers import read_onnx
from verifiable_relu.search.outcomes import Reason
from verifiable_relu.search.solvers.auto_lirpa import AutoLirpa
from verifiable_relu.spec import Query, read_vnnlib

from .limited import Answer, answers

METHODS = ("auto", "attack", "ibp", "crown-ibp", "crown", "alpha-crown", "split", "bab", "milp", "smt")
SECONDS = "0.25"
OPEN = ("unknown", "timed-out")
BOUNDS = ("ibp", "crown", "alpha-crown")

# What is right: from the comments in the files, and by hand where they say nothing of it.
RIGHT = {
    "alias": "sat",
    "alias_gelu": "sat",
    "alias_output": "sat",
    "alias_scale": "sat",
    "alpha_double_1e200": "sat",  # Y = 1e200·relu(x) ≤ 1 at x = 0
    "auto_rescaled": "sat",
    "auto_rescaled_up": "sat",
    "auto_uneven": "sat",
    "box_1e39": "sat",  # Y = relu(x) ≥ 0.5 for x from 1e39 on
    "div3": "sat",
    "leaky_1e16": "sat",
    "long_coefficient": "unsat",  # Y = relu(x) ≤ 1, and 5 / 0.123… is above 40
    "milp_refuses": "sat",  # Y = 1e16·relu(x) ≥ 0.5 at x = 1
    "milp_small_scale": "sat",
    "prelu_double": "sat",
}

# Network, property, and what is right where the network is read at all; None: it is to be refused.
CROSSED = [
    ("dup_initializer", "p_1_1", None),
    ("dup_initializer_64", "p_1_1", None),
    ("opset6_add_axis", "p_4_1", "sat"),
    ("opset6_add_axis_sq", "p_4_1", "sat"),
    ("opset6_prelu_sq", "p_4_1", "sat"),
    ("net11", "cr_only", "unsat"),
    ("net11", "v2_cr", "unsat"),
]


@pytest.fixture(scope="module")
def folder(data: Path) -> Path:
    found = data / "wrong_verdicts"
    if not found.is_dir():
        pytest.skip(f"needs {found}")
    return found


def asked(folder: Path, network: str, prop: str, method: str) -> list[str]:
    files = ["--net", str(folder / f"{network}.onnx"), "--spec", str(folder / f"{prop}.vnnlib")]
    return [*files, "--method", method, "--timeout", "3", "--quiet"]


def wrong(found: Answer, right: str | None) -> bool:
    """Whether an answer is a wrong verdict, or an error other than one line about the input."""
    if found.status == 2:
        return len(found.stderr.splitlines()) != 1 or len(found.stderr) > 1000
    return found.status != 0 or right is None or found.verdict not in (right, *OPEN)


def test_the_table_of_right_verdicts_is_complete(folder: Path) -> None:
    pairs = {path.stem for path in folder.glob("*.vnnlib") if path.with_suffix(".onnx").exists()}
    assert pairs == set(RIGHT)


def test_no_method_gives_a_wrong_verdict_or_meets_an_internal_error(folder: Path, tmp_path: Path) -> None:
    """Every file is asked by the default method and, in the gate, by two others."""
    names = {method: [*(RIGHT if method == "auto" else some(RIGHT, n))] for n, method in enumerate(METHODS)}
    commands = []
    for method in METHODS:
        listed = tmp_path / f"{method}.csv"
        listed.write_text("".join(f"{folder / n}.onnx,{folder / n}.vnnlib,{SECONDS}\n" for n in names[method]))
        commands.append(["--spec", str(listed), "--quiet", "--jobs", "1", "--method", method])
    bad = []
    for method, one in zip(METHODS, answers(commands, wall_seconds=900), strict=True):
        bad += [f"{method}: {line[:200]}" for line in one.stderr.splitlines()]
        answered = [(Path(row[1]).stem, row[2]) for row in (line.split(",") for line in one.stdout.splitlines())]
        if sorted(name for name, _ in answered) != sorted(names[method]):
            bad.append(f"{method}: {len(answered)} answers, exit status {one.status}")
        bad += [
            f"{method}: {name} is answered by {answer}"
            for name, answer in answered
            if answer not in (RIGHT.get(name), *OPEN)
        ]
    assert not bad, f"{len(bad)} faults:\n" + "\n".join(bad)


@pytest.mark.skipif(find_spec("auto_LiRPA") is None, reason="needs the package auto_LiRPA")
@pytest.mark.parametrize("bound", BOUNDS)
def test_auto_lirpa_gives_no_wrong_verdict(bound: Any, folder: Path) -> None:
    names, queries = [], []
    for name in some(RIGHT, BOUNDS.index(bound)):
        network = read_onnx(folder / f"{name}.onnx")
        for prop in read_vnnlib(folder / f"{name}.vnnlib").properties:
            names.append(name)
            queries.append(Query(network, prop))
    # A limit that the library exceeds costs a new process, with seconds of imports.
    outcomes = claims(AutoLirpa(bound), queries, 60.0)
    said = {name: str(one.verdict) for name, one in zip(names, outcomes, strict=True)}
    assert {name: right for name, right in said.items() if right not in (RIGHT[name], *OPEN)} == {}
    assert [one.detail for one in outcomes if one.reason is Reason.ERROR] == []


def test_the_default_method_decides_what_is_small(folder: Path) -> None:
    small = ("alias", "alias_output", "alias_scale", "leaky_1e16", "long_coefficient")
    found = answers([asked(folder, name, name, "auto") for name in small])
    assert {name: one.verdict for name, one in zip(small, found, strict=True)} == {name: RIGHT[name] for name in small}


def test_files_that_mean_something_else_than_they_seem_are_refused_or_answered_rightly(folder: Path) -> None:
    found = answers([asked(folder, network, prop, "auto") for network, prop, _ in CROSSED])
    bad = [str(one) for one, (_, _, right) in zip(found, CROSSED, strict=True) if wrong(one, right)]
    assert not bad, "\n".join(bad)
