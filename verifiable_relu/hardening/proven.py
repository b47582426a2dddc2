"""Proofs about a hardened network: a bound of the change by the swap, and what its files do around images."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from verifiable_relu.api import Results, verify
from verifiable_relu.bounds.change import substitution_change
from verifiable_relu.bounds.tuning import Bounds
from verifiable_relu.errors import InputError
from verifiable_relu.network import Network, from_torch
from verifiable_relu.network.agreement import parting, sample_points
from verifiable_relu.network.family import swapped
from verifiable_relu.rounding import unit_roundoff
from verifiable_relu.settings import as_given, neutral
from verifiable_relu.train.batches import NO_TENSOR
from verifiable_relu.train.swap import Region, SubstitutionEffect


def with_proof(
    effect: SubstitutionEffect,
    smooth: nn.Module,
    hard: nn.Module,
    shape: tuple[int, ...] | None,
    patience: float,
    *,
    argument: str | None = None,
    watch: Callable[[float], None] = lambda seconds: None,
) -> SubstitutionEffect:
    """Return an effect with a proven bound of the change over its region, or the reason why there is none.

    Args:
        effect: what was measured on data.
        smooth, hard: the model with smooth activations, and with ReLU.
        shape: the shape of an input sample; None if the model's input is not one tensor.
        patience: the seconds that the proof may take; it goes on with interval bounds alone where they are over. 0
            leaves it out.
        argument: the name of the input, for models of several.
        watch: told during the proof, again and again, the seconds that it has taken.
    """
    if not patience:
        return effect
    if shape is None or effect.region is None:
        return replace(effect, unproven=NO_TENSOR)
    try:
        bound = _bound(smooth, hard, shape, effect.region, patience, argument, watch)
    except InputError as error:
        return replace(effect, unproven=str(error))
    if bound > effect.spread:
        why = f"a bound of {bound:.3g} says nothing, for all outputs here are within {effect.spread:.3g}"
        return replace(effect, unproven=why)
    return replace(effect, proven=bound, unproven="")


@torch.no_grad()
@neutral()
def _bound(
    smooth: nn.Module,
    hard: nn.Module,
    shape: tuple[int, ...],
    region: Region,
    patience: float,
    argument: str | None,
    watch: Callable[[float], None],
) -> float:
    """Bound the change of any output over a region.

    Raises:
        InputError: if a model is not read, the models differ in more than activations, or no finite bound is found.
    """
    start = time.monotonic()

    def stop() -> bool:
        watch(taken := time.monotonic() - start)
        return taken > patience

    with as_given():
        read = [from_torch(model, shape, argument=argument) for model in (smooth, hard)]
    # The bounds are computed on the CPU, whatever the model's device, and need no gradients of the weights.
    first, second = (Network(tuple(n.map_tensors(lambda t: t.detach().cpu()) for n in r.nodes)) for r in read)
    family = swapped(first, second)
    _require_swap(family.limit, second)
    ones = torch.ones(1, *shape, dtype=torch.float64)
    found = substitution_change(family.to(torch.float64), Bounds(ones * region[0], ones * region[1]), stop=stop)
    largest = torch.maximum(-found.lower, found.upper).max().item()
    if not math.isfinite(largest):
        if stop():
            raise InputError(f"the proof took longer than {patience:g} s (patience=)")
        raise InputError("over a region this large, nothing is known of a divisor or an exponential")
    return largest


def _require_swap(found: Network, hard: Network) -> None:
    """Raise an InputError if the swapped smooth network computes other numbers than the hard model's network."""
    x = sample_points(found.input_shape, torch.float64)
    last = len(found.nodes) - 1
    expected = hard.to(torch.float64).values(x)[-1]
    # Numbers that are made of λ are rounded to the modules' precision.
    apart = parting(found.nodes, x, {last: expected}, 2 * unit_roundoff(torch.float32))
    if apart is not None:
        raise InputError(f"the swap is not the one of the model's activations alone: {apart}")


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
        timeout: seconds for each image and question.
        lam: λ of the λ-GELUs that ReLU replaces; None where the activations were others.
        certificates: a folder for certificates of the last question; there must be an int8 file.

    Yields:
        The question and its results. The last one is about all networks at once: the λ'-GELU networks with λ' ≥ ``lam``
        and ReLU in real numbers, and every evaluation of the files in float32.
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
