"""The checker of certificates with planes: it makes bounds of any parameters, and refuses what they do not prove."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.soundness.trees import System
from tests.support.certificates import Case, Records, checked, excluded, planes_case, written
from tests.support.solver_cases import ball, mlp, row
from verifiable_relu.bounds import crown_relaxation, input_box
from verifiable_relu.check import Refused
from verifiable_relu.check.lines import CheckedRelaxation
from verifiable_relu.check.model import read_model
from verifiable_relu.check.planes import taken
from verifiable_relu.check.records import CertificateRecords as Reader
from verifiable_relu.network import read_onnx, write_onnx
from verifiable_relu.trust.certificate_file import encoded
from verifiable_relu.verifiers.bab.folding import fold


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


def planes(records: Records) -> list[dict[str, Any]]:
    return [record for record in records if "plane" in record]


def first(**values: Any) -> Callable[[Records], object]:
    """Put values into the first plane."""
    return lambda records: planes(records)[0].update(values)


def entry(key: str, place: int, change: Callable[[int], Any]) -> Callable[[Records], object]:
    """Change an entry of a list of all planes."""

    def whole(records: Records) -> None:
        for plane in planes(records):
            plane[key][place] = change(plane[key][place])

    return whole


def gone(records: Records) -> None:
    records[:] = [record for record in records if "plane" not in record]


def twice(records: Records) -> None:
    place = records.index(planes(records)[0])
    records.insert(place + 1, {**records[place]})


def behind(records: Records) -> None:
    """The planes come behind the first node of the tree."""
    place = records.index(planes(records)[-1])
    records.insert(place - len(planes(records)) + 1, records.pop(place + 1))


FAULTS: dict[str, tuple[Callable[[Records], object], str]] = {
    "no planes": (gone, "not excluded"),
    "coefficients moved": (entry("parts", 1, lambda part: part + (1 << 22)), "not excluded"),
    "coefficients of the other sign": (
        lambda records: [p.update(parts=[p["parts"][0], *(-v for v in p["parts"][1:])]) for p in planes(records)],
        "not excluded",
    ),
    "a bend below zero": (entry("bends", 1, lambda _: -1), "negative"),
    "bends moved": (entry("bends", 1, lambda bend: bend + (1 << 22)), "not excluded"),
    "a bend left out": (lambda records: planes(records)[0]["bends"].pop(), "integers are expected"),
    "a part left out": (lambda records: planes(records)[0]["parts"].pop(), "integers are expected"),
    "huge parts": (entry("parts", 0, lambda _: 900), "record"),
    "huge bends": (entry("bends", 0, lambda _: 900), "record"),
    "an exponent beyond the range": (entry("parts", 0, lambda _: 901), "exponent"),
    "a term twice": (lambda records: planes(records)[0].update(terms=[0] * 3), "each of them once"),
    "a term that there is not": (lambda records: planes(records)[0]["terms"].__setitem__(0, 10**6), "no input"),
    "a term before the first": (lambda records: planes(records)[0]["terms"].__setitem__(0, -1), "no input"),
    "no terms": (lambda records: planes(records)[0].pop("terms"), "has terms"),
    "terms that are no list": (first(terms=1), "list of integers"),
    "a neuron with two planes": (twice, "two planes"),
    "a neuron that there is not": (first(plane=[0, 99]), "no neuron"),
    "an activation that there is not": (first(plane=[9, 0]), "no activation"),
    "a neuron that is a boolean": (first(plane=[0, True]), "integers"),
    "a plane in the wrong place": (behind, "expected"),
    "a key too many": (first(more=1), "expected"),
}


def several(folder: Path) -> Case:
    found = planes_case(folder, 5)
    return Case(found.network, found.prop, copy.deepcopy(found.records))


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_planes_is_refused(name: str, folder: Path) -> None:
    change, reason = FAULTS[name]
    case = several(folder)
    change(case.records)
    with pytest.raises(Refused, match="record ") as refused:
        checked(folder, case, written(case.records))
    assert reason in str(refused.value)


def opened(case: Case) -> tuple[CheckedRelaxation, list[list[int]]]:
    """The claimed bounds of a case, and of each activation the open neurons."""
    graph = read_model(case.network)
    parts = case.prop.decode().split("(assert ")[1:]
    ends: dict[tuple[str, int], float] = {}
    for part in parts:
        words = part.replace("(", " ").replace(")", " ").split()
        if len(words) == 3 and words[1].startswith("X_"):
            ends[words[0], int(words[1][2:])] = float(words[2])
    size = graph.nodes[0].size
    low, high = (np.array([ends[side, i] for i in range(size)]) for side in (">=", "<="))
    relaxation, found = CheckedRelaxation(graph, low, high), []
    claims = (record for record in case.records if "activation" in record)
    for number, claim in zip(graph.activations, claims, strict=False):
        bounds = (np.ldexp(np.array(claim[side][1:], float), claim[side][0]) for side in ("lower", "upper"))
        relaxation.claim(number, *bounds)
        found.append(relaxation.neurons[number].open.tolist())
    return relaxation, found


@pytest.mark.thorough
def test_a_neuron_of_one_phase_or_a_later_one_has_no_plane_s_place(folder: Path) -> None:
    case = several(folder)
    relaxation, every = opened(case)
    stable = next((a, j) for a, some in enumerate(every) for j in range(8) if j not in some)
    planes(case.records)[0].update(plane=list(stable))
    with pytest.raises(Refused, match="one phase"):
        checked(folder, case, written(case.records))
    case = several(folder)
    number, _ = planes(case.records)[0]["plane"]
    later = relaxation.inputs + sum(len(some) for some in every[:number])
    planes(case.records)[0]["terms"][0] = later
    with pytest.raises(Refused, match="no input or neuron of an earlier activation"):
        checked(folder, case, written(case.records))


@pytest.mark.parametrize("leaky", [False, True])
def test_whatever_a_plane_s_parameters_are_it_is_above_its_neuron(leaky: bool, tmp_path: Path) -> None:
    """Against least and largest distances in rational arithmetic, which are computed by another formula."""
    rng = np.random.default_rng(4)
    network = mlp(rng, (3, 6, 5, 2), leaky=leaky)
    box = ball(np.zeros(3), 1.0)
    prop = excluded(box, (row({0: 1, 1: -1}, -1000),))
    data = write_onnx(network)
    net = read_onnx(data)
    with torch.no_grad():
        bounds = crown_relaxation(net.to(torch.float64), input_box([prop], net))
    folded, _ = fold(bounds, 0, box, torch.tensor([[1.0, -1.0]], dtype=torch.float64))
    graph = read_model(data)
    relaxation = CheckedRelaxation(graph, box.lower, box.upper)
    for number, index in zip(graph.activations, net.activations, strict=True):
        relaxation.claim(number, *(end.flatten().numpy() for end in (bounds.pre[index].lower, bounds.pre[index].upper)))
    exact = System(net, folded)
    lines = []
    convex = (folded.slope <= 1).tolist()
    for node, neuron in (place for place, known in zip(folded.places.tolist(), convex, strict=True) if known):
        number = net.activations.index(node)
        count = relaxation.inputs + relaxation.neurons[graph.activations[number]].first
        terms = rng.permutation(count)[: int(rng.integers(0, count + 1))].tolist()
        parts = encoded(np.round(rng.uniform(-1, 2, len(terms)) * 64) / 64)
        bends = encoded(np.round(rng.uniform(0, 2, 2) * 64) / 64)
        lines.append(json.dumps({"plane": [number, neuron], "parts": parts, "bends": bends, "terms": terms}))
    stream = iter([*(f"{line}\n".encode() for line in lines), b'{"end": 0}\n'])
    found = taken(Reader(lambda _: next(stream)), relaxation)
    assert sum(len(each.at) for each in found.values()) == len(lines) > 6
    for activation, each in found.items():
        for place, at in enumerate(each.at):
            form = np.full(1 + relaxation.inputs + folded.size, Fraction(0), dtype=object)
            form[0] = Fraction(float(each.constant[place]))
            for source, matrix in each.terms:
                coefficients = matrix.toarray()[place]
                if source == 0:
                    form[1 : 1 + relaxation.inputs] = [Fraction(float(v)) for v in coefficients]
                    continue
                before = relaxation.neurons[source]
                start = 1 + relaxation.inputs + before.first
                form[start : start + len(before.open)] = [Fraction(float(v)) for v in coefficients[before.open]]
            least, most = exact.exceeds(form, relaxation.neurons[activation].first + int(at))
            # The referee knows no more of the other neurons than their bounds, as the checker.
            assert 0 <= least <= most <= Fraction(float(each.width[place])), (activation, at)


@pytest.mark.combined
@pytest.mark.parametrize("search", [{}, {"steps": 0, "finishing": 0}, {"adaptive": 3, "exact": 1.0}], ids=str)
@pytest.mark.parametrize("seed", [0, 1, 5])
def test_trees_over_planes_are_accepted(seed: int, search: dict[str, Any], tmp_path: Path) -> None:
    """Whoever closes the leaves: few steps, many with lines for every neuron, or linear programs without planes."""
    case = planes_case(tmp_path, seed, **search)
    assert len(planes(case.records)) > 4
    assert sum("leaf" in record for record in case.records) > 5
    assert checked(tmp_path, case, written(case.records)).startswith("unsat: ")


@pytest.mark.seldom
def test_a_tree_of_a_system_that_is_not_held_as_a_whole_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verifiable_relu.verifiers.bab.folded._WHOLE", 0)
    case = planes_case.__wrapped__(tmp_path, 1, steps=60)
    assert planes(case.records) and sum("leaf" in record for record in case.records) > 1
    checked(tmp_path, case, written(case.records))
