"""All of the ONNX standard's cases of a single operator: read with the right result, or refused in one line."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from verifiable_relu.errors import InputError
from verifiable_relu.network import read_onnx

from . import onnx_standard

AGREE = 560
"""So many of them at least are read."""


def test_the_standards_cases_have_their_results_or_are_refused() -> None:
    tally, wrong = Counter(), []
    for name, data, x, expected in onnx_standard.every_case():
        try:
            network = read_onnx(data)
        except InputError as error:
            tally["refused"] += 1
            if "\n" in str(error):
                wrong.append(f"{name}: {error}")
            continue
        found = network(torch.from_numpy(x.astype(np.float64)).reshape(1, *network.input_shape)).reshape(-1).numpy()
        # The cases write some of their numbers with four digits; half-precision numbers have three.
        tolerance = 2e-3 if x.dtype == np.float16 else 1e-4
        right = found.size == expected.size and np.allclose(found, expected.reshape(-1), rtol=tolerance, atol=tolerance)
        tally["agree" if right else "differ"] += 1
        if not right:
            wrong.append(f"{name}: {found[:4]} instead of {expected.reshape(-1)[:4]}")
    assert not wrong, wrong
    assert tally["agree"] >= AGREE, tally
