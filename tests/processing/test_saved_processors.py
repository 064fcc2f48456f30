"""Test loading of saved processors with and without the package and torchvision, and reading other processor files."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer, BertTokenizer

from hf_vit import (
    HfViTConfig,
    HfViTForImageClassification,
    HfViTForKeypointDetection,
    HfViTForObjectDetection,
    HfViTForZeroShotImageClassification,
    HfViTImageProcessor,
    HfViTImageProcessorPil,
    HfViTProcessor,
)
from hf_vit.convert import load_image_processor
from hf_vit.convert.image_processor import image_processor_options, timm_image_processor_options
from hf_vit.tasks import train_tokenizer

from ..convert.test_convert_image_processor import PUBLISHED, TIMM
from ..helpers.fresh import run_with_package, run_without_package
from ..helpers.image_text_models import SMALL_TEXT, build_model, build_processor
from ..helpers.images import BACKENDS, noise
from ..helpers.models import small_config
from ..helpers.references import draw_weights


AUTO_MAP = {
    "AutoImageProcessor": {
        "torchvision": "image_processing_hf_vit.HfViTImageProcessor",
        "pil": "image_processing_pil_hf_vit.HfViTImageProcessorPil",
    }
}
OPTIONS = {"size": {"longest_edge": 32}, "resample": 3, "num_channels": 1, "image_mean": 0.25, "image_std": [0.3]}
OPTIONS |= {"do_pad": True, "ensure_multiple_of": (4, 8), "pad_size": 32, "do_convert_rgb": False}


# Script that loads an image processor without hf_vit, saves it, and loads it again.
ELSEWHERE = """
import json, sys
folder, target, expected, mean, backends = sys.argv[1], sys.argv[2], *map(json.loads, sys.argv[3:])
sys.modules["hf_vit"] = None
has_torchvision = "torchvision" in backends
if not has_torchvision:
    sys.modules["torchvision"] = None
import numpy as np
# transformers 5.17 keeps the short import for those who have torchvision
from transformers.models.auto.image_processing_auto import AutoImageProcessor
image = (np.arange(20 * 30) % 256).astype(np.uint8).reshape(20, 30)

def load(source, backend):
    chosen = {} if backend is None else {"backend": backend}
    processor = AutoImageProcessor.from_pretrained(source, trust_remote_code=True, **chosen)
    is_pil = backend == "pil" or not has_torchvision
    assert type(processor).__name__ == f"HfViTImageProcessor{'Pil' * is_pil}", (source, backend, type(processor))
    assert json.loads(json.dumps(processor.to_dict())) == expected, (source, backend)
    assert abs(float(processor(image, return_tensors="pt").pixel_values.mean()) - mean) < 0.01, (source, backend)
    return processor

for backend in backends:
    processor = load(folder, backend)
    if backend == "torchvision":
        type(processor).register_for_auto_class()
    processor.save_pretrained(f"{target}/{backend}")
    for other in backends:
        load(f"{target}/{backend}", other)
if not has_torchvision:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    try:
        get_class_from_dynamic_module("image_processing_hf_vit.HfViTImageProcessor", folder)()
    except ImportError as error:
        assert "pip install torchvision" in str(error), error
    else:
        raise AssertionError("no error without torchvision")
    del sys.modules["hf_vit"]
    import hf_vit, hf_vit.data, hf_vit.training  # the package itself needs no torchvision, either
    assert hf_vit.HfViTImageProcessorPil()(image, return_tensors="pt").pixel_values.shape == (1, 3, 224, 224)
"""


@pytest.mark.parametrize(
    ("saver", "options"),
    [("torchvision", OPTIONS), ("pil", {}), ("pil", OPTIONS), ("torchvision", {"do_resize": False, "image_std": 2.0})],
)
def test_saved_options_come_back_under_either_backend(tmp_path, saver, options):
    processor = BACKENDS[saver](**options)
    processor.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert written["auto_map"] == AUTO_MAP
    assert written["image_processor_type"] == "HfViTImageProcessor"
    image = np.random.default_rng(0).integers(0, 256, (30, 50, processor.num_channels), dtype=np.uint8)
    for backend, kind in BACKENDS.items():
        loaded = kind.from_pretrained(tmp_path)
        assert loaded.to_dict() == processor.to_dict()
        assert loaded.to_dict() | kind(**options).to_dict() == processor.to_dict()
        opened = AutoImageProcessor.from_pretrained(tmp_path, backend=backend)
        assert type(opened) is kind
        if backend == saver:
            pixels = [own(image, return_tensors="pt").pixel_values for own in (processor, opened)]
            assert torch.equal(*pixels)
    assert type(AutoImageProcessor.from_pretrained(tmp_path)) is HfViTImageProcessor
    # Image processors can be loaded from a single file and with overridden options.
    from_file = BACKENDS[saver].from_json_file(tmp_path / "preprocessor_config.json")
    assert from_file.to_json_string() == processor.to_json_string()
    changed = BACKENDS[saver].from_pretrained(tmp_path, do_normalize=False, size=16, pad_size=None)
    assert (changed.do_normalize, changed.size) == (False, {"height": 16, "width": 16})


def test_registered_class_keeps_the_map_and_a_push_takes_the_code_along(tmp_path, monkeypatch):
    monkeypatch.setattr(HfViTImageProcessorPil, "_auto_class", None)
    HfViTImageProcessorPil.register_for_auto_class()
    processor = HfViTImageProcessorPil()
    processor.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "preprocessor_config.json").read_text())["auto_map"] == AUTO_MAP
    processor.to_dict()["auto_map"]["AutoImageProcessor"].clear()
    assert HfViTImageProcessor().to_dict()["auto_map"] == AUTO_MAP
    pushed = {}
    for saver in (HfViTImageProcessor(), HfViTConfig()):
        # push_to_hub of transformers saves into an empty folder and uploads its contents.
        monkeypatch.setattr(type(saver), "push_to_hub", lambda self, name, **options: pushed.update({name: options}))
        saver.save_pretrained(tmp_path / "name", push_to_hub=True, private=True)
        saver.save_pretrained(tmp_path / "name", push_to_hub=True, repo_id="user/other")
        assert pushed == {"name": {"private": True}, "user/other": {}}
        pushed.clear()


# Second part of the script: it opens models and processors of images and texts.
OPEN = """
import torch
from transformers import AutoModel, AutoModelForZeroShotImageClassification, AutoProcessor, pipeline
folder, photo_name = target, f"{target}/photo.png"
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
    model.save_pretrained(f"{target}/again")
    processor.save_pretrained(f"{target}/again")
    again = AutoModelForZeroShotImageClassification.from_pretrained(f"{target}/again", **remote)
    processor = AutoProcessor.from_pretrained(f"{target}/again", **remote)
    inputs = processor(images=photo, text=saved["texts"], return_tensors="pt")
    assert torch.equal(again(**inputs).logits_per_image, logits)
print("opened")
"""


def save_image_text_models(processor, folder):
    """Save models with both kinds of text towers, and their logits for a photo and some texts."""
    labels = ["dog", "red car", "cats"]
    saved = {"labels": labels, "texts": [f"a {label}" for label in labels]}
    (photo,) = photos(1)
    photo.save(folder / "photo.png")
    inputs = processor(images=photo, text=saved["texts"], return_tensors="pt")
    encoder = {"model_type": "bert", **SMALL_TEXT, "vocab_size": len(processor.tokenizer)}
    own = {**SMALL_TEXT, **processor.text_options()}
    for name, options in (("own", own), ("bert", {"encoder_config": encoder})):
        model = HfViTForZeroShotImageClassification(small_config(text_config=options)).eval()
        draw_weights(model)
        for part in (model, processor):
            part.save_pretrained(folder / name)
        with torch.no_grad():
            saved[name] = model(**inputs).logits_per_image
    torch.save(saved, folder / "data.pt")


@pytest.mark.parametrize("has_torchvision", [True, False])
def test_saved_folders_open_where_the_package_is_not_installed(texts, tmp_path, has_torchvision):
    processor = HfViTImageProcessor(**OPTIONS | {"image_std": 0.3})
    processor.save_pretrained(tmp_path / "saved")
    (tmp_path / "elsewhere").mkdir()
    image = (np.arange(20 * 30) % 256).astype(np.uint8).reshape(20, 30)
    mean = float(processor(image, return_tensors="pt").pixel_values.mean())
    backends = json.dumps([None, "pil", "torchvision"] if has_torchvision else [None, "pil"])
    folders = [str(tmp_path / name) for name in ("saved", "elsewhere")]
    arguments = [*folders, processor.to_json_string(), str(mean), backends]
    if has_torchvision:
        save_image_text_models(texts, tmp_path / "elsewhere")
        run = run_without_package(ELSEWHERE + OPEN, tmp_path, *arguments)
        assert run.stdout.endswith("opened\n")
        assert "not supported" not in run.stdout + run.stderr
        assert "Error" not in run.stderr, run.stderr
    else:
        run_with_package(ELSEWHERE, tmp_path, *arguments, fresh=True)


def write(folder, name, content):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content))
    return folder


def options_of(processor):
    return json.loads(processor.to_json_string())


def assert_read(place, options):
    """Assert that the file `place` and its folder are both loaded as an image processor with the given options."""
    expected = options_of(HfViTImageProcessor(**options))
    for path in (place, place.parent):
        assert options_of(HfViTImageProcessor.from_pretrained(path)) == expected, path


def test_folder_of_another_class_is_read_as_that_class_means_it(tmp_path):
    """`tests/convert/test_convert_image_processor.py` tests the pixels that result from these options."""
    for number, options in enumerate(PUBLISHED.values()):
        place = write(tmp_path / str(number), "preprocessor_config.json", options) / "preprocessor_config.json"
        assert_read(place, image_processor_options(options, model_type="vit"))
    folder = write(tmp_path / "timm", "config.json", {"architecture": "vit_base", "pretrained_cfg": TIMM["augreg"]})
    assert_read(folder / "config.json", timm_image_processor_options(TIMM["augreg"]))
    # A file without a class uses the image processor class of the model in the same folder.
    for model_type, kind in (("clip", "CLIP"), ("dinov2", "Bit")):
        folder = write(tmp_path / model_type, "config.json", {"model_type": model_type})
        write(folder, "preprocessor_config.json", {"size": 224})
        named = {"image_processor_type": f"{kind}ImageProcessor", "size": 224}
        assert_read(folder / "preprocessor_config.json", image_processor_options(named, model_type="vit"))
        processor = HfViTImageProcessor.from_pretrained(folder)
        assert processor.size == {"shortest_edge": 224}
        assert options_of(load_image_processor(folder)) == options_of(processor)
    write(tmp_path / "alone", "preprocessor_config.json", {"size": 224})
    assert HfViTImageProcessor.from_pretrained(tmp_path / "alone").size == {"height": 224, "width": 224}
    write(folder, "config.json", {"model_type": "sam"})
    with pytest.raises(ValueError, match="model_type='sam' is unknown"):
        HfViTImageProcessor.from_pretrained(folder)


def test_converted_processor_is_saved_as_hf_vit(tmp_path, backend):
    source = write(tmp_path / "source", "preprocessor_config.json", PUBLISHED["facebook/dinov2-base"])
    processor = backend.from_pretrained(source, size={"shortest_edge": 64}, crop_size=56)
    assert (processor.size, processor.crop_size) == ({"shortest_edge": 64}, {"height": 56, "width": 56})
    processor.save_pretrained(tmp_path / "saved")
    again = AutoImageProcessor.from_pretrained(tmp_path / "saved", backend=processor.backend)
    assert type(again) is backend
    assert options_of(again) == options_of(processor)

    class Derived(HfViTImageProcessor):
        pass

    derived = Derived(size=32, resample=3)
    derived.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "preprocessor_config.json").read_text())["image_processor_type"] == "Derived"
    assert options_of(Derived.from_pretrained(tmp_path)) == options_of(derived)


def test_options_nested_in_the_processor_come_first(tmp_path):
    clip = PUBLISHED["openai/clip-vit-base-patch32"]
    write(tmp_path, "processor_config.json", {"processor_class": "CLIPProcessor", "image_processor": clip})
    expected = options_of(HfViTImageProcessor(**image_processor_options(clip, model_type="clip")))
    assert options_of(HfViTImageProcessor.from_pretrained(tmp_path)) == expected
    write(tmp_path, "preprocessor_config.json", PUBLISHED["google/vit-base-patch16-224"])
    assert options_of(HfViTImageProcessor.from_pretrained(tmp_path)) == expected
    ours = HfViTImageProcessor(size=32, image_mean=0.25)
    write(tmp_path, "processor_config.json", {"image_processor": options_of(ours)})
    assert options_of(HfViTImageProcessor.from_pretrained(tmp_path)) == options_of(ours)


def test_files_of_something_else_are_refused(tmp_path):
    with pytest.raises(OSError, match="Can't load image processor"):
        HfViTImageProcessor.from_pretrained(tmp_path)
    write(tmp_path, "config.json", {"model_type": "vit"})
    with pytest.raises(OSError, match=r"preprocessor_config\.json"):
        HfViTImageProcessor.from_pretrained(tmp_path)
    for name in ("vit.pth", "model.safetensors"):
        (tmp_path / name).write_bytes(b"\x80\x81")
        with pytest.raises(OSError, match=rf"{name}' is not a JSON file.*hf_vit\.convert\.load_image_processor"):
            HfViTImageProcessor.from_pretrained(tmp_path / name)
    write(tmp_path, "preprocessor_config.json", {"image_processor_type": "SamImageProcessor"})
    with pytest.raises(ValueError, match="Unknown image processor 'SamImageProcessor'"):
        HfViTImageProcessor.from_pretrained(tmp_path)


CAPTIONS = ["A dog runs on the grass.", "two cats sleep", "a red car", "the dog and the cat"]


@pytest.fixture(scope="module")
def texts():
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


def test_processor_prepares_images_and_texts(texts, tmp_path):
    inputs = texts(images=photos(4), text=[*CAPTIONS[:3], "word " * 100], return_tensors="pt")
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape == (4, 40)
    assert inputs["input_ids"][3, -1] == texts.tokenizer.eos_token_id  # truncation keeps the end token
    expected = texts.image_processor(photos(4), return_tensors="pt").pixel_values
    assert torch.equal(inputs["pixel_values"], expected)
    assert set(texts(text="a dog")) == {"input_ids", "attention_mask"}
    assert set(texts(images=photos(1))) == {"pixel_values"}
    assert build_model(texts)(**inputs).logits_per_image.shape == (4, 4)
    # Options of the text tower are derived from the tokenizer.
    tokenizer = texts.tokenizer
    expected = {"vocab_size": len(tokenizer), "eos_token_id": 2, "pooling": "eos", "max_position_embeddings": 40}
    assert texts.text_options() == expected
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "dog"]))
    bert = HfViTProcessor(texts.image_processor, BertTokenizer(str(tmp_path / "vocab.txt")))
    options = bert.text_options()
    assert (options["vocab_size"], options["pooling"]) == (7, "last")
    assert "max_position_embeddings" not in options
    inputs = bert(images=photos(2), text=["a dog", "a"], return_tensors="pt")
    # The model accepts the token_type_ids that this tokenizer returns.
    assert build_model(bert)(**inputs).logits_per_image.shape == (2, 2)


def test_processor_opens_as_it_was_saved(texts, tmp_path):
    pil = HfViTProcessor(HfViTImageProcessorPil.for_model(small_config()), texts.tokenizer)
    for name, saved in (("torchvision", texts), ("pil", pil)):
        saved.save_pretrained(tmp_path / name)
        for kind in (HfViTProcessor, AutoProcessor):
            opened = kind.from_pretrained(tmp_path / name)
            assert type(opened) is HfViTProcessor
            assert opened.text_options() == texts.text_options()
            assert opened(text=CAPTIONS)["input_ids"] == texts(text=CAPTIONS)["input_ids"]
            own, other = (one(images=photos(1), return_tensors="pt").pixel_values for one in (opened, texts))
            assert (own - other).abs().max() < 0.03
        assert AutoTokenizer.from_pretrained(tmp_path / name).get_vocab() == texts.tokenizer.get_vocab()
        assert AutoImageProcessor.from_pretrained(tmp_path / name).size == texts.image_processor.size
    # For a model without a text tower, AutoProcessor returns only an image processor.
    HfViTForImageClassification(small_config()).save_pretrained(tmp_path)
    HfViTImageProcessor.for_model(small_config()).save_pretrained(tmp_path)
    assert type(AutoProcessor.from_pretrained(tmp_path)) is HfViTImageProcessor


def test_a_hub_out_of_reach_is_no_missing_model(tmp_path):
    """With an empty cache and no connection, the error is about the connection and not about a missing model."""
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
    config.architectures = ["HfViTForKeypointDetection"]  # saved configurations contain the field "model_type"
    assert HfViTImageProcessor.for_model(config).do_affine_crop


def test_labels_of_annotations_keep_the_mask_of_padding():
    """Labels made from annotations contain the padding mask, because scripts collate only images and labels."""
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
