"""Training rows: in the format of the chat, and the same for a seed."""

from __future__ import annotations

import hashlib

import pytest
import torch
from transformers import AutoTokenizer

from rapid.embedded import TARGET
from rapid.embedded.curriculum import EVERYTHING, TRAINING_CONFIGS, Stage
from rapid.embedded.training_rows import RowMaker

TOKENIZER = AutoTokenizer.from_pretrained(TARGET)
HASHES = {"target": "c23e0518e09b094f", "drafter": "abdee0a81f191d23"}


@pytest.mark.parametrize("name", TRAINING_CONFIGS)
def test_rows_stay_what_they_are(name):
    """The models were trained on them."""
    training = TRAINING_CONFIGS[name]
    rows = RowMaker(TOKENIZER.backend_tokenizer, f"train {training.seed}", training.retrieved)
    batches = [
        tensor.tolist() for stage in training.stages for tensor in rows.batch(stage, 3 * 2304)
    ]
    assert hashlib.sha256(repr(batches).encode()).hexdigest().startswith(HASHES[name])


def test_a_chat_is_rendered_as_it_was_trained():
    row, _ = RowMaker(TOKENIZER.backend_tokenizer, "row", retrieved=0.0).batch(
        Stage(1.0, (512,), EVERYTHING), 512
    )
    user = TOKENIZER.convert_tokens_to_ids("<|user|>")
    end = TOKENIZER.eos_token_id
    turn = row[0].tolist()
    # From the first user turn to the first <|assistant|>, as a chat again.
    content = TOKENIZER.decode(turn[2 : turn.index(end)])
    chat = [{"role": "user", "content": content}]
    ids = TOKENIZER.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert turn[1] == user
    assert turn[: len(ids)] == ids


def test_the_marked_tokens_are_answers_to_their_end():
    ids, is_answer = RowMaker(TOKENIZER.backend_tokenizer, "marks", retrieved=0.5).batch(
        Stage(1.0, (512,), EVERYTHING, absent=0.25), 8 * 512
    )
    assert ids.shape == is_answer.shape == (8, 512)
    assistant = TOKENIZER.convert_tokens_to_ids("<|assistant|>")
    begins = is_answer[:, 1:] & ~is_answer[:, :-1]
    ends = ~is_answer[:, 1:] & is_answer[:, :-1]
    assert begins.sum() >= 8
    assert torch.equal(begins, ids[:, :-1] == assistant)
    assert set(ids[:, :-1][ends].tolist()) == {TOKENIZER.eos_token_id}
