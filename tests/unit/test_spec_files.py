"""Networks of properties, instances.csv, balls around images, and the command that writes them."""

from __future__ import annotations

import gzip
import math
import os
import random
import zipfile
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.flat_nets import relu_layers
from verifiable_relu.data import load
from verifiable_relu.errors import LONGEST, InputError
from verifiable_relu.ir.network import Network
from verifiable_relu.readers import read_onnx, write_onnx
from verifiable_relu.spec import (
    Box,
    Instance,
    Property,
    SpecFile,
    find_network,
    linf_properties,
    queries,
    read_instances,
    read_vnnlib,
    write_instances,
)
from verifiable_relu.spec.__main__ import main
from verifiable_relu.spec.property import nearest, round_down, round_up


def network(weight: torch.Tensor) -> Network:
    return relu_layers((weight.tolist(), [0.0] * len(weight)))


TEXT = "(declare-const X_0 Real)(declare-const Y_0 Real)(assert (<= X_0 1))(assert (>= X_0 0))(assert (<= Y_0 0))\n"
TEXT_2 = """(vnnlib-version <2.0>)
(declare-network f (declare-input X float32 [1]) (declare-output Y float32 [1]))
(assert (<= X[0] 1.0)) (assert (>= X[0] 0.0)) (assert (<= Y[0] 0.0))
"""


def property_file(folder: Path, text: str = TEXT, name: str = "p.vnnlib") -> SpecFile:
    (folder / name).write_text(text)
    return read_vnnlib(folder / name)


def touch(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


# ---- finding the network ---------------------------------------------------------------------------------------


def test_the_more_explicit_name_of_a_network_counts(tmp_path: Path) -> None:
    folder = tmp_path / "vnnlib"
    names = ("comment", "listed", "p", "other")
    files = {name: folder / f"{name}.onnx" for name in names}
    touch(*files.values())
    rows = "listed.onnx,p.vnnlib,1\nlisted.onnx,p.vnnlib,2\nother.onnx,q.vnnlib,1\n"
    (folder / "instances.csv").write_text(rows)
    commented = property_file(folder, "; a comment\n;  network: comment.onnx\n" + TEXT_2)
    plain = property_file(folder, TEXT_2)
    assert find_network(commented) == files["comment"]
    assert find_network(plain) == files["listed"]
    (folder / "instances.csv").unlink()
    assert find_network(plain) == files["p"]
    for name in names[:-1]:
        files[name].unlink()
    assert find_network(plain) == files["other"]


@pytest.mark.parametrize("folder", ["", "vnnlib", "vnnlib/part"])
def test_instances_may_lie_above(folder: str, tmp_path: Path) -> None:
    touch(tmp_path / "onnx" / "a.onnx.gz", tmp_path / folder / "b.onnx")
    (tmp_path / "instances.csv").write_text(f"onnx/a.onnx,{folder or '.'}/p.vnnlib,60\n")
    (tmp_path / folder / "p.vnnlib.gz").write_bytes(gzip.compress(TEXT.encode()))
    for name in ("p.vnnlib", "p.vnnlib.gz"):
        spec = read_vnnlib(tmp_path / folder / name)
        assert find_network(spec) == tmp_path / "onnx" / "a.onnx.gz"


def test_no_network_says_what_was_tried(tmp_path: Path) -> None:
    spec = property_file(tmp_path)
    touch(tmp_path / "a.onnx", tmp_path / "b.onnx")
    with pytest.raises(InputError) as caught:
        find_network(spec)
    message = str(caught.value)
    for tried in (str(spec.path), "--net", "; network:", "--network", "instances.csv", "p.onnx", "(2 there)"):
        assert tried in message


def test_a_network_that_is_named_wrongly_is_refused(tmp_path: Path) -> None:
    touch(tmp_path / "p.onnx")
    with pytest.raises(InputError, match=r"p\.vnnlib: .*no\.onnx that the network comment names does not exist"):
        find_network(property_file(tmp_path, "; network: no.onnx\n" + TEXT))


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "\x1b[31m", "x/" * 3000])
def test_no_name_of_a_network_is_too_odd_to_be_refused(name: str, tmp_path: Path) -> None:
    if not name.isprintable():
        with pytest.raises(InputError, match="the control character"):
            property_file(tmp_path, f"; network: {name}.onnx\n{TEXT_2}")
    spec = property_file(tmp_path, f"; network: {name if name.isprintable() else 'x'}.onnx\n{TEXT_2}")
    with pytest.raises(InputError) as caught:
        find_network(spec)
    assert len(str(caught.value)) <= LONGEST and str(caught.value).isprintable()
    (tmp_path / "p.vnnlib").write_text(TEXT)
    (tmp_path / "instances.csv").write_text("x" * 5000 + ".onnx,p.vnnlib,1\n")
    with pytest.raises(InputError, match="does not exist"):
        find_network(read_vnnlib(tmp_path / "p.vnnlib"))


def test_contradictions_are_not_settled_silently(tmp_path: Path) -> None:
    touch(tmp_path / "a.onnx", tmp_path / "b.onnx")
    (tmp_path / "instances.csv").write_text("a.onnx,p.vnnlib,1\nb.onnx,p.vnnlib,1\n")
    with pytest.raises(
        InputError, match=r"names 2 networks for this property \(a.onnx, b.onnx\); choose one with --net"
    ):
        find_network(property_file(tmp_path))


def test_shapes_that_disagree_are_refused_with_both_numbers(tmp_path: Path) -> None:
    spec = property_file(tmp_path)
    assert len(queries(spec, network(torch.ones(1, 1)))) == 1
    with pytest.raises(InputError, match=r"p\.vnnlib: 1 inputs are declared, but the network 'network' has 3"):
        queries(spec, network(torch.ones(1, 3)))
    with pytest.raises(InputError, match=r"p\.vnnlib: 1 outputs are declared, but the network 'network' has 2"):
        queries(spec, network(torch.ones(2, 1)))


# ---- instances.csv ---------------------------------------------------------------------------------------------


def test_instances_survive_writing_and_reading(tmp_path: Path) -> None:
    rows = [
        Instance(tmp_path / "nets" / "a, b.onnx", tmp_path / "p.vnnlib", 60.0),
        Instance(tmp_path.parent / "c.onnx", tmp_path / "q.vnnlib", 0.5),
    ]
    write_instances(tmp_path / "instances.csv", rows)
    assert (tmp_path / "instances.csv").read_text() == '"nets/a, b.onnx",p.vnnlib,60\n../c.onnx,q.vnnlib,0.5\n'
    again = read_instances(tmp_path / "instances.csv")
    assert [(os.path.normpath(r.onnx), r.vnnlib, r.timeout) for r in again] == [
        (str(r.onnx), r.vnnlib, r.timeout) for r in rows
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a.onnx,p.vnnlib", "the row has 2 fields where"),
        ("a.onnx,p.vnnlib,1,2", "the row has 4 fields where"),
        (",p.vnnlib,1", "a file name is empty"),
        ("a.onnx,p\0.vnnlib,1", ""),
        ("a.onnx," + "p" * 200_000 + ",1", "field larger than"),
        ("a.onnx,p.vnnlib,soon", "'soon' is not a number of seconds"),
        ("a.onnx,p.vnnlib,-1", "the timeout is -1 s"),
        ("a.onnx,p.vnnlib,nan", "the timeout is nan s"),
        ("a.onnx,p.vnnlib,inf", "the timeout is inf s"),
        ('"a.onnx,p.vnnlib,1', "unexpected end of data"),
    ],
)
def test_bad_rows_are_refused_by_line(row: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "instances.csv"
    path.write_text(f"a.onnx,p.vnnlib,1\n\n{row}\n")
    with pytest.raises(InputError) as caught:
        read_instances(path)
    assert str(caught.value).startswith(f"{path}: line 3: {message}")


# ---- balls -----------------------------------------------------------------------------------------------------

EPS = Fraction(1, 255)


def test_another_class_is_unsafe_and_so_is_a_tie() -> None:
    (prop,) = linf_properties(np.zeros((1, 2)), [1], EPS, 3)
    for y, violated in (((0, 1, 0), False), ((2, 1, 0), True), ((0, 1, 1), True), ((0, 1, 2), True)):
        exact = [Fraction(v) for v in y]
        assert prop.violated(exact) == violated
        assert (prop.margin(exact) > 0) != violated


def _by_fractions(images: np.ndarray, radii: np.ndarray, clip: tuple[Fraction, Fraction], decimals: int | None) -> Box:
    """The box of one image (n,) with a radius for each pixel, computed pixel by pixel from exact fractions."""

    def floor(value: Fraction) -> Fraction:
        return value if decimals is None else Fraction(math.floor(value * 10**decimals), 10**decimals)

    pixels = [(Fraction(x), radius) for x, radius in zip(images.tolist(), radii.tolist(), strict=True)]
    lower = [max(floor(x - radius), clip[0]) for x, radius in pixels]
    return Box.exact(lower, [min(-floor(-x - radius), clip[1]) for x, radius in pixels])


RADII = [
    *(Fraction(0), EPS, Fraction(3, 10), Fraction(0.3), Fraction("0.0314"), Fraction(1, 3), Fraction(7, 2**60)),
    *(Fraction(1) + Fraction(1, 2**80), Fraction(1) + Fraction(1, 3**130), Fraction(1e300), Fraction(10**400)),
    *(Fraction(1, 10**400), Fraction(5e-324) / 3, Fraction(1e-320), Fraction(1, 7 * 2**1000)),
]
UNIT = (Fraction(0), Fraction(1))
WIDE = (Fraction(-(10**9)), Fraction(10**9))
CLIPS = [UNIT, WIDE, (Fraction(1, 3), Fraction(2, 3)), (Fraction(-1e308), Fraction(1e308)), (EPS, Fraction(7, 3))]


def _numbers(rng: np.random.Generator, radius: Fraction) -> list[np.ndarray]:
    """Pixels (20,) of every kind: bytes, float32, float64, next to the radius, subnormal, and of every magnitude."""
    near, powers = min(float(min(radius, Fraction(10**308))), 1e308), rng.integers(-300, 300, 20).astype(float)
    small = rng.integers(-60, 60, 20).astype(float)
    return [
        *(rng.integers(0, 256, 20) / 255, (rng.integers(0, 256, 20) / np.float32(255)).astype(np.float32)),
        *(rng.random(20, np.float32), rng.random(20), rng.standard_normal(20), rng.standard_normal(20, np.float32)),
        *(rng.integers(-4, 5, 20) * 5e-324, rng.integers(-(2**40), 2**40, 20) * 5e-324),
        near + rng.integers(-4, 5, 20) * np.spacing(near),
        near - rng.integers(-4, 5, 20) * np.spacing(near) * 2.0**small,
        -near + rng.standard_normal(20) * np.spacing(near) * 2.0**small,
        rng.standard_normal(20) * 2.0**powers,
    ]


@pytest.mark.combined
@pytest.mark.parametrize("radius", RADII, ids=lambda radius: f"{nearest(radius):.3g}")
@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: f"{nearest(clip[0]):.3g}")
def test_balls_of_any_numbers_are_those_of_fractions(radius: Fraction, clip: tuple[Fraction, Fraction]) -> None:
    rng = np.random.default_rng(0)
    low, high = round_down(clip[0]), round_up(clip[1])
    images = np.stack([x.astype(np.float64).clip(low, high) for x in _numbers(rng, radius)])
    masked = np.where(rng.random(images.shape) < 0.5, radius, Fraction(0))
    mixed = rng.choice(np.array([Fraction(0), EPS, Fraction(0.1), radius], dtype=object), images.shape)
    for eps in (radius, masked, mixed):
        radii = np.broadcast_to(np.asarray(eps, dtype=object), images.shape)
        for decimals in (None, 6):
            try:
                boxes = [_by_fractions(*pair, clip, decimals) for pair in zip(images, radii, strict=True)]
            except InputError as error:
                with pytest.raises(InputError, match=str(error)):
                    linf_properties(images, [0] * len(images), eps, 2, clip, decimals=decimals)
                continue
            found = linf_properties(images, [0] * len(images), eps, 2, clip, decimals=decimals)
            for prop, box in zip(found, boxes, strict=True):
                # The bits, with the sign of zero.
                assert (prop.box.lower.tobytes(), prop.box.upper.tobytes()) == (
                    box.lower.tobytes(),
                    box.upper.tobytes(),
                )
                assert prop.digest == Property(box, prop.unsafe).digest
                assert (dict(prop.box.exact_lower), dict(prop.box.exact_upper)) == (box.exact_lower, box.exact_upper)
                assert len(prop.box.exact_lower) == len(box.exact_lower)


def test_the_digest_of_a_ball_is_that_of_earlier_records() -> None:
    image = np.float32([0.1, 0.5, 0.998, 1.0])
    (prop,) = linf_properties(image[None], [1], EPS, 3)
    assert prop.digest == "e966d8a1ec5d2ddd8ab8f396e793eccd2984862774db251c07bf6e3822a1a9c8"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [3]}, "image 0: the label is 3, outside of 0 to 2"),
        ({"labels": [-1]}, "image 0: the label is -1, outside of"),
        ({"eps": Fraction(-1)}, "eps is -1.0, below 0"),
        ({"eps": float("nan")}, "eps is nan, not a finite"),
        ({"images": np.array([[0.5, np.nan]])}, "image 0: a pixel is nan, outside of the valid range [0.0, 1.0]"),
        ({"images": np.array([[0.5, 1.5]])}, "image 0: a pixel is 1.5, outside"),
        ({"clip": (1, 0)}, "the valid range 1.0 to 0.0 is empty"),
    ],
)
def test_bad_balls_are_refused(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"images": np.array([[0.5, 0.5]]), "labels": [1], "eps": EPS, "classes": 3}
    with pytest.raises(InputError) as caught:
        linf_properties(**(arguments | change))  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


# ---- the command -----------------------------------------------------------------------------------------------


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    """A folder with a network that names the larger pixel, and images of which number 1 is labelled wrongly."""
    write_onnx(network(torch.eye(2)), tmp_path / "net.onnx")
    images = np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.6], [0.1, 0.2]], np.float32)
    np.savez(tmp_path / "images.npz", images=images, labels=np.array([0, 1, 1, 1]))
    return tmp_path


def run(folder: Path, *arguments: str) -> int:
    return main(["--net", f"{folder}/net.onnx", "--data", f"{folder}/images.npz", "--out", f"{folder}/out", *arguments])


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_the_command_writes_properties_that_find_their_network(version: str, problem: Path) -> None:
    assert run(problem, "--correct", "2", "--eps", "1/255", "0.02", "--timeout", "30", "--version", version) == 0
    rows = read_instances(problem / "out" / "instances.csv")
    assert [row.vnnlib.name for row in rows] == [
        f"net_images_{i}_eps{eps}.vnnlib" for eps in ("1_255", "1_50") for i in (0, 2)
    ]
    for row in rows:
        spec = read_vnnlib(row.vnnlib)
        found = find_network(spec)
        assert found.samefile(problem / "net.onnx") and found.samefile(row.onnx) and row.timeout == 30
        (query,) = queries(spec, read_onnx(found))
        image = np.load(problem / "images.npz")["images"][int(row.vnnlib.name.split("_")[2])]
        assert query.property.box.contains([Fraction(float(v)) for v in image])
        assert spec.version == version
    head = rows[2].vnnlib.read_text().splitlines()[:4]
    assert head[0] == "; L-infinity robustness: images test image 0, label 0, eps 1/50"
    assert head[3] == "; network: ../net.onnx"


def test_the_command_adds_to_instances_and_replaces_its_own(problem: Path) -> None:
    assert run(problem, "--images", "0-1", "--eps", "1/255") == 0
    assert run(problem, "--images", "1,3", "--eps", "1/255", "--timeout", "5") == 0
    rows = read_instances(problem / "out" / "instances.csv")
    assert [(row.vnnlib.name.split("_")[2], row.timeout) for row in rows] == [("0", 60), ("1", 5), ("3", 5)]


def test_the_command_gzips_without_a_date_and_names_as_asked(problem: Path) -> None:
    arguments = ("--images", "2", "--eps", "1/255", "--gzip", "--name", "mine")
    assert run(problem, *arguments) == 0
    (row,) = read_instances(problem / "out" / "instances.csv")
    assert row.vnnlib.name == "mine.vnnlib"
    packed = problem / "out" / "mine.vnnlib.gz"
    assert find_network(read_vnnlib(packed)).samefile(problem / "net.onnx")
    assert packed.read_bytes()[4:8] == bytes(4)
    assert run(problem, *arguments, "--version", "2.0") == 0
    assert len(read_instances(problem / "out" / "instances.csv")) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--images", "4", "--eps", "1/255"], "images.npz: image 4 does not exist: there are 4"),
        (["--images", "0-1", "--eps", "1/255", "--name", "mine"], "--name names one property, but the options make 2"),
        (
            ["--correct", "4", "--eps", "1/255"],
            "images.npz: only 3 of 4 images classified correctly: ask for fewer",
        ),
        (["--images", "0", "--eps", "1", "--data", "no.npz"], "no.npz: no such file"),
        (["--images", "0", "--eps", "1", "--data", "imagenet"], "no data set 'imagenet'"),
        (["--images", "0", "--eps", "1", "--net", "no.onnx"], "no.onnx: "),
        *(
            (["--images", "0", "--eps", "1", "--name", name], "--name: ")
            for name in ("../x", "/x", "a/b", "..", "", "\x1b")
        ),
    ],
)
def test_the_command_refuses_in_one_line(
    arguments: list[str], message: str, problem: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(problem, *arguments) == 2
    stderr = capsys.readouterr().err
    assert message in stderr and stderr.startswith("spec: ") and stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--images", "3-1", "--eps", "1/255"],
        ["--images", "x", "--eps", "1/255"],
        ["--correct", "0", "--eps", "1/255"],
        ["--images", "0", "--eps", "-1"],
        ["--images", "0", "--eps", "1/0"],
        ["--images", "0", "--eps", "1e999999999"],
        ["--images", "0", "--eps", "9" * 5000],
        ["--images", "٣", "--eps", "1"],
        ["--images", "0-999999999", "--eps", "1"],
        ["--images", "9" * 5000, "--eps", "1"],
        ["--correct", "٣", "--eps", "1"],
        ["--images", "0", "--eps", "nan"],
        ["--images", "0", "--eps", "1/255", "--timeout", "inf"],
        ["--images", "0", "--correct", "1", "--eps", "1/255"],
        ["--eps", "1/255"],
    ],
)
def test_bad_options_are_refused(arguments: list[str], problem: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        run(problem, *arguments)
    assert caught.value.code == 2


PIXELS, CLASSES = np.zeros((2, 2)), np.array([0, 1])
ARRAYS = {
    "complex": ({"images": PIXELS + 1j, "labels": CLASSES}, "complex128"),
    "text": ({"images": PIXELS.astype(str), "labels": CLASSES}, "where real numbers"),
    "dates": ({"images": PIXELS.astype("datetime64[s]"), "labels": CLASSES}, "where real numbers"),
    "long": ({"images": PIXELS.astype(np.longdouble), "labels": CLASSES}, "where real numbers"),
    "objects": ({"images": PIXELS.astype(object), "labels": CLASSES}, "allow_pickle"),
    "records": ({"images": np.zeros(2, [("a", float)]), "labels": CLASSES}, "where shape (n, …)"),
    "none": ({"images": PIXELS[:0], "labels": CLASSES[:0]}, "and so no pixel"),
    "a number": ({"images": np.float64(0), "labels": np.int64(0)}, "where shape (n, …)"),
    "NaN": ({"images": PIXELS * np.nan, "labels": CLASSES}, "image 0: a pixel is nan, outside"),
    "above 1": ({"images": PIXELS + np.diag([0, 2]), "labels": CLASSES}, "image 1: a pixel is 2.0, outside"),
    "of another size": ({"images": np.zeros((2, 3)), "labels": CLASSES}, "images of shape (3,) have 3 pixels, the"),
    "labels too few": ({"images": PIXELS, "labels": CLASSES[:1]}, "integers of shape (n,)"),
    "labels of two axes": ({"images": PIXELS, "labels": CLASSES[:, None]}, "integers of shape (n,)"),
    "labels in floats": ({"images": PIXELS, "labels": CLASSES * 1.0}, "integers of shape (n,)"),
    "a label below 0": ({"images": PIXELS, "labels": CLASSES - 1}, "image 0: the label -1"),
    "a label too large": ({"images": PIXELS, "labels": CLASSES + 2}, "image 0: the label is 2, but"),
    "a label far too large": ({"images": PIXELS, "labels": np.full(2, 2**64 - 1, np.uint64)}, "image 0: the label is"),
    "no labels": ({"images": PIXELS}, "no array 'labels'"),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_odd_arrays_are_refused_in_one_line(case: str, problem: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays, message = ARRAYS[case]
    np.savez(problem / "images.npz", **arrays)  # type: ignore[arg-type]
    assert run(problem, "--images", "0", "--eps", "1/255") == 2
    shown = capsys.readouterr().err
    assert message in shown and "images.npz: " in shown and shown.count("\n") == 1


def test_damaged_arrays_are_refused_in_one_line(problem: Path) -> None:
    whole = (problem / "images.npz").read_bytes()
    rng = random.Random(0)
    for _ in range(200):
        damaged = bytearray(whole[: rng.choice([len(whole), rng.randrange(len(whole))])])
        for _ in range(rng.randint(0, 3) if damaged else 0):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        (problem / "images.npz").write_bytes(damaged)
        try:
            data = load(str(problem / "images.npz"), "train")
        except InputError as error:
            assert str(error).startswith(f"{problem}/images.npz: ") and len(str(error)) <= LONGEST
        else:
            assert len(data.images) == len(data) and data.labels.min() >= 0
            assert data.images.min() >= 0 and data.images.max() <= 1


def test_an_array_that_claims_to_be_huge_takes_no_memory(problem: Path) -> None:
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (%d, 2), }"
    for claimed in (10**12, 10**8, 10**30, -1):
        text = (header % claimed).ljust(117) + b"\n"
        with zipfile.ZipFile(problem / "images.npz", "w") as archive:
            archive.writestr("images.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
        with pytest.raises(InputError, match=r"images\.npz: "):
            load(str(problem / "images.npz"), "train")
