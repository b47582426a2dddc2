"""Records as tables, pages and figures; nothing is measured here. matplotlib is imported when a figure is drawn."""

from benchmarks.report.estimate import Estimate, estimate
from benchmarks.report.tables import Cell, Table

__all__ = ["Cell", "Estimate", "Table", "estimate"]
