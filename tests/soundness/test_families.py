"""No member of a family violates what is proved of it, whatever scalars stand around its activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.support.draws import draws
from tests.support.hooks import Hook
from verifiable_relu.network.nodes import Node
from verifiable_relu.network.simplify import Argument

from .families import problems


def test_no_member_violates_an_unsat(tmp_path: Path) -> None:
    counts, asked = Counter[str](), draws(800)
    assert list(problems(range(asked), counts, tmp_path)) == []
    refused = sum(count for name, count in counts.items() if name.startswith("refused"))
    decided = sum(count for name, count in counts.items() if "unsat" in name)
    assert decided > asked / 2 > refused and counts["certificate , accepted"] > asked / 40


def _own(right: Any, nodes: Sequence[Node], index: int) -> Argument:
    """λ of a GELU is taken for that with respect to the operator's own argument."""
    return Argument(index)


def _not_beyond_moves(right: Any, nodes: Sequence[Node], index: int) -> Argument:
    found: Argument = right(nodes, index)
    return Argument(index) if any(node.op == "Reshape" for node in found.nodes) else found


@pytest.mark.parametrize(("fault", "first"), [(_own, 15), (_not_beyond_moves, 65)])
def test_a_seeded_fault_is_caught_and_its_proofs_are_refused(fault: Any, first: int, tmp_path: Path) -> None:
    with Hook("network.simplify:argument", fault).applied():
        found = list(islice(problems(range(first, first + 200), Counter(), tmp_path), 2))
    assert any("a member that violates" in problem for problem in found)
    assert not any("real, accepted" in problem for problem in found)
