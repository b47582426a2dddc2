"""Reports: one HTML page of campaigns or of a training, and figures for papers.

A page has styles, scripts and pictures in it, so that it can be opened offline, mailed and kept. matplotlib draws all
figures, and is imported when the first one is drawn.
"""
