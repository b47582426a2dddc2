"""Small configurations of models of timm, transformers and torchvision; packages are imported when a model is made."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

CLASSES, SIZE, CHANNELS = 4, 16, 3
"""Of the images (CHANNELS, SIZE, SIZE) that are classified."""

WORDS, LENGTH = 21, 4
"""Tokens are 1 to WORDS − 1; sentences have LENGTH of them. 0 fills up."""

_IMAGES: dict[str, Any] = {"image_size": SIZE, "patch_size": 8, "num_labels": CLASSES}
_SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_SENTENCES: dict[str, Any] = {
    "vocab_size": WORDS,
    "max_position_embeddings": 2 * LENGTH,
    "num_labels": CLASSES,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Kind:
    """How a model is made.

    Attributes:
        package: the package, and the module of it that has the class.
        module: that module.
        make: makes the model of the module's names.
        words: of a model that takes tokens, the name of the part that embeds them; empty for one that takes images.
    """

    package: str
    module: str
    make: Callable[[Any], nn.Module]
    words: str = ""

    @property
    def installed(self) -> bool:
        """Whether the package is there."""
        return importlib.util.find_spec(self.package) is not None

    def model(self) -> nn.Module:
        """A model with random weights."""
        _load_torchvision()
        return self.make(importlib.import_module(self.module)).eval()

    def versions(self) -> str:
        """The package's name and version."""
        return f"{self.package} {version(self.package)}"


def _load_torchvision() -> None:
    """Import torchvision, which timm and transformers import, too, if it is installed.

    Where its compiled operators are made for another torch, those that it needs when it is imported are declared: none
    of the models here uses one.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            _DECLARED.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")


_DECLARED = torch.library.Library("torchvision", "FRAGMENT")


def _timm(module: str, make: Callable[[Any], nn.Module]) -> Kind:
    return Kind("timm", f"timm.models.{module}", make)


def _torchvision(make: Callable[[Any], nn.Module]) -> Kind:
    return Kind("torchvision", "torchvision.models", make)


def _configured(name: str, words: str = "", task: str = "ImageClassification", **sizes: Any) -> Kind:
    """A model of transformers by the beginning of its classes' names."""

    def make(module: Any) -> nn.Module:
        made: nn.Module = getattr(module, f"{name}For{task}")(getattr(module, f"{name}Config")(**sizes))
        return made

    return Kind("transformers", "transformers", make, words)


def _sentences(name: str, words: str, **sizes: Any) -> Kind:
    return _configured(name, words, "SequenceClassification", **{**_SENTENCES, **sizes})


_VIT = {"img_size": SIZE, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": CLASSES}


def _convnext(module: Any) -> nn.Module:
    block = module.convnext.CNBlockConfig
    blocks = [block(8, 16, 1), block(16, None, 1)]
    made: nn.Module = module.ConvNeXt(blocks, stochastic_depth_prob=0.0, num_classes=CLASSES)
    return made


def _swin(module: Any) -> nn.Module:
    sizes = {"patch_size": [4, 4], "embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": [2, 2]}
    made: nn.Module = module.SwinTransformer(**sizes, stochastic_depth_prob=0.0, num_classes=CLASSES)
    return made


def _mobile(module: Any) -> nn.Module:
    block = module.mobilenetv3.InvertedResidualConfig
    blocks = [block(8, 3, 8, 8, True, "RE", 2, 1, 1.0), block(8, 3, 16, 8, True, "HS", 1, 1, 1.0)]
    made: nn.Module = module.MobileNetV3(blocks, 16, num_classes=CLASSES)
    return made


KINDS: dict[str, Kind] = {
    "timm ViT": _timm("vision_transformer", lambda m: m.VisionTransformer(**_VIT)),
    "timm DeiT": _timm("deit", lambda m: m.VisionTransformerDistilled(**_VIT)),
    "timm CaiT": _timm("cait", lambda m: m.Cait(**_VIT, depth_token_only=1)),
    "timm Swin": _timm(
        "swin_transformer",
        lambda m: m.SwinTransformer(SIZE, 4, 3, CLASSES, embed_dim=8, depths=(2, 2), num_heads=(1, 2), window_size=2),
    ),
    "timm ConvNeXt": _timm(
        "convnext", lambda m: m.ConvNeXt(num_classes=CLASSES, depths=(1,) * 4, dims=(4, 4, 8, 8), patch_size=1)
    ),
    "timm MLP-Mixer": _timm("mlp_mixer", lambda m: m.MlpMixer(CLASSES, SIZE, patch_size=8, num_blocks=2, embed_dim=16)),
    "timm ConvMixer": _timm("convmixer", lambda m: m.ConvMixer(8, 2, kernel_size=3, patch_size=4, num_classes=CLASSES)),
    "timm PoolFormer": _timm(
        "metaformer",
        lambda m: m.MetaFormer(
            num_classes=CLASSES,
            depths=(1, 1),
            dims=(8, 16),
            token_mixers=m.Pooling,
            mlp_act=nn.GELU,
            norm_layers=m.GroupNorm1,
            use_mlp_head=False,
        ),
    ),
    "transformers ViT": _configured("ViT", **_IMAGES, **_SIZES),
    "transformers DeiT": _configured("DeiT", **_IMAGES, **_SIZES),
    "transformers Swin": _configured(
        "Swin",
        image_size=SIZE,
        patch_size=4,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[1, 2],
        window_size=2,
        num_labels=CLASSES,
    ),
    "transformers ConvNeXt": _configured(
        "ConvNext", num_stages=2, depths=[1, 1], hidden_sizes=[8, 16], num_labels=CLASSES
    ),
    "transformers BERT": _sentences("Bert", "bert.embeddings.word_embeddings", **_SIZES),
    "transformers RoBERTa": _sentences("Roberta", "roberta.embeddings.word_embeddings", **_SIZES),
    "transformers DistilBERT": _sentences(
        "DistilBert", "distilbert.embeddings.word_embeddings", dim=16, n_layers=2, n_heads=2, hidden_dim=32
    ),
    "transformers GPT-2": _sentences(
        "GPT2", "transformer.wte", n_embd=16, n_layer=2, n_head=2, n_inner=32, bos_token_id=0, eos_token_id=0
    ),
    "torchvision ViT": _torchvision(lambda m: m.VisionTransformer(SIZE, 8, 2, 2, 16, 32, num_classes=CLASSES)),
    "torchvision Swin": _torchvision(_swin),
    "torchvision ConvNeXt": _torchvision(_convnext),
    "torchvision MobileNetV3": _torchvision(_mobile),
}
"""The models by name."""
