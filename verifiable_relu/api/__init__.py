"""Interface from Python: questions about models, about two models at once, and certified radii."""

from verifiable_relu.api.changing import Change as Change
from verifiable_relu.api.changing import verify_change as verify_change
from verifiable_relu.api.verifying import Perturbation as Perturbation
from verifiable_relu.api.verifying import Radii as Radii
from verifiable_relu.api.verifying import Results as Results
from verifiable_relu.api.verifying import certified_radius as certified_radius
from verifiable_relu.api.verifying import verify as verify
from verifiable_relu.api.verifying import verify_properties as verify_properties
from verifiable_relu.api.verifying import verify_radii as verify_radii
