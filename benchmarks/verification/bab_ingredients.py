"""What does each ingredient of branch and bound bring? ``bab`` is asked without one of them in turn, on two families.

    python -m benchmarks.verification.bab_ingredients
    python -m benchmarks.verification.bab_ingredients --vary search.batch=16,64,256,1024 --families oval21

With ``--vary``, the named options alone take the values that are named. Each answer is a record, and is not asked for
again. Instances that ``bab`` as it is decides by bounds, before anything is split, are not put to the others. At the
most that takes families × COUNT × 8 variants × LIMIT seconds, which is 21 minutes for the defaults. The schedule is
that of networks without shortcuts, whatever is asked about. Needs the benchmarks under VERIFIABLE_RELU_DATA/vnncomp.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks.common.markup import Cell, Table
from benchmarks.common.records import Record, Records, notes, of
from benchmarks.common.script import Script, data_folder
from benchmarks.common.tables import Page
from benchmarks.verification.competition_instances import instances
from verifiable_relu.errors import InputError

if TYPE_CHECKING:
    from verifiable_relu.search.batch import Verifier
    from verifiable_relu.spec import Query

Found = TypeVar("Found")

FAMILIES = ("oval21", "mnist_fc")
UNCHANGED = "as it is"
WITHOUT: tuple[tuple[str, Any], ...] = (
    ("ascent_steps", 0),
    ("search.steps", 0),
    ("search.adaptive_neurons", 0),
    ("search.finish_below_blame", 0.0),
    ("schedule.refinement", None),
    ("schedule.improve", None),
    ("search.batch", 16),
)
"""What is switched off: the search for bounds of neurons, the ascent in each node, lines that adapt, more steps where
nothing is left to split, tighter intervals, planes over neurons, large batches."""

BATCH = "search.batch"
"""The option by whose values the sub-problems per second are tabulated."""


def options_of(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The options of a dataclass and of those within it, as ``search`` and ``search.steps``, with their values."""
    for field in fields(value):
        name, held = f"{prefix}{field.name}", getattr(value, field.name)
        yield name, held
        if is_dataclass(held):
            yield from options_of(held, f"{name}.")


def with_option(value: Any, name: str, new: Any) -> Any:
    """The same dataclass with one option changed.

    Raises:
        InputError: if there is no such option.
    """
    if name not in dict(options_of(value)):
        raise InputError(f"bab has no option {name}")
    first, _, rest = name.partition(".")
    return replace(value, **{first: with_option(getattr(value, first), rest, new) if rest else new})


def varied(text: str) -> list[tuple[str, Any]]:
    """The options and values of ``NAME=VALUE[,VALUE…]``; values as Python writes numbers, truth values and None."""
    name, _, values = text.partition("=")
    try:
        found = ast.literal_eval(f"({values},)")
    except (ValueError, SyntaxError):
        found = ()
    if not name or not found:
        raise argparse.ArgumentTypeError(f"'{text}' is not of the form NAME=VALUE[,VALUE…]")
    return [(name, value) for value in found]


def variants(base: Any, asked: Sequence[Sequence[tuple[str, Any]]] | None) -> dict[str, Any]:
    """By what is changed: the verifier as it is, and with each option asked for, or else without each ingredient.

    Raises:
        InputError: if an option that is asked for does not exist.
    """
    changes = list(WITHOUT) if asked is None else [change for group in asked for change in group]
    return {UNCHANGED: base} | {f"{name} = {value}": with_option(base, name, value) for name, value in changes}


def measure(asked: argparse.Namespace, records: Records) -> None:
    """Ask every variant about the instances of each family that have no answer.

    Raises:
        InputError: if the benchmarks are missing, or an option does not exist.
    """
    import torch

    from benchmarks.common.progress import bars
    from verifiable_relu.campaign.inputs import InstanceFiles, Loader
    from verifiable_relu.search.bab.verifier import Bab, Schedule

    torch.set_num_threads(1)
    chosen = variants(Bab(schedule=Schedule()), asked.vary)
    data = data_folder() / "vnncomp"
    with bars() as bar:
        for family in asked.families:
            loader = Loader()
            for instance in bar.track(some(instances(data / family), asked.count), description=family):
                title = {"family": family, "onnx": instance.onnx, "vnnlib": instance.vnnlib, "limit": asked.limit}
                missing = [name for name in chosen if not records.has("answer", {**title, "variant": name})]
                if not missing:
                    continue
                files = (data / family / instance.vnnlib, data / family / instance.onnx)
                case = loader.case(InstanceFiles(*files, asked.limit))
                for name in missing:
                    if name != UNCHANGED and not _searched(records, {**title, "variant": UNCHANGED}):
                        continue
                    found = _asked(case.queries, chosen[name], asked.limit)
                    records.append("answer", {**title, "variant": name, **found, "truth": instance.truth})


def some(found: Sequence[Found], count: int) -> list[Found]:
    """So many of what was found, evenly spaced; all if there are no more."""
    count = min(count, len(found))
    return [found[number * len(found) // count] for number in range(count)]


def _searched(records: Records, title: Mapping[str, Any]) -> bool:
    """Whether the answer of this title took a search."""
    return any(record["search"] for record in records.of("answer") if title.items() <= record.items())


def _asked(queries: Sequence[Query], verifier: Verifier, limit: float) -> Mapping[str, Any]:
    """What a verifier says of the queries of an instance, joined, within a limit of seconds for all of them."""
    import time

    from verifiable_relu.campaign.result import join
    from verifiable_relu.search.batch import Account, QueryBatch
    from verifiable_relu.search.budget import TimeBudget
    from verifiable_relu.supervisor.workers import processor_seconds

    wall, cpu = time.perf_counter(), processor_seconds()
    batch = QueryBatch(queries, TimeBudget(), dict.fromkeys(range(len(queries)), Account(limit)))
    for _ in batch.ask(verifier):
        pass
    wall, cpu = time.perf_counter() - wall, processor_seconds() - cpu
    joined = join([batch.outcomes[number] for number in batch.queries])
    return {
        "verdict": str(joined.verdict),
        "reason": str(joined.reason),
        "detail": joined.detail,
        "unstable": joined.unstable,
        "sub_problems": joined.subproblems,
        "search": round(joined.seconds.get(verifier.name, 0.0), 4),
        "seconds": round(wall, 4),
        "cpu": round(cpu, 4),
    }


def table(answers: Sequence[Record]) -> Table:
    """A row per family and variant, over the instances that all variants were asked about and some had to search."""
    columns = ("family", "variant", "instances", "sat", "unsat", "undecided", "errors", "wrong")
    sums = ("CPU s, all", "solved by both", "CPU s there", "part of as it is", "sub-problems there")
    rows: list[tuple[Cell, ...]] = []
    for family in dict.fromkeys(record["family"] for record in answers):
        by = _by_variant([record for record in answers if record["family"] == family])
        base = by.get(UNCHANGED, {})
        for name, mine in by.items():
            count = Counter("error" if r["reason"] == "error" else r["verdict"] for r in mine.values())
            wrong = sum({r["verdict"], r["truth"]} == {"sat", "unsat"} for r in mine.values())
            both = [key for key, r in mine.items() if "unknown" not in (r["verdict"], base[key]["verdict"])]
            taken, usual = (sum(rows_[key]["cpu"] for key in both) for rows_ in (mine, base))
            nodes = sum(mine[key]["sub_problems"] or 0 for key in both)
            counts = (len(mine), count["sat"], count["unsat"], count["unknown"], count["error"], wrong)
            whole = sum(r["cpu"] for r in mine.values())
            rows.append((family, name, *counts, whole, len(both), taken, taken / usual if usual else None, nodes))
    forms = {"CPU s, all": ".1f", "CPU s there": ".1f", "part of as it is": ".0%"}
    return Table((*columns, *sums), rows, forms)


def speeds(answers: Sequence[Record]) -> Table:
    """A row per family and batch size: sub-problems per second of the search, where one was needed."""
    rows: list[tuple[Cell, ...]] = []
    for family in dict.fromkeys(record["family"] for record in answers):
        by = _by_variant([record for record in answers if record["family"] == family])
        for name, mine in by.items():
            if name != UNCHANGED and not name.startswith(f"{BATCH} = "):
                continue
            counted = [r for r in mine.values() if r["sub_problems"] and r["search"]]
            nodes, seconds = (sum(r[field] for r in counted) for field in ("sub_problems", "search"))
            rows.append((family, name, len(counted), nodes, seconds, nodes / seconds if seconds else None))
    columns = ("family", "variant", "instances", "sub-problems", "search s", "sub-problems per s")
    return Table(columns, rows, {"search s": ".1f", "sub-problems per s": ".0f"})


def _by_variant(answers: Sequence[Record]) -> dict[str, dict[tuple[str, str], Record]]:
    """Answers by variant and instance: those of instances that all variants have, and one of them searched."""
    by: dict[str, dict[tuple[str, str], Record]] = {}
    for record in answers:
        by.setdefault(record["variant"], {})[record["onnx"], record["vnnlib"]] = record
    common = set.intersection(*(set(mine) for mine in by.values())) if by else set()
    chosen = {key for key in common if any(mine[key]["search"] for mine in by.values())}
    return {name: {key: r for key, r in mine.items() if key in chosen} for name, mine in by.items()}


def page(records: Sequence[Record]) -> Page:
    """The tables."""
    answers = of(records, "answer")
    made = Page.headed("# What each ingredient of branch and bound brings", notes(records))
    made.add(
        f"At most {', '.join(f'{limit:g}' for limit in sorted({r['limit'] for r in answers}))} s per instance, one "
        "thread. Over the instances that every variant was asked about and that need a search. *solved by both*: by "
        "the variant and by `bab` as it is; CPU seconds (bounds included) and sub-problems over these instances alone.",
        table(answers),
        f"## Sub-problems per second by batch size (`{BATCH}`)",
        speeds(answers),
    )
    return made


def options(parser: argparse.ArgumentParser) -> None:
    """What is asked, and of which variants."""
    parser.add_argument("--families", nargs="+", default=FAMILIES, help=f"(default {' '.join(FAMILIES)})")
    parser.add_argument("--count", type=int, default=8, help="instances of each family, evenly spaced (default 8)")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds per instance (default 10)")
    parser.add_argument(
        "--vary", nargs="+", type=varied, metavar="NAME=VALUE[,VALUE…]", help="(default: without each ingredient)"
    )


SCRIPT = Script("benchmarks.verification.bab_ingredients", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
