"""A part of the ledger in the gate: verdicts that were there before are there still, and so are certificates."""

import json

import pytest

from tests.ledger.__main__ import VERDICTS, differences
from tests.ledger.entries import answer, of_query
from tests.ledger.queries import few
from tests.support.draws import draws


def test_verdicts_and_certificates_are_those_of_the_ledger() -> None:
    kept = json.loads(VERDICTS.read_text(encoding="utf-8"))
    found = {question.name: answer(of_query(question, brief=True)) for question in few(draws(64))}
    assert len(found) >= draws(48) and {"sat", "unsat"} <= {verdict for verdict, _ in found.values()}
    assert {name: kept.get(name) for name in found} == found


@pytest.mark.seldom
def test_the_same_question_has_the_same_entry_twice_and_another_one_another() -> None:
    questions = list(few(40))
    first, other = next(one for one in questions if "mlp" in one.name), questions[-1]
    entries = [of_query(one) for one in (first, first, other)]
    assert not differences({"": entries[0]}, {"": entries[1]})
    changed = differences({"": entries[0]}, {"": entries[2]})
    assert {"bounds", "folded", "numbers"} <= set(changed)


def test_a_changed_bit_is_named_by_its_kind_and_its_batch() -> None:
    old = {"query": {"trees": {"bab": [20, "a" * 80]}, "verdicts": {"bab": "unsat"}}}
    new = {"query": {"trees": {"bab": [24, "a" * 32 + "b" * 48]}, "verdicts": {"bab": "unknown"}}}
    assert differences(old, new) == {
        "trees": ["query, bab: other from batch 4 on; 20 nodes, now 24"],
        "verdicts": ["query, bab: unsat, now unknown"],
    }
    assert differences(old, {}) == {"questions": ["query is only in the old ledger"]}
