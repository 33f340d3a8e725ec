"""Prompts as token ids: of a chat with its documents, of a text, and the places of passages in one.

No text is tokenized that cannot fit the context anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rapid.chat_messages import Document
from rapid.checkpoints.text import ChatText
from rapid.errors import BadRequest, PromptTooLong
from rapid.messages import GenerateRequest
from rapid.prompts import target_messages

_PLAUSIBLE_CHARACTERS = 8  # of a token; a text with more to each token of the context is suspect


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as the target reads it, with the vocabulary's names of its tokens.

    Attributes:
        max_model_len: The longest prompt and answer, in tokens.
    """

    token_ids: tuple[int, ...]
    token_strs: tuple[str, ...]
    max_model_len: int


def encode_prompt(
    text: ChatText, request: GenerateRequest, documents: Sequence[Document], max_context: int
) -> list[int]:
    """Return a whole chat with its documents, or a prompt that is no chat.

    Raises:
        BadRequest: As for `encode_raw`.
        PromptTooLong: The chat has so much text that it certainly has more than `max_context`
            tokens. It was not tokenized to the end, which would take time and memory.
    """
    if request.prompts:
        return encode_raw(text, request, max_context)
    texts = [each.text for each in documents]
    texts += [each.text for each in request.messages]
    texts += [str(call) for each in request.messages for call in each.tool_calls]
    texts += [str(each) for each in (request.tools.tools if request.tools else ())]
    is_suspect = sum(map(len, texts)) > _PLAUSIBLE_CHARACTERS * max_context
    if is_suspect and text.has_more_tokens(texts, max_context):
        raise PromptTooLong.of(
            max_context,
            f"the prompt has more than the {max_context} tokens of the target's context.",
        )
    chat = target_messages(request.messages, documents)
    tools = request.tools.tools if request.tools else ()
    thinks = request.thinking.is_on
    return text.encode_chat(chat, day=request.date, tools=tools, thinks=thinks)


def encode_raw(text: ChatText, request: GenerateRequest, max_context: int) -> list[int]:
    """Return a prompt that is no chat.

    Raises:
        BadRequest: It is empty, or has a token id beyond the vocabulary.
        PromptTooLong: It certainly has more than `max_context` tokens.
    """
    (prompt,), vocab_size = request.prompts, len(text.tokenizer)
    if not prompt:
        raise BadRequest("the prompt is empty", "messages", "invalid_value")
    if not isinstance(prompt, str):
        if beyond := [each for each in prompt if each >= vocab_size]:
            raise BadRequest(
                f"the prompt has the token id {beyond[0]}, and the model's vocabulary has "
                f"{vocab_size} tokens",
                "messages",
                "invalid_value",
            )
        return list(prompt)
    is_suspect = len(prompt) > _PLAUSIBLE_CHARACTERS * max_context
    if is_suspect and text.has_more_tokens([prompt], max_context):
        raise PromptTooLong.of(
            max_context, f"the prompt has more than {max_context} tokens. Shorten it."
        )
    return text.encode(prompt, adds_special_tokens=request.adds_special_tokens)


def find_passages(
    text: ChatText, prompt_ids: Sequence[int], passages: Sequence[str]
) -> tuple[tuple[int, int], ...]:
    """Return the tokens of passages, each with the blank line that follows it.

    So they are the same tokens wherever a passage stands. One that is not found is left out.
    """
    parts = [part for each in passages for part in (each, "\n\n")]
    spans = text.find_tokens(prompt_ids, parts)
    found, end = list[tuple[int, int]](), 0
    for (start, known), (_, stop) in zip(spans[::2], spans[1::2], strict=True):
        if known and end <= start < stop:
            found.append((start, stop))
            end = stop
    return tuple(found)
