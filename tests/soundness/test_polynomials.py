"""Random polynomial properties of small networks: verdicts beside sampling, and exact evaluation beside fractions."""

from __future__ import annotations

import random
import re
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.draws import draws
from tests.support.vnnlib_cases import holds
from verifiable_relu.campaign import run
from verifiable_relu.campaign.inputs import InstanceFiles, Loader
from verifiable_relu.execution.replay import replay
from verifiable_relu.ir.exact import evaluate_exact, is_evaluable
from verifiable_relu.ir.transform import NetworkPart, combine
from verifiable_relu.readers import from_torch, write_onnx
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.registry import make

HEAD = "(vnnlib-version <2.0>)\n(declare-network f (declare-input X real [2]) (declare-output Y real [2]))\n"
NAMES = ("X[0]", "X[1]", "Y[0]", "Y[1]")


class Drawn:
    """A network of two inputs and outputs with weights of few bits, and what it computes in fractions."""

    def __init__(self, rng: random.Random) -> None:
        sizes = (2, rng.randint(1, 4), 2)
        self.layers = [
            ([[rng.randint(-8, 8) / 4 for _ in range(n)] for _ in range(m)], [rng.randint(-4, 4) / 4 for _ in range(m)])
            for n, m in pairwise(sizes)
        ]
        first, last = (nn.Linear(n, m) for n, m in pairwise(sizes))
        with torch.no_grad():
            for layer, (weight, bias) in zip((first, last), self.layers, strict=True):
                layer.weight.copy_(torch.tensor(weight))
                layer.bias.copy_(torch.tensor(bias))
        self.network = from_torch(nn.Sequential(first, nn.ReLU(), last), (2,))

    def at(self, x: list[Fraction]) -> dict[str, Fraction]:
        """The values of all variables at an input."""
        y = x
        for number, (weight, bias) in enumerate(self.layers):
            rows = zip(weight, bias, strict=True)
            y = [sum((Fraction(w) * v for w, v in zip(row, y, strict=True)), Fraction(b)) for row, b in rows]
            y = y if number else [max(v, Fraction(0)) for v in y]
        return dict(zip(NAMES, [*x, *y], strict=True))


def polynomial(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice([*NAMES, f"{rng.randint(-30, 30) / 10}", "0.1"])
    parts = " ".join(polynomial(rng, rng.randrange(depth)) for _ in range(rng.randint(2, 3)))
    return f"({rng.choice('*+-*')} {parts})"


def drawn(rng: random.Random) -> tuple[str, list[tuple[Fraction, Fraction]]]:
    """The text of a property, and its box."""
    box = [tuple(sorted(Fraction(rng.randint(-20, 20), 10) for _ in range(2))) for _ in range(2)]
    lines = [f"(assert (and (>= X[{i}] {float(low)}) (<= X[{i}] {float(high)})))" for i, (low, high) in enumerate(box)]

    def atom() -> str:
        operator = rng.choice(["<=", ">", "<", ">=", "!=", "<="])
        far = rng.choice([0, 0, 5, 20]) * (-1 if operator in ("<=", "<") else 1)
        return f"({operator} {polynomial(rng, rng.randint(1, 3))} {float(far)})"

    for _ in range(rng.randint(1, 2)):
        lines.append(f"(assert (or {atom()} (and {atom()} {atom()})))" if rng.random() < 0.4 else f"(assert {atom()})")
    return HEAD + "\n".join(lines) + "\n", box


def of_1(text: str) -> str:
    """The text of a property in VNN-LIB 1.0."""
    heads = "".join(f"(declare-const {kind}_{i} Real)\n" for kind in "XY" for i in range(2))
    return re.sub(r"\b([XY])\[([01])\]", r"\1_\2", heads + text.removeprefix(HEAD)).replace("(!= ", "(distinct ")


@pytest.mark.thorough
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_no_verdict_on_a_polynomial_property_is_wrong(version: str, tmp_path: Path) -> None:
    said: Counter[str] = Counter()
    for seed in range(draws(40)):
        rng = random.Random(f"{version} {seed}")
        net, (text, box) = Drawn(rng), drawn(rng)
        write_onnx(net.network, tmp_path / f"{seed}.onnx")
        (tmp_path / f"{seed}.vnnlib").write_text(text if version == "2.0" else of_1(text))
        asked = Loader().read(InstanceFiles(tmp_path / f"{seed}.vnnlib", tmp_path / f"{seed}.onnx", 0.3))
        (result,) = run([asked], make(rng.choice(["auto", "split", "crown"])), budget=TimeBudget(0.3))
        # Bounds of inputs among the conditions may leave none.
        answer = "unsat" if "is empty" in result.detail else result.answer
        said[answer] += 1
        assert answer == "unsat" or result.reason != "error", (seed, text, result.detail)
        if answer == "sat":
            assert result.witness is not None
            assert holds(text, net.at(list(result.witness))), (seed, text, result.witness)
        elif answer == "unsat":
            ends = [list(pair) for pair in box]
            for _ in range(60):
                shares = [rng.choice([Fraction(0), Fraction(1), Fraction(rng.randint(0, 99), 99)]) for _ in ends]
                x = [low + share * (high - low) for (low, high), share in zip(ends, shares, strict=True)]
                assert not holds(text, net.at(x)), (seed, text, x)
    assert said["sat"] > draws(40) // 8 and said["unsat"] > draws(40) // 8, said


def test_products_are_evaluated_exactly_and_replayed_as_their_parts_run() -> None:
    for seed in range(draws(32)):
        rng = random.Random(seed)
        net = Drawn(rng)
        pairs = []
        for level in range(rng.randint(1, 4)):
            forms = []
            for _ in range(2):
                chosen = sorted(rng.sample(range(4 + level), rng.randint(1, 2)))
                forms.append((tuple((i, rng.choice([-3, 1, 10])) for i in chosen), rng.choice([0, 7])))
            pairs.append((forms[0], forms[rng.randrange(2)]))
        whole = combine([NetworkPart("f", net.network, (1, 0))], 2, replay, passed=True, products=pairs)
        x = [Fraction(rng.randint(-50, 50), rng.choice([1, 3, 8, 35])) for _ in range(2)]
        at = net.at([x[1], x[0]])
        expected = [at["Y[0]"], at["Y[1]"], *x]
        for pair in pairs:
            first, second = (sum((c * expected[i] for i, c in form), Fraction(constant)) for form, constant in pair)
            expected.append(first * second)
        assert is_evaluable(whole) and evaluate_exact(whole, x) == expected
        found = replay(whole, np.array([float(v) for v in x], np.float32))
        assert np.allclose(
            found, [float(v) for v in expected], rtol=1e-4, atol=1e-3 * max(map(abs, map(float, expected)))
        )
