"""Checks that refuse a request before any of its text is read."""

from __future__ import annotations

from rapid.chat_messages import ThinkingRequest
from rapid.config import OwnDrafting, SamplingConfig, SpeculationConfig
from rapid.errors import BadRequest, PromptTooLong
from rapid.messages import GenerateRequest
from rapid.vllm_config import vllm_refusal

MOST_BLOCK_BYTES = 32 * 2**20  # of a round's blocks, which cross processes
_CANDIDATE_BYTES = 8  # of a candidate in a block: an int32 id and a float32 probability


def check_refresh(request: GenerateRequest, own_drafting: OwnDrafting | None) -> None:
    """Raise an error if a request wants to retrieve again where that cannot be done exactly.

    Raises:
        BadRequest: The request has several choices, which would each need a prompt of their own;
            or its mode is `paper`, whose bonus tokens are never drafted; or nothing is retrieved
            for the drafter.
    """
    if not request.speculation.refresh:
        return
    why = None
    if request.num_choices > 1:
        why = "goes with one choice: leave out n"
    elif request.speculation.mode == "paper":
        why = "is not part of mode 'paper': leave it out, or use 'fused'"
    elif own_drafting:
        why = f"needs a drafter that reads; this server drafts by {own_drafting.name}: leave it out"
    if why:
        raise BadRequest(f"rapid.refresh {why}", "rapid.refresh", "invalid_value")


def check_penalty(request: GenerateRequest) -> None:
    """Refuse a repetition penalty over documents, where it keeps answers from their very words.

    Raises:
        BadRequest: The request does not say that it is meant so.
    """
    is_meant = request.penalize_documents or not request.documents
    if request.repetition_penalty > 1 and not is_meant:
        raise BadRequest(
            "repetition_penalty over documents makes every word of theirs less likely in the "
            "answer: leave it out, take frequency_penalty, or set rapid.penalize_documents.",
            "repetition_penalty",
            "invalid_value",
        )


def check_tokens(sampling: SamplingConfig, vocab_size: int) -> None:
    """Refuse settings that name a token which the models lack.

    Raises:
        BadRequest: An id is not below `vocab_size`.
    """
    for name, token in sampling.name_tokens():
        if token >= vocab_size:
            raise BadRequest(
                f"{name} names token {token}; the models have the tokens 0 to {vocab_size - 1}.",
                name,
            )


def check_lengths(
    request: GenerateRequest,
    max_context: int,
    drafter_context: int,
    *,
    whose: str = "target",
    hint: str = "",
) -> None:
    """Raise an error for lengths that fit no prompt at all, before any text is tokenized.

    Args:
        request: The request.
        max_context: Longest prompt plus answer of the model that answers, in tokens.
        drafter_context: Longest prompt plus answer of the model that drafts, in tokens.
        whose: Role of the model that answers, which the error names.
        hint: Advice that is appended to the error about the answer.

    Raises:
        PromptTooLong: The answer alone would fill the context.
        BadRequest: The retrieved text alone would fill the drafter's context.
    """
    if request.max_tokens is not None and request.max_tokens >= max_context:
        raise PromptTooLong.of(
            max_context,
            f"a prompt with an answer of {request.max_tokens} tokens is longer than the "
            f"{whose}'s context of {max_context} tokens.{hint}",
            "max_tokens",
        )
    budget = request.retrieval_tokens
    if budget is not None and budget >= drafter_context:
        raise BadRequest(
            f"rapid.retrieval_tokens must be below the drafter's context of {drafter_context} "
            f"tokens; it is {budget}.",
            "rapid.retrieval_tokens",
            "invalid_value",
        )


def check_blocks(request: GenerateRequest, speculation: SpeculationConfig, vocab_size: int) -> None:
    """Raise an error if the blocks of one round, over all choices, would be too large to move.

    Args:
        request: The request.
        speculation: The resolved settings.
        vocab_size: Number of tokens that a proposal without a cut holds.

    Raises:
        BadRequest: The draft is too long for so many candidates to each token.
    """
    if request.speculation.mode in ("plain", "rag"):
        return
    num_kept = min(speculation.draft_top_k or vocab_size, vocab_size)
    num_bytes = request.num_choices * speculation.max_draft * num_kept * _CANDIDATE_BYTES
    if num_bytes > MOST_BLOCK_BYTES:
        raise BadRequest(
            f"a round of {request.num_choices} x {speculation.max_draft} drafted tokens with "
            f"{num_kept} candidates each has {num_bytes} bytes, and {MOST_BLOCK_BYTES} is the "
            "most: lower rapid.max_draft, rapid.draft_top_k or n",
            "rapid.draft_top_k",
            "invalid_value",
        )


def check_vllm_drafts(
    request: GenerateRequest, sampling: SamplingConfig, speculation: SpeculationConfig
) -> None:
    """Raise BadRequest if a drafter that vLLM computes cannot do what a request asks of it."""
    mode, is_greedy = request.speculation.mode, sampling.temperature == 0
    if mode == "plain":
        return
    is_bounded = request.thinking != ThinkingRequest()  # as its end would be by a budget
    if sampling.follows_answer or sampling.allowed_token_ids or is_bounded:
        raise BadRequest(
            "A drafter that vLLM computes follows no grammar (as of strict tools), penalty or "
            "bound of tokens: ask with rapid.mode 'plain', or without them.",
            "rapid.mode",
            "invalid_value",
        )
    if refused := vllm_refusal(speculation, is_greedy=is_greedy):
        raise BadRequest("rapid.{} {}".format(*refused), f"rapid.{refused[0]}", "invalid_value")
    is_filtered = not is_greedy and (sampling.top_p < 1 or sampling.top_k is not None)
    if mode == "rag" and request.num_logprobs is not None and is_filtered:
        raise BadRequest(
            "logprobs in mode 'rag' are vLLM's here, which come after its filters: leave out top_p "
            "and top_k, or logprobs",
            "logprobs",
            "invalid_value",
        )
