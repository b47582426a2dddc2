"""Models of timm and transformers, where these are installed: hardened, saved, loaded, written, asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from verifiable_relu import harden, verify, verify_properties
from verifiable_relu.nn import Embedded, substitute_relu
from verifiable_relu.spec import box_property


def vit() -> nn.Module:
    pytest.importorskip("timm")
    from timm.models.vision_transformer import VisionTransformer

    made: nn.Module = VisionTransformer(img_size=8, patch_size=4, embed_dim=8, depth=1, num_heads=2, num_classes=3)
    return made


def convnext() -> nn.Module:
    pytest.importorskip("timm")
    from timm.models.convnext import ConvNeXt

    made: nn.Module = ConvNeXt(num_classes=3, depths=(1,) * 4, dims=(4,) * 4, patch_size=1)
    return made


def bert() -> nn.Module:
    pytest.importorskip("transformers")
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 16, "max_position_embeddings": 4}
    config = BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, num_labels=3)
    made: nn.Module = BertForSequenceClassification(config)
    return made


def logits(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        made: Any = model.eval()(x)
    found: Tensor = made if isinstance(made, Tensor) else made.logits
    return found


@pytest.mark.parametrize("make", [vit, convnext])
def test_an_image_model_goes_the_whole_way(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.rand(8, 3, 8, 8)
    hardened = harden(model, (x, logits(model, x).argmax(1)), epochs=1, change_timeout=0)
    torch.save(hardened.model.state_dict(), tmp_path / "weights.pt")
    loaded = substitute_relu(make())
    loaded.load_state_dict(torch.load(tmp_path / "weights.pt"))
    labels = logits(loaded, x).argmax(1)
    assert torch.equal(logits(loaded, x), logits(hardened.model, x))
    hardened.write(tmp_path / "model.onnx")
    for asked in (loaded, tmp_path / "model.onnx"):
        (proven,) = verify(asked, x[:1], labels[:1], eps=1e-6, timeout=60)
        (refuted,) = verify(asked, x[:1], (labels[:1] + 1) % 3, eps=1e-6, timeout=60)
        assert (proven.answer, refuted.answer) == ("unsat", "sat")


def test_a_language_model_goes_the_whole_way(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tokens = bert(), torch.randint(0, 20, (8, 4))
    hardened = harden(model, [(tokens, logits(model, tokens).argmax(1))], epochs=1, change_timeout=0)
    relu: Any = hardened.model
    relu.save_pretrained(tmp_path)
    loaded: Any = type(model).from_pretrained(tmp_path)  # type: ignore[attr-defined]
    assert torch.equal(logits(loaded, tokens), logits(relu, tokens))
    embedded = Embedded(loaded.eval(), loaded.bert.embeddings.word_embeddings, tokens[0])
    label = int(logits(loaded, tokens[:1]).argmax())
    rows = [[float(j == label) - float(j == other) for j in range(3)] for other in range(3) if other != label]
    (low, high), near = embedded.box(), 1e-5
    for sign, answer in ((1.0, "unsat"), (-1.0, "sat")):
        unsafe = [([[sign * c for c in row]], [0.0]) for row in rows]
        asked = box_property((low - near).flatten().tolist(), (high + near).flatten().tolist(), unsafe=unsafe)
        assert verify_properties(embedded, asked, timeout=60)[0].answer == answer
