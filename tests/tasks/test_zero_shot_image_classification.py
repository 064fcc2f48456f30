"""Test image-text training end to end: train, check files, resume, evaluate, and load with other libraries."""

import json
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertConfig, BertModel, CLIPConfig, CLIPModel

from hf_vit import HfViTConfig, HfViTForZeroShotImageClassification, HfViTImageProcessor, HfViTModel, HfViTProcessor
from hf_vit.model.task_zero_shot_image_classification import contrastive_loss
from hf_vit.tasks import train_tokenizer
from hf_vit.training.hub import check_upload

from ..helpers import distributed
from ..helpers.dense_trainings import scores_of
from ..helpers.fresh import run_without_package
from ..helpers.image_text_trainings import (
    A_FEW,
    CONFIG,
    NUM_LABELED,
    PAIRS,
    TEXT,
    arguments_of,
    captions_of,
    make_trainer,
    train,
    train_as_one,
    write_captions,
    write_labeled,
)
from ..helpers.options import call_command


STEPS = ["--max_steps", "80", "--eval_strategy", "steps", "--eval_steps", "40", "--save_strategy", "steps"]
STEPS += ["--save_steps", "65", "--learning_rate", "2e-3", "--weight_decay", "0.05", "--min_crop_scale", "0.8"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with captioned images, labeled images, and a model trained on the captioned images."""
    folder = tmp_path_factory.mktemp("workplace")
    write_captions(folder / "halves")
    write_labeled(folder / "colors")
    call_command(
        "train zero-shot-image-classification",
        arguments_of(folder / "halves", folder / "pairs", *STEPS, "--zero_shot_dataset", str(folder / "colors")),
    )
    return folder


def read(file: Path) -> dict[str, float]:
    scores: dict[str, float] = json.loads(file.read_text())
    return scores


def test_a_training_beats_chance_and_its_card_says_so(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = workplace / "pairs"
    scores = read(folder / "validation_scores.json")
    text, card = (folder / "README.md").read_text(), ModelCard.load(folder / "README.md")
    for name in ("mean_recall", "image_to_text_recall_at_5", "text_to_image_recall_at_5"):
        ours, chance = map(float, re.search(rf"\| {name} \| \*\*(.*)\*\* \| (.*) \|", text).groups())
        assert ours == pytest.approx(scores[name], abs=1e-4)
        assert ours > chance + 0.2
    assert card.data.pipeline_tag == "zero-shot-image-classification"
    assert {result.dataset_split for result in card.data.eval_results} == {"validation"}
    accuracy = read(folder / "zero_shot_scores.json")["accuracy"]
    for part in (
        "halves: 16 for train, 11 for validation.",
        "| loss | sigmoid, over all images and texts of a batch of 8 |",
        "| captions | 44, of which one of each image is drawn in every epoch |",
        f"accuracy {accuracy:.4f} on {4 * NUM_LABELED} test images of colors (chance 0.2500)",
    ):
        assert part in text
    assert len((folder / "zero_shot_predictions.jsonl").read_text().splitlines()) == 4 * NUM_LABELED
    pictures = [*re.findall(r"!\[.*\]\((.*)\)", text), "pictures/step-000040.png", "pictures/step-000080.png"]
    assert len(pictures) == 4
    assert all(Image.open(folder / picture).size[0] > 300 for picture in pictures)
    check_upload(folder)
    assert (folder / "tokenizer.json").is_file()
    # Run the code example of the model card that imports hf_vit.
    Image.new("RGB", (20, 16), "red").save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    exec(re.findall("```python\n(.*?)```", text, flags=re.DOTALL)[1].replace("path/to/this/folder", str(folder)), {})
    assert "tensor([[" in capsys.readouterr().out


def test_a_training_is_resumed_where_it_was(workplace: Path, tmp_path: Path) -> None:
    checkpoint = str(workplace / "pairs" / "checkpoint-65")
    train(workplace / "halves", tmp_path / "resumed", *STEPS, "--resume_from_checkpoint", checkpoint)
    expected = load_file(workplace / "pairs" / "model.safetensors")
    resumed = load_file(tmp_path / "resumed" / "model.safetensors")
    assert all(torch.equal(weight, resumed[name]) for name, weight in expected.items())


OPENED = """
import re
from pathlib import Path

exec(re.findall("```python\\n(.*?)```", Path("pairs/README.md").read_text(), flags=re.DOTALL)[0].replace(
    "path/to/this/folder", "pairs"
))
found = classify("image.png", candidate_labels=sys.argv[1:], hypothesis_template="{}")
print(type(classify.model).__name__, type(classify.model).__module__.split(".")[0])
print(found[0]["score"], found[0]["label"])
"""


def test_it_opens_in_the_stock_pipeline_where_the_package_is_not(workplace: Path) -> None:
    number = PAIRS.index(("red", "blue"))
    image = Image.open(workplace / "halves" / "val" / "images" / f"{number}.png")
    image.save(workplace / "image.png")
    labels = ["green beside white", "red beside blue", "green beside green"]
    *_, kind, answer = run_without_package(OPENED, workplace, *labels).stdout.splitlines()
    assert kind == "HfViTForZeroShotImageClassification transformers_modules"
    model = HfViTForZeroShotImageClassification.from_pretrained(workplace / "pairs")
    processor = HfViTProcessor.from_pretrained(workplace / "pairs")
    with torch.no_grad():
        scores = model(**processor(images=image, text=labels, return_tensors="pt")).logits_per_image.softmax(dim=1)[0]
    score, label = answer.split(maxsplit=1)
    assert label == "red beside blue"
    assert float(score) == pytest.approx(float(scores[1]), rel=1e-4)


def test_an_evaluation_gives_the_scores_of_the_training(workplace: Path, tmp_path: Path) -> None:
    options = ["--model_name_or_path", str(workplace / "pairs"), "--dataset_name", str(workplace / "halves")]
    options += ["--zero_shot_dataset", str(workplace / "colors"), "--use_cpu", "--disable_tqdm", "true"]
    options += ["--per_device_eval_batch_size", "11", "--output_dir", str(tmp_path)]
    call_command("evaluate", options)
    for name in ("validation_scores.json", "zero_shot_scores.json"):
        assert read(tmp_path / name) == pytest.approx(read(workplace / "pairs" / name), rel=1e-4)
    assert (tmp_path / "validation_examples.png").is_file()


def test_the_evaluation_loss_is_that_of_all_images_with_each_caption(workplace: Path, tmp_path: Path) -> None:
    start = ["--model_name_or_path", str(workplace / "pairs")]
    trainer = make_trainer(workplace / "halves", tmp_path, *start)
    scores = scores_of(trainer)
    model, processor, images = trainer.model.eval(), trainer.processing_class, trainer.eval_dataset
    losses = []
    for turn in range(3):
        chosen = [captions[turn % len(captions)] for captions in images.rows["captions"]]
        pictures = [images[number]["image"] for number in range(len(images))]
        with torch.no_grad():
            outputs = model(**processor(images=pictures, text=chosen, return_tensors="pt"), return_loss=True)
        losses.append(float(outputs.loss))
    assert any(len(captions_of(*pair)) == 2 for pair in PAIRS)
    assert scores["loss"] == pytest.approx(sum(losses) / 3, rel=1e-4)
    trainer.args.per_device_eval_batch_size = 3
    assert scores_of(trainer) == pytest.approx(scores, rel=1e-5)


def test_two_processes_train_and_score_as_one(workplace: Path, tmp_path: Path) -> None:
    job = distributed.start("train_pairs", tmp_path / "two", workplace / "halves", processes=2)
    alone = train_as_one(workplace / "halves", tmp_path / "one", batch_size=8)
    distributed.finish(job, tmp_path / "two")
    for process in (torch.load(tmp_path / "two" / f"process_{rank}.pt") for rank in range(2)):
        for loss, (losses, weights, scores) in alone.items():
            torch.testing.assert_close(process[loss][0], losses, rtol=1e-6, atol=0)
            torch.testing.assert_close(process[loss][1], weights, rtol=1e-6, atol=1e-8)
            assert process[loss][2] == pytest.approx(scores, rel=1e-5)
    assert alone["sigmoid"][0] != alone["softmax"][0]


def test_a_frozen_image_tower_stays_and_the_text_learns_to_fit_it(workplace: Path, tmp_path: Path) -> None:
    config = HfViTConfig(image_size=16, **CONFIG)
    HfViTModel(config).save_pretrained(tmp_path / "vision")
    HfViTImageProcessor.for_model(config).save_pretrained(tmp_path / "vision")
    options = ["--model_name_or_path", str(tmp_path / "vision"), "--freeze_vision", "--loss", "softmax"]
    options += ["--vocab_size", "280"]
    options += ["--config_overrides", json.dumps({"text_config": {**TEXT, "num_hidden_layers": 1}})]
    train(workplace / "halves", tmp_path / "locked", *A_FEW, *options)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("vision", "locked"))
    tower = {name.removeprefix("model.") for name in after if name.startswith("model.")}
    assert {name.removeprefix("model.") for name in before} == tower
    for name, weight in before.items():
        assert torch.equal(weight, after[f"model.{name.removeprefix('model.')}"])
    config = read(tmp_path / "locked" / "config.json")
    assert config["text_config"]["num_hidden_layers"] == 1
    assert len(AutoTokenizer.from_pretrained(tmp_path / "locked")) == config["text_config"]["vocab_size"] == 280
    assert "| image tower | frozen |" in (tmp_path / "locked" / "README.md").read_text()


def test_saved_models_towers_and_text_encoders_keep_their_weights(workplace: Path, tmp_path: Path) -> None:
    options = ["--model_name_or_path", str(workplace / "pairs"), "--loss", "softmax"]
    model = make_trainer(workplace / "halves", tmp_path, *options).model
    saved = load_file(workplace / "pairs" / "model.safetensors")
    assert model.options.loss == "softmax"
    assert {name for name in saved if name not in model.state_dict()} == {"contrastive_head.logit_bias"}
    assert all(torch.equal(weight, saved[name]) for name, weight in model.state_dict().items())

    tokenizer = train_tokenizer(captions_of("red", "blue") * 3, 270, 40)
    text = {**TEXT, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    text["max_position_embeddings"] = 12
    vision = {**CONFIG, "image_size": 16}
    clip = CLIPModel(CLIPConfig(vision_config=vision, text_config=text, projection_dim=20))
    clip.save_pretrained(tmp_path / "clip")
    tokenizer.save_pretrained(tmp_path / "clip")
    trainer = make_trainer(workplace / "halves", tmp_path / "out", "--model_name_or_path", str(tmp_path / "clip"))
    theirs = clip.text_model.embeddings.token_embedding.weight
    assert torch.equal(trainer.model.text_model.token_embedding.weight, theirs)
    assert trainer.model.options.loss == "softmax"
    batch = next(iter(trainer.get_train_dataloader()))
    # Texts are truncated to the maximum length of the text tower, which is smaller than that of the tokenizer.
    assert batch["input_ids"].shape[1] <= 12
    assert trainer.model(**batch).loss.isfinite()

    bert = BertModel(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=40, **TEXT))
    bert.save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    options = ["--text_model_name_or_path", str(tmp_path / "bert"), "--model_name_or_path", str(workplace / "pairs")]
    trainer = make_trainer(workplace / "halves", tmp_path / "out", *options)
    for name, weight in trainer.model.text_model.state_dict().items():
        assert torch.equal(weight, bert.state_dict()[name])
    assert torch.equal(trainer.model.model.norm.weight, saved["model.norm.weight"])
    # "cls" is not possible, because the tokenizer has no [CLS] token.
    assert trainer.model.text_options.effective_pooling == "last"
    assert trainer.processing_class.tokenizer.model_max_length == 40


def test_a_batch_has_an_image_once_and_the_loss_of_the_model(workplace: Path, tmp_path: Path) -> None:
    trainer = make_trainer(workplace / "halves", tmp_path)
    decays = trainer.get_decay_parameter_names(trainer.model)
    assert "contrastive_head.text_projection.weight" in decays
    assert not [name for name in decays if "logit" in name]
    batches = list(trainer.get_train_dataloader())
    assert len(batches) == 2  # an epoch contains each of the 16 images once, although each has several captions
    for batch in batches:
        assert len(batch["pixel_values"].flatten(1).unique(dim=0)) == len(batch["input_ids"]) == 8
        outputs = trainer.model(**batch)
        head = trainer.model.contrastive_head
        loss = contrastive_loss(outputs.image_embeds, outputs.text_embeds, head.logit_scale, head.logit_bias)
        assert torch.equal(outputs.loss, loss)


def test_mistakes_are_explained(workplace: Path, tmp_path: Path) -> None:
    own_tokens = "vocab_size=300 and tokenizer_name='name' exclude each other: the tokenizer has its own vocabulary"
    of_a_class = "'a photo'. Each template needs one {} for the class name"
    saved = ["--model_name_or_path", str(workplace / "pairs"), "--max_text_length", "9"]
    colors = ["--zero_shot_dataset", str(workplace / "colors"), "--zero_shot_split", "validation"]
    for options, message in (
        (["--freeze_vision"], "--freeze_vision would freeze an untrained tower"),
        (["--text_preset", "gigantic"], "invalid choice: 'gigantic'"),
        (["--tokenizer_name", "name"], own_tokens),
        (["--dataloader_drop_last", "false"], "could put an image into a batch twice"),
        (["--prompt_templates", "a photo"], of_a_class),
        (["--per_device_train_batch_size", "50"], "16 training images do not fill a batch of 50"),
        (["--metric_for_best_model", "accuracy"], "metric_for_best_model='accuracy' is not a score"),
        (["--vocab_size", "100"], "vocab_size=100 must be at least 259"),
        (["--caption_column_name", "words"], "no column 'words', only 'file_name', 'text'"),
        (saved, "has its own vocabulary and size. Remove --max_text_length 9"),
        (colors, "has no split 'validation'. Choose train or test"),
    ):
        with pytest.raises(SystemExit, match=re.escape(message)):
            train(workplace / "halves", tmp_path / "out", *options)
        assert not (tmp_path / "out").exists()
