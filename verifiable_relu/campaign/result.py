"""The record of one instance: its checked answer, and that record as JSON."""

from __future__ import annotations

import math
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from fractions import Fraction
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from verifiable_relu import __version__
from verifiable_relu.search.outcomes import Outcome, Reason, Trust, Verdict, Witness

_PACKAGES = ("torch", "numpy", "onnx", "onnxruntime", "highspy", "z3-solver", "auto_LiRPA")

_SEVERITY = (
    *(Reason.UNCONFIRMED, Reason.ERROR, Reason.MEMORY, Reason.UNSUPPORTED),
    *(Reason.INTERRUPTED, Reason.TIMEOUT, Reason.INCOMPLETE),
)
"""The reasons for an *unknown* by precedence: an instance takes the first one that any of its queries has."""

_WORDS = {
    Reason.PROVED: "verified by", Reason.REFUTED: "violated, found by", Reason.INCOMPLETE: "not decided by",
    Reason.TIMEOUT: "time limit reached in", Reason.MEMORY: "out of memory in", Reason.UNSUPPORTED: "not supported by",
    Reason.UNCONFIRMED: "counterexample not confirmed, by", Reason.INTERRUPTED: "interrupted in",
    Reason.ERROR: "failed in",
}  # fmt: skip
_TRUST = (Trust.FLOAT, Trust.ROUNDED, Trust.EXACT, Trust.CHECKED)  # The trust labels, from the weakest to the strongest
REFUSED = "the checker refuses the certificate"  # Begins the detail of a dispute

DISPUTED, BAD_INPUT, FAULT = 3, 2, 1
"""The exit statuses of commands where checker and verifier disagree, for bad input, and for a fault of the program."""

_PASSING = (Reason.ERROR, Reason.MEMORY, Reason.INTERRUPTED)
"""The reasons that may not hold in another run; instances with one of them are asked again."""


@cache
def versions() -> Mapping[str, str]:
    """Return the versions of this package, of Python, and of what verdicts depend on, by name."""
    found = {"verifiable_relu": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@cache
def processor() -> str:
    """Return the processor's name, as the operating system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


Key = tuple[str, str, str]  # The key of a record: query digest, repr of the verifier, version of this package


@dataclass(frozen=True, repr=False)
class Result:
    """The checked answer to one instance: one or more queries whose answers join.

    Attributes:
        onnx, vnnlib: the network's file and the property file, as the user named them.
        verdict: *sat* only for a confirmed counterexample, *unsat* only if every query was proven.
        reason, method: why the work ended, and the method that decided; different ones are joined by ``+``.
        seconds, processor_seconds: the time charged to the instance, and processor time, that of solvers' own processes
            included; None where it is not known.
        trust: how far the verdict can be trusted; None for *unknown*.
        margin: for *sat* the margin at the witness, otherwise the least of the queries' margins; None if one has none.
        witness: the exact counterexample; with the reason *unconfirmed*, the point that was claimed to be one.
        outputs: the outputs that onnxruntime computes at the witness rounded to float32, flat.
        shape: the shape of one input sample.
        detail: a sentence for the user, such as why the verdict is *unknown*.
        stages: the time in seconds, by stage.
        unstable: the largest number of unstable neurons of any query; None where none was computed.
        subproblems: the number of sub-problems of all queries that were bounded; None where a method did not count.
        network, query: the digests of the network and of the queries; empty if the input was bad.
        verifier, timeout: the ``repr`` of the verifier, and the time limit in seconds.
        versions: the versions of the packages that took part, by name.
        files: the digest of the bytes of the instance's files (``Loader.files``).
        arithmetic: of what runs the network, about which the verdict is (``Network.arithmetic``).
        date, processor: when the answer was known, in UTC, and the name of the processor that found it.
        command: the command line that asked; empty where a Python program did.
        memory: the most bytes that the process which found the answer had had resident until then; None where unknown.
        certificate: the file of the verdict's certificate; empty where none was written.
        repairs: how the network's file was read where the standard does not say it (``Source.repairs``).
        assignment: the counterexample in the form of the property file; no part of the record.
    """

    onnx: str
    vnnlib: str
    verdict: Verdict
    reason: Reason
    method: str
    seconds: float
    trust: Trust | None = None
    margin: float | None = None
    witness: Witness | None = None
    outputs: tuple[float, ...] | None = None
    shape: tuple[int, ...] = ()
    detail: str = ""
    stages: Mapping[str, float] = field(default_factory=dict)
    unstable: int | None = None
    subproblems: int | None = None
    network: str = ""
    query: str = ""
    verifier: str = ""
    timeout: float = math.inf
    versions: Mapping[str, str] = field(default_factory=versions)
    files: str = ""
    arithmetic: str = "real"
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    processor: str = field(default_factory=processor)
    command: str = ""
    processor_seconds: float | None = None
    memory: int | None = None
    certificate: str = ""
    repairs: tuple[str, ...] = ()
    assignment: str = field(default="", compare=False)

    def __repr__(self) -> str:
        margin = "" if self.margin is None else f", margin {self.margin:.6g}"
        return f"<Result: {self.answer} ({self.ending}){margin}, {self.seconds:.2f} s>"

    @property
    def ending(self) -> str:
        """The end of the work in words, such as "verified by bab"."""
        return f"{_WORDS[self.reason]} {self.method or 'reading its files'}"

    @property
    def answer(self) -> str:
        """The verdict as commands print it: sat, unsat, unknown, or timed-out for an *unknown* at the time limit."""
        return "timed-out" if self.reason is Reason.TIMEOUT else str(self.verdict)

    @property
    def disputed(self) -> bool:
        """Return True if the checker refused the certificate of a claimed *sat*: one of the two is wrong."""
        return self.reason is Reason.UNCONFIRMED and self.detail.startswith(REFUSED)

    @property
    def complaint(self) -> tuple[int, str]:
        """The exit status that a command owes to the result, 0 for most, and the line that says why."""
        if self.disputed:
            return DISPUTED, f"{self.vnnlib}: {self.detail}"
        if self.reason is not Reason.ERROR:
            return 0, ""
        return (
            (FAULT, f"{self.vnnlib}: fault of {self.method}: {self.detail}")
            if self.method
            else (BAD_INPUT, self.detail)
        )

    @property
    def counterexample(self) -> np.ndarray | None:
        """The counterexample of a *sat* verdict rounded to float32, shaped as an input sample; None otherwise."""
        if self.verdict is not Verdict.SAT or self.witness is None:
            return None
        return np.array([float(v) for v in self.witness]).astype(np.float32).reshape(self.shape)

    @property
    def final(self) -> bool:
        """Return True if another run would give the same answer: not for bad input or errors that may not recur."""
        return bool(self.query) and self.reason not in _PASSING

    @property
    def key(self) -> Key:
        """The key of the record: runs with equal keys and equal time limits are the same run."""
        return self.query, self.verifier, self.versions["verifiable_relu"]

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys by which the record is found: ``key``, and the one that needs no reading of the files."""
        return (self.key, (self.files, *self.key[1:])) if self.files else (self.key,)

    def answers(self, timeout: float, checked: bool = False) -> bool:
        """Return True if another run with a time limit, in seconds, would add nothing.

        An undecided instance may be decided with a longer limit, unless the method does not take it at all. With
        ``checked``, a verdict without a checked certificate is no answer.
        """
        if checked and self.verdict is not Verdict.UNKNOWN and self.trust is not Trust.CHECKED:
            return False
        decided = self.verdict is not Verdict.UNKNOWN or self.reason is Reason.UNSUPPORTED
        return self.final and (decided or timeout <= self.timeout)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values, with rationals and infinities as strings."""
        record: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.compare}
        for name in ("margin", "timeout"):
            if record[name] is not None and not math.isfinite(record[name]):
                record[name] = str(record[name])
        if self.witness is not None:
            record["witness"] = [str(v) for v in self.witness]
        return record

    @classmethod
    def from_json(cls, record: object) -> Result:
        """Return the result whose ``to_json`` is ``record``; a ValueError names the field at fault if there is none."""
        kinds = _kinds()
        if not isinstance(record, dict) or "versions" not in record:
            raise ValueError("not an object with the fields of a result")
        if record.keys() != kinds.keys():
            other = ", ".join(map(repr, sorted(record.keys() ^ kinds.keys())))
            written = record["versions"]
            by = written.get("verifiable_relu") if isinstance(written, dict) else None
            raise ValueError(f"a record of another version of verifiable_relu ({by}), which differs in {other}")
        read: dict[str, Any] = {}
        for name, kind in kinds.items():
            try:
                read[name] = _decoded(kind, record[name])
            except ValueError as error:
                raise ValueError(f"'{name}': {error}") from None
        found = cls(**read)
        if "verifiable_relu" not in found.versions:
            raise ValueError("'versions': the version of verifiable_relu is missing")
        if found.verdict is Verdict.SAT:
            if found.witness is None or found.outputs is None or found.trust is None:
                raise ValueError("'witness', 'outputs', 'trust': one is missing from a sat record")
            if len(found.witness) != math.prod(found.shape):
                raise ValueError(f"'witness': {len(found.witness)} numbers do not fill the shape {found.shape}")
        return found


class Observer:
    """Observer of a campaign's progress, which may also know earlier answers; this one does nothing."""

    has_records = False  # Whether there can be earlier answers

    def find(self, key: Key, timeout: float, checked: bool) -> Result | None:
        """Return an earlier answer to an instance (``Result.answers``); None if there is none."""
        return None

    def stage(self, name: str, done: int, total: int) -> None:
        """Take the progress of a stage of the verifier: ``done`` of ``total`` queries."""

    def result(self, number: int, result: Result, recorded: bool) -> None:
        """Take the answer to the instance with this number; ``recorded`` if it is from an earlier run."""


QUIET = Observer()


@cache
def _kinds() -> dict[str, Any]:
    kinds = get_type_hints(Result)
    return {f.name: kinds[f.name] for f in fields(Result) if f.compare}


def _decoded(kind: Any, value: Any) -> Any:
    """Return the value of a type that a JSON value encodes; a ValueError for what ``to_json`` never writes."""
    parts = get_args(kind)
    if type(None) in parts:
        return None if value is None else _decoded(parts[0], value)
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_decoded(parts[0], member) for member in value)
    if get_origin(kind) is Mapping and isinstance(value, dict):
        return {name: _decoded(parts[1], member) for name, member in value.items()}
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind(value)
    if kind is Fraction and isinstance(value, str) and re.fullmatch(r"-?[0-9]+(/0*[1-9][0-9]*)?", value):
        return Fraction(value)
    if kind is float and value in ("inf", "-inf"):
        return float(value)
    if kind is str and isinstance(value, str):
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # A JSON integer can exceed the range of float64.
    if kind is float and number and abs(value) <= sys.float_info.max:
        return float(value)
    if kind is int and number and isinstance(value, int) and value >= 0:
        return value
    raise ValueError(f"not of the type {kind.__name__ if isinstance(kind, type) else kind}")


def join(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome of an instance: *sat* if a query is, *unsat* if all queries are, otherwise *unknown*.

    Claims of *sat* have been confirmed. An instance that is *sat* may have outcomes of some queries only.
    """
    stages: dict[str, float] = {}
    for outcome in outcomes:
        for stage, seconds in outcome.seconds.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    unstable = max((o.unstable for o in outcomes if o.unstable is not None), default=None)
    counts = [o.subproblems for o in outcomes if o.subproblems is not None]
    margins = [o.margin for o in outcomes if o.margin is not None]
    whole: dict[str, Any] = {
        "margin": min(margins) if len(margins) == len(outcomes) else None, "seconds": stages, "unstable": unstable,
        "subproblems": sum(counts) if len(counts) == len(outcomes) else None,
    }  # fmt: skip
    for outcome in outcomes:
        if outcome.verdict is Verdict.SAT:
            return replace(outcome, **{**whole, "margin": outcome.margin})
    undecided = [o for o in outcomes if o.verdict is Verdict.UNKNOWN]
    method = "+".join(dict.fromkeys(o.method for o in undecided or outcomes))
    if not undecided:
        trust = min((o.trust for o in outcomes if o.trust is not None), key=_TRUST.index, default=None)
        detail = "; ".join(dict.fromkeys(o.detail for o in outcomes if o.detail))
        return replace(outcomes[0], method=method, trust=trust, detail=detail, **whole)
    worst = min(undecided, key=lambda o: _SEVERITY.index(o.reason))
    boxes = f"{len(undecided)} of {len(outcomes)} boxes undecided: " if len(outcomes) > 1 else ""
    return replace(worst, trust=None, method=method, detail=boxes + worst.detail, **whole)
