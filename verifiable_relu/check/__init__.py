"""The checker of certificates: it reads the network's and the property's files by itself and trusts no verifier.

It uses nothing of the rest of the package, and nothing of the rest uses its arithmetic. ``docs/certificates.md`` says
what a certificate is.
"""

from verifiable_relu.check.checker import check
from verifiable_relu.check.errors import BadInput, Refused

__all__ = ["BadInput", "Refused", "check"]
