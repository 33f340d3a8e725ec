"""The turns of a chat that does not fit the target's context: which of them are left out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from rapid.chat_messages import Message

_STEPS = 16  # of the context: the cut moves by such parts, not with every question
_CHARACTERS = 4  # of a token, about


def split_turns(messages: Sequence[Message]) -> list[tuple[int, ...]]:
    """Return the turns that may be left out, the oldest first, each by the places of its messages.

    A turn is a user's message with all that follows up to the next one; behind the last user's
    message, it is one of the assistant with the results of its calls. System texts, the last user's
    message and the last turn are never left out.
    """
    last = max(place for place, each in enumerate(messages) if each.role == "user")
    turns: list[list[int]] = []
    for place, each in enumerate(messages):
        if each.role == "system":
            continue
        if not turns or each.role == ("user" if place <= last else "assistant"):
            turns.append([])
        turns[-1].append(place)
    return [tuple(turn) for turn in turns[:-1] if last not in turn]


def choose_turns(
    messages: Sequence[Message], room: int, count_tokens: Callable[[str], int]
) -> tuple[int, ...]:
    """Return the places of the messages that are left out so that the rest fits.

    The latest turns stay, as many as fit. A few more than must are left out, always up to the same
    places in the text, so that a chat that grows is cut at the same turn for a while, and what
    follows finds the rest of it read.

    Args:
        messages: The chat.
        room: Tokens for those turns that may be left out.
        count_tokens: Returns the tokens of a text.
    """
    turns = split_turns(messages)

    def read(turn: Sequence[int]) -> list[str]:
        return ["".join((messages[at].text, *map(str, messages[at].tool_calls))) for at in turn]

    said = [read(turn) for turn in turns]
    first, left = len(turns), room
    while first and (left := left - sum(map(count_tokens, said[first - 1]))) >= 0:
        first -= 1
    step = max(1, _CHARACTERS * room // _STEPS)
    ends = [0, *itertools.accumulate(sum(map(len, texts)) for texts in said)]
    while 0 < first < len(turns) and ends[first] // step == ends[first - 1] // step:
        first += 1
    return tuple(itertools.chain.from_iterable(turns[:first]))


def drop_turns(
    messages: Sequence[Message],
    room: int,
    encode: Callable[[tuple[Message, ...]], list[int]],
    count_tokens: Callable[[str], int],
) -> tuple[list[int], tuple[int, ...]]:
    """Return the prompt of a chat without its oldest turns, and the places of their messages.

    It is too long where all that may be left out is, and it still does not fit.

    Args:
        messages: The chat.
        room: Longest prompt, in tokens.
        encode: Returns the prompt of a chat.
        count_tokens: Returns the tokens of a text.
    """

    def encode_without(places: Sequence[int]) -> list[int]:
        return encode(tuple(each for at, each in enumerate(messages) if at not in places))

    every = tuple(itertools.chain.from_iterable(split_turns(messages)))
    shortest = encode_without(every)
    left = room - len(shortest)
    while left > 0 and len(places := choose_turns(messages, left, count_tokens)) < len(every):
        token_ids = encode_without(places)
        if (over := len(token_ids) - room) <= 0:
            return token_ids, places
        left -= max(over, room // 64)  # what the template adds between turns
    return shortest, every
