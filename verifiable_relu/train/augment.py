"""Random crops and mirror images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def augment(images: Tensor, crop: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Each image of (n, channels, height, width) cut at random from itself padded with ``crop`` zeros, and mirrored
    left to right with probability ½ if ``flip``."""
    n, _, height, width = images.shape
    if flip:
        mirrored = (torch.rand(n, generator=generator) < 0.5).to(images.device)
        images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
    if crop:
        padded = F.pad(images, (crop, crop, crop, crop)).permute(0, 2, 3, 1)
        top, left = torch.randint(0, 2 * crop + 1, (2, n), generator=generator)
        rows = top[:, None] + torch.arange(height)
        columns = left[:, None] + torch.arange(width)
        at = torch.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]
        cut = padded[tuple(index.to(images.device) for index in at)]
        images = cut.permute(0, 3, 1, 2).contiguous()
    return images
