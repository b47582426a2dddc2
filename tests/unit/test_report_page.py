"""The HTML page of a folder of results: it is whole, safe, readable for everybody, and right."""

from __future__ import annotations

import base64
import io
import math
import re
import shutil
import subprocess
from dataclasses import replace
from fractions import Fraction
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

from tests.support.scripted import Scripted
from verifiable_relu.campaign import Store, run
from verifiable_relu.campaign.inputs import InstanceFiles, Loader
from verifiable_relu.campaign.store import read_results
from verifiable_relu.ir.network import Network
from verifiable_relu.readers import from_torch, write_onnx
from verifiable_relu.report.__main__ import main
from verifiable_relu.report.figures import draw_answers, margins
from verifiable_relu.report.page import as_image
from verifiable_relu.report.summary import CampaignSummary, natural, radius, radius_text
from verifiable_relu.search.outcomes import Outcome, Reason, Trust, Verdict
from verifiable_relu.spec import Box, Property, Query, Row, write_vnnlib

SIDE = 8
EMPTY = {"meta", "link", "br", "img", "input", "hr"}


def classifier() -> Network:
    """A network of 8 × 8 pixels whose outputs are the sum of the pixels in the left and in the right half."""
    last = nn.Linear(SIDE * SIDE, 2)
    left = torch.arange(SIDE * SIDE) % SIDE < SIDE // 2
    with torch.no_grad():
        last.weight.copy_(torch.stack([left, ~left]).float())
        last.bias.zero_()
    return from_torch(nn.Sequential(nn.ReLU(), nn.Flatten(), last), (1, SIDE, SIDE))


def answer(query: Query) -> Outcome:
    """The corner of the box with a dark left and a bright right half, or *unsat* where that is no counterexample."""
    box = query.property.box
    bright = np.arange(SIDE * SIDE) % SIDE >= SIDE // 2
    witness = tuple(box.bounds(i)[int(bright[i])] for i in range(box.size))
    outputs = query.network(torch.tensor([[float(v) for v in witness]]).float())[0]
    if outputs[1] >= outputs[0]:
        return Outcome(Verdict.SAT, Reason.REFUTED, "look", Trust.FLOAT, -1.0, witness, seconds={"look": 0.5})
    return Outcome(Verdict.UNSAT, Reason.PROVED, "look", Trust.ROUNDED, 0.5, seconds={"look": 0.25})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign over three radii, with a hostile name and an instance out of time."""
    where = tmp_path_factory.mktemp("campaign")
    write_onnx(classifier(), where / "left_right.onnx")
    loader, cases = Loader(), []
    image = np.linspace(0.2, 0.8, SIDE * SIDE).reshape(SIDE, SIDE)
    image[:, : SIDE // 2] += 0.1
    for number, eps in enumerate(("1/100", "1/50", "1/5")):
        low, high = (image.ravel() - float(Fraction(eps))), (image.ravel() + float(Fraction(eps)))
        unsafe = ((Row(((0, Fraction(1)), (1, Fraction(-1))), Fraction(0)),),)
        path = where / f"p{number}.vnnlib"
        write_vnnlib(Property(Box(low, high), unsafe), path, comments=(f"image 0, eps {eps}",))
        cases.append(loader.case(InstanceFiles(path, where / "left_right.onnx", 9.0)))
    with Store(where / "out") as store:
        results = run(cases, Scripted(answer), store)
        late = replace(results[0], vnnlib='<script src="x">&_0.01.vnnlib', verdict=Verdict.UNKNOWN,
                       reason=Reason.TIMEOUT, trust=None, margin=-0.25, detail="a & b < c", query="late")  # fmt: skip
        store.append(late)
    assert [r.answer for r in results] == ["unsat", "unsat", "sat"]
    return where / "out"


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    assert main([str(folder)]) == 0
    return (folder / "report.html").read_text(encoding="utf-8")


class Reader(HTMLParser):
    """Reads a page, and keeps its elements; every element must be closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        self.elements.append((tag, dict(attrs), list(self.open)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), list(self.open)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes, _ in self.elements if name == tag]


def test_the_page_needs_no_other_file_and_runs_no_foreign_text(page: str, folder: Path) -> None:
    reader = Reader(page)
    links = [a.get(name) for _, a, _ in reader.elements for name in ("src", "href", "data", "action") if name in a]
    # Rows lead to the files that are there; the page shows nothing of them.
    assert links and all(link and link.startswith(("data:image/png;base64,", "#", "./", "./../")) for link in links)
    assert all((folder / unquote(link)).is_file() for link in links if link.startswith("./"))
    assert len(reader.all("script")) == 1 and not reader.all("link") and "@import" not in page
    assert "url(" not in page and any("default-src 'none'" in (a.get("content") or "") for a in reader.all("meta"))
    assert ("td", '<script src="x">&_0.01.vnnlib') in reader.texts
    text = " ".join(data for _, data in reader.texts)
    assert "4 instances: 2 unsat, 1 sat, 1 timed-out" in text
    assert "largest output: Y0 at the middle, Y1 at the counterexample" in text
    assert {("td", eps) for eps in ("0.01", "0.02", "0.2")} <= set(reader.texts)


def test_the_page_has_landmarks_captions_and_texts_for_pictures(page: str) -> None:
    reader = Reader(page)
    for landmark in ("header", "nav", "main", "footer", "h1"):
        assert len(reader.all(landmark)) == 1
    assert reader.all("html") == [{"lang": "en"}]
    ids = [a["id"] for _, a, _ in reader.elements if "id" in a]
    assert len(set(ids)) == len(ids)
    targets = [a["href"] for a in reader.all("a") if not str(a["href"]).startswith("./")]
    assert {str(target)[1:] for target in targets} <= set(map(str, ids))
    assert len(reader.all("caption")) == len(reader.all("table")) > 4
    assert all(a.get("scope") in ("col", "row") for a in reader.all("th"))
    assert reader.all("img") and all(a.get("alt") for a in reader.all("img"))
    charts = [a for a in reader.all("svg") if a.get("role") == "img"]
    assert len(charts) == 3 and len(reader.all("desc")) == 3
    # The markers of a chart are its own, and its colours those of the page, in the dark too.
    assert {str(a["xlink:href"])[1:] for a in reader.all("use")} <= set(map(str, ids))
    styles = " ".join(str(a.get("style")) for _, a, where in reader.elements if "svg" in where)
    assert "var(--c0)" in styles and "#" not in styles and "font" not in styles
    levels = [int(tag[1]) for tag, _, _ in reader.elements if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_the_rows_lead_to_their_evidence(page: str) -> None:
    reader = Reader(page)
    (card,) = (a["id"] for a in reader.all("article"))
    links = [str(a["href"]) for _, a, where in reader.elements if "href" in a and where[-1] == "td"]
    assert links.count(f"#{card}") == 1 and sum(link.startswith("./counterexamples/") for link in links) == 1
    assert {"./../p0.vnnlib", "./../p1.vnnlib", "./../left_right.onnx"} <= {*links} and "./../p2.vnnlib" not in links
    assert {"./records.jsonl", "./results.csv"} <= {str(a["href"]) for a in reader.all("a")}
    assert sum(data.startswith("counterexamples/") for _, data in reader.texts) == 2


def test_a_counterexample_is_shown_pixel_by_pixel(page: str, folder: Path) -> None:
    addresses = [str(a["src"]).partition(",")[2] for a in Reader(page).all("img")]
    before, after, change = (np.array(Image.open(io.BytesIO(base64.b64decode(one)))) for one in addresses)
    assert before.shape == (SIDE, SIDE)
    bright = np.arange(SIDE * SIDE).reshape(SIDE, SIDE) % SIDE >= SIDE // 2
    assert (after[bright] >= before[bright]).all() and (after[~bright] < before[~bright]).all()
    assert (change[bright] > 250).all() and (change[~bright] < 5).all()


@pytest.mark.thorough
def test_files_that_are_gone_cost_the_originals_alone(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "out")
    lines = (tmp_path / "out" / "records.jsonl").read_text().replace("left_right.onnx", "gone.onnx")
    (tmp_path / "out" / "records.jsonl").write_text(lines)
    assert main([str(tmp_path / "out"), "--out", str(tmp_path / "p.html"), "--title", "A <title>"]) == 0
    reader = Reader((tmp_path / "p.html").read_text())
    assert len(reader.all("img")) == 1 and ("title", "A <title>") in reader.texts
    assert any("The middle of the box is not shown" in data for _, data in reader.texts)
    assert main([str(tmp_path / "out"), "--out", str(tmp_path / "p.html"), "--pictures", "0"]) == 0
    assert not Reader((tmp_path / "p.html").read_text()).all("img")


CLICKS = """<script>
const table = [...document.querySelectorAll("table[id]")].at(-1);
const button = table.tHead.rows[0].cells[6].querySelector("button");
const seconds = () => [...table.tBodies[0].rows].map(row => Number(row.cells[6].dataset.v));
button.click(); const up = seconds(); button.click(); const down = seconds();
const search = document.querySelector("input[type=search]");
const found = words => {
  search.value = words; search.dispatchEvent(new Event("input"));
  return [...table.tBodies[0].rows].filter(row => !row.hidden).map(row => row.cells[0].textContent);
};
const left = found("p2 sat"), sat = found("sat").length, unsat = found("answer:unsat").length;
const narrow = document.documentElement.scrollWidth <= document.documentElement.clientWidth;
document.title = JSON.stringify({ up, down, left, sat, unsat, narrow });
</script></body>"""


@pytest.mark.skipif(
    not (shutil.which("chromium") or shutil.which("google-chrome")), reason="needs the browser chromium or chrome"
)
def test_a_browser_sorts_and_filters_and_a_phone_need_not_scroll_sideways(page: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page.replace("</body>", CLICKS))
    browser = shutil.which("chromium") or shutil.which("google-chrome") or ""
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=390,800", "--dump-dom",
         f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "page.html").as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    found = re.search("<title>(.*?)</title>", done.stdout)
    assert found is not None
    import html
    import json

    said = json.loads(html.unescape(found[1]))
    assert said["up"] == sorted(said["up"]) and said["down"] == said["up"][::-1] and len(said["up"]) == 4
    assert said["left"] == ["p2.vnnlib"] and said["narrow"]
    # The page has one sat and two unsats.
    assert (said["sat"], said["unsat"]) == (1, 2)


@pytest.mark.thorough
def test_a_training_is_shown_by_its_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = Path(__file__).parents[2] / "specs" / "mnist_mlp.json"
    assert main([str(record), "--out", str(tmp_path / "t.html"), "--figures", str(tmp_path)]) == 0
    reader = Reader((tmp_path / "t.html").read_text())
    charts = [a for a in reader.all("svg") if a.get("role") == "img"]
    titles = {data for tag, data in reader.texts if tag == "title"}
    assert len(charts) >= 3 and {"mean loss", "accuracy on training images", "λ"} <= titles
    assert {path.name for path in tmp_path.iterdir()} == {"t.html", "training.pdf", "training.png"}
    for content in ("{}", "[", '{"options": {}, "results": {}, "epochs": [{"loss": "low"}]}', "[" * 100_000):
        (tmp_path / "bad.json").write_text(content)
        capsys.readouterr()
        assert main([str(tmp_path / "bad.json")]) == 2
        assert capsys.readouterr().err.startswith(f"report: {tmp_path}/bad.json: ")


@pytest.mark.thorough
def test_figures_for_papers_are_pdf_and_png(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), "--figures", str(tmp_path / "f"), "--out", str(tmp_path / "p.html")]) == 0
    made = {path.name: path.read_bytes() for path in (tmp_path / "f").iterdir()}
    assert set(made) == {f"{name}.{kind}" for name in ("cactus", "answers", "certified") for kind in ("pdf", "png")}
    assert all(data.startswith(b"%PDF" if name.endswith("pdf") else b"\x89PNG") for name, data in made.items())
    assert capsys.readouterr().out.count("wrote ") == 7


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "records.jsonl: no such file"),
        ("", "no results here"),
        ("so what\n", "line 1: not a record"),
    ],
)
def test_a_folder_without_results_is_one_line(
    content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "records.jsonl").write_text(content)
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("report: ") and said in error and error.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_inputs_are_pictures_where_their_shape_says_so() -> None:
    shown = {
        (1, 4, 6): (4, 6), (3, 4, 6): (4, 6, 3), (4, 6, 3): (4, 6, 3), (4, 6): (4, 6), (784,): (28, 28),
        (3072,): (32, 32, 3), (5,): None, (1, 1, 1, 5): None, (2, 4, 6): None,
    }  # fmt: skip
    for shape, expected in shown.items():
        found = as_image(np.arange(math.prod(shape), dtype=float), shape)
        assert (None if found is None else found.shape) == expected
        if found is not None and shape[0] == 3:
            assert found[0, 1, 0] == 1 and found[0, 0, 1] == shape[1] * shape[2]


def test_radii_are_read_from_names_and_printed_as_they_were_given() -> None:
    names = {"net_mnist_3_eps1_255.vnnlib": Fraction(1, 255), "prop_7_0.05.vnnlib.gz": Fraction(1, 20),
             "a_eps0.03.vnnlib": Fraction(3, 100), "prop_1.vnnlib": None, "eps1_0.vnnlib": None}  # fmt: skip
    assert {name: radius(name) for name in names} == names
    for text in ("1/255", "2/255", "1/510", "0.01", "0.03", "8/255", "0.0005", "1/3"):
        exact = Fraction(text)
        assert radius_text(exact) == radius_text(float(exact)) == text
    assert radius_text(0.0123456789) == "0.0123457"


def test_methods_have_markers_of_their_own_and_counts_are_whole(folder: Path) -> None:
    names = ["net_10.onnx", "net_9.onnx", "net.onnx", "9.onnx", "net_9_2.onnx"]
    assert sorted(names, key=natural) == ["9.onnx", "net.onnx", "net_9.onnx", "net_9_2.onnx", "net_10.onnx"]
    results = read_results(folder)
    two = CampaignSummary([*results, *(replace(result, verifier="Other()") for result in results)])
    chart = margins(two.methods)
    shown = [(series.colour, series.shape) for series in chart.series if series.points]
    assert len(set(shown)) == len(shown) == 6
    axes = Figure().subplots()
    draw_answers(two.networks, axes)
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    # A legend has no answer that does not occur.
    assert {*axes.get_legend_handles_labels()[1]} == {"unsat", "sat", "timed-out"}
