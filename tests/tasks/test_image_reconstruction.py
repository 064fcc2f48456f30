"""Test image reconstruction: latents, decoder, loss, and training with the command."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.ndimage import gaussian_filter
from torch import Tensor

from hf_vit import HfViTForImageReconstruction, HfViTImageProcessor
from hf_vit.evaluation.reconstruction import ReconstructedImage, ReconstructionMetric
from hf_vit.model.task_image_reconstruction import HfViTLatentDistribution
from hf_vit.runs import build_run
from hf_vit.tasks.base import plain_batches
from hf_vit.tasks.image_reconstruction import ImageReconstruction

from ..helpers.fresh import run_without_package
from ..helpers.models import RAE, SMALL, small_config
from ..helpers.options import call_command, opened_run, run_of
from ..helpers.pretraining import BATCH, CONFIG, DECODER, write_colors
from ..helpers.pretraining import SMALL as SMALL_RUN
from ..helpers.references import draw_weights


KL = SMALL["reconstruction_config"]
both = pytest.mark.parametrize("options", [KL, RAE], ids=["kl", "rae"])


def make_model(options: dict[str, Any], **changes: Any) -> HfViTForImageReconstruction:
    model = HfViTForImageReconstruction(small_config(reconstruction_config={**options, **changes})).eval()
    draw_weights(model)
    return model


@both
@torch.no_grad()
def test_images_of_any_size_are_encoded_and_decoded(options: dict[str, Any]) -> None:
    model = make_model(options)
    images = torch.randn(2, 3, 24, 40)
    latent_dist = model.encode(images).latent_dist
    size = 6 if options is KL else 32
    assert latent_dist.mode().shape == latent_dist.sample().shape == (2, size, 3, 5)
    outputs = model(images, output_hidden_states=True)
    torch.testing.assert_close(outputs.reconstruction, model.decode(latent_dist.mode()).sample)
    assert outputs.reconstruction.shape == images.shape
    assert len(outputs.hidden_states) == 4
    with pytest.raises(ValueError, match=rf"latents must be \(batch, {size}, rows, columns\), not \(2, 1, 3, 5\)"):
        model.decode(torch.zeros(2, 1, 3, 5))


@both
@torch.no_grad()
def test_padding_changes_neither_pixels_nor_loss(options: dict[str, Any]) -> None:
    model = make_model(options)
    images, mask = torch.zeros(1, 3, 40, 48), torch.zeros(1, 5, 6, dtype=torch.bool)
    images[:, :, :24, :32] = torch.randn(1, 3, 24, 32)
    mask[:, :3, :4] = True
    alone, padded = model(images[:, :, :24, :32]), model(images, patch_attention_mask=mask)
    torch.testing.assert_close(padded.reconstruction[:, :, :24, :32], alone.reconstruction, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(padded.loss, alone.loss)


@torch.no_grad()
def test_latents_have_the_distribution_of_diffusers() -> None:
    """Compare the KL divergence of the latents with `torch.distributions`."""
    latent_dist = make_model(KL).encode(torch.randn(2, 3, 32, 32)).latent_dist
    normal = torch.distributions.Normal(latent_dist.mean, (latent_dist.logvar / 2).exp())
    expected = torch.distributions.kl_divergence(normal, torch.distributions.Normal(0.0, 1.0)).sum(dim=(1, 2, 3))
    torch.testing.assert_close(latent_dist.kl(), expected)
    drawn = torch.stack([latent_dist.sample(torch.Generator().manual_seed(seed)) for seed in range(400)])
    torch.testing.assert_close(drawn.mean(dim=0), normal.mean, atol=0.3, rtol=0.1)
    torch.testing.assert_close(drawn.std(dim=0), normal.stddev, atol=0.02, rtol=0.25)
    tokens = make_model(RAE).encode(torch.randn(1, 3, 32, 32)).latent_dist
    assert torch.equal(tokens.sample(), tokens.mode())
    assert not tokens.kl().any()


def test_the_loss_is_that_of_its_definition() -> None:
    images = torch.randn(2, 3, 32, 32)
    for changes, difference in (({}, Tensor.square), ({"pixel_loss": "l1"}, Tensor.abs)):
        model = make_model(KL, kl_weight=0.5, **changes)
        outputs, latent_dist = model(images), model.encode(images).latent_dist
        pixels = difference(outputs.reconstruction - images).mean()
        torch.testing.assert_close(outputs.loss, pixels + 0.5 * latent_dist.kl().mean() / latent_dist.mean[0].numel())
    model = make_model(KL, kl_weight=0.0, feature_weight=2.0)
    model.feature_encoder = (model.model,)
    features = [model.model(pixels).last_hidden_state for pixels in (model(images).reconstruction, images)]
    distance = 1 - torch.cosine_similarity(*features, dim=-1).mean()
    expected = (model(images).reconstruction - images).square().mean() + 2 * distance
    torch.testing.assert_close(model(images).loss, expected)


def test_training_draws_latents_and_evaluation_does_not() -> None:
    images = torch.randn(2, 3, 32, 32)
    for model in (make_model(KL), make_model(RAE, noise_std=0.5)):
        assert torch.equal(model(images).latents, model(images).latents)
        model.train()
        assert not torch.equal(model(images).latents, model(images).latents)


@both
def test_a_batch_is_overfitted(options: dict[str, Any]) -> None:
    model = HfViTForImageReconstruction(small_config(reconstruction_config=options)).train()
    images = torch.nn.functional.interpolate(torch.rand(2, 3, 2, 2), size=(32, 32), mode="bilinear")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(90):
        loss = model(images).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.2 * images.var()


def ssim_inside(first: np.ndarray, second: np.ndarray) -> float:
    """Return the SSIM of two images (C, H, W) in [0, 1], averaged over the windows inside the images."""

    def blur(values: np.ndarray) -> np.ndarray:
        return gaussian_filter(values.astype(np.float64), (0, 1.5, 1.5), truncate=3.5)[:, 5:-5, 5:-5]

    means, squares = [blur(one) for one in (first, second)], [blur(one * one) for one in (first, second)]
    variances = [square - mean**2 for square, mean in zip(squares, means, strict=True)]
    covariance = blur(first * second) - means[0] * means[1]
    luminance = (2 * means[0] * means[1] + 0.01**2) / (means[0] ** 2 + means[1] ** 2 + 0.01**2)
    return float((luminance * (2 * covariance + 0.03**2) / (sum(variances) + 0.03**2)).mean())


def test_scores_are_those_of_their_formulas() -> None:
    """Compare PSNR and SSIM with their formulas. SSIM is NaN for images smaller than its window."""
    image = torch.rand(3, 16, 16)
    changed = (image + 0.1 * torch.randn_like(image)).clamp(0, 1)
    metric = ReconstructionMetric()
    psnr, ssim = metric.record(ReconstructedImage(image, changed, []), None)
    assert psnr == pytest.approx(-10 * np.log10(float((image - changed).square().mean())), rel=1e-5)
    assert ssim == pytest.approx(ssim_inside(image.numpy(), changed.numpy()), abs=1e-5)
    metric.update([(psnr, ssim), metric.record(ReconstructedImage(image[:, :8], changed[:, :8], []), None)])
    scores = metric.compute()
    assert scores["ssim"] == ssim  # the image that is smaller than the window has no SSIM
    assert metric.record(ReconstructedImage(image, image, []), None)[1] == pytest.approx(1)


def test_latents_have_the_statistics_of_their_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, logvar, sample = torch.randn(3, 2, 4, 3, 5, generator=generator, dtype=torch.float64)
    latents = HfViTLatentDistribution(mean, logvar)
    normal = torch.distributions.Normal(mean, (0.5 * logvar).exp())
    torch.testing.assert_close((latents.std, latents.var), (normal.stddev, normal.variance))
    standard = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    torch.testing.assert_close(latents.kl(), torch.distributions.kl_divergence(normal, standard).sum(dim=(1, 2, 3)))
    torch.testing.assert_close(latents.nll(sample), -normal.log_prob(sample).sum(dim=(1, 2, 3)))
    torch.testing.assert_close(latents.nll(sample, dims=(2, 3)), -normal.log_prob(sample).sum(dim=(2, 3)))
    # Noise has the precision of the means.
    drawn = latents.sample(torch.Generator().manual_seed(1))
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(drawn, mean + noise * normal.stddev, rtol=1e-12, atol=0)
    fixed = HfViTLatentDistribution(mean)
    assert torch.equal(fixed.std, torch.zeros_like(mean))
    assert torch.equal(fixed.var, torch.zeros_like(mean))
    assert torch.equal(fixed.nll(sample), torch.zeros(2, dtype=torch.float64))
    assert torch.equal(fixed.sample(), mean)


def arguments_of(data: Path | str, output_dir: Path, *options: str, **head: Any) -> list[str]:
    config = {**CONFIG, "reconstruction_config": {**DECODER, **head}}
    arguments = [*SMALL_RUN, *BATCH, "--preset", "tiny", "--config_overrides", json.dumps(config)]
    return [*arguments, "--dataset_name", str(data), "--output_dir", str(output_dir), *options]


STEPS = ["--max_steps", "30", "--eval_strategy", "steps", "--eval_steps", "15", "--save_strategy", "steps"]
STEPS += ["--save_steps", "15", "--min_crop_scale", "1.0", "--latent_channels", "8"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that contains images and an autoencoder trained on them with the command."""
    folder = tmp_path_factory.mktemp("workplace")
    write_colors(folder / "colors")
    call_command("train image-reconstruction", arguments_of(folder / "colors", folder / "kl", *STEPS))
    return folder


def test_training_starts_from_principal_components(workplace: Path, tmp_path: Path) -> None:
    """Compare the initial weights with a singular value decomposition in NumPy."""
    options = ["--min_crop_scale", "1.0", "--latent_channels", "8", "--horizontal_flip", "0"]
    task = opened_run(ImageReconstruction, arguments_of(workplace / "colors", tmp_path, *options))
    trainer = build_run(task).trainer
    model, processor = trainer.model.eval(), trainer.processing_class
    images = torch.cat(
        [batch["pixel_values"] for batch in plain_batches(task.task, model, processor, task.data, 1000)]
    )
    patches = images.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 4, 5, 1).reshape(-1, 48).double().numpy()
    mean = patches.mean(axis=0)
    rows = np.linalg.svd(patches - mean, full_matrices=False)[2][:8]
    expected = (patches - mean) @ rows.T @ rows + mean
    with torch.no_grad():
        latents = model.encode(images).latent_dist.mode()
        found = model.decode(latents).sample
    found = found.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 4, 5, 1).reshape(-1, 48).double().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert latents.std() == pytest.approx(1, abs=0.05)


def test_a_training_reports_its_baseline_and_opens_without_the_package(workplace: Path, tmp_path: Path) -> None:
    folder = workplace / "kl"
    scores, card = json.loads((folder / "test_scores.json").read_text()), (folder / "README.md").read_text()
    ours, baseline = map(float, re.search(r"\| psnr \(dB\) \| \**([\d.]+)\** \| \**([\d.]+)\** \|", card).groups())
    assert "PCA of patches, 8 numbers each" in card
    assert "| loss |" not in card  # the loss of PCA would contain the KL divergence of the model
    assert ours == pytest.approx(scores["psnr"], abs=1e-4)
    assert ours == pytest.approx(baseline, abs=0.3)  # for patches of noise, PCA is the best linear autoencoder
    assert "| latents | 8 per patch of 48 numbers (6 times fewer)" in card
    assert (folder / "pictures" / "step-000030.png").exists()
    assert json.loads((folder / "config.json").read_text())["reconstruction_config"]["scaling_factor"] != 1
    model, image = HfViTForImageReconstruction.from_pretrained(folder), next((workplace / "colors").rglob("*.png"))
    pixels = HfViTImageProcessor.from_pretrained(folder)(str(image), return_tensors="pt")["pixel_values"]
    code = f"""
        import torch
        from transformers import AutoImageProcessor, AutoModelForImageToImage
        model = AutoModelForImageToImage.from_pretrained({str(folder)!r}, trust_remote_code=True)
        processor = AutoImageProcessor.from_pretrained({str(folder)!r}, trust_remote_code=True)
        inputs = processor({str(image)!r}, return_tensors="pt")
        latents = model.encode(inputs["pixel_values"]).latent_dist.mode()
        print(latents.shape[1], float(model.decode(latents).sample.double().sum()))
    """
    channels, total = run_without_package(code, tmp_path).stdout.split()
    assert channels == "8"
    with torch.no_grad():
        assert float(total) == pytest.approx(float(model(pixels).reconstruction.double().sum()), rel=1e-4)


def test_a_training_resumes_and_continues(workplace: Path, tmp_path: Path) -> None:
    checkpoint = ["--resume_from_checkpoint", str(workplace / "kl" / "checkpoint-15")]
    call_command(
        "train image-reconstruction", arguments_of(workplace / "colors", tmp_path / "resumed", *STEPS, *checkpoint)
    )
    expected, resumed = (load_file(place / "model.safetensors") for place in (workplace / "kl", tmp_path / "resumed"))
    assert all(torch.equal(weight, resumed[name]) for name, weight in expected.items())
    again = ["--model_name_or_path", str(workplace / "kl"), "--dataset_name", str(workplace / "colors")]
    task = opened_run(ImageReconstruction, [*SMALL_RUN, *BATCH, *again, "--output_dir", str(tmp_path / "again")])
    started = build_run(task).trainer.model.state_dict()
    assert all(torch.equal(weight, started[name]) for name, weight in expected.items())


def test_a_representation_autoencoder_keeps_its_encoder(workplace: Path, tmp_path: Path) -> None:
    options = ["--latent_type", "rae", "--noise_std", "0.1", "--max_steps", "2", "--eval_strategy", "no"]
    start = ["--model_name_or_path", str(workplace / "kl"), "--dataset_name", str(workplace / "colors"), *SMALL_RUN]
    features = ["--feature_weight", "0.1", "--config_overrides", json.dumps({"reconstruction_config": DECODER})]
    call_command(
        "train image-reconstruction", [*start, *options, *features, "--output_dir", str(tmp_path / "rae"), *BATCH]
    )
    before, after = (load_file(place / "model.safetensors") for place in (workplace / "kl", tmp_path / "rae"))
    assert all(torch.equal(weight, after[name]) for name, weight in before.items() if name.startswith("model."))
    assert not after["reconstruction_head.rae.latent_mean"].allclose(torch.zeros(()))
    assert not any("feature_encoder" in name for name in after)


def test_options_without_an_encoder_are_refused(tmp_path: Path) -> None:
    for options, message in (
        (["--latent_type", "rae"], "latent_type='rae' uses the tokens of a trained encoder"),
        (["--feature_weight", "1"], "feature_weight=1.0 requires a trained encoder"),
    ):
        with pytest.raises(ValueError, match=message):
            run_of(ImageReconstruction, arguments_of("photos", tmp_path / "out", *options))
    with pytest.raises(ValueError, match=r"num_latent_layers=9 exceeds num_hidden_layers=3"):
        make_model(RAE, num_latent_layers=9)
