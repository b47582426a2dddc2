"""Saved records as tables and figures; nothing is measured here. matplotlib is imported when a figure is drawn."""

from verifiable_relu.report.estimate import Estimate, estimate
from verifiable_relu.report.tables import Table

__all__ = ["Estimate", "Table", "estimate"]
