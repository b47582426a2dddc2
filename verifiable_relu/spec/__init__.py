"""Properties of networks, their VNN-LIB files, and lists of instances."""

from verifiable_relu.spec.balls import box_property, linf_properties
from verifiable_relu.spec.find import Instance, find_network, instances, queries, read_instances, write_instances
from verifiable_relu.spec.property import Ball, Box, Property, Query, Row
from verifiable_relu.spec.read import read_vnnlib
from verifiable_relu.spec.specfile import SpecFile, Variable, vnnlib_text, write_vnnlib

__all__ = [
    "Ball",
    "Box",
    "Instance",
    "Property",
    "Query",
    "Row",
    "SpecFile",
    "Variable",
    "box_property",
    "find_network",
    "instances",
    "linf_properties",
    "queries",
    "read_instances",
    "read_vnnlib",
    "vnnlib_text",
    "write_instances",
    "write_vnnlib",
]
