"""The drafter's word on whether what was retrieved answers a question, as `auto` asks for it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from evaluation.drivers.prompter import ShortContext
from evaluation.tasks import DAY
from rapid.answering.answerable import append_question, read_log_odds, terms_of
from rapid.answering.session import Session, Terms
from rapid.checkpoints.text import ChatText
from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig
from rapid.engines.engine import Engine
from rapid.engines.forward.loading import load_model
from rapid.engines.local_ports import LocalPool
from rapid.messages import as_prompt

AT_ONCE = 6  # questions, whose prompts share a forward
LEASTS = (-0.5, 0.0, 0.3, 0.5, 0.7)  # log odds of the drafter's yes that are tabulated
WORDS = Path(".eval/words.jsonl")


class Asked:
    """A drafter that is asked about many questions.

    Its words are kept in a file, so that what was asked is not asked again.
    """

    def __init__(self, model: str, kept: Path) -> None:
        config = EngineConfig(
            model=model,
            dtype="bfloat16",
            max_context=2048,
            kv_cache_tokens=16_384,
            step_tokens=4096,
        )
        self._engine = Engine(load_model(config), config, is_watched=False)
        self._text = ChatText.load(model)
        self._kept = kept
        self._words: dict[str, float] = {}
        if kept.exists():
            self._words = dict(map(json.loads, kept.read_text().splitlines()))
        kept.parent.mkdir(parents=True, exist_ok=True)
        self._turn = asyncio.Semaphore(AT_ONCE)

    async def log_odds(self, name: str, found: ShortContext) -> float:
        """Return the log odds of yes against no; `name` is that of question and condition."""
        async with self._turn:
            if name not in self._words:
                self._words[name] = await self._ask(found)
                with self._kept.open("a") as lines:
                    lines.write(json.dumps([name, self._words[name]]) + "\n")
                print(f"{len(self._words)} words", end="\r", flush=True)
        return self._words[name]

    async def _ask(self, found: ShortContext) -> float:
        prompt_ids = as_prompt(self._text.encode_chat(append_question(found.chat), day=DAY))
        terms = Terms("asked", "local", SamplingConfig(seed=0), SpeculationConfig(), 1)
        async with Session(terms_of(terms)) as session:
            held = await session.take(LocalPool(self._engine), "drafter", prompt_ids)
            return await read_log_odds(held, self._text.decode)

    def close(self) -> None:
        self._engine.close()
