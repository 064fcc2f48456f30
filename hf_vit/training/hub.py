"""Publish a saved model on the Hugging Face Hub in one commit, without local paths, pickles or links."""

import itertools
import json
import math
import os
import re
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import httpx
from transformers import PreTrainedConfig
from transformers.dynamic_module_utils import get_relative_imports
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, logging
from yaml import YAMLError

from .. import __version__
from ..options.recipe import RECIPE_NAME
from ..outputs import AVERAGE_FOLDER
from ..tasks.common.arguments import split_sources
from .checkpoints import CHECKSUMS, missing_weights, read_checksums
from .output_folder import (
    ADAPTER_FOLDER,
    CARD,
    PLACE,
    REPORT_FILES,
    TRAINING_ARGS_JSON,
    is_named,
    output_files,
)


logger = logging.get_logger(__name__)
PICKLES = {".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt", ".pth"}
# Files with training options, which may contain local paths
OPTIONS = (RECIPE_NAME, TRAINING_ARGS_JSON, f"{ADAPTER_FOLDER}/{ADAPTER_CONFIG_NAME}")
SCRIPT = re.compile(r"(?<![\w./-])/\S*/(?=scripts/\w+\.py)")  # matches the path before `scripts/` in a command
TEXTS = {".json", ".jsonl", ".yaml", ".md"}


def list_upload(folder: str | os.PathLike[str]) -> list[Path]:
    """List the files of a saved model that are uploaded to the Hub.

    Args:
        folder: Folder of the saved model.

    Returns:
        Sorted paths of the files that a training run writes (`OUTPUT_FILES`): weights, code, configurations, model
        card and pictures, including averaged weights in `ema/` and an adapter in `adapter/`. Other files are excluded.

    Raises:
        ValueError: If a file is a symbolic link, which may point to any file.
    """
    return without_links(Path(folder), output_files(folder))


def without_links(folder: Path, files: list[Path]) -> list[Path]:
    """Return the files of a folder; raise `ValueError` if a file or a folder on its path is a symbolic link."""
    links = {path for file in files for path in (file, file.parent) if path != folder and path.is_symlink()}
    if links:
        names = ", ".join(sorted(path.relative_to(folder).as_posix() for path in links))
        raise ValueError(f"{folder} contains symbolic links, which are not uploaded: {names}. Replace them by files.")
    return files


def additions(folder: str | os.PathLike[str], repo_id: str) -> list[CommitOperationAdd]:
    """Return the upload operations of a model. Local paths are removed, and the card contains the repository name."""
    operations, names = [], names_of_paths(Path(folder))
    for path in list_upload(folder):
        name, content = path.relative_to(folder).as_posix(), without_local_paths(path, names)
        if content is not None and name == CARD:
            content = content.replace(PLACE.encode(), repo_id.encode())
        operations.append(CommitOperationAdd(name, path if content is None else content))
    return operations


def checkpoint_additions(folder: str | os.PathLike[str], path_in_repo: str) -> list[CommitOperationAdd]:
    """Return the operations that upload a checkpoint: SHA256SUMS and the files listed in it, unchanged."""
    names = sorted([CHECKSUMS, *read_checksums(Path(folder))])
    files = without_links(Path(folder), [Path(folder) / name for name in names])
    return [CommitOperationAdd(f"{path_in_repo}/{name}", file) for name, file in zip(names, files, strict=True)]


def check_upload(folder: str | os.PathLike[str]) -> None:
    """Check that a saved model is complete and safe to publish.

    Args:
        folder: Folder of the saved model.

    Raises:
        ValueError: If the configuration, the weights, the image processor, the code or the card is missing, if there
            is a pickle or a symbolic link, or if the metadata of the card cannot be read.
    """
    list_upload(folder)
    for place in (Path(folder), Path(folder) / AVERAGE_FOLDER):
        if place == Path(folder) or place.is_dir():
            _check_model(place)
    _check_card(Path(folder) / CARD)


def publish(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool | None = None,
    commit_message: str = "Upload model",
    revision: str | None = None,
    create_pr: bool = False,
    token: str | None = None,
) -> str:
    """Upload a saved model to the Hub in one commit; the repository is created if necessary.

    In the uploaded card, `repo_id` replaces "path/to/this/folder". In uploaded text files, local paths are replaced by
    the names of the files and folders; files in `folder` do not change. If an interrupted upload is repeated, files
    that have already been uploaded are not sent again. The commit is tagged (see `tag_version`).

    Args:
        folder: Folder of the model, its image processor and its card.
        repo_id: Name on the Hub, "user/name".
        private: Whether a new repository is private; `None` uses the default of the owner.
        commit_message: Message of the commit.
        revision: Branch of the commit, created if necessary, or pull request ("refs/pr/1"); `None` is the main branch.
        create_pr: Whether to open a pull request, which requires no write access, instead of a commit to `revision`.
        token: Access token. `None` uses the token saved by `hf auth login` or in HF_TOKEN.

    Returns:
        The URL of the repository or of the pull request.

    Raises:
        ValueError: If `check_upload` refuses the folder, `repo_id` is invalid, the Hub refuses the metadata of the
            card, or `private` is requested for a repository that is public.
        OSError: If there is no token, the token has no write access, or the Hub cannot be reached or returns an error.
    """
    check_upload(folder)
    # Use token=True, so that the client explains how to get a missing token instead of sending an anonymous request.
    api = HfApi(library_name="hf_vit", token=token if token is not None else True)
    with clear_errors(repo_id, api.endpoint):
        repository = api.create_repo(repo_id, private=private, exist_ok=True)
        if private and not api.model_info(repository.repo_id).private:
            raise ValueError(
                f"{repo_id} exists and is public. Make it private in its settings first, or leave `private` out."
            )
        if revision is not None and not revision.startswith("refs/") and not create_pr:
            api.create_branch(repository.repo_id, branch=revision, exist_ok=True)
        commit = api.create_commit(
            repository.repo_id,
            additions(folder, repository.repo_id),
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
        )
        if not create_pr and not (revision or "").startswith("refs/"):
            tag_version(api, repository.repo_id, commit.oid)
    return str(commit.pr_url or repository)


def tag_version(api: HfApi, repo_id: str, commit: str, token: str | None = None) -> None:
    """Tag a commit with the version of this package, for example "v0.1.0", unless the tag exists.

    The tag is a revision that always refers to the weights and code of this commit. If `token` is None, the token of
    `api` is used. If the Hub refuses the tag, a warning explains how to create it. The upload is complete without the
    tag.
    """
    tag = f"v{__version__}"
    try:
        api.create_tag(repo_id, tag=tag, revision=commit, exist_ok=True, token=token)
    except (httpx.TransportError, HfHubHTTPError) as error:
        logger.warning(
            f"The upload to {repo_id} is complete, but it could not be tagged {tag}: {str(error).splitlines()[0]} "
            f"Nothing needs to be uploaded again. Tag it with: hf repos tag create {repo_id} {tag} --revision {commit}"
        )


@contextmanager
def clear_errors(repo_id: str, endpoint: str, advice: str = "") -> Iterator[None]:
    """Context manager that converts Hub client errors into `OSError` with instructions, followed by `advice`."""
    try:
        yield
    except RuntimeError as error:  # raised if the upload of a large file failed
        if not isinstance(error.__cause__, httpx.TransportError | HfHubHTTPError):
            raise
        raise OSError(f"{error} {_explain(error.__cause__, repo_id, endpoint)}{advice}") from error
    except (httpx.TransportError, HfHubHTTPError) as error:
        raise OSError(f"{_explain(error, repo_id, endpoint)}{advice}") from error


def _explain(error: Exception, repo_id: str, endpoint: str) -> str:
    """Return an explanation of an error of the Hub client, with instructions."""
    again = "files that have been uploaded are not sent again."
    if not isinstance(error, HfHubHTTPError):
        advice = f"Check the network, or HF_ENDPOINT, and try again: {again}"
        return f"The Hub cannot be reached at {endpoint}: {error}. {advice}"
    if error.response.status_code in (401, 403):
        return (
            f"This token has no write access to {repo_id}. Log in with a token that has it (hf auth login), choose a "
            f"repository of your own, or open a pull request (create_pr). {error}"
        )
    if error.response.status_code >= 500:
        return f"The Hub reports a server error ({error}). Try again later: {again}"
    return str(error)


def _check_model(folder: Path) -> None:
    if not (folder / CONFIG_NAME).is_file():
        raise ValueError(
            f"{folder} is not a saved model: it has no {CONFIG_NAME}. Save a model there with model.save_pretrained."
        )
    if pickles := sorted(path.name for path in folder.iterdir() if path.suffix.lower() in PICKLES):
        raise ValueError(
            f"{folder} contains pickles, which can run any code when opened: {', '.join(pickles)}. Delete those of "
            "the training run (training_args.bin, optimizer.pt), and save weights as safetensors with "
            "save_pretrained."
        )
    if missing := missing_weights(folder):
        raise ValueError(
            f"The weights {', '.join(missing)} are missing in {folder}. Save the model there again with "
            "model.save_pretrained."
        )
    if not any((folder / name).is_file() for name in (IMAGE_PROCESSOR_NAME, PROCESSOR_NAME)):
        raise ValueError(
            f"{folder} has no {IMAGE_PROCESSOR_NAME}, which pipelines require. Save the image processor of the "
            "training run there with image_processor.save_pretrained."
        )
    auto_map = PreTrainedConfig.get_config_dict(folder)[0].get("auto_map")
    advice = "Save the model there again with model.save_pretrained in hf_vit, which copies the code."
    if not auto_map:
        raise ValueError(
            f"{folder / CONFIG_NAME} has no auto_map, so the model cannot be loaded without hf_vit. {advice}"
        )
    needed = {f"{reference.split('.')[0]}.py" for reference in auto_map.values()}
    needed |= {f"{name}.py" for path in folder.glob("*.py") for name in get_relative_imports(path)}
    if missing := sorted(name for name in needed if not (folder / name).is_file()):
        raise ValueError(f"The code files {', '.join(missing)} are missing in {folder}. {advice}")


def _check_card(card: Path) -> None:
    if not card.is_file():
        raise ValueError(
            f"The model card {card} is missing. It describes the model, its scores and its license. Write it with "
            "hf_vit.runs.write_model_card, or by hand."
        )
    try:
        metadata = ModelCard.load(card).data.to_dict()
    except (ValueError, YAMLError) as error:
        raise ValueError(f"The metadata of {card}, between two lines --- at its top, are invalid: {error}") from error
    if not metadata:
        raise ValueError(
            f"{card} has no metadata, from which the Hub reads license and task. Add at least `license: …` and "
            "`pipeline_tag: …` between two lines --- at its top, or use hf_vit.runs.write_model_card."
        )


def report_failure(upload: Future[Any]) -> None:
    """Log a warning if an upload in the background has failed, because its error would otherwise go unnoticed."""
    if not upload.cancelled() and (error := upload.exception()) is not None:
        logger.warning(f"An upload failed: {error} Training continues. Missing files are uploaded at the end.")


def names_of_paths(folder: Path) -> dict[str, str]:
    """Map local paths (the output folder and paths in the training options) to their last parts."""
    given = [str(folder), *(value for name in OPTIONS for value in _texts(_read(folder / name)))]
    names = {}
    for source in (source for value in given for source in split_sources(value)):
        place = Path(source).expanduser()
        if os.sep in source and place.name and os.path.exists(place):
            for path in (source.rstrip(os.sep), os.path.abspath(place), os.path.realpath(place)):
                names[path] = place.name
    return names


def without_local_paths(file: Path, names: dict[str, str]) -> bytes | None:
    """Return the content of a report file with names in place of local paths, or None for any other file."""
    if file.suffix not in TEXTS or not is_named(file.name, (*REPORT_FILES, ADAPTER_CONFIG_NAME)):
        return None
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".yaml" and (content := _read(file)) is not None:
        heading = "".join(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
        # infinite line width, which prevents YAML from wrapping paths
        text = heading + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=math.inf)
    for path in sorted(names, key=len, reverse=True):
        # A file may contain the path unquoted, or quoted for JSON, YAML or shell commands.
        forms = {path, json.dumps(path)[1:-1], path.replace("'", "''"), path.replace("'", "'\"'\"'")}
        for written in sorted(forms, key=len, reverse=True):
            text = re.sub(rf"(?<![\w./-]){re.escape(written)}(?![\w-])", names[path].replace("\\", r"\\"), text)
    text = SCRIPT.sub("", text)
    home = str(Path.home())
    return (text if len(home) == 1 else re.sub(rf"{re.escape(home)}(?![\w-])", "~", text)).encode()


def _read(file: Path) -> Any:
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None
    except yaml.YAMLError:
        return None


def _texts(content: Any) -> Iterator[str]:
    """Yield all strings in nested mappings and lists."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict | list):
        for value in content.values() if isinstance(content, dict) else content:
            yield from _texts(value)
