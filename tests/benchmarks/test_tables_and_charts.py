"""Tables and figures from tiny records."""

import math
from pathlib import Path

import pytest

from benchmarks.common.charts import LINES, MARKERS, Axis, Chart, Series, draw
from benchmarks.common.markup import Interval, Table
from benchmarks.common.tables import NAMES, Page, estimate, spoken
from verifiable_relu.report.figures import COLOURS
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


@pytest.mark.seldom
@pytest.mark.thorough
@pytest.mark.parametrize(
    "panels",
    [
        [
            Chart(
                "certified",
                [
                    Series("one", [(0.01, Interval(0.8, 0.7, 0.9, 2)), (0.02, Interval(0.5, math.nan, math.nan, 1))]),
                    Series("far", [(0.01, 1e300), (0.02, -math.inf)], joined=False, style=9),
                ],
                Axis("ε", ticks={0.01: "0.01", 0.02: "1/50"}),
                Axis("accuracy", "symlog"),
            )
        ],
    ],
)
def test_figures_are_drawn(panels: list[Chart], tmp_path: Path) -> None:
    made = draw(panels, tmp_path / "figures" / "one.png")
    assert [path.suffix for path in made] == [".pdf", ".png"] and set(made) == set((tmp_path / "figures").iterdir())
    assert made[0].read_bytes().startswith(b"%PDF") and made[1].read_bytes().startswith(b"\x89PNG")


def test_series_differ_without_colours() -> None:
    for looks in (MARKERS, COLOURS):
        assert len(set(looks)) == len(looks) == 8
    assert len(set(LINES)) == len(LINES)


def test_identifiers_become_names() -> None:
    assert spoken("mnist, mlp 128,128, ε = 0.02, milp") == "MNIST, MLP 128,128, ε = 0.02, MILP"
    assert spoken("unknown_arm") == "unknown arm" and spoken("0.5 ± 0.1") == "0.5 ± 0.1"
    assert all(name in NAMES for name in ARMS)
