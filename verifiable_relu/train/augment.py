"""The augmentation of images by random crops and mirror images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def augment(images: Tensor, crop: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Images mirrored and cropped at random.

    Args:
        images: (n, channels, height, width).
        crop: the pixels of zero padding on each side of an image, from which a random part of the image's own size is
            cut; 0 crops nothing.
        flip: whether each image is mirrored left to right with probability ½.
        generator: the source of the random numbers.
    """
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
