"""Test the publication of models: uploaded files, rejected folders, and loading from the Hub."""

import io
import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers.trainer_pt_utils import safe_globals

from hf_vit import (
    HfViTForDepthEstimation,
    HfViTForImageClassification,
    HfViTForSemanticSegmentation,
    HfViTForUniversalSegmentation,
    HfViTImageProcessor,
    __version__,
)
from hf_vit.convert.model_card import escape_markdown
from hf_vit.model.pretrained import HfViTPreTrainedModel
from hf_vit.training import publish
from hf_vit.training.hub import additions, check_upload, list_upload

from ..helpers.fresh import run_command, run_with_package, run_without_package
from ..helpers.hub import TOKEN, Failure, Hub, digest, is_lfs, serve
from ..helpers.models import pixels, small_config
from ..helpers.references import draw_weights


PACKAGE = Path(__file__).parents[2] / "hf_vit" / "model"
CODE = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
NOWHERE = {"HF_ENDPOINT": "http://127.0.0.1:9"}
METADATA = ModelCardData(
    license="apache-2.0",
    pipeline_tag="image-classification",
    model_name="Shirts",
    eval_results=[EvalResult("image-classification", "clothing", "Clothing", "accuracy", 0.875)],
)
PLACEHOLDER = "path/to/this/folder"
CARD = f'---\n{METADATA.to_yaml()}\n---\n# Shirts\n\npipeline(model="{PLACEHOLDER}")\n'


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a saved classifier with all files of a training run."""
    folder = tmp_path_factory.mktemp("saved") / "clothing"
    save(HfViTForImageClassification(small_config()), folder)
    (folder / "README.md").write_text(CARD)
    (folder / "training_args.json").write_text("{}")
    (folder / "curves.png").write_bytes(b"a picture")
    others = ["checkpoint-2/optimizer.pt", "runs/events.1", ".cache/x.json", "__pycache__/x.py", "images/0.png"]
    others += ["_draft.txt", ".hidden.json", "notes.tmp", ".env", "id_rsa", "secrets.json", "own.py", "photo.png"]
    for other in others:
        (folder / other).parent.mkdir(exist_ok=True)
        (folder / other).write_text("stays here")
    return folder


def save(model: HfViTPreTrainedModel, folder: Path) -> None:
    draw_weights(model)
    model.save_pretrained(folder)
    HfViTImageProcessor.for_model(model.config).save_pretrained(folder)


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """Return a copy of the folder of the saved classifier."""
    return shutil.copytree(saved, tmp_path / "outputs" / "model")


@pytest.fixture(scope="module")
def published(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Hub, str]:
    """Return a mock of the Hub that contains the published model, and the output of the push command.

    The server of the mock has stopped, so that the mocks of other tests can reuse its port. With the same port,
    processes get the same environment and start faster.
    """
    with serve(tmp_path_factory.mktemp("root")) as hub:
        workdir = tmp_path_factory.mktemp("work")
        process = run_command("push", workdir, str(saved), "user/clothing", "--private", **hub.client)
    assert process.returncode == 0, process.stderr
    return hub, process.stdout


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in list_upload(folder)}


def uploaded(folder: Path, repo_id: str) -> dict[str, bytes]:
    """Return the expected uploads of a saved model, keyed by file name. The model card names the Hub repository."""
    card = (folder / "README.md").read_text()
    return {**contents(folder), "README.md": card.replace(PLACEHOLDER, repo_id).encode()}


def test_weights_card_code_and_pictures_are_uploaded(saved: Path) -> None:
    others = {"config.json", "model.safetensors", "preprocessor_config.json", "README.md"}
    assert {path.name for path in list_upload(saved)} == CODE | others | {"training_args.json", "curves.png"}


@pytest.mark.parametrize("name", ["curves.png", "recipe.yaml", "ema", "adapter"])
def test_links_are_refused_by_name(name: str, saved: Path, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(saved if "." not in name else saved / "secrets.json")
    for refused in (check_upload, list_upload):
        with pytest.raises(ValueError, match=rf"contains symbolic links, which are not uploaded: {name}"):
            refused(folder)


def test_uploaded_files_contain_no_local_paths(folder: Path, tmp_path: Path) -> None:
    photos = tmp_path / "client's data" / "photos é"
    photos.mkdir(parents=True)
    command = ["python", "/home/me/hf_vit/scripts/train_x.py", "--dataset_name", str(photos)]
    files = {
        "recipe.yaml": yaml.safe_dump({"dataset_name": f"{photos},user/other", "output_dir": str(folder)}),
        "training_args.json": json.dumps({"output_dir": str(folder), "hub_token": "<HUB_TOKEN>"}),
        "trainer_state.json": json.dumps({"best_model_checkpoint": f"{folder}/checkpoint-2"}),
        "test_predictions.jsonl": json.dumps({"file": f"{photos}/cat/0.png", "label": "a/b"}) + "\n",
        "README.md": f"{CARD}{shlex.join(command)}\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    sent = {addition.path_in_repo: addition.path_or_fileobj for addition in additions(folder, "user/model")}
    texts = {name: sent[name].decode() for name in files}
    for name, text in texts.items():
        assert str(tmp_path) not in text
        assert "client" not in text
        assert (folder / name).read_text() == files[name]
    assert yaml.safe_load(texts["recipe.yaml"]) == {"dataset_name": "photos é,user/other", "output_dir": "model"}
    assert json.loads(texts["trainer_state.json"]) == {"best_model_checkpoint": "model/checkpoint-2"}
    assert json.loads(texts["test_predictions.jsonl"]) == {"file": "photos é/cat/0.png", "label": "a/b"}
    command[1:] = ["scripts/train_x.py", "--dataset_name", "photos é"]
    assert texts["README.md"].endswith(f"{shlex.join(command)}\n")


def test_shards_go_up_with_their_index(saved: Path, folder: Path) -> None:
    HfViTForImageClassification.from_pretrained(saved).save_pretrained(folder, max_shard_size="50KB")
    names = {path.name for path in list_upload(folder)}
    shards = {name for name in names if name.startswith("model-0000")}
    assert len(shards) > 1
    assert "model.safetensors.index.json" in names
    check_upload(folder)
    (folder / max(shards)).unlink()
    with pytest.raises(ValueError, match=f"The weights {max(shards)} are missing in .* Save the model there again"):
        check_upload(folder)


def test_script_publishes_every_listed_file_in_one_commit(published: tuple[Hub, str], saved: Path) -> None:
    hub, output = published
    first, commit = hub.commits
    assert (first.summary, commit.summary, commit.revision) == ("initial commit", "Upload model", "main")
    assert sorted(commit.written) == [path.name for path in list_upload(saved)]
    assert commit.files == uploaded(saved, "user/clothing")
    assert hub.private == {"user/clothing"}
    assert output.endswith(f"Uploading to user/clothing …\n{hub.endpoint}/user/clothing\n")
    # The code example in the uploaded model card loads the model from the Hub.
    card = hub.find("user/clothing").files["README.md"].decode()
    assert card == CARD.replace('model="path/to/this/folder"', 'model="user/clothing"') != CARD
    assert (saved / "README.md").read_text() == CARD


def test_dry_run_lists_everything_and_contacts_nobody(saved: Path, tmp_path: Path) -> None:
    process = run_command("push", tmp_path, str(saved), "user/clothing", "--dry_run", **NOWHERE)
    assert (process.returncode, process.stderr) == (0, "")
    lines = process.stdout.splitlines()
    sizes = {path.name: path.stat().st_size for path in list_upload(saved)}
    joined = (line.replace(",", "").split(maxsplit=1) for line in lines[: len(sizes)])
    assert {name: int(size) for size, name in joined} == sizes
    assert lines[len(sizes) :] == [
        f"{sum(sizes.values()):>14,}  bytes in {len(sizes)} files",
        "license: apache-2.0, pipeline tag: image-classification",
        "accuracy on Clothing: 0.875",
        "Nothing was uploaded.",
    ]


# Each entry lists changed files of a saved model, their new content (None: deleted), and the expected error message.
REFUSED = (
    ("config.json", None, r"no config.json. .*model.save_pretrained"),
    ("model.safetensors", None, "The weights model.safetensors are missing in"),
    (
        "training_args.bin pytorch_model.bin",
        "",
        r"opened: pytorch_model.bin, training_args.bin. Delete .*training_args.bin.*save_pretrained",
    ),
    ("preprocessor_config.json", None, r"no preprocessor_config.json, .*image_processor.save_pretrained"),
    ("modeling_hf_vit.py", None, r"The code files modeling_hf_vit.py are missing .*save_pretrained in hf_vit"),
    ("encoder.py", None, r"The code files encoder.py are missing .*save_pretrained in hf_vit"),
    ("config.json", '{"model_type": "hf_vit"}', r"has no auto_map, .*save_pretrained in hf_vit"),
    ("README.md", None, r"The model card .* is missing.*hf_vit.runs.write_model_card"),
    ("README.md", "# Shirts\n", "has no metadata.*license: …"),
    ("README.md", "---\nlicense: [mit\n---\n", r"metadata of .*README.md, .* are invalid: .*\]"),
    ("README.md", "---\nmodel-index: none\n---\n", r"metadata of .*README.md, .* are invalid: .*model_index"),
)


@pytest.mark.parametrize(("names", "content", "message"), REFUSED)
def test_bad_folder_or_name_is_refused_before_anything_is_sent(
    names: str, content: str | None, message: str, saved: Path, folder: Path
) -> None:
    for name in names.split():
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(content)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        publish(folder, "user/clothing", token="hf_nobody")
    with pytest.raises(ValueError, match="'user/name/vit'"):
        publish(saved, "user/name/vit", token="hf_nobody")


@pytest.mark.parametrize(
    ("token", "begins", "contains"),
    [
        (None, "hf-vit: ", "hf auth login"),
        (TOKEN, "hf-vit: The Hub cannot be reached at http://127.0.0.1:9: ", "Check the network"),
    ],
)
def test_script_says_what_is_wrong_without_a_traceback(
    token: str | None, begins: str, contains: str, saved: Path, tmp_path: Path
) -> None:
    # The token is in a file, because a token in an environment variable would slow down the start of the process.
    if token:
        (tmp_path / "hf_home").mkdir()
        (tmp_path / "hf_home" / "token").write_text(token)
    process = run_command("push", tmp_path, str(saved), "user/clothing", **NOWHERE)
    assert process.returncode == 1
    assert process.stderr.startswith(begins)
    assert contains in process.stderr
    assert "Traceback" not in process.stderr


PUBLISH_AGAIN = """
import sys
from pathlib import Path
from hf_vit.training import publish

folder = Path(sys.argv[1])
endpoint = publish(folder, "user/shirts").removesuffix("/user/shirts")
assert publish(folder, "user/shirts", commit_message="Nothing new") == f"{endpoint}/user/shirts"
(folder / "README.md").write_text((folder / "README.md").read_text() + "More.")
assert publish(folder, "user/shirts", commit_message="More") == f"{endpoint}/user/shirts"
(folder / "curves.png").write_bytes(b"another picture")
publish(folder, "user/shirts", revision="v2", commit_message="On a branch")
assert publish(folder, "user/shirts", create_pr=True) == f"{endpoint}/user/shirts/discussions/1"
(folder / "curves.png").write_bytes(b"a third picture")
publish(folder, "user/shirts", revision="refs/pr/1", commit_message="To the pull request")
for options, name, kind, message in (
    ({}, "else/shirts", OSError, "has no write access to else/shirts"),
    ({"token": "hf_stale"}, "user/shirts", OSError, "has no write access to user/shirts"),
    ({"private": True}, "user/shirts", ValueError, "user/shirts exists and is public"),
):
    try:
        publish(folder, name, **options)
    except kind as error:
        assert message in str(error), error
    else:
        raise AssertionError(name)
"""


def test_repeated_upload_sends_only_changes_to_the_given_branch(saved: Path, folder: Path, tmp_path: Path) -> None:
    with serve(tmp_path / "root") as hub:
        run_with_package(PUBLISH_AGAIN, tmp_path / "work", str(folder), **hub.client)
    first, *later = [commit for commit in hub.commits if commit.summary != "initial commit"]
    assert first.files == uploaded(saved, "user/shirts")
    assert [(commit.summary, commit.revision, commit.written) for commit in later] == [
        ("More", "main", ["README.md"]),
        ("More", "v2", ["README.md"]),  # the new branch is created from main
        ("On a branch", "v2", ["curves.png"]),
        ("Upload model", "refs/pr/1", ["curves.png"]),
        ("To the pull request", "refs/pr/1", ["curves.png"]),
    ]
    expected = uploaded(folder, "user/shirts")
    assert hub.find("user/shirts").files == {**expected, "curves.png": b"a picture"}
    assert hub.find("user/shirts", "refs/pr/1").files == expected
    assert {commit.repo for commit in hub.commits} == {"user/shirts"}


@pytest.mark.parametrize("status", [403, 500])
def test_an_upload_whose_tag_fails_is_complete(saved: Path, tmp_path: Path, status: int) -> None:
    with serve(tmp_path / "root") as hub:
        hub.failures = [Failure("tag", status)]
        done = run_command("push", tmp_path / "work", str(saved), "user/shirts", **hub.client)
        (commit,) = [commit for commit in hub.commits if commit.summary != "initial commit"]
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("user/shirts")
    assert commit.files == uploaded(saved, "user/shirts")
    assert "The upload to user/shirts is complete, but it could not be tagged" in done.stderr
    assert f"--revision {commit.oid}" in done.stderr


PUBLISH_INTERRUPTED = """
import sys
from hf_vit.training import publish

for message in ("Error while uploading '.*' to the Hub. The Hub reports a", "cannot be reached", "a server error"):
    try:
        publish(sys.argv[1], "user/shirts")
    except OSError as error:
        assert __import__("re").search(message, str(error)), error
        assert "not sent again" in str(error)
    else:
        raise AssertionError(message)
publish(sys.argv[1], "user/shirts")
publish(sys.argv[1], "user/shirts", commit_message="Nothing new")
"""


def test_an_upload_that_breaks_off_is_resumed_and_tagged_when_it_is_whole(saved: Path, tmp_path: Path) -> None:
    failures = [("lfs_upload", 507), ("lfs_upload", None), ("commit", None), ("commit", 500)]
    with serve(tmp_path / "root") as hub:
        hub.failures = [
            Failure(*failure) for failure in failures
        ]  # the client repeats uploads if the connection is lost
        run_with_package(PUBLISH_INTERRUPTED, tmp_path / "work", str(saved), **hub.client)
    assert hub.failures == []
    _, commit = hub.commits
    assert commit.files == uploaded(saved, "user/shirts")
    assert sorted(hub.uploads) == sorted(digest(path, commit.files[path]) for path in commit.files if is_lfs(path))
    assert hub.tags == {("user/shirts", f"v{__version__}"): commit.oid}


PUSH = """
import sys
import huggingface_hub
from hf_vit import HfViTForImageClassification, HfViTImageProcessor, runs

if huggingface_hub.__version__ < "2":  # which asks huggingface.co, whatever the endpoint
    huggingface_hub.ModelCard.validate = lambda card, repo_type=None: None
HfViTForImageClassification.from_pretrained(sys.argv[1]).push_to_hub("user/pieces")
HfViTImageProcessor.from_pretrained(sys.argv[1]).push_to_hub("user/pieces")
huggingface_hub.ModelCard.load(sys.argv[1] + "/README.md").push_to_hub("user/pieces")
"""


def test_push_to_hub_uploads_model_processor_and_card(saved: Path, tmp_path: Path) -> None:
    with serve(tmp_path) as hub:
        run_with_package(PUSH, tmp_path / "work", str(saved), **hub.client)
    files = hub.find("user/pieces").files
    expected = contents(saved)
    assert set(files) > CODE
    assert set(files) == set(expected) - {"training_args.json", "curves.png"}
    for name in files.keys() - {"config.json"}:
        assert files[name] == expected[name], name


TRAIN = """
import sys
from concurrent.futures import Future
from pathlib import Path

from transformers import TrainerCallback, TrainingArguments
from transformers.utils import PushInProgress
from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor, data, training

config = HfViTConfig.from_preset("mnist", hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
processor = HfViTImageProcessor.for_model(config)
digits = data.load_digits_dataset()["train"].select(range(32))

class WaitForPush(TrainerCallback):
    def on_save(self, *args, **kwargs):
        trainer._finish_current_push()
        [job.result() for job in trainer.push_in_progress.jobs]

def make_trainer(strategy, **options):
    args = TrainingArguments(
        strategy, max_steps=4, save_steps=2, remove_unused_columns=False, use_cpu=True, disable_tqdm=True,
        push_to_hub=True, hub_model_id=f"user/{strategy}", hub_strategy=strategy, **options,
    )
    folder = Path(args.output_dir)
    (folder / "runs").mkdir(parents=True)
    (folder / "runs" / "events").write_text("logs")
    (folder / "training_args.bin").write_text("left by another training")
    (folder / ".env").write_text("TOKEN=1")
    (folder / "keys").mkdir()
    (folder / "keys" / "model.safetensors").write_text("not of this model")
    return folder, training.HfViTTrainer(
        model=HfViTForImageClassification(config), args=args, train_dataset=digits, processing_class=processor,
        data_collator=data.ImageClassificationCollator(processor),
    )

for strategy in ("every_save", "checkpoint", "all_checkpoints"):
    folder, trainer = make_trainer(strategy)
    trainer.add_callback(WaitForPush())
    trainer.train()
    (folder / "README.md").write_text(sys.argv[1])
    trainer.push_to_hub()

folder, trainer = make_trainer("end", hub_revision="main")
trainer.train()
trainer.push_to_hub()
trainer.args.learning_rate = 0.125
trainer.push_to_hub(commit_message="Another end")

# With an upload that never ends, there is none beside it unless asked for.
trainer.args.hub_strategy = "every_save"
trainer.push_in_progress = PushInProgress([Future()])
trainer._push_from_checkpoint(str(folder / "checkpoint-2"))
assert len(trainer.push_in_progress.jobs) == 1
trainer.args.hub_always_push = True
trainer._push_from_checkpoint(str(folder / "checkpoint-4"))
trainer.push_in_progress.jobs[1].result()

# A repository that the arguments do not speak of, made when it is asked for.
trainer.hub_model_id, trainer.args.hub_model_id = None, "user/late"
trainer.model.add_model_tags("digits")
trainer.push_to_hub("Late", blocking=False, private=True, tags="small").result()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Hub, Path]:
    """Return the mock Hub with the uploads of a training run per hub strategy, and the folder of these runs."""
    workdir = tmp_path_factory.mktemp("work")
    with serve(tmp_path_factory.mktemp("root")) as hub:
        run_with_package(TRAIN, workdir, CARD, **hub.client)
    return hub, workdir


def test_training_pushes_when_its_strategy_says(trained: tuple[Hub, Path]) -> None:
    first, second = (f"Training in progress, step {step}" for step in (2, 4))
    for strategy, summaries in {
        "end": ["End of training", "Another end", second],
        "every_save": [first, second, "End of training"],
        "checkpoint": [first, f"{first}, checkpoint", second, f"{second}, checkpoint", "End of training"],
    }.items():
        commits = [commit.summary for commit in trained[0].commits if commit.repo == f"user/{strategy}"]
        assert commits == ["initial commit", *summaries]


def test_training_pushes_its_arguments_as_json_and_only_what_it_has_written(trained: tuple[Hub, Path]) -> None:
    hub, workdir = trained
    written = {path for commit in hub.commits for path in commit.written}
    for other in ("training_args.bin", ".env", "keys", "events"):
        assert not [path for path in written if other in path]
    assert not list(workdir.rglob("training_args.bin"))
    assert len(list(workdir.glob("*/runs/events"))) == 4  # TensorBoard logs are saved but not uploaded
    for strategy in ("end", "every_save", "checkpoint", "all_checkpoints"):
        files = hub.find(f"user/{strategy}").files
        assert json.loads(files["training_args.json"])["hub_strategy"] == strategy
        assert TOKEN not in files["training_args.json"].decode()
        assert {*CODE, "model.safetensors", "preprocessor_config.json", "README.md"} <= set(files)
        assert "trainer_state.json" not in files


def test_training_pushes_the_weights_of_its_last_step(trained: tuple[Hub, Path]) -> None:
    hub, workdir = trained
    first, second = (commit for commit in hub.commits if commit.repo == "user/every_save" and "step" in commit.summary)
    for commit, step in ((first, 2), (second, 4)):
        weights = (workdir / "every_save" / f"checkpoint-{step}" / "model.safetensors").read_bytes()
        assert commit.files["model.safetensors"] == weights
    assert first.files["model.safetensors"] != second.files["model.safetensors"]


def test_training_pushes_its_checkpoints_where_asked_and_their_pickles_run_no_code(trained: tuple[Hub, Path]) -> None:
    hub, workdir = trained
    for strategy, folders in {
        "every_save": set(),
        "checkpoint": {"last-checkpoint"},
        "all_checkpoints": {"checkpoint-2", "checkpoint-4"},
    }.items():
        files = hub.find(f"user/{strategy}").files
        assert {path.split("/")[0] for path in files if "checkpoint" in path} == folders
    files = hub.find("user/checkpoint").files
    for path in (workdir / "checkpoint" / "checkpoint-4").iterdir():
        assert files[f"last-checkpoint/{path.name}"] == path.read_bytes()
    pickles = {Path(path).name for path in files if Path(path).suffix in {".bin", ".pt", ".pth"}}
    assert pickles == {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    with safe_globals():  # allows NumPy arrays in pickles, like the Trainer
        for name in pickles:
            assert torch.load(io.BytesIO(files[f"last-checkpoint/{name}"]), weights_only=True)


def test_training_keeps_a_card_that_stands_there_and_renews_its_own(trained: tuple[Hub, Path]) -> None:
    hub, _ = trained
    assert hub.find("user/every_save").files["README.md"].decode() == CARD.replace(PLACEHOLDER, "user/every_save")
    ends = [commit for commit in hub.commits if commit.repo == "user/end"][1:3]
    drafts = [commit.files["README.md"].decode() for commit in ends]
    assert ["learning_rate: 0.125" in draft for draft in drafts] == [False, True]
    assert ModelCard(drafts[0]).data.library_name == "transformers"
    # A model can also be pushed to a private repository after training.
    assert hub.private == {"user/late"}
    assert hub.find("user/late").summary == "Late"
    card = ModelCard(hub.find("user/late").files["README.md"].decode())
    assert card.data.model_name == "late"
    assert {"small", "digits"} <= set(card.data.tags)


OPEN = """
saved = torch.load(sys.argv[1], weights_only=True)
pipe = transformers.pipeline("image-classification", "user/clothing", trust_remote_code=True)
assert type(pipe.model).__module__.startswith("transformers_modules.user.clothing"), type(pipe.model)
with torch.no_grad():
    assert torch.equal(pipe.model(saved["images"]).logits, saved["logits"])
assert len(pipe(__import__("PIL.Image").Image.new("RGB", (40, 30)), top_k=5)) == 5
from huggingface_hub import snapshot_download
folder = snapshot_download("user/clothing")
pipe = transformers.pipeline("image-classification", folder, trust_remote_code=True)
with torch.no_grad():
    assert torch.equal(pipe.model(saved["images"]).logits, saved["logits"])
print(folder)
"""


def test_published_model_opens_without_the_package_and_then_without_a_network(
    published: tuple[Hub, str], saved: Path, tmp_path: Path
) -> None:
    model = HfViTForImageClassification.from_pretrained(saved).eval()
    images = pixels(model.config)
    with torch.no_grad():
        torch.save({"images": images, "logits": model(images).logits}, tmp_path / "data.pt")
    with serve(tmp_path / "root") as hub:
        hub.commits += published[0].commits
        for environment in (hub.client, {"HF_HUB_OFFLINE": "1"}):
            process = run_without_package(OPEN, tmp_path / "work", str(tmp_path / "data.pt"), **environment)
            downloaded = Path(process.stdout.split()[-1])
            assert {path.name: path.read_bytes() for path in downloaded.iterdir()} == uploaded(saved, "user/clothing")


DENSE = {
    "semantic": (HfViTForSemanticSegmentation, "image-segmentation", {}),
    "universal": (
        HfViTForUniversalSegmentation,
        "image-segmentation",
        {"universal_segmentation_config": {"num_queries": 2, "num_blocks": 1}},
    ),
    "depth": (HfViTForDepthEstimation, "depth-estimation", {}),
}
PUBLISH_ALL = """
from hf_vit.training import publish

for name in ("semantic", "universal", "depth"):
    publish(name, f"user/{name}")
"""
# The pipeline gets no task argument: it reads the task from the model card.


OPEN_ALL = """
saved, image = torch.load("outputs.pt", weights_only=True), __import__("PIL.Image").Image.new("RGB", (40, 30))
for name, (kind, model_class, expected) in saved.items():
    pipe = transformers.pipeline(model=f"user/{name}", trust_remote_code=True)
    assert (pipe.task, type(pipe.model).__name__) == (kind, model_class)
    with torch.no_grad():
        assert torch.equal(pipe.model(torch.ones(1, 3, 32, 32))[0], expected), name
    print(name, type(pipe(image)).__name__)
"""


@pytest.mark.nightly  # `test_remote_code.py` also loads models of all tasks
def test_published_dense_models_open_in_stock_pipelines(tmp_path: Path) -> None:
    saved = {}
    for name, (model_class, kind, options) in DENSE.items():
        model = model_class(small_config(**options)).eval()
        save(model, tmp_path / name)
        card = ModelCardData(license="apache-2.0", library_name="transformers", pipeline_tag=kind)
        (tmp_path / name / "README.md").write_text(f"---\n{card.to_yaml()}\n---\n# Pixels\n")
        with torch.no_grad():
            saved[name] = kind, model_class.__name__, model(torch.ones(1, 3, 32, 32))[0]
    torch.save(saved, tmp_path / "outputs.pt")
    with serve(tmp_path / "root") as hub:
        run_with_package(PUBLISH_ALL, tmp_path, **hub.client)
        printed = run_without_package(OPEN_ALL, tmp_path, **hub.client).stdout
    assert printed.splitlines() == ["semantic list", "universal list", "depth dict"]


def test_names_of_classes_are_shown_as_they_are_in_cards() -> None:
    hostile = "a|b`c` <img src=x>\n# [here](http://x.y) *z* _w_ me@x.y www.x.y"
    escaped = escape_markdown(hostile)
    assert escaped == (r"a\|b\`c\` &lt;img src=x> # \[here\](http:\/\/x.y) \*z\* \_w\_ me\@x.y www\.x.y")
    for plain in ("left_shoulder", "t-shirt", "black & white", "C#", "über 50 %"):
        assert escape_markdown(plain) == plain
    assert escape_markdown("&lt;b>") == "&amp;lt;b>"
