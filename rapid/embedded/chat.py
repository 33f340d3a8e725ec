"""The chat format and the two prompts that the embedded models are trained on."""

from collections.abc import Sequence

BOS, PAD, SYSTEM, USER, ASSISTANT, END = SPECIAL_TOKENS = (
    "<|bos|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def document_prompt(name: str, text: str, question: str) -> str:
    """Return the target's user message: the whole document, then the question."""
    return f'Document "{name}":\n{text}\n\n{question}'


def build_drafter_prompt(name: str, chunks: Sequence[str], question: str) -> str:
    """Return the drafter's user message: chunks in document order, then the question."""
    joined = "\n\n".join(chunks)
    return f'Retrieved text chunks of "{name}":\n{joined}\n\n{question}'
