"""Training of the embedded tokenizer, target and drafter on generated text.

    python -m rapid.embedded.training tokenizer
    python -m rapid.embedded.training target
    python -m rapid.embedded.training drafter

Each model takes one CPU core an hour. With another `--seed` it is another model, for `--out`.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rapid.embedded import DRAFTER, TARGET
from rapid.embedded.curriculum import TRAINING_CONFIGS, TrainingConfig
from rapid.embedded.tokenizer import MAX_POSITIONS, make_tokenizer
from rapid.embedded.training_rows import RowMaker


def make_model(training: TrainingConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return an untrained model of the size that `training` gives."""
    torch.manual_seed(training.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=training.hidden_size,
        intermediate_size=3 * training.hidden_size,
        num_hidden_layers=training.num_hidden_layers,
        num_attention_heads=training.num_attention_heads,
        num_key_value_heads=training.num_key_value_heads,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def save(model: LlamaForCausalLM, path: Path) -> None:
    """Write the weights in float16 into the directory `path`, replacing each file atomically."""
    scratch = path.with_name(f".{path.name}.new")
    shutil.rmtree(scratch, ignore_errors=True)
    half = LlamaForCausalLM(model.config).half()
    half.load_state_dict(model.state_dict())
    half.save_pretrained(scratch)
    # float16 keeps the repository small; the config makes loading return float32 for the CPU.
    config = LlamaConfig.from_pretrained(scratch)
    config.dtype = "float32"
    config.save_pretrained(scratch)
    path.mkdir(parents=True, exist_ok=True)
    for file in scratch.iterdir():
        file.chmod(0o644)
        file.replace(path / file.name)
    scratch.rmdir()


def loss_of(
    model: LlamaForCausalLM, ids: torch.Tensor, is_answer: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of a batch of ids [rows, length], and whether each answer token was right.

    `is_answer` marks the answers [rows, length], whose loss it is. One in sixteen of the other
    tokens is added with weight 0.3, which suffices to learn the language of documents.
    """
    with torch.autocast("cpu", torch.bfloat16):
        # [rows, length, hidden]
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        target, answer = ids[:, 1:], is_answer[:, 1:]
        chosen = answer | (torch.rand(answer.shape) < 1 / 16)
        logits = model.lm_head(hidden[chosen]).float()
    target, answer = target[chosen], answer[chosen]
    losses = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    weights = torch.where(answer, 1.0, 0.3)
    return (losses * weights).sum() / weights.sum(), (logits.argmax(-1) == target)[answer]


def train(
    training: TrainingConfig, *, start: Path | None, from_share: float, minutes: float
) -> None:
    """Run the curriculum of `training` and save the checkpoint at its path.

    Args:
        start: Checkpoint whose weights training continues from; None starts anew.
        from_share: Share of the curriculum to skip, in [0, 1).
        minutes: CPU time of each thread for the whole curriculum.
    """
    tokenizer = AutoTokenizer.from_pretrained(training.path)
    model = LlamaForCausalLM.from_pretrained(start).float() if start else None
    model = model or make_model(training, tokenizer)
    model.train()
    rows = RowMaker(tokenizer.backend_tokenizer, f"train {training.seed}", training.retrieved)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=1.0, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    # CPU time drives the curriculum, so that a slow machine trains less, not longer.
    budget_s = 60 * minutes * torch.get_num_threads()
    began, seen, right = time.process_time(), 0, torch.zeros(0)
    while (share := from_share + (time.process_time() - began) / budget_s) < 1:
        stage = next(stage for stage in training.stages if share < stage.until)
        warm, decay = min(1.0, (seen + 1) / 100), min(1.0, (1 - share) / 0.5)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = training.learning_rate * warm * max(decay, 0.02)
        ids, is_answer = rows.batch(stage, training.tokens_per_step)
        loss, correct = loss_of(model, ids, is_answer)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        seen += 1
        right = torch.cat((right, correct.float()))
        if seen % 25 == 0:
            sys.stdout.write(
                f"{training.path.name} step {seen}  row {ids.shape[1]}  loss {loss.item():.3f}  "
                f"answer tokens right {right.mean():.3f}  "
                f"{share:.1%} done, {(1 - share) * minutes:.0f} min left\n"
            )
            sys.stdout.flush()
            right = torch.zeros(0)
        if seen % 250 == 0:
            save(model, training.path)
    save(model, training.path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and train the tokenizer or a model."""
    parser = argparse.ArgumentParser(prog="python -m rapid.embedded.training", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", choices=("tokenizer", *TRAINING_CONFIGS))
    parser.add_argument("--out", type=Path, help="checkpoint directory (default: in the package)")
    parser.add_argument("--start", type=Path, help="go on from the weights of this checkpoint")
    parser.add_argument("--from-share", type=float, default=0.0, help="enter the curriculum here")
    parser.add_argument(
        "--minutes", type=float, default=60, help="CPU time of a thread for the whole curriculum"
    )
    parser.add_argument(
        "--seed",
        type=int,
        help="of the first weights and of the documents (default: the package's)",
    )
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.what == "tokenizer":
        tokenizer = make_tokenizer()
        for path in [options.out] if options.out else [TARGET, DRAFTER]:
            tokenizer.save_pretrained(path)
        return
    training = TRAINING_CONFIGS[options.what]
    training = replace(training, seed=training.seed if options.seed is None else options.seed)
    if options.out:
        AutoTokenizer.from_pretrained(training.path).save_pretrained(options.out)
        training = replace(training, path=options.out)
    train(training, start=options.start, from_share=options.from_share, minutes=options.minutes)


if __name__ == "__main__":
    main()
