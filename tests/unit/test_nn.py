"""λ-GELU against its closed forms, the builders, and the substitution by ReLU."""

import copy
import io
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from verifiable_relu import harden, verify
from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.hardening import soften
from verifiable_relu.nn import (
    Embedded,
    Hardness,
    LambdaGELU,
    LambdaSwish,
    Normalize,
    cnn,
    fixed,
    mlp,
    models,
    substitute_relu,
)
from verifiable_relu.nn.gates import EXACT_FROM, MATCHED, RECTIFIERS, SUPREMUM
from verifiable_relu.nn.places import replace_smooth
from verifiable_relu.readers import from_torch, write_onnx

GATES: dict[str, Callable[[float], Hardness]] = {
    "exact": LambdaGELU,
    "tanh": lambda lam: LambdaGELU(lam, approximate="tanh"),
    "swish": LambdaSwish,
}
each_gate = pytest.mark.parametrize("make", GATES.values(), ids=GATES)


@pytest.mark.parametrize("lam", [1.01, 1.5, 7.0, EXACT_FROM - 0.5, EXACT_FROM + 0.5, 200.0])
@each_gate
def test_gradients_of_x_and_s_are_right(lam: float, make: Callable[[float], Hardness]) -> None:
    layer = make(lam).double()
    layer.set_lam(lam)
    x = (torch.linspace(-9, 9, 37, dtype=torch.float64) / lam).requires_grad_(True)

    def value(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"s": s}, (x,))

    assert torch.autograd.gradcheck(value, (x, layer.s.detach().clone().requires_grad_(True)))


@pytest.mark.parametrize("name", ["gelu", "gelu-tanh", "silu", "mish", "hardswish"])
@pytest.mark.parametrize("lam", [1.0, 7.0])
def test_second_derivatives_are_those_of_the_function(name: str, lam: float) -> None:
    """G(λx)/λ has the second derivative λ·G″(λx), by torch.func and by autograd."""
    rectifier = RECTIFIERS[name]
    gate = rectifier.gate().double()
    gate.set_lam(lam)
    x = torch.linspace(-2, 2, 38, dtype=torch.float64)
    found = torch.func.vmap(torch.func.grad(torch.func.grad(lambda z: gate(z[None])[0])))(x)
    u = (lam * x).requires_grad_(True)
    (slope,) = torch.autograd.grad(rectifier.value(u).sum(), u, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), u)
    torch.testing.assert_close(found, lam * bend, rtol=1e-9, atol=1e-9)
    x.requires_grad_(True)
    (slope,) = torch.autograd.grad(gate(x).sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(slope.sum(), x)[0], lam * bend, rtol=1e-9, atol=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("lam", [1.5, 20.0])
@each_gate
def test_torch_compile_and_torch_func_give_what_the_gate_gives(lam: float, make: Callable[[float], Hardness]) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), make(lam), torch.nn.Linear(8, 2)).double()
    x = torch.randn(6, 3, dtype=torch.float64)

    def loss(parameters: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, parameters, (row,)).pow(2).sum()

    net.zero_grad()
    net(x).pow(2).sum().backward()
    parameters = dict(net.named_parameters())
    expected = {name: parameter.grad for name, parameter in parameters.items()}
    held = {name: parameter.detach() for name, parameter in parameters.items()}
    torch.testing.assert_close(torch.func.vmap(net)(x), net(x))
    torch.testing.assert_close(torch.func.grad(loss)(held, x), expected, rtol=1e-9, atol=1e-12)
    if lam < EXACT_FROM:
        compiled = torch.compile(net, backend="eager", fullgraph=True)
        net.zero_grad()
        compiled(x).pow(2).sum().backward()
        torch.testing.assert_close({n: p.grad for n, p in net.named_parameters()}, expected, rtol=1e-9, atol=1e-12)


def test_a_gate_is_finite_wherever_its_input_is_in_half_precision() -> None:
    gates = [make(160.0) for make in GATES.values()] + [RECTIFIERS["mish"].gate()]
    for gate in gates:
        gate.set_lam(160.0)
        x = torch.tensor([-6e4, -1.0, 0.0, 1.0, 6e4], dtype=torch.float16)
        torch.testing.assert_close(gate(x), x.relu(), rtol=1e-3, atol=1e-3)


class Calling(nn.Module):
    """A forward that calls a function, beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(x))


SCRIPTS: dict[str, Callable[[nn.Module], Any]] = {
    "scripted": torch.jit.script,
    "traced": lambda module: torch.jit.trace(module, torch.zeros(1, 2)),
    "frozen": lambda module: torch.jit.freeze(torch.jit.script(module.eval())),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", SCRIPTS)
def test_torchscript_is_refused_in_one_line_where_it_has_an_activation_to_replace(kind: str) -> None:
    script = SCRIPTS[kind]
    with pytest.raises(UnsupportedError, match="TorchScript cannot compile a λ-gate"):
        torch.jit.script(nn.Sequential(LambdaGELU()))
    data = [(torch.rand(4, 2), torch.tensor([0, 1, 1, 0]))]
    for smooth in (nn.Sequential(nn.Linear(2, 2), nn.GELU()), Calling()):
        compiled = script(smooth)
        for model, place in ((compiled, "the model"), (nn.Sequential(nn.Identity(), compiled), "module '1'")):
            for change in (substitute_relu, soften, lambda model: harden(model, data)):
                with pytest.raises(InputError, match=f"^{place}: it is TorchScript, in which gelu cannot be replaced"):
                    change(model)
    plain = script(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    hard = substitute_relu(nn.Sequential(plain, nn.GELU()))
    assert torch.equal(substitute_relu(plain)(data[0][0]), plain(data[0][0]))
    assert torch.equal(hard(data[0][0]), plain(data[0][0]).relu())
    hardened = harden(nn.Sequential(plain, nn.GELU(), nn.Linear(2, 2)), data, epochs=1)
    (found,) = verify(hardened.model, data[0][0][:1], hardened.model(data[0][0][:1]).argmax(1), eps=1e-6)
    assert found.answer == "unsat"


@pytest.mark.parametrize("lam", [1.0, 4.0, 160.0, 1e4])
def test_values_and_distances_to_relu_are_as_derived(lam: float) -> None:
    assert pytest.approx(1.638, abs=5e-4) == MATCHED
    x = torch.linspace(-5 / lam, 5 / lam, 100_001, dtype=torch.float64)
    for make, gate in ((LambdaGELU, torch.special.ndtr), (LambdaSwish, lambda u: torch.sigmoid(MATCHED * u))):
        layer = make(lam).double()
        layer.set_lam(lam)
        layer.freeze()
        torch.testing.assert_close(layer(x), x * gate(lam * x), rtol=1e-10, atol=1e-14)
        gap = torch.relu(x) - layer(x)
        assert gap.min() >= 0 and gap.max().item() == pytest.approx(SUPREMUM / lam, rel=1e-6)
        assert not layer.s.requires_grad
    assert pytest.approx(0.1699712075, rel=1e-9) == SUPREMUM


@each_gate
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_neither_values_nor_gradients_overflow(make: Callable[[float], Hardness], dtype: torch.dtype) -> None:
    layer = make(1e4).to(dtype)
    x = torch.tensor([-1e4, -7.7, -1.0, 0.0, 1.0, 7.7, 1e4], dtype=dtype, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    torch.testing.assert_close(y, torch.relu(x))
    assert x.grad is not None and layer.s.grad is not None
    torch.testing.assert_close(x.grad, torch.tensor([0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0], dtype=dtype))
    assert layer.s.grad == 0


@pytest.mark.parametrize("gap", [0.0, 1e-9, 1e-6, 0.01, 0.5, 159.0, 1e6])
def test_lambda_is_what_it_is_set_to_and_at_least_one(gap: float) -> None:
    layer = LambdaGELU().double()
    layer.set_lam(1 + gap)
    # An average of weights by ``lerp`` of −∞ and −∞ would be NaN.
    assert layer.lam.item() - 1 == pytest.approx(gap, rel=1e-6) and layer.s.isfinite()
    layer.s.data.mul_(-1e3)
    assert layer.lam.item() >= 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"init": 0.5}, "at least 1"), ({"temperature": 0.0}, "positive"), ({"approximate": "erf"}, "erf")],
)
def test_bad_arguments_are_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LambdaGELU(**arguments)


def test_builders_have_the_shapes_asked_for() -> None:
    net = cnn((3, 32, 32), (8, 16), (20,), 10, normalize=Normalize(0.5, 0.5))
    assert [type(module).__name__ for module in net] == [
        "Normalize", "Conv2d", "LambdaGELU", "Conv2d", "LambdaGELU", "Flatten", "Linear", "LambdaGELU", "Linear",
    ]  # fmt: skip
    assert net(torch.rand(2, 3, 32, 32)).shape == (2, 10)
    assert mlp([784, 30, 10], nn.ReLU)(torch.rand(2, 1, 28, 28)).shape == (2, 10)
    with pytest.raises(ValueError, match="does not fit the 1×1"):
        cnn((1, 2, 2), (4, 4, 4), (), 10)
    x = torch.rand(2, 3, 4, 4)
    torch.testing.assert_close(Normalize((0.1, 0.2, 0.3), (1.0, 2.0, 4.0))(x)[:, 2], (x[:, 2] - 0.3) / 4)
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="std"):
            Normalize((0.0, 0.0), (1.0, bad))


PUBLISHED: dict[str, list[tuple[int, ...]]] = {
    "cnn3": [(16, 3, 5, 5), (32, 16, 4, 4), (10, 2048)],
    "cnn5": [(16, 3, 3, 3), (16, 16, 4, 4), (32, 16, 4, 4), (512, 2048), (10, 512)],
    "cnn7": [(64, 3, 3, 3), (64, 64, 3, 3), (128, 64, 3, 3), *[(128, 128, 3, 3)] * 2, (512, 32768), (10, 512)],
    "resnet": [(8, 3, 3, 3), *[(8, 8, 3, 3)] * 2, (16, 8, 3, 3), *[(16, 16, 3, 3)] * 2, (64, 1024), (10, 64)],
}
"""Shapes of the weights for images of 3×32×32, which tell the sizes of the convolutions' outputs."""
each_published = pytest.mark.parametrize("name", PUBLISHED)


@each_published
def test_published_networks_have_the_layers_of_their_papers(name: str) -> None:
    net = fixed(name, (3, 32, 32), 10, nn.ReLU, Normalize(0.5, 0.5))
    assert [tuple(p.shape) for p in net.parameters() if p.ndim > 1] == PUBLISHED[name]
    assert net.eval()(torch.rand(1, 3, 32, 32)).shape == (1, 10)
    kinds = [type(module) for module in net.modules()]
    assert kinds.count(nn.ReLU) == len(PUBLISHED[name]) - 1
    assert sum(kinds.count(kind) for kind in (nn.BatchNorm1d, nn.BatchNorm2d)) == (6 if name == "cnn7" else 0)


def test_a_residual_block_adds_its_input() -> None:
    net = fixed("resnet", (1, 4, 4), 2, nn.GELU).double()
    block = net[2]
    x = torch.randn(3, 8, 5, 5, dtype=torch.float64)
    middle = nn.functional.gelu(nn.functional.conv2d(x, block.first.weight, block.first.bias, padding=1))
    expected = x + nn.functional.conv2d(middle, block.second.weight, block.second.bias, padding=1)
    torch.testing.assert_close(block(x), nn.functional.gelu(expected))


@each_published
def test_published_networks_are_written_as_they_compute(name: str) -> None:
    torch.manual_seed(0)
    net = fixed(name, (2, 8, 8), 3, lambda: LambdaGELU(4.0), Normalize((0.4, 0.6), (0.3, 0.2)))
    x = torch.rand(50, 2, 8, 8)
    net(x)  # Batch normalisations take their first averages.
    for each in (net.eval(), substitute_relu(net)):
        session = onnxruntime.InferenceSession(
            write_onnx(from_torch(each, (2, 8, 8))), providers=["CPUExecutionProvider"]
        )
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(y), each(x), rtol=1e-5, atol=1e-5)


def test_substitution_keeps_all_but_the_activations() -> None:
    shared = LambdaGELU(160.0)
    net = nn.Sequential(nn.Linear(4, 8), shared, nn.Linear(8, 8), shared, nn.GELU(), nn.Linear(8, 2)).eval()
    hard = substitute_relu(net)
    assert [type(module).__name__ for module in hard] == ["Linear", "ReLU", "Linear", "ReLU", "ReLU", "Linear"]
    assert isinstance(net[1], LambdaGELU) and not hard.training and not hard[1].training
    for old, new in zip((net[0], net[2], net[5]), (hard[0], hard[2], hard[5]), strict=True):
        assert torch.equal(old.weight, new.weight) and old.weight is not new.weight
    assert isinstance(substitute_relu(LambdaGELU()), nn.ReLU) and isinstance(substitute_relu(LambdaSwish()), nn.ReLU)
    assert isinstance(substitute_relu(nn.SiLU()), nn.ReLU) and isinstance(substitute_relu(nn.PReLU()), nn.PReLU)


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(F.gelu(self.linear(x)))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "LambdaGELU": lambda: nn.Sequential(LambdaGELU(2.0), LambdaGELU(3.0, approximate="tanh")),
    "LambdaSwish": lambda: nn.Sequential(LambdaSwish(2.0), LambdaSwish(scale=1.0)),
    "Sharpened": lambda: nn.Sequential(*(each.gate() for each in RECTIFIERS.values())),
    "Normalize": lambda: models.Normalize(0.5, 0.25),
    "Residual": lambda: models.Residual(2, LambdaGELU),
    "substituted calls": lambda: substitute_relu(Calls()),
    "hardened calls": lambda: replace_smooth(Calls(), lambda found, *_: found.gate())[0],
}


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), saved])
@pytest.mark.parametrize("name", MODULES)
def test_a_module_can_be_copied_pickled_and_saved(name: str, copied: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    module = MODULES[name]()
    again = copied(copied(module))
    x = torch.randn(2, 2, 3, 3)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, found = module(ours), again(theirs)
    assert torch.equal(expected, found) and type(again).__name__ == type(module).__name__
    expected.sum().backward()
    found.sum().backward()
    assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad)
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in again.named_parameters()]


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(7, 4), nn.Embedding(3, 4), nn.LayerNorm(4)
        self.last = nn.Linear(4, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.norm(self.words(tokens) + self.places(torch.arange(tokens.shape[1])))
        made: torch.Tensor = self.last(embedded.relu().mean(1))
        return made


def test_a_module_of_tokens_is_one_of_their_embeddings() -> None:
    torch.manual_seed(0)
    model = _Words().eval()
    embedded, choices = Embedded(model, model.words, [3, 6, 1]), [[3], [6, 2], [1, 5]]
    low, high = embedded.box(choices)
    network = from_torch(embedded, (3, 4))
    flat = from_torch(embedded, (12,))
    for sentence in itertools.product(*choices):
        x = model.words(torch.tensor([sentence])).detach()
        assert bool(((x >= low) & (x <= high)).all())
        expected = model(torch.tensor([sentence]))
        for found in (embedded(x), network(x.flatten(1)), flat(x.flatten(1))):
            assert torch.allclose(found, expected, atol=1e-6)
    (start, end), own = embedded.box(), model.words(embedded.tokens)
    assert torch.equal(start, own) and torch.equal(end, own)
    for wrong in ([7], [-1], [[0]]):
        with pytest.raises(InputError, match="numbers from 0 to 6"):
            Embedded(model, model.words, wrong)
    for bad in ([[3], [6]], [[3], [], [1]]):
        with pytest.raises(InputError, match="each of 3 positions"):
            embedded.box(bad)
    with pytest.raises(InputError, match="no part"):
        Embedded(model, nn.Embedding(7, 4), [0])
