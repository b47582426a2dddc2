"""Running many queries: what is claimed is checked, recorded as it comes, and not asked twice."""

from verifiable_relu.campaign.result import Result
from verifiable_relu.campaign.runner import QUIET, Case, Observer, run
from verifiable_relu.campaign.store import Store

__all__ = ["QUIET", "Case", "Observer", "Result", "Store", "run"]
