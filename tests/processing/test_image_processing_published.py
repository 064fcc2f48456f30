"""`from_pretrained` of the image processors for folders and repositories of other libraries."""

import json
import os

import pytest
import torch
from transformers import AutoImageProcessor, CLIPImageProcessor, ViTImageProcessor

from hf_vit import HfViTImageProcessor as Processor
from hf_vit import HfViTImageProcessorPil
from hf_vit.convert import load_image_processor
from hf_vit.convert.image_processor import image_processor_options, timm_image_processor_options

from ..convert.test_convert_image_processor import PUBLISHED, TIMM
from ..helpers.fresh import run_with_package, run_without_package
from ..helpers.hub import serve
from ..helpers.images import noise


def write(folder, name, content):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content))
    return folder


def options_of(processor):
    return json.loads(processor.to_json_string())


def test_folder_of_another_class_is_read_as_that_class_means_it(tmp_path):
    for name, options in PUBLISHED.items():
        folder = write(tmp_path, "preprocessor_config.json", options)
        expected = options_of(Processor(**image_processor_options(options, model_type="vit")))
        assert options_of(Processor.from_pretrained(folder)) == expected, name
        assert options_of(Processor.from_pretrained(folder / "preprocessor_config.json")) == expected, name
    # A folder of timm is read from its `config.json`.
    timm = write(tmp_path / "timm", "config.json", {"architecture": "vit_base", "pretrained_cfg": TIMM["augreg"]})
    expected = options_of(Processor(**timm_image_processor_options(TIMM["augreg"])))
    assert options_of(Processor.from_pretrained(timm)) == expected
    assert options_of(Processor.from_pretrained(timm / "config.json")) == expected


def test_pixels_of_a_translated_file_are_those_of_its_class(tmp_path):
    image = noise(300, 500, 3)
    vit, clip = (
        "google/vit-base-patch16-224",
        "openai/clip-vit-base-patch32",
    )  # an int size of CLIP is the shortest edge
    for name, kind, ours in (
        (vit, ViTImageProcessor, Processor),
        (vit, ViTImageProcessor, HfViTImageProcessorPil),
        (clip, CLIPImageProcessor, Processor),
    ):
        write(tmp_path, "preprocessor_config.json", PUBLISHED[name])
        own, other = (each.from_pretrained(tmp_path)(image, return_tensors="pt").pixel_values for each in (ours, kind))
        if name == vit:
            torch.testing.assert_close(own, other, atol=1.01 / 127.5, rtol=0)
        else:
            assert (own - other).abs().mean() < 0.01


def test_file_without_a_class_has_that_of_the_model_beside_it(tmp_path):
    for model_type, name in (("clip", "openai/clip-vit-base-patch32"), ("dinov2", "facebook/dinov2-base")):
        folder = write(tmp_path / model_type, "config.json", {"model_type": model_type})
        write(folder, "preprocessor_config.json", {"size": 224})
        named = {"image_processor_type": PUBLISHED[name].get("image_processor_type", "CLIPImageProcessor")}
        expected = options_of(Processor(**image_processor_options({**named, "size": 224}, model_type="vit")))
        assert expected["size"] == {"shortest_edge": 224}
        for place in (folder, folder / "preprocessor_config.json"):
            assert options_of(Processor.from_pretrained(place)) == expected
        assert options_of(load_image_processor(folder)) == options_of(Processor.from_pretrained(folder))
    write(tmp_path / "alone", "preprocessor_config.json", {"size": 224})
    assert Processor.from_pretrained(tmp_path / "alone").size == {"height": 224, "width": 224}
    write(folder, "config.json", {"model_type": "sam"})
    with pytest.raises(ValueError, match="model_type='sam' is unknown"):
        Processor.from_pretrained(folder)


def test_what_is_translated_is_ours_once_saved(tmp_path, backend):
    source = write(tmp_path / "source", "preprocessor_config.json", PUBLISHED["facebook/dinov2-base"])
    processor = backend.from_pretrained(source, size={"shortest_edge": 64}, crop_size=56)
    assert (processor.size, processor.crop_size) == ({"shortest_edge": 64}, {"height": 56, "width": 56})
    processor.save_pretrained(tmp_path / "saved")
    again = AutoImageProcessor.from_pretrained(tmp_path / "saved", backend=processor.backend)
    assert type(again) is backend
    assert options_of(again) == options_of(processor)

    class Derived(Processor):
        pass

    derived = Derived(size=32, resample=3)
    derived.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "preprocessor_config.json").read_text())["image_processor_type"] == "Derived"
    assert options_of(Derived.from_pretrained(tmp_path)) == options_of(derived)


def test_options_nested_in_the_processor_come_first(tmp_path):
    clip = PUBLISHED["openai/clip-vit-base-patch32"]
    write(tmp_path, "processor_config.json", {"processor_class": "CLIPProcessor", "image_processor": clip})
    expected = options_of(Processor(**image_processor_options(clip, model_type="clip")))
    assert options_of(Processor.from_pretrained(tmp_path)) == expected
    write(tmp_path, "preprocessor_config.json", PUBLISHED["google/vit-base-patch16-224"])
    assert options_of(Processor.from_pretrained(tmp_path)) == expected
    ours = Processor(size=32, image_mean=0.25)
    write(tmp_path, "processor_config.json", {"image_processor": options_of(ours)})
    assert options_of(Processor.from_pretrained(tmp_path)) == options_of(ours)


def test_files_of_something_else_are_refused(tmp_path):
    with pytest.raises(OSError, match="Can't load image processor"):
        Processor.from_pretrained(tmp_path)
    write(tmp_path, "config.json", {"model_type": "vit"})
    with pytest.raises(OSError, match=r"preprocessor_config\.json"):
        Processor.from_pretrained(tmp_path)
    for name in ("vit.pth", "model.safetensors"):
        (tmp_path / name).write_bytes(b"\x80\x81")
        with pytest.raises(OSError, match=rf"{name}' is not a JSON file.*hf_vit\.convert\.load_image_processor"):
            Processor.from_pretrained(tmp_path / name)
    write(tmp_path, "preprocessor_config.json", {"image_processor_type": "SamImageProcessor"})
    with pytest.raises(ValueError, match="Unknown image processor 'SamImageProcessor'"):
        Processor.from_pretrained(tmp_path)


def test_repositories_on_the_hub_are_read_like_folders(tmp_path):
    write(tmp_path / "hub/user/dinov2", "preprocessor_config.json", PUBLISHED["facebook/dinov2-base"])
    write(tmp_path / "hub/user/timm", "config.json", {"architecture": "vit", "pretrained_cfg": TIMM["augreg"]})
    write(tmp_path / "hub/user/clip", "config.json", {"model_type": "clip"})
    write(tmp_path / "hub/user/clip", "preprocessor_config.json", {"size": 192})
    code = """
        import hf_vit
        for name in ("dinov2", "timm", "clip"):
            print(hf_vit.HfViTImageProcessor.from_pretrained(f"user/{name}").size["shortest_edge"])
    """
    with serve(tmp_path / "hub") as server:
        printed = run_with_package(code, tmp_path / "work", **server.client).stdout
    assert printed.split() == ["256", "248", "192"]


def test_without_the_package_foreign_options_are_refused(tmp_path):
    Processor().save_pretrained(tmp_path / "ours")
    ViTImageProcessor().save_pretrained(tmp_path / "vit")
    write(tmp_path / "timm", "config.json", {"pretrained_cfg": TIMM["augreg"]})
    code = """
        import sys
        kind = type(transformers.AutoImageProcessor.from_pretrained(sys.argv[1], trust_remote_code=True))
        print(kind.__name__)
        for foreign in sys.argv[2:]:
            try:
                kind.from_pretrained(foreign)
            except ValueError as error:
                print(error)
    """
    folders = [os.fspath(tmp_path / name) for name in ("ours", "vit", "timm")]
    name, vit, timm = run_without_package(code, tmp_path / "work", *folders).stdout.strip().splitlines()
    assert name == "HfViTImageProcessor"
    for folder, message in zip(folders[1:], (vit, timm), strict=True):
        assert repr(folder) in message
        assert "pip install ." in message
    assert "ViTImageProcessor" in vit
