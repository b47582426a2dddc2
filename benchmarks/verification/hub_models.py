"""Do models of timm, transformers and torchvision go the whole way, from GELU to verdicts about a file with ReLU?

    python -m benchmarks.verification.hub_models
    python -m benchmarks.verification.hub_models --model "timm ViT" "transformers BERT" --timeout 60

Small configurations with random weights (``hub_kinds``) learn a toy task, are hardened by ``verifiable_relu.harden``,
and written as ONNX with ReLU. The change by the swap is measured and bounded, the file is compared with the model in
onnxruntime, and asked whether it keeps the class of one input in balls. A model whose package is not installed is
skipped; each other one leaves a record for each seed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.common.markup import Cell, Table
from benchmarks.common.records import Record, Records, notes, of
from benchmarks.common.script import Script
from benchmarks.common.tables import Page
from verifiable_relu.errors import InputError

EPS = ("1e-4", "1e-3", "1e-2")
"""The radii of the balls."""

METHODS = ("crown", "auto")
"""The methods that are asked."""


def measure(asked: argparse.Namespace, records: Records) -> None:
    """A record per model and seed (``hub_measuring.measured``).

    Raises:
        InputError: for a model that is not in the list.
    """
    import torch

    from benchmarks.common.progress import bars
    from benchmarks.verification.hub_kinds import KINDS
    from benchmarks.verification.hub_measuring import measured

    torch.set_num_threads(1)
    for name in asked.model:
        if name not in KINDS:
            raise InputError(f"no model is called '{name}'; there are {', '.join(KINDS)}")
    chosen = [name for name in asked.model or KINDS if KINDS[name].installed]
    with bars() as bar:
        for name in bar.track(chosen, description="models"):
            for seed in range(asked.seeds):
                title = {"model": name, "seed": seed, "timeout": asked.timeout}
                if not records.has("asked", title):
                    records.append("asked", {**title, **measured(name, seed, EPS, METHODS, asked.timeout)})


def way(found: Sequence[Record]) -> Table:
    """A row per model: gates, accuracies, the change by the swap, and the file."""
    rows: list[tuple[Cell, ...]] = []
    for record in found:
        around = record.get("around", {})
        rows.append((
            record["model"], record["parameters"], record.get("gates"), record.get("before"), record.get("hard"),
            record.get("change"), record.get("proven"), *(around.get(eps) for eps in EPS), record.get("difference"),
            record.get("neurons"), record.get("hardening"),
        ))  # fmt: skip
    near = [f"proven, ε={eps}" for eps in EPS]
    ends = ("measured change", "proven, all inputs", *near, "file off by")
    columns = ("model", "parameters", "gates", "accuracy", "with ReLU", *ends, "neurons", "hardening, s")
    forms = dict.fromkeys(("accuracy", "with ReLU"), ".3f") | dict.fromkeys(ends, ".1e") | {"hardening, s": ".1f"}
    return Table(columns, rows, forms)


def verdicts(found: Sequence[Record]) -> Table:
    """A row per model: for each method and radius the answer and the processor seconds."""
    rows: list[tuple[Cell, ...]] = []
    for record in found:
        cells = [record.get("answers", {}).get(method, {}).get(eps) for method in METHODS for eps in EPS]
        rows.append((record["model"], *(cell and f"{cell['answer']}, {cell['seconds']:.1f}" for cell in cells)))
    return Table(("model", *(f"{method}, ε={eps}" for method in METHODS for eps in EPS)), rows, {})


def worse(found: Sequence[Record]) -> list[str]:
    """The questions that ``crown`` decides and ``auto`` does not, in words."""
    decided = ("sat", "unsat")
    return [
        f"{record['model']} at {eps}"
        for record in found
        for eps in EPS
        if "answers" in record
        and record["answers"]["crown"][eps]["answer"] in decided
        and record["answers"]["auto"][eps]["answer"] not in decided
    ]


def page(records: Sequence[Record]) -> Page:
    """Both tables, what ended early and why."""
    found = of(records, "asked")
    made = Page.headed("# Models of timm, transformers and torchvision, the whole way", notes(records))
    packages = sorted({record["package"] for record in found})
    seeds = sorted({record["seed"] for record in found})
    lost = worse(found)
    made.add(
        f"Of {', '.join(packages)}; seeds {', '.join(map(str, seeds))}. Random weights learn which quarter of a 16×16 "
        "image is brighter, or in which quarter of the vocabulary the first of four tokens is; then hardening to "
        "λ = 160, ReLU, and a file. *measured change*: the largest change of an output by the swap on the data; "
        "*proven*: for all inputs in [0, 1], and for the balls around one input, – where no bound is known or it says "
        "nothing. *file off by*: the largest difference of onnxruntime's outputs for the file from the model's. Balls "
        "of the language models are around what the embedding makes of one sentence.",
        way(found),
        "Whether the file keeps its class in the ball around one input: the answer, and processor seconds, reading "
        f"included. `crown` decides what `auto` does not: {', '.join(lost) or 'nowhere'}.",
        verdicts(found),
    )
    unread = [f"{record['model']}: {record['unread']}" for record in found if "unread" in record]
    if unread:
        made.add("No bound of the change, since the model with gates is not read:")
        made.bullets(unread)
    ended = [f"{record['model']}, seed {record['seed']}: {record['failed']}" for record in found if record["failed"]]
    if ended:
        made.add("Ended early:")
        made.bullets(ended)
    return made


def options(parser: argparse.ArgumentParser) -> None:
    """Which models, how many seeds, and the time for a question."""
    parser.add_argument("--model", nargs="+", default=[], help="names of models (default all)")
    parser.add_argument("--seeds", type=int, default=1, help="how many, from 0 on (default 1)")
    parser.add_argument("--timeout", type=float, default=15.0, help="seconds for a question (default 15)")


SCRIPT = Script("benchmarks.verification.hub_models", __doc__, options, measure, page)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
