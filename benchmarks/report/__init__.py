"""Tables, pages and figures of records. matplotlib is imported when a figure is drawn, and not before."""

from benchmarks.report.estimate import Estimate, estimate
from benchmarks.report.tables import Cell, Table

__all__ = ["Cell", "Estimate", "Table", "estimate"]
