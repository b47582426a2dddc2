"""The record of one instance: its checked answer, and that record as JSON."""

from __future__ import annotations

import math
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from fractions import Fraction
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from verifiable_relu import __version__
from verifiable_relu.verifiers.base import Outcome, Reason, Trust, Verdict, Witness

_PACKAGES = ("torch", "numpy", "onnx", "onnxruntime", "highspy", "z3-solver", "auto_LiRPA")

_SEVERITY = (
    Reason.UNCONFIRMED,
    Reason.ERROR,
    Reason.MEMORY,
    Reason.UNSUPPORTED,
    Reason.INTERRUPTED,
    Reason.TIMEOUT,
    Reason.INCOMPLETE,
)
"""The reasons for an *unknown* by precedence: an instance takes the first one that any of its queries has."""

_TRUST = (Trust.FLOAT, Trust.ROUNDED, Trust.EXACT, Trust.CHECKED)
"""The trust labels, from the weakest to the strongest."""

REFUSED = "the checker refuses the certificate"
"""The beginning of the ``Result.detail`` where verifier and checker disagree (``Result.disputed``)."""

_PASSING = (Reason.ERROR, Reason.MEMORY, Reason.INTERRUPTED)
"""The reasons that may not hold in another run; instances with one of them are asked again."""


@cache
def versions() -> Mapping[str, str]:
    """The versions of this package, of Python, and of the installed packages that verdicts depend on, by name."""
    found = {"verifiable_relu": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@cache
def processor() -> str:
    """The processor's name, as the operating system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def now() -> str:
    """The date and the time of day, to the second and in UTC, as ISO 8601 writes them."""
    return datetime.now(UTC).isoformat(timespec="seconds")


Key = tuple[str, str, str]
"""The key of a record: query digest, ``repr`` of the verifier, version of this package."""


@dataclass(frozen=True, repr=False)
class Result:
    """The checked answer to one instance: one or more queries whose answers join.

    Attributes:
        onnx: the network's file, as the user named it.
        vnnlib: the property file, as the user named it.
        verdict: *sat* only for a confirmed counterexample, *unsat* only if every query was proven.
        reason: why the work ended.
        method: the method that decided; where different methods decided the queries, all of them joined by ``+``.
        seconds: the time charged to the instance.
        trust: how far the verdict can be trusted; None for *unknown*.
        margin: for *sat* the margin at the witness, otherwise the least of the queries' margins (``Outcome``); None if
            a query has no margin.
        witness: the exact counterexample; with the reason *unconfirmed*, the point that was claimed to be one.
        outputs: the outputs that onnxruntime computes at the witness rounded to float32, flat.
        shape: the shape of one input sample.
        detail: a sentence for the user, such as why the verdict is *unknown*.
        stages: the time in seconds, by stage.
        unstable: the largest number of unstable neurons of any query; None where none was computed.
        subproblems: the number of sub-problems of all queries that were bounded; None where a method did not count.
        network: the digest of the network.
        query: the digest of the queries; empty if the input was bad.
        verifier: the ``repr`` of the verifier.
        timeout: the time limit in seconds.
        versions: the versions of the packages that took part, by name.
        files: the digest of the bytes of the instance's files (``Loader.files``); empty where it does not tell what is
            asked.
        arithmetic: of what runs the network, about which the verdict is (``Network.arithmetic``).
        date: when the answer was known (``now``); empty in records of older versions, which have nothing of what
            follows.
        processor: the name of the processor that found it.
        command: the command line that asked; empty where a Python program did.
        processor_seconds: the processor time charged to the instance, that of solvers' own processes included; None
            where none is known.
        memory: the most bytes that the process which found the answer had had resident until then, for whatever; None
            where it is not known.
        certificate: the file of the verdict's certificate; empty where none was written.
        mended: how the network's file was read where the standard does not say it (``Network.mended``).
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
    date: str = field(default_factory=now)
    processor: str = field(default_factory=processor)
    command: str = ""
    processor_seconds: float | None = None
    memory: int | None = None
    certificate: str = ""
    mended: tuple[str, ...] = ()

    def __repr__(self) -> str:
        margin = "" if self.margin is None else f", margin {self.margin:.6g}"
        return f"<Result: {self.answer} ({self.reason} by {self.method or 'nothing'}){margin}, {self.seconds:.2f} s>"

    @property
    def answer(self) -> str:
        """The verdict as commands print it: sat, unsat, unknown, or timed-out for an *unknown* for want of time."""
        return "timed-out" if self.reason is Reason.TIMEOUT else str(self.verdict)

    @property
    def disputed(self) -> bool:
        """Whether a verdict was claimed whose certificate the checker refused, so that one of the two is wrong."""
        return self.reason is Reason.UNCONFIRMED and self.detail.startswith(REFUSED)

    @property
    def counterexample(self) -> np.ndarray | None:
        """The counterexample of a *sat* verdict rounded to float32, shaped as an input sample; None otherwise."""
        if self.verdict is not Verdict.SAT or self.witness is None:
            return None
        return np.array([float(v) for v in self.witness]).astype(np.float32).reshape(self.shape)

    @property
    def final(self) -> bool:
        """Whether another run would give the same answer: false for bad input and for errors that may not recur."""
        return bool(self.query) and self.reason not in _PASSING

    @property
    def key(self) -> Key:
        """The key of the record: runs with equal keys and equal time limits are the same run."""
        return self.query, self.verifier, self.versions["verifiable_relu"]

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys by which the record is found: ``key``, and the one that needs no reading of the files."""
        return (self.key, (self.files, *self.key[1:])) if self.files else (self.key,)

    def answers(self, timeout: float) -> bool:
        """Whether another run with a time limit in seconds would add nothing.

        A decided instance stays decided, whatever the limit. An undecided one may be decided with a longer limit,
        unless the method does not take it at all.
        """
        decided = self.verdict is not Verdict.UNKNOWN or self.reason is Reason.UNSUPPORTED
        return self.final and (decided or timeout <= self.timeout)

    @property
    def certain(self) -> bool:
        """Whether nothing is left to certify: the verdict is checked, or there is none."""
        return self.verdict is Verdict.UNKNOWN or self.trust is Trust.CHECKED

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values, with rationals and infinities as strings."""
        record: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("margin", "timeout"):
            if record[name] is not None and not math.isfinite(record[name]):
                record[name] = str(record[name])
        if self.witness is not None:
            record["witness"] = [str(v) for v in self.witness]
        return record

    @classmethod
    def from_json(cls, record: object) -> Result:
        """The result whose ``to_json`` is ``record``.

        Raises:
            ValueError: if ``to_json`` makes no such record; the message names the field at fault.
        """
        # Records of older versions have no digest of files, are about real arithmetic, and say nothing of the machine.
        older: dict[str, Any] = dict.fromkeys(("files", "date", "processor", "command", "certificate"), "")
        older |= {"arithmetic": "real", "processor_seconds": None, "memory": None, "mended": ()}
        if not isinstance(record, dict) or {**older, **record}.keys() != _FIELDS.keys():
            raise ValueError(f"not an object with the fields {', '.join(_FIELDS)}")
        read: dict[str, Any] = {}
        for name, convert in _FIELDS.items():
            try:
                read[name] = convert(record[name]) if name in record else older[name]
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


Field = Callable[[Any], Any]
"""A function from the JSON value of a record's field to the value of the ``Result``'s field.

It raises a ValueError for a value that ``to_json`` does not make.
"""


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("not a text")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("not a count")
    return value


def _number(value: object) -> float:
    # A JSON integer can exceed the range of float64.
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        raise ValueError("not a finite number")
    return float(value)


def _extended(value: object) -> float:
    return float(value) if value in ("inf", "-inf") else _number(value)


def _rational(value: object) -> Fraction:
    if not re.fullmatch(r"-?[0-9]+(/0*[1-9][0-9]*)?", _text(value)):
        raise ValueError("not a rational number")
    return Fraction(_text(value))


def _maybe(field: Field) -> Field:
    return lambda value: None if value is None else field(value)


def _several(field: Field) -> Field:
    def convert(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise ValueError("not a list")
        return tuple(map(field, value))

    return convert


def _named(field: Field) -> Field:
    def convert(value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError("not an object")
        return {name: field(member) for name, member in value.items()}

    return convert


_FIELDS: dict[str, Field] = {
    "onnx": _text,
    "vnnlib": _text,
    "verdict": Verdict,
    "reason": Reason,
    "method": _text,
    "seconds": _number,
    "trust": _maybe(Trust),
    "margin": _maybe(_extended),
    "witness": _maybe(_several(_rational)),
    "outputs": _maybe(_several(_number)),
    "shape": _several(_count),
    "detail": _text,
    "stages": _named(_number),
    "unstable": _maybe(_count),
    "subproblems": _maybe(_count),
    "network": _text,
    "query": _text,
    "verifier": _text,
    "timeout": _extended,
    "versions": _named(_text),
    "files": _text,
    "arithmetic": _text,
    "date": _text,
    "processor": _text,
    "command": _text,
    "processor_seconds": _maybe(_number),
    "memory": _maybe(_count),
    "certificate": _text,
    "mended": _several(_text),
}
"""The fields of a record, in the order of ``Result``'s."""


def join(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of an instance: *sat* if a query is, *unsat* if all queries are, otherwise *unknown*.

    Args:
        outcomes: those of the queries, at least one, whose *sat* claims have been confirmed. An instance that is *sat*
            may have outcomes of some queries only.
    """
    stages: dict[str, float] = {}
    for outcome in outcomes:
        for stage, seconds in outcome.seconds.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    unstable = max((o.unstable for o in outcomes if o.unstable is not None), default=None)
    counts = [o.subproblems for o in outcomes if o.subproblems is not None]
    subproblems = sum(counts) if len(counts) == len(outcomes) else None
    for outcome in outcomes:
        if outcome.verdict is Verdict.SAT:
            return replace(outcome, seconds=stages, unstable=unstable, subproblems=subproblems, proof=None)
    margins = [o.margin for o in outcomes if o.margin is not None]
    margin = min(margins) if len(margins) == len(outcomes) else None
    undecided = [o for o in outcomes if o.verdict is Verdict.UNKNOWN]
    if not undecided:
        trust = min((o.trust for o in outcomes if o.trust is not None), key=_TRUST.index, default=None)
        details = "; ".join(dict.fromkeys(o.detail for o in outcomes if o.detail))
        method = _methods(outcomes)
        return Outcome(
            Verdict.UNSAT, Reason.PROVED, method, trust, margin, None, details, stages, unstable, subproblems
        )
    worst = min(undecided, key=lambda o: _SEVERITY.index(o.reason))
    detail = worst.detail
    if len(outcomes) > 1:
        detail = f"{len(undecided)} of {len(outcomes)} boxes are undecided: {detail}"
    known = {
        "margin": margin, "witness": worst.witness, "seconds": stages, "unstable": unstable, "subproblems": subproblems,
    }  # fmt: skip
    return Outcome.unknown(worst.reason, _methods(undecided), detail, **known)


def _methods(outcomes: Sequence[Outcome]) -> str:
    return "+".join(dict.fromkeys(o.method for o in outcomes))
