"""Checkpoints of trainings: each is written completely or not at all, and belongs to one set of options."""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from verifiable_relu.errors import InputError
from verifiable_relu.train.options import Options, flag


def write_whole(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``; a crash at any moment leaves the old file or the new one, complete."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def save(path: Path, options: Options, state: dict[str, Any]) -> None:
    """Write the state of a training together with its options."""
    buffer = io.BytesIO()
    torch.save({"options": asdict(options), "state": state}, buffer)
    write_whole(path, buffer.getvalue())


def restore(path: Path, options: Options) -> dict[str, Any] | None:
    """The state of a training that a checkpoint holds; None if there is no file at ``path``.

    Raises:
        InputError: if the file is damaged, or if it was written by a training with another value of an option, which
            the error names.
    """
    if not path.is_file():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        before, state = content["options"], content["state"]
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise InputError(f"not a readable checkpoint ({error}); delete it to start anew", path=path) from error
    for name, value in asdict(options).items():
        if before.get(name) != value:
            raise InputError(
                f"the checkpoint belongs to a training with {flag(name)} {before.get(name)}, not {value}; "
                "delete it to start anew, or choose another --out",
                path=path,
            )
    return dict(state)
