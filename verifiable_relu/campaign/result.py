"""What is recorded of one instance."""

from __future__ import annotations

import math
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from functools import cache
from importlib.metadata import PackageNotFoundError, version
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
"""Of several reasons for not knowing, the first of these is given."""

_TRUST = (Trust.FLOAT, Trust.ROUNDED, Trust.EXACT, Trust.CHECKED)
"""From the weakest to the strongest."""

_PASSING = (Reason.ERROR, Reason.MEMORY, Reason.INTERRUPTED)


@cache
def versions() -> Mapping[str, str]:
    """The versions of this package, of Python and of the packages that compute, as far as they are installed."""
    found = {"verifiable_relu": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


Key = tuple[str, str, float, str]
"""What makes two runs the same: query digest, verifier, time limit, version of this package."""


@dataclass(frozen=True)
class Result:
    """The checked answer to one instance: one or more queries whose answers join.

    Attributes:
        onnx: the network, as the user named it.
        vnnlib: the property, as the user named it.
        verdict: *sat* only for a confirmed counterexample, *unsat* only if every query was proven.
        reason: why the work ended.
        method: the method that decided; several, joined by ``+``, where the queries needed different ones.
        seconds: time charged to the instance.
        trust: how far the verdict can be trusted, None while it is unknown.
        margin: the least over the queries, as in ``Outcome``; at the witness for sat; None where one has none.
        witness: the exact counterexample; for *unconfirmed* the point that was claimed to be one.
        outputs: what onnxruntime computes at the witness rounded to float32, flat.
        shape: of one input sample.
        detail: a sentence that a person can act on.
        stages: seconds by stage.
        unstable: unstable neurons, the most over the queries, None where not computed.
        network: digest of the network.
        query: digest of the queries; empty if the input was bad.
        verifier: ``repr`` of the verifier.
        timeout: the time limit in seconds.
        versions: of everything that took part.
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
    network: str = ""
    query: str = ""
    verifier: str = ""
    timeout: float = math.inf
    versions: Mapping[str, str] = field(default_factory=versions)

    @property
    def answer(self) -> str:
        """The verdict in one word for people: a time-out is told apart from other unknowns."""
        return "timed-out" if self.reason is Reason.TIMEOUT else str(self.verdict)

    @property
    def counterexample(self) -> np.ndarray | None:
        """The witness of a sat verdict as float32, in the shape of an input sample; else None."""
        if self.verdict is not Verdict.SAT or self.witness is None:
            return None
        return np.array([float(v) for v in self.witness]).astype(np.float32).reshape(self.shape)

    @property
    def final(self) -> bool:
        """Whether asking again would be a waste: neither bad input nor a fault that may have passed."""
        return bool(self.query) and self.reason not in _PASSING

    @property
    def key(self) -> Key:
        """What makes two runs the same."""
        return self.query, self.verifier, self.timeout, self.versions["verifiable_relu"]

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values; rationals and infinities as strings."""
        record: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("margin", "timeout"):
            if record[name] is not None and not math.isfinite(record[name]):
                record[name] = str(record[name])
        if self.witness is not None:
            record["witness"] = [str(v) for v in self.witness]
        return record

    @classmethod
    def from_json(cls, record: object) -> Result:
        """The result that ``to_json`` made a record of.

        Raises:
            ValueError: if it is no such record; says which field is at fault.
        """
        if not isinstance(record, dict) or record.keys() != _FIELDS.keys():
            raise ValueError(f"it is no object with the fields {', '.join(_FIELDS)}")
        read: dict[str, Any] = {}
        for name, convert in _FIELDS.items():
            try:
                read[name] = convert(record[name])
            except ValueError as error:
                raise ValueError(f"'{name}': {error}") from None
        found = cls(**read)
        if "verifiable_relu" not in found.versions:
            raise ValueError("'versions': the version of verifiable_relu is missing")
        if found.verdict is Verdict.SAT:
            if found.witness is None or found.outputs is None or found.trust is None:
                raise ValueError("'witness', 'outputs', 'trust': sat has all of them")
            if len(found.witness) != math.prod(found.shape):
                raise ValueError(f"'witness': {len(found.witness)} numbers are not of the shape {found.shape}")
        return found


Field = Callable[[Any], Any]
"""Takes a JSON value and gives that of a ``Result``; raises a ValueError for one that ``to_json`` would not make."""


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("not a text")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("not a count")
    return value


def _number(value: object) -> float:
    # Integers can be beyond all floats.
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
    "network": _text,
    "query": _text,
    "verifier": _text,
    "timeout": _extended,
    "versions": _named(_text),
}
"""Those of a record, in the order of ``Result``'s."""


def join(outcomes: Sequence[Outcome]) -> Outcome:
    """The answer to all queries of an instance: any sat is sat, all unsat is unsat, everything else unknown.

    The sat claims must have been confirmed.
    """
    stages: dict[str, float] = {}
    for outcome in outcomes:
        for stage, seconds in outcome.seconds.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    unstable = max((o.unstable for o in outcomes if o.unstable is not None), default=None)
    for outcome in outcomes:
        if outcome.verdict is Verdict.SAT:
            return Outcome(
                Verdict.SAT,
                outcome.reason,
                outcome.method,
                outcome.trust,
                outcome.margin,
                outcome.witness,
                outcome.detail,
                stages,
                unstable,
            )
    margins = [o.margin for o in outcomes if o.margin is not None]
    margin = min(margins) if len(margins) == len(outcomes) else None
    undecided = [o for o in outcomes if o.verdict is Verdict.UNKNOWN]
    if not undecided:
        trust = min((o.trust for o in outcomes if o.trust is not None), key=_TRUST.index, default=None)
        details = "; ".join(dict.fromkeys(o.detail for o in outcomes if o.detail))
        return Outcome(Verdict.UNSAT, Reason.PROVED, _methods(outcomes), trust, margin, None, details, stages, unstable)
    worst = min(undecided, key=lambda o: _SEVERITY.index(o.reason))
    detail = worst.detail
    if len(outcomes) > 1:
        detail = f"{len(undecided)} of {len(outcomes)} boxes are undecided: {detail}"
    known = {"margin": margin, "witness": worst.witness, "seconds": stages, "unstable": unstable}
    return Outcome.unknown(worst.reason, _methods(undecided), detail, **known)


def _methods(outcomes: Sequence[Outcome]) -> str:
    return "+".join(dict.fromkeys(o.method for o in outcomes))
