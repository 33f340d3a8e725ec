"""Training rows: a document, then questions about it with their answers."""

import random

import torch
from tokenizers import Tokenizer

from rapid.embedded.chat import (
    ASSISTANT,
    BOS,
    END,
    PAD,
    SPECIAL_TOKENS,
    USER,
    build_drafter_prompt,
    document_prompt,
)
from rapid.embedded.curriculum import Stage
from rapid.embedded.generator import (
    CHARACTERS_PER_TOKEN,
    GeneratedDocument,
    GeneratedQuestion,
    absent_questions,
    generate_document,
)
from rapid.embedded.wording import DocumentKind

CHUNK_TOKENS = 64  # as a server with the embedded models retrieves
KIND_WEIGHTS: dict[DocumentKind, float] = {
    "chronicle": 0.37,  # only chronicles have entries, the hardest to learn
    "contract": 0.21,
    "clinical": 0.21,
    "ledger": 0.21,
}


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
        self, ids: list[int], marks: list[bool], asked: list[int], question: GeneratedQuestion
    ) -> None:
        """Add a turn, marking the answer and the `END` after it as the tokens to predict."""
        turn = [*asked, self._ids[END], self._ids[ASSISTANT]]
        answer = [*self._encode(question.answer), self._ids[END]]
        ids += turn + answer
        marks += [False] * len(turn) + [True] * len(answer)

    def _prompt(self, stage: Stage, length: int) -> tuple[str, list[GeneratedQuestion]]:
        rng = self._rng
        seed = rng.getrandbits(48)
        kind = rng.choices(list(KIND_WEIGHTS), list(KIND_WEIGHTS.values()))[0]
        if rng.random() >= self._retrieved:
            share = rng.uniform(0.4, 0.55) if length < 1024 else rng.uniform(0.5, 0.72)
            size = int(share * length) - 12
            document = generate_document(seed, size, kind=kind, mix=stage.mix)
            prompt = document_prompt(document.name, document.text, "")
            known, missing = list(document.questions), list[GeneratedQuestion]()
        else:
            size = int(length * rng.uniform(0.6, 2.5))
            document = generate_document(seed, size, kind=kind, mix=stage.mix)
            chunks, known, missing = self._retrieve(document, length * rng.uniform(0.35, 0.55))
            prompt = build_drafter_prompt(document.name, chunks, "")
        if not stage.absent:
            return prompt, known
        unknown = absent_questions(seed, document, len(known) // 3 + 1)
        unknown = rng.sample(missing, min(len(missing), len(known) // 3)) + unknown
        rng.shuffle(unknown)
        asked: list[GeneratedQuestion] = []
        while known:
            source = unknown if unknown and rng.random() < stage.absent else known
            asked.append(source.pop())
        return prompt, asked

    def _retrieve(
        self, document: GeneratedDocument, num_tokens: float
    ) -> tuple[list[str], list[GeneratedQuestion], list[GeneratedQuestion]]:
        """Cut a document into pieces and keep some, as retrieval would, and random ones.

        Return the kept pieces, the questions that they answer, and the other questions.
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
        known, missing = list[GeneratedQuestion](), list[GeneratedQuestion]()
        for question in document.questions:
            found = all(text[start:end] in joined for start, end in question.evidence)
            (known if found else missing).append(question)
        return chunks, known, missing

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids
