"""Test joint embedding pretraining end to end: train with the command, resume, and fine-tune on another task."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTForJointEmbedding, HfViTImageProcessor
from hf_vit.data.augmentation.views import MultiCrop, ViewColors
from hf_vit.runs import build_run
from hf_vit.tasks.joint_embedding import DrawViews, JointEmbedding, JointEmbeddingArguments

from ..helpers.dense_trainings import scores_of
from ..helpers.options import call_command, opened_run
from ..helpers.pretraining import BATCH, CONFIG, SMALL, write_colors


SIZES = {"projector_hidden_size": 32, "embedding_size": 8}
OPTIONS = {
    "lejepa": {**SIZES, "num_slices": 32},
    "dino": {**SIZES, "objective": "dino", "num_prototypes": 16},
}
STEPS = ["--max_steps", "20", "--eval_strategy", "steps", "--eval_steps", "10", "--save_strategy", "steps"]
STEPS += ["--save_steps", "15", "--num_local_views", "1"]


def arguments_of(objective: str, data: Path, output_dir: Path, *options: str) -> list[str]:
    config = {**CONFIG, "pooling": "mean", "hidden_dropout_prob": 0.1, "joint_embedding_config": OPTIONS[objective]}
    arguments = [*SMALL, *BATCH, "--preset", "tiny", "--config_overrides", json.dumps(config)]
    return [*arguments, "--dataset_name", str(data), "--output_dir", str(output_dir), *options]


def pretrain(objective: str, data: Path, output_dir: Path, *options: str) -> None:
    call_command("train joint-embedding", arguments_of(objective, data, output_dir, *STEPS, *options))


@pytest.fixture(scope="module", params=OPTIONS)
def objective(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def workplace(objective: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that contains colored images and a model trained on them with the command."""
    folder = tmp_path_factory.mktemp("workplace")
    write_colors(folder / "colors")
    pretrain(objective, folder / "colors", folder / "encoder")
    return folder


def test_a_training_writes_scores_card_pictures_and_a_model_for_other_tasks(objective: str, workplace: Path) -> None:
    folder = workplace / "encoder"
    scores, card = json.loads((folder / "test_scores.json").read_text()), (folder / "README.md").read_text()
    ours, same_for_all = map(float, re.search(r"\| loss \| \**([\d.]+)\** \| \**([\d.]+)\** \|", card).groups())
    assert ours == pytest.approx(scores["loss"], abs=1e-4)
    assert ours < same_for_all
    assert scores["knn_accuracy"] > 0.5  # chance level is 1/3
    assert f"| objective | {'LeJEPA' if objective == 'lejepa' else 'DINO'}" in card
    assert (folder / "pictures" / "step-000020.png").exists()

    model, info = HfViTForImageClassification.from_pretrained(workplace / "encoder", output_loading_info=True)
    assert {name.split(".")[0] for name in info["missing_keys"]} == {"classifier"}
    saved = load_file(workplace / "encoder" / "model.safetensors")
    assert all(torch.equal(weight, saved[f"model.{name}"]) for name, weight in model.model.state_dict().items())
    opened = HfViTForJointEmbedding.from_pretrained(workplace / "encoder")
    assert opened.options.projector_hidden_size == SIZES["projector_hidden_size"]


def test_a_training_is_resumed_where_it_was(objective: str, workplace: Path, tmp_path: Path) -> None:
    checkpoint = str(workplace / "encoder" / "checkpoint-15")
    pretrain(objective, workplace / "colors", tmp_path / "resumed", "--resume_from_checkpoint", checkpoint)
    for place in (".", *["ema"] * (objective == "dino")):
        expected = load_file(workplace / "encoder" / place / "model.safetensors")
        resumed = load_file(tmp_path / "resumed" / place / "model.safetensors")
        assert all(torch.equal(weight, resumed[name]) for name, weight in expected.items())


def test_the_scores_depend_only_on_model_and_images(objective: str, workplace: Path, tmp_path: Path) -> None:
    arguments = arguments_of(objective, workplace / "colors", tmp_path, "--train_val_split", "0.4")
    task = opened_run(JointEmbedding, arguments)
    trainer = build_run(task).trainer
    scores = scores_of(trainer)
    torch.manual_seed(7)
    trainer.args.per_device_eval_batch_size = 7
    assert scores_of(trainer) == pytest.approx(scores, rel=1e-4)


def test_processes_draw_the_views_that_one_draws() -> None:
    crops = MultiCrop((8, 8), (4, 4), 2, 0, (0.3, 1), (0.1, 0.4), 0.5, ViewColors(), (0.5,) * 3, (0.5,) * 3)

    def views_of(count: int, images: Tensor) -> Tensor:
        views = []
        for number, own in enumerate(images.chunk(count)):
            torch.manual_seed(0)
            views.append(DrawViews(crops, number, count)({"pixel_values": own}, 0.0)["pixel_values"])
        return torch.cat(views)

    images = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(views_of(2, images), views_of(1, images))


def test_views_have_the_given_size_and_number_or_are_refused() -> None:
    config = HfViTConfig.from_preset("tiny", image_size=(32, 64), patch_size=4)
    processor = HfViTImageProcessor()
    assert JointEmbeddingArguments(dataset_name="photos").make_views(config, processor).size == (32, 64)
    crops = JointEmbeddingArguments(dataset_name="photos", global_size=24, local_size=8).make_views(config, processor)
    assert (crops.size, crops.local_size) == ((24, 48), (8, 16))
    with pytest.raises(ValueError, match="local_size=10 is not a multiple"):
        JointEmbeddingArguments(dataset_name="photos", local_size=10).make_views(config, processor)

    for options, message in (
        ({"num_global_views": 1, "num_local_views": 0}, "num_global_views=1 and num_local_views=0"),
        ({"num_global_views": 0}, "num_global_views=0"),
        ({"local_scale": [0.5, 0.1]}, r"local_scale=\[0.5, 0.1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            JointEmbeddingArguments(dataset_name="photos", **options)
