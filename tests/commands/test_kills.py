"""Campaigns that are killed or still run when another begins: no record is lost, and a folder has one campaign."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.processes import Process
from tests.support.scripted import Scripted, case
from tests.unit.test_campaign import UNSAT, kept, known
from verifiable_relu.campaign import Store
from verifiable_relu.errors import InputError

LOCKED = """
import sys
from verifiable_relu.campaign import Store
store = Store(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


def test_a_folder_is_one_campaigns_until_that_is_over_or_killed(tmp_path: Path) -> None:
    with Process(["-c", LOCKED, tmp_path]) as process:
        assert process.stdout.readline() == "open\n"
        with pytest.raises(InputError, match="another campaign runs in this folder"):
            Store(tmp_path)
        process.kill()
        process.wait()
    assert known(tmp_path) == 0


KILLED = """
import sys
from tests.support import scripted as t
from verifiable_relu.campaign import Observer, Store, run

class Says(Observer):
    def result(self, number, result, recorded):
        print(result.vnnlib, flush=True)

with Store(sys.argv[1], observer=Says()) as kept:
    print("open", flush=True)
    run([t.case(2 + i, name=str(i)) for i in range(int(sys.argv[2]))], t.Scripted(), kept)
"""


def test_a_kill_at_any_moment_loses_no_record_that_was_made(tmp_path: Path) -> None:
    count, rng = 2000, random.Random(0)
    before: set[str] = set()
    for _ in range(3):
        with Process(["-c", KILLED, tmp_path, count]) as process:
            assert process.stdout.readline() == "open\n"
            said = {process.stdout.readline().strip() for _ in range(rng.randrange(300))}
            # The kill comes a random time after a line of output.
            time.sleep(rng.uniform(0, 0.01))
            process.send_signal(signal.SIGKILL)
            said |= {line.strip() for line in process.stdout if line.endswith("\n")}
        # A campaign first reports the instances that its records answer.
        Store(tmp_path).close()
        found = {json.loads(line)["vnnlib"] for line in (tmp_path / "records.jsonl").read_text().splitlines()}
        assert before | said <= found
        assert {path.name for path in tmp_path.iterdir()} <= {".lock", "records.jsonl", "results.csv"}
        before = found
    assert before
    verifier = Scripted()
    results = kept([case(2 + i, name=str(i)) for i in range(count)], verifier, tmp_path)
    assert len(results) == count and all(result.verdict is UNSAT for result in results)
    assert sum(len(queries) for queries in verifier.asked) == count - len(before)
