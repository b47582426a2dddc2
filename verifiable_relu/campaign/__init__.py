"""Campaigns: many instances for one verifier; claims are checked, results recorded at once, and never asked twice."""

from verifiable_relu.campaign.result import QUIET, Observer, Result
from verifiable_relu.campaign.runner import Case, open_certificates, run
from verifiable_relu.campaign.store import Store

__all__ = ["QUIET", "Case", "Observer", "Result", "Store", "open_certificates", "run"]
