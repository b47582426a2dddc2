"""Which network a property file speaks of."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING

from verifiable_relu.errors import InputError, path_end
from verifiable_relu.files import on_disk
from verifiable_relu.spec.instances import read_instances
from verifiable_relu.spec.property import Query
from verifiable_relu.spec.specfile import SpecFile, stem

if TYPE_CHECKING:
    from verifiable_relu.network.graph import Network

_FOLDERS = 3
_LISTED = 5


def find_network(
    spec: SpecFile, net: Path | str | None = None, networks: Mapping[str, Path | str] | None = None
) -> Path:
    """The ONNX file of a property: the first of these that names one, as an existing file.

    1. ``net``; 2. a ``; network: x.onnx`` comment, relative to the property file; 3. ``networks``, by the name
    that a 2.0 file declares; 4. a row for this file in the ``instances.csv`` of its folder or of the two above
    (the competition keeps properties in folders of their own); 5. an ``.onnx`` beside it, of the same name or
    the only one. ``x.onnx`` stands for ``x.onnx.gz`` where only that exists.

    Raises:
        InputError: if none does (it says what was tried), a file that is named does not exist, ``networks`` names
            a network that the file does not declare or contradicts its comment, or rows differ.
    """
    folder = spec.path.parent
    for name in networks or {}:
        if name not in spec.networks:
            declared = f"it declares {', '.join(spec.networks)}" if spec.networks else "VNN-LIB 1.0 names no network"
            raise InputError(f"no network '{name}' is declared; {declared}", path=spec.path)
    chosen = next(iter((networks or {}).values()), None)
    if net is not None:
        return _existing(Path(net), "--net", spec)
    if spec.network is not None:
        commented = _existing(folder / spec.network, "the network comment", spec)
        if chosen is not None and not commented.samefile(_existing(Path(chosen), "--network", spec)):
            raise InputError(
                f"--network names {chosen}, but the network comment {spec.network}: --net decides", path=spec.path
            )
        return commented
    if chosen is not None:
        return _existing(Path(chosen), "--network", spec)
    found = _in_instances(spec) or _sibling(spec)
    if found is None:
        siblings = len(_networks_in(folder))
        raise InputError(
            "no network is named: neither --net, nor a '; network: file.onnx' comment, nor --network name=file, nor "
            f"a row of instances.csv in {folder} or two folders above, nor is there {stem(spec.path)}.onnx or a single "
            f".onnx beside it ({siblings} there)",
            path=spec.path,
        )
    return found


def queries(spec: SpecFile, network: Network) -> list[Query]:
    """The questions of a property file about a network; their answers join: any sat is sat, all unsat is unsat.

    VNN-LIB 1.0 numbers the elements of a network's input and output in row-major order, whatever their shapes. A 2.0
    file declares shapes, which must be the network's; axes of length 1 before all others do not count, since a network
    may have a batch axis or none.

    Raises:
        InputError: if the declared inputs or outputs are not as many as the network's, or of another shape.
    """
    for role, declared, actual in (
        ("input", spec.inputs, network.input_shape),
        ("output", spec.outputs, network.output_shape),
    ):
        size = math.prod(actual)
        if declared.size != size:
            raise InputError(
                f"{declared.size} {role}s are declared, but the network '{network.name}' has {size}", path=spec.path
            )
        if spec.version != "1.0" and _without_batch(declared.shape) != _without_batch(actual):
            raise InputError(
                f"the {role} {declared.name} is declared with shape {list(declared.shape)}, but the network "
                f"'{network.name}' has {list(actual)}",
                path=spec.path,
            )
    return [Query(network, prop) for prop in spec.properties]


def _without_batch(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dropwhile(lambda extent: extent == 1, shape))


def _existing(path: Path, source: str, spec: SpecFile) -> Path:
    found = on_disk(path)
    # Path.is_file raises for a name that is too long.
    if not os.path.isfile(found):
        raise InputError(f"the network {path_end(path)} that {source} names does not exist", path=spec.path)
    return found


def _in_instances(spec: SpecFile) -> Path | None:
    mine = _plain(spec.path)
    for folder in mine.parents[:_FOLDERS]:
        csv = folder / "instances.csv"
        if not os.path.isfile(csv):
            continue
        # Names first: resolving each of a thousand rows would take longer than all the rest.
        rows = (row for row in read_instances(csv) if row.vnnlib.name.removesuffix(".gz") == mine.name)
        named = list(dict.fromkeys(row.onnx for row in rows if _plain(row.vnnlib) == mine))
        if len(named) > 1:
            shown = ", ".join(path.name for path in named[:_LISTED]) + (" …" if len(named) > _LISTED else "")
            raise InputError(f"{csv} names {len(named)} networks for it ({shown}): choose with --net", path=spec.path)
        if named:
            return _existing(named[0], str(csv), spec)
    return None


def _plain(path: Path) -> Path:
    return path.resolve().with_name(path.name.removesuffix(".gz"))


def _sibling(spec: SpecFile) -> Path | None:
    there = _networks_in(spec.path.parent)
    same = [path for path in there if stem(path) == stem(spec.path)]
    return same[0] if same else there[0] if len(there) == 1 else None


def _networks_in(folder: Path) -> list[Path]:
    """The networks in a folder, each once: plain before gzipped."""
    plain = sorted(folder.glob("*.onnx"))
    return plain + [path for path in sorted(folder.glob("*.onnx.gz")) if path.with_suffix("") not in plain]
