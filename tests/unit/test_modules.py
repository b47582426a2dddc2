"""Torch modules are read as what they compute in evaluation mode, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.support.module_kinds import module
from verifiable_relu import verify
from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.ir.enclosure import find_difference
from verifiable_relu.ir.network import Affine, Elementwise, Network
from verifiable_relu.nn import LambdaGELU, LambdaSwish, Normalize, fixed, mlp
from verifiable_relu.nn.gates import RECTIFIERS
from verifiable_relu.readers import from_torch, read_onnx, write_onnx
from verifiable_relu.readers.torch import reading
from verifiable_relu.search.outcomes import Verdict


def run(data: bytes, x: np.ndarray) -> np.ndarray:
    """The outputs of an ONNX file for a batch, as onnxruntime computes them."""
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    (declared,) = session.get_inputs()
    return session.run(None, {declared.name: x})[0]


def kinds(network: Network) -> list[str]:
    """The maps and functions of a network's ops, by name."""
    return [
        type(op.map).__name__ if isinstance(op, Affine) else op.function.kind
        for op in network.ops[1:]
        if isinstance(op, Affine | Elementwise)
    ]


def assert_agrees(module: nn.Module, network: Network, tolerance: float = 1e-5) -> None:
    """The network's outputs are those of the module in evaluation mode, in a batch and alone."""
    x = torch.randn(7, *network.source.input_shape, generator=torch.Generator().manual_seed(0)) * 3
    dtype = next(module.parameters(), torch.zeros(1)).dtype
    with torch.no_grad():
        expected = module.eval()(x.to(dtype)).flatten(1).detach()
        alone = torch.cat([module(row[None].to(dtype)) for row in x]).flatten(1).detach()
        found = network(x.to(dtype).flatten(1)).detach()
    for values in (expected, alone):
        assert float((found - values).abs().max()) <= tolerance * (1 + float(values.abs().max()))


# --- the supported set -----------------------------------------------------------------------------------------------


ROUND_TRIPS = (
    "prelu", "leaky relu", "sigmoid", "tanh", "gelu", "residual", "batch norm of vectors", "average pool, padded",
    "basic block", "grouped convolution", "batch norm", "dropout", "patches",
)  # fmt: skip


@pytest.mark.parametrize("name", ["λ-GELU", *ROUND_TRIPS])
def test_modules_agree_and_survive_the_round_trip(name: str, tmp_path: Path) -> None:
    if name == "λ-GELU":
        made, shape = nn.Sequential(nn.Linear(6, 5), LambdaGELU(7.3), nn.Linear(5, 4), LambdaGELU(160.0)), (6,)
    else:
        made, shape = module(name)
    network = from_torch(made, shape)
    x = torch.randn(16, *shape)
    with torch.no_grad():
        expected = made(x)
    found = network(x.flatten(1)).detach().reshape(expected.shape)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))

    data = write_onnx(network, tmp_path / "net.onnx")
    onnx.checker.check_model(onnx.load_model_from_string(data), full_check=True)
    assert (tmp_path / "net.onnx").read_bytes() == data == write_onnx(network)
    assert np.abs(run(data, x.numpy()) - expected.numpy()).max() <= 1e-5 * float(expected.abs().max())

    back = read_onnx(tmp_path / "net.onnx")
    assert back.digest == network.digest
    assert write_onnx(replace(back, source=replace(back.source, onnx=None), name="network")) == data


class Function(nn.Module):
    """A module of one linear layer ``a`` and what a function does with it."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 4)
        self.b = nn.Parameter(torch.randn(4))
        self.function = function
        self.calls = 0
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


SOFT = nn.Sequential(
    LambdaSwish(2.0), *(RECTIFIERS[name].gate() for name in ("mish", "hardswish", "gelu-tanh", "softplus"))
)
"""Gates with λ of other activations than exact GELU."""


FUNCTIONS: dict[str, Callable[[Function, Tensor], Tensor]] = {
    "operators": lambda m, x: -(2 * m.a(x) - 0.5) / 4 + m.b - (1 - x) * m.b,
    "matrix product": lambda m, x: x @ m.a.weight + torch.addmm(m.b, x, m.a.weight.T, beta=2, alpha=0.5),
    "F.batch_norm": lambda m, x: F.batch_norm(x, m.b.detach(), m.b.detach() ** 2, m.b, None, m.training),
    "zeros_like": lambda m, x: x + torch.zeros_like(x) + x.new_ones(4),
    "smooth": lambda m, x: F.silu(F.mish(F.hardswish(m.a(x)))) + F.gelu(x, approximate="tanh"),
    "arcs": lambda m, x: torch.asin(x / 20) - torch.acos(x / 30) + torch.asinh(x) + torch.atanh(x / 40),
    "softplus": lambda m, x: F.softplus(m.a(x)) + F.softplus(x, 3) + nn.Softplus(0.3, 40)(x),
    "gates": lambda m, x: SOFT(m.a(x)) + SOFT[1:3](x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_methods_agree(name: str) -> None:
    made = Function(FUNCTIONS[name])
    assert_agrees(made, from_torch(made, (4,)))


def test_a_layer_is_one_op_and_a_multiplication_with_an_addition_is_too() -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Dropout(), nn.Linear(5, 3))
    assert kinds(from_torch(plain, (2, 3))) == ["Dense", "Relu", "Dense"]
    made = Function(lambda m, x: (x - 0.5) * m.b + 2)
    first, second = from_torch(made, (4,)).ops[1:]
    assert isinstance(first, Affine) and isinstance(second, Affine)
    assert (first.bias == -0.5).all() and (second.map.weight == made.b).all() and (second.bias == 2).all()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_layers_whose_weights_are_computed_stay_differentiable() -> None:
    layers = parametrizations.weight_norm(nn.Linear(3, 4)), LambdaGELU(3.0), nn.utils.weight_norm(nn.Linear(4, 2))
    made = nn.Sequential(*layers)
    network = from_torch(made, (3,))
    assert kinds(network) == ["Dense", "GELU", "Dense"]
    network(torch.randn(4, 3)).sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in made.parameters())


def test_numbers_that_change_nothing_yet_stay_differentiable() -> None:
    """A factor of 1 and a bias of 0 are trained like others."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.ones(2, 1, 1)), nn.Parameter(torch.zeros(2, 1, 1))
            self.conv = nn.Conv2d(2, 2, 2)
            nn.init.zeros_(self.conv.bias)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x * self.scale + self.shift)

    made = Scaled()
    from_torch(made, (2, 3, 3), compared=False)(torch.randn(4, 18)).sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in made.parameters())


def test_python_numbers_have_the_precision_of_the_module() -> None:
    made = Function(lambda m, x: m.a(x) * 0.1 + 0.7).double()
    last = from_torch(made, (4,)).ops[-1]
    assert isinstance(last, Affine) and float(last.map.weight[0]) == 0.1 and float(last.bias[0]) == 0.7
    assert_agrees(made, from_torch(made, (4,)), 1e-15)


# --- what happens beside the layers -----------------------------------------------------------------------------------


class Called(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return -super().__call__(x)


def in_place(change: Callable[[Tensor], object]) -> Callable[[Function, Tensor], Tensor]:
    """A computed tensor that is changed, and read again itself, through older and newer views, and its source."""

    def function(m: Function, x: Tensor) -> Tensor:
        h = m.a(x)
        older = h.view(-1, 2, 2).transpose(1, 2)
        change(h)
        newer = h.view(-1, 2, 2)
        return (older + newer * m.b[0]).flatten(1) - h * m.b + x

    return function


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.relu_()


def dirty(x: Tensor, inplace: bool) -> Tensor:
    """A change in place in a function of autograd."""
    changed: Tensor = Dirty.apply(x)
    return changed


READ_BY_THE_EXPORTER = (F.elu, F.hardtanh, F.selu, F.hardsigmoid, F.celu)


@pytest.mark.parametrize("act", [F.silu, F.mish, F.hardswish, dirty, *READ_BY_THE_EXPORTER])
def test_activations_in_place_are_seen_by_all_who_read_the_tensor(act: Callable[..., Tensor]) -> None:
    written = act in READ_BY_THE_EXPORTER
    for part in (lambda h: h, lambda h: h.view(-1, 2, 2)):
        made = Function(in_place(lambda h, part=part: act(part(h), inplace=True)))
        assert_agrees(made, from_torch(made, (4,), compared=written))
    if written:
        with pytest.raises(UnsupportedError, match=r"aten\.slice"):
            from_torch(Function(in_place(lambda h: act(h[:, :2], inplace=True))), (4,))


def changed_before() -> nn.Module:
    """A layer whose input a hook changes in place."""

    def add_one(module: nn.Module, inputs: tuple[Tensor]) -> None:
        inputs[0].add_(1)

    made = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    made[1].register_forward_pre_hook(add_one)
    return made


def stale(trick: Callable[[nn.Linear], object], parameter: str) -> nn.Module:
    """A layer whose weight is computed by a hook, from a parameter that was changed since."""
    layer = nn.Linear(4, 3)
    trick(layer)
    with torch.no_grad():
        getattr(layer, parameter).mul_(-3)
    return nn.Sequential(layer, nn.ReLU())


BESIDE: dict[str, Callable[[], nn.Module]] = {
    "forward pre-hook in place": changed_before,
    "weight_norm by a hook": lambda: stale(nn.utils.weight_norm, "weight_g"),
    "spectral_norm by a hook": lambda: stale(nn.utils.spectral_norm, "weight_orig"),
    "parametrisation": lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.ReLU()),
    "another call": lambda: nn.Sequential(Called(4, 3), nn.ReLU()),
    "compiled to TorchScript": lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.ReLU())),
    "channels last": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 1), nn.ReLU(inplace=True), nn.Flatten(), nn.ReLU(inplace=True)
    ).to(memory_format=torch.channels_last),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", BESIDE)
def test_what_calling_a_module_gives_is_what_is_read(name: str) -> None:
    torch.manual_seed(1)
    made = BESIDE[name]().train()
    assert_agrees(made, from_torch(made, (4,)))
    assert_agrees(made, from_torch(made.train(), (4,), compared=False))


def test_a_module_is_left_as_it_was() -> None:
    made = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4).eval())
    )
    made.register_buffer("calls", torch.zeros(()))

    def count(module: nn.Module, inputs: object) -> None:
        made.calls += 1
        torch.rand(3)

    made.register_forward_pre_hook(count)
    flags, calls, random = [m.training for m in made.modules()], made.calls, torch.get_rng_state()
    before = {name: value.clone() for name, value in made.state_dict().items()}
    for compared in (True, False):
        network = from_torch(made, (4,), compared=compared)
        assert [m.training for m in made.modules()] == flags
        assert made.calls is calls and all(torch.equal(v, before[k]) for k, v in made.state_dict().items())
        assert torch.equal(torch.get_rng_state(), random)
    assert_agrees(made, network)


# --- what is refused -------------------------------------------------------------------------------------------------


def caught(m: Function, x: Tensor) -> Tensor:
    try:
        return m.a(x) * float(x.sum())
    except Exception:
        return m.a(x)


def counted(m: Function, x: Tensor) -> Tensor:
    m.calls += 1
    return m.a(x) * m.calls


def part(m: Function, x: Tensor) -> Tensor:
    h = m.a(x)
    h[:, 1:].relu_()
    return h


def mixed(m: Function, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.a(x)


REFUSED: dict[str, tuple[Callable[[Function, Tensor], Tensor], str]] = {
    "branch on a number": (lambda m, x: m.a(x) if x.sum() > 0 else x, r"'' \(aten.sum\)|depend on computed numbers"),
    "number as a float": (lambda m, x: m.a(x) * float(x[0, 0]), "aten"),
    "caught by the module": (caught, "depend on computed numbers"),
    "numpy": (lambda m, x: m.a(x) + torch.from_numpy(x.detach().numpy()), "numpy"),
    "memory": (lambda m, x: m.a(x) + x.untyped_storage()[0], "memory|UntypedStorage"),
    "pointer": (lambda m, x: m.a(x) + x.data_ptr(), "data_ptr.*memory"),
    "remainder": (lambda m, x: torch.fmod(m.a(x), 2.0), "fmod is not supported"),
    "half": (lambda m, x: m.a(x).half().float(), r"aten._to_copy.*rounds to torch.float16"),
    "chosen samples": (lambda m, x: m.a(x)[x[:, 0] > 0], "depend on computed numbers"),
    "branch on a comparison": (lambda m, x: m.a(x) if bool((x > 0).all()) else x, "depend on computed numbers"),
    "float64 and back": (lambda m, x: m.a(x).double().float(), "rounds to torch.float32"),
    "autocast": (mixed, "'a' .*rounds to torch.bfloat16"),
    "random numbers": (lambda m, x: m.a(x) + torch.rand(4), "random numbers"),
    "dropout in evaluation mode": (lambda m, x: F.dropout(m.a(x), 0.5, training=True), "random numbers"),
    "batch norm in evaluation mode": (
        lambda m, x: F.batch_norm(x.view(-1, 1, 4), None, None, training=True),
        "the batch's own statistics",
    ),
    "first sample": (lambda m, x: m.a(x) + x[0], "select"),
    "flipped batch": (lambda m, x: m.a(x).flip(0), "flip"),
    "mean of the batch": (lambda m, x: m.a(x) - m.a(x).mean(0), "mean"),
    "size of the batch": (lambda m, x: m.a(x) / len(x), "size of the batch"),
    "branch on the size of the batch": (lambda m, x: m.a(x) if len(x) == 1 else x, "size of the batch"),
    "numbered samples": (lambda m, x: m.a(x) + torch.arange(len(x))[:, None], "from sample to sample"),
    "batch as channels": (lambda m, x: F.avg_pool2d(x.view(-1, 2, 2), 2), "avg_pool2d"),
    "counter": (counted, "how often it was called"),
    "gradients on or off": (lambda m, x: m.a(x) if torch.is_grad_enabled() else x, "is not what was read"),
    "part of a tensor": (part, "aten.slice"),
    "buffer changed": (lambda m, x: m.a(x) + m.seen.add_(1), "changed in place while the module runs"),
    "two outputs": (lambda m, x: (m.a(x), x), "returns a tuple"),  # type: ignore[dict-item]
    "no output of the input": (lambda m, x: m.b, "returns a Parameter"),
    "softplus of a low threshold": (
        lambda m, x: F.softplus(m.a(x), 1, 5),
        "threshold=5: beyond that torch computes another",
    ),
    "bits": (lambda m, x: m.a(x).view(torch.int32).view(torch.float32), "makes torch.int32"),
}


WRITTEN: dict[str, Callable[[Function, Tensor], Tensor]] = {
    "two values multiplied": lambda m, x: m.a(x) * x,
    "division by a value": lambda m, x: 1 / (1 + F.relu(m.a(x))),
    "matrices the other way round": lambda m, x: (m.a.weight @ x.T).T,
    "softmax": lambda m, x: torch.softmax(m.a(x), 1),
    "max pool": lambda m, x: F.max_pool2d(m.a(x).view(-1, 1, 2, 2), 2),
    "pool by ceiling": lambda m, x: F.avg_pool2d(m.a(x).view(-1, 1, 2, 2), (2, 1), (2, 1), ceil_mode=True),
    "comparison": lambda m, x: torch.where(m.a(x) > 0.25, x, 0),
    "whole numbers": lambda m, x: (5 * m.a(x)).int().float(),
    "filled where": lambda m, x: x.masked_fill(m.a(x) < 0, 0.5),
    "threshold that jumps": lambda m, x: F.threshold(m.a(x), 0.25, -1.0),
}


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)])
def test_an_input_without_numbers_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=re.escape(f"an input of shape {shape} has no numbers")):
        from_torch(nn.Sequential(nn.Flatten(), nn.Linear(3, 2)), shape)
    with pytest.raises(InputError, match="has no numbers"):
        verify(nn.Linear(3, 2), torch.zeros(2, *shape), [0, 0], 0.1)


@pytest.mark.thorough
@pytest.mark.parametrize("name", WRITTEN)
def test_what_the_exporter_writes_is_read_where_the_record_does_not_do(name: str) -> None:
    module = Function(WRITTEN[name])
    x = torch.randn(4, 4)
    with torch.no_grad():
        expected = module(x).flatten(1)
    torch.testing.assert_close(from_torch(module, (4,))(x), expected)
    if name == "division by a value":
        # A reciprocal alone is in the table, too.
        return
    with pytest.raises(UnsupportedError):
        # Whoever wants derivatives by the parameters gets no copies of them.
        from_torch(module, (4,), compared=False)


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_network_follows_is_refused_in_one_line(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=message) as caught:
        from_torch(Function(function), (4,))
    assert "\n" not in str(caught.value)


class _Sorted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sort(1)[0]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            nn.Sequential(nn.Sequential(nn.LocalResponseNorm(2))),
            r"'0.0' \(aten.*\): .*exporter: .*If",
        ),
        (nn.Sequential(nn.Linear(5, 2)), "module Sequential: the module fails .* cannot be multiplied"),
        (nn.Sequential(nn.Flatten(0)), "batch axis"),
        (nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False)), "statistics"),
        (nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")), "'0'"),
        (nn.Sequential(nn.LazyConv2d(2, 2)), "lazy module"),
        (nn.Conv2d(2, 2, 2).half(), "float16: convert it to float32"),
        (nn.Sequential(_Sorted()), r"aten.sort is not supported; .*TopK"),
        (nn.Conv2d(2, 2, 2, device="meta"), "without numbers"),
    ],
)
def test_unsupported_modules_are_refused_in_one_line(made: nn.Module, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        from_torch(made, (2, 4, 4))
    assert "\n" not in str(caught.value)


def test_nan_weights_of_a_module_are_refused() -> None:
    made = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    with torch.no_grad():
        made[0].weight[0, 0] = float("nan")
    with pytest.raises(InputError, match=r"'0' \(Affine\): weight holds NaN"):
        from_torch(made, (3,))


# --- the comparison --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "wrong"),
    [
        ("relu", lambda t, step, a: a.self),
        ("addmm", lambda t, step, a: t.build.dense(a.mat1, a.mat2.T)),
        ("gelu", lambda t, step, a: t.build.relu(a.self)),
        ("add", lambda t, step, a: t.sum(step, a.self, a.other, 1)),
        ("transpose", lambda t, step, a: a.self.reshaped(t.sample(step))),
    ],
)
def test_what_the_table_of_operators_gets_wrong_is_found(
    monkeypatch: pytest.MonkeyPatch, operator: str, wrong: reading.Converter
) -> None:
    def forward(m: Function, x: Tensor) -> Tensor:
        h = F.gelu(torch.relu(m.a(x))).view(-1, 2, 2).transpose(1, 2).flatten(1)
        return torch.add(h, x, alpha=0.5)

    made = Function(forward)
    from_torch(made, (4,))
    monkeypatch.setitem(reading.OPERATORS, operator, wrong)
    with pytest.raises(UnsupportedError, match=r"^node '.*' \(.*\): the module is not the network"):
        from_torch(made, (4,))
    # Whoever does not compare is not told.
    from_torch(made, (4,), compared=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("made", "shape"),
    [
        (lambda: mlp([300, *[200] * 6, 10], nn.ReLU), (300,)),
        (lambda: mlp([300, *[200] * 6, 10], nn.Tanh), (300,)),
        (lambda: mlp([300, *[200] * 6, 10], lambda: LambdaGELU(20.0)), (300,)),
        (lambda: fixed("resnet", (3, 16, 16), 10, nn.ReLU, Normalize((0.4, 0.5, 0.6), (0.2, 0.01, 3.0))), (3, 16, 16)),
        (lambda: fixed("cnn7", (3, 8, 8), 10, nn.LeakyReLU), (3, 8, 8)),
    ],
)
def test_rounding_is_never_taken_for_a_difference(
    made: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = made().to(dtype)
    with torch.no_grad():
        for scale in (1.0, 1e-3, 30.0):
            first = next(model.parameters())
            first.mul_(scale)
            network = from_torch(model, shape)
            x = torch.randn(4, *shape, dtype=dtype) * torch.tensor([1e-20, 1e-3, 1.0, 1e4], dtype=dtype).reshape(
                -1, *(1,) * len(shape)
            )
            seen = {len(network.ops) - 1: model.eval()(x)}
            assert find_difference(network.ops, x.flatten(1), seen, torch.finfo(dtype).eps / 2) is None


# --- verdicts --------------------------------------------------------------------------------------------------------


class Reuse(nn.Module):
    """A layer whose output is changed in place and read again."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        with torch.no_grad():
            self.a.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
            self.a.bias.copy_(torch.tensor([-2.0, 0.5]))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        out = h.relu_() * 0.25
        out += h
        return out


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(2, 2).double()
        self.k = torch.tensor([0.0, 0.1 * 0.9 - 0.1 * 0.5 + 1e-10], dtype=torch.float64)
        with torch.no_grad():
            self.c.weight.copy_(torch.eye(2))
            self.c.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(x) * 0.1 + self.k


@pytest.mark.parametrize(("make", "eps"), [(Reuse, 0.01), (Double, 0)])
def test_verdicts_are_those_of_the_module_in_evaluation_mode(make: Callable[[], nn.Module], eps: float) -> None:
    """What was once misread: the module itself is asked at the corners and the counterexample."""
    made = make().train()
    dtype = next(made.parameters()).dtype
    image = np.array([[0.9, 0.5]], np.float32 if dtype == torch.float32 else np.float64)
    steps = torch.tensor([[0, 0], [1, 1], [1, -1], [-1, 1], [-1, -1]], dtype=dtype) * eps
    verdicts = []
    for label in (0, 1):
        (result,) = verify(made, image, [label], eps)
        verdicts.append(result.verdict)
        made.eval()
        with torch.no_grad():
            outputs = made(torch.from_numpy(image) + steps)
            margins = outputs[:, label] - outputs[:, 1 - label]
            if result.verdict is Verdict.UNSAT:
                assert float(margins.min()) > 0
            if result.verdict is Verdict.SAT:
                point = made(torch.as_tensor(result.counterexample, dtype=dtype).reshape(1, 2))[0]
                assert point[label] <= point[1 - label]
        made.train()
    assert (Verdict.SAT if make is Reuse else Verdict.UNSAT) in verdicts


@pytest.mark.parametrize(
    "made",
    [
        lambda x: x.sum(-1),
        lambda x: x.amin(1),
        lambda x: torch.logsumexp(x, 1),
        lambda x: torch.relu(x.sum(1)) + x[:, 0],
        lambda x: torch.sigmoid(x[:, :1].squeeze(-1)),
    ],
)
def test_one_number_for_each_sample_is_a_vector_of_one(made: Callable[[Tensor], Tensor]) -> None:
    class One(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return made(x)

    x = torch.randn(4, 3)
    network = from_torch(One(), (3,))
    assert network.source.output_shape == (1,)
    torch.testing.assert_close(network(x)[:, 0], made(x))


def test_a_file_has_no_float64_for_the_numbers_of_a_normalisation() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4), nn.Linear(4, 2))
    assert from_torch(model, (3,)).source.output_shape == (2,)
    with pytest.raises(UnsupportedError, match=r"module\.float\(\)"):
        from_torch(model.double(), (3,))


def test_a_layer_normalisation_has_its_own_epsilon() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, eps=0.1), nn.Linear(4, 2)).double()
    x = torch.randn(20, 3, dtype=torch.float64)
    torch.testing.assert_close(from_torch(model, (3,))(x), model(x), rtol=1e-13, atol=1e-13)
