"""A question about a flat network: takes the place of ``spec.property.Query`` until readers make flat networks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from verifiable_relu.ir.network import Network
from verifiable_relu.ir.transform import without_head
from verifiable_relu.spec.property import Property


@dataclass(frozen=True, eq=False)
class Query:
    """A network and a property, which ask: does some input of the property's box reach its unsafe set?"""

    network: Network
    property: Property

    @cached_property
    def without_head(self) -> Query:
        """The same question of the network without a head that keeps the order of its outputs.

        The query itself, if its network has no such head or the property does not only compare outputs, or where what
        runs the network rounds. A counterexample is replayed in the whole network's file.
        """
        if not self.property.only_compares or self.network.arithmetic != "real":
            return self
        network = without_head(self.network)
        return self if network is None else Query(network, self.property)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over network and property, the key of caches and records; equal digests mean equal answers."""
        return hashlib.sha256((self.network.digest + self.property.digest).encode()).hexdigest()
