"""The measures of a study: what a claim can be about, and what else it must name."""

from __future__ import annotations

from collections.abc import Mapping

SHARES: Mapping[str, tuple[str, ...]] = {
    "clean": (),
    "not_refuted": ("eps",),
    "certified": ("eps", "method"),
}
"""Fractions of the asked images; ``not_refuted``: classified rightly, and no counterexample is known."""

COSTS: Mapping[str, tuple[str, ...]] = {"seconds": ("eps", "method"), "subproblems": ("eps", "method")}
"""Costs of the images that both arms classify rightly."""

NUMBERS = (
    *("clean_test", "clean_before_substitution", "clean_after_substitution", "mean_logit_change", "worst_logit_change"),
    *("proven_logit_change", "flipped_predictions", "drift", "oui_early", "oui_batch_early", "rate", "accuracy_early"),
    *("patterns_settled", "weights_settled", "int8", "pruned_0.5", "pruned_0.7", "pruned_0.9", "norm"),
)
"""Numbers of a training's record: accuracies on the test set before, after and without the swap, the swap's change of
logits, λ's drift, activation patterns (OUI) after a tenth of the training, compression, norm of the weights."""

MEASURES: Mapping[str, tuple[str, ...]] = {**SHARES, **COSTS, "unstable": ("eps",), **dict.fromkeys(NUMBERS, ())}
"""All measures, each with what else a claim must name."""
