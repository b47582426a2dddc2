"""Campaigns: answers of several queries, checks of claims, faults of verifiers, records and resumption."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import pytest

from tests.support.scripted import NETWORK, Answer, Scripted, at_least, case, truth
from verifiable_relu import __version__
from verifiable_relu.bounds.alpha import Ascent
from verifiable_relu.campaign import Case, Result, Store, console, run
from verifiable_relu.campaign.result import join
from verifiable_relu.campaign.store import COLUMNS
from verifiable_relu.search.bab.verifier import Bab
from verifiable_relu.search.batch import QueryBatch, described
from verifiable_relu.search.bounding import Crown
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Outcome, Reason, Trust, Verdict
from verifiable_relu.search.solvers.smt import Smt
from verifiable_relu.search.split import InputSplit
from verifiable_relu.spec import Query

SAT, UNSAT, UNKNOWN = Verdict.SAT, Verdict.UNSAT, Verdict.UNKNOWN


def kept(cases: Sequence[Case | Result], verifier: Scripted, folder: Path | str) -> list[Result]:
    """The results of a campaign whose records are kept."""
    with Store(folder) as store:
        return run(cases, verifier, store)


def known(folder: Path) -> int:
    """The number of final records in a folder."""
    with Store(folder) as store:
        return len(store)


def table(folder: Path) -> list[dict[str, str]]:
    """The rows of results.csv."""
    return list(csv.DictReader(io.StringIO((folder / "results.csv").read_text())))


def test_a_record_has_the_answer_its_reason_and_its_counterexample() -> None:
    (refuted, proved) = run([case(0.5), case(2, 3)], Scripted())
    assert refuted.witness == (Fraction(1),) and refuted.outputs == (1.0,) and refuted.margin == -0.5
    assert refuted.trust is Trust.EXACT and refuted.reason is Reason.REFUTED and refuted.method == "look"
    assert refuted.counterexample is not None and refuted.counterexample.tolist() == [1.0]
    assert set(refuted.stages) == {"look", "confirm"} and refuted.seconds >= sum(refuted.stages.values())
    assert proved.margin == 1 and proved.stages == {"look": 0.002} and proved.unstable == 0
    assert proved.network == NETWORK.digest and proved.counterexample is None
    assert refuted.query == at_least(0.5).digest and proved.query not in (at_least(2).digest, at_least(3).digest)
    assert proved.verifier == described(Scripted(), TimeBudget()) and proved.timeout == 10
    assert proved.versions["verifiable_relu"] == __version__ and proved.versions["torch"]


def test_the_key_of_a_method_has_the_options_that_are_not_the_defaults() -> None:
    limits = TimeBudget(memory=1 << 20, named=("memory",))
    assert described(Bab(), TimeBudget()) == 'bab({"version": 1})'
    assert described(Smt(whole=True), limits) == 'smt-exact({"version": 1, "whole": true, "memory": 1048576})'
    # When processes share the work changes no answer.
    assert described(InputSplit(share_after_s=9.0), limits) == described(InputSplit(), limits)
    searched = Crown(ascent=Ascent(steps=9))
    assert json.loads(described(searched, TimeBudget())[6:-1])["ascent"]["steps"] == 9


def out(verdict: Verdict, reason: Reason, method: str = "m", **more: object) -> Outcome:
    return Outcome(verdict, reason, method, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outcomes", "verdict", "reason"),
    [
        ([(UNSAT, Reason.PROVED)] * 2, UNSAT, Reason.PROVED),
        ([(UNSAT, Reason.PROVED), (UNKNOWN, Reason.TIMEOUT)], UNKNOWN, Reason.TIMEOUT),
        ([(UNKNOWN, Reason.ERROR), (SAT, Reason.REFUTED)], SAT, Reason.REFUTED),
        ([(UNKNOWN, Reason.INCOMPLETE), (UNKNOWN, Reason.TIMEOUT)], UNKNOWN, Reason.TIMEOUT),
        ([(UNKNOWN, Reason.TIMEOUT), (UNKNOWN, Reason.UNCONFIRMED)], UNKNOWN, Reason.UNCONFIRMED),
        ([(UNKNOWN, reason) for reason in Reason if reason not in (Reason.PROVED, Reason.REFUTED)], UNKNOWN, None),
    ],
)
def test_the_answers_for_the_boxes_of_a_case_join(
    outcomes: list[tuple[Verdict, Reason]], verdict: Verdict, reason: Reason | None
) -> None:
    joined = join([out(*o) for o in outcomes])
    assert joined.verdict is verdict and reason in (joined.reason, None)


def test_a_joined_proof_is_as_weak_as_its_weakest_part() -> None:
    parts = [
        out(UNSAT, Reason.PROVED, "a", trust=Trust.EXACT, margin=1.0, seconds={"s": 1.0, "t": 1.0}, unstable=3),
        out(UNSAT, Reason.PROVED, "b", trust=Trust.FLOAT, margin=0.5, seconds={"s": 2.0}),
        out(UNSAT, Reason.PROVED, "a", trust=Trust.ROUNDED, margin=2.0),
    ]
    joined = join(parts)
    assert (joined.trust, joined.margin, joined.method) == (Trust.FLOAT, 0.5, "a+b")
    assert joined.seconds == {"s": 3.0, "t": 1.0} and joined.unstable == 3
    assert join([*parts, out(UNSAT, Reason.PROVED)]).margin is None


def lying(query: Query) -> Outcome:
    """The outcome *sat* for any query, with a point that need not be a counterexample."""
    return Outcome(SAT, Reason.REFUTED, "liar", Trust.EXACT, -1.0, (query.property.box.bounds(0)[1],))


@pytest.mark.parametrize(
    "answer",
    [
        lying,
        lambda q: replace(lying(q), witness=None),
        lambda q: replace(lying(q), witness=()),
        lambda q: replace(lying(q), witness=(Fraction(9),)),
    ],
)
def test_a_false_counterexample_is_never_recorded_as_sat(answer: Answer) -> None:
    (result,) = run([case(2)], Scripted(answer))
    assert (result.verdict, result.reason, result.trust) == (UNKNOWN, Reason.UNCONFIRMED, None)
    assert result.detail and result.counterexample is None and result.margin is None


def test_a_liar_about_one_box_does_not_spoil_a_true_counterexample_of_another() -> None:
    (result, other) = run([case(2, 0.5), case(2, 3)], Scripted(lying))
    assert result.verdict is SAT
    assert other.verdict is UNKNOWN and "2 of 2 boxes" in other.detail


@pytest.mark.parametrize("margin", [math.nan, -1.0, -math.inf])
def test_a_proof_without_a_margin_is_no_proof(margin: float) -> None:
    (result,) = run([case(2)], Scripted(lambda q: replace(truth(q), margin=margin)))
    assert (result.verdict, result.reason, result.margin) == (UNKNOWN, Reason.ERROR, None)


def breaking(error: Exception) -> Answer:
    def answer(query: Query) -> Outcome:
        if query.property.unsafe[0][0].bound == -7:
            raise error
        return truth(query)

    return answer


@pytest.mark.parametrize(("error", "reason"), [(RuntimeError("broken"), Reason.ERROR), (MemoryError(), Reason.MEMORY)])
def test_a_verifier_that_breaks_costs_one_query(error: Exception, reason: Reason, tmp_path: Path) -> None:
    verifier = Scripted(breaking(error))
    cases = [case(t, name=str(i)) for i, t in enumerate([0.5, 2, 7, 3, 0.25, 7, 4])]
    results = kept(cases, verifier, tmp_path)
    assert [r.verdict for r in results] == [SAT, UNSAT, UNKNOWN, UNSAT, SAT, UNKNOWN, UNSAT]
    assert {results[2].reason, results[5].reason} == {reason}
    # What broke is asked again, the rest is not.
    again = Scripted()
    assert [r.verdict for r in kept(cases, again, tmp_path)][2] is UNSAT
    assert [len(queries) for queries in again.asked] == [2]


def test_records_survive_and_are_used_again(tmp_path: Path) -> None:
    infinite = replace(case(), queries=(Query(NETWORK, replace(at_least(1).property, unsafe=())),), vnnlib="never")
    timed_out = lambda q: Outcome.unknown(Reason.TIMEOUT, "slow")  # noqa: E731
    answer = lambda q: (  # noqa: E731
        timed_out(q) if q.property.unsafe and q.property.unsafe[0][0].bound == -5
        else truth(q) if q.property.unsafe
        else Outcome(UNSAT, Reason.PROVED, "look", Trust.EXACT, math.inf)
    )  # fmt: skip
    cases = [case(0.5, name="a"), case(2, 3, name="b"), case(5, name="c"), infinite]
    first = kept(cases, Scripted(answer), tmp_path)
    again = Scripted(answer)
    assert kept(cases, again, tmp_path) == first and not again.asked
    assert [json.loads(line)["vnnlib"] for line in (tmp_path / "records.jsonl").read_text().splitlines()] == [
        "a", "b", "c", "never",
    ]  # fmt: skip
    rows = table(tmp_path)
    assert list(rows[0]) == [*COLUMNS, "look seconds", "confirm seconds"]
    (counterexample,) = (tmp_path / "counterexamples").iterdir()
    assert rows[0]["counterexample"] == f"counterexamples/{counterexample.name}" and not rows[1]["counterexample"]
    assert counterexample.read_text() == "((X_0 1.0)\n (Y_0 1.0))\n"
    assert [row["look seconds"] for row in rows] == ["0.001000", "0.002000", "", ""]
    assert [(r["vnnlib"], r["answer"], r["reason"], r["trust"], r["margin"]) for r in rows] == [
        ("a", "sat", "refuted", "exact", "-0.5"), ("b", "unsat", "proved", "exact", "1.0"),
        ("c", "timed-out", "timeout", "", ""), ("never", "unsat", "proved", "exact", "inf"),
    ]  # fmt: skip
    renamed = kept([replace(cases[0], vnnlib="z")], again, tmp_path)
    assert renamed[0].vnnlib == "z" and not again.asked


def test_a_longer_limit_asks_again_what_it_could_decide_and_a_shorter_one_nothing(tmp_path: Path) -> None:
    reasons = {2: Reason.TIMEOUT, 3: Reason.UNSUPPORTED, 4: Reason.INCOMPLETE, 5: Reason.UNCONFIRMED}

    def answer(query: Query) -> Outcome:
        reason = reasons.get(int(-query.property.unsafe[0][0].bound))
        return truth(query) if reason is None else Outcome.unknown(reason, "look")

    def asked(limit: float) -> list[int]:
        """The instances that a run with a time limit asks."""
        verifier = Scripted(answer)
        results = kept([case(i, name=str(i), timeout=limit) for i in range(7)], verifier, tmp_path)
        assert [r.answer for r in results] == ["sat", "sat", "timed-out", *["unknown"] * 3, "unsat"]
        return [int(-query.property.unsafe[0][0].bound) for queries in verifier.asked for query in queries]

    assert asked(10) == list(range(7))
    assert asked(10) == [] and asked(5) == []
    assert asked(20) == [2, 4, 5]
    # The longest run counts, whatever came after it.
    assert asked(15) == [] and asked(20) == []


def test_an_answer_that_was_not_found_again_is_not_forgotten(tmp_path: Path) -> None:
    (result,) = kept([case(2)], Scripted(), tmp_path)
    with Store(tmp_path) as store:
        store.append(replace(result, verdict=UNKNOWN, reason=Reason.TIMEOUT, trust=None, timeout=100.0))
    verifier = Scripted()
    assert kept([case(2, timeout=1000)], verifier, tmp_path)[0].verdict is UNSAT and not verifier.asked


def test_another_method_or_version_asks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept([case(2)], Scripted(), tmp_path)
    for changed, verifier in ((case(2), replace(Scripted(), label="other")), (case(3), Scripted())):
        kept([changed], verifier, tmp_path)
        assert verifier.asked
    monkeypatch.setattr("verifiable_relu.campaign.runner.versions", lambda: {"verifiable_relu": "other"})
    verifier = Scripted()
    kept([case(2)], verifier, tmp_path)
    assert verifier.asked


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@dataclass(frozen=True)
class _Talkative(Scripted):
    """A verifier that tells where it stands, in a copy of its process too."""

    def claims(self, batch: QueryBatch) -> Iterator[tuple[int, Outcome]]:
        batch.budget.report_progress({"margin": -0.25, "sub-problems": 1234, "closed": 0.5})
        if os.fork() == 0:
            batch.budget.report_progress({"sub-problems": 7})
            batch.budget.clock()
            os._exit(0)
        os.wait()
        batch.budget.clock()
        yield from super().claims(batch)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_where_the_work_on_one_question_stands(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = _Terminal() if terminal else io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(console, "_REDRAWN_S", 0.0)
    with console.ProgressLine(10.0) as line:
        run(
            [case(0.5)],
            _Talkative(),
            observer=line,
            budget=TimeBudget(clock=line.clock, report_progress=line.report_progress),
        )
    drawn = stream.getvalue().split("\r\x1b[2K")
    if not terminal:
        assert drawn == [""]
        return
    first, shown, *_, last = drawn
    assert (first, last) == ("", "")
    assert re.fullmatch(r"reading, \d+ s left", shown)
    assert any(
        re.fullmatch(r"scripted, margin at least -0.25, 1,234 sub-problems, 50% closed, \d+ s left", one)
        for one in drawn
    )
    assert not any(" 7 sub-problems" in one for one in drawn)
