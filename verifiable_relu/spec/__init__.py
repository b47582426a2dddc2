"""Properties, and the files that hold them."""

from verifiable_relu.spec.property import Box, Property, Query, Row
from verifiable_relu.spec.read import read_vnnlib
from verifiable_relu.spec.specfile import SpecFile, Variable

__all__ = ["Box", "Property", "Query", "Row", "SpecFile", "Variable", "read_vnnlib"]
