"""The checker of certificates with tighter bounds, implied multipliers and boxes: what proves nothing is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.certificates import Case, Records, checked, cover_case, refined_case, written
from verifiable_relu.check import Refused

Change = Callable[[Records], object]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


def fresh(case: Case) -> Case:
    return Case(case.network, case.prop, copy.deepcopy(case.records))


def at(records: Records, key: str, number: int = 0) -> dict[str, Any]:
    """The record of a kind with this number among its kind."""
    return [record for record in records if key in record][number]


def tighter(**values: Any) -> Change:
    """Put values into the record of tighter bounds."""
    return lambda records: at(records, "tighter").update(values)


def entry(key: str, place: int, change: Callable[[Any], Any]) -> Change:
    """Change one entry of a list in the record of tighter bounds."""

    def whole(records: Records) -> None:
        listed = at(records, "tighter")[key]
        listed[place] = change(listed[place])

    return whole


def quarter(records: Records) -> None:
    """The bound with the finest step, of all that are made tighter, by about a quarter of its interval.

    A part of what the leaves prove is given up for short multipliers, so that they prove more than the bound.
    """
    least = at(records, "tighter")["least"]
    place = next(i for i, mantissa in enumerate(least) if i and mantissa % 2)
    least[place] += 1 << 14


def below(records: Records) -> list[dict[str, Any]]:
    """The leaves that prove tighter bounds."""
    start, end = (next(i for i, record in enumerate(records) if key in record) for key in ("tighter", "end"))
    trees = [i for i, record in enumerate(records) if "tree" in record and "tighter" not in record]
    return [record for record in records[start : min([*trees, end])] if "leaf" in record]


def signs(records: Records) -> None:
    for leaf in below(records):
        leaf["leaf"] = [value if i % 2 or not i else -value for i, value in enumerate(leaf["leaf"])]


def exchanged(records: Records) -> None:
    """What is known below one neuron's active side, and below its inactive side."""
    for record, following in pairwise(list(records)):
        if "split" in record and "leaf" in following:
            first = records.index(following)
            records[first], records[first + 1] = records[first + 1], records[first]


def gone(key: str, number: int = 0) -> Change:
    def whole(records: Records) -> None:
        record = at(records, key, number)
        del records[next(i for i, other in enumerate(records) if other is record)]

    return whole


def split_left_out(records: Records) -> None:
    """A split, and all that is below its inactive side."""
    place = next(i for i, record in enumerate(records) if "split" in record)
    del records[place], records[place + 1]


def all_bounds(records: Records) -> None:
    """Bounds that cross each other."""
    record = at(records, "tighter")
    neuron = record["rows"][0]
    record["rows"][:4] = [neuron, 1, neuron, -1]
    record["least"] = [0, 1, 1, *[-(1 << 40)] * (len(record["least"]) - 3)]


TIGHTER: dict[str, tuple[Change, str]] = {
    "a bound tighter than its leaves prove": (quarter, "not excluded"),
    "a bound that is far too tight": (entry("least", 1, lambda value: value + (1 << 40)), "not excluded"),
    "bounds that cross": (all_bounds, "record"),
    "the other side": (entry("rows", 1, lambda side: -side), "not excluded"),
    "another neuron": (entry("rows", 0, lambda neuron: (neuron + 1) % 4), "record"),
    "a neuron that there is not": (entry("rows", 0, lambda _: 99), "no neuron"),
    "a side of zero": (entry("rows", 1, lambda _: 0), "rows are neurons and sides"),
    "a neuron without a side": (lambda records: at(records, "tighter")["rows"].pop(), "rows are neurons and sides"),
    "a side too many": (lambda records: at(records, "tighter")["rows"].append(1), "expected"),
    "one row only": (
        lambda records: at(records, "tighter").update(rows=at(records, "tighter")["rows"][:2]),
        "expected",
    ),
    "another activation": (tighter(tighter=0), "record"),
    "an activation that there is not": (tighter(tighter=2), "no activation"),
    "an activation that is a boolean": (tighter(tighter=True), "no activation"),
    "slopes too few": (lambda records: at(records, "tighter")["tree"].pop(), "expected"),
    "slopes far out of range": (
        lambda records: at(records, "tighter").update(tree=[9, *[1] * (len(at(records, "tighter")["tree"]) - 1)]),
        "not excluded",
    ),
    "the chord of a neuron that there is not": (tighter(chords=[99]), "no neuron"),
    "chords that are no list": (tighter(chords=1), "list of integers"),
    "no chords": (gone("chords"), "record"),
    "a key left out": (lambda records: at(records, "tighter").pop("chords"), "expected"),
    "a neuron named twice": (
        lambda records: at(records, "tighter")["neurons"].append(at(records, "tighter")["neurons"][0]),
        "named twice",
    ),
    "no bounds where a later tree needs them": (gone("tighter"), "record"),
    "a leaf left out": (gone("leaf"), "record"),
    "the last leaf left out": (gone("leaf", -1), "record"),
    "a split left out": (gone("split"), "record"),
    "a split and one of its sides left out": (split_left_out, "record"),
    "leaves exchanged": (exchanged, "not excluded"),
    "the signs of multipliers": (signs, "not excluded"),
    "multipliers of a row": (lambda records: below(records)[0].update(rows=[0, 1]), "multipliers of rows"),
    "another split": (lambda records: at(records, "split").update(split=99), "no neuron"),
}


@pytest.mark.thorough
def test_tighter_bounds_with_trees_of_their_own_are_accepted(folder: Path) -> None:
    for kind in ("mlp", "leaky"):
        case = refined_case(folder, kind)
        assert len(below(case.records)) > 1
        assert checked(folder, case, written(case.records)).startswith("unsat: ")


@pytest.mark.thorough
@pytest.mark.parametrize("name", TIGHTER)
def test_a_fault_in_tighter_bounds_is_refused(name: str, folder: Path) -> None:
    change, reason = TIGHTER[name]
    case = fresh(refined_case(folder, "leaky"))
    change(case.records)
    with pytest.raises(Refused, match="record ") as refused:
        checked(folder, case, written(case.records))
    assert reason in str(refused.value)


def test_tighter_bounds_rest_on_those_that_are_known_before_them(folder: Path) -> None:
    """Said twice they are accepted, and so are looser ones; behind the proof that needs them they are refused."""
    case = fresh(refined_case(folder, "leaky"))
    start = next(i for i, record in enumerate(case.records) if "tighter" in record)
    end = next(i for i, record in enumerate(case.records) if "tree" in record and "tighter" not in record)
    loose = copy.deepcopy(case.records)
    loose[start]["least"] = [loose[start]["least"][0], *(value - 9 for value in loose[start]["least"][1:])]
    part = case.records[start:end]
    assert checked(folder, case, written([*case.records[:start], *loose[start:end], *case.records[start:]]))
    late = [*case.records[:start], *case.records[end:-1], *part, case.records[-1]]
    with pytest.raises(Refused, match="record "):
        checked(folder, case, written(late))


def mixed(records: Records) -> None:
    """Two boxes' proofs change places."""
    first, last = (i for i in (start(records), len(records) - 2))
    records[first], records[last] = records[last], records[first]


def start(records: Records) -> int:
    return next(i for i, record in enumerate(records) if "zonotope" in record)


COVER: dict[str, tuple[Change, str]] = {
    "no halving": (lambda records: records.__setitem__(slice(2, -1), [{"zonotope": [0]}]), "not excluded"),
    "a half left out": (gone("zonotope"), "record"),
    "the last half left out": (gone("zonotope", -1), "expected"),
    "a half too many": (lambda records: records.insert(start(records), {"zonotope": [0]}), "record"),
    "a halving left out": (gone("halve"), "record"),
    "a halving beyond the box": (lambda records: at(records, "halve").update(halve=[0, 1 << 20, 0]), "beyond its ends"),
    "another place of a halving": (
        lambda records: [record.update(halve=[record["halve"][0], -1, -3]) for record in records if "halve" in record],
        "record",
    ),
    "another input": (
        lambda records: [record.update(halve=[0, *record["halve"][1:]]) for record in records if "halve" in record],
        "record",
    ),
    "an input that there is not": (lambda records: at(records, "halve").update(halve=[9, 0, 0]), "no input"),
    "a row that there is not": (lambda records: at(records, "zonotope").update(zonotope=[1]), "no row"),
    "a row before the first": (lambda records: at(records, "zonotope").update(zonotope=[-1]), "no row"),
    "no row": (lambda records: at(records, "zonotope").update(zonotope=[]), "expected"),
    "rows of too many polytopes": (lambda records: at(records, "zonotope").update(zonotope=[0, 0]), "expected"),
    "a row that is no list": (lambda records: at(records, "zonotope").update(zonotope=0), "list of integers"),
    "a row that is a boolean": (lambda records: at(records, "zonotope").update(zonotope=[True]), "list of integers"),
    "a key too many": (lambda records: at(records, "zonotope").update(root=2), "expected"),
}


@pytest.mark.parametrize("kind", ["mlp", "leaky"])
def test_boxes_that_halving_leaves_are_accepted(kind: str, folder: Path) -> None:
    case = cover_case(folder, kind)
    assert sum("halve" in record for record in case.records) > 5
    assert checked(folder, case, written(case.records)).startswith("unsat: ")


@pytest.mark.parametrize("name", COVER)
def test_a_fault_in_boxes_is_refused(name: str, folder: Path) -> None:
    change, reason = COVER[name]
    case = fresh(cover_case(folder))
    change(case.records)
    with pytest.raises(Refused, match="record ") as refused:
        checked(folder, case, written(case.records))
    assert reason in str(refused.value)


def test_zonotopes_hold_the_network_s_values() -> None:
    """Random points of random boxes, of networks with leaky and concave activations: inside the bounds of every row."""
    from verifiable_relu.check.graph import ActivationNode, AffineNode, Graph, InputNode
    from verifiable_relu.check.zonotope import propagated

    rng = np.random.default_rng(1)
    for _ in range(20):
        first, second = AffineNode([(0, rng.normal(size=(5, 3)))], rng.normal(size=5)), None
        slope = rng.choice([0.0, 0.25, 1.5, -0.5], size=5)
        second = AffineNode([(2, rng.normal(size=(4, 5))), (0, rng.normal(size=(4, 3)))], rng.normal(size=4))
        graph = Graph(
            [InputNode(3), first, ActivationNode(1, slope, "r"), second, ActivationNode(3, np.zeros(4), "s")], 4
        )
        low = rng.normal(size=(6, 3))
        high = low + rng.choice([0.0, 0.1, 2.0], size=(6, 3))
        rows = AffineNode([(4, rng.normal(size=(3, 4)))], rng.normal(size=3))
        below, above = propagated(graph, low, high, rows).ends()
        x = low + rng.uniform(size=(50, 6, 3)) * (high - low)
        z = x @ first.terms[0][1].T + first.bias
        r = np.where(z > 0, z, slope * z)
        y = np.maximum(r @ second.terms[0][1].T + x @ second.terms[1][1].T + second.bias, 0)
        values = y @ rows.terms[0][1].T + rows.bias
        assert (values >= below - 1e-9).all()
        assert (values <= above + 1e-9).all()
        assert (above - below < 1e3).all()
