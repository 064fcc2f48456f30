"""Publishes a saved model on the Hugging Face Hub: weights, code, image processor and card, in one commit.

The model, for whatever task, then opens anywhere, as here one that classifies:
pipeline("image-classification", "user/name", trust_remote_code=True).

Examples:
    python scripts/push_to_hub.py outputs/digits user/digits-vit --dry_run
    python scripts/push_to_hub.py outputs/digits user/digits-vit --private
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import ModelCard

from hf_vit.training import check_upload, list_upload, publish


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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


def main(arguments: list[str] | None = None) -> None:
    """Checks, lists and uploads."""
    parser = make_parser()
    args = vars(parser.parse_args(arguments))
    folder, repo_id, dry_run = (args.pop(name) for name in ("folder", "repo_id", "dry_run"))
    try:
        check_upload(folder)
        print("\n".join(describe(folder)))
        if dry_run:
            print("Nothing was uploaded.")
            return
        print(f"Uploading to {repo_id} …", flush=True)
        print(publish(folder, repo_id, **args))
    except (ValueError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()
