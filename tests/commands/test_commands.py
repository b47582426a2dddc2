"""The command verifiable-relu: its help and its errors."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.processes import environment, run
from verifiable_relu import __version__
from verifiable_relu.__main__ import COMMANDS, main

ROOT = Path(__file__).parents[2]


@pytest.mark.quick
def test_the_help_lists_every_command_under_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n  {command.name} " in shown and f"\n{command.group}:\n" in shown and command.about in shown
    assert len({command.name for command in COMMANDS}) == len(COMMANDS)
    groups = [command.group for command in COMMANDS]
    assert [group for i, group in enumerate(groups) if group not in groups[:i]] == [
        group for i, group in enumerate(groups) if i == 0 or groups[i - 1] != group
    ]


@pytest.mark.quick
@pytest.mark.parametrize("name", [command.name for command in COMMANDS if command.name != "check"])
def test_every_command_calls_its_errors_by_its_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--no-such-option"])
    shown = capsys.readouterr()
    assert end.value.code == 2 and shown.out == ""
    assert shown.err.startswith(f"{name}: ") and shown.err.count("\n") == 1


def test_a_command_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for given, said in (("certfy", "did you mean certify?"), ("conquer", "certify, "), ("--colour", "--colour")):
        with pytest.raises(SystemExit) as end:
            main([given])
        error = capsys.readouterr().err
        assert end.value.code == 2 and error.startswith("verifiable-relu: ") and error.count("\n") == 1
        assert said in error


def test_the_version_is_the_packages_and_the_script_runs_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"verifiable-relu {__version__}\n"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"verifiable-relu": "verifiable_relu.__main__:main"}


def test_the_help_of_the_commands_loads_nothing_heavy() -> None:
    code = (
        "import sys; from verifiable_relu.__main__ import COMMANDS, main; main([])\n"
        # The checker's package loads the reader of ONNX files that it checks.
        "for command in (c for c in COMMANDS if c.name != 'check'):\n"
        "    try: main([command.name, '--help'])\n"
        "    except SystemExit: pass\n"
        "heavy = {'torch', 'onnx', 'onnxruntime', 'rich', 'z3', 'highspy', 'vnnlib', 'jinja2'}\n"
        "sys.exit(f'imported {heavy & set(sys.modules)}' if heavy & set(sys.modules) else 0)"
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("word", ["certify --spec", "report"])
def test_a_name_that_is_too_long_is_one_line(word: str) -> None:
    done = run(["-m", "verifiable_relu", *word.split(), "n" * 300])
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"{word.split()[0]}: ") and done.stderr.count("\n") == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("place", ["certificate", "--net", "--spec"])
def test_the_checker_waits_for_no_pipe(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    files = {"certificate": tmp_path / "c", "--net": tmp_path / "n", "--spec": tmp_path / "s"}
    for path in files.values():
        path.write_bytes(b"")
    files[place] = tmp_path / "pipe"
    given = ["--net", str(files["--net"]), "--spec", str(files["--spec"])]
    assert main(["check", str(files["certificate"]), *given]) == 2
    assert capsys.readouterr().err == f"check: {tmp_path / 'pipe'}: it is not a regular file\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_is_printed_is_utf_8_whatever_the_terminal_says(encoding: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "verifiable_relu", "--help"],
        env={**environment(), "PYTHONIOENCODING": encoding, "LC_ALL": "C"}, capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and "λ-GELU" in done.stdout.decode("utf-8"), done.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["none.vnnlib"], "none.vnnlib: no such file"),
        (["--spec", "none.csv"], "none.csv: no such file"),
        (["specs/cifar_eps.vnnlib", "--net", "none.onnx"], "none.onnx: no such file"),
        (["specs/mnist_mlp.onnx"], "specs/mnist_mlp.onnx: a network, where a property is expected"),
    ],
)
def test_a_wrong_path_is_told_before_anything_is_imported(command: list[str], said: str) -> None:
    looked = "import sys; from verifiable_relu.certify import main; s = main(sys.argv[1:]); "
    looked += "sys.exit(s + 5 * ('torch' in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", looked, *command], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith(f"certify: {said}"), done.stderr


@pytest.mark.parametrize("command", [
    ["certify", "--spec", "p.vnnlib", "--certificates=--"], ["certify", "--spec=--"], ["check", "c", "--net=--"],
    ["train", "--data=--"], ["report", "x", "--out=--"],
])  # fmt: skip
def test_two_dashes_are_no_value_of_an_option(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(command)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "'--' is no" in said
