"""The command `hf-vit`: one for all that the scripts do.

Usage: hf-vit COMMAND ...
"""

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module

from . import __version__
from .flags.parser import exit_in_one_line, nearest


# What each command is for; its function is `main` in the file of its name in `hf_vit.commands`, imported if it runs.
COMMANDS = {
    "train": "train a model of any task, pretraining too",
    "evaluate": "score a saved model",
    "predict": "predict labels, segments, depth, objects or keypoints of images",
    "features": "write the features of images to files, or score them",
    "visualize": "draw what a model attends to",
    "convert": "turn published checkpoints into ours, and ours into theirs",
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
    say = partial(print, flush=True)
    if name in ("-h", "--help"):
        say(help_page())
    elif name == "--version":
        say(f"hf-vit {__version__}")
    else:
        with exit_in_one_line(ValueError):
            if name not in COMMANDS:
                raise ValueError(f"There is no command {name!r}.{nearest(name, COMMANDS)} hf-vit --help names all.")
        command = import_module(f".commands.{name}", __package__)
        command.main(rest, command.__doc__, say)


def help_page() -> str:
    """Returns what `hf-vit --help` prints."""
    rows = [f"    {name:<12}{use}" for name, use in COMMANDS.items()]
    return "\n".join([(__doc__ or "").strip(), "", "Commands:", *rows, "", EXAMPLES])
