"""Certificates of what a search proves: an observer that records hints, and the files in which they are written."""

from verifiable_relu.proof.recorder import Recorder
from verifiable_relu.proof.write import write_sat, write_unsat

__all__ = ["Recorder", "write_sat", "write_unsat"]
