"""What holds of every script of benchmarks/: its help, its imports, its place in the README, its committed tables."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common.records import SUFFIX, read_records
from benchmarks.common.script import RESULTS, page_of

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in BENCHMARKS.rglob("*.py")
    if path.name != "__main__.py" and '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)
HEAVY = ("torch", "numpy", "scipy", "pandas", "onnx", "matplotlib", "sklearn")
"""What takes longer to import than a help should take."""


def files(folder: Path) -> dict[Path, tuple[int, int]]:
    """Every file below a folder but Python's caches, with its size and time of change."""
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


def test_help_imports_nothing_heavy_and_changes_no_file(tmp_path: Path) -> None:
    before = files(BENCHMARKS)
    # Run as by "python -m", and then asked what it has imported.
    code = (
        "import runpy, sys\n"
        f"for script in {[*SCRIPTS, 'benchmarks.study']!r}:\n"
        "    sys.argv = ['', '--help']\n"
        "    try: runpy.run_module(script, run_name='__main__', alter_sys=True)\n"
        "    except SystemExit as end: assert not end.code, script\n"
        f"    found = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "    assert not found, (script, found)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.findall(r"^usage: python -m (\S+)", done.stdout, re.M) == [*SCRIPTS, "benchmarks.study"]
    assert files(BENCHMARKS) == before and not files(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_unknown_option_is_one_line_and_status_2(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(script)
    main = module.SCRIPT.main if hasattr(module, "SCRIPT") else module.main
    with pytest.raises(SystemExit) as end:
        main(["--colour", "red"])
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1


def test_the_readme_has_every_script_and_no_other() -> None:
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"benchmarks\.\w+\.\w+", text)) == set(SCRIPTS)


@pytest.mark.parametrize("place", sorted(RESULTS.glob(f"*{SUFFIX}")), ids=lambda path: path.name.removesuffix(SUFFIX))
def test_committed_pages_are_those_of_the_committed_records(place: Path) -> None:
    scripts = [name for name in SCRIPTS if place.name.startswith(name.rpartition(".")[2])]
    assert scripts, f"results of no script: {place.name}"
    script = importlib.import_module(max(scripts, key=len)).SCRIPT
    assert script.page(read_records(place)).text == page_of(place).read_text(encoding="utf-8")


def test_every_result_is_a_page_and_its_records() -> None:
    kept = sorted(RESULTS.glob(f"*{SUFFIX}"))
    assert {path.name for path in RESULTS.iterdir()} == {each.name for path in kept for each in (path, page_of(path))}
    assert all(path.stat().st_size < 3_000_000 for path in BENCHMARKS.rglob(f"*{SUFFIX}"))
