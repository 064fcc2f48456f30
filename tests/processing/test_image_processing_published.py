"""`from_pretrained` of the image processors with folders and repositories of other libraries."""

import json
import os

import pytest
import torch
from transformers import AutoImageProcessor, CLIPImageProcessor, ViTImageProcessor

from hf_vit import HfViTImageProcessor
from hf_vit.convert import load_image_processor
from hf_vit.convert.image_processor import image_processor_options, timm_image_processor_options

from ..convert.test_convert_image_processor import PUBLISHED, TIMM
from ..helpers.fresh import run_with_package, run_without_package
from ..helpers.hub import serve
from ..helpers.images import BACKENDS, noise


@pytest.fixture(params=BACKENDS)
def backend(request):
    return BACKENDS[request.param]


def write(folder, name, content):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content))
    return folder


def options_of(processor):
    return json.loads(processor.to_json_string())


@pytest.mark.parametrize("name", PUBLISHED)
def test_folder_of_another_class_is_read_as_that_class_means_it(tmp_path, backend, name):
    folder = write(tmp_path, "preprocessor_config.json", PUBLISHED[name])
    expected = options_of(backend(**image_processor_options(PUBLISHED[name], model_type="vit")))
    assert options_of(backend.from_pretrained(folder)) == expected
    assert options_of(backend.from_pretrained(folder / "preprocessor_config.json")) == expected


def test_int_size_of_clip_is_the_shortest_edge(tmp_path):
    write(tmp_path, "preprocessor_config.json", PUBLISHED["openai/clip-vit-base-patch32"])
    image = noise(300, 500, 3)
    ours, theirs = (
        kind.from_pretrained(tmp_path)(image, return_tensors="pt").pixel_values
        for kind in (HfViTImageProcessor, CLIPImageProcessor)
    )
    assert (ours - theirs).abs().mean() < 0.01


def test_file_without_a_class_has_that_of_the_model_beside_it(tmp_path, backend):
    for model_type, name in (("clip", "openai/clip-vit-base-patch32"), ("dinov2", "facebook/dinov2-base")):
        folder = write(tmp_path / model_type, "config.json", {"model_type": model_type})
        write(folder, "preprocessor_config.json", {"size": 224})
        named = {"image_processor_type": PUBLISHED[name].get("image_processor_type", "CLIPImageProcessor")}
        expected = options_of(backend(**image_processor_options({**named, "size": 224}, model_type="vit")))
        assert expected["size"] == {"shortest_edge": 224}
        for place in (folder, folder / "preprocessor_config.json"):
            assert options_of(backend.from_pretrained(place)) == expected
        assert options_of(load_image_processor(folder)) == options_of(HfViTImageProcessor.from_pretrained(folder))
    write(tmp_path / "alone", "preprocessor_config.json", {"size": 224})
    assert backend.from_pretrained(tmp_path / "alone").size == {"height": 224, "width": 224}
    write(folder, "config.json", {"model_type": "sam"})
    with pytest.raises(ValueError, match="model_type='sam' is unknown"):
        backend.from_pretrained(folder)


def test_what_is_translated_is_ours_once_saved(tmp_path, backend):
    source = write(tmp_path / "source", "preprocessor_config.json", PUBLISHED["facebook/dinov2-base"])
    processor = backend.from_pretrained(source, size={"shortest_edge": 64}, crop_size=56)
    assert (processor.size, processor.crop_size) == ({"shortest_edge": 64}, {"height": 56, "width": 56})
    processor.save_pretrained(tmp_path / "saved")
    again = AutoImageProcessor.from_pretrained(tmp_path / "saved", backend=processor.backend)
    assert type(again) is backend
    assert options_of(again) == options_of(processor)


def test_options_nested_in_the_processor_come_first(tmp_path, backend):
    clip = PUBLISHED["openai/clip-vit-base-patch32"]
    write(tmp_path, "processor_config.json", {"processor_class": "CLIPProcessor", "image_processor": clip})
    expected = options_of(backend(**image_processor_options(clip, model_type="clip")))
    assert options_of(backend.from_pretrained(tmp_path)) == expected
    write(tmp_path, "preprocessor_config.json", PUBLISHED["google/vit-base-patch16-224"])
    assert options_of(backend.from_pretrained(tmp_path)) == expected
    ours = backend(size=32, image_mean=0.25)
    write(tmp_path, "processor_config.json", {"image_processor": options_of(ours)})
    assert options_of(backend.from_pretrained(tmp_path)) == options_of(ours)


def test_timm_folder_is_read_from_its_config(tmp_path, backend):
    write(tmp_path, "config.json", {"architecture": "vit_base_patch16_224", "pretrained_cfg": TIMM["augreg"]})
    expected = options_of(backend(**timm_image_processor_options(TIMM["augreg"])))
    assert options_of(backend.from_pretrained(tmp_path)) == expected
    assert options_of(backend.from_pretrained(tmp_path / "config.json")) == expected


def test_derived_class_reads_what_it_has_saved(tmp_path):
    class Derived(HfViTImageProcessor):
        pass

    processor = Derived(size=32, resample=3)
    processor.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "preprocessor_config.json").read_text())["image_processor_type"] == "Derived"
    assert options_of(Derived.from_pretrained(tmp_path)) == options_of(processor)


def test_folder_without_options_is_refused(tmp_path, backend):
    with pytest.raises(OSError, match="Can't load image processor"):
        backend.from_pretrained(tmp_path)
    write(tmp_path, "config.json", {"model_type": "vit"})
    with pytest.raises(OSError, match=r"preprocessor_config\.json"):
        backend.from_pretrained(tmp_path)


def test_file_of_weights_is_refused_with_the_cure(tmp_path, backend):
    for name in ("vit.pth", "model.safetensors"):
        (tmp_path / name).write_bytes(b"\x80\x81")
        with pytest.raises(OSError, match=rf"{name}' is not a JSON file.*hf_vit\.convert\.load_image_processor"):
            backend.from_pretrained(tmp_path / name)


def test_class_that_is_not_known_is_refused_by_name(tmp_path, backend):
    write(tmp_path, "preprocessor_config.json", {"image_processor_type": "SamImageProcessor"})
    with pytest.raises(ValueError, match="Unknown image processor 'SamImageProcessor'"):
        backend.from_pretrained(tmp_path)


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
    HfViTImageProcessor().save_pretrained(tmp_path / "ours")
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


def test_pixels_of_a_translated_file_are_those_of_its_class(tmp_path, backend):
    write(tmp_path, "preprocessor_config.json", PUBLISHED["google/vit-base-patch16-224"])
    image = noise(300, 500, 3)
    ours, theirs = (
        kind.from_pretrained(tmp_path)(image, return_tensors="pt").pixel_values
        for kind in (backend, ViTImageProcessor)
    )
    torch.testing.assert_close(ours, theirs, atol=1.01 / 127.5, rtol=0)
