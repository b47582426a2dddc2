"""The replacement of smooth activations in models as people write them: modules, functions, attributes, spellings."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.hardening import soften
from verifiable_relu.nn import LambdaGELU, substitute_relu
from verifiable_relu.nn.gates import HIDDEN, RECTIFIERS, Hardness, recognise, recognise_module
from verifiable_relu.nn.places import MARK

X = torch.linspace(-3, 3, 12).reshape(4, 3)


class Called(nn.Module):
    """A linear layer and a function of it, which the forward calls."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def of_names(x: Tensor) -> Tensor:
    return F.gelu(x)


class Spelled(nn.Module):
    def __init__(self, formula: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(x)


CALLS: dict[str, Callable[[], nn.Module]] = {
    "attribute": lambda: Called(F.gelu),
    "keyword in a partial": lambda: Called(partial(F.gelu, approximate="tanh")),
    "module": lambda: Called(nn.SiLU()),
    "function of a function": lambda: Called(of_names),
    "operator": lambda: Called(lambda x: torch.ops.aten.gelu.default(x)),
    "keyword": lambda: Called(lambda x: F.gelu(x, approximate="tanh")),
    "by name": lambda: Called(lambda x: F.silu(input=x)),
    "a list of functions": lambda: Called(lambda x: [F.relu, F.mish][1](x)),
    "hardswish": lambda: Called(lambda x: F.hardswish(x)),
    "written out": lambda: Called(Spelled(lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))))),
    "by a sigmoid": lambda: Called(Spelled(lambda x: x * torch.sigmoid(1.702 * x))),
    "in a Transformer's layer": lambda: nn.TransformerEncoderLayer(3, 1, 4, activation="gelu", batch_first=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_gates_compute_the_same_and_relu_takes_their_place(name: str) -> None:
    torch.manual_seed(0)
    model = CALLS[name]().eval()
    before = copy.deepcopy(model)
    x = X[None]
    soft, places = soften(copy.deepcopy(model))
    assert [place.became != "" for place in places if "Attention" not in place.found] == [True]
    torch.testing.assert_close(soft(x), model(x), rtol=1e-6, atol=1e-6)
    for gate in (module for module in soft.modules() if isinstance(module, Hardness)):
        gate.set_lam(1e6)
    hard = substitute_relu(model)
    assert not any(isinstance(module, Hardness) for module in hard.modules())
    torch.testing.assert_close(soft(x), hard(x), rtol=1e-4, atol=1e-5)
    assert (hard(x) - model(x)).abs().max() > 1e-3, "the activation is another one"
    assert torch.equal(before(x), model(x)), "the model that was given is changed"
    assert [name for name in hard.state_dict() if MARK not in name] == list(model.state_dict())


class Everything(nn.Module):
    """What a forward of one's own has: arguments with defaults, the training mode, shapes, a shared child, methods."""

    last: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.shift = nn.Parameter(torch.ones(3))
        self.unused = nn.Linear(2, 2)
        self.heads = 3
        self.rate = 0.5

    def twice(self, x: Tensor) -> Tensor:
        return self.linear(F.gelu(self.linear(x)))

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 2.0, **others: Any) -> Tensor:
        rows, columns = x.shape
        if mask is not None:
            x = x * mask
        self.last = x
        y = F.dropout(F.silu(self.twice(x) + self.shift), self.rate, self.training)
        return y.view(rows, columns) * scale


def test_a_rewritten_module_stays_what_it_was_in_all_else() -> None:
    torch.manual_seed(0)
    model = Everything()
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    soft, places = soften(copy.deepcopy(model))
    assert [place.found for place in places] == ["F.gelu", "F.silu"] and isinstance(soft, Everything)
    assert soft.heads == 3 and soft.twice(X).shape == X.shape
    assert soft.last is None, "symbols of the trace are left behind"
    assert {name for name, _ in soft.named_parameters()} - {"gelu_0.s", "silu_0.s"} == dict(
        model.named_parameters()
    ).keys()
    soft.eval(), model.eval()
    torch.testing.assert_close(soft(x=X, mask=None, scale=2.0), model(X))
    assert len(calls) == 2
    soft.train()
    assert not torch.equal(soft(X), soft(X)), "the dropout is lost in training mode"
    with pytest.raises(AssertionError, match="mask"):
        soft(X, torch.ones(3))
    assert not soft(X).isnan().any()
    soft(X).sum().backward()
    assert soft.linear.weight.grad is not None


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x) if x.sum() > 0 else x


class ByMode(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x) if self.training else F.silu(x)


class Helped(nn.Module):
    def helper(self, x: Tensor) -> Tensor:
        return of_names(x) if bool(x.max() > 1) else x

    def forward(self, x: Tensor) -> Tensor:
        return self.helper(x)


@pytest.mark.parametrize("kind", [Branching, ByMode, Helped])
def test_what_cannot_be_traced_is_refused_by_its_path(kind: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ModuleDict({"inner": kind()})["inner"])
    with pytest.raises(
        UnsupportedError, match=rf"module '1' \({kind.__name__}\): its forward calls gelu.* cannot be traced"
    ):
        substitute_relu(model)


class Named:
    """A configuration that names its activation, as those of ``transformers`` do."""

    def __init__(self) -> None:
        self.hidden_act = "gelu"


class Hidden(nn.Module):
    """A module whose GELU is in no code that is looked into: only running it finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.table: dict[str, Any] = {"act": torch.ops.aten.gelu}

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.table["act"](x))


def held(model: nn.Module) -> list[Any]:
    """All that a model consists of, by identity, but for the numbers in its tensors."""
    return [
        *((path, type(m), id(m), m.training, *((k, id(v)) for k, v in vars(m).items())) for path, m in named(model)),
        *((name, id(p), p.requires_grad) for name, p in model.named_parameters()),
        *((name, id(b)) for name, b in model.named_buffers()),
        *(dict(vars(m.config)) for _, m in named(model) if hasattr(m, "config")),
    ]


def named(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(model.named_modules(remove_duplicate=False))


@pytest.mark.parametrize("ask", [soften, partial(substitute_relu, inplace=True)], ids=["soften", "substitute_relu"])
@pytest.mark.parametrize("last", [Branching, Hidden])
def test_a_model_of_which_a_later_part_is_refused_stays_as_it_was(
    ask: Callable[..., object], last: type[nn.Module]
) -> None:
    shared, gate = nn.GELU(), LambdaGELU()
    first = nn.TransformerEncoderLayer(3, 1, 4, activation="gelu", batch_first=True)
    model = nn.Sequential(first, shared, Called(F.gelu), Everything(), gate, nn.Sequential(shared), last())
    model.config = Named()  # type: ignore[assignment]
    model[1].training = False
    before, outputs = held(model), copy.deepcopy(model).eval()(X) if last is Hidden else None
    with pytest.raises(UnsupportedError, match="module '6'"):
        ask(model, example=X)
    assert held(model) == before and gate.s.requires_grad
    assert outputs is None or torch.equal(model.eval()(X), outputs)
    model[6] = nn.Identity()
    ask(model)
    assert held(model) != before and not isinstance(model[1], nn.GELU), "nothing would have been changed"


def test_shared_modules_stay_shared_and_others_are_named() -> None:
    shared = nn.GELU()
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.ELU(), nn.ELU(2.0), nn.Softplus())
    soft, places = soften(model)
    assert soft[0] is soft[2] and isinstance(soft[0], LambdaGELU)
    assert [(place.path, bool(place.became)) for place in places] == [
        ("0", True), ("1", False), ("3", False), ("4", False), ("5", False)
    ]  # fmt: skip
    assert all(place.why for place in places[1:])
    soft, places = soften(nn.Sequential(nn.ELU(), nn.Softplus(), nn.GELU()), ["elu", "softplus"])
    assert [bool(place.became) for place in places] == [True, True, False]


@pytest.mark.parametrize("name", RECTIFIERS)
def test_every_rectifier_tends_to_relu_at_its_rate(name: str) -> None:
    rectifier = RECTIFIERS[name]
    assert recognise(rectifier.value) is rectifier and (name in HIDDEN) is rectifier.hidden
    gate = rectifier.gate().double()
    x = torch.linspace(-20, 20, 40001, dtype=torch.float64)
    gate.set_lam(1.0)
    torch.testing.assert_close(gate(x), rectifier.value(x), rtol=1e-12, atol=1e-12)
    distance = [gate.supremum / (gate(x) - x.relu()).abs().max().item()]
    gate.set_lam(50.0)
    distance.append(gate.supremum / 50 / (gate(x) - x.relu()).abs().max().item())
    assert distance == pytest.approx([1, 1], rel=1e-2) and min(distance) >= 1 - 1e-9


def test_bad_requests_are_one_line() -> None:
    with pytest.raises(InputError, match="no activation to harden"):
        soften(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    with pytest.raises(InputError, match="no activation 'swish'; there are"):
        substitute_relu(nn.GELU(), activations=["swish"])


def test_what_computes_something_else_is_not_recognised() -> None:
    others: list[Callable[[Tensor], Any]] = [
        *(F.relu, torch.tanh, F.selu, partial(F.elu, alpha=2.0), lambda x: F.gelu(x) * 1.001),
        *(lambda x: F.gelu(x).sum(), lambda x: F.gelu(x).sort()[0], lambda x: F.gelu(x - x.mean())),
        *(lambda x: F.gelu(x) if x.sum() > -1 else x, lambda x: "gelu", lambda x: 1 / 0),
    ]
    assert [recognise(other) for other in others] == [None] * len(others)
    assert recognise_module(nn.Sequential(nn.GELU())) is None and recognise_module(nn.Dropout()) is None
