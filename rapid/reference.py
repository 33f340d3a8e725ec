"""The whole method in one file: slow, plain, and what the engines must equal token by token.

    python -m rapid.reference    # the embedded pair answers a question about a long document

Read it beside the paper (RAPID, arXiv 2502.20330) or ``docs/algorithm.md``. An answer is defined
token by token, each drawn from the fused distribution. The method drafts blocks of tokens and
judges them; greedy or with `shared_noise` its text is the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from rapid.embedded.example import Example

Row = NDArray[Any]  # a number for each token of the vocabulary
RESULT, DRAFT, ACCEPT, RESIDUAL = range(4)  # what a random number decides


@dataclass(frozen=True)
class Settings:
    """Sampling and speculation of a request; the names are those of `rapid.config`."""

    seed: int = 0
    choice: int = 0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    rule: str = "exact"  # or paper: what the authors' code samples
    transfer: str = "adaptive"  # or boost, distill, mixture
    eta: float = 10.0
    plausibility: float = 0.1
    draft_top_k: int | None = 64
    transfer_temperature: float = 1.0
    coupling: str = "shared_noise"  # or maximal
    max_draft: int = 10


class Reader:
    """A model with its prompt, which returns the logits after any continuation of it."""

    def __init__(self, model: Any, prompt: Sequence[int], vocab: int | None = None) -> None:
        self._model, self._prompt, self._vocab = model, list(prompt), vocab
        self._cache, self._read = DynamicCache(), list[int]()

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], count: int = 1) -> Row:
        """Return the rows after the last `count` tokens of prompt and answer [count, vocab]."""
        ids = [*self._prompt, *tokens]
        known = min(len(commonprefix([self._read, ids])), len(ids) - count)  # noqa: RUF071
        if known < len(self._read):
            self._cache.crop(known - len(self._read))  # rejected drafts leave the cache
        fed, self._read = torch.tensor([ids[known:]]), ids
        output = self._model(fed, past_key_values=self._cache, use_cache=True)
        return np.asarray(output.logits[0, -count:, : self._vocab], dtype=np.float64)


class Token(NamedTuple):
    """A token of the answer, with the log odds of the retrieved text's reading after it."""

    id: int
    log_odds: float
    is_drafted: bool = False


def softmax(logits: Row, settings: Settings) -> Row:
    """Return the distribution of a row at the request's temperature."""
    scaled = logits / (settings.temperature or settings.transfer_temperature)
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def keep(probs: Row, settings: Settings) -> Row:
    """Keep tokens from `min_p` of the best on, `top_k` of them, then the fewest of mass `top_p`."""
    probs = probs * (probs >= settings.min_p * probs.max())
    order = np.argsort(-probs, kind="stable")[: settings.top_k]
    best = probs[order] / probs[order].sum()
    order = order[(np.cumsum(best) - best < settings.top_p) | (settings.top_p == 1)]
    kept = np.zeros_like(probs)
    kept[order] = probs[order]
    return kept / kept.sum()


def noise(position: int, purpose: int, count: int, settings: Settings) -> Row:
    """Return uniform numbers, a function of what they are for and not of the order of draws."""
    key = np.array([settings.seed % 2**64, settings.choice << 8 | purpose], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=[0, position, 0, 0]).random_raw(count)
    return ((words >> np.uint64(11)) + 0.5) * 2.0**-53


def draw(probs: Row, position: int, settings: Settings, purpose: int = RESULT) -> int:
    """Draw a token by an exponential race, argmax p / E; greedy takes the best one."""
    times = -np.log(noise(position, purpose, len(probs), settings))
    return int((probs / times if settings.temperature else probs).argmax())


def propose(logits: Row, settings: Settings) -> Row:
    """Return q: the drafter's distribution, cut to its `draft_top_k` best tokens."""
    probs = keep(softmax(logits, settings), settings)
    best = np.argsort(-probs, kind="stable")[: settings.draft_top_k]
    proposal = np.zeros_like(probs)
    proposal[best] = probs[best].astype(np.float32)  # as it is sent
    return proposal / proposal.sum()


def fuse(logits: Row, told: Row, settings: Settings, log_odds: float) -> Row:
    """Return p-hat of the target's logits and what the retrieved text tells, q.

    `distill` is the paper's Eq. 6, a gradient step of KL(q, p) on the logits, and `boost` its
    positive part. `adaptive` weighs p and q by how well each foretold the answer so far.
    """
    target, eta = softmax(logits, settings), settings.eta
    plausible = told >= settings.plausibility * told.max()
    if settings.transfer == "mixture":
        return (target + eta * told) / (1 + eta)
    if settings.transfer == "adaptive":
        weight = 1 / (1 + np.exp(-0.4 * log_odds) / 0.999) if eta else 0.0
        target = (1 - weight) * target + weight * told * plausible
        move = weight * target
    else:
        move = (told - target) * plausible
        if settings.transfer == "boost":
            move = np.maximum(move, 0) * 2 * told.max() / (told.max() + target.max())
    fused = target * np.exp(eta * (move - move.max()))
    return fused / fused.sum()


def judge(
    drafted: int | None, q: Row, told: Row, logits: Row, odds: float, at: int, settings: Settings
) -> Token:  # fmt: skip
    """Return the token at a position where `drafted` was drawn from q, or None drew nothing."""
    target = softmax(logits, settings)
    wanted = fused = keep(fuse(logits, told, settings, odds), settings)
    if settings.rule == "paper":  # makes good what p lacks, not what p-hat lacks
        wanted = keep(target, settings)
        fused = fuse(np.where(wanted > 0, logits, -np.inf), told, settings, odds)
    if drafted is None or settings.temperature == 0 or settings.coupling == "shared_noise":
        token = draw(fused, at, settings)
    elif noise(at, ACCEPT, 1, settings)[0] < fused[drafted] / q[drafted]:
        token = drafted
    else:  # rejected, even if the residual of the paper gives the same token
        residual = np.maximum(wanted - np.minimum(q, fused), 0)
        token, drafted = draw(residual if residual.any() else wanted, at, settings, RESIDUAL), None
    evidence = float(np.log(max(told[token], 1e-3) / max(target[token], 1e-3)))
    return Token(token, 0.85 * odds + evidence, token == drafted)


def generate(
    settings: Settings, num_tokens: int, target: Reader, drafter: Reader | None = None,
    witness: Reader | None = None, *, speculates: bool = True, committed: Sequence[int] = (),
    log_odds: float = 0.0,
) -> Iterator[Token]:  # fmt: skip
    """Yield what follows `committed` by speculation, or else token by token as it is defined.

    The target reads the document; the drafter and, for `adaptive`, the witness (which is the target
    again) read the retrieved text. Without a drafter the target decodes alone.
    """
    tokens = list(committed)
    length = settings.max_draft if speculates else 1
    purpose = RESULT if settings.coupling == "shared_noise" else DRAFT
    while (start := len(tokens)) < num_tokens:
        block, proposals = list[int](), list[Row]()
        while drafter and len(block) < min(length, num_tokens - start):
            proposals.append(propose(drafter.logits(tokens + block)[0], settings))
            block.append(draw(proposals[-1], start + len(block), settings, purpose))
            if settings.rule == "paper" and proposals[-1][block[-1]] < 0.1:
                break  # as the authors' code does after a token that the drafter doubts
        has_bonus = settings.rule == "paper" and start + len(block) < num_tokens
        num_rows = max(len(block) + has_bonus, 1)
        read = (tokens + block)[: start + num_rows - 1]
        seen = witness.logits(read, num_rows) if witness else None
        for row, logits in enumerate(target.logits(read, num_rows)):
            if row == len(block):  # no drafter, or the bonus token of the authors' code
                chosen = draw(keep(softmax(logits, settings), settings), start + row, settings)
                token = Token(chosen, log_odds)
            else:
                q = proposals[row]
                told = q if seen is None else (q + softmax(seen[row], settings)) / 2
                x = block[row] if speculates else None
                token = judge(x, q, told, logits, log_odds, start + row, settings)
            tokens, log_odds = [*tokens, token.id], token.log_odds
            yield token
            if not token.is_drafted:
                break


if __name__ == "__main__":
    example = Example()
    print(example.question)
    for speculates in (False, True):
        readers = map(Reader, example.models, example.prompts)
        answer = list(generate(Settings(), 74, *readers, speculates=speculates))
        print(sum(t.is_drafted for t in answer), "drafted:", example.decode([t.id for t in answer]))
