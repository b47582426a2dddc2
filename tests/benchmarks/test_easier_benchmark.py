"""benchmarks/verification/easier.py: what explains the sub-problems, from questions whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.verification.easier import ARM, Rows, explained

ARMS = (ARM, "relu", "gelu-swap")


def questions(of_arm: float) -> Rows:
    """Questions whose count is that of their features, which are larger for ReLU, and ``of_arm`` more for ReLU."""
    rng, made = np.random.default_rng(0), Rows()
    for seed in range(4):
        for image in range(30):
            hard = rng.random()
            for arm in ARMS:
                loose, margin = hard + rng.random() + (arm == "relu"), rng.random()
                terms = (margin, loose, margin * margin, loose * loose, margin * loose)
                made.append((seed, image, arm, 2 * loose - margin + of_arm * (arm == "relu") + hard, terms))
    return made


def test_an_effect_that_the_features_carry_vanishes_beside_them() -> None:
    found = explained(questions(0.0), ARMS)
    assert found["features"] == pytest.approx(1) == pytest.approx(found["both"]) and 0.2 < found["arms"] < 0.9
    assert found["alone"]["relu"].low > 1.5 and found["beside"]["relu"].mean == pytest.approx(0, abs=1e-9)
    assert found["alone"]["gelu-swap"].n == 4 and abs(found["alone"]["gelu-swap"].mean) < 0.3


def test_an_effect_of_the_arm_itself_stays() -> None:
    found = explained(questions(0.7), ARMS)
    assert found["features"] < found["both"] == pytest.approx(1)
    assert found["beside"]["relu"].mean == pytest.approx(0.7) and found["beside"]["gelu-swap"].mean == pytest.approx(0)
