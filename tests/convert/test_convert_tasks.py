"""Test converted models of all tasks except classification, with their losses, image processors and pipelines."""

import argparse
import json
import re

import pytest
import torch
import transformers as hf
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.eomt.modeling_eomt import EomtLoss
from transformers.models.yolos.modeling_yolos import YolosObjectDetectionOutput

from hf_vit import (
    HfViTBackbone,
    HfViTForDepthEstimation,
    HfViTForKeypointDetection,
    HfViTForMaskedImageModeling,
    HfViTForObjectDetection,
    HfViTForSemanticSegmentation,
    HfViTForUniversalSegmentation,
    HfViTImageProcessor,
    HfViTModel,
    cli,
)
from hf_vit.convert.image_processor import image_processor_options
from hf_vit.convert.loading import convert_checkpoint
from hf_vit.convert.parity import run_vitpose
from hf_vit.convert.source import open_source
from hf_vit.model.task_configurations import HfViTUniversalSegmentationConfig
from hf_vit.model.task_universal_segmentation import universal_segmentation_loss

from ..helpers.models import SMALL, pixels, small_config
from ..helpers.references import assert_close, draw_weights
from .comparisons import assert_all_matter, assert_same_weights, dtypes, gradient, open_whole
from .sources import KEYPOINTS, NECK, SHAPE, VITPOSE, draw_images, draw_source, save_source


@pytest.fixture
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("in_float64")
def test_loss_of_an_image_is_that_of_eomt():
    """Both models draw the random points of the loss in the same order, so the same seed gives equal points.

    Predicted and target masks are zero at the border, because EoMT pads with zeros and our model repeats the border.
    """
    options = HfViTUniversalSegmentationConfig(train_num_points=50, no_object_weight=0.3, class_weight=1.5)
    names = ("train_num_points", "no_object_weight", "class_weight")
    config = hf.EomtConfig(num_labels=4, **{name: getattr(options, name) for name in names})
    weights = {"cross_entropy": options.class_weight, "mask": options.mask_weight, "dice": options.dice_weight}
    generator = torch.Generator().manual_seed(0)
    inner = torch.randn(1, 9, 12, 16, generator=generator).requires_grad_()
    masks = nn.functional.pad(inner, (1, 1, 1, 1))
    classes = torch.randn(1, 9, 5, generator=generator).requires_grad_()
    targets, labels = torch.rand(3, 48, 64, generator=generator) > 0.6, torch.tensor([2, 0, 2])
    targets = nn.functional.pad(targets.double(), (1, 1, 1, 1))
    torch.manual_seed(1)
    losses = EomtLoss(config, {})(masks, classes, [targets], [labels])
    expected = torch.stack([weight * losses[f"loss_{name}"] for name, weight in weights.items()]).sum()
    torch.manual_seed(1)
    actual = universal_segmentation_loss(masks, classes, [targets], [labels], options, is_training=True)
    assert_close(actual, expected, 1e-9, "loss")
    theirs, ours = (torch.autograd.grad(loss, (inner, classes), retain_graph=True) for loss in (expected, actual))
    for name, own, their in zip(("masks", "classes"), ours, theirs, strict=True):
        assert_close(own, their, 1e-9, f"gradient of the {name}")


@pytest.mark.usefixtures("in_float64")
def test_doubled_resolution_goes_into_one_batch_whatever_the_grid():
    config = small_config(depth_config={**NECK, "doubles_resolution": True})
    model = HfViTForDepthEstimation(config).eval()
    draw_weights(model)
    images = [pixels(config, 1, grid) for grid in ((3, 4), (2, 2))]
    batch, mask = torch.zeros(2, 3, 24, 32), torch.zeros(2, 3, 4, dtype=torch.bool)
    for own, visible, image in zip(batch, mask, images, strict=True):
        own[:, : image.shape[2], : image.shape[3]] = image[0]
        visible[: image.shape[2] // 8, : image.shape[3] // 8] = True
    with torch.no_grad():
        together = model(batch, patch_attention_mask=mask).predicted_depth
        odd, even = (model(image).predicted_depth for image in images)
    assert (odd.shape, even.shape, together.shape) == ((1, 64, 64), (1, 32, 32), (2, 48, 64))
    assert_close(together[1, :32, :32], even[0], 1e-9, "even grid")
    resized = nn.functional.interpolate(odd[None], size=(48, 64), mode="bilinear", align_corners=True)[0, 0]
    assert_close(together[0], resized, 1e-9, "odd grid")


def convert(name, processor, folder):
    """Convert a checkpoint with the command, including the image processor."""
    save_source(name, folder / "theirs")
    processor.save_pretrained(folder / "theirs")
    cli.main(["convert", str(folder / "theirs"), str(folder / "ours")])
    return folder / "ours"


def test_converted_depth_runs_in_the_stock_pipeline(tmp_path, capsys):
    size = {"height": 40, "width": 40}
    processor = hf.DPTImageProcessor(size=size, keep_aspect_ratio=True, ensure_multiple_of=8)
    folder = convert("Depth Anything", processor, tmp_path)
    assert re.search(r"24x48  predicted_depth .* equal", capsys.readouterr().out)
    assert "pipeline_tag: depth-estimation" in (folder / "README.md").read_text()
    image = Image.effect_noise((60, 30), 80).convert("RGB")
    ours, theirs = (
        hf.pipeline("depth-estimation", model=str(place))(image)["predicted_depth"]
        for place in (folder, tmp_path / "theirs")
    )
    assert ours.shape == (30, 60)
    # Bicubic resampling in transformers can exceed the range of predicted values; our resampling does not.
    torch.testing.assert_close(ours, theirs.clamp(ours.min(), ours.max()), rtol=0, atol=0.02 * float(theirs.max()))


def test_converted_segmentation_runs_in_the_stock_pipeline(tmp_path, capsys):
    processor = hf.EomtImageProcessor(size={"shortest_edge": 32, "longest_edge": 32}, do_pad=True)
    folder = convert("EoMT", processor, tmp_path)
    assert re.search(r"32x32  masks_queries_logits .* equal", capsys.readouterr().out)
    image = Image.effect_noise((60, 30), 80).convert("RGB")
    image.save(tmp_path / "photo.png")
    options = {"threshold": 0.0, "overlap_mask_area_threshold": 0.0}
    ours, theirs = (hf.pipeline("image-segmentation", model=str(place)) for place in (folder, tmp_path / "theirs"))
    assert type(ours.model) is HfViTForUniversalSegmentation
    with torch.no_grad():
        outputs = ours.model(**ours.image_processor(image, return_tensors="pt"))
    (expected,) = ours.image_processor.post_process_panoptic_segmentation(outputs, **options, target_sizes=[(30, 60)])
    found = ours(image, **options)
    assert len(found) == len(expected["segments_info"]) > 0
    for part, info in zip(found, expected["segments_info"], strict=True):
        assert (part["label"], part["score"]) == (ours.model.config.id2label[info["label_id"]], info["score"])
        mask = torch.tensor(list(part["mask"].tobytes())).reshape(30, 60) > 0
        assert torch.equal(mask, expected["segmentation"] == info["id"])
    # EoMT in transformers resizes masks twice, which moves the borders of masks.
    for part, other in zip(found, theirs(image, **options), strict=True):
        assert (part["label"], part["score"]) == (other["label"], pytest.approx(other["score"], abs=1e-5))


def test_lw_detr_conversion_includes_query_groups_and_backbone(tmp_path):
    source = save_source("LW-DETR", tmp_path, torch.float64).train()
    model = HfViTForObjectDetection.from_pretrained(tmp_path).train()
    for module in (*source.modules(), *model.modules()):
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    images = draw_images((32, 32), torch.float64)
    outputs, ours = source(images), model(images)
    assert outputs.logits.shape == (2, 12, 5)
    assert_close(ours.logits, outputs.logits, 1e-9, "logits")
    assert_close(ours.pred_boxes, outputs.pred_boxes, 1e-9, "boxes")
    weights = convert_checkpoint(open_source(tmp_path)).weights
    for model_class in (HfViTModel, HfViTBackbone, HfViTForSemanticSegmentation):
        model, info = model_class.from_pretrained(tmp_path, output_loading_info=True, num_labels=7)
        state = model.base_model.state_dict()
        assert all(torch.equal(tensor, weights[f"model.{key}"]) for key, tensor in state.items() if key[:5] != "norm.")
        assert not any("encoder." in name or "embeddings." in name for name in info["missing_keys"])
    model, info = HfViTForObjectDetection.from_pretrained(tmp_path, output_loading_info=True, num_labels=7)
    assert not info["missing_keys"]
    assert all(".class_head." in name for name, *_ in info["mismatched_keys"])
    assert model(torch.zeros(1, 3, 32, 32, dtype=torch.float64)).logits.shape == (1, 6, 7)


def test_windows_are_those_of_the_images_that_the_processor_makes(tmp_path):
    save_source("LW-DETR", tmp_path)
    config = HfViTForObjectDetection.from_pretrained(tmp_path).config
    assert (config.image_size, list(config.window_size), list(config.global_attention_layers)) == (32, [2, 2], [1])
    file = tmp_path / "preprocessor_config.json"
    file.write_text(file.read_text().replace("32", "24"))
    with pytest.raises(ValueError, match="24x24 pixels cannot be divided into 2 windows per side"):
        HfViTForObjectDetection.from_pretrained(tmp_path)
    file.unlink()
    config = HfViTForObjectDetection.from_pretrained(tmp_path).config
    assert (config.image_size, list(config.window_size)) == (64, [4, 4])


@pytest.mark.parametrize("source", [hf.DeformableDetrImageProcessor, hf.YolosImageProcessor])
def test_images_and_logits_are_read_as_by_the_source(source, tmp_path):
    theirs = source(size={"height": 48, "width": 64})
    theirs.save_pretrained(tmp_path)
    ours = HfViTImageProcessor.from_pretrained(tmp_path, do_pad=False, size={"height": 48, "width": 64})
    outputs = YolosObjectDetectionOutput(logits=torch.randn(1, 4, 3), pred_boxes=torch.rand(1, 4, 4))
    ((expected,), (actual,)) = (
        processor.post_process_object_detection(outputs, threshold=0.0, target_sizes=[(48, 64)])
        for processor in (theirs, ours)
    )
    torch.testing.assert_close(actual["scores"][0], expected["scores"].max())
    torch.testing.assert_close(actual["boxes"][0], expected["boxes"][expected["scores"].argmax()])
    if source is hf.DeformableDetrImageProcessor:
        image, ours = Image.effect_noise((90, 70), 80).convert("RGB"), HfViTImageProcessor.from_pretrained(tmp_path)
        expected, actual = (processor(image, return_tensors="pt")["pixel_values"] for processor in (theirs, ours))
        assert actual.shape == (1, 3, 48, 64)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_keypoints_are_converted_and_changes_reinitialize_the_last_layer(tmp_path):
    save_source("ViTPose, simple", tmp_path)
    config = HfViTForKeypointDetection.from_pretrained(tmp_path).config
    assert config.id2label == dict(enumerate(KEYPOINTS))
    assert (config.keypoint_config.skeleton, config.keypoint_config.flip_pairs) == ([[0, 1], [0, 2]], [[1, 2]])
    assert (config.keypoint_config.head, config.keypoint_config.scale_factor) == ("simple", 2)
    theirs = {"flip_pairs": [[0, 3]], "skeleton": []}
    changes = {"num_labels": 4, "keypoint_config": theirs, "output_loading_info": True}
    model, info = HfViTForKeypointDetection.from_pretrained(tmp_path, **changes)
    layer = "keypoint_head.simple.predictor"
    assert {key for key, *_ in info["mismatched_keys"]} == {f"{layer}.weight", f"{layer}.bias"}
    assert model.config.keypoint_config.to_dict() == {"head": "simple", "scale_factor": 2, "flip_pairs": [[0, 3]]}
    with pytest.raises(ValueError, match=r"flip_pairs has \[1, 2\], but num_labels=2 .* Change flip_pairs"):
        HfViTForKeypointDetection.from_pretrained(tmp_path, num_labels=2)


def test_backbone_of_vitpose_opens_as_other_models_alone_and_at_other_sizes(tmp_path):
    source, images = save_source("ViTPose", tmp_path), draw_images((48, 32))
    expected = run_vitpose(source, images)["hidden_states[2]"]
    for model_class in (HfViTModel, HfViTBackbone, HfViTForSemanticSegmentation):
        model = model_class.from_pretrained(tmp_path).eval()
        assert_close(model(images, output_hidden_states=True).hidden_states[2], expected, 1e-5, model_class.__name__)
    model = HfViTForKeypointDetection.from_pretrained(tmp_path, image_size=(64, 64), patch_size=16)
    assert model(torch.zeros(1, 3, 64, 64)).heatmaps.shape == (1, 3, 16, 16)
    assert model.config.patch_padding == 4
    source = draw_source(hf.VitPoseBackbone(hf.VitPoseBackboneConfig(**VITPOSE)))
    source.save_pretrained(tmp_path)
    (expected,) = source(images).feature_maps
    assert_close(HfViTModel.from_pretrained(tmp_path)(images).last_hidden_state, expected, 1e-5, "tokens")


def test_image_processor_of_vitpose_in_our_terms():
    theirs = hf.VitPoseImageProcessor(size={"height": 48, "width": 32}, image_mean=[0.1, 0.2, 0.3])
    options = image_processor_options(json.loads(theirs.to_json_string()), model_type="vitpose")
    assert (options["size"], options["image_mean"]) == ({"height": 48, "width": 32}, [0.1, 0.2, 0.3])
    assert (options["do_affine_crop"], options["do_center_crop"]) == (True, False)
    left_out = image_processor_options({}, model_type="vitpose")
    assert left_out == image_processor_options(json.loads(hf.VitPoseImageProcessor().to_json_string()), model_type="")
    with pytest.raises(ValueError, match="normalize_factor"):
        image_processor_options({"normalize_factor": 100.0}, model_type="vitpose")


DECODER = SMALL["masked_image_modeling_config"]
HEAD = "masked_image_modeling_head."


def save(source, folder, dtype=torch.float32):
    draw_source(source).to(dtype).save_pretrained(folder)
    return source


def save_masked(kind, folder, dtype=torch.float32):
    if kind == "simmim":
        return save(
            hf.ViTForMaskedImageModeling(hf.ViTConfig(**SHAPE, encoder_stride=8, qkv_bias=False)), folder, dtype
        )
    options = {"norm_pix_loss": kind == "mae", "mask_ratio": 0.75 if kind == "mae" else 0.5}
    return save(hf.ViTMAEForPreTraining(hf.ViTMAEConfig(**SHAPE, **DECODER, **options)), folder, dtype)


NOISE = torch.rand(2, 16, generator=torch.Generator().manual_seed(2))  # the patches with the highest noise are masked


def reconstruct(model, kind, images):
    """Return the pixels that a model predicts for masked patches, and the loss."""
    if kind == "simmim":
        outputs = model(images, bool_masked_pos=NOISE.argsort(dim=1) > 6)
        return outputs.reconstruction, outputs.loss
    outputs = model(images, noise=NOISE)
    return outputs.logits, outputs.loss


@dtypes
@pytest.mark.parametrize("kind", ["mae", "plain pixels", "simmim"])
def test_decoder_equals_source(kind, dtype, tmp_path):
    source = save_masked(kind, tmp_path, dtype)
    model, images = open_whole(HfViTForMaskedImageModeling, tmp_path), draw_images((32, 32), dtype)
    expected, actual = reconstruct(source, kind, images), reconstruct(model, kind, images)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    assert expected[0].std() >= 0.1
    assert_close(actual[0], expected[0], tolerance, "pixels")
    # transformers computes the number of masked pixels in float32, so the SimMIM loss is less precise in float64.
    assert_close(actual[1], expected[1], 1e-7 if dtype == torch.float64 and kind == "simmim" else tolerance, "loss")
    assert_all_matter(source, {"pixels": expected[0]})
    assert_close(gradient(actual[:1], images), gradient(expected[:1], images), tolerance, "gradient")


def test_published_names_of_the_decoder_open_and_a_position_of_its_cls_token_is_refused(tmp_path):
    """Use the tensor names of facebook/vit-mae-base. transformers saves decoder blocks under different names."""
    save_masked("mae", tmp_path)
    expected, file = HfViTForMaskedImageModeling.from_pretrained(tmp_path), tmp_path / "model.safetensors"
    blocks = re.compile(r"^decoder\.(decoder_encoder\.layer|decoder_layers)\.")
    tensors = {blocks.sub("decoder.decoder_layers.", name): tensor for name, tensor in load_file(file).items()}
    assert "decoder.decoder_layers.1.attention.attention.query.weight" in tensors
    save_file(tensors, file)
    assert_same_weights(HfViTForMaskedImageModeling.from_pretrained(tmp_path), expected)
    save_file({**tensors, "decoder.decoder_pos_embed": torch.ones(1, 17, 16)}, file)
    with pytest.raises(ValueError, match="position embedding of the CLS token in the decoder of MAE is not zero"):
        HfViTForMaskedImageModeling.from_pretrained(tmp_path)


def test_options_come_along_and_can_be_changed(tmp_path):
    save_masked("plain pixels", tmp_path)
    model = HfViTForMaskedImageModeling.from_pretrained(tmp_path)
    assert model.options.to_dict() == {**DECODER, "mask_ratio": 0.5, "norm_pix_loss": False}
    model = HfViTForMaskedImageModeling.from_pretrained(tmp_path, masked_image_modeling_config={"mask_ratio": 0.25})
    assert model.options.to_dict() == {**DECODER, "mask_ratio": 0.25, "norm_pix_loss": False}
    save_masked("simmim", tmp_path / "simmim")
    config = HfViTForMaskedImageModeling.from_pretrained(tmp_path / "simmim").config
    assert config.masked_image_modeling_config.to_dict() == {"objective": "simmim"}
    assert config.use_mask_token


def test_weights_missing_in_the_checkpoint_are_initialized(tmp_path):
    hf.ViTMAEModel(hf.ViTMAEConfig(**SHAPE, **DECODER)).save_pretrained(tmp_path / "encoder")
    model, info = HfViTForMaskedImageModeling.from_pretrained(tmp_path / "encoder", output_loading_info=True)
    assert set(info["missing_keys"]) == {name for name in model.state_dict() if name.startswith(HEAD)}
    assert model.options.decoder_hidden_size == 16
    # With encoder_stride=16, the head predicts more pixels than a patch contains.
    hf.ViTForMaskedImageModeling(hf.ViTConfig(**SHAPE, encoder_stride=16)).save_pretrained(tmp_path / "wide")
    _, info = HfViTForMaskedImageModeling.from_pretrained(tmp_path / "wide", output_loading_info=True)
    assert set(info["missing_keys"]) == {f"{HEAD}simmim.predictor.{leaf}" for leaf in ("weight", "bias")}


ORIGINAL = (
    (r"^vit\.encoder\.layer\.|^vit\.layers\.", "blocks."),
    (r"^decoder\.(decoder_encoder\.layer|decoder_layers)\.", "decoder_blocks."),
    (r"^vit\.embeddings\.cls_token", "cls_token"),
    (r"^vit\.embeddings\.position_embeddings", "pos_embed"),
    (r"^vit\.embeddings\.patch_embeddings\.projection", "patch_embed.proj"),
    (r"^vit\.layernorm", "norm"),
    (r"^decoder\.", ""),
    (r"layernorm_before", "norm1"),
    (r"layernorm_after", "norm2"),
    (r"attention\.output\.dense", "attn.proj"),
    (r"intermediate\.dense", "mlp.fc1"),
    (r"output\.dense", "mlp.fc2"),
    (r"attention\.attention", "attn"),
)


def save_original(folder):
    """Save a small MAE model in the file format of the original MAE repository."""
    wide = {"hidden_size": 128, "num_attention_heads": 2, "layer_norm_eps": 1e-6}
    decoder = {**DECODER, "decoder_hidden_size": 64, "decoder_num_attention_heads": 16, "norm_pix_loss": True}
    source = save(hf.ViTMAEForPreTraining(hf.ViTMAEConfig(**SHAPE | wide, **decoder)), folder / "theirs")
    state = load_file(folder / "theirs" / "model.safetensors")
    for pattern, name in ORIGINAL:
        state = {re.sub(pattern, name, key): tensor for key, tensor in state.items()}
    for name in [name for name in state if ".attn.query." in name]:
        parts = [state.pop(name.replace("query", part)) for part in ("query", "key", "value")]
        state[name.replace("query", "qkv")] = torch.cat(parts)
    torch.save({"model": state, "args": argparse.Namespace(blr=0.1), "epoch": 7}, folder / "mae.pth")
    return source


def test_original_file_of_mae_opens_with_its_decoder(tmp_path):
    source, file = save_original(tmp_path), tmp_path / "mae.pth"
    model = open_whole(HfViTForMaskedImageModeling, file)
    expected = {"decoder_hidden_size": 64, "decoder_num_hidden_layers": 2, "decoder_intermediate_size": 24}
    assert model.options.to_dict() == expected
    images = draw_images((32, 32))
    for actual, output in zip(reconstruct(model, "mae", images), reconstruct(source, "mae", images), strict=True):
        assert_close(actual, output, 1e-4, "outputs")
    options = {"norm_pix_loss": False, "decoder_num_attention_heads": 8}
    model = HfViTForMaskedImageModeling.from_pretrained(file, masked_image_modeling_config=options)
    assert (model.options.norm_pix_loss, model.options.decoder_num_attention_heads) == (False, 8)
    assert HfViTModel.from_pretrained(file).config.hidden_size == 128
    # A decoder is not converted if it does not predict pixels.
    content = torch.load(file, weights_only=False)
    content["model"] |= {"decoder_pred.weight": torch.ones(108, 64), "decoder_pred.bias": torch.ones(108)}
    torch.save(content, file)
    model, info = HfViTForMaskedImageModeling.from_pretrained(file, output_loading_info=True)
    assert set(info["missing_keys"]) == {name for name in model.state_dict() if name.startswith(HEAD)}
