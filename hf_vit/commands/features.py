"""Extract image features to files, or evaluate extracted features by the classes of the images.

Usage: hf-vit features {extract,evaluate} ...

Examples:
    hf-vit features extract facebook/dinov2-base photos --features cls mean --output_dir outputs/features
    hf-vit features evaluate outputs/features
"""

import os
import sys
from collections.abc import Callable
from typing import Any

from ..features.extraction import extract_from_options


def extract(*, report: Callable[[str], None], **options: Any) -> None:
    """Extract features of images with a model and write them to parquet files.

    Usage: hf-vit features extract MODEL DATA [options]
    """
    try:
        extract_from_options(options, report)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"{os.path.basename(sys.argv[0])}: {error}")
