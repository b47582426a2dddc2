"""benchmarks/study/statistics.py: by hand, and against independent computations."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from scipy import stats

from benchmarks.study.statistics import by_seed, equivalence, holm, interval, least_margin, mcnemar, wilcoxon


def test_the_interval_is_students() -> None:
    values = [0.61, 0.66, 0.58, 0.7, 0.63]
    found = interval(values)
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert found.mean == pytest.approx(np.mean(values)) and found.n == 5
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_one_number_has_no_interval_and_equal_numbers_have_one_of_no_width() -> None:
    alone = interval([0.5])
    assert (alone.mean, alone.n) == (0.5, 1) and math.isnan(alone.low) and math.isnan(alone.high)
    assert f"{alone:.1%}" == "50.0%" and f"{interval([1, 1]):.1f}" == "1.0 [1.0, 1.0]"


def test_equivalence_is_two_one_sided_tests() -> None:
    given, margin = [0.004, -0.012, 0.009, 0.001, 0.003], 0.02
    above = stats.ttest_1samp(given, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(given, margin, alternative="less").pvalue
    assert equivalence(given, margin) == pytest.approx(max(above, below))
    assert equivalence([-each for each in given], margin) == pytest.approx(max(above, below))
    # The least margin is the one at which the p-value is 0.05, and the farther end of the 90 % interval.
    assert equivalence(given, least_margin(given)) == pytest.approx(0.05)
    low, high = stats.ttest_1samp(given, 0.0).confidence_interval(0.9)
    assert least_margin(given) == pytest.approx(max(-low, high))


def test_equal_differences_are_equivalent_by_their_signs_and_one_seed_is_no_test() -> None:
    assert equivalence([0.01] * 5, 0.02) == 2**-5 and equivalence([0.0] * 3, 0.02) == 2**-3
    assert equivalence([0.03] * 5, 0.02) == 1 == equivalence([0.02] * 5, 0.02)
    assert math.isnan(equivalence([0.0], 0.02)) and math.isnan(least_margin([0.0]))


def test_the_test_over_seeds_is_students_paired_t() -> None:
    first, second = np.array([0.61, 0.66, 0.58, 0.70]), np.array([0.60, 0.61, 0.57, 0.66])
    found = by_seed(first - second)
    assert found.p == pytest.approx(stats.ttest_rel(first, second).pvalue)
    # Differences 1, 5, 1 and 4 points: mean 2.75, deviation √((1.75² + 2.25² + 1.75² + 1.25²)/3) = 2.0616.
    assert found.effect == pytest.approx(2.75 / 2.0616, abs=1e-4) and found.n == 4
    assert by_seed(second - first).effect == -found.effect


def test_equal_differences_are_tested_by_their_signs() -> None:
    found = by_seed([0.1] * 5)
    assert found.p == 2 / 2**5 and found.effect == math.inf
    assert by_seed([-0.25] * 3).p == 0.25 and by_seed([0.0] * 5).p == 1
    # 0.3 − 0.2 and 0.4 − 0.3 differ by a rounding error.
    assert by_seed([0.3 - 0.2, 0.4 - 0.3, 0.5 - 0.4]).p == 0.25


@pytest.mark.parametrize("differences", ([], [0.3]))
def test_one_seed_is_no_test(differences: list[float]) -> None:
    assert math.isnan(by_seed(differences).p) and math.isnan(by_seed(differences).effect)


def test_mcnemar_is_the_binomials_tails() -> None:
    # P(X ≤ 1) + P(X ≥ 7) for X ~ B(8, ½) is 2·(1 + 8)/256.
    assert mcnemar(7, 1).p == pytest.approx(18 / 256) == mcnemar(1, 7).p
    assert mcnemar(7, 1).effect == pytest.approx(0.375) == -mcnemar(1, 7).effect
    assert (mcnemar(0, 0).p, mcnemar(0, 0).n) == (1, 0)


def test_wilcoxon_is_that_of_all_signs() -> None:
    differences = [0.3, -0.1, 0.8, 0.5, 0.0, 0.4, 1.1]
    kept = [d for d in differences if d]
    ranks = stats.rankdata(np.abs(kept))
    sums = np.array([sum(ranks[i] for i, sign in enumerate(signs) if sign) for signs in product((0, 1), repeat=6)])
    positive = sum(rank for rank, d in zip(ranks, kept, strict=True) if d > 0)
    middle = ranks.sum() / 2
    expected = np.mean(abs(sums - middle) >= abs(positive - middle))
    found = wilcoxon(differences)
    assert found.p == pytest.approx(expected) and found.n == 6
    # The one negative difference has rank 1 of 1 + … + 6 = 21.
    assert found.effect == pytest.approx((20 - 1) / 21)


def test_wilcoxon_with_ties_and_without_differences() -> None:
    tied = wilcoxon([1.0] * 30 + [-1.0] * 10)
    # Ranks are all 20.5: W = 30·20.5, with mean 410 and variance Σ 20.5²/4.
    assert tied.p == pytest.approx(2 * stats.norm.sf((30 * 20.5 - 410) / math.sqrt(40 * 20.5**2 / 4)), rel=1e-6)
    assert tied.effect == pytest.approx(0.5)
    assert (wilcoxon([0.0, 0.0]).p, wilcoxon([]).p) == (1, 1)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1, 1] and holm([]) == []


def test_a_claim_that_was_not_tested_counts_in_the_family() -> None:
    assert holm([0.02, math.nan, math.nan])[0] == pytest.approx(0.06) and math.isnan(holm([math.nan])[0])
