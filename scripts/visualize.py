"""Draws what a model attends to on photos: any model of ours, or a published ViT.

Writes <photo>_<kind>.png for each photo and <kind>.png for all together, by default all kinds that the model has:

    <photo>_attention    the attention of each head of each layer to the patches
    <photo>_rollout      the share of each patch that reaches the end: attention followed through all layers
    <photo>_saliency     the relevance of each patch for a class (of classifiers)
    <photo>_similarity   the similarity of one patch to all others
    pca                  patches in the colors of their principal components, the same in all photos

Photos are seen as a whole, in their proportions.

Examples:
    V=scripts/visualize.py
    python $V outputs/photos photo.jpg --output_dir outputs/maps
    python $V outputs/photos photo.jpg --output_dir outputs/maps --kinds attention similarity --point 320,200
    python $V facebook/dinov2-small folder_of_photos --output_dir outputs/maps --kinds pca
"""

import sys

from hf_vit import cli


def main(arguments: list[str]) -> None:
    """Draws by the arguments of the command line."""
    cli.main(["visualize", *arguments], __doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
