"""Publishes a saved model on the Hugging Face Hub: weights, code, image processor and card, in one commit.

The model, for whatever task, then opens anywhere, as here one that classifies:
pipeline("image-classification", "user/name", trust_remote_code=True).

Examples:
    hf-vit push outputs/digits user/digits-vit --dry_run
    hf-vit push outputs/digits user/digits-vit --private
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from huggingface_hub import ModelCard

from ..flags.parser import OneLineParser, exit_in_one_line
from ..training import check_upload, list_upload, publish


def make_parser(description: str | None) -> OneLineParser:
    """Returns the parser of the command line."""
    parser = OneLineParser(description, "push")
    parser.add_argument("folder", type=Path, help="folder of a saved model with its image processor and its card")
    parser.add_argument("repo_id", help="name on the Hub, user/name; made where it does not exist")
    parser.add_argument("--private", action="store_true", default=None, help="make the new repository private")
    parser.add_argument("--revision", help="branch to upload to, made where it does not exist (default: main)")
    parser.add_argument("--create_pr", action="store_true", help="open a pull request instead of writing")
    parser.add_argument("--commit_message", default="Upload model", help="for the history (default: Upload model)")
    parser.add_argument("--dry_run", action="store_true", help="check and list only; needs no network and no token")
    return parser


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


def main(arguments: Sequence[str], description: str | None, report: Callable[[str], None]) -> None:
    """Checks, lists and uploads, and exits with one line about what is wrong.

    Args:
        arguments: The command line without the program's name.
        description: Beginning of `--help`.
        report: Prints a line.
    """
    with exit_in_one_line(ValueError, OSError):
        args = vars(make_parser(description).parse_args(arguments))
        folder, repo_id, dry_run = (args.pop(name) for name in ("folder", "repo_id", "dry_run"))
        check_upload(folder)
        report("\n".join(describe(folder)))
        if dry_run:
            report("Nothing was uploaded.")
            return
        report(f"Uploading to {repo_id} …")
        report(publish(folder, repo_id, **args))
