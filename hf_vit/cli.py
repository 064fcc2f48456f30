"""The command `hf-vit`: one for all that the scripts do.

Usage: hf-vit COMMAND ...
"""

# It answers `--help` and `--version` without the seconds that torch takes to be imported. As an import from the
# package would bring that, this file has none, and is installed beside the package too, from where the command is
# started.
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from io import TextIOWrapper


# What each command is for; its function is `main` in the file of its name in `hf_vit.commands`.
COMMANDS = {
    "train": "train a model of any task, pretraining too",
    "pretrain": "pretrain on your images, and measure what that is worth",
    "evaluate": "score a saved model",
    "predict": "predict labels, segments, depth, objects or keypoints of images",
    "features": "write the features of images to files, or score them",
    "visualize": "draw what a model attends to",
    "convert": "turn published checkpoints into ours, and ours into theirs",
    "export": "write a model for ONNX, OpenVINO, torch.export or ExecuTorch, checked at other sizes",
    "push": "publish a saved model on the Hugging Face Hub",
    "info": "tell what is installed, or what a model is",
}
EXAMPLES = """\
Examples:
    hf-vit train image-classification photos --minutes 10
    hf-vit evaluate outputs/photos-image-classification photos
    hf-vit predict outputs/photos-image-classification photo.jpg --picture labeled.png

hf-vit COMMAND --help tells more of a command."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command; exits with one line about what is wrong with it.

    Args:
        arguments: The command line without the program's name; by default that of this process.
    """
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of classes in a locale that cannot print them
    say = partial(print, flush=True)
    if name in ("-h", "--help"):
        say(help_page())
    elif name == "--version":
        say(f"hf-vit {import_module('importlib.metadata').version('hf-vit')}")
    elif name in COMMANDS:
        try:
            os.getcwd()
        except FileNotFoundError:  # transformers cannot be imported from there
            sys.exit("hf-vit: The working directory no longer exists. Change to another one: cd ~")
        command = import_module(f"hf_vit.commands.{name}")
        command.main(rest, command.__doc__, say)
    else:
        meant = " or ".join(get_close_matches(name, COMMANDS))
        sys.exit(f"hf-vit: There is no command {name!r}.{f' Did you mean {meant}?' * bool(meant)} --help names all.")


def help_page() -> str:
    """Returns what `hf-vit --help` prints."""
    rows = [f"    {name:<12}{use}" for name, use in COMMANDS.items()]
    return "\n".join([(__doc__ or "").strip(), "", "Commands:", *rows, "", EXAMPLES])
