"""Interval and linear bound propagation over a network, with rounding accounted for."""
