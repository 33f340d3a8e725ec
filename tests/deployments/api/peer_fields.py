"""The fields of requests of other servers, as their sources had them.

Whoever brings a list up to date classifies what is new in it (`test_classification`).
"""

from __future__ import annotations

# vllm/entrypoints/openai/chat_completion/protocol.py, commit 002032ee2b18 (after 0.33), and fields
# that older releases had
_VLLM = """
    add_generation_prompt add_special_tokens allowed_token_ids bad_words best_of cache_salt
    chat_template chat_template_kwargs continue_final_message custom_params detokenize documents
    ec_transfer_params echo frequency_penalty guided_choice guided_decoding_backend guided_grammar
    guided_json guided_regex guided_whitespace_pattern ignore_eos include_reasoning
    include_stop_str_in_output kv_transfer_params length_penalty logit_bias logits_processors
    logprob_token_ids logprobs max_completion_tokens max_tokens media_io_kwargs messages min_p
    min_tokens mm_processor_kwargs model n parallel_tool_calls presence_penalty priority
    prompt_logprobs reasoning_effort repetition_detection repetition_penalty request_id
    response_format return_mm_kwargs return_prompt_text return_token_ids return_token_offsets
    return_tokens_as_token_ids routed_experts_prompt_start seed session_id skip_special_tokens
    spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options
    structured_outputs suffix temperature thinking_token_budget tool_choice tools top_k
    top_logprobs top_p truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs
    watermarking
"""
# python/sglang/srt/entrypoints/openai/protocol.py, commit 004c82e07d87
_SGLANG = """
    bootstrap_host bootstrap_port bootstrap_room cache_salt chat_template_kwargs
    continue_final_message custom_logit_processor custom_params data_parallel_rank
    disagg_prefill_dp_rank ebnf extra_key frequency_penalty ignore_eos images_config input_ids
    logit_bias logprobs lora_path max_completion_tokens max_dynamic_patch max_tokens messages
    min_dynamic_patch min_p min_tokens model n ngram_corpus_id no_stop_trim parallel_tool_calls
    presence_penalty priority reasoning reasoning_effort regex repetition_penalty response_format
    return_cached_tokens_details return_hidden_states return_meta_info return_prompt_token_ids
    return_routed_experts return_token_ids rid routed_dp_rank routed_experts_start_len seed
    separate_reasoning session_id session_params skip_special_tokens stop stop_regex
    stop_token_ids stream stream_options stream_reasoning task temperature tool_choice tools top_k
    top_logprobs top_p use_audio_in_video user
"""
# tools/server/server-schema.cpp of ggml-org/llama.cpp, commit 0177c3422 (2026)
_LLAMA_CPP = """
    adaptive_decay adaptive_target backend_sampling cache_prompt chat_format chat_parser
    continue_final_message dry_allowed_length dry_base dry_multiplier dry_penalty_last_n
    dry_sequence_breakers dynatemp_exponent dynatemp_range echo frequency_penalty
    generation_prompt grammar grammar_lazy grammar_triggers grammar_type ignore_eos json_schema
    logit_bias logprobs lora max_completion_tokens max_tokens min_keep min_p mirostat mirostat_eta
    mirostat_tau n n_cache_reuse n_cmpl n_discard n_indent n_keep n_predict n_probs
    parse_tool_calls post_sampling_probs presence_penalty preserved_tokens
    reasoning_budget_end_tag reasoning_budget_end_tags reasoning_budget_message
    reasoning_budget_start_tag reasoning_budget_tokens reasoning_control reasoning_format
    repeat_last_n repeat_penalty response_fields return_progress return_tokens samplers seed
    sse_ping_interval stop stream stream_options t_max_predict_ms temperature timings_per_token
    top_k top_n_sigma top_p typical_p verbose xtc_probability xtc_threshold
"""

# vllm/entrypoints/serve/tokenize/protocol.py, commit 030ea52effcb
_VLLM_TOKENIZE = """
    add_generation_prompt add_special_tokens chat_template chat_template_kwargs
    continue_final_message media_io_kwargs messages mm_processor_kwargs model prompt
    return_token_strs tools
"""
# The classes of vllm/entrypoints/pooling/base/protocol.py, commit 020638a6b026, and what older
# releases had
_VLLM_POOLING = """
    add_special_tokens cache_salt mm_processor_kwargs model padding priority request_id
    truncate_prompt_tokens truncation_side use_activation user
"""
_VLLM_EMBEDDINGS = """
    dimensions embed_dtype encoding_format endianness input messages normalize
"""
# What vllm/entrypoints/pooling/score/protocol.py has beside them, commit 08a48e2b51ac
_VLLM_RERANK = "activation documents query softmax top_n"
# Cohere's `POST /v1/rerank` and `/v2/rerank`, and Jina's `POST /v1/rerank`, by their references
_COHERE_RERANK = """
    documents max_chunks_per_doc max_tokens_per_doc model priority query rank_fields
    return_documents top_n
"""
_JINA_RERANK = "documents model query return_documents return_embeddings top_n truncation"

MODEL_PEERS: dict[str, frozenset[str]] = {
    "/tokenize": frozenset(_VLLM_TOKENIZE.split()),
    "/detokenize": frozenset(("model", "skip_special_tokens", "tokens")),  # vLLM's and SGLang's
    "/v1/embeddings": frozenset((_VLLM_POOLING + _VLLM_EMBEDDINGS).split()),
    "/v1/rerank": frozenset(
        " ".join((_VLLM_POOLING, _VLLM_RERANK, _COHERE_RERANK, _JINA_RERANK)).split()
    ),
}
CHAT_PEERS: dict[str, frozenset[str]] = {
    "vLLM": frozenset(_VLLM.split()),
    "SGLang": frozenset(_SGLANG.split()),
    "llama.cpp": frozenset(_LLAMA_CPP.split()),
}
