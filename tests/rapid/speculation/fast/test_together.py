"""Filters of rows that are drafted together: to the bit as of each row alone."""

from __future__ import annotations

import torch

from rapid.speculation.fast.together import _filter_rows
from rapid.speculation.sampling import filter_probs


def test_rows_with_many_equal_tokens_are_cut_where_each_alone_is() -> None:
    """Sums of equal numbers end on a nucleus' border, where the last bit decides."""
    numbers = torch.Generator().manual_seed(0)

    def draw(*values: float) -> list[float]:
        return [values[int(torch.randint(len(values), (), generator=numbers))] for _ in range(2)]

    for vocab in torch.randint(2, 80, (400,), generator=numbers).tolist():
        logits = torch.randint(0, 3, (2, vocab), generator=numbers)
        probs = torch.softmax(logits.double(), dim=-1)
        top_k, top_p = draw(1, 7, vocab, vocab), draw(0.1, 0.2, 0.5, 0.9, 1)
        filters = top_k, top_p, draw(0, 0.1, 0.5, 1)
        columns = torch.tensor(filters, dtype=torch.float64)[..., None]
        rows = _filter_rows(probs, *columns)
        for row, alone, how in zip(rows, probs, zip(*filters, strict=True), strict=True):
            assert torch.equal(row, filter_probs(alone, int(how[0]), *how[1:]))
