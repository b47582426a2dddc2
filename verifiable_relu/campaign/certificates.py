"""A folder of certificates: written as verdicts come, and checked by the checker that shares no code with verifiers.

``certificates.csv`` in the folder has a line for each: its file, the network, the property, and what the checker said.
"""

from __future__ import annotations

import csv
import hashlib
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from verifiable_relu.bounds import Ascent
from verifiable_relu.check import BadInput, Refused, check
from verifiable_relu.check.folder import TABLE
from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.files import on_disk, read_bytes
from verifiable_relu.journal import plain
from verifiable_relu.network import Network
from verifiable_relu.network.family import beside_family, least_hardness
from verifiable_relu.network.head import headless
from verifiable_relu.network.product import NetworkPart, product, rectified
from verifiable_relu.spec.find import onnx_files
from verifiable_relu.spec.property import Property, Query
from verifiable_relu.spec.specfile import SpecFile, Variable, vnnlib_text
from verifiable_relu.trust.certificate import Cover, Proof
from verifiable_relu.trust.certificate_file import write_sat, write_unsat
from verifiable_relu.verifiers.auto import prove
from verifiable_relu.verifiers.base import Outcome, Verdict
from verifiable_relu.verifiers.recording import proved_beside, uncertified

_HEADER = ("certificate", "onnx", "vnnlib", "claim", "checked", "detail", "bytes", "write_s", "check_s", "other")

_LARGEST = 1 << 30


@dataclass(frozen=True)
class Kept:
    """What became of one certificate.

    Attributes:
        accepted: whether the checker has accepted it.
        detail: what it said, or why there is none.
        refused: whether the checker has refused it. One that does not know the network or the property says nothing.
        file: its path; empty where none was written.
    """

    accepted: bool
    detail: str
    refused: bool = False
    file: str = ""


class Certificates:
    """The folder.

    Args:
        folder: made if there is none.

    Raises:
        InputError: if it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._table = folder / TABLE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not plain(self._table):
                self._append(_HEADER)
                return
            held = self._table.read_bytes()
            if not held.startswith(",".join(_HEADER).encode()):
                raise InputError("has other columns than those written today: choose another folder", path=self._table)
            if not held.endswith(b"\n"):
                # The writer of the last line was killed, or found no space.
                self._append(())
        except OSError as error:
            raise InputError(f"certificates cannot be written: {error.strerror}", path=folder) from None

    def keep(self, onnx: str, vnnlib: str, queries: Sequence[Query], outcomes: Sequence[Outcome], limit: float) -> Kept:
        """Write and check the certificate of an instance whose verdict is sat or unsat.

        Args:
            onnx: the network's file.
            vnnlib: the property's file.
            queries: that the property makes of the network.
            outcomes: theirs; for sat at least one that is sat.
            limit: seconds for proving again what was not recorded.

        Returns:
            Also for a certificate that cannot be made, checked or kept: a verdict stands without.
        """
        try:
            return self._keep(onnx, vnnlib, queries, outcomes, limit)
        except Exception as error:
            known = isinstance(error, InputError | OSError)
            return Kept(False, str(error) if known else f"{type(error).__name__}: {error}")

    def _keep(
        self, onnx: str, vnnlib: str, queries: Sequence[Query], outcomes: Sequence[Outcome], limit: float
    ) -> Kept:
        number = hashlib.sha256(f"{onnx}\n{vnnlib}".encode("utf-8", "surrogateescape")).hexdigest()[:8]
        # A name is for shells, tables and terminals, too, whatever the property's file is called.
        name = re.sub(r"[^\w.-]|^[.-]", "_", Path(vnnlib).name.split(".vnnlib")[0][:80])
        path = self._folder / f"{name}-{number}.jsonl.gz"
        start = time.perf_counter()
        sat = [outcome.witness for outcome in outcomes if outcome.verdict is Verdict.SAT and outcome.witness]
        claim = "sat" if sat else "unsat"
        try:
            network, prop = queries[0].network.onnx, read_bytes(vnnlib, _LARGEST)
            if queries[0].network.ports:
                said = "the checker reads networks with one input and one output only"
                return self._kept(path, onnx, vnnlib, claim, Kept(False, said))
            joint = _family(queries[0].network)
            if joint:
                network = read_bytes(onnx, _LARGEST)
            if network is None:
                return self._kept(path, onnx, vnnlib, claim, Kept(False, "the network is not that of its file"))
            arithmetic = queries[0].network.arithmetic
            if sat and arithmetic != "real":
                said = f"a counterexample in {arithmetic} is an evaluation that was run"
                return self._kept(path, onnx, vnnlib, claim, Kept(False, said))
            if sat:
                write_sat(path, network, prop, sat[0])
            else:
                write_unsat(path, network, prop, list(proofs(queries, outcomes, limit)), joint, arithmetic)
        except (InputError, OSError) as error:
            return self._kept(path, onnx, vnnlib, claim, Kept(False, str(error)))
        written = time.perf_counter()
        kept = _said(path, on_disk(onnx), on_disk(vnnlib), arithmetic)
        return self._kept(path, onnx, vnnlib, claim, kept, written - start, time.perf_counter() - written)

    def keep_two(self, files: tuple[str, str], one: Network, other: Network, prop: Property, limit: float) -> Kept:
        """Write and check the certificate that two networks at the same input have no outputs in an unsafe set.

        The property is written beside the certificate, as a file of VNN-LIB.

        Args:
            files: of the networks.
            one, other: the networks; the second is that of its file.
            prop: about the outputs of the first one and, behind them, those of the other.
            limit: seconds for proving it, where bounds of differences do not.
        """
        number = hashlib.sha256("\n".join((*files, vnnlib_text(prop))).encode("utf-8", "surrogateescape")).hexdigest()[
            :8
        ]
        name = re.sub(r"[^\w.-]|^[.-]", "_", prop.name[:80])
        path, spec = (self._folder / f"{name}-{number}{ending}" for ending in (".jsonl.gz", ".vnnlib"))
        start = time.perf_counter()
        try:
            joint = _family(one)
            pairs, proof = beside(one, other, prop, limit)
            if proof is None:
                raise UnsupportedError(f"no proof that can be written was found in {limit:g} s")
            spec.write_text(vnnlib_text(prop))
            data = [read_bytes(file, _LARGEST) for file in files]
            write_unsat(path, data[0], spec.read_bytes(), [(0, proof)], joint, one.arithmetic, (data[1], pairs))
        except (InputError, OSError) as error:
            return self._kept(path, files[0], str(spec), "unsat", Kept(False, str(error)), other=files[1])
        written = time.perf_counter()
        kept = _said(path, on_disk(files[0]), spec, one.arithmetic, on_disk(files[1]))
        times = written - start, time.perf_counter() - written
        return self._kept(path, files[0], str(spec), "unsat", kept, *times, files[1])

    def _kept(
        self,
        path: Path,
        onnx: str,
        vnnlib: str,
        claim: str,
        kept: Kept,
        write: float = 0.0,
        checking: float = 0.0,
        other: str = "",
    ) -> Kept:
        size = path.stat().st_size if path.exists() else 0
        seconds = (f"{write:.3f}", f"{checking:.3f}")
        network = onnx_files(onnx)
        named = str(network.resolve() if isinstance(network, Path) else Path.cwd() / network)
        files = (path.name if size else "", named, str(Path(vnnlib).resolve()))
        self._append(
            (
                *files,
                claim,
                str(kept.accepted).lower(),
                kept.detail,
                str(size),
                *seconds,
                other and str(Path(other).resolve()),
            )
        )
        return replace(kept, file=str(path)) if size else kept

    def _append(self, row: Sequence[str]) -> None:
        with self._table.open("a", encoding="utf-8", errors="surrogateescape", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(row)


def _family(network: Network) -> list[Fraction]:
    """The least λ of each activation of a family; empty for a single network.

    Raises:
        UnsupportedError: if other activations than those of the family are before the head, which certificates do not
            know.
    """
    joint = [Fraction(lam) for lam in least_hardness(network)]
    if joint:
        if others := beside_family(headless(network) or network):
            raise UnsupportedError(f"certificates know no family in which {others[0]} is an activation, too")
        if min(joint) < 1:
            raise UnsupportedError("certificates know no family of a GELU of a multiple that runs")
    return joint


def proofs(queries: Sequence[Query], outcomes: Sequence[Outcome], limit: float) -> Iterator[tuple[int, Proof | Cover]]:
    """The proof of every query, with the number of its box.

    Raises:
        UnsupportedError: if there is none for some query.
    """
    boxes: list[tuple[object, ...]] = []
    for query, outcome in zip(queries, outcomes, strict=True):
        box = tuple(query.property.box.bounds(i) for i in range(query.property.box.size))
        if not query.property.unsafe:
            # What never holds is no disjunct, and its box is not counted.
            continue
        if box not in boxes:
            boxes.append(box)
        proof = outcome.proof or prove(query.without_head, limit)
        if proof is None and (function := uncertified(query.without_head.network)):
            raise UnsupportedError(f"certificates do not know {function}")
        if proof is None:
            raise UnsupportedError(f"no proof that can be written was found in {limit:g} s")
        yield boxes.index(box), proof


class OfQuestions(Certificates):
    """Certificates of questions about one or two networks' files; each property is written beside its certificate.

    Args:
        folder: as in ``Certificates``.
        files: of the networks.
        networks: those of the files; the first may be a family.
    """

    def __init__(self, folder: Path, files: Sequence[str], networks: Sequence[Network]) -> None:
        super().__init__(folder)
        self.files, self._networks = tuple(files), tuple(networks)

    def _keep(
        self, onnx: str, vnnlib: str, queries: Sequence[Query], outcomes: Sequence[Outcome], limit: float
    ) -> Kept:
        if len(self.files) == 2:
            if any(outcome.verdict is Verdict.SAT for outcome in outcomes) or len(queries) != 1:
                return Kept(False, "of two networks, an unsat of one box alone has a certificate")
            one, other = self._networks
            both = self.files[0], self.files[1]
            return self.keep_two(both, one, other, replace(queries[0].property, name=vnnlib), limit)
        given = SpecFile(
            Path(vnnlib), "1.0", tuple(query.property for query in queries),
            Variable("X", (queries[0].network.input_size,)), Variable("Y", (queries[0].network.output_size,)),
        )  # fmt: skip
        text = vnnlib_text(given)
        number = hashlib.sha256(text.encode()).hexdigest()[:8]
        spec = self._folder / f"{re.sub(r'[^a-zA-Z0-9_.-]', '_', vnnlib[:80])}-{number}.vnnlib"
        spec.write_text(text)
        return super()._keep(self.files[0], str(spec), queries, outcomes, limit)


def beside(
    one: Network, other: Network, prop: Property, limit: float
) -> tuple[list[tuple[int, int]], Proof | Cover | None]:
    """A proof about two networks at the same input, and the activations that it puts beside each other, by number."""
    size = one.input_size
    parts = [NetworkPart("first", one, range(size)), NetworkPart("second", other, range(size))]
    if pairs := rectified(one, other):
        proof = proved_beside(Query(product(parts, size), prop), Ascent())
        if proof is not None:
            return pairs, proof
    return [], prove(Query(product(parts, size, beside=False), prop), limit)


def _said(path: Path, onnx: Path, vnnlib: Path, arithmetic: str, other: Path | None = None) -> Kept:
    """What the checker says."""
    try:
        return Kept(True, check(path, onnx, vnnlib, arithmetic, other))
    except Refused as error:
        return Kept(False, str(error), refused=True)
    except BadInput as error:
        return Kept(False, f"the checker cannot judge it: {error}")
