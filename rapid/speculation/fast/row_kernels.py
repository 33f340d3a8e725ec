"""Drawing and judging of a step's rows on CUDA, in five launches for all settings, in Triton.

Every row has settings of its own, and a row of a plain token is one without a proposal. All is
computed in float64, up to a factor: ``p_hat = weights / total``. What is decided is *sure* where no
error of the arithmetic could turn it; the caller leaves the rest to the specification
(``docs/algorithm.md#the-same-decisions-faster``). ``TRITON_INTERPRET=1`` runs the code on a CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rapid.speculation.fast.race_kernels import draw_words, weigh_by_time
from rapid.speculation.fast.row_tables import (
    ADAPTIVE,
    BEST,
    BOOST,
    DECIDED_WORDS,
    DRAFTED,
    DRAFTED_FUSED,
    DRAFTED_TARGET,
    DRAFTED_TOLD,
    ETA,
    FUSED,
    IS_ACCEPTED,
    IS_ACCEPTED_SURELY,
    IS_SURE,
    KEYS,
    MIXTURE,
    MODE,
    NUMBER,
    ODDS,
    PLAUSIBILITY,
    RESIDUAL,
    ROW_WORDS,
    TARGET,
    TEMPERATURE,
    TOKEN,
    TOLD,
    TOP_K,
    TOP_P,
    TRANSFER,
    WITNESS,
)  # fmt: skip
from rapid.speculation.fusion import LEAST_PROBABILITY, MEMORY, TEMPER

BLOCK = 1024  # tokens of a program
SORTED = tl.constexpr(1024)  # tokens among which a filter's border is looked for

# What a row is read with: the highest logit and the sum of the weights of both texts, the weight of
# the retrieved one, the least q that moves a token, the highest q, and the error of all weights.
_TOP, _SUM, _OTHER_TOP, _OTHER_SUM, _SHARE, _BAR, _BEST_Q, _ERROR = map(tl.constexpr, range(8))
READINGS = tl.constexpr(8)

_MARGIN = tl.constexpr(2e-11)  # relative error of the softmax of small logits
_ROUNDING = tl.constexpr(5e-13)  # and of larger ones, in shares of the largest
_NEAR = tl.constexpr(200.0)  # errors; finishes of a residual's race closer than that are one
_LEAST_RATIO = tl.constexpr(1e-15)  # of a weight to its time in a race that is decided here
_LEAST_PROBABILITY, _MEMORY, _TEMPER = map(tl.constexpr, (LEAST_PROBABILITY, MEMORY, TEMPER))


# The number of rows differs from step to step, and is no reason to compile anew.
_kernel = triton.jit(do_not_specialize=["total_rows"])


@_kernel
def read_rows(logits, numbers, partial, total_rows, vocab, parts, BLOCK: tl.constexpr):
    """Write the highest logit of a part of a row, and the sum of its weights."""
    row, part = tl.program_id(0), tl.program_id(1)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    place = row * vocab + ids
    z = tl.load(logits + place, mask=ids < vocab, other=float("-inf")).to(tl.float64)
    temperature = tl.load(numbers + row * ROW_WORDS + TEMPERATURE)
    top = tl.max(z, 0)
    total = tl.sum(tl.exp((z - _finite(top)) / temperature), 0)
    tl.store(partial + row * parts + part, top)
    tl.store(partial + (total_rows + row) * parts + part, total)


@triton.jit
def _finite(top):
    """Return a highest logit, or 0 where all are -inf, whose weights are none."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _merge(partial, row, temperature, total_rows, parts, WIDTH: tl.constexpr):
    """Return the highest logit of a row, and the sum of its weights."""
    part = tl.arange(0, WIDTH)
    is_part = part < parts
    tops = tl.load(partial + row * parts + part, mask=is_part, other=float("-inf"))
    sums = tl.load(partial + (total_rows + row) * parts + part, mask=is_part, other=0.0)
    top = tl.max(tops, 0)
    scaled = sums * tl.exp((_finite(tops) - _finite(top)) / temperature)
    return top, tl.sum(tl.where(tops == float("-inf"), sums * 0, scaled), 0)


@triton.jit
def _prob(logits, row, token, top, total, temperature, vocab):
    """Return the probabilities of some tokens of a row of logits."""
    z = tl.load(logits + row * vocab + token).to(tl.float64)
    return tl.exp((z - top) / temperature) / total


@_kernel
def settle_blocks(
    logits, integers, numbers, starts, ids, probs, partial, readings, draft, decided,
    total_rows, vocab, parts, WIDTH: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Write what each row of a block is read with: its sums, and the weights of both texts."""
    block = tl.program_id(0)
    first, end = tl.load(starts + block), tl.load(starts + block + 1)
    odds = tl.load(numbers + first * ROW_WORDS + ODDS)
    column = tl.arange(0, M)
    for row in range(first, end):
        whole, number, reading = (
            integers + row * ROW_WORDS,
            numbers + row * ROW_WORDS,
            row * READINGS,
        )
        transfer, drafted = tl.load(whole + TRANSFER), tl.load(whole + DRAFTED)
        witness, temperature = tl.load(whole + WITNESS), tl.load(number + TEMPERATURE)
        top, total = _merge(partial, row, temperature, total_rows, parts, WIDTH)
        error = tl.abs(top) * _ROUNDING / temperature + _MARGIN
        tl.store(readings + reading + _TOP, top)
        tl.store(readings + reading + _SUM, total)
        if drafted >= 0:
            candidates = tl.load(ids + row * M + column)
            q = tl.load(probs + row * M + column)
            is_real = candidates >= 0
            tl.store(draft + row * vocab + candidates, q, mask=is_real)
            best_q = tl.max(tl.where(is_real, q, 0.0), 0)
            target = _prob(logits, row, drafted, top, total, temperature, vocab)
            told = tl.sum(tl.where(candidates == drafted, q, 0.0), 0)
            bar = best_q
            if witness >= 0:
                other_top, other_total = _merge(
                    partial, witness, temperature, total_rows, parts, WIDTH
                )
                other_error = tl.abs(other_top) * _ROUNDING / temperature + _MARGIN
                # NaN is not below infinity, and nothing is sure that a witness with NaN moves.
                other_error = tl.where(other_total < float("inf"), other_error, float("inf"))
                error = tl.maximum(error, other_error)
                safe = tl.where(is_real, candidates, 0)
                seen = _prob(logits, witness, safe, other_top, other_total, temperature, vocab)
                both = tl.max(tl.where(is_real, (q + seen) / 2, 0.0), 0)
                bar = tl.maximum(both, 0.5 / other_total)
                told = (
                    told
                    + _prob(logits, witness, drafted, other_top, other_total, temperature, vocab)
                ) / 2
                tl.store(readings + reading + _OTHER_TOP, other_top)
                tl.store(readings + reading + _OTHER_SUM, other_total)
            share = tl.exp(odds * _TEMPER) * (1 - _LEAST_PROBABILITY)
            tl.store(readings + reading + _SHARE, share / (1 + share))
            # Equal numbers may differ by their rounding here and where a token is compared.
            bar *= tl.load(number + PLAUSIBILITY) * (1 - _MARGIN)
            tl.store(readings + reading + _BAR, bar)
            tl.store(readings + reading + _BEST_Q, best_q)
            tl.store(decided + row * DECIDED_WORDS + DRAFTED_TARGET, target)
            tl.store(decided + row * DECIDED_WORDS + DRAFTED_TOLD, told)
            least = tl.full([], _LEAST_PROBABILITY, tl.float64)  # else it would be a float32
            odds = odds * _MEMORY + tl.log(tl.maximum(told, least))
            odds -= tl.log(tl.maximum(target, least))
        if transfer != 0:
            error *= 1 + 3 * tl.load(number + ETA)
        tl.store(readings + reading + _ERROR, error)


@_kernel
def fuse_rows(
    logits, integers, numbers, readings, draft, weights, partial,
    total_rows, vocab, parts, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the weights of p_hat before filters, by every rule of `fuse_probs`, and their sum."""
    row, part = tl.program_id(0), tl.program_id(1)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    is_token = ids < vocab
    place = row * vocab + ids
    number, reading = numbers + row * ROW_WORDS, readings + row * READINGS
    transfer, temperature = (
        tl.load(integers + row * ROW_WORDS + TRANSFER),
        tl.load(number + TEMPERATURE),
    )
    z = tl.load(logits + place, mask=is_token, other=float("-inf")).to(tl.float64)
    total = tl.load(reading + _SUM)
    p = tl.exp((z - tl.load(reading + _TOP)) / temperature) / total
    if transfer != 0:
        eta, bar = tl.load(number + ETA), tl.load(reading + _BAR)
        best_q = tl.load(reading + _BEST_Q)
        q = tl.load(draft + place, mask=is_token, other=0.0)
        if transfer == ADAPTIVE:
            share = tl.load(reading + _SHARE)
            witness = tl.load(integers + row * ROW_WORDS + WITNESS)
            if witness >= 0:
                other = tl.load(
                    logits + witness * vocab + ids, mask=is_token, other=float("-inf")
                ).to(tl.float64)
                top, whole = tl.load(reading + _OTHER_TOP), tl.load(reading + _OTHER_SUM)
                q = (q + tl.exp((other - top) / temperature) / whole) / 2
            p = (1 - share) * p + share * tl.where(q >= bar, q, 0.0)
            p = p * tl.exp(eta * share * p)
        elif transfer == MIXTURE:
            p = p + eta * q
        else:
            move = q - p
            if transfer == BOOST:
                move = tl.maximum(move, 0.0) * 2 * best_q / (best_q + 1 / total)
            p = p * tl.exp(tl.where(q >= bar, eta * move, 0.0))
    p = tl.where(is_token, p, 0.0)
    tl.store(weights + place, p, mask=is_token)
    tl.store(partial + row * parts + part, tl.sum(p, 0))


@triton.jit
def _sum(partial, row, parts, WIDTH: tl.constexpr):
    """Return the sum of a row's weights, before filters."""
    part = tl.arange(0, WIDTH)
    return tl.sum(tl.load(partial + row * parts + part, mask=part < parts, other=0.0), 0)


@triton.jit
def _keep_all(vocab):
    """Return a least weight and a last token that keep every token."""
    return tl.full([], -1.0, tl.float64), tl.full([], 0.0, tl.float64) + vocab


@_kernel
def cut_rows(
    logits, integers, numbers, readings, best, order, partial, borders,
    total_rows, vocab, parts, WIDTH: tl.constexpr, size, SIZE: tl.constexpr,
):  # fmt: skip
    """Write the least weight that the filters keep, the last of its tokens, and their sum."""
    row = tl.program_id(0)
    rank = tl.arange(0, SIZE)
    top_k = tl.load(integers + row * ROW_WORDS + TOP_K)
    top_p = tl.load(numbers + row * ROW_WORDS + TOP_P)
    total = _sum(partial, row, parts, WIDTH)
    least, last = _keep_all(vocab)
    is_sure = total < float("inf")
    if (top_k < vocab) | (top_p < 1):
        error = 2 * tl.load(readings + row * READINGS + _ERROR)
        weight = tl.load(best + row * size + rank, mask=rank < size, other=0.0)
        kept = tl.where(rank < top_k, weight, 0.0)
        if top_k < vocab:
            total = tl.sum(kept, 0)
        before = (tl.cumsum(kept, 0) - kept) / total
        top_p = tl.where(top_p < 1, top_p, float("inf"))
        is_kept = (kept > 0) & (before < top_p + error)
        count = tl.sum(is_kept.to(tl.int32), 0)
        is_near = is_kept & (before > top_p - error)
        is_sure &= tl.sum(is_near.to(tl.int32), 0) == 0
        total = tl.sum(tl.where(is_kept, kept, 0.0), 0)
        end, cut = tl.maximum(count - 1, 0), tl.minimum(count, size - 1)
        least, highest_cut = tl.load(best + row * size + end), tl.load(best + row * size + cut)
        last_kept = tl.load(order + row * size + end)
        last = last_kept.to(tl.float64)
        if count < size:
            first_cut = tl.load(order + row * size + cut)
            at = logits + row * vocab
            is_tie = (least == highest_cut) & (tl.load(at + last_kept) == tl.load(at + first_cut))
            lowest = tl.load(best + row * size + size - 1)
            is_tie &= (size == vocab) | (highest_cut > lowest)  # or more may have lower ids
            is_sure &= is_tie | (highest_cut < least * (1 - error))
        else:
            is_sure &= size == vocab
    tl.store(borders + row * 4, least)
    tl.store(borders + row * 4 + 1, last)
    tl.store(borders + row * 4 + 2, total)
    tl.store(borders + row * 4 + 3, is_sure.to(tl.float64))


@triton.jit
def _excess(weight, q, total, error):
    """Return what p_hat has more than q of a token, and how much of it may be an error.

    A difference of close numbers is taken too high by that: the token wins rather too early, and
    then the row is not sure.
    """
    slack = tl.where((weight > 0) & (q > 0), 2 * error * (weight + total * q), 0.0)
    return tl.maximum(weight - total * q, 0.0) + slack, slack


@_kernel
def race_rows(
    logits, integers, numbers, readings, draft, weights, borders, partial,
    total_rows, vocab, parts, WIDTH: tl.constexpr, FILTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the highest ratio of a part of a row, its token, and the next highest ratio.

    The ratio is that of a weight to its time, as in `rapid.speculation.noise.race`.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    whole = integers + row * ROW_WORDS
    mode = tl.load(whole + MODE)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    is_token = ids < vocab
    ratio = tl.load(weights + row * vocab + ids, mask=is_token, other=0.0)
    if FILTERED:
        least, last = tl.load(borders + row * 4), tl.load(borders + row * 4 + 1)
        ratio = tl.where((ratio > least) | ((ratio == least) & (ids <= last)), ratio, 0.0)
    if mode == RESIDUAL:
        total = _sum(partial, row, parts, WIDTH)
        if FILTERED:
            total = tl.load(borders + row * 4 + 2)
        q = tl.load(draft + row * vocab + ids, mask=is_token, other=0.0)
        ratio, _ = _excess(ratio, q, total, tl.load(readings + row * READINGS + _ERROR))
    if mode != BEST:
        size: tl.constexpr = BLOCK // 4  # a counter gives the words of four tokens
        counter = (part * size + 1 + tl.arange(0, size)).to(tl.uint64)
        c0, c1, c2, c3 = draw_words(counter, whole + KEYS)
        word = tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [BLOCK])
        ratio = weigh_by_time(ratio, word)
    ratio = tl.where(is_token, ratio, -1.0)
    best = tl.max(ratio, 0)
    token = tl.min(tl.where(ratio == best, ids, vocab), 0)
    second = tl.max(tl.where(ids == token, -1.0, ratio), 0)
    place = row * parts + part
    tl.store(partial + total_rows * parts + place, best)
    tl.store(partial + 2 * total_rows * parts + place, second)
    tl.store(partial + 3 * total_rows * parts + place, token.to(tl.float64))


@_kernel
def choose_tokens(
    logits, integers, numbers, readings, draft, weights, borders, partial, decided,
    total_rows, vocab, parts, WIDTH: tl.constexpr, FILTERED: tl.constexpr,
):  # fmt: skip
    """Write the token of a row, and whether the drafted one is accepted."""
    row = tl.program_id(0)
    whole, number, reading = integers + row * ROW_WORDS, numbers + row * ROW_WORDS, row * READINGS
    mode, drafted, witness = (
        tl.load(whole + MODE),
        tl.load(whole + DRAFTED),
        tl.load(whole + WITNESS),
    )
    temperature, error = tl.load(number + TEMPERATURE), tl.load(readings + reading + _ERROR)
    part = tl.arange(0, WIDTH)
    is_part, place = part < parts, row * parts + part
    best = tl.load(partial + total_rows * parts + place, mask=is_part, other=-1.0)
    seconds = tl.load(partial + 2 * total_rows * parts + place, mask=is_part, other=-1.0)
    tokens = tl.load(partial + 3 * total_rows * parts + place, mask=is_part, other=0.0)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, tokens, 1.0 * vocab), 0).to(tl.int64)
    token = tl.minimum(token, vocab - 1)  # no token is best where all are NaN
    is_first = (best == top) & (tokens == token.to(tl.float64))
    second = tl.max(tl.where(is_first, seconds, best), 0)
    total = _sum(partial, row, parts, WIDTH)
    whole_total = total
    # NaN is not below infinity, and the highest number of a row with NaN may be anything.
    is_sure = total < float("inf")
    least, last = _keep_all(vocab)
    if FILTERED:
        least, last = tl.load(borders + row * 4), tl.load(borders + row * 4 + 1)
        total = tl.load(borders + row * 4 + 2)
        is_sure &= tl.load(borders + row * 4 + 3) > 0
    start = row * vocab
    out = decided + row * DECIDED_WORDS
    tl.store(out + FUSED, tl.load(weights + start + token) / whole_total)
    tolerance = 4 * error
    is_accepted, is_surely = row < 0, row < 0
    q = tl.full([], 0.0, tl.float64)
    if drafted >= 0:
        q = tl.load(draft + start + token)
        tl.store(out + DRAFTED_FUSED, tl.load(weights + start + drafted) / whole_total)
    if mode == RESIDUAL:
        tolerance += error * _NEAR
        of_drafted = tl.load(weights + start + drafted)
        is_kept = (of_drafted > least) | ((of_drafted == least) & (drafted <= last))
        of_drafted = tl.where(is_kept, of_drafted, 0.0)
        chance = of_drafted / (total * tl.load(draft + start + drafted))
        uniform = tl.load(number + NUMBER)
        is_accepted = uniform < chance
        is_surely = is_sure & (tl.abs(uniform - chance) > 4 * error * chance)
        excess, slack = _excess(tl.load(weights + start + token), q, total, error)
        is_sure &= 2 * slack < error * _NEAR * excess
    is_sure &= (second < top * (1 - tolerance)) & (top > _LEAST_RATIO)
    target = _prob(
        logits, row, token, tl.load(readings + reading + _TOP), tl.load(readings + reading + _SUM),
        temperature, vocab,
    )  # fmt: skip
    if witness >= 0:
        other_top, other_sum = (
            tl.load(readings + reading + _OTHER_TOP),
            tl.load(readings + reading + _OTHER_SUM),
        )
        q = (q + _prob(logits, witness, token, other_top, other_sum, temperature, vocab)) / 2
    tl.store(out + TOKEN, token.to(tl.float64))
    tl.store(out + IS_SURE, is_sure.to(tl.float64))
    tl.store(out + TARGET, target)
    tl.store(out + TOLD, q)
    tl.store(out + IS_ACCEPTED, is_accepted.to(tl.float64))
    tl.store(out + IS_ACCEPTED_SURELY, is_surely.to(tl.float64))
