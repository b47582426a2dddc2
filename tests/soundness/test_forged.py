"""Forged certificates: hints cannot be false, so what is forged is what is claimed, covered, cut off, or spoken of."""

from __future__ import annotations

import random
from fractions import Fraction
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.support.onnx_files import onnx_file
from tests.unit.test_check import ABSOLUTE, PIECEWISE, PROPERTY, Tree, boxed, files, graph, network, outcome, value
from verifiable_relu.check import BadInput, Refused, check, proof
from verifiable_relu.check.__main__ import main
from verifiable_relu.check.functions import Kinked
from verifiable_relu.check.graph import Graph
from verifiable_relu.check.properties import RowCondition

CLOSE: dict[str, Any] = {"close": [[0]]}
HALF: dict[str, Any] = {"close": [[0]], "slopes": [[0, [0, 1], [-1, 1, 1], "both"]]}
"""y = |x| + 1/2 ≥ 1/2, with both slopes 1/2."""


def part(most: str = "7/16", **keys: Any) -> dict[str, Any]:
    return {"part": {"box": 0, "polytopes": [[{"y": [[0, "1"]], "most": most}]], **keys}}


def refused(folder: Path, tree: Tree, prop: str = "0.4375", data: bytes = ABSOLUTE, **keys: Any) -> str:
    """Why a certificate is refused, or nothing; of y = |x| + 1/2 over [−1, 1], by default."""
    text = prop if "(" in prop else PROPERTY.format(prop)
    certificate, _, net, _, spec = files(folder, text, tree, data, **keys)
    try:
        check(Path(certificate), Path(net), Path(spec))
    except (Refused, BadInput) as error:
        return str(error)
    return ""


def hinted(known: Graph, rng: random.Random) -> Tree:
    """Bounds, planes above kinked neurons, slopes and multipliers, all drawn at random."""

    def drawn(count: int) -> list[int]:
        return [-3, *(rng.randint(-12, 12) for _ in range(count))]

    tree: Tree = []
    slopes, multipliers = [], []
    sizes = [known.nodes[number].size for number in known.activations]
    kinked = [getattr(known.nodes[number], "function", None) for number in known.activations]
    for a, (size, function) in enumerate(zip(sizes, kinked, strict=True)):
        tree.append({"bound": a})
        if isinstance(function, Kinked):
            neurons = rng.sample(range(size), min(3, size))
            slopes.append([a, neurons, drawn(len(neurons)), rng.choice(["lower", "upper", "both"])])
            multipliers.append([a, neurons, drawn(len(neurons))])
            before = [[-1, [0], drawn(1)], *([[a - 1, [0], drawn(1)]] if a and kinked[a - 1] else [])]
            tree += [{"plane": [a, j], "terms": before, "bends": drawn(2)} for j in neurons[:2]]
    return [*tree, {"slopes": slopes}, {**CLOSE, "multipliers": multipliers}]


@pytest.mark.parametrize("kind", PIECEWISE)
def test_no_value_that_a_point_has_is_accepted_as_a_threshold(kind: str) -> None:
    """For certificates with bounds alone, with halves, splits, and hints at random; at corners and samples."""
    for seed in range(3):
        rng, data, known = random.Random(f"{kind}{seed}"), network(kind, seed), graph(kind, seed)
        size = known.nodes[0].size
        center = [Fraction(rng.randint(-8, 8), 8) for _ in range(size)]
        points = [[c + Fraction(rng.choice([-4, 4, rng.randint(-4, 4)]), 16) for c in center] for _ in range(60)]
        least = min(value(kind, data, point)[0] for point in points)
        bounds = [{"bound": a} for a in range(len(known.activations))]
        middle = [0, round(center[0] * 8), -3]
        trees = {
            "bounds": [*bounds, CLOSE],
            "halves": [{"halve": middle}, *[*bounds, CLOSE] * 2],
            "splits": [*bounds, {"split": [0, 0, 0, 0]}, CLOSE, {"split": [0, 1, 1, -3]}, CLOSE, CLOSE],
            **{f"hints {draw}": hinted(known, rng) for draw in range(3)},
        }
        for name, tree in trees.items():
            for threshold, accepted in ((least, False), (least - 4096, True)):
                asked = boxed(center, Fraction(1, 4), [[RowCondition(((0, Fraction(1)),), threshold)]])
                assert (not outcome(known, asked, tree)) == accepted, (kind, seed, name)


TWO = PROPERTY.replace("(assert (<= Y_0 {}))", "(assert (or (<= Y_0 0.4375) (and (>= Y_0 1.6) (<= Y_0 3))))")
BOXES = """(declare-const X_0 Real) (declare-const Y_0 Real) (assert (<= Y_0 0.75))
(assert (or (and (>= X_0 0.5) (<= X_0 1)) (and (>= X_0 {}) (<= X_0 1))))"""

UNCOVERED: dict[str, tuple[str, Tree]] = {
    "a disjunct is left out": (TWO, [part(), CLOSE]),
    "a part has a row that its disjunct has not": (
        TWO,
        [part(), CLOSE, {"part": {"box": 0, "polytopes": [[{"y": [[0, "-1"]], "most": "-8/5"}, {"y": [[0, "1"]],
         "most": "0"}]]}}, {"close": [[0, [0, 0, 1]]]}],
    ),
    "a polytope is smaller than its disjunct": (PROPERTY.format("0.75"), [part(), CLOSE]),
    "one of two boxes is spoken of": (BOXES.format("0.6"), [part("3/4"), CLOSE]),
    "one of two boxes is spoken of twice": (BOXES.format("-1"), [part("3/4"), CLOSE, part("3/4"), CLOSE]),
    "a polytope of a part is left open": (
        TWO, [{"part": {"box": 0, "polytopes": [[{"y": [[0, "1"]], "most": "7/16"}],
         [{"y": [[0, "-1"]], "most": "-8/5"}, {"y": [[0, "1"]], "most": "3"}]]}}, {"close": [[0]]}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNCOVERED)
def test_parts_that_do_not_cover_the_property_are_refused(name: str, tmp_path: Path) -> None:
    prop, tree = UNCOVERED[name]
    assert refused(tmp_path, tree, prop)


def test_parts_that_cover_the_property_are_accepted(tmp_path: Path) -> None:
    rest = [{"y": [[0, "-1"]], "most": "-8/5"}]
    high = [{"part": {"box": 0, "polytopes": [rest]}}, {"bound": 0}, CLOSE]
    # Of fewer rows than a disjunct has, and by negative multiples of none.
    assert not refused(tmp_path, [part(), CLOSE, *high], TWO)
    scaled = [
        {"part": {"box": 0, "polytopes": [[{"y": [[0, "4"]], "most": "7/4"}], rest]}},
        {"only": [1]},
        CLOSE,
        CLOSE,
    ]
    scaled[2] = {"close": [[1]]}
    assert not refused(tmp_path, scaled, TWO)


FALSE: dict[str, tuple[Tree, str]] = {
    "a half of a box is lost": ([{"halve": [0, 0, 0]}, {"bound": 0}, CLOSE], "7/16"),
    "a half of a neuron is lost": ([{"split": [0, 0, 0, 0]}, CLOSE], "7/16"),
    "a box is halved where it is not": ([{"halve": [0, 2, 0]}, {"bound": 0}, CLOSE, {"bound": 0}, CLOSE], "1/2"),
    "a neuron is split where it is not": ([{"split": [0, 0, -2, 0]}, HALF, HALF], "1/2"),
    "halves overlap, and both are false": ([{"halve": [0, 0, 0]}, *[{"bound": 0}, CLOSE] * 2], "1/2"),
    "a claim without proof": ([{"tighten": [0, 0, 1, 1, -1]}, {"bound": 0}, CLOSE], "3/4"),
    "a claim that is false": ([{"tighten": [0, 0, 1, 1, -1]}, CLOSE, {"bound": 0}, CLOSE], "3/4"),
    "a claim that is its own proof": (
        [{"tighten": [0, 0, 1, 1, -1]}, {"tighten": [0, 0, 1, 1, -1]}, CLOSE, CLOSE, {"bound": 0}, CLOSE], "3/4"),
    "a claim about the other side": ([{"tighten": [0, 0, 1, 1, -1]}, {"tighten": [0, 0, -1, -9, -3]}, CLOSE, CLOSE,
                                      {"bound": 0}, CLOSE], "3/4"),
    "a negative multiplier of a row": ([{"close": [[0, [0, -1]]], "slopes": HALF["slopes"]}], "3"),
    "one of two polytopes is lost by a cut of both": ([{"only": [0]}, HALF], "1/2"),
    "a polytope is closed by no row": ([{"close": [[0, [0, 0]]]}], "3"),
    "slopes whose products overflow": ([{"close": [[0]], "slopes": [[0, [0, 1], [900, 1 << 53, -(1 << 53)], "both"]],
                                         "multipliers": [[0, [0, 1], [900, 1, 1]]]}], "3"),
    "multipliers beyond those that prove it": ([{"close": [[0]], "multipliers": [[0, [0, 1], [0, 1, -1]]]}], "1/2"),
}  # fmt: skip


@pytest.mark.parametrize("name", FALSE)
def test_trees_that_prove_what_a_point_contradicts_are_refused(name: str, tmp_path: Path) -> None:
    """|x| + 1/2 is 1/2 at 0, and below 3/4 around it; whatever the tree says of [−1, 1]."""
    tree, most = FALSE[name]
    assert refused(tmp_path, [part(most), *tree], str(float(Fraction(most))))


TRUE: list[Tree] = [
    [{"halve": [0, 0, 0]}, *[{"bound": 0}, CLOSE] * 2],
    [
        {"split": [0, 0, 0, 0]},
        {"close": [[0]], "slopes": [[0, [1], [0, 1], "lower"]]},
        {"close": [[0]], "slopes": [[0, [1], [0, 0], "both"]]},
    ],
    [{"tighten": [0, 0, 1, -17, -4]}, CLOSE, {"bound": 0}, CLOSE],
    [HALF],
    [
        {"split": [0, 0, 0, 0]},
        *(
            {"close": [[0]], "slopes": [[0, [0, 1], [0, 0, t], "both"]], "multipliers": [[0, [0], [0, w]]]}
            for t, w in ((0, -1), (1, 1))
        ),
    ],
]


@pytest.mark.parametrize("tree", TRUE, ids=lambda tree: next(iter(tree[0])))
def test_trees_of_these_kinds_prove_what_is_true(tree: Tree, tmp_path: Path) -> None:
    assert not refused(tmp_path, [part(), *tree])


def test_a_checker_halves_boxes_only_so_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The half of the box that holds 0 is proved by halving it again, as often as both limits allow."""
    tree: Tree = [part(), {"halve": [0, -3, -2]}, CLOSE, CLOSE]
    assert not refused(tmp_path, tree)
    for limit in ("HALVINGS", "ALL_HALVINGS"):
        with monkeypatch.context() as patched:
            patched.setattr(proof, limit, 2)
            assert "not proven" in refused(tmp_path, tree)


def test_coefficients_that_float64_does_not_hold_prove_nothing(tmp_path: Path) -> None:
    """2·10⁻³²⁴·Y ≤ −10⁻³²² is Y ≤ −50, which −60 is; rounded to float64, the coefficient is 0."""
    data = onnx_file([helper.make_node("Gemm", ["x", "w"], ["y"])], {"x": [1, 1]}, {"y": [1, 1]}, w=[[60.0]])
    first = {"part": {"box": 0, "polytopes": [[{"y": [[0, "2e-324"]], "most": "-1e-322"}]]}}
    tree: Tree = [first, {"close": [[0, [900, 1 << 53]]]}]
    assert refused(tmp_path, tree, PROPERTY.replace("Y_0 {}", "(* 2e-324 Y_0) -1e-322"), data)


def rewritten(change: dict[str, Any]) -> bytes:
    """|x| + 1/2 with other weights."""
    model = onnx.load_from_string(ABSOLUTE)
    for tensor in model.graph.initializer:
        if tensor.name in change:
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.array(change[tensor.name], np.float32), tensor.name))
    return bytes(model.SerializeToString())


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"network": "0" * 64}, "another network"),
        ({"property": "0" * 64}, "another property"),
        ({"network": sha256(rewritten({"b": [4.0]})).hexdigest()}, "another network"),
        ({"certificate": 5}, "version 5"),
        ({"certificate": True}, "version True"),
        ({"claim": "sat"}, "record of point"),
        ({"arithmetic": "float8"}, "not known"),
        ({"arithmetic": ["float32"]}, "not known"),
        ({"arithmetic": "float16", "family": ["2", "2"]}, "no family"),
        ({"family": ["1/2"]}, "a hardness from 1 on"),
        ({"family": ["2", "2"]}, "a hardness from 1 on"),
        ({"other": "0" * 64, "pairs": [[0, 0]]}, "a record of certificate"),
    ],
    ids=str,
)
def test_claims_about_other_files_and_unknown_things_are_refused(
    keys: dict[str, Any], said: str, tmp_path: Path
) -> None:
    assert said in refused(tmp_path, [part(), HALF], **keys)


@pytest.mark.parametrize(
    ("keys", "true", "false"),
    [
        # x·Φ(λx) + |x|/2 …: at x = 0.6/λ a λ-GELU of x and of −x add up to less than |x|.
        ({"family": ["8"]}, {"family": ["8"]}, {"family": ["1"]}),
        ({"arithmetic": "float32"}, {"arithmetic": "float32"}, {"arithmetic": "bfloat16"}),
        ({"arithmetic": "float32"}, {}, {"arithmetic": "float16"}),
    ],
    ids=str,
)
def test_what_holds_for_less_is_refused_for_more(
    keys: dict[str, Any], true: dict[str, Any], false: dict[str, Any], tmp_path: Path
) -> None:
    """Smaller λ and coarser arithmetics reach more."""
    tree: Tree = [{"halve": [0, 0, 0]}, *[{"bound": 0}, CLOSE] * 2]
    accepted = [most for most in np.linspace(0.2, 0.4999, 30) if not refused(tmp_path, [part(f"{most:.6f}"), *tree],
                f"{most:.6f}", **keys)]  # fmt: skip
    most = f"{max(accepted):.6f}"
    assert not refused(tmp_path, [part(most), *tree], most, **true)
    assert refused(tmp_path, [part(most), *tree], most, **false)


def test_a_certificate_of_one_arithmetic_is_not_accepted_for_another(tmp_path: Path) -> None:
    certificate, _, net, _, spec = map(Path, files(tmp_path, PROPERTY.format("0.4"), [part("2/5"), HALF]))
    assert check(certificate, net, spec, "real")
    with pytest.raises(Refused, match="real arithmetic, not about float32"):
        check(certificate, net, spec, "float32")


def other_kind(operator: str, size: int = 2) -> bytes:
    """ReLU's place taken by another operator, or by one of more neurons."""
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["z"]),
        helper.make_node(operator, ["z"], ["r"]),
        helper.make_node("Gemm", ["r", "v"], ["y"]),
    ]
    weights = np.array([[1.0, -1.0, 0.5][:size]]), np.array([[1.0], [1.0], [0.0]][:size])
    return onnx_file(nodes, {"x": [1, 1]}, {"y": [1, 1]}, w=weights[0], v=weights[1])


PAIRS: dict[str, tuple[bytes, list[Any], str]] = {
    "of other sizes": (other_kind("Relu", 3), [[0, 0]], "as many"),
    "of another function": (other_kind("Abs"), [[0, 0]], "as many"),
    "twice": (other_kind("Relu"), [[0, 0], [0, 0]], "in two pairs"),
    "of nothing": (other_kind("Relu"), [[0, 1]], "number of no activation"),
    "of no numbers": (other_kind("Relu"), [["0", 0]], "number of no activation"),
}


def asked_of_two(folder: Path, other: bytes, pairs: list[Any], most: str, tree: Tree) -> str:
    """Why Y_1 − Y_0 > most of |x| + 1/2 and another network is refused, or nothing."""
    (folder / "o.onnx").write_bytes(other)
    text = PROPERTY.replace("(assert (<= Y_0 {}))", f"(declare-const Y_1 Real) (assert (<= (- Y_1 Y_0) {most}))")
    first = {"part": {"box": 0, "polytopes": [[{"y": [[0, "-1"], [1, "1"]], "most": most}]]}}
    keys = {"other": sha256(other).hexdigest(), "pairs": pairs}
    certificate, _, net, _, spec = map(Path, files(folder, text, [first, *tree], **keys))
    try:
        check(certificate, net, spec, None, folder / "o.onnx")
    except Refused as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_that_are_none_are_refused(name: str, tmp_path: Path) -> None:
    other, pairs, said = PAIRS[name]
    assert said in asked_of_two(tmp_path, other, pairs, "-4", [CLOSE])


@pytest.mark.parametrize("scale", [1.0625, 0.75, -1.0, 2.0])
def test_differences_are_not_bounded_by_more_than_they_are(scale: float, tmp_path: Path) -> None:
    """At points the other network's ReLU(w·x) + ReLU(−x) less the first one's are known."""
    other, points = rewritten({"w": [[scale, -1.0]]}), np.linspace(-1, 1, 257)
    least = float((np.maximum(scale * points, 0) - np.maximum(points, 0)).min())
    tree: Tree = [*({"bound": a} for a in range(3)), CLOSE]
    assert asked_of_two(tmp_path, other, [[0, 0]], str(least), tree)
    assert not asked_of_two(tmp_path, other, [[0, 0]], "-8.0", tree)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "\n".join(sorted(text.splitlines())) + "\n",
        lambda text: text.replace('"7/16"', '"NaN"'),
        lambda text: text.replace('"7/16"', "NaN"),
        lambda text: text.replace('"7/16"', "0.4375"),
        lambda text: text.replace("[[0]]", "[[" + "9" * 4999 + "]]"),
        lambda text: text.replace("[[0]]", "[" * 33 + "]" * 33),
        lambda text: '{"end": 0}\n',
        lambda text: "",
        lambda text: text * 2,
        lambda text: text.replace("{", "{" + " " * (1 << 25), 1),
        lambda text: text.replace("[-1, 1, 1]", "[901, 1, 1]"),
        lambda text: text.replace("[-1, 1, 1]", "[0, 9007199254740993, 1]"),
    ],
)
def test_damaged_certificates_end_in_one_line(damage: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = files(tmp_path, PROPERTY.format("0.4375"), [part(), HALF])
    path = Path(arguments[0])
    assert main(arguments) == 0
    capsys.readouterr()
    path.write_text(damage(path.read_text()))
    status = main(arguments)
    said = capsys.readouterr()
    assert status in (1, 2) and (said.out + said.err).count("\n") == 1
