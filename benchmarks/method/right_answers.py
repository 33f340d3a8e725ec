"""The probability that a rule gives the right answer, computed without decoding.

An answer is right when every one of its tokens is. So it is enough to know each model's logits
along the right answer, which takes one forward each. Greedy decoding gives the answer when each of
its tokens is the best of p_hat, and sampling gives it with probability ``prod p_hat(token)``,
exactly. Every rule, strength and temperature is then arithmetic on the same logits. (`fused`
commits exactly what p_hat gives, token by token: `tests/end_to_end/test_slow_reference.py`.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from evaluation.drivers.prompter import Prompter, ShortContext, open_prompter
from evaluation.items import Item
from evaluation.tasks import Condition, RetrievalSettings, Source, Task
from rapid.checkpoints.files import checkpoint_source
from rapid.checkpoints.text import ChatText


class Reader:
    """A reader of a task's prompts with two checkpoints, in one process."""

    def __init__(self, task: Task, items: Sequence[Item], models: Sequence[str]) -> None:
        torch.set_num_threads(1)
        self._models = [
            AutoModelForCausalLM.from_pretrained(checkpoint_source(model)).eval()
            for model in models
        ]
        self._text = ChatText.load(models[0])
        self._runner = asyncio.Runner()
        texts = [self._text, ChatText.load(models[1])]
        self._prompter: Prompter = self._runner.run(open_prompter(task, items, *texts))

    def right_ids(self, item: Item) -> list[int]:
        """Return the answer's tokens and its end."""
        tokenizer = self._text.tokenizer
        return [*tokenizer.encode(item.answers[0]), tokenizer.eos_token_id]

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text as the caller reads it."""
        decoded: str = self._text.tokenizer.decode(token_ids, skip_special_tokens=True)
        return decoded

    def context_logits(self, item: Item, right: Sequence[int]) -> torch.Tensor:
        """Return the target's logits on the whole context, `[len(right), vocab]`."""
        prompt = self._prompter.target_prompt(item, Condition()).tolist()
        return self._logits(0, prompt, right)

    def retrieve(self, item: Item, condition: Condition) -> ShortContext:
        """Retrieve what the drafter reads."""
        return self._runner.run(self._prompter.retrieve(item, condition))

    def retrieved_logits(
        self, found: ShortContext, right: Sequence[int], *, by_target: bool
    ) -> torch.Tensor:
        """Return the logits of the drafter, or of the target as its own, `[len(right), vocab]`."""
        prompt = self._prompter.encode(found, by_target).tolist()
        return self._logits(0 if by_target else 1, prompt, right)

    @torch.inference_mode()
    def _logits(self, model: int, prompt: list[int], right: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([[*prompt, *right[:-1]]])
        return self._models[model](ids, logits_to_keep=len(right)).logits[0].float()


def task_of(split: str, lengths: Sequence[int], num_items: int) -> Task:
    """Return a task of generated documents as in the laptop grid."""
    return Task(
        name=f"right-answers-{split}",
        description="the same kinds of items as the laptop grid",
        source=Source(
            loader="generated",
            split=split,
            options={"lengths": {str(length): num_items for length in lengths}},
        ),
        metrics=("exact",),
        retrieval=RetrievalSettings(chunk_tokens=64, tokens=320, embedder="lexical"),
    )
