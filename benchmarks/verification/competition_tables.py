"""What the records of the competition's instances say, as tables and a figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import fsum
from pathlib import Path
from typing import Any

from benchmarks.common.markup import Cell, Table
from benchmarks.common.records import Record, notes, of
from benchmarks.common.tables import Page
from benchmarks.verification.competition_instances import COMPETITORS

SOLVED = ("sat", "unsat")
PROOFS = ("rounded", "exact", "checked")
"""How far an unsat is trusted that rests on bounds with rounding accounted for, exact arithmetic or a certificate."""

ALONE = ("process", "cores")
"""The modes in which every instance has a command of its own."""

KEYS = ("family", "set", "mode", "method", "limit")
"""Of an answer: what was asked, and how."""

_NAMES = {
    "abcrown": "α,β-CROWN",
    "abcrown-auto": "α,β-CROWN, auto",
    "neuralsat": "NeuralSAT",
    "marabou": "Marabou",
}
_LONG = 10.0
"""Seconds of a command: of shorter ones the most goes into starting up, which is not shared."""

Key = tuple[str, str, str]
"""Family, and the names of the network's and the property's file."""

Times = Mapping[Key, float]
"""Of the instances that a tool solved, the seconds."""


def wrong(record: Record) -> bool:
    """Whether the verdict contradicts an undisputed consensus."""
    return {record["verdict"], record["truth"]} == {"sat", "unsat"}


def outvoted(record: Record) -> bool:
    """Whether the verdict is not that of the majority, where the competition's tools disagreed."""
    return (record["verdict"], record["truth"]) in (("sat", "disputed (unsat)"), ("unsat", "disputed (sat)"))


def grouped(answers: Iterable[Record], *names: str) -> dict[tuple[Any, ...], list[Record]]:
    """Answers by the values of some fields, in the order of their coming."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in answers:
        groups.setdefault(tuple(record[name] for name in names), []).append(record)
    return groups


def families(records: Sequence[Record]) -> Table:
    """A row per family and way of asking."""
    columns: tuple[str, ...] = (
        "family",
        "set",
        "mode",
        "method",
        "limit, s",
        "instances",
        "sat",
        "unsat",
        "proven",
        "undecided",
    )
    columns += ("errors", "wrong", "outvoted")
    times = ("wall s", "CPU s", "slowest s")
    wholes = {tuple(record[name] for name in KEYS): record for record in of(records, "campaign")}
    rows: list[tuple[Cell, ...]] = []
    for key, mine in grouped(of(records, "answer"), *KEYS).items():
        count = Counter(record["verdict"] for record in mine)
        proven = sum(record["verdict"] == "unsat" and record["trust"] in PROOFS for record in mine)
        undecided = len(mine) - count["sat"] - count["unsat"] - count["error"]
        counts = (len(mine), count["sat"], count["unsat"], proven, undecided, count["error"])
        whole = wholes.get(key)
        if key[KEYS.index("mode")] != "campaign":
            wall, cpu = (sum(record[name] for record in mine) for name in ("seconds", "cpu"))
        elif whole is not None and whole["count"] == len(mine):
            wall, cpu = whole["seconds"], whole["cpu"]
        else:
            wall = cpu = None
        slowest = max((record["seconds"] for record in mine if record["seconds"] is not None), default=None)
        against = (sum(map(wrong, mine)), sum(map(outvoted, mine)))
        rows.append((*key, *counts, *against, wall, cpu, slowest))
    return Table((*columns, *times), rows, {"limit, s": "g", **dict.fromkeys(times, ".1f")})


def every(records: Sequence[Record]) -> Table:
    """A row per limit and family of the set ``every``, asked for certificates, and one for all families together."""
    columns = ("limit, s", "family", "asked", "read", "decided", "sat", "unsat", "wrong", "certificates", "CPU s")
    known = ("sat by votes", "unsat by votes", "decided by votes alone")
    asked = [r for r in of(records, "answer") if (r["set"], r["mode"]) == ("every", "certified")]
    rows: list[tuple[Cell, ...]] = []
    parts = [
        *grouped(asked, "limit", "family").items(),
        *(((*limit, "all"), r) for limit, r in grouped(asked, "limit").items()),
    ]
    # Families in the order of their coming, then all of them; an instance may have been asked at several limits.
    for key, mine in sorted(parts, key=lambda part: part[0][0]):
        count, votes = (Counter(record[name] for record in mine) for name in ("verdict", "truth"))
        accepted = sum(record["verdict"] == "unsat" and record["trust"] == "checked" for record in mine)
        lost = sum(record["truth"] in SOLVED and record["verdict"] not in SOLVED for record in mine)
        read = len(mine) - count["error"]
        ours_ = (count["sat"] + count["unsat"], count["sat"], count["unsat"], sum(map(wrong, mine)), accepted)
        cpu = fsum(record["cpu"] for record in mine)
        rows.append((*key, len(mine), read, *ours_, cpu, votes["sat"], votes["unsat"], lost))
    return Table((*columns, *known), rows, {"limit, s": "g", "CPU s": ".1f"})


def shared(records: Sequence[Record]) -> Table:
    """A row per family that was asked by one process and by one for each core: what both solved, and in what time.

    The second of each pair of rows has only the instances on which one process works for ``_LONG`` seconds or more.
    """
    columns = ("family", "one process takes", "asked", "solved by one", "solved by all cores", "solved by both")
    times = ("one: wall s", "all cores: wall s", "one: CPU s", "all cores: CPU s")
    rows: list[tuple[Cell, ...]] = []
    alone, together = (ours(records, mode) for mode in ALONE)
    for method in (name for name in alone if name in together):
        one, all_ = alone[method], together[method]
        for family in dict.fromkeys(key[0] for key in one):
            asked = [key for key in one if key[0] == family and key in all_]
            for title, least in (("any time", 0.0), (f"{_LONG:g} s or more", _LONG)):
                mine = {key for key in asked if one[key]["seconds"] >= least}
                if not mine:
                    continue
                won = [mine & solved(answers, "seconds").keys() for answers in (one, all_)]
                both = won[0] & won[1]
                sums = [
                    fsum(answers[key][name] for key in both) for name in ("seconds", "cpu") for answers in (one, all_)
                ]
                rows.append((family, title, len(mine), *map(len, won), len(both), *sums))
    return Table((*columns, *times), rows, dict.fromkeys(times, ".1f"))


def deciders(records: Sequence[Record]) -> Table:
    """A row per family, way of asking and method that decided, with the seconds of what it decided, all stages."""
    columns = ("family", "set", "mode", "decided by", "sat", "unsat", "seconds")
    rows: list[tuple[Cell, ...]] = []
    solved = [record for record in of(records, "answer") if record["verdict"] in SOLVED]
    for key, mine in grouped(solved, "family", "set", "mode", "decided_by").items():
        count = Counter(record["verdict"] for record in mine)
        rows.append((*key, count["sat"], count["unsat"], sum(record["seconds"] for record in mine)))
    return Table(columns, sorted(rows, key=lambda row: [str(cell) for cell in row[:4]]), {"seconds": ".1f"})


def undecided(records: Sequence[Record]) -> Table:
    """A row per instance that is not decided, with what is known of it."""
    # Imported here, since --help need not wait for the import.
    from verifiable_relu.spec.find import named

    columns = ("family", "mode", "network", "property", "truth", "reason", "last method", "unstable", "sub-problems")
    rows: list[tuple[Cell, ...]] = []
    for record in of(records, "answer"):
        if record["verdict"] not in SOLVED:
            names = (named(record["onnx"]).replace(".onnx", ""), Path(record["vnnlib"]).stem)
            # Infinities are texts in JSON.
            margin = record["margin"] if isinstance(record["margin"], float) else None
            title = (record["family"], record["mode"], *names, record["truth"], record["reason"])
            known = (record["decided_by"], record["unstable"], record["sub_problems"], margin, record["seconds"])
            rows.append((*title, *known))
    return Table((*columns, "best margin", "seconds"), rows, {"seconds": ".1f"})


def ours(records: Sequence[Record], mode: str) -> dict[str, dict[Key, Record]]:
    """This project's answers by method and instance, in one mode; of an instance in both sets that among the peers'."""
    found: dict[str, dict[Key, Record]] = {}
    for record in sorted(of(records, "answer"), key=lambda record: record["set"] == "peers"):
        if record["mode"] == mode:
            key = (record["family"], Path(record["onnx"]).name, Path(record["vnnlib"]).name)
            found.setdefault(record["method"], {})[key] = record
    return found


def solved(answers: Mapping[Key, Record], seconds: str) -> Times:
    """Of the instances that are decided, and not wrongly, one of the fields ``seconds`` and ``cpu``."""
    return {
        key: record[seconds] for key, record in answers.items() if record["verdict"] in SOLVED and not wrong(record)
    }


def peers(records: Sequence[Record]) -> tuple[dict[str, dict[Key, Record]], Times]:
    """The other tools' answers by tool and instance; and of all together the least CPU seconds for each instance."""
    found: dict[str, dict[Key, Record]] = {}
    for record in of(records, "peer"):
        found.setdefault(record["tool"], {})[record["family"], record["onnx"], record["vnnlib"]] = record
    together: dict[Key, float] = {}
    for answers in found.values():
        for key, seconds in solved(answers, "cpu").items():
            together[key] = min(seconds, together.get(key, seconds))
    return found, together


def beside(records: Sequence[Record], mode: str, seconds: str) -> Table:
    """A row per family and other tool, for every method that was asked in a mode; ``all`` is the sum of all families.

    Args:
        records: of the study.
        mode: of this project's answers.
        seconds: the field of this project's answers that is beside the other tools' CPU seconds.
    """
    tools, together = peers(records)
    rivals = {name: (set(answers), solved(answers, "cpu")) for name, answers in tools.items()}
    rivals["all together, best per instance"] = (set().union(*tools.values()), together)
    columns = ("family", "our method", "tool", "asked", "solved", "its CPU s", "asked of us", "solved by us", "our s")
    shared = ("solved by both", "its CPU s there", "our s there", "our part")
    rows: list[tuple[Cell, ...]] = []
    for method, answers in ours(records, mode).items():
        mine = solved(answers, seconds)
        families = {key[0]: None for key in together if any(key[0] == other[0] for other in answers)}
        for family in (*families, "all"):
            for tool, (asked, theirs) in rivals.items():
                here = {key for key in asked if key[0] in families and family in (key[0], "all")}
                if not here:
                    continue
                won, own, both = here & theirs.keys(), here & mine.keys(), here & theirs.keys() & mine.keys()
                its, our = fsum(theirs[key] for key in both), fsum(mine[key] for key in both)
                told = (len(here), len(won), fsum(theirs[key] for key in won))
                us = (len(here & answers.keys()), len(own), fsum(mine[key] for key in own))
                title = (family, method, _NAMES.get(tool, tool))
                rows.append((*title, *told, *us, len(both), its, our, our / its if its else None))
    forms = {**dict.fromkeys(("its CPU s", "our s", "its CPU s there", "our s there"), ".1f"), "our part": ".1%"}
    return Table((*columns, *shared), rows, forms)


def competitors(records: Sequence[Record]) -> Table:
    """A row per family: how many of its instances the competition's tools solved, within the limit of our answers."""
    columns = ("family", "set", "instances", "limit, s", "ours", *(_NAMES.get(tool, tool) for tool in COMPETITORS))
    rows: list[tuple[Cell, ...]] = []
    asked = (record for record in of(records, "answer") if record["set"] != "every")
    for (family, subset, limit), group in grouped(asked, "family", "set", "limit").items():
        mine = {(record["onnx"], record["vnnlib"]): record["competition"] for record in group}
        won = {(r["onnx"], r["vnnlib"]) for r in group if r["verdict"] in SOLVED and not wrong(r)}
        counts = [
            sum(tool in times and times[tool] <= limit for times in mine.values()) for tool in (*COMPETITORS, "best")
        ]
        rows.append((family, subset, len(mine), limit, len(won), *counts))
    return Table((*columns, "best tool"), rows, {"limit, s": "g"})


def page(records: Sequence[Record]) -> Page:
    """The tables."""
    made = Page.headed("# Families of the verification competition", notes(records))
    made.add(
        families(records),
        "*set*: *standing*, the whole family (of safenlp the first 300 instances), or *peers*, the instances that "
        "other tools were asked about on such a machine. *mode*: *campaign*, one process for the whole family; "
        "*process*, one for each instance, start-up included; *cores*, for each instance one for each core. *limit*: "
        "per instance, where the competition did not give less. "
        "*proven*: those of the unsats that rest on bounds with rounding accounted for or on exact arithmetic, and not "
        "on a solver's word in floating point. *wrong*: sat where the competition's tools agree on unsat, or unsat "
        "where they agree on sat or a counterexample of theirs was replayed. *outvoted*: unlike the majority where "
        "they disagree. *errors*: the command crashed or could not read a file. A dash for the time of a campaign: it "
        "was interrupted and resumed.",
    )
    all_families = every(records)
    if all_families.rows:
        made.add(
            "## Every family at hand",
            "The first instances of each family, a command each; start-up, certificates and their check are included. "
            "*certificates*: the unsats with one that the independent checker "
            "accepts. *by votes*: what the competition's tools agree on; *decided by votes alone*: what they decided "
            "and this project did not.",
            all_families,
        )
    _beside(made, records)
    cores = shared(records)
    if cores.rows:
        made.add(
            "## Several processes for one query",
            "Every instance by a command of its own, start-up included, whose search has one process or one for each "
            "core. The times are those of the instances that both solved; those of other instances are limits.",
            cores,
        )
    made.add(
        "## Beside the competition",
        "How many instances the tools solved in the competition within the limit of our answers, on the competition's "
        "machines, some of which had a GPU. *ours*: solved in at least one of the modes. *best tool*: by "
        "whichever tool was fastest.",
        competitors(records),
        "## What decided",
        deciders(records),
        "## What is not decided",
        undecided(records),
    )
    return made


def _beside(made: Page, records: Sequence[Record]) -> None:
    """The part of the page on other tools, if they were asked about any of the instances."""
    one, all_ = beside(records, "process", "cpu"), beside(records, "campaign", "seconds")
    if not (one.rows or all_.rows):
        return
    made.add("## Beside other tools on such a machine", *(record["text"] for record in of(records, "source")))
    made.add(
        "Only instances that the other tool was asked about; what contradicts the competition's consensus counts as "
        "not solved. *our part*: our seconds as a part of the other tool's, over what both solved."
    )
    if one.rows:
        made.add("One process for each instance on both sides, start-up included; our seconds are CPU seconds:", one)
    if all_.rows:
        made.add(
            "One process for a family on our side, one for each instance on the other; our seconds are those of the "
            "clock that the campaign charges to the instances:",
            all_,
        )
