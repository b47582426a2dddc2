"""What is proven of a hardened network's files around images: in real numbers, as they run, and of all at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from verifiable_relu.api import Results, verify


def proven(
    files: Sequence[Path],
    images: Tensor,
    labels: Tensor,
    eps: str,
    timeout: float,
    lam: float | None,
    certificates: Path | None = None,
    progress: bool = False,
) -> Iterator[tuple[str, Results]]:
    """Ask whether each image keeps its label in the L∞ ball of radius ``eps``, of each file and arithmetic.

    Args:
        files: the float file and, if there is one, the int8 file.
        images, labels: (n, …), in [0, 1], and (n,), the true classes.
        eps: the radius, as a number or quotient.
        timeout: seconds for each image and question.
        lam: λ of the λ-GELUs that ReLU replaces; None where the activations were others.
        certificates: a folder for certificates of the last question; there must be an int8 file.
        progress: whether a progress bar is shown on stderr.

    Yields:
        What is asked about and the results, question by question. The last question is about all networks at once: the
        λ'-GELU networks with λ' ≥ ``lam`` and ReLU in real numbers, and every evaluation of the files in float32.

    Raises:
        InputError: for a radius, a network or a folder that cannot be used.
    """
    asked: dict[str, dict[str, object]] = {f"{files[0].name} in real numbers": {}}
    asked |= {f"{file.name} in float32": {"model": file, "arithmetic": "float32"} for file in files}
    whole: dict[str, object] = {"arithmetic": "float32", "also": list(files[1:]), "certificates": certificates}
    if lam is not None:
        whole["joint"] = lam
    asked[f"all of these{'' if lam is None else f' and λ-GELU with λ ≥ {lam:g}'} at once"] = whole
    for name, how in asked.items():
        model = how.pop("model", files[0])
        yield name, verify(model, images, labels, eps, timeout=timeout, progress=progress, **how)  # type: ignore[arg-type]
