"""Fields of OpenAI, Anthropic, vLLM and SGLang without an implementation here.

A field that changes nothing is accepted (`Ignored`); any other field is refused with its replacement (`Only`).

A field of a single route may also stand in the class of the route's request.
"""

from typing import Annotated, Any, Literal

from mbd_core.serving.api.parsing import Ignored, Only, Strict

NOT_STORED = "responses are not stored here"
WHOLE_INPUT = f"{NOT_STORED}; give the whole conversation in input"
ONE_SERVER = "the gateway chooses the replica; leave it out"
TOKENS_ASKED = "give return_token_ids"
NO_PARTS = "an answer is text; leave it out"


class OtherFields(Strict):
    """Fields of chats, completions and responses."""

    service_tier: Annotated[
        Literal["auto", "default", "flex", "scale", "priority"] | None,
        Ignored("all requests are of one tier", silent=("auto", "default")),
    ] = None
    safety_identifier: Annotated[str | None, Ignored()] = None
    prompt_cache_key: Annotated[str | None, Ignored()] = None
    prompt_cache_retention: Annotated[str | None, Ignored()] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, Ignored()] = None
    moderation: Annotated[Any, Only(instead="texts are not moderated here; leave it out")] = None
    # of vLLM and SGLang
    priority: Annotated[int | None, Ignored("waiting clients take turns", silent=(0,))] = None
    request_id: Annotated[str | None, Ignored("the reply has an id of its own; X-Request-ID names a request")] = None
    session_id: Annotated[str | None, Ignored()] = None
    rid: Annotated[str | list[str] | None, Ignored("the reply has an id of its own")] = None
    cache_salt: Annotated[
        Any, Only(instead='give decoding {"prefix_cache": false}, with which the request shares no blocks')
    ] = None
    extra_key: Annotated[
        Any, Only(instead='give decoding {"prefix_cache": false}, with which the request shares no blocks')
    ] = None
    kv_transfer_params: Annotated[Any, Only({}, instead="prompt and answer have one engine here; leave it out")] = None
    ec_transfer_params: Annotated[Any, Only({}, instead="prompt and answer have one engine here; leave it out")] = None
    vllm_xargs: Annotated[Any, Only({}, instead="there are no extensions of vLLM here; leave it out")] = None
    mm_processor_kwargs: Annotated[dict[str, Any] | None, Ignored()] = None
    media_io_kwargs: Annotated[dict[str, Any] | None, Ignored()] = None
    skip_special_tokens: Annotated[
        Any, Only(True, instead="give return_token_ids, and the tokens' text from POST /detokenize")
    ] = None
    spaces_between_special_tokens: Annotated[bool | None, Ignored()] = None
    include_stop_str_in_output: Annotated[Any, Only(False, instead="stop_reason of the choice names the string")] = (
        None
    )
    watermarking: Annotated[Any, Only(False, instead="answers have no watermark here; leave it out")] = None
    data_parallel_rank: Annotated[Any, Only(instead=ONE_SERVER)] = None
    routed_dp_rank: Annotated[Any, Only(instead=ONE_SERVER)] = None
    disagg_prefill_dp_rank: Annotated[Any, Only(instead=ONE_SERVER)] = None
    bootstrap_host: Annotated[Any, Only(instead=ONE_SERVER)] = None
    bootstrap_port: Annotated[Any, Only(instead=ONE_SERVER)] = None
    bootstrap_room: Annotated[Any, Only(instead=ONE_SERVER)] = None


class OtherGenerationFields(OtherFields):
    """Fields of chats and completions."""

    length_penalty: Annotated[Any, Only(1)] = None
    use_beam_search: Annotated[Any, Only(False, instead="give n, and choose among the choices")] = None
    early_stopping: Annotated[Any, Only(False, instead="there is no beam search here; leave it out")] = None
    truncate_prompt_tokens: Annotated[
        Any, Only(instead="no prompt is cut here; shorten it, POST /tokenize counts its tokens")
    ] = None
    truncation_side: Annotated[Literal["left", "right"] | None, Ignored()] = None
    prompt_logprobs: Annotated[
        Any, Only(instead="give echo, logprobs 1 and max_tokens 1 to /v1/completions, which scores a prompt")
    ] = None
    logprob_token_ids: Annotated[Any, Only(instead="log-probabilities are given of the 20 likeliest tokens")] = None
    return_tokens_as_token_ids: Annotated[Any, Only(False, instead=TOKENS_ASKED)] = None
    allowed_token_ids: Annotated[Any, Only(instead="give guided_choice, guided_regex or logit_bias")] = None
    bad_words: Annotated[Any, Only([], instead="give logit_bias -100 to their tokens, from POST /tokenize")] = None
    logits_processors: Annotated[Any, Only([], instead="give logit_bias")] = None
    routed_experts_prompt_start: Annotated[Any, Only(0)] = None
    return_token_offsets: Annotated[Any, Only(False, instead=TOKENS_ASKED)] = None
    return_mm_kwargs: Annotated[bool | None, Ignored()] = None
    repetition_detection: Annotated[Any, Only(instead="give repetition_penalty, or a stop string")] = None
    stream_interval: Annotated[int | None, Ignored("each token has a chunk of its own", silent=(1,))] = None
    guided_decoding_backend: Annotated[str | None, Ignored("the matcher is llguidance")] = None
    guided_whitespace_pattern: Annotated[Any, Only(instead="JSON is spaced as json.dumps does; leave it out")] = None
    # of SGLang
    stop_regex: Annotated[Any, Only([], "", instead="give stop, or guided_regex for the whole answer")] = None
    no_stop_trim: Annotated[Any, Only(False, instead="stop_reason of the choice names the string")] = None
    min_new_tokens: Annotated[Any, Only(0, instead="give min_tokens")] = None
    max_new_tokens: Annotated[Any, Only(instead="give max_tokens")] = None
    lora_path: Annotated[Any, Only(instead="name the adapter in model")] = None
    session_params: Annotated[Any, Only({}, instead="no session is kept; send the whole conversation")] = None
    custom_params: Annotated[Any, Only({}, instead="there are no processors of logits here; give logit_bias")] = None
    custom_logit_processor: Annotated[Any, Only(instead="there are no processors of logits here; give logit_bias")] = (
        None
    )
    watermark: Annotated[Any, Only({}, instead="answers have no watermark here; leave it out")] = None
    custom_labels: Annotated[dict[str, Any] | None, Ignored("no metric has them", silent=({},))] = None
    images_config: Annotated[dict[str, Any] | None, Ignored()] = None
    return_hidden_states: Annotated[Any, Only(False, instead="hidden states stay in the engine; leave it out")] = None
    routed_experts_start_len: Annotated[Any, Only(0)] = None
    return_cached_tokens_details: Annotated[
        Any, Only(False, instead="usage.prompt_tokens_details.cached_tokens has their number")
    ] = None
    return_spec_tokens_details: Annotated[Any, Only(False, instead="mbd of the reply has the counts of forwards")] = (
        None
    )


class OtherChatFields(Strict):
    """Fields of chats only."""

    functions: Annotated[Any, Only([], instead="give them as tools")] = None
    function_call: Annotated[Any, Only("none", "auto", instead="give tool_choice")] = None
    modalities: Annotated[Any, Only(["text"], instead=NO_PARTS)] = None
    audio: Annotated[Any, Only(instead=NO_PARTS)] = None
    prediction: Annotated[Any, Ignored("the text is decoded without it")] = None
    web_search_options: Annotated[Any, Only(instead="nothing is searched here; put what you found into a message")] = (
        None
    )
    # of vLLM
    echo: Annotated[Any, Only(False, instead="the reply has the new text alone; put the last message before it")] = (
        None
    )
    add_special_tokens: Annotated[Any, Only(False, instead="the chat template sets them; leave it out")] = None
    chat_template: Annotated[
        Any, Only(instead="write the prompt yourself, and send it to /v1/completions with parse_special")
    ] = None
    return_prompt_text: Annotated[Any, Only(False, instead="POST /tokenize gives the prompt's tokens")] = None
    include_reasoning: Annotated[
        Any, Only(True, instead='ignore the field reasoning, or give reasoning_effort "none"')
    ] = None
    # of SGLang
    separate_reasoning: Annotated[
        bool | None, Ignored("reasoning stands beside the text, in reasoning and reasoning_content", silent=(True,))
    ] = None
    stream_reasoning: Annotated[bool | None, Ignored("a stream has the reasoning as it comes", silent=(True,))] = None
    thinking: Annotated[Any, Only(instead="give reasoning_effort, or chat_template_kwargs")] = None
    task: Annotated[Any, Only(instead="say it in a message; leave it out")] = None
    return_prompt_token_ids: Annotated[Any, Only(False, instead=TOKENS_ASKED)] = None
    return_meta_info: Annotated[Any, Only(False, instead="usage and mbd of the reply have the counts")] = None
    return_input_ids_in_sglext: Annotated[Any, Only(False, instead=TOKENS_ASKED)] = None
    return_output_ids_in_sglext: Annotated[Any, Only(False, instead=TOKENS_ASKED)] = None
    return_sampling_mask: Annotated[Any, Only(False, instead="give top_logprobs")] = None
    sampling_logprobs_mode: Annotated[Any, Only(instead="give logprobs")] = None
    return_flat_raw_output_top_logprobs: Annotated[Any, Only(False, instead="give top_logprobs")] = None
    return_flat_raw_top_logprobs_b64: Annotated[bool | None, Ignored()] = None
    max_dynamic_patch: Annotated[int | None, Ignored()] = None
    min_dynamic_patch: Annotated[int | None, Ignored()] = None
    use_audio_in_video: Annotated[bool | None, Ignored()] = None
    video_config: Annotated[dict[str, Any] | None, Ignored()] = None
    input_ids: Annotated[Any, Only(instead="send token ids as prompt to /v1/completions")] = None


class OtherCompletionFields(Strict):
    """Fields of completions only."""

    suffix: Annotated[Any, Only("", instead='give template, [{"hole": TOKENS}, SUFFIX]')] = None
    prompt_embeds: Annotated[Any, Only(instead="give prompt, a text or token ids")] = None
    add_special_tokens: Annotated[
        Any, Only(True, instead="give prompt as token ids, from POST /tokenize with add_special_tokens false")
    ] = None
    thinking_token_budget: Annotated[Any, Only(-1, instead="a completion has no thoughts; give max_tokens")] = None


class OtherResponseFields(OtherFields):
    """Fields of responses only."""

    store: Annotated[Any, Only(False, instead=f"{NOT_STORED}; give false, or leave it out")] = None
    previous_response_id: Annotated[Any, Only(instead=WHOLE_INPUT)] = None
    conversation: Annotated[Any, Only(instead=WHOLE_INPUT)] = None
    background: Annotated[Any, Only(False, instead="give stream, or wait for the answer")] = None
    background_options: Annotated[Any, Only(instead="give stream, or wait for the answer")] = None
    prompt: Annotated[Any, Only(instead="write its text into instructions and input")] = None
    max_tool_calls: Annotated[int | None, Ignored()] = None
    context_management: Annotated[Any, Ignored("nothing is dropped from input", silent=([],))] = None
    access_programs: Annotated[dict[str, Any] | None, Ignored()] = None
    image: Annotated[dict[str, Any] | None, Ignored()] = None
    client_metadata: Annotated[dict[str, Any] | None, Ignored()] = None  # of Codex
    # of vLLM
    enable_response_messages: Annotated[Any, Only(False, instead="POST /tokenize gives the prompt's tokens")] = None
    previous_input_messages: Annotated[Any, Only([], instead=WHOLE_INPUT)] = None
    previous_response: Annotated[Any, Only(instead=WHOLE_INPUT)] = None
    # of a chat
    messages: Annotated[Any, Only(instead="give input")] = None
    max_tokens: Annotated[Any, Only(instead="give max_output_tokens")] = None
    max_completion_tokens: Annotated[Any, Only(instead="give max_output_tokens")] = None
    response_format: Annotated[Any, Only(instead="give text.format")] = None
    reasoning_effort: Annotated[Any, Only(instead="give reasoning.effort")] = None


class OtherMessageFields(Strict):
    """Fields of Anthropic's messages only."""

    service_tier: Annotated[
        Literal["auto", "standard_only"] | None,
        Ignored("all requests are of one tier", silent=("auto", "standard_only")),
    ] = None
    inference_geo: Annotated[str | None, Ignored()] = None
    container: Annotated[Any, Only(instead="no code is run here; leave it out")] = None
    diagnostics: Annotated[dict[str, Any] | None, Ignored()] = None
    mcp_servers: Annotated[
        Any, Only([], instead="no server is called here; call it yourself, and give its functions in tools")
    ] = None
    compaction: Annotated[dict[str, Any] | None, Ignored("nothing is dropped from messages")] = None
    thread: Annotated[Any, Only(instead="messages are not stored here; give the whole conversation in messages")] = (
        None
    )
    fallbacks: Annotated[Any, Ignored("the model that is named answers", silent=([],))] = None
    fallback_credit_token: Annotated[Any, Ignored()] = None
    billing_policy: Annotated[dict[str, Any] | None, Ignored()] = None
    output_format: Annotated[Any, Only(instead="give output_config.format")] = None
    stop: Annotated[Any, Only(instead="give stop_sequences")] = None
    max_completion_tokens: Annotated[Any, Only(instead="give max_tokens")] = None
    response_format: Annotated[Any, Only(instead="give output_config.format")] = None
    reasoning_effort: Annotated[Any, Only(instead="give output_config.effort")] = None
    user: Annotated[Any, Only(instead="give metadata.user_id")] = None
