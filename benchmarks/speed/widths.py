"""How wide are IBP's, CROWN's and α-CROWN's bounds beside auto_LiRPA's, operator by operator?

    python -m benchmarks.speed.widths
    python -m benchmarks.speed.widths --library FOLDER --only MaxPool GELU

For each operator that both know, small networks (two layers of it between three dense ones or convolutions) with random
weights, and boxes of several sizes about random points. A draw's figure is the mean width of our bounds of all outputs
by that of auto_LiRPA's: below 1, ours are tighter. auto_LiRPA is the installed version, or the one in FOLDER; 0.7.1
stands in no registry. Its CROWN-Optimized takes 20 steps and optimises the slopes of bounds within the network, too, as
our ``alpha-crown-tight`` does; our ``alpha-crown`` optimises those of the outputs' bounds alone.

What has a record for the same version of auto_LiRPA is not measured again.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.clock import Late, limited
from benchmarks.common.markup import Table
from benchmarks.common.records import Record, Records, notes, of
from benchmarks.common.script import Script
from benchmarks.common.tables import Page

if TYPE_CHECKING:
    from torch import Tensor, nn

MODES = {"ibp": "IBP", "crown": "CROWN", "alpha-crown": "CROWN-Optimized", "alpha-crown-tight": "CROWN-Optimized"}
"""Our modes, and those of auto_LiRPA that they are compared with."""

EPS = (0.01, 0.05, 0.2)
SEEDS = range(4)

_PLAIN, _SMALL, _POSITIVE = (1.0, 0.0), (0.3, 0.0), (0.15, 1.5)
"""What weights are multiplied with, and what is added before an operator, by its domain."""


def operators() -> dict[str, tuple[Callable[[Tensor], Tensor], tuple[float, float]]]:
    """Functions of vectors, (batch, 8), by name, and their domains."""
    import torch
    import torch.nn.functional as F

    def halves(f: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: f(x[:, :4], x[:, 4:])

    def normalised(x: Tensor) -> Tensor:
        apart = x - x.mean(1, keepdim=True)
        return apart / torch.sqrt((apart * apart).mean(1, keepdim=True) + 0.1)

    return {
        "ReLU": (F.relu, _PLAIN),
        "LeakyReLU": (lambda x: F.leaky_relu(x, 0.1), _PLAIN),
        "Abs": (torch.abs, _PLAIN),
        "HardTanh": (F.hardtanh, _PLAIN),
        "GELU": (F.gelu, _PLAIN),
        "Softplus": (F.softplus, _PLAIN),
        "Sigmoid": (torch.sigmoid, (2.0, 0.0)),
        "Tanh": (torch.tanh, _PLAIN),
        "Atan": (torch.atan, _PLAIN),
        "Tan": (torch.tan, _SMALL),
        "Sin": (torch.sin, _PLAIN),
        "Cos": (torch.cos, _PLAIN),
        "Exp": (torch.exp, _SMALL),
        "Log": (torch.log, _POSITIVE),
        "Sqrt": (torch.sqrt, _POSITIVE),
        "Reciprocal": (lambda x: 1 / x, _POSITIVE),
        "x²": (lambda x: x**2, _SMALL),
        "x³": (lambda x: x**3, _SMALL),
        "x⁴": (lambda x: x**4, _SMALL),
        "x^1.5": (lambda x: x**1.5, _POSITIVE),
        "Sign": (torch.sign, _PLAIN),
        "Floor": (torch.floor, (4.0, 0.0)),
        "x·y": (halves(torch.mul), _PLAIN),
        "x/y": (halves(torch.div), _POSITIVE),
        "Max of two": (halves(torch.maximum), _PLAIN),
        "Min of two": (halves(torch.minimum), _PLAIN),
        "Max of eight": (lambda x: x.amax(1, keepdim=True), _PLAIN),
        "Softmax": (lambda x: F.softmax(x, 1), _PLAIN),
        "LayerNorm, spelled": (normalised, _PLAIN),
        "MatMul of two": (lambda x: (x[:, :4].reshape(-1, 2, 2) @ x[:, 4:].reshape(-1, 2, 2)).flatten(1), _PLAIN),
    }


POOLS = ("MaxPool", "MaxPool after ReLU", "AvgPool after ReLU")


def drawn(name: str, seed: int) -> tuple[nn.Module, tuple[int, ...]]:
    """A network in float64 with two layers of an operator, and its input's shape."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    if name in POOLS:
        pool = nn.AvgPool2d(2) if name.startswith("Avg") else nn.MaxPool2d(2)
        before = [nn.ReLU()] if name.endswith("ReLU") else []
        layers = [nn.Conv2d(1, 3, 3), *before, pool, nn.Conv2d(3, 4, 2), *before, pool]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 4)).double().eval(), (1, 8, 8)
    function, (scale, shift) = operators()[name]
    width = function(torch.ones(1, 8)).shape[1]

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(width, 8), nn.Linear(width, 4)
            for layer in (self.first, self.second):
                nn.init.normal_(layer.weight, std=scale * layer.in_features**-0.5)
                nn.init.normal_(layer.bias, std=scale / 4)
                with torch.no_grad():
                    layer.bias.add_(shift)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.last(function(self.second(function(self.first(x)))))
            return found

    return Twice().double().eval(), (6,)


def ours(network: Any, box: Any, mode: str) -> Tensor:
    """The mean width of our bounds of the outputs."""
    import torch

    from benchmarks.common.crown import bounded
    from verifiable_relu.bounds.alpha import Ascent, ascend, search_slopes
    from verifiable_relu.bounds.backward import Relaxation
    from verifiable_relu.bounds.linear_bounds import bound_by_crown, lower_of_rows

    size = network.output_size
    rows = torch.cat([torch.eye(size), -torch.eye(size)]).double()
    sample = torch.zeros(2 * size, dtype=torch.long)
    with torch.no_grad():
        relaxation = bounded(network, box, intervals=True)
        found = relaxation.bounds[-1].interval
        lower = torch.cat([found.lower, -found.upper], 1)[0]
        if mode != "ibp":
            relaxation = Relaxation(network, relaxation.bounds[0].interval)
            bound_by_crown(relaxation, search=search_slopes(Ascent()) if mode == "alpha-crown-tight" else None)
            lower = torch.maximum(lower, lower_of_rows(relaxation, rows)[0])
        if mode.startswith("alpha"):
            lower = torch.maximum(lower, ascend(relaxation, len(network.ops) - 1, rows, sample, Ascent()).lower)
    return -(lower[:size] + lower[size:]).mean()


def theirs(model: nn.Module, box: Any, mode: str) -> Tensor:
    """The mean width of auto_LiRPA's bounds of the outputs."""
    import numpy as np
    import torch

    from verifiable_relu.search.solvers.auto_lirpa_import import library, library_settings

    middle = (box.lower + box.upper) / 2
    options = {"conv_mode": "matrix", "optimize_bound_args": {"iteration": 20}}
    with library_settings(torch.float64):
        usual = torch.get_default_dtype()
        # Some of its slopes are in the default precision, whatever the network's is.
        torch.set_default_dtype(torch.float64)
        try:
            module = library.BoundedModule(model, torch.zeros_like(middle), options, device="cpu")
            x = library.BoundedTensor(middle, library.PerturbationLpNorm(norm=np.inf, x_L=box.lower, x_U=box.upper))
            with torch.set_grad_enabled(mode == "CROWN-Optimized"):
                lower, upper = module.compute_bounds(x=(x,), method=mode)
        finally:
            torch.set_default_dtype(usual)
    return (upper - lower).detach().mean()


def measured(name: str, mode: str, limit: float) -> Record:
    """The fields of a record ``width``: figures of all draws.

    Raises:
        Late, or what one of the two raised.
    """
    import torch

    from verifiable_relu.ir.interval import Interval
    from verifiable_relu.readers import from_torch

    ratios: list[float] = []
    seconds: tuple[list[float], list[float]] = [], []
    for seed in SEEDS:
        model, shape = drawn(name, seed)
        network = from_torch(model, shape, exact=True)
        center = torch.rand(1, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for eps in EPS:
            box, widths = Interval(center - eps, center + eps), []
            asked = partial(ours, network, box, mode), partial(theirs, model, box, MODES[mode])
            for work, taken in zip(asked, seconds, strict=True):
                with limited(limit):
                    start = time.process_time()
                    widths.append(float(work()))
                    taken.append(time.process_time() - start)
            ratios.append(widths[0] / widths[1] if widths[1] > 0 else 1.0)
    medians = (statistics.median(each) for each in (ratios, *seconds))
    figures = dict(zip(("median", "ours", "theirs"), medians, strict=True))
    figures |= {"worst": max(ratios), "best": min(ratios)}
    return {"draws": len(ratios), **{key: float(f"{value:.5g}") for key, value in figures.items()}}


def measure(asked: argparse.Namespace, records: Records) -> None:
    """Measure what has no record for the version of auto_LiRPA at hand."""
    if asked.library:
        sys.path.insert(0, str(asked.library))
    import torch

    from benchmarks.speed.bounds_library import library_version

    torch.set_num_threads(1)
    for name in (*POOLS, *operators()):
        if asked.only and name not in asked.only:
            continue
        for mode in asked.mode:
            about = {"operator": name, "mode": mode, "library": library_version()}
            if records.has("width", about) or records.has("refused", about):
                continue
            try:
                records.append("width", {**about, **measured(name, mode, asked.limit)})
            except (Exception, Late) as error:
                said = str(error).strip().split("\n")[0][:120] or f"more than {asked.limit:g} s"
                records.append("refused", {**about, "why": f"{type(error).__name__}: {said}"})


def page(records: Sequence[Record]) -> Page:
    """The page with a row for each operator and mode."""
    made = Page.headed("# Widths of bounds beside auto_LiRPA's", notes(records))
    latest = {(r["operator"], r["mode"], r["library"]): r for r in of(records, "width")}
    made.add(
        "Mean width of our bounds by that of auto_LiRPA's over 12 draws of each operator (`python -m "
        "benchmarks.speed.widths --help`): below 1, ours are tighter. Seconds are processor time of one draw, medians, "
        "with one thread; auto_LiRPA's contain the making of its module."
    )
    for mode, other in MODES.items():
        rows = [
            (
                name,
                library,
                *(f"{r[key]:.3f}" for key in ("median", "worst", "best")),
                f"{r['ours']:.3f}",
                f"{r['theirs']:.3f}",
            )
            for (name, its, library), r in latest.items()
            if its == mode
        ]
        head = ("operator", "auto_LiRPA", "width ours / theirs", "worst draw", "best draw", "our s", "their s")
        made.add(f"## `{mode}` and {other}", Table(head, rows))
        ratios = [r["median"] for (_, its, _), r in latest.items() if its == mode]
        if ratios:
            looser = sum(ratio > 1.02 for ratio in ratios)
            made.add(
                f"{len(ratios)} operators: median {statistics.median(ratios):.3f}; looser by more than 2 %: {looser}."
            )
    refused = [f"{r['operator']}, `{r['mode']}`: {r['why']}" for r in of(records, "refused")]
    if refused:
        made.add("## Not compared")
        made.bullets(refused)
    return made


def options(parser: argparse.ArgumentParser) -> None:
    """Add what is compared."""
    parser.add_argument("--library", type=Path, metavar="FOLDER", help="with another version of auto_LiRPA")
    parser.add_argument("--only", nargs="+", metavar="OPERATOR", help="these operators")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES), help="these modes")
    parser.add_argument("--limit", type=float, default=20, metavar="SECONDS", help="for one set of bounds (default 20)")


SCRIPT = Script("benchmarks.speed.widths", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
