"""Properties that only compare outputs with each other: a head that keeps their order is of no account to them."""

from __future__ import annotations

from dataclasses import replace

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network import Network, write_onnx
from verifiable_relu.network.head import headless
from verifiable_relu.spec.property import Property, Query

NOTE = "the last layer keeps the order of the outputs, which the property only compares, and was left out"


def only_compares(prop: Property) -> bool:
    """Whether every row of the unsafe set compares one output with another, Y_i ≤ Y_j or Y_i < Y_j."""
    rows = [row for polytope in prop.unsafe for row in polytope]
    return all(not row.bound and len(row.coefficients) == 2 and not sum(c for _, c in row.coefficients) for row in rows)


def without_head(query: Query) -> Query:
    """The same question of the network without a head that keeps the order of its outputs, where that is the same.

    A counterexample is replayed in the whole network's file.

    Returns:
        The query itself, if its network has no such head or the property does not only compare outputs.
    """
    whole = query.network
    network = whole.once(without_head, lambda: _headless(whole)) if only_compares(query.property) else None
    return query if network is None else Query(network, query.property)


def _headless(whole: Network) -> Network | None:
    """The network without its head, with the file of the whole one; None if there is no head, or no such file."""
    network = headless(whole)
    if network is None or network.onnx is not None:
        return network
    try:
        return replace(network, onnx=write_onnx(whole.limit, rounded=True))
    except UnsupportedError:
        return None
