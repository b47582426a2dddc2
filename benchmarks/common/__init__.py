"""Modules that the scripts of several studies share."""
