from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch

import verifiable_relu
from tests.support import exact
from tests.unit.test_activations import JUMPING, OTHERWISE
from verifiable_relu.check.errors import BadInput
from verifiable_relu.check.model import read_model
from verifiable_relu.check.operators import OPERATORS
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.ir.functions.curves import CHECKED
from verifiable_relu.network import Network, enclosure, nodes, write_onnx
from verifiable_relu.network.dispatch import Refusal, Table
from verifiable_relu.network.nodes import (
    FUNCTIONS,
    STEPS,
    Activation,
    Add,
    Affine,
    Input,
    Node,
    Relu,
    Sigmoid,
    Step,
    curve,
)
from verifiable_relu.trust.exact import STEPPED


@dataclass(frozen=True, eq=False, kw_only=True)
class Doubled(Relu):
    """A kind of node that derives from a concrete kind, and computes something else."""

    op = "Doubled"


@dataclass(frozen=True, eq=False, kw_only=True)
class NewNode(Node):
    """A kind of node without a row in any table."""

    op = "NewNode"


@dataclass(frozen=True, eq=False, kw_only=True)
class NewActivation(Activation):
    """An activation without a row in any table."""

    op = "NewActivation"


@dataclass(frozen=True, eq=False, kw_only=True)
class NewAffine(Affine):
    """A kind of affine node without a row in any table."""

    op = "NewAffine"
    weight_error: float = 0.0


def tables() -> dict[str, Table[Any]]:
    """Every table of the package, by "module:attribute", where the module is the one that declares the table."""
    found: dict[int, tuple[str, Table[Any]]] = {}
    for info in pkgutil.walk_packages(verifiable_relu.__path__, "verifiable_relu."):
        if info.name.endswith("__main__"):
            continue
        try:
            module = import_module(info.name)
        except ModuleNotFoundError as error:
            # Only what is optional may be missing.
            assert error.name == "auto_LiRPA", error
            continue
        for name, value in vars(module).items():
            if isinstance(value, Table) and (id(value) not in found or name in vars(module).get("__annotations__", {})):
                found[id(value)] = f"{info.name}:{name}", value
    return dict(found.values())


def forgetful(kind: type[Node]) -> list[str]:
    """The tables of a kind's group that have neither a row nor a refusal for the kind."""
    return [name for name, table in tables().items() if issubclass(kind, table.group) and table.find(kind) is None]


# The input is left out, because it is no operator.
KINDS = [
    kind
    for kind in vars(nodes).values()
    if isinstance(kind, type) and issubclass(kind, Node) and "op" in vars(kind) and kind is not Input
]


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


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.op)
def test_every_consumer_takes_or_refuses_every_kind(kind: type[Node]) -> None:
    forgotten = forgetful(kind)
    assert not forgotten, f"{kind.__name__} has neither a row nor a refusal in {', '.join(forgotten)}"


@pytest.mark.parametrize("kind", [NewNode, NewActivation, NewAffine], ids=lambda kind: kind.op)
def test_consumers_that_a_new_kind_is_forgotten_in_are_named(kind: type[Node]) -> None:
    enclosed = "trust.enclose:MAPS" if issubclass(kind, Affine) else "network.enclosure:ENCLOSURES"
    expected = {f"verifiable_relu.{name}" for name in ("trust.exact:VALUES", "network.onnx.write:WRITERS", enclosed)}
    assert expected <= set(forgetful(kind))


def test_every_function_has_a_row_on_each_floor() -> None:
    """The row of nodes, that by which counterexamples are confirmed, and those that tests hold both against."""
    names = set(FUNCTIONS)
    assert names == set(CHECKED) == set(exact.FUNCTIONS) == set(OTHERWISE)
    assert set(STEPS) == set(enclosure.STEPPED) == set(STEPPED) == set(exact.STEPPED) == set(JUMPING)


@pytest.mark.parametrize("name", [*FUNCTIONS, *STEPS, "Relu", "LeakyRelu"])
def test_certificates_name_the_activations_that_the_checker_knows(name: str) -> None:
    """A file of one activation: the checker reads it as an activation if and only if the activation is certified."""
    place = {"name": "here", "inputs": (0,), "shape": (2,)}
    parameters = {"slope": torch.tensor(0.5)} if name == "LeakyRelu" else {}
    kinds = {**dict.fromkeys(FUNCTIONS, curve), **dict.fromkeys(STEPS, Step)}
    parameters |= {"function": name} if name in kinds else {}
    node = kinds.get(name, getattr(nodes, name, None))(**place, **parameters)
    data = write_onnx(Network((Input(name="x", inputs=(), shape=(2,)), node), batched=True))
    try:
        known = read_model(data).activations
    except BadInput:
        known = []
    assert bool(known) == bool(node.certified)
    assert set(node.certified) <= set(OPERATORS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_said_of_a_function_is_what_it_does(name: str) -> None:
    """Rising, falling and steepness of values and slopes on a grid, in float64."""
    known, one = FUNCTIONS[name], torch.ones((), dtype=torch.float64)
    x = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    y = known.value(x, one)
    assert known.increasing == bool((y.diff() >= 0).all())
    inside = torch.isfinite(y) & (x != 0)
    assert bool((known.slope(x, one).abs()[inside] <= known.steepest).all())
