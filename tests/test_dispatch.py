from __future__ import annotations

from dataclasses import dataclass

import pytest

from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network.dispatch import Refusal, Table
from verifiable_relu.network.nodes import Activation, Add, Node, Relu, Sigmoid


@dataclass(frozen=True, eq=False, kw_only=True)
class Doubled(Relu):
    """A kind derived from a concrete one, which computes something else."""

    op = "Doubled"


def made(kind: type[Node]) -> Node:
    return kind(name="here", inputs=(0,), shape=(2,))


TABLE: Table[str] = Table(
    "the test",
    {Node: "any", Activation: "activation", Relu: "relu", Sigmoid: Refusal("sigmoids are not taken")},
)


def test_a_kind_with_a_row_of_its_own_gets_this_row() -> None:
    assert TABLE[made(Relu)] == "relu"


def test_a_kind_without_a_row_gets_that_of_the_narrowest_group() -> None:
    assert TABLE[made(Add)] == "any"
    assert Table("the test", {Node: "any", Activation: "activation"})[made(Relu)] == "activation"


def test_the_row_of_a_concrete_kind_does_not_serve_a_kind_derived_from_it() -> None:
    assert TABLE[made(Doubled)] == "activation"
    assert made(Doubled) not in Table("the test", {Relu: "relu"})


def test_a_refused_kind_is_an_error_that_names_the_node_and_says_why() -> None:
    assert made(Sigmoid) not in TABLE
    with pytest.raises(UnsupportedError) as caught:
        TABLE[made(Sigmoid)]
    assert str(caught.value) == "node 'here' (Sigmoid): sigmoids are not taken"


def test_an_unknown_kind_is_an_error_that_names_the_node_and_the_consumer() -> None:
    with pytest.raises(UnsupportedError) as caught:
        Table("the test", {Relu: "relu"})[made(Add)]
    assert str(caught.value) == "node 'here' (Add): the test does not know this kind of node"
