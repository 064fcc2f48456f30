"""Publishes a saved model on the Hugging Face Hub: weights, code, image processor and card, in one commit.

The model, for whatever task, then opens anywhere, as here one that classifies:
pipeline("image-classification", "user/name", trust_remote_code=True).

Examples:
    hf-vit push outputs/digits user/digits-vit --dry_run
    hf-vit push outputs/digits user/digits-vit --private
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from huggingface_hub import ModelCard

from ..training import publish
from ..training.publishing.hub import check_upload, list_upload


def describe(folder: Path) -> Iterator[str]:
    """Yields a line for each file that goes up with its size, and for what the card's metadata says."""
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in list_upload(folder)}
    for name, size in files.items():
        yield f"{size:>14,}  {name}"
    yield f"{sum(files.values()):>14,}  bytes in {len(files)} files"
    data = ModelCard.load(folder / "README.md").data
    yield f"license: {data.license or 'none'}, pipeline tag: {data.pipeline_tag or 'none'}"
    for result in data.eval_results or []:
        yield f"{result.metric_type} on {result.dataset_name}: {result.metric_value}"


def push(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str = "Upload model",
    dry_run: bool = False,
    report: Callable[[str], None] = print,
) -> None:
    """Checks, lists and uploads a model; raises as `check_upload` and `publish`.

    Args:
        folder: Folder of a saved model with its image processor and its card.
        repo_id: Name on the Hub, user/name; created if it does not exist.
        private: Make the new repository private.
        revision: Branch to upload to, created if it does not exist; main by default.
        create_pr: Open a pull request instead of writing.
        commit_message: For the history.
        dry_run: Check and list only; needs no network and no token.
        report: Prints a line.
    """
    check_upload(folder)
    report("\n".join(describe(folder)))
    if dry_run:
        report("Nothing was uploaded.")
        return
    report(f"Uploading to {repo_id} …")
    url = publish(
        folder, repo_id, private=private, revision=revision, create_pr=create_pr, commit_message=commit_message
    )
    report(url)
