"""The function ``verifiable_relu.verify``."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import verifiable_relu
from verifiable_relu import Perturbation, certified_radius, verify, verify_properties, verify_radii
from verifiable_relu.bounds.backward import MEMORY
from verifiable_relu.campaign import Result
from verifiable_relu.campaign.inputs import chosen
from verifiable_relu.errors import InputError
from verifiable_relu.readers import from_torch, write_onnx
from verifiable_relu.search.batch import described
from verifiable_relu.search.outcomes import Reason, Trust, Verdict


class Brightness(nn.Module):
    """A classifier of 1×2×2 images: class 1 if the pixels sum to more than 2, else class 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(4, 1), nn.ReLU(), nn.Linear(1, 2))
        with torch.no_grad():
            values = (torch.ones(1, 4), torch.zeros(1), torch.tensor([[0.0], [1.0]]), torch.tensor([2.0, 0.0]))
            for parameter, value in zip(self.parameters(), values, strict=True):
                parameter.copy_(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


MODEL = Brightness()
DARK, BRIGHT, GREY = (np.full((1, 2, 2), value, np.float32) for value in (0.125, 0.875, 0.4375))
IMAGES, LABELS = np.stack([DARK, BRIGHT, GREY]), [0, 1, 0]


def check(results: list[Result], sat: Verdict = Verdict.SAT) -> None:
    """ε = 1/8 changes the class of the grey image alone."""
    assert [r.verdict for r in results] == [Verdict.UNSAT, Verdict.UNSAT, sat]
    dark, bright, grey = results
    assert dark.margin is not None and 0 < dark.margin <= 1 + 1e-9 and dark.counterexample is None
    assert bright.margin is not None and 0 < bright.margin <= 1 + 1e-9
    if sat is Verdict.SAT:
        found = grey.counterexample
        assert found is not None and found.shape == (1, 2, 2) and found.dtype == np.float32
        assert np.abs(found - GREY).max() <= 0.125 and found.sum() >= 2
        assert grey.trust is Trust.EXACT and grey.margin is not None and grey.margin <= 0


@pytest.mark.parametrize("memory", [None, 1])
@pytest.mark.parametrize("method", ["auto", "crown"])
def test_balls_about_images_are_verified_for_a_torch_module(
    method: str, memory: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the least memory, too; a bar goes to stderr, and the module is left as it was."""
    model = Brightness()
    model.train()
    found = verify(model, IMAGES, LABELS, 0.125, method, memory=memory, progress=memory is None)
    check(found, Verdict.SAT if method == "auto" else Verdict.UNKNOWN)
    assert capsys.readouterr().out == ""
    assert model.training and all(p.grad is None and p.requires_grad for p in model.parameters())


def test_the_ends_of_what_is_asked() -> None:
    """No image, a wrong label, a range of values that keeps the sum below 2, and no time."""
    assert verify(MODEL, np.zeros((0, 1, 2, 2)), [], 0.1) == []
    (wrong,) = verify(MODEL, DARK[None], [1], 0)
    assert wrong.counterexample is not None and (wrong.counterexample == DARK).all()
    ranges = [Perturbation(), Perturbation(clip=(0, Fraction(15, 32)))]
    answers = [verify(MODEL, GREY[None], [0], 0.25, "crown", perturbation=each)[0].verdict for each in ranges]
    assert answers == [Verdict.UNKNOWN, Verdict.UNSAT]
    # What intervals prove, they prove before anybody looks at the clock.
    reasons = {r.reason for r in verify(MODEL, IMAGES, LABELS, 0.125, timeout=1e-9)}
    assert Reason.TIMEOUT in reasons and reasons <= {Reason.TIMEOUT, Reason.PROVED}


def test_what_people_bring_and_take_home() -> None:
    """DataLoaders, a single image, radii as text; a summary, and short words for all of it."""
    pairs = torch.utils.data.TensorDataset(torch.from_numpy(IMAGES), torch.tensor(LABELS))
    found = verify(MODEL, torch.utils.data.DataLoader(pairs, batch_size=2), eps="1/8")
    check(found)
    assert {**found.summary, "seconds": 0} == {"asked": 3, "certified": 2, "refuted": 1, "undecided": 0, "seconds": 0}
    assert repr(found).startswith("<Results: 3 asked, 2 certified, 1 refuted, 0 undecided, ")
    assert repr(found[2]).startswith("<Result: sat (violated, found by ")
    (one,) = verify(MODEL, DARK, 0, eps="0.125")
    assert one.verdict is Verdict.UNSAT
    assert set(dir(verifiable_relu)) == set(verifiable_relu.__all__) and not hasattr(verifiable_relu, "nothing")
    with pytest.raises(InputError, match="eps is 'wide'"):
        verify(MODEL, IMAGES, LABELS, eps="wide")
    with pytest.raises(InputError, match="eps is '1e999999999'"):
        verify(MODEL, IMAGES, LABELS, eps="1e999999999")
    with pytest.raises(InputError, match="leave out labels="):
        verify(MODEL, torch.utils.data.DataLoader(pairs), LABELS, eps=0.1)


def test_every_kind_of_model_images_and_labels(tmp_path: Path) -> None:
    network = from_torch(MODEL, (1, 2, 2))
    data = write_onnx(network, tmp_path / "n.onnx")
    images, labels = torch.tensor(IMAGES), torch.tensor(LABELS)
    for model in (network, data, tmp_path / "n.onnx", str(tmp_path / "n.onnx")):
        check(verify(model, images, labels, Fraction(1, 8), "auto"))
    check(verify(MODEL, IMAGES.astype(np.float64), np.array(LABELS, np.uint8), 0.125))


@pytest.mark.parametrize("method", ["auto", "ibp", "crown-ibp", "crown", "alpha-crown", "split"])
def test_memory_is_limited_for_methods_that_bound(method: str) -> None:
    same: Any = np.int64(1 << 20)
    texts = [described(*chosen(method, memory=memory)) for memory in (None, MEMORY, 1 << 20, same)]
    assert texts[0] == texts[1] != texts[2] == texts[3]


class Returns(nn.Module):
    """A module that returns what a function makes of its input."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.layer(x))


NAN = np.where(np.arange(4).reshape(1, 1, 2, 2) == 2, np.nan, 0.5)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"images": NAN, "labels": [0]}, "image 0: a pixel is NaN"),
        ({"images": IMAGES * np.inf}, "image 0: a pixel is NaN or infinite"),
        ({"images": IMAGES + 1}, "outside"),
        ({"images": IMAGES[:, :, :1]}, "shape"),
        ({"images": IMAGES[0], "model": from_torch(MODEL, (1, 2, 2))}, r"images of shape \(2, 2\)"),
        ({"images": np.zeros(3)}, r"\(n, \*input shape\)"),
        ({"images": np.array([["a"]] * 3)}, "dtype"),
        ({"labels": [0, 1]}, "2 labels for 3 images"),
        ({"labels": [0, 1, 2]}, "image 2: the label is 2"),
        ({"labels": [0, 1, -1]}, "image 2: the label is -1"),
        ({"labels": [0.0, 1.0, 0.0]}, "integers"),
        ({"labels": [[0], [1], [0]]}, "integers"),
        ({"eps": -0.1}, "eps"),
        ({"eps": float("nan")}, "eps"),
        ({"eps": float("inf")}, "eps"),
        ({"clip": (1, 0)}, "range"),
        ({"method": "magic"}, "unknown method 'magic'"),
        ({"device": "nowhere"}, "nowhere"),
        ({"device": "meta"}, "no device 'meta'"),
        ({"memory": 0}, "limit of memory is a positive .* not 0"),
        ({"memory": -1}, "limit of memory"),
        ({"memory": 1e9}, "not 1000000000.0"),
        ({"memory": "1G"}, "not '1G'"),
        *(({"memory": 1 << 30, "method": m}, f"'{m}' takes no") for m in ("attack", "milp", "smt", "auto_lirpa")),
        ({"timeout": 0}, "time limit"),
        ({"timeout": float("inf")}, "time limit"),
        ({"timeout": None}, "time limit"),
        ({"timeout": "soon"}, "time limit"),
        ({"timeout": np.ones(2)}, "time limit"),
        ({"timeout": 10**400}, "time limit"),
        ({"timeout": True}, "time limit"),
        *(({"progress": value}, "progress is") for value in (None, 1, "yes", np.ones(3), torch.zeros(0))),
        *(({"normalize": (value, 1)}, "mean: one number") for value in ([], torch.zeros(0), "a", [[0.5]])),
        *(({"normalize": (0, value)}, "std") for value in ([], 0, [-1.0], float("nan"))),
        *(({name: np.ma.masked_array([1, 1, 1], [0, 1, 0])}, f"{name}: a masked array") for name in ("eps", "labels")),
        *(({"targets": value, "labels": None}, "targets|label") for value in ([0, 1], [0, 1, 2], [0.0] * 3, "abc", 3)),
        *(({"mask": value}, "mask") for value in ([1, 0], np.ones((3, 1, 3, 2), bool), "x", object(), torch.ones(2))),
        *(({"norm": value}, "norm is") for value in (None, 3, "l3", "max", float("nan"), [2], True)),
        ({"images": torch.ones(3, 1, 2, 2, device="meta")}, "images"),
        ({"images": torch.ones(3, 1, 2, 2).to_sparse()}, "images"),
        ({"images": iter([DARK])}, "images"),
        *(({"eps": eps}, "eps") for eps in (True, [True] * 3, {0: 1}, iter([0.1]), np.zeros((3, 2)), Fraction(-1, 8))),
        *(({"eps": eps}, "eps") for eps in (None, "2/0", [0.1], np.ones(2), torch.ones(2, 3), 1j, object())),
        *(
            ({"clip": clip}, "clip")
            for clip in (None, 1, (0,), (0, 1, 2), (None, None), "ab", {0: 1}, (0, float("nan")))
        ),
        *(({"labels": labels}, "labels") for labels in (None, "abc", [[0], [1, 2]], [None] * 3, {0, 1, 2})),
        ({"labels": np.array([2**64 - 1, 0, 0], np.uint64)}, "image 0: the label is"),
        *(({"images": images}, "images") for images in (None, "abc", [[1], [2, 3]], [None], torch.ones(3, 4).cfloat())),
        ({"images": IMAGES.astype(np.longdouble)}, "64 bits"),
        ({"images": np.full((3, 1, 2, 2), 2**60)}, "beyond 2"),
        *(({"family": family}, "family") for family in (None, "160", {1: 2}, [[1.0]], [None], 1j, object())),
        *(({"family": family}, "λ must be|values of λ") for family in (0, [], 0.5)),
        *(({"method": method}, "method") for method in (None, 3, ["auto"], b"auto")),
        *(({"device": device}, "device") for device in (None, 0, ["cpu"])),
        ({"model": "none.onnx"}, "none.onnx: no such file"),
        ({"model": 3}, "int"),
        *(({"model": value}, "model") for value in (None, Brightness, print, [MODEL], {"a": MODEL})),
        *(({"model": value}, "onnx|ONNX|file|directory") for value in (b"", b"abc", "/", "", chr(0))),
        ({"model": Returns(lambda x: (x.flatten(1), x))}, "tuple"),
        ({"model": Returns(lambda x: {"a": x.flatten(1), "b": x.flatten(1)})}, "dict"),
        ({"model": Returns(lambda x: None)}, "None"),
        ({"model": Returns(lambda x: x.sum())}, "shape|batch"),
        ({"model": Returns(lambda x: x.missing)}, "missing"),
        ({"model": Brightness().half()}, "float16"),
        ({"model": nn.Sequential(nn.FractionalMaxPool2d(1, output_size=1), nn.Flatten())}, "fractional_max_pool2d"),
        ({"model": nn.Sequential(nn.Flatten(), nn.LazyLinear(2))}, "lazy"),
        ({"model": nn.ModuleList([MODEL])}, "ModuleList"),
        ({"perturbation": 3}, "must be a Perturbation, not 3"),
        ({"normalize": 3}, "normalize is a pair"),
        ({"model": nn.Sequential(nn.Flatten(), nn.Linear(4, 1))}, "1 output"),
        ({"model": nn.Sequential(nn.Flatten(), nn.Linear(5, 2))}, "5|shape"),
    ],
)
def test_bad_arguments_are_refused(changed: dict[str, Any], complaint: str) -> None:
    arguments: dict[str, Any] = {"model": MODEL, "images": IMAGES, "labels": LABELS, "eps": 0.125} | changed
    with pytest.raises(InputError, match=complaint) as caught:
        perturbation = {name: arguments.pop(name) for name in vars(Perturbation()) if name in arguments}
        verify(**{"perturbation": Perturbation(**perturbation), **arguments})
    assert isinstance(caught.value, ValueError) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "asked", [True, 3, 0.5, object(), len, np.array(3), torch.tensor(3), Fraction(1, 3), [3], [], {}]
)
def test_what_is_no_property_is_refused(asked: Any) -> None:
    with pytest.raises(InputError, match="propert") as caught:
        verify_properties(MODEL, asked)
    assert "\n" not in str(caught.value)


def test_several_radii_take_no_other_radius() -> None:
    for ask in (certified_radius, partial(verify_radii, radii=[0.1])):
        with pytest.raises(InputError, match="eps= is an argument of verify alone"):
            ask(MODEL, IMAGES, LABELS, eps=0.1)


@pytest.mark.thorough
def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    for eps in (np.float64(0.125), np.float32(0.125), torch.tensor(0.125), np.array(0.125), Fraction(1, 8)):
        for clip in ((0, 1), np.array([0.0, 1.0]), torch.tensor([0, 1]), [np.float32(0), Fraction(1)]):
            ball = Perturbation(clip=clip)  # type: ignore[arg-type]
            found = verify(MODEL, IMAGES[:1], LABELS[:1], eps, "crown", np.float64(60), perturbation=ball)  # type: ignore[arg-type]
            assert found[0].verdict is Verdict.UNSAT
    half = [torch.tensor(IMAGES).to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)]
    for images in (*half, IMAGES.tolist()):
        check(verify(MODEL, images, LABELS, 0.125))  # type: ignore[arg-type]


class Described:
    """What a module returns that returns several things."""

    def __init__(self, logits: Tensor) -> None:
        self.loss, self.logits = None, logits


class Second(nn.Module):
    """A module whose input is its second argument, and which counts on the user's default type."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()

    def forward(self, mask: Tensor | None = None, pixels: Tensor | None = None) -> Described:
        assert pixels is not None and torch.get_default_dtype() == torch.float64
        return Described(self.body(pixels.to(torch.empty(()).dtype)))


def test_a_module_is_asked_and_replayed_by_the_argument_that_is_named() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        model, x = Second(), torch.rand(1, 4)
        label = model(pixels=x).logits.argmax(1)
        wrong, right = (verify(model, x, c, eps=1e-3, timeout=10, argument="pixels")[0] for c in (1 - label, label))
        found = certified_radius(model, x, label, upper=1e-3, tolerance=1e-4, argument="pixels")
    finally:
        torch.set_default_dtype(torch.float32)
    assert (wrong.answer, right.answer) == ("sat", "unsat") and found.certified[0] == pytest.approx(1e-3)
