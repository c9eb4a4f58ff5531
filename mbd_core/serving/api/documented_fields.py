"""The names of the fields that OpenAI, vLLM, SGLang and Anthropic document for a generating request.

The request classes have every such field: it is honoured, has no effect (`Ignored`) or is refused (`Only`). So no
documented name is taken for a typing error. Sources: OpenAI's client 3.57, vLLM's protocol of November 2026 with its
older names, SGLang 0.5.23, and Anthropic's client 2.14 with its beta fields.
"""

SERVERS = ("OpenAI", "vLLM", "SGLang", "Anthropic")
CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGE = "/v1/messages"

_OPENAI_CHAT = """
    messages model audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens
    metadata modalities moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key
    prompt_cache_options prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier
    stop store stream stream_options temperature tool_choice tools top_logprobs top_p user verbosity web_search_options
"""
_OPENAI_COMPLETION = """
    model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
    stream_options suffix temperature top_p user
"""
_OPENAI_RESPONSE = """
    access_programs background background_options context_management conversation image include input instructions
    max_output_tokens max_tool_calls metadata model moderation parallel_tool_calls previous_response_id prompt
    prompt_cache_key prompt_cache_options prompt_cache_retention reasoning safety_identifier service_tier store stream
    stream_options temperature text tool_choice tools top_logprobs top_p truncation user
"""
_ANTHROPIC = """
    model messages max_tokens system tools tool_choice thinking output_config stop_sequences stream temperature top_p
    top_k metadata cache_control container inference_geo service_tier speed diagnostics context_management mcp_servers
    compaction thread fallbacks fallback_credit_token billing_policy output_format
"""
_VLLM = """
    use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words
    add_special_tokens structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
    routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params
    ec_transfer_params vllm_xargs repetition_detection thinking_token_budget stream_interval early_stopping
    guided_json guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern
    logits_processors response_format
"""
_VLLM_CHAT = """
    include_reasoning echo add_generation_prompt continue_final_message documents chat_template chat_template_kwargs
    media_io_kwargs mm_processor_kwargs return_prompt_text
"""
_VLLM_COMPLETION = "prompt_embeds best_of"
_VLLM_RESPONSE = """
    logit_bias top_k skip_special_tokens include_stop_str_in_output request_id mm_processor_kwargs priority cache_salt
    enable_response_messages previous_input_messages previous_response structured_outputs repetition_penalty seed stop
    ignore_eos vllm_xargs
"""
_SGLANG = """
    return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details
    return_spec_tokens_details return_token_ids top_k min_p min_tokens regex ebnf repetition_penalty stop_token_ids
    stop_regex no_stop_trim ignore_eos skip_special_tokens lora_path session_id session_params response_format
    custom_params custom_logit_processor watermark images_config mm_processor_kwargs data_parallel_rank rid extra_key
    cache_salt priority custom_labels bootstrap_host bootstrap_port bootstrap_room routed_dp_rank
    disagg_prefill_dp_rank min_new_tokens max_new_tokens
"""
_SGLANG_CHAT = """
    return_prompt_token_ids return_meta_info return_input_ids_in_sglext return_output_ids_in_sglext
    return_sampling_mask sampling_logprobs_mode return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64
    reasoning thinking task continue_final_message separate_reasoning stream_reasoning chat_template_kwargs
    max_dynamic_patch min_dynamic_patch use_audio_in_video video_config input_ids
"""
_SGLANG_COMPLETION = "json_schema"
_SGLANG_RESPONSE = """
    chat_template_kwargs request_id session_id priority extra_key cache_salt data_parallel_rank frequency_penalty
    presence_penalty stop top_k min_p repetition_penalty bootstrap_host bootstrap_port bootstrap_room routed_dp_rank
    disagg_prefill_dp_rank
"""

DOCUMENTED: dict[str, dict[str, tuple[str, ...]]] = {
    route: {
        name: tuple(server for server, names in texts.items() if name in names.split())
        for name in sorted({name for names in texts.values() for name in names.split()})
    }
    for route, texts in {
        CHAT: {"OpenAI": _OPENAI_CHAT, "vLLM": _VLLM + _VLLM_CHAT, "SGLang": _SGLANG + _SGLANG_CHAT},
        COMPLETION: {
            "OpenAI": _OPENAI_COMPLETION,
            "vLLM": _VLLM + _VLLM_COMPLETION,
            "SGLang": _SGLANG + _SGLANG_COMPLETION,
        },
        RESPONSE: {"OpenAI": _OPENAI_RESPONSE, "vLLM": _VLLM_RESPONSE, "SGLang": _SGLANG_RESPONSE},
        MESSAGE: {"Anthropic": _ANTHROPIC},
    }.items()
}
"""For each route, the names with the servers that document them. vLLM and SGLang also take OpenAI's fields, which are
listed only for OpenAI."""
