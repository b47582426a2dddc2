"""The function ``harden``: what it trains, what it reports, and how it refuses."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.trainings import stop_at
from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.hardening import Annealing, HardenedModel, TrainingStep, harden, soften
from verifiable_relu.hardening.__main__ import load, main
from verifiable_relu.hardening.loop import with_proof
from verifiable_relu.nn import LambdaGELU, substitute_relu
from verifiable_relu.nn.places import MARK
from verifiable_relu.readers import read_onnx
from verifiable_relu.train.batches import BATCH_SIZE, measure


def squares(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(count, 2, generator=generator)
    return x, ((x[:, 0] > 0.5) ^ (x[:, 1] > 0.5)).long()


def trained() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))


@pytest.fixture(scope="module")
def hardened() -> HardenedModel:
    return harden(trained(), squares(300), epochs=2, held_out=squares(50), region=(0, 1))


def test_what_is_reported_is_what_the_models_do(hardened: HardenedModel) -> None:
    x, y = squares(50)
    smooth, hard = hardened.smooth(x), hardened.model(x)
    change = hardened.change
    moved = (hard.double() - smooth.double()).abs()
    assert change.worst == moved.max().item() and change.mean == pytest.approx(moved.mean().item())
    assert change.flipped == int((smooth.argmax(1) != hard.argmax(1)).sum()) and change.samples == 50
    accuracies = [
        (model(x).argmax(1) == y).float().mean().item() for model in (trained(), hardened.smooth, hardened.model)
    ]
    assert [change.accuracy_before, change.accuracy_smooth, change.accuracy] == pytest.approx(accuracies)
    assert all(
        gate.lam.item() == pytest.approx(160) for gate in hardened.smooth.modules() if isinstance(gate, LambdaGELU)
    )
    assert [place.path for place in hardened.places] == ["1", "3"] and len(hardened.losses) == 2
    assert "1: GELU" in str(hardened) and "→ LambdaGELU" in str(hardened) and "proven: by at most" in str(hardened)


def test_the_hard_model_is_written_and_its_weights_fit_the_class(hardened: HardenedModel, tmp_path: Path) -> None:
    network = read_onnx(hardened.write(tmp_path / "n.onnx"))
    x = torch.rand(5, 2)
    torch.testing.assert_close(network(x), hardened.model(x), rtol=1e-5, atol=1e-6)
    relu = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    weights = hardened.model.state_dict()
    with pytest.raises(RuntimeError, match=rf'Unexpected key.*"1.{MARK}"'):
        trained().load_state_dict(weights)
    relu.load_state_dict(weights, strict=False)
    again = substitute_relu(trained()).eval()
    again.load_state_dict(weights)
    assert torch.equal(again(x), hardened.model(x))
    assert torch.equal(relu(x), hardened.model(x)) and not hardened.model.training


def test_the_users_loss_optimizer_callbacks_and_model() -> None:
    model, batches = trained(), [squares(20)] * 3
    before = copy.deepcopy(model.state_dict())
    seen: list[TrainingStep] = []
    rates: list[float] = []

    def optimizer(of: nn.Module) -> Any:
        made = torch.optim.SGD(of.parameters(), lr=0.5)
        return made, torch.optim.lr_scheduler.LambdaLR(made, lambda step: rates.append(step) or 0.0)

    still = harden(
        model,
        batches,
        epochs=2,
        loss=lambda of, batch: 3 + 0 * of(batch[0]).sum(),
        outputs=lambda of, batch: of(batch[0])[:, :1],
        optimizer=optimizer,
        target=20.0,
        schedule="linear",
        callbacks=[seen.append],
    )
    assert [step.step for step in seen] == [1, 2, 3, 4, 5, 6] and {step.loss for step in seen} == {3.0}
    assert [round(step.lam[0], 4) for step in seen] == [round(1 + 19 * k / 6, 4) for k in range(1, 7)]
    assert still.losses == (3.0, 3.0) and len(rates) == 7
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "the user's model"
    assert model.training and still.change.samples == 60 and still.change.flipped == 0


def test_gates_of_all_kinds_end_at_one_distance_from_relu() -> None:
    soft, _ = soften(nn.Sequential(nn.GELU(), nn.SiLU(), nn.Mish(), nn.Linear(1, 1)))
    annealing = Annealing(soft, 7, 40.0, "inverse")
    x = torch.linspace(-3, 3, 60001)[:, None]
    for _ in range(9):
        annealing.step()
    for gate in soft[:3]:
        assert (gate(x) - x.relu()).abs().max().item() == pytest.approx(0.169971 / 40, rel=2e-3)
    assert not any(parameter.requires_grad for gate in soft[:3] for parameter in gate.parameters())


def test_averages_of_weights_stay_finite_and_states_of_others_are_refused() -> None:
    soft, _ = soften(trained())
    annealing, average = Annealing(soft, 10), copy.deepcopy(soft)
    for _ in range(10):
        annealing.step()
        for mine, other in zip(average.state_dict().values(), soft.state_dict().values(), strict=True):
            mine.lerp_(other, 0.1)
    assert all(1 <= gate.lam < 160 for gate in average.modules() if isinstance(gate, LambdaGELU))
    assert average(torch.rand(2, 2)).isfinite().all()
    with pytest.raises(InputError, match="not one of an Annealing of 1 λ-gates"):
        Annealing(nn.Sequential(LambdaGELU()), 3).load_state_dict(annealing.state_dict())
    with pytest.raises(InputError, match="soften it first"):
        Annealing(trained(), 3)


@dataclass
class Output:
    """What a model returns that returns several things."""

    loss: Tensor | None
    logits: Tensor


class Masked(nn.Module):
    """A model of several arguments, of which one has a name that no other model has."""

    def __init__(self) -> None:
        super().__init__()
        self.body = trained()

    def forward(self, mask: Tensor | None = None, pixel_values: Tensor | None = None) -> Output:
        assert pixel_values is not None
        return Output(None, self.body(pixel_values if mask is None else pixel_values * mask))


def test_one_of_several_arguments_is_the_networks_input(tmp_path: Path) -> None:
    x, y = squares(40)
    batch = {"pixel_values": x, "labels": y}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        given = {name: value for name, value in batch.items() if name != "labels"}
        return F.cross_entropy(model(**given).logits, batch["labels"])

    def outputs(model: nn.Module, batch: Any) -> Tensor:
        found: Tensor = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
        return found

    asked: Any = {"epochs": 1, "loss": loss, "outputs": outputs, "region": (0, 1)}
    one = harden(Masked(), [batch], **asked)
    named = harden(Masked(), [batch | {"mask": torch.ones(40, 2)}], argument="pixel_values", **asked)
    for made in (one, named):
        assert made.change.proven is not None
        network = read_onnx(made.write(tmp_path / "n.onnx"))
        torch.testing.assert_close(network(x), made.model(pixel_values=x).logits, rtol=1e-5, atol=1e-6)
    several = harden(Masked(), [batch | {"mask": torch.ones(40, 2)}], **asked)
    assert several.change.proven is None and "argument=" in several.change.unproven
    with pytest.raises(InputError, match="argument="):
        several.write(tmp_path / "n.onnx")


def test_what_the_data_may_be() -> None:
    x, y = squares(40)

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = trained()

        def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
            logits = self.body(inputs)
            return {"logits": logits, "loss": None if labels is None else F.cross_entropy(logits, labels)}

    dataset = torch.utils.data.TensorDataset(x, y)
    forms: list[tuple[nn.Module, Any]] = [
        (trained(), (x.numpy(), y.numpy())),
        (trained(), torch.utils.data.DataLoader(dataset, batch_size=16)),
        (Named(), [{"inputs": x, "labels": y}]),
    ]
    for model, data in forms:
        change = harden(model, data, epochs=1).change
        assert change.samples == 40 and change.accuracy is not None
        assert change.proven is not None and not change.unproven


class Slow(nn.Module):
    """A GELU that is hidden from the code: torch.fx takes a scripted function for a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.table: dict[str, Any] = {"act": torch.ops.aten.gelu}

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.table["act"](x))


X, Y = squares(8)


class Own(nn.Module):
    """A module that cannot be copied."""

    def __deepcopy__(self, memo: object) -> nn.Module:
        raise TypeError("a lock")


BAD: list[tuple[dict[str, Any], str]] = [
    *(({"epochs": n}, "epochs is a number from 1") for n in (0, True, 1.0, None, 10**400)),
    *(({"target": n}, "a number from 1") for n in (0.5, True, None, "9", math.nan, 1e308)),
    *(({"schedule": n}, "no schedule") for n in ("cubic", None, X)),
    *(({"region": n}, words) for n, words in (((1, 0), "is empty or not finite"), (3, "a least and a greatest value"))),
    *(({name: 3}, f"{name} is a function") for name in ("loss", "outputs", "optimizer")),
    *(({"progress": n}, "progress is") for n in (None, 1, "yes")),
    *(({"callbacks": n}, "callbacks are") for n in (None, print, "ab")),
    ({"callbacks": [print, 3]}, "callback 1 is a function"),
    *(({"activations": n}, "activations are") for n in (None, 3, "gelu")),
    *(({"activations": [n]}, "no activation") for n in (None, 3, "relu")),
    *(({"outputs": lambda m, b, o=o: o}, "outputs for") for o in (3, None, X[0, 0])),
    ({"loss": lambda m, b: m(b[0]).sum() * math.nan}, "infinite or NaN"),
    ({"loss": lambda m, b: torch.tensor(1.0)}, "does not depend"),
    ({"loss": lambda m, b: X}, "one number"),
    ({"optimizer": torch.optim.SGD([X.clone()], 0.1)}, "give a function"),
    ({"optimizer": lambda model: 3}, "not a torch optimizer"),
    ({"held_out": [(X, Y), (X[:, :1], Y)]}, "batch 1 of the held-out data: the model does not"),
]
BAD_DATA: list[tuple[Any, str]] = [
    ((X, Y[:3]), r"inputs of shape \(8, 2\), but classes of \(3,\)"),
    ((X[0, 0], Y[0]), r"inputs of shape \(\), but classes of \(\)"),
    ((X[:0], Y[:0]), r"no data: the inputs have the shape \(0, 2\)"),
    ((X.long(), Y), "not real numbers"),
    ((np.full((8, 2), "x"), Y), "an array is <U1, not numbers"),
    *(((X.index_fill(0, torch.tensor(3), n), Y), "sample 3: an input is inf") for n in (math.inf, math.nan)),
    ((torch.rand(4, 3), Y[:4]), "first batch: the model does not take it"),
    *(((X, Y + n), "batch 0: a class is none of the model's, 0 to 1") for n in (9, -9)),
    ((X, Y.double()), "no classes"),
    ((X, Y[:, None]), r"outputs of shape \(8, 2\) for classes of shape \(8, 1\)"),
    ([], "no data"),
    (iter([(X, Y)]), "not list_iterator"),
    ({"x": X}, "give a list of batches"),
    ([X], "no classes"),
    ([(X * math.nan, Y)], "outputs for the data's first batch are infinite or NaN"),
    ([(X, Y), (X[:, :1], Y)], "batch 1: the model does not take it"),
    ([(X, Y), (X, Y + 9)], "batch 1: a class is none of the model's, 0 to 1"),
    ([(X[:0], Y[:0])], r"outputs for the data's first batch are \(0, "),
]
BAD_MODELS: list[tuple[Any, str]] = [
    (nn.Linear(2, 2), "no activation to harden"),
    ("model", "a torch module, not str"),
    (nn.Sequential(trained(), Slow()), "module '1' .* computes gelu"),
    (nn.GELU(), "no parameters"),
    (nn.Sequential(nn.LazyLinear(3), nn.GELU()), "a lazy module"),
    (Own(), "cannot be copied: a lock"),
    (trained().bfloat16(), r"in torch.bfloat16.*convert it to float32 first"),
]


@pytest.mark.parametrize(
    ("model", "data", "more", "said"),
    [
        *((None, (X, Y), more, said) for more, said in BAD),
        *((None, data, {}, said) for data, said in BAD_DATA),
        *((model, (X, Y), {}, said) for model, said in BAD_MODELS),
    ],
)
def test_bad_requests_are_one_clear_line(model: Any, data: Any, more: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        harden(trained() if model is None else model, data, **more)
    assert "\n" not in str(caught.value)


def test_an_interrupted_hardening_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    model, saved = nn.Sequential(trained(), nn.Dropout(0.3), nn.Linear(2, 2)), tmp_path / "h.checkpoint"

    def hardened(last: int, checkpoint: Path | None = saved, epochs: int = 4) -> HardenedModel:
        torch.manual_seed(5)
        asked: Any = {"epochs": epochs, "checkpoint": checkpoint, "callbacks": [stop_at(last)], "change_timeout": 0}
        return harden(model, squares(300), **asked)

    whole = hardened(-1, None)
    with pytest.raises(KeyboardInterrupt):
        hardened(8)
    resumed = hardened(3)
    assert resumed.losses == whole.losses
    for name, value in whole.smooth.state_dict().items():
        assert torch.equal(value, resumed.smooth.state_dict()[name]), name
    with pytest.raises(InputError, match="--epochs 4, not 5"):
        hardened(-1, epochs=5)
    with torch.no_grad():
        model[2].bias += 1
    with pytest.raises(InputError, match="--weights"):
        hardened(-1)


def test_the_command_hardens_a_model_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "import torch.nn.functional as F\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b = torch.nn.Linear(2, 4), torch.nn.Linear(4, 2)\n"
        "    def forward(self, x):\n"
        "        return self.b(F.gelu(self.a(x)))\n"
        "number = 3\n"
    )
    np.savez(tmp_path / "d.npz", images=X.numpy(), labels=Y.numpy())
    named = f"{tmp_path / 'net.py'}:Net"
    torch.save(load(named).state_dict(), tmp_path / "w.pt")
    out = tmp_path / "n.onnx"
    asked = [named, "--weights", str(tmp_path / "w.pt"), "--data", str(tmp_path / "d.npz"), "--out", str(out)]
    assert main([*asked, "--epochs", "1", "--rate", "1e-3", "--quiet", "--int8"]) == 0
    small = tmp_path / "n.int8.onnx"
    # The int8 file is a network of this package, which computes nearly the same.
    x = X[:4].double()
    assert (read_onnx(small)(x) - read_onnx(out)(x)).abs().max() < 0.1
    said = capsys.readouterr().out
    assert "F.gelu → LambdaGELU" in said and "proven: by at most" in said and read_onnx(out).output_size == 2
    assert f"wrote {out} and {small}" in said
    images, folder = X.sigmoid(), tmp_path / "proofs"
    np.savez(tmp_path / "d.npz", images=images.numpy(), labels=read_onnx(out)(images.double()).argmax(1).numpy())
    proving = ["--int8", "--eps", "1e-6", "--images", "3", "--certificates", str(folder)]
    assert main([*asked, "--epochs", "1", "--rate", "1e-9", "--target", "160", "--quiet", *proving]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "of 3 images" in line]
    assert len(rows) == 5 and rows[3].startswith("all of these and λ-GELU with λ ≥ 160 at once: within 1e-6, "), rows
    assert rows[4].startswith("both files and λ-GELU with λ ≥ 160 in real numbers: within 1e-6, ")
    each = [int(re.findall(r"(\d) of 3", row)[0]) for row in rows]
    certified = each[4]
    assert 1 <= each[3] <= min(each) and certified
    table = (folder / "certificates.csv").read_text()
    assert table.count(",true,") == certified and str(small) in table
    assert main([*asked, "--certificates", str(folder)]) == 2
    assert "needs --eps and --int8" in capsys.readouterr().err
    for change, message in (
        ({0: named.replace("Net", "Nets")}, "Nets"),
        ({0: named.replace(":Net", ":number")}, "not callable"),
        ({0: "no.such.module:Net"}, "No module named"),
        ({0: "net.py"}, "FILE.py:NAME"),
        ({2: str(tmp_path / "none.pt")}, "cannot be read"),
        ({4: str(tmp_path / "none.npz")}, "none.npz"),
        ({6: str(tmp_path / "n.txt")}, "must end in .onnx"),
        ({6: str(tmp_path / "none" / "n.onnx")}, "no such folder"),
    ):
        assert main([change.get(i, text) for i, text in enumerate(asked)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("harden: ") and error.count("\n") == 1, error
        assert re.search(message, error), error


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"labels": torch.arange(8)}, "batch 0: a class is none of the model's, 0 to 1"),
        ({"labels": Y.double()}, "integers of shape (n,)"),
        ({"images": X[:, :1]}, "first batch: the model does not take it"),
    ],
)
def test_the_command_names_the_file_whose_arrays_do_not_fit(
    arrays: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\nnet = nn.Sequential(nn.Linear(2, 4), nn.GELU(), nn.Linear(4, 2))\n"
    )
    file = tmp_path / "own.npz"
    np.savez(file, **{name: np.asarray(array) for name, array in {"images": X, "labels": Y, **arrays}.items()})
    assert main([f"{tmp_path}/net.py:net", "--data", str(file), "--out", str(tmp_path / "n.onnx"), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"harden: {file}: ") and said in error and error.count("\n") == 1


def test_a_last_batch_of_one_sample_is_no_batch_for_a_normalisation() -> None:
    x, y = squares(BATCH_SIZE + 1)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.GELU(), nn.Linear(4, 2))
    steps: list[int] = []
    swapped = x.numpy().astype(">f4"), y.numpy().astype(">i8")
    change = harden(model, swapped, epochs=2, callbacks=[lambda step: steps.append(step.steps)]).change
    assert steps == [2, 2] and change.samples == BATCH_SIZE + 1
    with pytest.raises(InputError, match="batch 0: the model does not take it: Expected more than 1 value"):
        harden(model, (x[:1], y[:1]))

    def fails(model: nn.Module, batch: Any) -> Tensor:
        raise IndexError("mine")

    for name in ("loss", "outputs"):
        with pytest.raises(IndexError, match=r"^mine$"):
            harden(trained(), (X, Y), **{name: fails})


def test_a_change_without_a_proof_says_why() -> None:
    x, y = squares(40)
    assert "change_timeout=0" in harden(trained(), (x, y), epochs=1, change_timeout=0).change.unproven
    still = nn.Sequential(nn.Linear(2, 4, bias=False), nn.GELU(), nn.Linear(4, 2, bias=False))
    wide = harden(still, (0 * x, y), epochs=1, region=(-1, 1)).change
    assert wide.proven is None and "says nothing, for all outputs here are within" in wide.unproven
    model = nn.Sequential(nn.Linear(2, 4), nn.ELU(), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
    change = harden(model, (x, y), epochs=1, region=(0, 1), activations=["elu", "gelu"]).change
    assert change.proven is None and re.search(r"\(Relu\) takes the place of .* \(ELU\)$", change.unproven)


def test_damaged_weights_of_any_kind_are_named(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("import torch\nnet = torch.nn.Linear(2, 2)\n")
    named, file = f"{tmp_path / 'net.py'}:net", tmp_path / "w.pt"
    torch.save(load(named).state_dict(), file)
    good = file.read_bytes()
    for damaged in (b"", b"junk", b"\0" * 100, b"\x80\x02.", b"PK\3\4", good[:100], good[: len(good) // 2], good[50:]):
        file.write_bytes(damaged)
        with pytest.raises(InputError, match=r"w\.pt: these weights do not fit the model"):
            load(named, file)


@pytest.mark.parametrize("given", [{"example": torch.ones(1, 2)}, {}], ids=["by an example", "by its own inputs"])
def test_an_activation_that_still_runs_is_named(given: dict[str, Any]) -> None:
    model = nn.Sequential(Slow(), nn.GELU())
    if not given:
        model.dummy_inputs = {"input": torch.ones(1, 2)}  # type: ignore[assignment]
    for ask in (soften, substitute_relu):
        with pytest.raises(UnsupportedError, match=r"module '0' \(Slow\): it computes gelu"):
            ask(copy.deepcopy(model), **given)
    _, places = soften(nn.Sequential(nn.GELU(), nn.SiLU()), ["silu"], torch.ones(1, 2))
    assert [bool(place.became) for place in places] == [False, True]


class Written(nn.Module):
    """GELU as a formula behind a linear layer, which is not found among the activations to harden."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "mish": nn.Mish,
    "hardswish": nn.Hardswish,
    "silu": nn.SiLU,
    "tanh": lambda: nn.GELU(approximate="tanh"),
    "mish read by torch's exporter": lambda: nn.Sequential(nn.Mish(), nn.ELU()),
    "beside a GELU that stays": lambda: nn.Sequential(nn.Mish(), Written()),
}


@pytest.mark.parametrize("target", [1.5, 40.0])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_change_by_gates_of_other_activations_is_proven(name: str, target: float) -> None:
    torch.manual_seed(3)
    front, back = nn.Sequential(nn.Linear(2, 4), nn.GELU()), nn.Linear(4, 2)
    model = nn.Sequential(front, nn.Linear(4, 4), ACTIVATIONS[name](), nn.Linear(4, 4), ACTIVATIONS[name](), back)
    x = torch.rand(8, 2)
    found = harden(model, (x, (x[:, 0] > 0.5).long()), epochs=1, region=(-1, 1), target=target)
    assert found.change.proven is not None, found.change.unproven
    points = 2 * torch.rand(20_000, 2, dtype=torch.float64) - 1
    smooth, hard = (copy.deepcopy(each).double() for each in (found.smooth, found.model))
    moved = (hard(points) - smooth(points)).abs().max().item()
    assert 0 < moved <= found.change.proven < 30 * moved


def test_a_swap_of_more_than_activations_is_not_proven() -> None:
    smooth, _ = soften(trained())
    hard = substitute_relu(smooth)
    with torch.no_grad():
        hard[0].bias[0] += 0.01
    change = with_proof(measure(smooth, hard, [squares(4)]), smooth, hard, (2,), math.inf)
    assert change.proven is None and "not the one of the model's activations alone" in change.unproven
