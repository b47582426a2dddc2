"""Tables and figures from tiny records."""

import csv
import io
import math
import sys
from pathlib import Path

import pytest

from verifiable_relu.errors import InputError
from verifiable_relu.report.estimate import Estimate, estimate
from verifiable_relu.report.names import NAMES, spoken
from verifiable_relu.report.palette import COLOURS, HATCHES, LINES, MARKERS
from verifiable_relu.report.panels import cactus, levels, pairs, profiles
from verifiable_relu.report.table import Table
from verifiable_relu.train.arms import ARMS

TABLE = Table(
    ("arm", "ε", "clean_%", "seconds"),
    [("relu", 0.01, estimate([0.5, 0.7]), 12), ("a|b & c", math.nan, Estimate(0.25, math.nan, 1), None)],
    caption="50 % of it",
)


def test_an_interval_is_students() -> None:
    two = estimate([1.0, 3.0])
    # t(0.975, 1) = 12.7062; s/√n = √2/√2.
    assert (two.mean, two.n) == (2.0, 2)
    assert two.half == pytest.approx(12.7062, abs=1e-4)
    assert math.isnan(estimate([1.0]).half)
    assert str(estimate([1.0, 1.0])) == "1.00 ± 0.00"
    assert str(Estimate(0.5, math.nan, 1)) == "0.5000"


def test_markdown() -> None:
    assert TABLE.markdown().splitlines() == [
        "| arm | ε | clean_% | seconds |",
        "| --- | ---: | ---: | ---: |",
        "| relu | 0.01 | 0.6000 ± 1.2706 | 12 |",
        r"| a\|b & c | – | 0.2500 | – |",
    ]


def test_latex_escapes() -> None:
    assert TABLE.latex("arms").splitlines() == [
        r"\begin{table}",
        r"\centering",
        r"\caption{50 \% of it}",
        r"\label{tab:arms}",
        r"\begin{tabular}{@{}lrrr@{}}",
        r"\toprule",
        r"arm & $\varepsilon$ & clean \% & seconds \\",
        r"\midrule",
        r"ReLU & 0.01 & 0.6000 $\pm$ 1.2706 & 12 \\",
        r"a|b \& c & -- & 0.2500 & -- \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]


def test_csv_keeps_mean_and_half_apart() -> None:
    head, first, second = csv.reader(io.StringIO(TABLE.csv()))
    assert head == ["arm", "ε", "clean_%", "clean_%_half", "seconds"]
    assert first == ["relu", "0.01", "0.6", "1.27062", "12"]
    assert second == ["a|b & c", "", "0.25", "", ""]


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="3 cells under 2 columns"):
        Table(("a", "b"), [(1, 2, 3)])


@pytest.mark.thorough
def test_figures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    one, two = estimate([0.9]), estimate([0.8, 0.9])
    pairs(tmp_path / "pairs.png", {"digits": {"relu": (one, two)}}, "accuracy")
    levels(tmp_path / "levels.png", {"digits": {"relu": [(0.01, two), (1 / 255, one)]}}, "certified")
    cactus(tmp_path / "cactus.png", {"milp": {"relu": [0.2, 0.1], "none": []}}, {"milp": 5.0})
    profiles(tmp_path / "profiles.png", {"swish": [[1.0, 2.0], [160.0, 160.0]]})
    for path in sorted(tmp_path.iterdir()):
        assert path.read_bytes().startswith(b"%PDF" if path.suffix == ".pdf" else b"\x89PNG"), path.name
    assert len(list(tmp_path.iterdir())) == 8


def test_series_differ_without_colours() -> None:
    for looks in (MARKERS, HATCHES, COLOURS):
        assert len(set(looks)) == len(looks) == 8
    assert len(set(LINES)) == len(LINES)


def test_identifiers_become_names() -> None:
    assert spoken("mnist, mlp 128,128, ε = 0.02, milp") == "MNIST, MLP 128,128, ε = 0.02, MILP"
    assert spoken("unknown_arm") == "unknown arm" and spoken("0.5 ± 0.1") == "0.5 ± 0.1"
    assert all(name in NAMES for name in ARMS)


def test_without_matplotlib_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match="matplotlib"):
        profiles(tmp_path / "profiles.png", {"swish": [[1.0]]})
