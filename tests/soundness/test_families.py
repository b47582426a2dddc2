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
from verifiable_relu.readers import simplify

from .families import problems


def test_no_member_violates_an_unsat(tmp_path: Path) -> None:
    counts, asked = Counter[str](), draws(800)
    assert list(problems(range(asked), counts, tmp_path)) == []
    refused = sum(count for name, count in counts.items() if name.startswith("refused"))
    decided = sum(count for name, count in counts.items() if "unsat" in name)
    assert decided > asked / 2 > refused and counts["certificate , accepted"] > asked / 40


def _own(right: Any, nodes: Sequence[Any], index: int) -> Any:
    """λ of a GELU is taken for that with respect to the operator's own argument."""
    return type(right(nodes, index))(index)


def _not_beyond_moves(right: Any, nodes: Sequence[Any], index: int) -> Any:
    found = right(nodes, index)
    moves = found.moves if isinstance(found, simplify.Argument) else found.nodes
    return type(found)(index) if moves else found


@pytest.mark.parametrize(("fault", "first"), [(_own, 15), (_not_beyond_moves, 65)])
def test_a_seeded_fault_is_caught_and_its_proofs_are_refused(fault: Any, first: int, tmp_path: Path) -> None:
    first_hook, second_hook = (Hook(f"{package}.simplify:argument", fault) for package in ("network", "readers"))
    with first_hook.applied(), second_hook.applied():
        found = list(islice(problems(range(first, first + 200), Counter(), tmp_path), 2))
    assert any("a member that violates" in problem for problem in found)
    assert not any("real, accepted" in problem for problem in found)
