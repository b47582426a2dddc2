"""Networks from ONNX and torch, and to ONNX: agreement with onnxruntime, refusals, exactness of rewrites."""

from __future__ import annotations

import gzip
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from tests.support.asking import claims
from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.ir.network import Affine, Elementwise, Network
from verifiable_relu.readers import read_onnx, write_onnx
from verifiable_relu.readers.onnx.call import CONVERTERS, GROUP, GROUPS
from verifiable_relu.readers.onnx.constants import FOLDED
from verifiable_relu.search.outcomes import Reason, Verdict
from verifiable_relu.search.registry import make
from verifiable_relu.spec.property import Box, Property, Query, Row

RNG = np.random.default_rng(0)


def runner(data: bytes) -> Callable[[np.ndarray], np.ndarray]:
    """The function from a batch of inputs to the outputs that onnxruntime computes of an ONNX file."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    (declared,) = session.get_inputs()
    return lambda x: session.run(None, {declared.name: x})[0]


def assert_agrees(network: Network, inputs: np.ndarray, tolerance: float = 1e-5) -> None:
    """The network's outputs equal onnxruntime's, one sample at a time, to ``tolerance`` of the largest."""
    assert network.source.onnx is not None
    run = runner(network.source.onnx)
    for x in inputs.astype(np.float32):
        expected = run(x[None] if network.source.batched else x).reshape(-1)
        found = network(torch.from_numpy(x.reshape(1, -1))).reshape(-1).numpy()
        assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max() + 1e-30


def model(nodes: list, inputs: tuple, constants: dict[str, np.ndarray], opset: int = 13, **kwargs) -> bytes:
    """An ONNX file with one input ``x`` and one output ``y``."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kwargs.get("kind", TensorProto.FLOAT), inputs)],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    # The checker demands the output's type and shape.
    inferred = made.graph.output[0]
    if kwargs.get("infer", True):
        (inferred,) = onnx.shape_inference.infer_shapes(made).graph.output
    if inferred.type.tensor_type.HasField("shape"):
        made.graph.output[0].CopyFrom(inferred)
    else:
        made.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, ("rows", "columns")))
    return made.SerializeToString()


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


node = helper.make_node

FAMILIES = (
    "acasxu", "collins_rul_cnn", "eran_2021", "mnist_fc", "oval21", "rl_benchmarks", "safenlp", "test",
    "tllverifybench",
)  # fmt: skip

# name → (nodes, input shape, constants, opset)
OPERATORS: dict[str, tuple[list, tuple, dict[str, np.ndarray], int]] = {
    "MatMul Add": (
        [node("MatMul", ["x", "w"], ["m"]), node("Add", ["b", "m"], ["y"])],
        (1, 4),
        {"w": normal(4, 3), "b": normal(1, 3)},
        13,
    ),
    "MatMul without batch": ([node("MatMul", ["x", "w"], ["y"])], (4,), {"w": normal(4, 3)}, 13),
    "Mul Div Neg": (
        [node("Mul", ["x", "c"], ["a"]), node("Div", ["a", "d"], ["b"]), node("Neg", ["b"], ["y"])],
        (1, 3, 4),
        {"c": normal(3, 1), "d": normal(1, 3, 4)},
        13,
    ),
    "BatchNormalization": (
        [node("BatchNormalization", ["x", "g", "b", "m", "v"], ["y"], epsilon=1e-3)],
        (1, 3, 4, 5),
        {"g": normal(3), "b": normal(3), "m": normal(3), "v": np.abs(normal(3))},
        13,
    ),
    "AveragePool": ([node("AveragePool", ["x"], ["y"], kernel_shape=[3, 2], strides=[2, 2])], (1, 3, 7, 8), {}, 13),
    "view through shapes": (
        [
            node("Shape", ["x"], ["s"]),
            node("Gather", ["s", "zero"], ["n"]),
            node("Unsqueeze", ["n", "axis"], ["n1"]),
            node("Concat", ["n1", "rest"], ["t"], axis=0),
            node("Relu", ["x"], ["r"]),
            node("Reshape", ["r", "t"], ["y"]),
        ],
        ("n", 2, 3),
        {"zero": np.array(0), "axis": np.array([0]), "rest": np.array([-1])},
        13,
    ),
    "computed constants": (
        [node("Mul", ["c", "c"], ["d"]), node("Sqrt", ["d"], ["e"]), node("Add", ["x", "e"], ["y"])],
        (1, 3),
        {"c": normal(3)},
        13,
    ),
    "doubles": ([node("MatMul", ["x", "w"], ["y"])], (1, 4), {"w": RNG.normal(size=(4, 3))}, 13),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_agrees_with_onnxruntime(name: str) -> None:
    nodes, shape, constants, opset = OPERATORS[name]
    double = name == "doubles"
    data = model(nodes, shape, constants, opset, kind=TensorProto.DOUBLE if double else TensorProto.FLOAT)
    network, run = read_onnx(data), runner(data)
    for x in RNG.normal(size=(4, *network.source.input_shape)).astype(np.float64 if double else np.float32):
        expected = run(x[None] if network.source.batched else x).reshape(-1)
        found = network(torch.from_numpy(x.reshape(1, -1)).double()).reshape(-1).numpy()
        assert np.abs(found - expected).max() <= 1e-6 * max(1, np.abs(expected).max())
    assert {n for n in range(len(network.ops)) if n not in {i for m in network.ops for i in m.inputs}} == {
        len(network.ops) - 1
    }


@pytest.mark.parametrize(("kind", "high", "expected"), [("DOUBLE", 1e39, 1e39), ("FLOAT", 3.4028234663852886e38, 1e40)])
def test_only_the_largest_number_of_its_own_type_stands_for_no_end(kind: str, high: float, expected: float) -> None:
    of = getattr(TensorProto, kind)
    constant = np.array(high, helper.tensor_dtype_to_np_dtype(of))
    network = read_onnx(model([node("Clip", ["x", "", "h"], ["y"])], (1, 2), {"h": constant}, 13, kind=of))
    found = network(torch.full((1, 2), 1e40, dtype=torch.float64))
    torch.testing.assert_close(found, torch.full_like(found, expected), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("operator", "end"), [("Min", 1e12), ("Max", -1e9), ("Min", 5e3)])
def test_an_end_that_is_far_from_the_values_does_not_drown_them_in_rounding(operator: str, end: float) -> None:
    network = read_onnx(model([node(operator, ["x", "e"], ["y"])], (1, 3), {"e": np.float32(end)}, 13))
    x = torch.tensor([[0.1, -1e-4, 3.0]])
    assert torch.equal(network(x), x)
    beyond = torch.full((1, 3), 2 * end)
    torch.testing.assert_close(network(beyond), beyond / 2)


def test_affine_maps_of_matmul_and_add_are_one() -> None:
    nodes, shape, constants, opset = OPERATORS["MatMul Add"]
    network = read_onnx(model(nodes, shape, constants, opset))
    (only,) = network.ops[1:]
    assert isinstance(only, Affine)
    assert torch.equal(only.map.weight, torch.from_numpy(constants["w"].T))
    assert torch.equal(only.bias, torch.from_numpy(constants["b"][0]))


@pytest.mark.parametrize("name", ["AveragePool", "BatchNormalization", "Mul Div Neg"])
def test_inexact_rewrites_bound_their_error(name: str) -> None:
    """The true factor, in exact arithmetic, lies within ``weight_error`` of the stored one."""
    nodes, shape, constants, opset = OPERATORS[name]
    network = read_onnx(model(nodes, shape, constants, opset))
    node = next(n for n in network.ops if isinstance(n, Affine) and n.weight_error)
    if name == "AveragePool":
        true, stored = [Fraction(1, 6)], [node.map.weight.flatten()[0].item()]
    elif name == "BatchNormalization":
        spread = [Fraction(float(v)) + Fraction(float(np.float32(1e-3))) for v in constants["v"]]
        roots = [Fraction(math.isqrt(int(s * 2**240)), 2**120) for s in spread]
        # One factor for each of the 4·5 pixels of a channel.
        true = [Fraction(float(g)) / r for g, r in zip(constants["g"], roots, strict=True) for _ in range(20)]
        stored = node.map.weight.reshape(-1).tolist()
    else:
        true, stored = (
            [1 / Fraction(float(d)) for d in constants["d"].reshape(-1)],
            node.map.weight.reshape(-1).tolist(),
        )
    errors = [abs(t - Fraction(s)) / abs(Fraction(s)) for t, s in zip(true, stored, strict=True)]
    assert max(errors) <= Fraction(node.weight_error)
    assert max(errors) > 0


def gelu_nodes(form: str) -> list:
    """The ways in which exporters write GELU out."""
    if form == "torch":
        return [node("Div", ["x", "root"], ["a"]), node("Erf", ["a"], ["e"]), node("Add", ["e", "one"], ["p"]),
                node("Mul", ["x", "p"], ["q"]), node("Mul", ["q", "half"], ["y"])]  # fmt: skip
    if form == "half first":
        return [node("Mul", ["x", "inverse"], ["a"]), node("Erf", ["a"], ["e"]), node("Add", ["one", "e"], ["p"]),
                node("Mul", ["x", "half"], ["h"]), node("Mul", ["h", "p"], ["y"])]  # fmt: skip
    return [node("Mul", ["inverse", "x"], ["a"]), node("Erf", ["a"], ["e"]), node("Add", ["e", "one"], ["p"]),
            node("Div", ["p", "two"], ["h"]), node("Mul", ["h", "x"], ["y"])]  # fmt: skip


GELU_CONSTANTS = {
    "root": np.float32(math.sqrt(2)),
    "inverse": np.float32(math.sqrt(0.5)),
    "one": np.float32(1),
    "half": np.float32(0.5),
    "two": np.float32(2),
}


@pytest.mark.parametrize(
    ("form", "half", "kinds"),
    [
        ("torch", 0.5, ["GELU"]),
        ("half first", 0.5, ["GELU"]),
        ("divided", 0.5, ["GELU"]),
        ("torch", 0.25, ["GELU", "Affine"]),
    ],
)
def test_a_written_out_gelu_is_read_as_gelu_and_a_multiple_as_one_and_a_factor(
    form: str, half: float, kinds: list[str]
) -> None:
    network = read_onnx(model(gelu_nodes(form), (1, 5), GELU_CONSTANTS | {"half": np.float32(half)}))
    assert [op.function.kind if isinstance(op, Elementwise) else type(op).__name__ for op in network.ops[1:]] == kinds
    assert_agrees(network, RNG.normal(size=(4, 5)) * 2)


BAD: dict[str, tuple[Callable[[], bytes], type[InputError], str]] = {
    "no ONNX at all": (lambda: b"hello world", InputError, "not an ONNX file"),
    "unknown operator": (
        lambda: model([node("Hardmax", ["x"], ["y"], name="last")], (1, 3), {}),
        UnsupportedError,
        r"node 'last' \(Hardmax\)",
    ),
    "NaN": (
        lambda: model(
            [node("MatMul", ["x", "w"], ["y"], name="fc")], (1, 2), {"w": np.full((2, 2), np.nan, np.float32)}
        ),
        InputError,
        "'fc'.*NaN",
    ),
    "wrong kernel": (
        lambda: model([node("Conv", ["x", "w"], ["y"], name="c")], (1, 3, 4, 4), {"w": normal(2, 2, 3, 3)}),
        InputError,
        "'c'.*does not fit",
    ),
    "symbolic size": (
        lambda: model([node("Relu", ["x"], ["y"])], ("n", "m"), {}),
        UnsupportedError,
        "leading dimension",
    ),
    "division by zero": (
        lambda: model([node("Div", ["x", "c"], ["y"], name="d")], (1, 3), {"c": np.zeros(3, np.float32)}),
        InputError,
        "by zero",
    ),
    "negative variance": (
        lambda: model(
            [node("BatchNormalization", ["x", "c", "c", "c", "v"], ["y"], name="bn")],
            (1, 3),
            {"c": normal(3), "v": -np.ones(3, np.float32)},
        ),
        InputError,
        "'bn'.*variance",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    make, kind, message = BAD[name]
    path = tmp_path / "net.onnx"
    path.write_bytes(make())
    with pytest.raises(kind, match=message) as caught:
        read_onnx(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


SCALARS = {
    "a vector times a vector": ((3,), [("MatMul", ["x", "v"], {})]),
    "of a batch": (("N", 3), [("MatMul", ["x", "v"], {})]),
    "all axes reduced": ((1, 3), [("Mul", ["x", "v"], {}), ("ReduceSum", ["#"], {"keepdims": 0})]),
    "one element": ((3,), [("MatMul", ["x", "w"], {}), ("Gather", ["#", "first"], {})]),
    "within the network": (
        (3,),
        [("MatMul", ["x", "v"], {}), ("Relu", ["#"], {}), ("Mul", ["#", "v"], {}), ("MatMul", ["#", "v"], {})],
    ),
}
"""Networks of numbers without axes: the shape of the input, and each node with its inputs, # being the one before."""


@pytest.mark.parametrize("name", SCALARS)
def test_of_a_number_without_axes_is_decided_as_of_a_vector_of_one(name: str) -> None:
    shape, steps = SCALARS[name]
    constants = {"v": np.float32([1, -2, 0.5]), "w": np.eye(3, dtype=np.float32), "first": np.int64(0)}
    nodes, last = [], "x"
    for number, (operator, inputs, attributes) in enumerate([*steps, ("Relu", ["#"], {})], start=1):
        output = "y" if number > len(steps) else f"h{number}"
        names = [last if one == "#" else one for one in inputs]
        nodes.append(helper.make_node(operator, names, [output], **attributes))
        last = output
    network = read_onnx(model(nodes, shape, constants))
    assert network.source.output_shape == (1,)
    corners = np.array(list(itertools.product((-0.5, 1.0), repeat=3)), np.float32)
    assert_agrees(network, corners)
    # All of these networks are largest in a corner.
    most = float(network(torch.from_numpy(corners)).max())
    box = Box(np.full(3, -0.5), np.full(3, 1.0))
    for bound, right in ((most + 0.125, Verdict.UNSAT), (most - 0.125, Verdict.SAT)):
        query = Query(network, Property(box, ((Row(((0, Fraction(-1)),), Fraction(-bound)),),)))
        for method in ("ibp", "crown", "alpha-crown", "attack", "split", "bab", "milp", "smt", "auto"):
            (outcome,) = claims(make(method), [query], 60.0)
            complete = method in ("split", "bab", "milp", "smt", "auto")
            assert outcome.verdict is right or (not complete and outcome.reason is Reason.INCOMPLETE), (method, outcome)


def test_missing_and_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.onnx: no such file"):
        read_onnx(tmp_path / "none.onnx")
    (tmp_path / "cut.onnx.gz").write_bytes(gzip.compress(b"hello")[:-6])
    with pytest.raises(InputError, match=r"cut\.onnx\.gz: damaged gzip file"):
        read_onnx(tmp_path / "cut.onnx")


# --- to ONNX --------------------------------------------------------------------------------------------------------


def test_what_was_read_is_written_as_it_was() -> None:
    data = model(OPERATORS["Mul Div Neg"][0], (1, 3, 4), OPERATORS["Mul Div Neg"][2])
    assert write_onnx(read_onnx(data)) == data


@pytest.mark.parametrize("name", ["Mul Div Neg", "MatMul without batch"])
def test_what_was_read_can_be_written_anew(name: str) -> None:
    nodes, shape, constants, opset = OPERATORS[name]
    network = read_onnx(model(nodes, shape, constants, opset))
    again = read_onnx(write_onnx(replace(network, source=replace(network.source, onnx=None))))
    assert again.digest == network.digest


def test_numbers_beyond_float32_are_not_rounded_in_silence() -> None:
    network = read_onnx(model(OPERATORS["BatchNormalization"][0], (1, 3, 4, 5), OPERATORS["BatchNormalization"][2]))
    with pytest.raises(UnsupportedError, match="do not fit float32"):
        write_onnx(replace(network, source=replace(network.source, onnx=None)))


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_competition_networks_agree_on_their_boxes(family: str, data: Path) -> None:
    """The networks of the family, on random inputs of the box of its first property."""
    from verifiable_relu.spec import read_instances, read_vnnlib

    # What is drawn must not depend on the tests that ran before.
    boxes, rng = {}, np.random.default_rng(0)
    for instance in read_instances(data / "vnncomp" / family / "instances.csv"):
        boxes.setdefault(instance.onnx, instance.vnnlib)
    assert boxes
    # This family has four networks of each of eight sizes in turn; what differs is the size alone.
    alike = 8 if family == "tllverifybench" else 1
    for path, vnnlib in list(boxes.items())[::alike]:
        network = read_onnx(path)
        box = read_vnnlib(vnnlib).properties[0].box
        x = box.lower + rng.random((3, network.input_size)) * (box.upper - box.lower)
        # Outputs may be small beside what they are the difference of.
        assert_agrees(network, x.reshape(3, *network.source.input_shape), 1e-4)


def test_the_page_of_operators_is_what_the_table_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operators.md").read_text("utf-8")
    groups = page[page.index("## Affine") :].split("\n## ")
    newest = int(re.search(r"opset 7 to (\d+)", page)[1])  # type: ignore[index]
    for name, group in zip(GROUPS, groups, strict=False):
        found = re.findall(r"\b([\w.]+) (\d+)(?:\+|–(\d+))(?=,|$)", group, re.MULTILINE)
        assert [operator for operator, *_ in found] == sorted(o for o in GROUP if GROUP[o] == name)
        for operator, first, last in found:
            read = {version for op, version in CONVERTERS if op == operator}
            began = {s.since_version for s in onnx.defs.get_all_schemas_with_history() if s.name == operator}
            span = range(int(first), int(last or newest) + 1)
            assert min(read) == span[0] and max(read) <= span[-1] and began & set(span) <= read, operator
    constants = groups[len(GROUPS)].split("\n\n")[2].strip()
    assert constants.replace("\n", " ") == ", ".join(sorted(FOLDED))
