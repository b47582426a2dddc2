"""Folder of certificates, written as verdicts come and checked by the checker, which shares no code with verifiers.

``certificates.csv`` in the folder has a line for each: its file, the network, the property, and what the checker said.
"""

from __future__ import annotations

import csv
import hashlib
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np

from verifiable_relu.check import BadInput, Refused, check
from verifiable_relu.check.records import TABLE
from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.execution.replay import replay
from verifiable_relu.files import on_disk, read_bytes
from verifiable_relu.ir.families import least_lambdas, outside_family
from verifiable_relu.ir.network import Network
from verifiable_relu.ir.transform import NetworkPart, combine, matched, without_head
from verifiable_relu.journal import is_plain_file
from verifiable_relu.proof.encoding import NotToldError
from verifiable_relu.proof.numbering import Numbering
from verifiable_relu.proof.recorder import Recorder
from verifiable_relu.proof.write import Subject, write_sat, write_unsat
from verifiable_relu.search.batch import QueryBatch
from verifiable_relu.search.bounding import AlphaCrown
from verifiable_relu.search.budget import TimeBudget
from verifiable_relu.search.outcomes import Outcome, Verdict
from verifiable_relu.search.portfolio import Auto
from verifiable_relu.settings import default_settings
from verifiable_relu.spec.find import onnx_files
from verifiable_relu.spec.property import Property, Query
from verifiable_relu.spec.specfile import SpecFile, Variable, vnnlib_text

_HEADER = ("certificate", "onnx", "vnnlib", "claim", "checked", "detail", "bytes", "write_s", "check_s", "other")

_LARGEST = 1 << 30


@dataclass(frozen=True)
class Kept:
    """Fate of one certificate: accepted or not, why, and its path; ``refused`` if a point is no counterexample."""

    accepted: bool
    detail: str
    refused: bool = False
    file: str = ""


class Certificates:
    """Folder of certificates, which is made if there is none.

    Where properties come from no file, all questions are about the ``files`` of one or two ``networks``, the first of
    which may be a family; each property is then written next to its certificate.
    """

    def __init__(self, folder: Path, files: Sequence[str] = (), networks: Sequence[Network] = ()) -> None:
        self.files, self._networks = tuple(files), tuple(networks)
        self._folder = folder
        self._table = folder / TABLE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not is_plain_file(self._table):
                self._append(_HEADER)
                return
            held = self._table.read_bytes()
            if not held.startswith(",".join(_HEADER).encode()):
                raise InputError("its columns are those of another version: choose another folder", path=self._table)
            if not held.endswith(b"\n"):
                # The writer of the last line was killed, or found no space.
                self._append(())
        except OSError as error:
            raise InputError(f"certificates cannot be written: {error.strerror}", path=folder) from None

    def keep(
        self,
        onnx: str,
        vnnlib: str,
        queries: Sequence[Query],
        outcomes: Sequence[Outcome],
        limit: float,
        recorder: Recorder | None = None,
        numbers: Sequence[int] = (),
    ) -> Kept:
        """Write and check the certificate of an instance whose verdict is sat or unsat.

        The instance is named by its files, or the property by a name where it has none. A property of two networks is
        about the outputs of the first one and, behind them, those of the other. ``recorder`` knows the proofs of the
        queries by ``numbers``; what was not told is proved again in ``limit`` seconds. A certificate may be impossible
        to make, check or keep: a verdict stands without.
        """
        sat = any(outcome.verdict is Verdict.SAT for outcome in outcomes)
        other = self.files[1] if len(self.files) == 2 else ""
        if other and (sat or len(queries) != 1):
            return Kept(False, "of two networks, an unsat of one box alone has a certificate")
        try:
            network = whole = queries[0].network
            if self.files:
                ends = Variable("X", (whole.input_size,)), Variable("Y", (whole.output_size,))
                text = vnnlib_text(SpecFile(Path(vnnlib), "1.0", tuple(query.property for query in queries), *ends))
                path = self._path(vnnlib, "\n".join((*self.files, text)))
                spec = path.with_name(path.name.replace(".jsonl.gz", ".vnnlib"))
                spec.write_text(text)
                onnx, vnnlib, network = self.files[0], str(spec), self._networks[0]
            else:
                # A name is for shells, tables and terminals, too, whatever the property's file is called.
                path = self._path(Path(vnnlib).name.split(".vnnlib")[0], f"{onnx}\n{vnnlib}")
            arithmetic = network.arithmetic

            def write() -> None:
                if network.source.ports:
                    raise UnsupportedError("the checker reads networks with one input and one output only")
                lambdas = _family(network)
                data = read_bytes(onnx, _LARGEST) if lambdas or other else network.source.onnx
                witness = next((o.witness for o in outcomes if o.verdict is Verdict.SAT and o.witness), None)
                if data is None:
                    raise UnsupportedError("the network that was asked about is not the one in its file")
                if witness and arithmetic != "real":
                    raise UnsupportedError(f"counterexamples in {arithmetic} have no certificates: a run found them")
                subject = Subject(data, read_bytes(vnnlib, _LARGEST), lambdas, arithmetic)
                if witness:
                    return write_sat(path, data, subject.prop, witness)
                if other:
                    subject = replace(subject, other=read_bytes(other, _LARGEST))
                    return _write_two(path, self._networks, queries[0].property, subject, limit, said)
                asked = [query.without_head for query in queries]
                # A solver, or another library, may have decided it.
                with suppress(NotToldError):
                    if recorder is not None:
                        return write_unsat(path, subject, asked, numbers, recorder)
                write_unsat(path, subject, asked, range(len(asked)), proved(asked, limit))

            def said() -> str:
                return check(path, on_disk(onnx), on_disk(vnnlib), arithmetic, on_disk(other) if other else None)

            return self._kept(path, (onnx, vnnlib, other), "sat" if sat else "unsat", write, said)
        except Exception as error:
            known = isinstance(error, InputError | OSError)
            return Kept(False, str(error) if known else f"{type(error).__name__}: {error}")

    def _append(self, row: Sequence[str]) -> None:
        with self._table.open("a", encoding="utf-8", errors="surrogateescape", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(row)

    def _path(self, name: str, asked: str) -> Path:
        """Return the file of a question's certificate, with a number that distinguishes equal names."""
        number = hashlib.sha256(asked.encode("utf-8", "surrogateescape")).hexdigest()[:8]
        plain = re.sub(r"[^\w.-]|^[.-]", "_", name[:80])
        return self._folder / f"{plain}-{number}.jsonl.gz"

    def _kept(
        self, path: Path, files: tuple[str, str, str], claim: str, write: Callable[[], None], said: Callable[[], str]
    ) -> Kept:
        """Write a certificate, have it checked, and add a line to the table. The third file is another network's."""
        start = written = time.perf_counter()
        try:
            write()
            written = time.perf_counter()
            kept = Kept(True, said())
        except Refused as error:
            # Hints that fall short say nothing about the verdict; a point that is no counterexample does.
            kept = Kept(False, f"the checker refuses it: {error}", refused=claim == "sat")
        except BadInput as error:
            kept = Kept(False, f"the checker cannot judge it: {error}")
        except (InputError, OSError) as error:
            kept = Kept(False, str(error))
        seconds = f"{written - start:.3f}", f"{time.perf_counter() - written:.3f}"
        size = path.stat().st_size if path.exists() else 0
        onnx, vnnlib, other = files
        network = onnx_files(onnx)
        named = str(network.resolve() if isinstance(network, Path) else Path.cwd() / network)
        row = (path.name if size else "", named, str(Path(vnnlib).resolve()), claim, str(kept.accepted).lower())
        self._append((*row, kept.detail, str(size), *seconds, other and str(Path(other).resolve())))
        return replace(kept, file=str(path)) if size else kept


def _family(network: Network) -> list[Fraction]:
    """Return the least λ of each activation of a family that certificates support; empty for one network."""
    lambdas = [Fraction(lam) for lam in least_lambdas(network)]
    if lambdas:
        if others := outside_family(without_head(network) or network):
            raise UnsupportedError(f"there are no certificates of families of networks with {others[0]}")
        if min(lambdas) < 1:
            raise UnsupportedError("there are no certificates of families where a GELU's argument is scaled")
    return lambdas


@default_settings()
def proved(queries: Sequence[Query], limit: float, bounds_alone: bool = False) -> Recorder:
    """Return the recorder of a new search for proofs; an UnsupportedError if no proof is found."""
    told = Recorder()
    batch = QueryBatch(queries, TimeBudget(limit), observer=told)
    for _ in batch.ask(AlphaCrown() if bounds_alone else Auto()):
        pass
    if any(batch.outcomes[number].verdict is not Verdict.UNSAT for number in batch.queries):
        raise UnsupportedError(f"no proof that can be written was found in {limit:g} s")
    return told


def _write_two(
    path: Path,
    networks: Sequence[Network],
    prop: Property,
    subject: Subject,
    limit: float,
    said: Callable[[], str],
) -> None:
    """Write the proof of two networks: by bounds of differences, or of both networks apart.

    The search bounds differences of curves better than a certificate can say: what the checker (``said``) refuses then
    is no contradiction, and both networks may still be proved separately.
    """
    size = networks[0].input_size
    parts = [NetworkPart(name, each, range(size)) for name, each in zip(("first", "second"), networks, strict=True)]
    for paired in (True, False):
        joined = combine(parts, size, replay, paired=paired)
        if paired and not joined.pairs:
            continue
        try:
            told = proved([Query(joined, prop)], limit, bounds_alone=paired)
            pairs = _pairs(networks, subject) if paired else []
            write_unsat(path, replace(subject, pairs=pairs), [Query(joined, prop)], [0], told)
            if paired:
                said()
            return
        except (UnsupportedError, Refused):
            path.unlink(missing_ok=True)
            if not paired:
                raise


def _pairs(networks: Sequence[Network], subject: Subject) -> list[tuple[int, int]]:
    """Return the activations of both files that are compared with each other, by number."""
    assert subject.other is not None
    ends = [np.zeros(networks[0].input_size), np.ones(networks[0].input_size)]
    alone = replace(subject, other=None)
    graphs = alone.graph(), replace(alone, network=subject.other, lambdas=()).graph()
    one, other = (Numbering(graph, network, False, *ends) for graph, network in zip(graphs, networks, strict=True))
    return [(one[first].number, other[second].number) for second, first in matched(networks[0], networks[1]).items()]
