"""Training of the tokenizer that the embedded target and drafter share."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rapid.embedded.chat import (
    ASSISTANT,
    BOS,
    CHAT_TEMPLATE,
    END,
    PAD,
    SPECIAL_TOKENS,
    SYSTEM,
    USER,
    build_drafter_prompt,
    document_prompt,
)
from rapid.embedded.wording import syllables, wording

MAX_POSITIONS = 8192  # longest sequence of the embedded models

PLAIN_ENGLISH = """
You are a helpful assistant. Answer the question from the document, and only from the document.
This is a small model. It was trained to read short texts with invented names, and it knows nothing
of the world. If you ask for something else, it will answer with something that looks like one of
its own sentences. There is no other language in it. Please write what you want to know, and how
many words there should be. Thank you! Hello, how are you? Yes or no, that is what they said when we
could not find them. Who, when, where, why: these are good questions; "which of the two" is another.
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train the byte-level BPE tokenizer that both models share."""
    tokenizer = Tokenizer(models.BPE())
    # One digit is one token, so that a number is copied digit by digit whatever precedes it.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Syllables are separate words and the most frequent ones of the corpus. So their merges come
    # first, and a name is split into the same syllables wherever it occurs.
    corpus = [*syllables()] * 2000 + [*wording()] * 40 + [PLAIN_ENGLISH] * 20
    corpus += [
        document_prompt("document.txt", "A", "What is"),
        build_drafter_prompt("notes", "A", "List the"),
    ] * 40
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
