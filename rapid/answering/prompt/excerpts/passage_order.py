"""The order of passages in the drafter's prompt, by what its engines have read before.

An engine keeps the KV of a prompt's beginning. Passages that stood first before come first again,
so that a follow-up question finds more of its prompt read. It is meant for answers that do not
depend on what is drafted: in others the order would make them depend on earlier questions.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from itertools import takewhile

from rapid.ports import Passage

_MOST_OWNERS = 256  # whose prompts are remembered, those of the least recent ones forgotten
_MOST_PROMPTS = 32  # of each; an engine's KV pool seldom holds the beginnings of more


class PassageOrder:
    """The passages with which each owner's earlier prompts began, as hashes.

    It belongs to the event loop of one process, which knows only the prompts that it sent itself.
    """

    def __init__(self) -> None:
        self._prompts: OrderedDict[tuple[str, ...], deque[tuple[int, ...]]] = OrderedDict()

    def arrange(self, owner: tuple[str, ...], passages: Sequence[Passage]) -> tuple[Passage, ...]:
        """Return passages with those first that begin an earlier prompt, and remember this one.

        The others follow by how many of the remembered prompts they stand in, then as given: what
        recurs makes a beginning that recurs. Documents stay in their order, and a text that stands
        twice in one comes once.

        Args:
            owner: Whose KV is shared, as tenant and salt.
            passages: The passages, those of a document one after the other.
        """
        known = self._prompts.setdefault(owner, deque(maxlen=_MOST_PROMPTS))
        self._prompts.move_to_end(owner)
        if len(self._prompts) > _MOST_OWNERS:
            self._prompts.popitem(last=False)
        # Python's hash, whose key no other process knows: nothing of a deleted text stays here.
        left = {hash((each.document, each.text)): each for each in passages}

        def num_shared(prompt: tuple[int, ...]) -> int:
            return sum(len(left[key].text) for key in takewhile(left.__contains__, prompt))

        best = max(reversed(known), key=num_shared, default=())
        first = [*takewhile(left.__contains__, best)]
        counts = Counter(key for prompt in known for key in prompt)
        rest = [key for key in left if key not in first]
        ordered = [*first, *sorted(rest, key=lambda key: -counts[key])]
        ranks = {each.document: rank for rank, each in enumerate(passages)}
        order = tuple(sorted(ordered, key=lambda key: ranks[left[key].document]))
        known.append(order)
        return tuple(left[key] for key in order)
