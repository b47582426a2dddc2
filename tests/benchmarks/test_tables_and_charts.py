"""Tables and figures from tiny records."""

import math

import pytest

from benchmarks.common.markup import Table
from benchmarks.common.tables import NAMES, Page, estimate, spoken
from verifiable_relu.train.options import ARMS

TABLE = Table(
    ("arm", "ε", "clean_%", "seconds"),
    [("relu", 0.01, estimate([0.5, 0.7]), 12), ("a|b & c", math.nan, estimate([0.25]), None)],
)


def test_an_interval_is_students() -> None:
    two = estimate([1.0, 3.0])
    # t(0.975, 1) = 12.7062; s/√n = √2/√2.
    assert (two.mean, two.n) == (2.0, 2)
    assert two.half == pytest.approx(12.7062, abs=1e-4)
    assert math.isnan(estimate([1.0]).half)
    assert str(estimate([1.0, 1.0])) == "1.00 ± 0.00"
    assert str(estimate([0.5])) == "0.5000"


def test_markdown() -> None:
    page = Page()
    page.add("# A page", "", TABLE, Table(("none",), []))
    assert page.text.splitlines() == [
        "# A page",
        "",
        "| arm | ε | clean_% | seconds |",
        "| --- | ---: | ---: | ---: |",
        "| relu | 0.01 | 0.6000 ± 1.2706 | 12 |",
        r"| a\|b & c | – | 0.2500 | – |",
    ]


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="3 cells under 2 columns"):
        Table(("a", "b"), [(1, 2, 3)])


def test_identifiers_become_names() -> None:
    assert spoken("mnist, mlp 128,128, ε = 0.02, milp") == "MNIST, MLP 128,128, ε = 0.02, MILP"
    assert spoken("unknown_arm") == "unknown arm" and spoken("0.5 ± 0.1") == "0.5 ± 0.1"
    assert all(name in NAMES for name in ARMS)
