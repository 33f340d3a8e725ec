"""Numbers of races on CUDA, and the race of a proposal's candidates, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def draw_words(counter, keys):
    """Return the four words at each counter [n], of a decision with these keys [3].

    They are those of Philox 4x64-10 (Salmon et al., SC 2011, figure 2, with the constants of
    Random123).
    """
    zero = counter * 0
    c0, c1, c2, c3 = counter, zero + tl.load(keys).to(tl.uint64), zero, zero
    k0 = zero + tl.load(keys + 1).to(tl.uint64)
    k1 = zero + tl.load(keys + 2).to(tl.uint64)
    m0 = zero + tl.full([], 0xD2E7470EE14C6C93, tl.uint64)
    m1 = zero + tl.full([], 0xCA5A826395121157, tl.uint64)
    w0 = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    w1 = tl.full([], 0xBB67AE8584CAA73B, tl.uint64)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, m0), c0 * m0
        high1, low1 = tl.umulhi(c2, m1), c2 * m1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = k0 + w0
        k1 = k1 + w1
    return c0, c1, c2, c3


@triton.jit
def weigh_by_time(weight, word):
    """Return the ratios of weights to their times in a race, by random words."""
    uniform = ((word >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16
    return weight / -tl.log(uniform)


@triton.jit(do_not_specialize=["total_rows"])
def race_candidates(
    candidates, settings, tokens, total_rows, size, WORDS: tl.constexpr, M: tl.constexpr
):  # fmt: skip
    """Write the token that is drafted from each row's candidates, as `propose` draws it.

    Args:
        candidates: Token ids, and their probabilities [2, total_rows, size].
        settings: Words of each row; the last four are its keys, and 0 for a greedy one.
    """
    row = tl.program_id(0)
    rank = tl.arange(0, M)
    place = row * size + rank
    ids = tl.load(candidates + place, mask=rank < size, other=0.0).to(tl.int64)
    weight = tl.load(candidates + total_rows * size + place, mask=rank < size, other=0.0)
    ratio = weight.to(tl.float32).to(tl.float64)  # as it is sent
    keys = settings + row * WORDS + WORDS - 4
    if tl.load(keys + 3) != 0:
        c0, c1, c2, c3 = draw_words((ids // 4 + 1).to(tl.uint64), keys)
        at = ids % 4
        word = tl.where(at == 0, c0, tl.where(at == 1, c1, tl.where(at == 2, c2, c3)))
        ratio = weigh_by_time(ratio, word)
    best = tl.max(ratio, 0)
    first = tl.min(tl.where(ratio == best, rank, M - 1), 0)  # no ratio is best where all are NaN
    tl.store(tokens + row, tl.sum(tl.where(rank == first, ids, 0), 0))
