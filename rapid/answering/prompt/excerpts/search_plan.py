"""The plan of a retrieval: which turns the drafter reads as they are, and what is searched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rapid.answering.prompt.excerpts.query import choose_query, join_earlier
from rapid.chat_messages import Document, Message
from rapid.checkpoints.text import ChatText
from rapid.prompts import DrafterPlan, plan_drafter_chat

BudgetFor = Callable[[int], int]
"""Function from the number of tokens to search to the number of tokens to retrieve."""


@dataclass(frozen=True, slots=True)
class Search:
    """A planned retrieval for the drafter's prompt.

    Attributes:
        plan: The drafter's chat with its gaps, and the documents to search.
        query: Text to search for.
        budget_tokens: Tokens that may be retrieved.
        joined: The question with those before it, if it is searched for with them.
    """

    plan: DrafterPlan
    query: str
    budget_tokens: int
    joined: str | None = None


def plan_search(
    messages: Sequence[Message],
    documents: Sequence[Document],
    text: ChatText,
    *,
    budget_tokens: int | None,
    budget_for: BudgetFor,
    num_tokens: int | None = None,
    query: str | None = None,
    answer: str = "",
) -> Search:
    """Plan what the drafter reads verbatim, and the search for the rest.

    Args:
        messages: The chat.
        documents: The attachments.
        text: The target's tokenizer, which counts tokens.
        budget_tokens: Tokens that may be retrieved; None leaves the number to `budget_for`.
        budget_for: Function that chooses the budget from the size of chat and documents.
        num_tokens: Size of chat and documents, where a prompt has told it; None counts them here.
        query: Text to search for; None takes the question.
        answer: The answer so far, which is added to the query when the drafter's prompt is renewed.
    """
    if budget_tokens is None:
        if num_tokens is None:
            texts = [document.text for document in documents]
            texts += [message.text for message in messages]
            texts += [str(call) for message in messages for call in message.tool_calls]
            num_tokens = sum(map(text.count_tokens, texts))
        budget_tokens = budget_for(num_tokens)
    last = next(each.text for each in reversed(messages) if each.role == "user")
    chosen = choose_query(last, text.token_offsets, budget_tokens=budget_tokens, query=query)
    plan = plan_drafter_chat(
        messages,
        documents,
        budget_tokens=budget_tokens,
        count_tokens=text.count_tokens,
        question=chosen.question,
    )
    joined = None
    if query is None:
        joined = join_earlier(messages, text.token_offsets, budget_tokens=budget_tokens)
    searched_for = joined or chosen.text
    searched_for = f"{searched_for} {answer}" if answer else searched_for
    return Search(plan, searched_for, budget_tokens, joined)
