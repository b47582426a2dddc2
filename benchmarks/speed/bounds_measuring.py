"""The measurements of ``bounds_speed``: this package and auto_LiRPA in turn on the same problems."""

from __future__ import annotations

import argparse
import itertools
import resource
import statistics
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common.clock import Late, limited, seconds
from benchmarks.common.networks import network_file
from benchmarks.common.progress import say
from benchmarks.common.records import Record, Records
from benchmarks.speed.bounds_cases import CASES, EQUAL, GELU_CASE, LAMBDAS, LEAST, METHODS, Case
from benchmarks.speed.bounds_library import Settings, Theirs, fastest, library_version
from benchmarks.speed.bounds_ours import (
    Problem,
    crown_given,
    ours,
    passes,
    problem_of,
    unstable_share,
    with_gelu,
)
from verifiable_relu.errors import InputError
from verifiable_relu.ir.network import Network
from verifiable_relu.readers import read_onnx

DTYPES = {"float32": torch.float32, "float64": torch.float64}

_BATCH = 16
"""The number of images on which the cost of rounding is measured."""

_GELU_IMAGES = 64


@cache
def peak(dtype: str) -> float:
    """The multiply-adds per second of a large matrix product, the best of several."""
    size = 1536
    a, b = torch.randn(2, size, size, dtype=DTYPES[dtype])
    return size**3 / min(seconds(lambda: a @ b) for _ in range(8))


def multiply_adds(work: Callable[[], Any]) -> float:
    """The number of multiply-adds of all matrix products and convolutions that ``work`` calls."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops() / 2


def compare(problem: Problem, method: str, dtype: str, runs: int, limit: float) -> Record:
    """Measure this package and auto_LiRPA on one problem by one method; returns the fields of a record ``line``.

    The fields are explained by ``bounds_speed.ABOUT``.

    Raises:
        Late, or what the library raised.
    """
    doubled = problem.both_signs()
    with limited(limit):
        mine = ours(doubled, method)
    theirs, settings = fastest(problem, method, DTYPES[dtype], limit)
    with limited(3 * limit):
        other, known = theirs(doubled), theirs.preactivations(problem) if method == "crown" else {}
    rows = problem.objective.shape[1]
    widths, others = (-(bounds[:, rows:] + bounds[:, :rows]) for bounds in (mine, other))

    def below(bounds: Tensor) -> Tensor:
        return (other - bounds) / torch.cat([others, others], 1)

    pairs: list[list[float]] = []
    with limited(3 * limit):
        try:
            while len(pairs) < runs:
                # The second to run may find the caches warm, so that both take turns in being first.
                work = [partial(seconds, lambda: ours(problem, method)), partial(theirs.seconds, problem)]
                turn = 1 if len(pairs) % 2 else -1
                pairs.append([measured(LEAST) for measured in work[::turn]][::turn])
        except Late:
            if not pairs:
                raise
    mine_s, theirs_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    same = share = None
    if method == "crown":
        same = float(below(crown_given(problem, known, doubled.rows).reshape(other.shape)).max())
        share = multiply_adds(lambda: ours(problem, "crown")) / mine_s / peak(dtype)
    apart = below(mine)
    looser, tighter = (float((sign * apart > EQUAL).double().mean()) for sign in (1, -1))
    found: Record = {
        "unstable": unstable_share(problem, method),
        "runs": len(pairs),
        "ours": mine_s,
        "theirs": theirs_s,
        "ratio": statistics.median(b / a for a, b in pairs),
        "width": float((widths / others).mean()),
        "worst": float(apart.max()),
        "looser": looser,
        "tighter": tighter,
        "same": same,
        "settings": settings,
        "peak": share,
    }
    return {name: float(f"{value:.8g}") if isinstance(value, float) else value for name, value in found.items()}


def lines(asked: argparse.Namespace, case: Case, network: Network, records: Records) -> None:
    """Add a record for each dtype, method and batch of a network, and one of kind ``missing`` for each left out."""
    for dtype, method in track(list(itertools.product(asked.dtype, asked.method)), case.name):
        for batch in asked.batch:
            about = {"network": case.name, "eps": case.eps, "dtype": dtype, "method": method, "batch": batch}
            about |= {"library": library_version(), "threads": asked.threads}
            if records.has("line", about):
                continue
            try:
                problem = problem_of(case, network, batch, DTYPES[dtype])
                records.append("line", {**about, **compare(problem, method, dtype, asked.runs, asked.limit)})
            except InputError:
                raise
            except (Exception, Late) as error:
                late = isinstance(error, Late)
                why = f"more than {asked.limit:g} s" if late else f"{type(error).__name__}: {str(error)[:80]}"
                left_out(records, f"{case.name} {dtype} {method}, batch {batch}: {why}")
                if late:
                    break


def left_out(records: Records, text: str) -> None:
    """Report and record that something could not be measured."""
    say(text)
    if not records.has("missing", {"text": text}):
        records.append("missing", {"text": text})


def rounding(asked: argparse.Namespace, case: Case, network: Network, records: Records) -> None:
    """Measure the cost of accounting for rounding in the pass of the output's rows, and the time that float32 saves."""
    for dtype in asked.dtype:
        about = {"network": case.name, "dtype": dtype, "threads": asked.threads}
        if records.has("rounding", about):
            continue
        problem = problem_of(case, network, _BATCH, DTYPES[dtype]).both_signs()
        samples, rows, _ = problem.objective.shape
        ways = passes(problem)
        times: list[list[float]] = [[] for _ in ways]
        with torch.inference_mode():
            found = [way().reshape(samples, rows) for way in ways]
            for _ in range(asked.runs):
                for way, taken in zip(ways, times, strict=True):
                    taken.append(seconds(way, LEAST))
        half = rows // 2
        width = -(found[0][:, half:] + found[0][:, :half])
        slack = [float(((found[0] - bounds)[:, :half] / width).mean()) for bounds in found]
        a, b, c = (statistics.median(taken) for taken in times)
        figures = {"seconds": a, "cost": b / a - 1, "slack": slack[1]}
        figures |= {"seconds_proven": c, "cost_proven": c / a - 1, "slack_proven": slack[2]}
        records.append("rounding", {**about, **{name: float(f"{value:.6g}") for name, value in figures.items()}})


def widths(asked: argparse.Namespace, records: Records) -> None:
    """Measure the mean widths of bounds on margins with λ-GELU in place of ReLU, for this package and auto_LiRPA."""
    relu = problem_of(GELU_CASE, read_onnx(network_file(GELU_CASE.name)), _GELU_IMAGES, torch.float64).both_signs()
    half = relu.objective.shape[1] // 2

    def width(bounds: Tensor) -> float:
        return float(f"{float(-(bounds[:, half:] + bounds[:, :half]).mean()):.6g}")

    base = width(ours(relu, "crown"))
    for lam in (*LAMBDAS, None):
        about = {"activation": "ReLU" if lam is None else f"λ = {lam}", "library": library_version()}
        if records.has("widths", about):
            continue
        problem = relu if lam is None else with_gelu(relu, float(lam))
        mine = {method: width(ours(problem, method)) for method in METHODS}
        theirs: dict[str, float | None] = {}
        for method in ("crown", "alpha-crown"):
            theirs[f"theirs_{method}"] = None
            try:
                with limited(asked.limit):
                    settings = Settings("patches", False, False, _GELU_IMAGES)
                    library = Theirs(problem.network, method, torch.float64, settings, given=False)
                    theirs[f"theirs_{method}"] = width(library(problem))
            except (Exception, Late) as error:
                reason = str(error).strip().split("\n")[0][:80] or f"more than {asked.limit:g} s"
                what = f"auto_LiRPA {library_version()}, {method}, {about['activation']}"
                left_out(records, f"{what}: {type(error).__name__}: {reason}")
        ratio = float(f"{mine['crown'] / base:.6g}")
        records.append("widths", {**about, **mine, "crown_over_relu": ratio, **theirs})


def measure(asked: argparse.Namespace, records: Records) -> None:
    """Measure what has no record for the installed version of auto_LiRPA and the number of threads."""
    if asked.library:
        sys.path.insert(0, asked.library)
    torch.set_num_threads(asked.threads)
    size = int(asked.memory * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    cases: dict[Case, Network] = {}
    for case in CASES:
        if case.name in asked.net:
            try:
                cases[case] = read_onnx(network_file(case.name))
            except InputError as error:
                left_out(records, f"{case.name}: {error.message}")
    for dtype in asked.dtype:
        if not records.has("peak", {"dtype": dtype}):
            records.append("peak", {"dtype": dtype, "gflops": round(2e-9 * peak(dtype), 1)})
    for case, network in cases.items():
        lines(asked, case, network, records)
    for case, network in cases.items():
        rounding(asked, case, network, records)
    widths(asked, records)
