"""Reports: one HTML page of a folder of results, and figures for papers.

The page needs nothing beside itself: styles, scripts and pictures are in it, so that it can be opened offline, mailed
and kept. matplotlib draws all figures, and is imported where the first one is drawn.
"""

from __future__ import annotations

from verifiable_relu.report.figures import plot_certified, plot_times

__all__ = ["plot_certified", "plot_times"]
