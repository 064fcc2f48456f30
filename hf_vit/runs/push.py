"""Upload a saved model to the Hugging Face Hub: weights, code, image processor and card, in one commit.

The uploaded model opens without hf_vit being installed. For example, for an image classifier:
pipeline("image-classification", "user/name", trust_remote_code=True).

Examples:
    hf-vit push outputs/digits user/digits-vit --dry_run
    hf-vit push outputs/digits user/digits-vit --private
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from huggingface_hub import ModelCard

from ..training import publish
from ..training.hub import check_upload, list_upload


def describe(folder: Path) -> Iterator[str]:
    """Yield lines with the name and size in bytes of each file to upload, and with the metadata of the model card."""
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in list_upload(folder)}
    for name, size in files.items():
        yield f"{size:>14,}  {name}"
    yield f"{sum(files.values()):>14,}  bytes in {len(files)} files"
    data = ModelCard.load(folder / "README.md").data
    yield f"license: {data.license or 'none'}, pipeline tag: {data.pipeline_tag or 'none'}"
    for result in data.eval_results or []:
        yield f"{result.metric_type} on {result.dataset_name}: {result.metric_value}"


def push(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str = "Upload model",
    dry_run: bool = False,
    report: Callable[[str], None] = print,
) -> str | None:
    """Check, list and upload a saved model. Equivalent to `hf-vit push`.

    Raises the errors of `check_upload` and `publish`.

    Args:
        folder: Folder of a saved model with its image processor and card.
        repo_id: Repository on the Hub, as user/name; created if it does not exist.
        private: Create the repository as private.
        revision: Branch to upload to, created if it does not exist; by default main.
        create_pr: Open a pull request instead of committing to the branch.
        commit_message: Commit message.
        dry_run: Check and list the files without uploading them. This requires no network access and no token.
        report: Function that receives progress messages.

    Returns:
        The address of the commit or pull request; None for a dry run.
    """
    folder = Path(folder)
    check_upload(folder)
    report("\n".join(describe(folder)))
    if dry_run:
        report("Nothing was uploaded.")
        return None
    report(f"Uploading to {repo_id} …")
    url = publish(
        folder, repo_id, private=private, revision=revision, create_pr=create_pr, commit_message=commit_message
    )
    report(url)
    return url
