"""Names that methods on graph networks share with those on flat ones, and how large a batch of boxes may be."""

from __future__ import annotations

from verifiable_relu.network.graph import Network
from verifiable_relu.search.budget import PATIENCE, SOLO_WORK, SearchProgress, TimeBudget, ignore_progress
from verifiable_relu.search.outcomes import Outcome, Reason, Trust, Verdict, Witness, fault

__all__ = [
    "PATIENCE",
    "SOLO_WORK",
    "Outcome",
    "Reason",
    "SearchProgress",
    "TimeBudget",
    "Trust",
    "Verdict",
    "Witness",
    "batch_size",
    "fault",
    "ignore_progress",
]


def batch_size(network: Network, most: int, memory: int) -> int:
    """Return the number of boxes, at most ``most``, over which a network is bounded at once.

    Each box is estimated to take 16 float64 numbers for each neuron, of ``memory`` bytes.
    """
    neurons = sum(node.size for node in network.nodes)
    return max(1, min(most, memory // (neurons * 8 * 16)))
