"""Which networks have certificates, method by method; the table of docs/certificates.md is made here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import helper

from tests.soundness import check_agreement
from tests.support import nets, solver_cases
from tests.support.asking import claims
from tests.support.certificates import Case, checked, excluded, records
from tests.support.draws import draws
from tests.support.onnx_files import onnx_file
from tests.support.solver_cases import ball, row
from verifiable_relu.campaign.certificates import proofs
from verifiable_relu.check import BadInput, Refused
from verifiable_relu.check.graph import AffineNode
from verifiable_relu.check.model import read_model
from verifiable_relu.errors import UnsupportedError
from verifiable_relu.network import read_onnx, write_onnx
from verifiable_relu.network.family import hardened, least_hardness
from verifiable_relu.network.nodes import Activation, Gelu, LeakyRelu, Relu, Sigmoid, Tanh
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.specfile import vnnlib_text
from verifiable_relu.trust.certificate_file import write_unsat
from verifiable_relu.verifiers.auto import recording
from verifiable_relu.verifiers.base import Verdict
from verifiable_relu.verifiers.incomplete import Ibp
from verifiable_relu.verifiers.registry import make

PAGE = Path(__file__).parents[2] / "docs" / "certificates.md"

METHODS = ("ibp", "crown-ibp", "crown", "alpha-crown", "split", "bab", "milp", "smt", "smt-exact", "auto")


def of_architecture(architecture: Callable[..., Any], kind: type[Activation] = Relu) -> Callable[[], bytes]:
    """The file of a network of ``tests.support.nets`` with an activation."""

    def made() -> bytes:
        rng = np.random.default_rng(7)
        return write_onnx(architecture(rng, nets.gaussian(rng), kind))

    return made


def with_slopes() -> bytes:
    return write_onnx(solver_cases.mlp(np.random.default_rng(7), (3, 6, 5, 2), leaky=True))


def of_operators(*nodes: Any, inputs: tuple[int, ...], axes: int = 2, **weights: Any) -> bytes:
    """The file of a network x → y of these nodes; y has so many axes."""
    return onnx_file(nodes, {"x": inputs}, {"y": [None] * axes}, 20, **weights)


def between_layers(*nodes: Any, **weights: Any) -> Callable[[], bytes]:
    """The file of a network with something between two linear layers: h → r, both (1, 4)."""

    def made() -> bytes:
        rng = np.random.default_rng(7)
        before = helper.make_node("Gemm", ["x", "v", "b"], ["h"])
        after = helper.make_node("Gemm", ["r", "w"], ["y"])
        given = {"v": rng.normal(size=(3, 4)), "b": rng.normal(size=4), "w": rng.normal(size=(4, 2)), **weights}
        return of_operators(before, *nodes, after, inputs=(1, 3), **given)

    return made


def of_windows(*nodes: Any, inputs: tuple[int, ...] = (1, 1, 3, 3), **shapes: tuple[int, ...]) -> bytes:
    """The file of a network x → f → y: nodes, a flattening and a linear layer, whose weights have these shapes."""
    rng = np.random.default_rng(7)
    ends = helper.make_node("Flatten", ["f"], ["g"]), helper.make_node("Gemm", ["g", "w"], ["y"])
    weights = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    return of_operators(*nodes, *ends, inputs=inputs, **weights)


def pooled() -> bytes:
    """Maxima over windows of six numbers, some of them padding."""
    return of_windows(
        helper.make_node("Conv", ["x", "v", "b"], ["z"], pads=[1, 0, 0, 1]),
        helper.make_node("MaxPool", ["z"], ["p"], kernel_shape=[3, 2], pads=[1, 0, 0, 0]),
        helper.make_node("Relu", ["p"], ["f"]),
        **{"v": (2, 1, 2, 2), "b": (2,), "w": (8, 2)},
    )


def averaged() -> bytes:
    """Means over windows, some of them over three numbers or padding, and over whole channels."""
    return of_windows(
        helper.make_node("Conv", ["x", "v", "b"], ["z"], pads=[1, 0, 0, 1]),
        helper.make_node("AveragePool", ["z"], ["p"], kernel_shape=[3, 2], pads=[1, 0, 0, 0]),
        helper.make_node("Relu", ["p"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["f"]),
        **{"v": (2, 1, 2, 2), "b": (2,), "w": (2, 2)},
    )


def transposed() -> bytes:
    """Transposed convolutions in two groups."""
    attributes = {"group": 2, "strides": [2, 2], "pads": [1, 1, 0, 0], "output_padding": [1, 1]}
    return of_windows(
        helper.make_node("ConvTranspose", ["x", "v", "b"], ["z"], **attributes),
        helper.make_node("Relu", ["z"], ["f"]),
        inputs=(1, 2, 2, 2),
        **{"v": (2, 2, 2, 2), "b": (4,), "w": (64, 2)},
    )


KINDS: dict[str, tuple[Callable[[], bytes], float | None]] = {
    "fully connected, ReLU": (of_architecture(nets.mlp), None),
    "convolutions": (of_architecture(nets.cnn), None),
    "residual": (of_architecture(nets.residual), None),
    "LeakyReLU": (of_architecture(nets.mlp, LeakyRelu), None),
    "PReLU": (with_slopes, None),
    "Abs": (between_layers(helper.make_node("Abs", ["h"], ["r"])), None),
    "Sign": (between_layers(helper.make_node("Sign", ["h"], ["r"])), None),
    "MaxPool": (pooled, None),
    "means over windows": (averaged, None),
    "transposed convolutions": (transposed, None),
    "Sigmoid": (of_architecture(nets.mlp, Sigmoid), None),
    "Tanh": (of_architecture(nets.cnn, Tanh), None),
    "λ-GELU": (of_architecture(nets.residual, Gelu), None),
    "all λ' ≥ λ, of ReLU": (of_architecture(nets.residual), 4.0),
    "all λ' ≥ λ, of λ-GELU": (of_architecture(nets.cnn, Gelu), 200.0),
    "Clip, Max, Min": (between_layers(helper.make_node("Max", ["h", "m"], ["r"]), m=np.zeros(4)), None),
    "other functions of one variable": (between_layers(helper.make_node("Softplus", ["h"], ["r"])), None),
    "products of computed values": (between_layers(helper.make_node("Mul", ["h", "h"], ["r"])), None),
}
"""What a network is made of: its file, and the λ of the family that is asked for."""


@cache
def question(kind: str) -> tuple[Query, bytes, bytes]:
    """A query that intervals answer, and the files of its network and of its property."""
    made, lam = KINDS[kind]
    data = made()
    network = read_onnx(data)
    whole = network if lam is None else hardened(network, lam)
    center = np.round(np.random.default_rng(7).normal(size=network.input_size) * 8) / 8
    box = ball(center, 1 / 64)
    outputs = network.to(torch.float64)(torch.from_numpy(center).reshape(1, *network.input_shape)).flatten()
    coefficients = dict.fromkeys(range(network.output_size), 1)
    for spare in 2.0 ** np.arange(-2, 12):
        most = Fraction(round((float(outputs.sum()) - spare) * 64), 64)
        query = Query(whole, excluded(box, (row(coefficients, most),)))
        (outcome,) = claims(Ibp(), [query], 60.0)
        if outcome.verdict is Verdict.UNSAT:
            return query, data, vnnlib_text(query.property).encode()
    raise AssertionError(kind)


def ended(kind: str, method: str, folder: Path) -> str:
    """What becomes of the certificate of a question by a method."""
    query, data, text = question(kind)
    outcomes = claims(recording(make(method)), [query], 60.0)
    if outcomes[0].verdict is not Verdict.UNSAT:
        return "–"
    try:
        joint = [Fraction(lam) for lam in least_hardness(query.network)]
        write_unsat(folder / "made", data, text, list(proofs([query], outcomes, 60.0)), joint)
        assert checked(folder, Case(data, text, records(folder / "made")), (folder / "made").read_bytes())
    except (UnsupportedError, BadInput):
        return "no"
    return "yes" if outcomes[0].proof is not None else "again"


def table(folder: Path) -> Iterator[str]:
    """The lines of the page's table."""
    yield f"| networks | {' | '.join(f'`{method}`' for method in METHODS)} |"
    yield "|---" * (1 + len(METHODS)) + "|"
    for kind in KINDS:
        yield f"| {kind} | {' | '.join(ended(kind, method, folder) for method in METHODS)} |"


@pytest.mark.thorough
def test_the_page_says_of_which_networks_each_method_has_certificates(tmp_path: Path) -> None:
    found = "\n".join(table(tmp_path))
    assert found in PAGE.read_text(encoding="utf-8"), found


def windows(rng: np.random.Generator, rank: int) -> dict[str, Any]:
    """Attributes of windows: strides, dilations, paddings of all kinds."""
    kernel = rng.integers(1, 4, rank)
    # onnxruntime pads to the same size by less than nothing where windows are further apart than they are wide.
    strides = np.minimum(rng.integers(1, 3, rank), kernel)
    found: dict[str, Any] = {"kernel_shape": kernel.tolist(), "strides": strides.tolist()}
    if rng.random() < 0.5:
        found["dilations"] = rng.integers(1, 3, rank).tolist()
    if rng.random() < 0.3:
        found["auto_pad"] = str(rng.choice(["SAME_UPPER", "SAME_LOWER", "VALID"]))
    elif rng.random() < 0.7:
        found["pads"] = rng.integers(0, 2, 2 * rank).tolist()
    return found


def drawn_windows(kind: str, rng: np.random.Generator) -> bytes:
    """The file of one operator over windows, with one to three axes."""
    rank = int(rng.integers(1, 4))
    sizes, attributes, given = (*rng.integers(2, 6, rank).tolist(),), windows(rng, rank), {}
    channels = int(rng.integers(1, 4))
    if kind == "GlobalAveragePool":
        attributes = {}
    elif kind == "ConvTranspose":
        groups, per_group = [int(g) for g in (rng.choice([1, channels]), rng.integers(1, 3))]
        kernel = attributes.pop("kernel_shape")
        given = {"w": rng.integers(-8, 9, (channels, per_group, *kernel)) / 4}
        if rng.random() < 0.5:
            given["b"] = rng.integers(-8, 9, groups * per_group) / 4
        attributes["group"] = groups
        if rng.random() < 0.4:
            # Less than the stride, or the dilation.
            attributes["output_padding"] = [int(rng.integers(0, s)) for s in attributes["strides"]]
    elif rng.random() < 0.3:
        attributes["ceil_mode"] = 1
    if kind == "AveragePool" and rng.random() < 0.5:
        attributes["count_include_pad"] = 1
    node = helper.make_node(kind, ["x", *given], ["y"], **attributes)
    return of_operators(node, inputs=(1, channels, *sizes), axes=2 + rank, **given)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["AveragePool", "ConvTranspose", "GlobalAveragePool", "MaxPool"])
def test_any_windows_are_read_as_they_are_defined(kind: str) -> None:
    """Exactly, at random points; and so does onnxruntime, nearly."""
    read = 0
    for seed in range(draws(60)):
        data = drawn_windows(kind, np.random.default_rng(seed))
        found = check_agreement.judge(data, seed)
        assert not found.disagreements, (seed, data, found.disagreements)
        assert "source alone" not in found.compared
        read += found.refused is None
    assert read >= draws(20)


@pytest.mark.parametrize("scales", [[1, 1, 2, 3], [1, 2, 1, 1], [1, 1, 1.5, 1], [1, 1, 0.5, 1]])
def test_numbers_are_repeated_as_onnxruntime_does(scales: list[float]) -> None:
    """Before a convolution, which may not add the weights of a number that is there twice in a rounded sum."""
    rng = np.random.default_rng(5)
    weight = rng.normal(size=(2, 2 * int(scales[1]), 2, 2)).astype(np.float32)
    nodes = [
        helper.make_node("Upsample", ["x", "s"], ["u"]),
        helper.make_node("Conv", ["u", "w"], ["y"], pads=[1, 0, 0, 1]),
    ]
    data = onnx_file(nodes, {"x": [1, 2, 3, 2]}, {"y": None}, 9, s=np.float32(scales), w=weight)
    found = check_agreement.judge(data, 0)
    assert not found.disagreements
    whole = all(scale == int(scale) >= 1 for scale in scales)
    assert (found.refused is None) == whole and (not whole or found.compared["source alone"])
    if whole:
        (conv,) = [node for node in read_model(data).nodes if isinstance(node, AffineNode) and (node.least < 1)]
        assert {float(w) for w in conv.terms[0][1].data} <= {float(w) for w in weight.ravel()}


def test_the_relus_of_maxima_are_no_activations_of_a_family() -> None:
    graph = read_model(pooled())
    assert len(graph.activations) == 4
    with pytest.raises(Refused, match="ReLU or GELU alone"):
        graph.hardened([Fraction(4)] * 4)


def of_window(kind: str, **attributes: Any) -> bytes:
    weight = {"w": np.ones((2, 1, 2, 2))} if kind == "ConvTranspose" else {}
    given = attributes if weight else {"kernel_shape": [2, 2], **attributes}
    return of_operators(helper.make_node(kind, ["x", *weight], ["y"], **given), inputs=(1, 2, 4, 4), axes=4, **weight)


REFUSED = {
    "the same size": (of_window("ConvTranspose", auto_pad="SAME_UPPER", strides=[2, 2]), "not given"),
    "a size that is given": (of_window("ConvTranspose", output_shape=[4, 4]), "not given"),
    "pads less than none": (of_window("ConvTranspose", pads=[-1, 0, 0, 0]), "malformed"),
    "groups of no channels": (of_window("ConvTranspose", group=3), "do not fit"),
    "a window of one axis": (of_window("AveragePool", kernel_shape=[2]), "expected"),
    "a window of padding": (of_window("AveragePool", pads=[2, 0, 0, 0]), "as wide as the window"),
    "two ways to pad": (of_window("AveragePool", auto_pad="SAME_UPPER", ceil_mode=1), "ceil_mode"),
    "two images": (
        of_operators(helper.make_node("GlobalAveragePool", ["x"], ["y"]), inputs=(2, 1, 2, 2), axes=4), "one sample",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_windows_that_are_not_known_are_refused_by_name(name: str) -> None:
    data, said = REFUSED[name]
    with pytest.raises(BadInput, match=said):
        read_model(data)
