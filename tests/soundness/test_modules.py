"""Random torch modules are read as what they compute, or refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.draws import draws
from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.ir.exact import evaluate_exact, is_evaluable
from verifiable_relu.ir.network import Network
from verifiable_relu.readers import from_torch
from verifiable_relu.readers.builder import OpBuilder, Value
from verifiable_relu.readers.torch import reading

from .modules import Drawn, draw

CASES = draws(200)
"""How many modules are drawn."""


def points(drawn: Drawn, dtype: torch.dtype) -> torch.Tensor:
    """Inputs of at most seven bits, so that float64 has room for what is computed of them."""
    rng = np.random.default_rng(5)
    return torch.from_numpy(rng.integers(-64, 65, size=(5, *drawn.shape)) / 32).to(dtype)


def complaint(drawn: Drawn, network: Network) -> str | None:
    """What is wrong with a network that was read; compared without the library's own comparison."""
    module = drawn.module.eval()
    dtype = next(module.parameters()).dtype
    x = points(drawn, dtype)
    with torch.no_grad():
        expected = module(x.clone())
        one = torch.cat([module(row[None].clone()) for row in x])
        found = network(x.double().flatten(1)).reshape(expected.shape)
    unit = 1e-11 if dtype == torch.float64 else 1e-4
    scale = 1 + float(expected.abs().max())
    for name, values in (("all at once", expected), ("one by one", one)):
        difference = float((found - values).abs().max())
        if not difference <= unit * scale:
            return f"differs by {difference} from the module, {name}"
    if drawn.exact and is_evaluable(network):
        for row, value in zip(x, expected.flatten(1), strict=True):
            exact = evaluate_exact(network, [Fraction(float(v)) for v in row.flatten()])
            worst = max(abs(e - Fraction(float(v))) for e, v in zip(exact, value, strict=True))
            if worst > Fraction(1e-14) * Fraction(scale):
                return f"differs by {float(worst)} from exact arithmetic"
    return None


def state(module: torch.nn.Module) -> list[object]:
    flags = [part.training for part in module.modules()]
    return [flags, {name: value.clone() for name, value in module.state_dict().items()}]


def same(before: list[object], after: list[object]) -> bool:
    flags, tensors = before
    now, others = after
    assert isinstance(tensors, dict) and isinstance(others, dict)
    return flags == now and all(torch.equal(tensors[k], others[k]) for k in tensors)


def misread(drawn: Drawn) -> str | None:
    """What is wrong with how a module is read, where the library does not compare."""
    try:
        return complaint(drawn, from_torch(drawn.module, drawn.shape, compared=False))
    except UnsupportedError as error:
        return f"refused: {error}"


def examine(seed: int) -> tuple[str, str | None]:
    """What became of one module, and what is wrong with that."""
    drawn = draw(seed)
    before, random = state(drawn.module), torch.get_rng_state()
    try:
        network = from_torch(drawn.module, drawn.shape)
    except UnsupportedError as error:
        if not drawn.bad:
            return "refused", f"refused, but nothing speaks against it: {error}"
        return "refused", None if "\n" not in str(error) else "a message of several lines"
    if not same(before, state(drawn.module)) or not torch.equal(random, torch.get_rng_state()):
        return "agreed", "the module or the random numbers are not what they were"
    wrong = complaint(drawn, network)
    if wrong is None and not drawn.bad:
        # The library's own comparison would have refused what is misread.
        wrong = misread(drawn)
    return "agreed", wrong


def test_random_modules_are_read_right_or_refused() -> None:
    outcomes: Counter[str] = Counter()
    problems = []
    for seed in range(CASES):
        outcome, problem = examine(seed)
        outcomes[outcome] += 1
        if problem:
            problems.append((seed, problem, draw(seed).kinds))
    assert problems == []
    assert outcomes["agreed"] > CASES / 2 and outcomes["refused"] > CASES / 8


def before(t: reading.ModuleTranslator, step: Any, a: Any) -> Value:
    """What stood where something was written."""
    return a.self


def in_float32(t: reading.ModuleTranslator, step: Any, value: Any) -> torch.Tensor:
    """Python's numbers in float32."""
    if isinstance(value, torch.Tensor):
        return CONSTANT(t, step, value)
    return torch.tensor(value, dtype=torch.float32).to(step.result.dtype)


@contextmanager
def in_any_mode(module: torch.nn.Module) -> Iterator[None]:
    yield


def without_hooks(module: torch.nn.Module, *args: Any) -> Any:
    return module.forward(*args)


CONSTANT = reading.ModuleTranslator.constant
FAULTS: dict[str, tuple[object, str, object]] = {
    "changes in place left out": (reading.OPERATORS, "slice_scatter", before),
    "numbers in float32": (reading.ModuleTranslator, "constant", in_float32),
    "module in the mode that it is in": (reading, "_evaluating", in_any_mode),
    "hooks left out": (torch.nn.Module, "__call__", without_hooks),
    "alpha left out": (reading.ModuleTranslator, "sum", lambda t, step, x, y, factor: SUM(t, step, x, y, 1)),
    "center for shift": (
        OpBuilder,
        "scale",
        lambda b, x, factor=None, shift=None, center=None, *rest: SCALE(b, x, factor, center, shift, *rest),
    ),
}
SUM, SCALE = reading.ModuleTranslator.sum, OpBuilder.scale


@pytest.mark.parametrize("name", FAULTS)
def test_random_modules_would_show_a_fault_in_the_reader(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, wrong = FAULTS[name]
    # What is drawn and what is right must not depend on the fault.
    for seed in range(0, 300):
        drawn = draw(seed)
        if drawn.bad:
            continue
        with monkeypatch.context() as patch:
            patch.setitem(owner, attribute, wrong) if isinstance(owner, dict) else patch.setattr(
                owner, attribute, wrong
            )
            try:
                network = from_torch(drawn.module, drawn.shape, compared=False)
            except InputError:
                continue
        if complaint(drawn, network):
            return
    raise AssertionError("no module was misread")
