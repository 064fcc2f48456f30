"""A tokenizer of the captions at hand."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast


PAD, BEGIN, END = SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")


def train_tokenizer(captions: Iterable[str], vocab_size: int = 8192, max_length: int = 64) -> PreTrainedTokenizerFast:
    """Trains a tokenizer of byte pairs (https://arxiv.org/abs/1508.07909) that can write any text.

    As that of CLIP it knows no upper case, and puts a token before and one behind each text.

    Args:
        captions: Texts to learn from, of the training split.
        vocab_size: Number of tokens at most; few texts make fewer.
        max_length: Number of tokens after which texts are cut off, both included.

    Raises:
        ValueError: if there are fewer tokens than bytes, or texts with no room for a token.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(SPECIAL_TOKENS) + len(alphabet)
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size={vocab_size} must be at least {smallest}: one token for each byte, and three more."
        )
    if max_length < 3:
        raise ValueError(f"max_length={max_length} must be at least 3: a token, one before and one behind it.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase(), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(captions, trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in (BEGIN, END)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A {END}", special_tokens=ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BEGIN,
        eos_token=END,
        model_max_length=max_length,
        padding_side="right",
        model_input_names=["input_ids", "attention_mask"],
    )
