"""The interface from Python: ``verify``, and the radii up to which images are proved."""

from verifiable_relu.api.radii import Radii, certified_radius, verify_radii
from verifiable_relu.api.verifying import verify

__all__ = ["Radii", "certified_radius", "verify", "verify_radii"]
