"""A question about a generated document, as the embedded models read it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from rapid.embedded import DRAFTER, TARGET
from rapid.embedded.chat import build_drafter_prompt, document_prompt
from rapid.embedded.generator import generate_document


class Example:
    """The first question about a generated document, with three readings of it."""

    def __init__(self, seed: int = 7, num_tokens: int = 1500) -> None:
        """Generate a document of about `num_tokens` tokens."""
        document = generate_document(seed, num_tokens)
        self.question = document.questions[0].question
        rarest = min(self.question.rstrip("?.").split(), key=document.text.count)
        chunks = [part for part in document.text.split("\n\n") if rarest in part]
        self._tokenizer = AutoTokenizer.from_pretrained(TARGET)
        long = self._encode(document_prompt(document.name, document.text, self.question))
        short = self._encode(build_drafter_prompt(document.name, chunks, self.question))
        # The target reads the whole document; the drafter and the witness read the paragraphs that
        # hold the question's rarest word.
        self.prompts = (long, short, short)

    @cached_property
    def models(self) -> tuple[Any, Any, Any]:
        """Target, drafter and, as the witness, the target again, as transformers loads them."""
        target, drafter = map(AutoModelForCausalLM.from_pretrained, (TARGET, DRAFTER))
        return target, drafter, target

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of an answer up to its end."""
        text: str = self._tokenizer.decode(token_ids)
        return text.split(self._tokenizer.eos_token)[0]

    def _encode(self, content: str) -> list[int]:
        chat = [{"role": "user", "content": content}]
        ids: list[int] = self._tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )
        return ids
