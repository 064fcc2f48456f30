"""Test image captioning end to end: train, generate in other processes, resume, evaluate, continue, and errors."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import DatasetDict
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file
from transformers import pipeline

from hf_vit import HfViTConfig, HfViTForImageTextToText, HfViTImageProcessor, HfViTModel, HfViTProcessor
from hf_vit.evaluation.captions import CaptionMetric
from hf_vit.inference.predict import predict_files
from hf_vit.runs import build_run
from hf_vit.tasks.image_captioning import ImageCaptioning, train_prompt_tokenizer
from hf_vit.training.hub import check_upload

from ..helpers.dense_trainings import scores_of
from ..helpers.fresh import run_without_package
from ..helpers.image_text_trainings import CONFIG, PAIRS, TEXT, caption_arguments, captions_of, write_captions
from ..helpers.models import small_config
from ..helpers.options import call_command, opened_run
from ..helpers.references import draw_weights


STEPS = ["--max_steps", "150", "--eval_strategy", "steps", "--eval_steps", "100", "--save_strategy", "steps"]
STEPS += ["--save_steps", "120", "--learning_rate", "3e-3", "--min_crop_scale", "0.8"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with captioned images and a model trained on them."""
    folder = tmp_path_factory.mktemp("workplace")
    write_captions(folder / "halves")
    call_command(
        "train image-captioning", caption_arguments(folder / "halves", folder / "trained", *STEPS, dropout=0.1)
    )
    return folder


def photo_of(workplace: Path, pair: tuple[str, str]) -> Path:
    return workplace / "halves" / "val" / "images" / f"{PAIRS.index(pair)}.png"


def test_a_training_describes_images_and_its_card_compares_it_with_both_baselines(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = workplace / "trained"
    scores, text = json.loads((folder / "validation_scores.json").read_text()), (folder / "README.md").read_text()
    assert "| metric | this model | most frequent caption | caption of the nearest image |" in text
    for name in ("bleu_4", "rouge_l"):
        ours, usual, _ = (
            float(value.strip("* ")) for value in re.search(rf"\| {name} \|(.*)\|(.*)\|(.*)\|", text).groups()
        )
        assert ours == pytest.approx(scores[name], abs=1e-4)
        assert ours > 0.7
        assert ours > usual + 0.1
    assert ModelCard.load(folder / "README.md").data.pipeline_tag == "image-text-to-text"
    assert "| captions | 44, of which up to 5 of each image are read in every epoch |" in text
    lines = [json.loads(line) for line in (folder / "validation_predictions.jsonl").read_text().splitlines()]
    assert [line["captions"] for line in lines] == [captions_of(*pair) for pair in PAIRS[:11]]
    pictures = re.findall(r"!\[.*\]\((.*)\)", text)
    assert len(pictures) == 2
    assert all(Image.open(folder / picture).size[0] > 300 for picture in pictures)
    check_upload(folder)
    # Run the code example of the model card that imports hf_vit.
    Image.open(photo_of(workplace, ("red", "blue"))).save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    exec(re.findall("```python\n(.*?)```", text, flags=re.DOTALL)[1].replace("path/to/this/folder", str(folder)), {})
    assert capsys.readouterr().out.splitlines()[-1] in captions_of("red", "blue")


OPENED = """
import re
from pathlib import Path

card = Path("trained/README.md").read_text()
exec(re.findall("```python\\n(.*?)```", card, flags=re.DOTALL)[0].replace("path/to/this/folder", "trained"))
print(type(describe.model).__name__, type(describe.model).__module__.split(".")[0])
print(describe("image.png", text="")[0]["generated_text"])
print(describe("image.png", text="half", generate_kwargs={"max_new_tokens": 2})[0]["generated_text"])
"""


def test_the_pipeline_generates_the_same_caption_where_the_package_is_not(workplace: Path) -> None:
    image = Image.open(photo_of(workplace, ("red", "blue")))
    image.save(workplace / "image.png")
    by_card, kind, answer, continued = run_without_package(OPENED, workplace).stdout.splitlines()
    assert kind == "HfViTForImageTextToText transformers_modules"
    describe = pipeline("image-text-to-text", model=str(workplace / "trained"))
    assert by_card == answer == describe(image, text="")[0]["generated_text"]
    assert answer in captions_of("red", "blue")
    assert continued == "half red,"
    (line,) = predict_files(str(workplace / "trained"), [workplace / "image.png"])
    assert line["caption"] == answer


def test_a_training_is_resumed_where_it_was(workplace: Path, tmp_path: Path) -> None:
    checkpoint = str(workplace / "trained" / "checkpoint-120")
    resumed = caption_arguments(
        workplace / "halves", tmp_path / "out", *STEPS, "--resume_from_checkpoint", checkpoint, dropout=0.1
    )
    call_command("train image-captioning", resumed)
    expected = load_file(workplace / "trained" / "model.safetensors")
    resumed = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(weight, resumed[name]) for name, weight in expected.items())


def test_an_evaluation_gives_the_scores_of_the_training(workplace: Path, tmp_path: Path) -> None:
    options = ["--model_name_or_path", str(workplace / "trained"), "--dataset_name", str(workplace / "halves")]
    options += ["--use_cpu", "--disable_tqdm", "true", "--per_device_eval_batch_size", "4"]
    call_command("evaluate", [*options, "--output_dir", str(tmp_path)])
    trained, scores = (
        json.loads((f / "validation_scores.json").read_text()) for f in (workplace / "trained", tmp_path)
    )
    assert scores == pytest.approx(trained, rel=1e-5)


def test_saved_encoder_stays_frozen_and_saved_model_keeps_its_tokenizer(workplace: Path, tmp_path: Path) -> None:
    config = HfViTConfig(image_size=16, **CONFIG)
    HfViTModel(config).save_pretrained(tmp_path / "vision")
    HfViTImageProcessor.for_model(config).save_pretrained(tmp_path / "vision")
    options = ["--model_name_or_path", str(tmp_path / "vision"), "--max_steps", "3", "--save_strategy", "no"]
    options += ["--trainable_blocks", "0", "--cached_views", "2", "--vocab_size", "280", "--max_eval_samples", "2"]
    options += ["--config_overrides", json.dumps({"caption_config": TEXT})]
    call_command("train image-captioning", caption_arguments(workplace / "halves", tmp_path / "out", *options))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("vision", "out"))
    assert all(torch.equal(after[f"model.{name.removeprefix('model.')}"], weight) for name, weight in before.items())
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (generation["num_beams"], generation["max_new_tokens"], generation["eos_token_id"]) == (3, 63, 2)
    options = ["--model_name_or_path", str(workplace / "trained")]
    task = opened_run(ImageCaptioning, caption_arguments(workplace / "halves", tmp_path / "more", *options))
    trainer = build_run(task).trainer
    saved = load_file(workplace / "trained" / "model.safetensors")
    assert all(torch.equal(weight, saved[name]) for name, weight in trainer.model.state_dict().items())
    assert scores_of(trainer)["rouge_l"] > 0.5


def test_the_nearest_image_of_the_baseline_is_that_of_the_evaluated_image(workplace: Path, tmp_path: Path) -> None:
    options = ["--model_name_or_path", str(workplace / "trained")]
    run = build_run(opened_run(ImageCaptioning, caption_arguments(workplace / "halves", tmp_path, *options)))
    train = run.data.splits["train"]
    splits = DatasetDict({"train": train, "validation": train.select(range(len(train))[::-1])})
    baselines = run.task.evaluate_baselines(run.trainer, replace(run.data, splits=splits), "validation")
    # Each evaluated image is also a training image.
    assert baselines["caption of the nearest image"]["rouge_l"] == pytest.approx(1.0)
    assert baselines["most frequent caption"]["rouge_l"] < 0.9


def test_prompts_of_different_lengths_and_padded_images_do_not_change_each_other() -> None:
    tokenizer = train_prompt_tokenizer(captions_of("red", "blue") * 3, 280, 9)
    config = small_config(position_embedding_type="rotary")
    config.caption_config = {**config.caption_config.to_dict(), "vocab_size": len(tokenizer)}
    model = HfViTForImageTextToText(config).eval()
    draw_weights(model)
    options = {"do_resize": False, "do_pad": True, "ensure_multiple_of": config.patch_size}
    processor = HfViTProcessor(HfViTImageProcessor.for_model(config, **options), tokenizer)
    images = [Image.effect_noise(size, 60).convert("RGB") for size in ((32, 24), (16, 32))]
    texts = ["", "red beside"]
    together = model.generate(**processor(images=images, text=texts, return_tensors="pt"), eos_token_id=None)
    for image, text, both in zip(images, texts, together, strict=True):
        alone = model.generate(**processor(images=[image], text=[text], return_tensors="pt"), eos_token_id=None)[0]
        assert torch.equal(alone, both[-len(alone) :])
    assert tokenizer.decode(tokenizer("Red Beside").input_ids, skip_special_tokens=True) == "red beside"


def test_metrics_count_all_captions_of_an_image() -> None:
    metric = CaptionMetric()
    captions = ["A dog runs on the grass .", "two dogs play in a field"]
    metric.update([metric.record("a dog runs on the grass .", {"captions": captions})])
    assert metric.compute() == {"bleu_4": pytest.approx(1), "rouge_l": pytest.approx(1)}
    metric.update([metric.record("a red car", {"captions": captions})])
    assert 0 < metric.compute()["bleu_4"] < 1
    assert metric.compute()["rouge_l"] == pytest.approx((1 + 2 / 9) / 2)


def test_bleu_does_not_depend_on_the_order_of_captions() -> None:
    """Of captions that are equally close in length, sacreBLEU compares the shorter one with the generated caption."""
    short, long = "a dog runs on grass", "a brown dog runs fast on grass"
    scores = list[float]()
    for captions in ([short, long], [long, short]):
        metric = CaptionMetric()
        metric.update([metric.record("a dog runs on grass .", {"captions": captions})])
        scores.append(metric.compute()["bleu_4"])
    # The generated caption is longer than the shorter caption, so that there is no brevity penalty.
    precisions = 5 / 6 * 4 / 5 * 3 / 4 * 2 / 3
    assert scores == pytest.approx([precisions**0.25] * 2)


def test_captions_without_latin_letters_are_named(caplog: pytest.LogCaptureFixture) -> None:
    for text, is_named in (("Ein großer Hund.", False), ("一只狗在草地上奔跑", True)):
        metric = CaptionMetric()
        metric.update([metric.record(text, {"captions": ["A dog.", text]})])
        assert metric.compute()["rouge_l"] == pytest.approx(float(not is_named))
        assert (f"1 captions have no letters a to z and no digits, such as {text!r}" in caplog.text) is is_named


def test_mistakes_are_explained(workplace: Path, tmp_path: Path) -> None:
    saved = ["--model_name_or_path", str(workplace / "trained"), "--vocab_size", "300"]
    overrides = ["--config_overrides", json.dumps({"caption_config": {"hidden_size": 30, "num_attention_heads": 4}})]
    for options, message in (
        (["--vocab_size", "100"], "vocab_size=100 must be at least 259"),
        (saved, "has its own vocabulary and size. Remove --vocab_size 300"),
        (overrides, "hidden_size=30 of the caption decoder is not divisible by num_attention_heads=4"),
    ):
        with pytest.raises(SystemExit, match=re.escape(message)):
            call_command("train image-captioning", caption_arguments(workplace / "halves", tmp_path / "out", *options))
        assert not (tmp_path / "out").exists()
    model = HfViTForImageTextToText(small_config())
    images, texts = torch.zeros(2, 3, 32, 32), torch.ones(3, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="3 texts cannot be divided among 2 images"):
        model(images, input_ids=texts)
    with pytest.raises(ValueError, match=r"The special tokens \(1, 2, 0\) exceed vocab_size=2"):
        small_config(caption_config={"vocab_size": 2})
