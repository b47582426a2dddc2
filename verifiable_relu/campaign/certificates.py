"""A folder of certificates: written as verdicts come, and checked by the checker that shares no code with verifiers.

``certificates.csv`` in the folder has a line for each: its file, the network, the property, and what the checker said.
"""

from __future__ import annotations

import csv
import hashlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from verifiable_relu.bounds import Ascent
from verifiable_relu.check import BadInput, Refused, check
from verifiable_relu.check.folder import TABLE
from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.files import on_disk, read_bytes
from verifiable_relu.journal import is_plain_file
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
    """What became of one certificate: accepted, refused or neither; why; and its path, empty where none was written."""

    accepted: bool
    detail: str
    refused: bool = False
    file: str = ""


class Certificates:
    """The folder, which is made if there is none.

    Args:
        folder: the folder.
        files: the files of one or two networks that all questions are about, where properties come from no file; each
            property is then written beside its certificate.
        networks: the networks of ``files``; the first may be a family.
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
                raise InputError("has other columns than those written today: choose another folder", path=self._table)
            if not held.endswith(b"\n"):
                # The writer of the last line was killed, or found no space.
                self._append(())
        except OSError as error:
            raise InputError(f"certificates cannot be written: {error.strerror}", path=folder) from None

    def keep(self, onnx: str, vnnlib: str, queries: Sequence[Query], outcomes: Sequence[Outcome], limit: float) -> Kept:
        """Write and check the certificate of an instance whose verdict is sat or unsat.

        The instance is named by its files, or the property by a name where it has none. What was not recorded is proved
        again in ``limit`` seconds. A certificate may be impossible to make, check or keep: a verdict stands without.
        """
        sat = any(outcome.verdict is Verdict.SAT for outcome in outcomes)
        try:
            if len(self.files) == 2:
                if sat or len(queries) != 1:
                    return Kept(False, "of two networks, an unsat of one box alone has a certificate")
                one, other = self._networks
                files = self.files[0], self.files[1]
                return self.keep_two(files, one, other, replace(queries[0].property, name=vnnlib), limit)
            if self.files:
                onnx, vnnlib = self.files[0], str(self._written(vnnlib, queries))
            # A name is for shells, tables and terminals, too, whatever the property's file is called.
            path = self._path(Path(vnnlib).name.split(".vnnlib")[0], f"{onnx}\n{vnnlib}")
            network, arithmetic = queries[0].network, queries[0].network.arithmetic

            def write() -> None:
                prop, joint = read_bytes(vnnlib, _LARGEST), [] if network.ports else _family(network)
                data = read_bytes(onnx, _LARGEST) if joint else network.onnx
                witness = next((o.witness for o in outcomes if o.verdict is Verdict.SAT and o.witness), None)
                if network.ports:
                    raise UnsupportedError("the checker reads networks with one input and one output only")
                if data is None:
                    raise UnsupportedError("the network is not that of its file")
                if witness and arithmetic != "real":
                    raise UnsupportedError(f"a counterexample in {arithmetic} is an evaluation that was run")
                if witness:
                    write_sat(path, data, prop, witness)
                else:
                    write_unsat(path, data, prop, list(proofs(queries, outcomes, limit)), joint, arithmetic)

            def said() -> str:
                return check(path, on_disk(onnx), on_disk(vnnlib), arithmetic)

            return self._kept(path, (onnx, vnnlib, ""), "sat" if sat else "unsat", write, said)
        except Exception as error:
            known = isinstance(error, InputError | OSError)
            return Kept(False, str(error) if known else f"{type(error).__name__}: {error}")

    def keep_two(self, files: tuple[str, str], one: Network, other: Network, prop: Property, limit: float) -> Kept:
        """Write and check the certificate that two networks at the same input have no outputs in an unsafe set.

        The property, which is written beside the certificate, is about the outputs of the first one and, behind them,
        those of the other, which is that of its file. It is proved in ``limit`` seconds where bounds of differences do
        not prove it.
        """
        path = self._path(prop.name, "\n".join((*files, vnnlib_text(prop))))
        spec = path.with_name(path.name.replace(".jsonl.gz", ".vnnlib"))

        def write() -> None:
            joint = _family(one)
            pairs, proof = beside(one, other, prop, limit)
            if proof is None:
                raise UnsupportedError(f"no proof that can be written was found in {limit:g} s")
            spec.write_text(vnnlib_text(prop))
            data = [read_bytes(file, _LARGEST) for file in files]
            write_unsat(path, data[0], spec.read_bytes(), [(0, proof)], joint, one.arithmetic, (data[1], pairs))

        def said() -> str:
            return check(path, on_disk(files[0]), spec, one.arithmetic, on_disk(files[1]))

        return self._kept(path, (files[0], str(spec), files[1]), "unsat", write, said)

    def _path(self, name: str, asked: str, ending: str = ".jsonl.gz") -> Path:
        """The file of what is kept about a question, which a number tells from others of the same name."""
        number = hashlib.sha256(asked.encode("utf-8", "surrogateescape")).hexdigest()[:8]
        plain = re.sub(r"[^\w.-]|^[.-]", "_", name[:80])
        return self._folder / f"{plain}-{number}{ending}"

    def _written(self, name: str, queries: Sequence[Query]) -> Path:
        network = queries[0].network
        ends = Variable("X", (network.input_size,)), Variable("Y", (network.output_size,))
        text = vnnlib_text(SpecFile(Path(name), "1.0", tuple(query.property for query in queries), *ends))
        spec = self._path(name, text, ".vnnlib")
        spec.write_text(text)
        return spec

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
            kept = Kept(False, str(error), refused=True)
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

    def _append(self, row: Sequence[str]) -> None:
        with self._table.open("a", encoding="utf-8", errors="surrogateescape", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(row)


def _family(network: Network) -> list[Fraction]:
    """The least λ of each activation of a family, if certificates know it; empty for a single network."""
    joint = [Fraction(lam) for lam in least_hardness(network)]
    if joint:
        if others := beside_family(headless(network) or network):
            raise UnsupportedError(f"certificates know no family in which {others[0]} is an activation, too")
        if min(joint) < 1:
            raise UnsupportedError("certificates know no family of a GELU of a multiple that runs")
    return joint


def proofs(queries: Sequence[Query], outcomes: Sequence[Outcome], limit: float) -> Iterator[tuple[int, Proof | Cover]]:
    """The proof of every query, with the number of its box; raises an UnsupportedError if one has none."""
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
