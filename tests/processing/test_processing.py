"""The processor for images and texts, tokenizer training, and the transformers pipeline without hf_vit."""

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer, BertTokenizer

from hf_vit import (
    HfViTForImageClassification,
    HfViTForKeypointDetection,
    HfViTForObjectDetection,
    HfViTForZeroShotImageClassification,
    HfViTImageProcessor,
    HfViTImageProcessorPil,
    HfViTProcessor,
)
from hf_vit.training import train_tokenizer

from ..helpers.fresh import run_without_package
from ..helpers.image_text_models import SMALL_TEXT, build_model, build_processor
from ..helpers.images import noise
from ..helpers.models import small_config
from ..helpers.references import draw_weights


CAPTIONS = ["A dog runs on the grass.", "two cats sleep", "a red car", "the dog and the cat"]


@pytest.fixture(scope="module")
def processor():
    return build_processor(CAPTIONS)


def photos(count):
    return [Image.fromarray(noise(40, 50, 3, seed=seed)) for seed in range(count)]


def test_trained_tokenizer_writes_any_text_and_reads_it_back():
    tokenizer = train_tokenizer(CAPTIONS * 3, 400, 40)
    for text in (*CAPTIONS, "Ein Hündchen 🐶, naïve  \n déjà-vu"):
        ids = tokenizer(text).input_ids
        assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
        assert tokenizer.decode(ids, skip_special_tokens=True).strip() == text.lower().strip()
    assert len(tokenizer("the dog").input_ids) == 4  # frequent words are single tokens
    assert tokenizer.vocab_size == len(tokenizer) <= 400
    again = train_tokenizer(iter(CAPTIONS * 3), 400, 40)
    assert again.get_vocab() == tokenizer.get_vocab()
    with pytest.raises(ValueError, match="vocab_size=100 must be at least 259"):
        train_tokenizer(CAPTIONS, 100)
    with pytest.raises(ValueError, match="max_length=2 must be at least 3"):
        train_tokenizer(CAPTIONS, 300, 2)


def test_processor_prepares_images_and_texts(processor, tmp_path):
    inputs = processor(images=photos(4), text=[*CAPTIONS[:3], "word " * 100], return_tensors="pt")
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape == (4, 40)
    assert inputs["input_ids"][3, -1] == processor.tokenizer.eos_token_id  # truncated texts keep the end-of-text token
    expected = processor.image_processor(photos(4), return_tensors="pt").pixel_values
    assert torch.equal(inputs["pixel_values"], expected)
    assert set(processor(text="a dog")) == {"input_ids", "attention_mask"}
    assert set(processor(images=photos(1))) == {"pixel_values"}
    assert build_model(processor)(**inputs).logits_per_image.shape == (4, 4)
    # Options of the text tower are derived from the tokenizer.
    tokenizer = processor.tokenizer
    expected = {"vocab_size": len(tokenizer), "eos_token_id": 2, "pooling": "eos", "max_position_embeddings": 40}
    assert processor.text_options() == expected
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "dog"]))
    bert = HfViTProcessor(processor.image_processor, BertTokenizer(str(tmp_path / "vocab.txt")))
    options = bert.text_options()
    assert (options["vocab_size"], options["pooling"]) == (7, "last")
    assert "max_position_embeddings" not in options
    inputs = bert(images=photos(2), text=["a dog", "a"], return_tensors="pt")
    # The tokenizer also returns token_type_ids.
    assert build_model(bert)(**inputs).logits_per_image.shape == (2, 2)


def test_processor_opens_as_it_was_saved(processor, tmp_path):
    pil = HfViTProcessor(HfViTImageProcessorPil.for_model(small_config()), processor.tokenizer)
    for name, saved in (("torchvision", processor), ("pil", pil)):
        saved.save_pretrained(tmp_path / name)
        for kind in (HfViTProcessor, AutoProcessor):
            opened = kind.from_pretrained(tmp_path / name)
            assert type(opened) is HfViTProcessor
            assert opened.text_options() == processor.text_options()
            assert opened(text=CAPTIONS)["input_ids"] == processor(text=CAPTIONS)["input_ids"]
            own, other = (one(images=photos(1), return_tensors="pt").pixel_values for one in (opened, processor))
            assert (own - other).abs().max() < 0.03
        assert AutoTokenizer.from_pretrained(tmp_path / name).get_vocab() == processor.tokenizer.get_vocab()
        assert AutoImageProcessor.from_pretrained(tmp_path / name).size == processor.image_processor.size
    # A model without a text tower has only an image processor.
    HfViTForImageClassification(small_config()).save_pretrained(tmp_path)
    HfViTImageProcessor.for_model(small_config()).save_pretrained(tmp_path)
    assert type(AutoProcessor.from_pretrained(tmp_path)) is HfViTImageProcessor


def test_a_hub_out_of_reach_is_no_missing_model(tmp_path):
    """With an empty cache and without a connection, the error names the connection, not a missing model."""
    message = "There is no folder or file 'user/model', it is not in the cache, and the Hub cannot be r"
    with pytest.raises(OSError, match=message):
        HfViTImageProcessor.from_pretrained("user/model", cache_dir=tmp_path, local_files_only=True)


def test_an_image_processor_knows_the_task_of_its_model():
    config = small_config(detection_config={"decoder": "queries", "num_queries": 2})
    keypoints, detector = HfViTForKeypointDetection(config), HfViTForObjectDetection(config)
    assert HfViTImageProcessor.for_model(keypoints).do_affine_crop
    assert HfViTImageProcessor.for_model(detector).class_scores == "softmax"
    plain = HfViTImageProcessor.for_model(config)
    assert (plain.do_affine_crop, plain.class_scores) == (False, None)
    config.architectures = ["HfViTForKeypointDetection"]  # a saved configuration contains this field
    assert HfViTImageProcessor.for_model(config).do_affine_crop


def test_labels_of_annotations_keep_the_mask_of_padding():
    """Training scripts collate only images and labels."""
    torch.manual_seed(0)
    model = HfViTForObjectDetection(small_config()).eval()
    options = {"size": {"longest_edge": 32}, "do_pad": True, "ensure_multiple_of": 8}
    annotation = {"annotations": [{"bbox": [2, 2, 9, 9], "category_id": 1}]}
    processor = HfViTImageProcessor(**options, pad_size=32)
    features = processor(noise(20, 40, 3), annotations=annotation, return_tensors="pt")
    with torch.no_grad():
        whole, collated = model(**features), model(features["pixel_values"], labels=features["labels"])
        unmasked = model(features["pixel_values"])
    assert torch.equal(whole.pred_boxes, collated.pred_boxes)
    assert torch.equal(whole.loss, collated.loss)
    assert not torch.equal(whole.pred_boxes, unmasked.pred_boxes)


OPEN = """
from transformers import AutoModel, AutoModelForZeroShotImageClassification, AutoProcessor, pipeline
folder, photo_name = sys.argv[1:]
remote = {"trust_remote_code": True}
saved = torch.load(f"{folder}/data.pt", weights_only=True)
photo = __import__("PIL.Image").Image.open(photo_name)
for name in ("own", "bert"):
    place = f"{folder}/{name}"
    processor = AutoProcessor.from_pretrained(place, **remote)
    assert type(processor).__name__ == "HfViTProcessor"
    assert type(processor).__module__.startswith("transformers_modules"), type(processor)
    model, info = AutoModelForZeroShotImageClassification.from_pretrained(place, output_loading_info=True, **remote)
    assert not any(info.values()), info
    assert type(model).__module__.startswith("transformers_modules"), type(model)
    inputs = processor(images=photo, text=saved["texts"], return_tensors="pt")
    logits = model(**inputs).logits_per_image
    torch.testing.assert_close(logits, saved[name])
    AutoModel.from_pretrained(place, **remote)

    classify = pipeline("zero-shot-image-classification", model=place, **remote)
    options = {"candidate_labels": saved["labels"], "hypothesis_template": "a {}"}
    expected = dict(zip(saved["labels"], logits[0].softmax(0).tolist()))
    for found in (classify(photo, **options), classify([photo_name] * 3, batch_size=2, **options)[2]):
        assert {entry["label"] for entry in found} == set(expected)
        assert all(abs(entry["score"] - expected[entry["label"]]) < 1e-5 for entry in found), (found, expected)

    # What was opened saves again, and opens again: everything that the folder needs goes along.
    model.save_pretrained("again")
    processor.save_pretrained("again")
    again = AutoModelForZeroShotImageClassification.from_pretrained("again", **remote)
    inputs = AutoProcessor.from_pretrained("again", **remote)(images=photo, text=saved["texts"], return_tensors="pt")
    assert torch.equal(again(**inputs).logits_per_image, logits)
print("opened")
"""


def test_opens_without_the_package_in_the_stock_pipeline(processor, tmp_path):
    labels = ["dog", "red car", "cats"]
    texts = [f"a {label}" for label in labels]
    photo = tmp_path / "photo.png"
    photos(1)[0].save(photo)
    saved = {"labels": labels, "texts": texts}
    encoder = {"model_type": "bert", **SMALL_TEXT, "vocab_size": len(processor.tokenizer)}
    own = {**SMALL_TEXT, **processor.text_options()}
    for name, options in (("own", own), ("bert", {"encoder_config": encoder})):
        model = HfViTForZeroShotImageClassification(small_config(text_config=options)).eval()
        draw_weights(model)
        model.save_pretrained(tmp_path / name)
        processor.save_pretrained(tmp_path / name)
        with torch.no_grad():
            inputs = processor(images=Image.open(photo), text=texts, return_tensors="pt")
            saved[name] = model(**inputs).logits_per_image
    torch.save(saved, tmp_path / "data.pt")
    process = run_without_package(OPEN, tmp_path / "work", str(tmp_path), str(photo))
    assert process.stdout.endswith("opened\n")
    assert "not supported" not in process.stdout + process.stderr
    assert "Error" not in process.stderr, process.stderr
