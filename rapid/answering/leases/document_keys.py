"""Routing keys of requests: which of them read the same long text."""

from __future__ import annotations

from hashlib import blake2b

from rapid.messages import GenerateRequest

_LONG_CHARACTERS = 4096  # a longer first message counts as a document


def affinity_of(request: GenerateRequest) -> str:
    """Return a routing key for a request's long text: its documents, or a long first user message.

    Requests of one tenant with the same text have the same key, so a pool can send them to the
    replica that has already read it. The key is empty if there is no such text.
    """
    long = [document.digest for document in request.documents]
    if not long:
        said = [message.text for message in request.messages if message.role == "user"]
        said += [each[:_LONG_CHARACTERS] for each in map(str, request.prompts[:1])]
        long = [text for text in said[:1] if len(text) >= _LONG_CHARACTERS]
    if not long:
        return ""
    content = "\0".join((request.tenant, *long))
    return blake2b(content.encode(), digest_size=16).hexdigest()
