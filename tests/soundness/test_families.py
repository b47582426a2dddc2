"""No member of a family violates what is proved of it, whatever scalars stand around its activations."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.support.draws import draws
from tests.support.hooks import Hook

from .families import problems


def test_no_member_violates_an_unsat() -> None:
    counts, asked = Counter[str](), draws(800)
    assert list(problems(range(asked), counts)) == []
    refused = sum(count for name, count in counts.items() if name.startswith("refused"))
    decided = sum(count for name, count in counts.items() if "unsat" in name)
    assert decided > asked / 2 > refused


def _own(right: Any, nodes: Any, index: int, *rest: Any) -> Any:
    """λ of a GELU is taken for that with respect to the operator's own argument."""
    return type(right(nodes, index, *rest))(index)


def test_a_seeded_fault_is_caught() -> None:
    with Hook("readers.simplify:find_argument", _own).applied(), Hook("ir.families:find_argument", _own).applied():
        assert next(problems(range(15, 215), Counter()), None) is not None
