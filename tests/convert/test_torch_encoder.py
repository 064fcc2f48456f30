"""Conversion of ViTs on `nn.TransformerEncoder`, written as in tutorials."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hf_vit import HfViTForImageClassification, HfViTModel


class ConvolutionViT(nn.Module):
    """Convolution for patches, CLS token, and a norm in the head."""

    def __init__(self, width=16, patch=4, side=28, channels=1, **layer):
        super().__init__()
        self.patcher = nn.Sequential(nn.Conv2d(channels, width, patch, patch), nn.Flatten(2))
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.position_embeddings = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width))
        options = {"activation": "gelu", "batch_first": True, "norm_first": True, **layer}
        block = nn.TransformerEncoderLayer(width, 8, **options)
        self.encoder_blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.mlp_head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, images):
        patches = self.patcher(images).permute(0, 2, 1)
        tokens = torch.cat((self.cls_token.expand(len(images), -1, -1), patches), dim=1)
        logits = self.mlp_head(self.encoder_blocks(tokens + self.position_embeddings)[:, 0])
        return logits


class UnfoldViT(nn.Module):
    """Unfolded patches with a linear layer, positions as `nn.Embedding`, a norm in the encoder, and mean pooling."""

    def __init__(self):
        super().__init__()
        self.to_patch = nn.Linear(3 * 8 * 8, 24)
        self.pos_embedding = nn.Embedding(12, 24)
        block = nn.TransformerEncoderLayer(24, 4, 40, batch_first=True, norm_first=True)
        self.transformer = nn.TransformerEncoder(block, 3, nn.LayerNorm(24), enable_nested_tensor=False)
        self.head = nn.Linear(24, 5)

    def forward(self, images):
        patches = images.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        tokens = self.transformer(self.to_patch(patches) + self.pos_embedding.weight)
        logits = self.head(tokens.mean(1))
        return logits


GELU = {"num_attention_heads": 8, "hidden_act": "gelu", "norm_first": True}
RELU = {"num_attention_heads": 4, "hidden_act": "relu", "norm_first": True, "image_size": [24, 32]}


def saved(model, folder, suffix=".pth"):
    """Save the weights of a model and return the file."""
    file = folder / f"notebook{suffix}"
    torch.save(model.state_dict(), file) if suffix == ".pth" else save_file(model.state_dict(), file)
    return str(file)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize(
    ("kind", "given", "size"),
    [(ConvolutionViT, GELU, (1, 28, 28)), (UnfoldViT, RELU, (3, 24, 32))],
    ids=["convolution", "unfold"],
)
def test_a_converted_model_has_the_logits_of_its_source(kind, given, size, suffix, tmp_path):
    source = kind().eval()
    model = HfViTForImageClassification.from_pretrained(saved(source, tmp_path, suffix), **given).eval()
    images = torch.randn(2, *size)
    with torch.no_grad():
        torch.testing.assert_close(model(images).logits, source(images), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        (ConvolutionViT(), {}, "do not show num_attention_heads .*; hidden_act .*; norm_first .*. Give the values"),
        (ConvolutionViT(), {**GELU, "norm_first": False}, "norm_first=False is not supported: .*post-norm"),
        (ConvolutionViT(), {**GELU, "intermediate_size": 768}, "768 contradicts the weights, which have .*=2048"),
        (nn.ModuleList([ConvolutionViT().encoder_blocks, nn.Conv2d(3, 16, 4)]), GELU, "no LayerNorm after the last"),
        (nn.ModuleList([ConvolutionViT(), nn.Linear(10, 2)]), GELU, "have the same role"),
        (
            nn.ModuleDict({"vit": ConvolutionViT(), "patch_scale": nn.ParameterList([torch.ones(3)])}),
            GELU,
            "patch_scale.0 is unknown",
        ),
    ],
    ids=["required", "post-norm", "width", "norm", "two heads", "unknown"],
)
def test_other_models_are_refused(model, given, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        HfViTModel.from_pretrained(saved(model, tmp_path), **given)
