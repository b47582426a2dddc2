"""The network of a property file: lists of instances (`instances.csv`), and the search for an ONNX file.

A line `onnx,vnnlib,timeout` of a list is an instance; a fourth field may have the expected verdict. The format is the
verification competition's (VNN-COMP), which names several networks in the place of one as
``[('f', 'f.onnx'), ('g', 'g.onnx')]``.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING

from verifiable_relu.errors import InputError, path_end
from verifiable_relu.files import on_disk, read_text
from verifiable_relu.spec import limits
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.specfile import KINDS, DeclaredNetwork, SpecFile, Variable, stem

if TYPE_CHECKING:
    from verifiable_relu.ir.network import Network

_EXPECTED = ("sat", "unsat", "unknown", "")  # verdicts that a fourth field may have
_NAME = r"""\(\s*['"]([^'"]*)['"]\s*,\s*['"]([^'"]*)['"]\s*,?\s*\)"""
_NAMES = re.compile(rf"\[\s*{_NAME}(?:\s*,\s*{_NAME})*\s*,?\s*\]")


@dataclass(frozen=True)
class Networks:
    """The files of networks by the names with which a VNN-LIB 2.0 property declares them; ``folder / networks``, too.

    As a text it is what the competition's lists have in the place of one file.
    """

    files: tuple[tuple[str, Path], ...]

    def __str__(self) -> str:
        return repr([(name, str(path)) for name, path in self.files])

    def __rtruediv__(self, folder: Path) -> Networks:
        return self.changed(folder.joinpath)

    def changed(self, change: Callable[[Path], Path]) -> Networks:
        return Networks(tuple((name, change(path)) for name, path in self.files))


def onnx_files(text: str) -> Path | Networks:
    """Return the file or files that a text names as the competition's lists do."""
    if _NAMES.fullmatch(text.strip()):
        return Networks(tuple((name, Path(file)) for name, file in re.findall(_NAME, text)))
    return Path(text)


def _changed(onnx: Path | Networks, change: Callable[[Path], Path]) -> Path | Networks:
    return onnx.changed(change) if isinstance(onnx, Networks) else change(onnx)


def paths(onnx: Path | Networks | None) -> tuple[Path, ...]:
    """Return all files of a network."""
    if isinstance(onnx, Networks):
        return tuple(path for _, path in onnx.files)
    return () if onnx is None else (onnx,)


def named(onnx: str) -> str:
    """Return the names of the files that a text names, without their folders."""
    return " and ".join(path.name for path in paths(onnx_files(onnx)))


@dataclass(frozen=True)
class Instance:
    """One row of an ``instances.csv``: files joined to the table's folder, and the time limit in seconds.

    Perhaps only a file with ``.gz`` appended exists (``files.on_disk``).
    """

    onnx: Path | Networks
    vnnlib: Path
    timeout: float


def read_instances(path: Path | str) -> list[Instance]:
    """Read the rows of an ``instances.csv`` in their order but empty lines; raises InputError for a bad one."""
    path = Path(path)
    reader = csv.reader(io.StringIO(read_text(path, limits.BYTES), newline=""), strict=True)
    try:
        return [_instance([field.strip(" \t\r\n") for field in row], path.parent) for row in filter(None, reader)]
    except (csv.Error, InputError) as error:
        raise InputError(str(error), path=path, place=f"line {reader.line_num}") from None


def _instance(row: list[str], folder: Path) -> Instance:
    if len(row) != 3 and not (len(row) == 4 and row[3] in _EXPECTED):
        raise InputError(f"the row has {len(row)} fields where onnx, vnnlib and timeout are expected")
    onnx, vnnlib, timeout = row[:3]
    if not onnx or not vnnlib:
        raise InputError("a file name is empty")
    try:
        seconds = float(timeout)
    except ValueError:
        raise InputError(f"'{timeout}' is not a number of seconds") from None
    if not 0 < seconds < math.inf:
        raise InputError(f"the timeout is {timeout} s, which is not positive and finite")
    return Instance(folder / onnx_files(onnx), folder / vnnlib, seconds)


def instances(path: Path) -> list[tuple[Path, Path | Networks | None, float | None]]:
    """Return the instances of a table or folder: property, network, time limit in seconds.

    A folder without ``instances.csv`` has one for each property file in or below it, without network and time limit.
    Raises an InputError if there are no instances, or the table has a bad row or cannot be read.
    """
    # The methods of Path raise for a name that is too long.
    table = path / "instances.csv" if os.path.isdir(path) else path
    if table == path or os.path.isfile(table):
        rows = read_instances(table)
        if not rows:
            raise InputError("the table lists no instance", path=table)
        return [(row.vnnlib, row.onnx, row.timeout) for row in rows]
    found = sorted(file for pattern in ("*.vnnlib", "*.vnnlib.gz") for file in path.rglob(pattern))
    if not found:
        raise InputError("there is no property file in or below the folder", path=path)
    return [(file, None, None) for file in found]


def write_instances(path: Path | str, instances: Iterable[Instance]) -> None:
    """Write an ``instances.csv``, with file names relative to its folder; raises InputError."""
    path = Path(path)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    for instance in instances:
        onnx = _changed(instance.onnx, lambda file: Path(os.path.relpath(file, path.parent)))
        writer.writerow([str(onnx), os.path.relpath(instance.vnnlib, path.parent), f"{instance.timeout:g}"])
    try:
        path.write_text(buffer.getvalue(), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", path=path) from None


_FOLDERS, _LISTED = 3, 5


def find_network(spec: SpecFile) -> Path | Networks:
    """Return the ONNX file of a property file's network, or those of the networks that it declares; they exist.

    The first of these sources that names a file decides:

    1. a comment ``; network: x.onnx`` in the property file, relative to that file's folder;
    2. the property file's row in the ``instances.csv`` of its folder or of one of the two folders above (the
       verification competition keeps properties in a folder of their own);
    3. the file ``*.onnx`` in the property file's folder that has the property file's name or is the only one.

    A name ``x.onnx`` means ``x.onnx.gz`` where only that file exists.

    Raises:
        InputError: if no source names a file, the file does not exist, or rows of ``instances.csv`` differ.
    """
    folder = spec.path.parent
    if spec.network is not None:
        return _existing(folder / spec.network, "the network comment", spec)
    listed, there = _in_instances(spec), sorted(folder.glob("*.onnx"))
    there += [path for path in sorted(folder.glob("*.onnx.gz")) if path.with_suffix("") not in there]
    same = [path for path in there if stem(path) == stem(spec.path)] or there
    if listed is None and (not same or (len(there) > 1 and same is there)):
        said = "no network is named: neither --net, nor --network name=file, nor a '; network: file.onnx' comment"
        said += f", nor a row of instances.csv in {folder} or two folders above, nor is there {stem(spec.path)}.onnx"
        raise InputError(f"{said} or a single .onnx in its folder ({len(there)} there)", path=spec.path)
    return listed or same[0]


def assigned(spec: SpecFile, onnx: Path | Networks) -> list[Path]:
    """Return the file of each network that a property file declares, in its order; in VNN-LIB 1.0 of the only one.

    Raises:
        InputError: if a network has no file, or a file is given that none has.
    """
    declared = spec.joined.networks if spec.joined is not None else ()
    given = paths(onnx)
    if not declared or not isinstance(onnx, Networks):
        own = [network.name for network in declared if not network.equal_to]
        if len(own) > 1 or len(given) != 1:
            said = f"{len(own)} networks ({', '.join(own)})" if declared else "one network"
            raise InputError(f"the query is about {said}, and {len(given)} are given", path=spec.path)
        return [given[0]] * max(1, len(declared))
    files = dict(onnx.files)
    wrong = ["a network is named twice"] * (len(files) < len(given))
    wrong += [f"the query declares no network '{name}'" for name in files if name not in spec.networks]
    found = [files.get(network.name) or files.get(network.equal_to) for network in declared]
    pairs = zip(declared, found, strict=True)
    wrong += [f"no file for the network '{network.name}'" for network, file in pairs if file is None]
    if wrong:
        raise InputError(wrong[0], path=spec.path, place="--network")
    return [file for file in found if file is not None]


def queries(spec: SpecFile, *networks: Network) -> list[Query]:
    """Return the queries of a property file: *sat* if any is *sat*, *unsat* if all are *unsat*.

    There is a network for each that the file declares, in its order; for VNN-LIB 1.0 a single one, whose elements 1.0
    numbers in row-major order. The shapes that 2.0 declares must be the network's but for leading axes of length 1.

    Raises:
        InputError: if a network has another number or shape of inputs or outputs, or networks are wrongly called equal.
    """
    if spec.joined is None:
        (network,) = networks
        _require(spec, network, "input", spec.inputs, network.source.input_shape)
        _require(spec, network, "output", spec.outputs, network.source.output_shape)
        return [Query(network, prop) for prop in spec.properties]
    declared = spec.joined.networks
    if len(networks) != len(declared):
        raise InputError(f"{len(networks)} networks are given for {len(declared)}", path=spec.path)
    of = dict(zip((each.name for each in declared), networks, strict=True))
    for each, network in zip(declared, networks, strict=True):
        _require_fit(spec, network, each)
        if each.equal_to and network.digest != of[each.equal_to].digest:
            said = f"the network '{each.name}' equals '{each.equal_to}', but their files hold different networks"
            raise InputError(said, path=spec.path)
    whole = networks[0]
    if not spec.joined.alone:
        # Imported here: the reading and writing of property files must not wait for torch.
        from verifiable_relu.execution.replay import replay
        from verifiable_relu.ir.transform import NetworkPart, combine

        pairs, joined = zip(declared, networks, strict=True), spec.joined
        parts = [NetworkPart(each.name, network, each.places) for each, network in pairs]
        whole = combine(parts, joined.size, replay, passed=joined.passed, products=joined.products)
    return [Query(whole, prop) for prop in spec.properties]


# Names of types in onnxruntime.
_TYPES = {"F16": "tensor(float16)", "F32": "tensor(float)", "F64": "tensor(double)"}


def _require_fit(spec: SpecFile, network: Network, declared: DeclaredNetwork) -> None:
    tensors = (*declared.inputs, *declared.given)
    if network.source.onnx is not None and any(tensor.kind in _TYPES for tensor in tensors):
        # Imported here: the reading and writing of property files must not wait for onnxruntime.
        from verifiable_relu.runtime import kept_session

        session = kept_session(network.source.onnx)
        kinds = [session.get_inputs()[0].type] * len(declared.inputs) + [session.get_outputs()[0].type] * len(tensors)
        for tensor, kind in zip(tensors, kinds, strict=False):
            if kind != _TYPES.get(tensor.kind, kind) and kind in _TYPES.values():
                said = f"'{tensor.name}' is declared as {KINDS[tensor.kind]}, but the file has {kind}"
                raise InputError(said, path=spec.path)
    ports = network.source.ports or {"input": network.source.input_shape, "output": network.source.output_shape}
    if not network.source.ports and len(tensors) == 2:
        for tensor, (role, shape) in zip(tensors, ports.items(), strict=True):
            _require(spec, network, role, tensor, shape)
        return
    if len(ports) != len(tensors):
        counts = f"{len(tensors)} inputs, outputs and hidden nodes are declared, but the file has {len(ports)}"
        raise InputError(f"{counts}: {', '.join(ports)}", path=spec.path, place=f"network '{declared.name}'")
    split = len(declared.inputs)
    for i, (tensor, (name, shape)) in enumerate(zip(tensors, ports.items(), strict=True)):
        own = [*ports][:split] if i < split else [*ports][split:]
        _require(spec, network, "tensor", tensor, shape, name)
        if i < split + len(declared.outputs) and tensor.name != name and tensor.name in own:
            said = f"'{tensor.name}' is declared in the place of the file's '{name}', another tensor"
            role = "inputs" if i < split else "outputs"
            raise InputError(f"{said}: name all {role} as the file does, or none", path=spec.path)


def _require(
    spec: SpecFile, network: Network, role: str, declared: Variable, shape: tuple[int, ...], name: str = ""
) -> None:
    """Make certain that a network has a tensor as a file declares it; ``name`` is that of the tensor in its file."""
    size = math.prod(shape)
    of = f"'{name}' of '{network.name}'" if name else f"the network '{network.name}'"
    if declared.size != size and not name:
        raise InputError(f"{declared.size} {role}s are declared, but {of} has {size}", path=spec.path)
    # A network may have a batch axis or none.
    first, second = (tuple(dropwhile(lambda extent: extent == 1, each)) for each in (declared.shape, shape))
    if spec.version != "1.0" and first != second:
        said = f"the {role} {declared.name} is declared with shape {list(declared.shape)}"
        raise InputError(f"{said}, but {of} has {list(shape)}", path=spec.path)


def _existing(onnx: Path | Networks, source: str, spec: SpecFile) -> Path | Networks:
    found = _changed(onnx, on_disk)
    # Path.is_file raises for a name that is too long.
    for path in (path for path in paths(found) if not os.path.isfile(path)):
        raise InputError(f"the network {path_end(path)} that {source} names does not exist", path=spec.path)
    return found


def _in_instances(spec: SpecFile) -> Path | Networks | None:
    mine = _plain(spec.path)
    for folder in mine.parents[:_FOLDERS]:
        csv = folder / "instances.csv"
        if not os.path.isfile(csv):
            continue
        status = csv.stat()
        # Resolving the paths of all rows takes long.
        rows = _listed(csv, status.st_mtime_ns, status.st_size)
        same = (row for row in rows if row.vnnlib.name.removesuffix(".gz") == mine.name and _plain(row.vnnlib) == mine)
        named = list(dict.fromkeys(row.onnx for row in same))
        if len(named) > 1:
            shown = ", ".join(path.name for onnx in named[:_LISTED] for path in paths(onnx))
            said = f"{csv} names {len(named)} networks for this property ({shown}{' …' * (len(named) > _LISTED)})"
            raise InputError(f"{said}; choose one with --net", path=spec.path)
        if named:
            return _existing(named[0], str(csv), spec)
    return None


@lru_cache(maxsize=_FOLDERS)
def _listed(csv: Path, changed: int, size: int) -> list[Instance]:
    return read_instances(csv)


def _plain(path: Path) -> Path:
    return path.resolve().with_name(path.name.removesuffix(".gz"))
