"""Prompts for the embedded models like those of the served application, without a retriever."""

from __future__ import annotations

from evaluation.tasks import DAY
from rapid.chat_messages import Document, Message
from rapid.checkpoints.text import ChatText
from rapid.embedded.generator import generate_document
from rapid.prompts import target_messages


def prompts(seed: int | str, num_tokens: int) -> tuple[list[int], list[int]]:
    """Return the target's prompt, with a whole document, and the drafter's, around the evidence."""
    text = ChatText.load("embedded:target")
    document = generate_document(seed, num_tokens)
    asked = next(each for each in document.questions if each.kind != "fact")
    around = slice(max(asked.evidence[0][0] - 300, 0), asked.evidence[-1][1] + 300)
    chat = (Message("user", asked.question),)
    long, short = (
        text.encode_chat(target_messages(chat, (Document(document.name, part),)), day=DAY)
        for part in (document.text, document.text[around])
    )
    return long, short
