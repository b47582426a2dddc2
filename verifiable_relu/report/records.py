"""Results of campaigns, read from their folders: each instance once, whatever paths name its files."""

from __future__ import annotations

import csv
import io
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from verifiable_relu.campaign.result import Result
from verifiable_relu.campaign.store import read_results
from verifiable_relu.errors import InputError
from verifiable_relu.files import csv_cell, read_text
from verifiable_relu.report.expected import LARGEST_FILE, common_end
from verifiable_relu.spec.find import named

IN_FOLDER = " in "
"""The separator of method and folder in the names of methods, where several campaigns are compared."""


def read_campaigns(folders: Sequence[Path]) -> list[Result]:
    """Return the results of one campaign or of several, sorted by network and property.

    The methods of several campaigns have the folders' names in theirs.

    Raises:
        InputError: if there are no results, or if a folder has no records or damaged ones.
    """
    for folder in folders:
        if len(folders) > 1 and folder.suffix == ".json":
            raise InputError("no campaign, which alone is compared", path=folder)
        try:
            (folder / "records.jsonl").lstat()
        except OSError as error:
            raise InputError(f"no results here: {error.strerror}", path=folder / "records.jsonl") from None
    campaigns = {folder: read_campaign(folder) for folder in folders}
    results = merge_campaigns(campaigns) if len(campaigns) > 1 else campaigns[folders[0]]
    if not results:
        raise InputError("no results here", path=folders[0])
    return sorted(results, key=lambda result: (natural(result.onnx), natural(result.vnnlib)))


def read_campaign(folder: Path) -> list[Result]:
    """Return the results of a folder, those of one instance under two paths once, as the last run named it.

    A campaign that is resumed in another folder names its files by other paths.
    """
    results = [with_arithmetic(result) for result in read_results(folder)]
    table = folder / "results.csv"
    try:
        rows = csv.DictReader(io.StringIO(read_text(table, LARGEST_FILE)))
        listed = {(row["onnx"], row["vnnlib"]) for row in rows}
    except (InputError, KeyError, csv.Error):
        return results
    kept: dict[tuple[str, str], list[Result]] = defaultdict(list)
    earlier = []
    for result in results:
        if (csv_cell(result.onnx), csv_cell(result.vnnlib)) in listed:
            kept[result.verifier, Path(result.vnnlib).name].append(result)
        else:
            earlier.append(result)
    for result in reversed(earlier):
        same = kept[result.verifier, Path(result.vnnlib).name]
        if not any(match_order(result, other) for other in same):
            same.append(result)
    chosen = {id(result) for same in kept.values() for result in same}
    return [result for result in results if id(result) in chosen]


def with_arithmetic(result: Result) -> Result:
    """Return a result whose verifier names the arithmetic that the verdict is about, unless that is real numbers."""
    if result.arithmetic == "real":
        return result
    method, parenthesis, options = result.verifier.partition("(")
    return replace(result, verifier=f"{method} about {result.arithmetic}{parenthesis}{options}")


def merge_campaigns(campaigns: Mapping[Path, Sequence[Result]]) -> list[Result]:
    """Return the results of several campaigns; an instance of several is named as the first of them names it."""
    names = {folder: folder.resolve().name for folder in campaigns}
    known: dict[str, list[Result]] = defaultdict(list)
    merged = []
    for folder, results in campaigns.items():
        label = names[folder] if [*names.values()].count(names[folder]) == 1 else str(folder)
        # A campaign's two results of one method are two instances.
        taken: dict[tuple[str, str], set[int]] = defaultdict(set)
        for result in results:
            file = Path(result.vnnlib).name
            same, mine = known[file], taken[result.verifier, file]
            matches = [
                (order, i) for i, each in enumerate(same) if i not in mine and (order := match_order(result, each))
            ]
            place = min(matches)[1] if matches else len(same)
            if place == len(same):
                same.append(result)
            mine.add(place)
            first, verifier = same[place], f"{result.verifier}{IN_FOLDER}{label}"
            merged.append(replace(result, onnx=first.onnx, vnnlib=first.vnnlib, verifier=verifier))
    return merged


def match_order(result: Result, other: Result) -> tuple[bool, int, bool] | None:
    """Return an order among results that may be about one instance, the likeliest first; None if they cannot be.

    Equal paths go before equal ends of paths, and these before equal queries: copies of a file have equal queries. The
    query of a file that could not be read is unknown.
    """
    equal_paths = (result.onnx, result.vnnlib) == (other.onnx, other.vnnlib)
    # A property that could not be read may have no network.
    equal_names = not (result.onnx and other.onnx) or named(result.onnx) == named(other.onnx)
    equal_queries = result.query == other.query
    if not equal_paths and not (equal_names and (equal_queries or not (result.query and other.query))):
        return None
    shared = common_end(result.vnnlib, other.vnnlib) + common_end(result.onnx, other.onnx)
    return not equal_paths, -shared, not equal_queries


def natural(text: str) -> list[str | int]:
    """Return a sorting key that compares numbers within texts as numbers."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", text))]
