"""A checkpoint of a Llama with random weights, to measure speed at shapes without trained models.

Its embeddings are large beside what attention adds, so that its distributions after a prompt and
after the prompt's last part are nearly the same (total variation about 0.2 for 1,024 and 512
tokens). Its drafts for itself are therefore partly accepted and partly rejected, as those of a
trained model are. It says nothing about quality.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

EMBEDDING_STD = 0.5
LOGITS_STD = 32.0  # the likeliest token has about 0.95, so a block seldom ends early in `paper`


def save_random_llama(
    folder: Path,
    *,
    hidden_size: int = 512,
    num_layers: int = 8,
    num_heads: int = 8,
    num_kv_heads: int = 2,
    vocab_size: int = 32_000,
    max_positions: int = 131_072,
    seed: int = 0,
) -> Path:
    """Write weights, configuration and a tokenizer of numbered words; no token ends an answer."""
    disable_progress_bar()
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        vocab_size=vocab_size,
        max_position_embeddings=max_positions,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=EMBEDDING_STD)
    torch.nn.init.normal_(model.lm_head.weight, std=LOGITS_STD / hidden_size**0.5)
    model.save_pretrained(folder)
    words = {f"word{index}": index for index in range(vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="word0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
