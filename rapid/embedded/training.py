"""Training of the embedded tokenizer, target and drafter on generated text.

    python -m rapid.embedded.training tokenizer
    python -m rapid.embedded.training target
    python -m rapid.embedded.training drafter

Each model takes one CPU core an hour. Two choices make it possible to learn the lookup of facts in
that time: a large part of each row is questions and answers about one document, and documents
start short. Questions without an answer in the text come last, because from the start they would
teach guessing.
"""

import argparse
import random
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rapid.embedded import DRAFTER, TARGET
from rapid.embedded.generator import (
    CHARACTERS_PER_TOKEN,
    DocumentKind,
    DocumentMix,
    GeneratedDocument,
    Question,
    absent_questions,
    generate_document,
    syllables,
    wording,
)

VOCABULARY_SIZE = 1024
MAX_POSITIONS = 8192
CHUNK_TOKENS = 64

BOS, PAD, SYSTEM, USER, ASSISTANT, END = SPECIAL_TOKENS = (
    "<|bos|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

PLAIN_ENGLISH = """
You are a helpful assistant. Answer the question from the document, and only from the document.
This is a small model. It was trained to read short texts with invented names, and it knows nothing
of the world. If you ask for something else, it will answer with something that looks like one of
its own sentences. There is no other language in it. Please write what you want to know, and how
many words there should be. Thank you! Hello, how are you? Yes or no, that is what they said when we
could not find them. Who, when, where, why: these are good questions; "which of the two" is another.
"""

FACTS_ONLY = DocumentMix(fact=0.8, recite=0.0, list=0.0, filler=0.2)
EVERYTHING = None  # the default mix of the document's kind
KINDS: tuple[DocumentKind, ...] = ("chronicle", "contract", "clinical", "ledger")
KIND_WEIGHTS = (0.37, 0.21, 0.21, 0.21)  # only chronicles have entries, the hardest to learn


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the curriculum.

    Attributes:
        until: Share of the training time at which the stage ends.
        lengths: Row lengths to draw from, in tokens.
        mix: Ingredients of the documents; None takes the default of their kind.
        absent: Share of questions that the text does not answer.
    """

    until: float
    lengths: tuple[int, ...]
    mix: DocumentMix | None
    absent: float = 0.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """The size and the training of one of the two models.

    Attributes:
        path: Directory of the checkpoint.
        retrieved: Share of rows in the drafter's form, with retrieved chunks instead of a document.
        tokens_per_step: Approximate batch size, in tokens.
    """

    path: Path
    hidden_size: int
    num_attention_heads: int
    stages: tuple[Stage, ...]
    retrieved: float
    tokens_per_step: int = 6144
    learning_rate: float = 4e-3
    num_hidden_layers: int = 4
    num_key_value_heads: int = 2
    seed: int = 1


RECIPES = {
    "target": Recipe(
        path=TARGET,
        hidden_size=128,
        num_attention_heads=4,
        stages=(
            Stage(0.10, (192,), FACTS_ONLY),
            Stage(0.22, (256, 384), EVERYTHING),
            Stage(0.42, (512, 768), EVERYTHING),
            Stage(0.76, (512, 768, 1024, 1536), EVERYTHING),
            Stage(1.00, (768, 1024, 1536, 2304), EVERYTHING, absent=0.25),
        ),
        retrieved=0.2,
    ),
    "drafter": Recipe(
        path=DRAFTER,
        hidden_size=192,
        num_attention_heads=6,
        stages=(
            Stage(0.12, (192,), FACTS_ONLY),
            Stage(0.30, (256, 384), EVERYTHING),
            Stage(0.74, (512, 640, 768), EVERYTHING),
            Stage(1.00, (640, 768), EVERYTHING, absent=0.25),
        ),
        retrieved=0.7,
    ),
}


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
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Syllables are separate words and the most frequent ones of the corpus. So their merges come
    # first, and a name is split into the same syllables wherever it occurs.
    corpus = [*syllables()] * 2000 + [*wording()] * 40 + [PLAIN_ENGLISH] * 20
    corpus += [
        document_prompt("document.txt", "A", "What is"),
        retrieved_prompt("notes", "A", "List the"),
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


def document_prompt(name: str, text: str, question: str) -> str:
    """Return the target's user message: the whole document, then the question."""
    return f'Document "{name}":\n{text}\n\n{question}'


def retrieved_prompt(name: str, chunks: Sequence[str], question: str) -> str:
    """Return the drafter's user message: chunks in document order, then the question."""
    joined = "\n\n".join(chunks)
    return f'Retrieved text chunks of "{name}":\n{joined}\n\n{question}'


class RowMaker:
    """A maker of training rows: one document, then as many questions and answers as fit."""

    def __init__(self, tokenizer: Tokenizer, seed: str, retrieved: float) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)
        self._retrieved = retrieved
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self._ids = {token: vocabulary[token] for token in SPECIAL_TOKENS}

    def batch(self, stage: Stage, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and answer marks, both `[rows, length]`, of about `num_tokens`."""
        length = self._rng.choice(stage.lengths)
        rows = [self._row(stage, length) for _ in range(max(1, num_tokens // length))]
        ids = torch.full((len(rows), length), self._ids[PAD])
        is_answer = torch.zeros((len(rows), length), dtype=torch.bool)
        for i, (row, marks) in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
            is_answer[i, : len(marks)] = torch.tensor(marks)
        return ids, is_answer

    def _row(self, stage: Stage, length: int) -> tuple[list[int], list[bool]]:
        while True:
            prompt, questions = self._prompt(stage, length)
            if not questions:
                continue
            first, *others = questions
            # The first question is encoded together with the document: encoded separately, the
            # line feeds before it would be tokenized differently than in serving.
            ids = [self._ids[BOS], self._ids[USER], *self._encode(prompt + first.question)]
            if len(ids) < 0.75 * length:
                break
        marks = [False] * len(ids)
        self._extend(ids, marks, [], first)
        for question in others:
            if len(ids) >= length:
                break
            asked = self._encode(question.question)
            self._extend(ids, marks, [self._ids[USER], *asked], question)
        return ids[:length], marks[:length]

    def _extend(
        self, ids: list[int], marks: list[bool], asked: list[int], question: Question
    ) -> None:
        """Add a turn, marking the answer and the `END` after it as the tokens to predict."""
        turn = [*asked, self._ids[END], self._ids[ASSISTANT]]
        answer = [*self._encode(question.answer), self._ids[END]]
        ids += turn + answer
        marks += [False] * len(turn) + [True] * len(answer)

    def _prompt(self, stage: Stage, length: int) -> tuple[str, list[Question]]:
        rng = self._rng
        seed = rng.getrandbits(48)
        kind = rng.choices(KINDS, KIND_WEIGHTS)[0]
        if rng.random() >= self._retrieved:
            share = rng.uniform(0.4, 0.55) if length < 1024 else rng.uniform(0.5, 0.72)
            size = int(share * length) - 12
            document = generate_document(seed, size, kind=kind, mix=stage.mix)
            prompt = document_prompt(document.name, document.text, "")
            known, missing = list(document.questions), list[Question]()
        else:
            size = int(length * rng.uniform(0.6, 2.5))
            document = generate_document(seed, size, kind=kind, mix=stage.mix)
            chunks, known, missing = self._retrieve(document, length * rng.uniform(0.35, 0.55))
            prompt = retrieved_prompt(document.name, chunks, "")
        if not stage.absent:
            return prompt, known
        unknown = absent_questions(seed, document, len(known) // 3 + 1)
        unknown = rng.sample(missing, min(len(missing), len(known) // 3)) + unknown
        rng.shuffle(unknown)
        asked: list[Question] = []
        while known:
            source = unknown if unknown and rng.random() < stage.absent else known
            asked.append(source.pop())
        return prompt, asked

    def _retrieve(
        self, document: GeneratedDocument, num_tokens: float
    ) -> tuple[list[str], list[Question], list[Question]]:
        """Cut a document into pieces and keep some, as retrieval would.

        Some of the kept pieces hold the evidence of questions, the others are random.

        Returns:
            The kept pieces, the questions that they answer, and the other questions.
        """
        rng, text = self._rng, document.text
        pieces: list[tuple[int, int]] = []
        start, whole_sentences = 0, rng.random() < 0.75
        limit = int(CHUNK_TOKENS * CHARACTERS_PER_TOKEN * rng.uniform(0.9, 1.1))
        while start < len(text):
            end = min(start + limit, len(text))
            paragraph = text.find("\n\n", start, end)
            if paragraph > start:
                end = paragraph
            elif whole_sentences and end < len(text):
                end = max(text.rfind(". ", start, end) + 1, start) or end
                end = end if end > start else min(start + limit, len(text))
            pieces.append((start, end))
            start = end + len(text[end:]) - len(text[end:].lstrip())
        kept: set[int] = set()
        size = 0
        wanted = list(document.questions)
        rng.shuffle(wanted)
        while size < num_tokens * CHARACTERS_PER_TOKEN and len(kept) < len(pieces):
            if wanted and rng.random() < 0.6:
                spans = wanted.pop().evidence
                new = {
                    i
                    for i, (left, right) in enumerate(pieces)
                    if any(left < end and start < right for start, end in spans)
                }
            else:
                new = {rng.randrange(len(pieces))}
            size += sum(pieces[i][1] - pieces[i][0] for i in new - kept)
            kept |= new
        chunks = [text[slice(*pieces[i])] for i in sorted(kept)]
        joined = "\n\n".join(chunks)
        known, missing = list[Question](), list[Question]()
        for question in document.questions:
            found = all(text[start:end] in joined for start, end in question.evidence)
            (known if found else missing).append(question)
        return chunks, known, missing

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def make_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return the untrained model of `recipe`."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=3 * recipe.hidden_size,
        num_hidden_layers=recipe.num_hidden_layers,
        num_attention_heads=recipe.num_attention_heads,
        num_key_value_heads=recipe.num_key_value_heads,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def save(model: LlamaForCausalLM, path: Path) -> None:
    """Write the weights in float16 into the directory `path`, replacing each file atomically."""
    scratch = path.with_name(f".{path.name}.new")
    shutil.rmtree(scratch, ignore_errors=True)
    half = LlamaForCausalLM(model.config).half()
    half.load_state_dict(model.state_dict())
    half.save_pretrained(scratch)
    # float16 keeps the repository small; the config makes loading return float32 for the CPU.
    config = LlamaConfig.from_pretrained(scratch)
    config.dtype = "float32"
    config.save_pretrained(scratch)
    path.mkdir(parents=True, exist_ok=True)
    for file in scratch.iterdir():
        file.chmod(0o644)
        file.replace(path / file.name)
    scratch.rmdir()


def loss_of(
    model: LlamaForCausalLM, ids: torch.Tensor, is_answer: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of a batch, and whether each answer token was predicted [answers].

    The loss is that of the answers. One in sixteen of the other tokens is added with weight 0.3,
    which suffices to learn the language of documents.

    Args:
        model: The model.
        ids: Token ids [rows, length].
        is_answer: Marks of the answer tokens [rows, length].
    """
    with torch.autocast("cpu", torch.bfloat16):
        # [rows, length, hidden]
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        target, answer = ids[:, 1:], is_answer[:, 1:]
        chosen = answer | (torch.rand(answer.shape) < 1 / 16)
        logits = model.lm_head(hidden[chosen]).float()
    target, answer = target[chosen], answer[chosen]
    losses = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    weights = torch.where(answer, 1.0, 0.3)
    return (losses * weights).sum() / weights.sum(), (logits.argmax(-1) == target)[answer]


def train(recipe: Recipe, *, start: Path | None, from_share: float, minutes: float) -> None:
    """Run the curriculum of `recipe` and save the checkpoint at its path.

    The clock drives the curriculum and the learning rate, so that a slow machine trains less, not
    longer.

    Args:
        recipe: The model and its curriculum.
        start: Checkpoint whose weights training continues from; None starts anew.
        from_share: Share of the curriculum to skip, in [0, 1).
        minutes: Duration of the whole curriculum.
    """
    tokenizer = AutoTokenizer.from_pretrained(recipe.path)
    model = LlamaForCausalLM.from_pretrained(start).float() if start else None
    model = model or make_model(recipe, tokenizer)
    model.train()
    rows = RowMaker(tokenizer.backend_tokenizer, f"train {recipe.seed}", recipe.retrieved)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=1.0, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    began, seen, right = time.monotonic(), 0, torch.zeros(0)
    while (share := from_share + (time.monotonic() - began) / 60 / minutes) < 1:
        stage = next(stage for stage in recipe.stages if share < stage.until)
        warm, decay = min(1.0, (seen + 1) / 100), min(1.0, (1 - share) / 0.5)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * warm * max(decay, 0.02)
        ids, is_answer = rows.batch(stage, recipe.tokens_per_step)
        loss, correct = loss_of(model, ids, is_answer)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        seen += 1
        right = torch.cat((right, correct.float()))
        if seen % 25 == 0:
            sys.stdout.write(
                f"{recipe.path.name} step {seen}  row {ids.shape[1]}  loss {loss.item():.3f}  "
                f"answer tokens right {right.mean():.3f}  "
                f"{share:.1%} done, {(1 - share) * minutes:.0f} min left\n"
            )
            sys.stdout.flush()
            right = torch.zeros(0)
        if seen % 250 == 0:
            save(model, recipe.path)
    save(model, recipe.path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and train the tokenizer or a model."""
    parser = argparse.ArgumentParser(prog="python -m rapid.embedded.training", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", choices=("tokenizer", *RECIPES))
    parser.add_argument("--out", type=Path, help="checkpoint directory (default: in the package)")
    parser.add_argument("--start", type=Path, help="go on from the weights of this checkpoint")
    parser.add_argument("--from-share", type=float, default=0.0, help="enter the curriculum here")
    parser.add_argument("--minutes", type=float, default=60, help="for the whole curriculum")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.what == "tokenizer":
        tokenizer = make_tokenizer()
        for path in [options.out] if options.out else [TARGET, DRAFTER]:
            tokenizer.save_pretrained(path)
        return
    recipe = RECIPES[options.what]
    if options.out:
        AutoTokenizer.from_pretrained(recipe.path).save_pretrained(options.out)
        recipe = replace(recipe, path=options.out)
    train(
        recipe,
        start=options.start,
        from_share=options.from_share,
        minutes=options.minutes,
    )


if __name__ == "__main__":
    main()
