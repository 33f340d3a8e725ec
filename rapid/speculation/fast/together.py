"""Answers to all questions of a step at once, on CUDA, whatever the settings of each.

Tables describe the rows to the kernels (`rapid.speculation.fast.row_kernels`), and their decisions
become tokens and judgements here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import triton

from rapid.messages import DraftBlock, Float32Array, Int32Array
from rapid.receipt import TokenProbs
from rapid.speculation.acceptance import Judgement, draft_purpose
from rapid.speculation.draw import Draw, keys_of, uniforms_at
from rapid.speculation.fast import race_kernels, row_kernels, row_tables
from rapid.speculation.fast.contenders import Outcome, propose_sparsely
from rapid.speculation.fast.judging import commit_outcomes, is_within_reach
from rapid.speculation.noise import Float64Array, Purpose
from rapid.speculation.questions import (
    Answer,
    Decoded,
    Proposed,
    Question,
    ToDecode,
    ToJudge,
    ToPropose,
)
from rapid.speculation.sampling import as_sent

if TYPE_CHECKING:
    from rapid.config import SamplingConfig

MOST_ROWS = 96  # of a batch, in which each takes 32 bytes a token of the vocabulary
Ints = npt.NDArray[np.int64]

_LEAST_WIDTH = 64  # candidates of a row, so that few sizes are compiled
_TRANSFERS = {
    "distill": row_tables.DISTILL.value,
    "boost": row_tables.BOOST.value,
    "mixture": row_tables.MIXTURE.value,
    "adaptive": row_tables.ADAPTIVE.value,
}


def make_batches(questions: Sequence[Question]) -> list[Batch]:
    """Return the batches of a step, but for questions that only the specification answers."""
    proposing: dict[object, list[int]] = {}
    deciding: list[list[int]] = []
    room = 0
    for index, question in enumerate(questions):
        if isinstance(question, ToPropose):
            draw, vocab = question.draw, question.logits.shape[-1]
            kind = draw.speculation.draft_top_k, _is_filtered(draw.sampling, vocab)
            proposing.setdefault(kind, []).append(index)
        elif _is_within_reach(question):
            if room < (num_rows := _num_rows(question)):
                deciding.append([])
                room = MOST_ROWS
            deciding[-1].append(index)
            room -= num_rows
    return [
        kind(indices, [questions[index] for index in indices])
        for kind, groups in ((Deciding, deciding), (Proposing, proposing.values()))
        for group in groups
        for indices in (group[at : at + MOST_ROWS] for at in range(0, len(group), MOST_ROWS))
    ]


@dataclass(frozen=True, slots=True)
class Deciding:
    """Plain tokens and blocks of any settings."""

    indices: list[int]  # of the step's questions
    questions: list[Any]

    def ask(self) -> torch.Tensor:
        """Launch what decides all rows; return it on the device, float64."""
        # Triton launches on the current device of the thread.
        with torch.cuda.device_of(self.questions[0].logits):  # type: ignore[no-untyped-call]
            return _decide(self.questions)

    def receive(self, values: Float64Array) -> list[Callable[[], Answer]]:
        """Return calls that answer each question by the values of `ask`, on the host."""
        ends = np.cumsum([_num_rows(question) for question in self.questions])[:-1]
        parts = np.split(values.view(row_tables.DECIDED), ends)
        return [
            partial(_answer, question, rows)
            for question, rows in zip(self.questions, parts, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Proposing:
    """Tokens to draft, whose proposals have the same size, and filters or none."""

    indices: list[int]  # of the step's questions
    questions: list[Any]

    def ask(self) -> torch.Tensor:
        """Launch what finds the candidates; return ids and probabilities, float64 [2, n, m]."""
        return self._find_candidates(self._send_settings())

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch what `ask` does and draws a token of each row; return them too, int64 [n].

        The tokens are those of the answers, but for races that are closer than a rounding.
        """
        settings = self._send_settings()
        candidates = self._find_candidates(settings)
        num_rows, size = candidates.shape[1:]
        tokens = settings.new_empty(num_rows)
        with torch.cuda.device_of(tokens):  # type: ignore[no-untyped-call]
            race_kernels.race_candidates[(num_rows,)](
                candidates, settings, tokens, num_rows, size,
                settings.shape[1], triton.next_power_of_2(size),
            )  # fmt: skip
        return candidates, tokens

    def receive(self, values: Float64Array) -> list[Callable[[], Answer]]:
        """Return calls that answer each question by the values of `ask`, on the host."""
        ids, probs = values.reshape(2, len(self.questions), -1)
        return [
            partial(_draft, row_ids, row_probs, question.draw)
            for row_ids, row_probs, question in zip(
                ids.astype(np.int32), probs.astype(np.float32), self.questions, strict=True
            )
        ]

    def _send_settings(self) -> torch.Tensor:
        """Return words of each row: `row_tables.PROPOSAL`."""
        draws, vocab = [question.draw for question in self.questions], self._vocab
        table = np.zeros(len(draws), dtype=row_tables.PROPOSAL)
        for name, value in (
            ("temperature", [draw.temperature for draw in draws]),
            ("top_p", [draw.sampling.top_p for draw in draws]),
            ("top_k", [draw.sampling.top_k or vocab for draw in draws]),
            ("min_p", [draw.sampling.min_p for draw in draws]),
            ("is_random", [not draw.is_greedy for draw in draws]),
        ):
            table[name] = value
        for row, draw in enumerate(draws):
            table["keys"][row] = keys_of([draw], draft_purpose(draw))[0]
        words = table.view(np.int64).reshape(len(draws), -1)
        (settings,) = _send(self.questions[0].logits.device, words)
        return settings

    def _find_candidates(self, settings: torch.Tensor) -> torch.Tensor:
        draw = self.questions[0].draw
        logits = torch.stack([question.logits for question in self.questions])
        numbers = settings.view(torch.float64)
        probs = torch.softmax(logits.double() / numbers[:, :1], dim=-1)
        if _is_filtered(draw.sampling, self._vocab):
            probs = _filter_rows(probs, settings[:, 2:3], numbers[:, 1:2], numbers[:, 3:4])
        size = draw.speculation.draft_top_k
        if size is None or size >= self._vocab:
            ids = torch.arange(self._vocab, device=probs.device).expand(probs.shape)
            return torch.stack([ids.double(), probs])
        best, ids = probs.topk(size)
        return torch.stack([ids.double(), best])

    @property
    def _vocab(self) -> int:
        return int(self.questions[0].logits.shape[-1])


Batch = Deciding | Proposing


def _filter_rows(
    probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Return what `filter_probs` returns of each row, by filters of its own [n, 1].

    Each row is divided by its sums as often as there: another rounding could move a nucleus' end.
    """
    likely = probs * (probs >= min_p * probs.amax(dim=-1, keepdim=True))
    probs = torch.where(min_p > 0, likely / likely.sum(dim=-1, keepdim=True), probs)
    best, order = probs.sort(dim=-1, descending=True, stable=True)
    best.masked_fill_(torch.arange(best.shape[-1], device=best.device) >= top_k, 0)
    best = best / best.sum(dim=-1, keepdim=True)
    best.masked_fill_(best.cumsum(dim=-1) - best >= top_p, 0)
    kept = torch.zeros_like(probs).scatter_(-1, order, best)
    kept = kept / kept.sum(dim=-1, keepdim=True)
    return torch.where((top_k >= probs.shape[-1]) & (top_p >= 1), probs, kept)


def _draft(ids: Int32Array, probs: Float32Array, draw: Draw) -> Proposed:
    return propose_sparsely(*as_sent(ids, probs), draw)


def _is_filtered(sampling: SamplingConfig, vocab: int) -> bool:
    return sampling.top_p < 1 or sampling.min_p > 0 or (sampling.top_k or vocab) < vocab


def _is_within_reach(question: ToDecode | ToJudge) -> bool:
    top_k, vocab = question.draw.sampling.top_k, question.logits.shape[-1]
    if top_k is not None and row_kernels.SORTED.value <= top_k < vocab:
        return False  # the filter's border is looked for among fewer tokens
    if question.draw.sampling.min_p > 0:
        return False  # its border is looked for by the specification alone
    if isinstance(question, ToDecode):
        return question.num_logprobs is None
    return is_within_reach(question)


def _answer(question: ToDecode | ToJudge, rows: row_tables.Table) -> Decoded | Judgement:
    if isinstance(question, ToJudge) and _block_of(question) is not None:
        return commit_outcomes(question, _outcomes(question, rows))
    if not rows["is_sure"][0]:
        return question.by_specification()
    token, prob = int(rows["token"][0]), float(rows["target"][0])
    probs = (TokenProbs(target=prob, sampled=prob),) if question.explains else ()
    if isinstance(question, ToDecode):
        return Decoded(token, probs=probs[0] if probs else None)
    is_finished = token in question.eos_ids
    return Judgement((token,), 0, is_finished, log_odds=question.log_odds, probs=probs)


def _outcomes(question: ToJudge, rows: row_tables.Table) -> Iterator[Outcome]:
    """Yield the outcomes of a block's rows, each as if the drafts before it were accepted."""
    block = question.block
    for place, (drafted, row) in enumerate(zip(block.token_ids.tolist(), rows, strict=True)):
        drawn = Outcome(
            int(row["token"]),
            not _has_residual(question.draw) and int(row["token"]) == drafted,
            bool(row["is_sure"]),
            float(row["target"]),
            float(row["told"]),
        )
        fused = float(row["fused"])
        is_accepted, is_sure = bool(row["is_accepted"]), bool(row["is_accepted_surely"])
        if _has_residual(question.draw) and (is_accepted or not is_sure):
            probs = float(row["drafted_target"]), float(row["drafted_told"])
            drawn = Outcome(drafted, is_accepted, is_sure, *probs)
            fused = float(row["drafted_fused"])
        if question.explains:
            q = _find_proposal_prob(block, place, drawn.token)
            drawn = replace(drawn, probs=(TokenProbs(drawn.target_prob, q, fused),))
        yield drawn


def _find_proposal_prob(block: DraftBlock, row: int, token: int) -> float:
    """Return q of a token at one position of a block."""
    probs = block.candidate_probs[row].astype(np.float64)
    return float(probs[block.candidate_ids[row] == token].sum() / probs.sum())


def _decide(questions: Sequence[ToDecode | ToJudge]) -> torch.Tensor:
    """Return what the kernels decide on the rows of some questions."""
    counts = [_num_rows(question) for question in questions]
    blocks = [_block_of(question) for question in questions]
    witnesses = [_witness_of(question) for question in questions]
    logits = torch.cat(
        [
            *(
                question.logits.view(-1, question.logits.shape[-1])[:count]
                for question, count in zip(questions, counts, strict=True)
            ),
            *(witness for witness in witnesses if witness is not None),
        ]
    )
    widths = [block.candidate_ids.shape[1] for block in blocks if block is not None]
    width = max([_LEAST_WIDTH, *widths])
    shape = sum(counts), 1 << (width - 1).bit_length()
    table = np.zeros(len(logits), dtype=row_tables.ROW)
    ids, probs = np.full(shape, -1), np.zeros(shape)
    starts, of_witness = np.cumsum([0, *counts]), sum(counts)
    for question, block, witness, start, count in zip(
        questions, blocks, witnesses, starts, counts, strict=False
    ):
        rows = slice(start, start + count)
        _fill(table[rows], question, logits.shape[-1])
        if block is not None:
            place = rows, slice(block.candidate_ids.shape[1])
            ids[place], probs[place] = block.candidate_ids, block.candidate_probs
            probs[rows] /= probs[rows].sum(axis=-1, keepdims=True)  # float32 until here
        if witness is not None:
            end = of_witness + count
            table["witness"][rows] = np.arange(of_witness, end)
            table["temperature"][of_witness:end] = question.draw.temperature
            of_witness = end
    return _launch(logits, table, starts, ids, probs)


def _launch(
    logits: torch.Tensor, table: row_tables.Table, starts: Ints, ids: Ints, probs: Float64Array
) -> torch.Tensor:
    """Decide on all rows, each as if the drafts before it were accepted, as `DECIDED` [rows, 8].

    Args:
        logits: The target's rows, then those of witnesses [rows + witnesses, vocab].
        table: What is asked about each, of `ROW`; `top_k` is below `SORTED` or the vocabulary's
            size [rows + witnesses].
        starts: The first row of each block, and the number of rows [blocks + 1].
        ids: Candidates of the proposals, -1 for padding; m is a power of two [rows, m].
        probs: Their probabilities [rows, m].
    """
    (count, m), (total_rows, vocab) = ids.shape, logits.shape
    is_drafted = bool((table["drafted"][:count] >= 0).any())
    is_filtered = bool(((table["top_k"] < vocab) | (table["top_p"] < 1))[:count].any())
    integers, starts_there, ids_there, words = _send(
        logits.device, table.view(np.int64).reshape(total_rows, -1), starts, ids, probs
    )
    numbers, probs_there = integers.view(torch.float64), words.view(torch.float64)
    block, most_sorted = row_kernels.BLOCK, row_kernels.SORTED
    parts = triton.cdiv(vocab, block)
    width = triton.next_power_of_2(parts)
    partial = numbers.new_empty((4, total_rows, parts))
    readings = numbers.new_empty((count, row_kernels.READINGS.value))
    weights = numbers.new_empty((count, vocab))
    # q of every token; rows without a proposal do not read theirs.
    draft = numbers.new_zeros((count, vocab)) if is_drafted else weights
    decided = numbers.new_empty((count, row_tables.DECIDED_WORDS.value))
    borders = numbers.new_empty((count, 4) if is_filtered else (1,))
    given, sizes = (logits, integers, numbers), (total_rows, vocab, parts)
    row_kernels.read_rows[(total_rows, parts)](logits, numbers, partial, *sizes, block)
    row_kernels.settle_blocks[(len(starts) - 1,)](
        *given, starts_there, ids_there, probs_there, partial, readings, draft, decided,
        *sizes, width, m,
    )  # fmt: skip
    row_kernels.fuse_rows[(count, parts)](*given, readings, draft, weights, partial, *sizes, block)
    if is_filtered:
        best, order = weights.topk(min(most_sorted.value, vocab))
        order, by_id = order.sort(dim=-1)  # of equal tokens the lower id comes first
        best, by_weight = best.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
        order, size = order.gather(-1, by_weight), best.shape[1]
        row_kernels.cut_rows[(count,)](
            *given, readings, best, order, partial, borders, *sizes, width, size, most_sorted
        )
    reading = (*given, readings, draft, weights, borders, partial)
    row_kernels.race_rows[(count, parts)](*reading, *sizes, width, is_filtered, block)
    row_kernels.choose_tokens[(count,)](*reading, decided, *sizes, width, is_filtered)
    return decided


def _send(device: torch.device, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
    """Return arrays of words on a device, as int64, by one transfer."""
    words = np.concatenate([array.view(np.int64).ravel() for array in arrays])
    parts = torch.split(torch.from_numpy(words).to(device), [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _fill(rows: row_tables.Table, question: ToDecode | ToJudge, vocab: int) -> None:
    """Write what is asked about the rows of a question, but for its witness."""
    draw, sampling = question.draw, question.draw.sampling
    draws, purpose = [draw.after(row) for row in range(len(rows))], Purpose.RESULT
    rows["mode"] = row_tables.BEST.value if draw.is_greedy else row_tables.RACE.value
    rows["drafted"], rows["witness"], rows["temperature"] = -1, -1, draw.temperature
    rows["top_k"], rows["top_p"] = vocab, 1.0
    if not draw.is_greedy:  # else filters keep the best token, which is taken
        rows["top_k"], rows["top_p"] = min(sampling.top_k or vocab, vocab), sampling.top_p
    if isinstance(question, ToJudge) and (block := _block_of(question)) is not None:
        speculation = draw.speculation
        rows["drafted"], rows["log_odds"] = block.token_ids, question.log_odds
        rows["transfer"] = _TRANSFERS[speculation.transfer] if speculation.eta else 0
        rows["eta"], rows["plausibility"] = speculation.eta, speculation.plausibility
        if _has_residual(draw):
            rows["mode"], purpose = row_tables.RESIDUAL.value, Purpose.RESIDUAL
            accepting = keys_of(draws, Purpose.ACCEPT)
            rows["number"] = uniforms_at(accepting, np.zeros((len(rows), 1)))[:, 0]
    rows["keys"] = keys_of(draws, purpose)


def _block_of(question: ToDecode | ToJudge) -> DraftBlock | None:
    """Return the drafted tokens to judge; None for a plain token, as an empty block is."""
    return question.block if isinstance(question, ToJudge) and len(question.block) else None


def _witness_of(question: ToDecode | ToJudge) -> torch.Tensor | None:
    """Return the rows of the retrieved text's reading that judging listens to, if any."""
    is_heard = _block_of(question) is not None and question.draw.speculation.is_witnessed
    if not isinstance(question, ToJudge) or question.witness is None or not is_heard:
        return None
    return question.witness[: len(question.block)]


def _num_rows(question: ToDecode | ToJudge) -> int:
    return max(len(question.block), 1) if isinstance(question, ToJudge) else 1


def _has_residual(draw: Draw) -> bool:
    """Return whether a rejected token is replaced by one that is drawn from a residual."""
    return not draw.is_greedy and draw.speculation.coupling == "maximal"
