"""Reading property files."""

from __future__ import annotations

from pathlib import Path

import pytest

from verifiable_relu.spec import read_vnnlib


def test_decimals_are_exact_and_a_point_is_no_empty_box(tmp_path: Path) -> None:
    path = tmp_path / "p.vnnlib"
    path.write_text(
        "(declare-const X_0 Real)(declare-const Y_0 Real)(assert (<= X_0 0.1))(assert (>= X_0 0.1))(assert (<= Y_0 1))"
    )
    (prop,) = read_vnnlib(path).properties
    lower, upper = prop.box.bounds(0)
    assert lower == upper and lower * 10 == 1
    assert prop.box.lower[0] < prop.box.upper[0]


def test_an_inverted_box_is_refused_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "p.vnnlib"
    path.write_text(
        "(declare-const X_0 Real)\n(declare-const Y_0 Real)\n(assert (<= X_0 0.1))\n(assert (>= X_0 0.2))\n"
    )
    with pytest.raises(ValueError, match=r"p\.vnnlib: line 3, column 9: the box is empty"):
        read_vnnlib(path)
