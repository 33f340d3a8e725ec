"""Training of the embedded models, and what the trained checkpoints can do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from rapid.embedded import DRAFTER, TARGET, training
from rapid.embedded.chat import document_prompt
from rapid.embedded.curriculum import FACTS_ONLY, TRAINING_CONFIGS, Stage
from rapid.embedded.generator import generate_document
from rapid.embedded.training import loss_of, main, make_model, save

TOKENIZER = AutoTokenizer.from_pretrained(TARGET)
SMALL = replace(
    TRAINING_CONFIGS["target"],
    hidden_size=32,
    num_attention_heads=2,
    num_hidden_layers=1,
    stages=(Stage(1.0, (64,), FACTS_ONLY),),
    tokens_per_step=128,
)


@pytest.mark.parametrize("name", TRAINING_CONFIGS)
def test_a_model_is_made_in_the_shape_of_its_checkpoint(name):
    config = TRAINING_CONFIGS[name]
    kept = LlamaForCausalLM.from_pretrained(config.path)
    made = make_model(config, TOKENIZER)
    of_files = {"_name_or_path": "", "architectures": None, "dtype": None}
    assert made.config.to_dict() == kept.config.to_dict() | of_files
    for (key, tensor), (kept_key, kept_tensor) in zip(
        made.state_dict().items(), kept.state_dict().items(), strict=True
    ):
        assert (key, tensor.shape) == (kept_key, kept_tensor.shape)


def test_a_saved_model_is_stored_in_float16_and_loaded_in_float32(tmp_path):
    model = make_model(SMALL, TOKENIZER)
    for _ in range(2):  # a checkpoint replaces the one before
        save(model, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.dtype == torch.float32
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor.half().float())


def test_the_loss_is_that_of_the_answers_and_of_a_few_other_tokens():
    model = make_model(SMALL, TOKENIZER)
    ids = torch.arange(6, 70).view(2, 32)
    is_answer = torch.zeros_like(ids, dtype=torch.bool)
    is_answer[:, 20:24] = True
    torch.manual_seed(0)
    loss, is_right = loss_of(model, ids, is_answer)
    assert is_right.shape == (8,)
    assert loss.item() == pytest.approx(torch.tensor(1024.0).log().item(), rel=0.1)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_command_trains_and_writes_a_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(TRAINING_CONFIGS, "target", SMALL)
    out = tmp_path / "new"
    threads = torch.get_num_threads()
    try:
        main(["target", "--out", str(out), "--minutes", "0.01"])
        main(["target", "--out", str(out), "--minutes", "0.01", "--start", str(out)])
    finally:
        torch.set_num_threads(threads)
    trained = AutoModelForCausalLM.from_pretrained(out)
    assert trained.config.hidden_size == 32
    assert AutoTokenizer.from_pretrained(out).get_vocab() == TOKENIZER.get_vocab()
    started = make_model(SMALL, TOKENIZER).state_dict()
    assert any(
        not torch.equal(started[k].half().float(), v) for k, v in trained.state_dict().items()
    )


def test_another_seed_begins_from_other_weights(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(training, "train", lambda config, **_: asked.append(config))
    main(
        ["target", "--out", str(tmp_path), "--seed", "2", "--threads", str(torch.get_num_threads())]
    )
    (config,) = asked
    first = make_model(config, TOKENIZER).state_dict()
    other = make_model(TRAINING_CONFIGS["target"], TOKENIZER).state_dict()
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_the_command_makes_the_tokenizer(tmp_path):
    threads = torch.get_num_threads()
    try:
        main(["tokenizer", "--out", str(tmp_path)])
    finally:
        torch.set_num_threads(threads)
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == TOKENIZER.get_vocab()


@pytest.mark.parametrize("path", [TARGET, DRAFTER], ids=["target", "drafter"])
def test_a_checkpoint_answers_short_questions_on_short_documents(path):
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    assert model.dtype == torch.float32
    right = 0
    for seed in range(12):
        document = generate_document(f"smoke {seed}", 250)
        question = next(q for q in document.questions if q.kind == "fact")
        prompt = document_prompt(document.name, document.text, question.question)
        inputs = TOKENIZER.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt"
        )
        with torch.inference_mode():
            ids = model.generate(**inputs, max_new_tokens=30, do_sample=False)
        answer = ids[0, inputs["input_ids"].shape[1] :]
        right += TOKENIZER.decode(answer, skip_special_tokens=True) == question.answer
    assert right >= 9
