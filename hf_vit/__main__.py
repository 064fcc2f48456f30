"""Run the command `hf-vit` as `python -m hf_vit`."""

import sys

from .cli import main


if __name__ == "__main__":
    sys.argv[0] = "hf-vit"  # program name in error messages
    main()
