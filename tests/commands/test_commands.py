"""The command verifiable-relu: its help, its errors, and the completion of its commands in shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from verifiable_relu import __version__
from verifiable_relu.__main__ import main
from verifiable_relu.commands import COMMANDS

ROOT = Path(__file__).parents[2]


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


@pytest.mark.parametrize("name", [command.name for command in COMMANDS])
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: verifiable-relu {name} ")


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
        "import sys; from verifiable_relu.__main__ import main; main([])\n"
        "from verifiable_relu.commands import COMMANDS\n"
        # The checker's package loads the reader of ONNX files that it checks.
        "for command in (c for c in COMMANDS if c.name != 'check'):\n"
        "    try: main([command.name, '--help'])\n"
        "    except SystemExit: pass\n"
        "heavy = {'torch', 'onnx', 'onnxruntime', 'rich', 'z3', 'highspy', 'vnnlib', 'shtab', 'jinja2'}\n"
        "sys.exit(f'imported {heavy & set(sys.modules)}' if heavy & set(sys.modules) else 0)"
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_the_completion_knows_every_command_and_option(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for command in COMMANDS:
        assert command.name in script
        for action in command.make_parser()._actions:
            assert all(option.lstrip("-") in script for option in action.option_strings)
    if program := shutil.which(shell):
        assert subprocess.run([program, "-n"], input=script, text=True).returncode == 0
