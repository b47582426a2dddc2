"""What is recorded of one instance."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
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

_TRUST = (Trust.FLOAT, Trust.ROUNDED, Trust.EXACT)
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
    def from_json(cls, record: Mapping[str, Any]) -> Result:
        """The result that ``to_json`` made a record of.

        Raises:
            KeyError, TypeError, ValueError: if it is no such record.
        """
        read: dict[str, Any] = dict(record)
        read["verdict"], read["reason"] = Verdict(record["verdict"]), Reason(record["reason"])
        read["trust"] = None if record["trust"] is None else Trust(record["trust"])
        read["margin"] = None if record["margin"] is None else float(record["margin"])
        read["timeout"] = float(record["timeout"])
        read["shape"] = tuple(record["shape"])
        for name, convert in (("witness", Fraction), ("outputs", float)):
            read[name] = None if record[name] is None else tuple(map(convert, record[name]))
        return cls(**read)


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
