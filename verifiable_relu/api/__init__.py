"""The interface from Python: ``verify`` and ``verify_properties``, and the radii up to which images are proved."""

from verifiable_relu.api.radii import Radii, certified_radius, verify_radii
from verifiable_relu.api.verifying import Around, Results, verify, verify_properties

__all__ = ["Around", "Radii", "Results", "certified_radius", "verify", "verify_properties", "verify_radii"]
