"""Our Trainers override public methods of transformers, and as few private ones as possible."""

from collections.abc import Iterator

from transformers import Trainer

import hf_vit.training
from hf_vit.training.evaluator_trainer import EvaluatorTrainer


# transformers uploads pickles during training. No public method or event comes between writing the last file of a
# checkpoint and deleting old checkpoints.
PRIVATE = {"_push_from_checkpoint", "_save_checkpoint"}


def subclasses_of(kind: type) -> Iterator[type]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from subclasses_of(subclass)


def test_trainers_override_two_private_methods_of_the_library() -> None:
    ours = [kind for kind in subclasses_of(Trainer) if kind.__module__.startswith(f"{hf_vit.__name__}.")]
    assert hf_vit.training.HfViTTrainer in ours
    assert EvaluatorTrainer in ours
    own = {name for name in vars(Trainer) if name.startswith("_") and not name.startswith("__")}
    assert {name for kind in ours for name in own & vars(kind).keys()} == PRIVATE
