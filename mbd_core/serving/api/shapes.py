"""The shapes of every reply, as typed dicts.

The type checker holds what builds a reply to them. Pydantic makes the OpenAPI document and docs/reference/api.md of
them: a member's docstring is its description. Members that a reply always has are required; the others are there
where they were asked for, or have a value.
"""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from mbd_core.serving.text.logprobs import ChatLogprobs, CompletionLogprobs

EndReason = Literal["stop", "length", "tool_calls", "abort"]
Logprobs = ChatLogprobs | CompletionLogprobs | None
ReplyId = Annotated[str, Field(description="of the answer")]
Created = Annotated[int, Field(description="seconds since 1970")]


# Whole answers.


class Completion(TypedDict):
    id: ReplyId
    object: Literal["chat.completion", "text_completion"]
    created: Created
    model: str
    choices: Annotated[list["Choice"], Field(min_length=1)]
    """prompt by prompt"""
    usage: "Usage"
    mbd: "Measures"


class Choice(TypedDict):
    index: int
    message: NotRequired["AnswerMessage"]
    """of a chat"""
    text: NotRequired[str]
    """of a completion"""
    logprobs: Logprobs
    """of a chat, or of a completion"""
    finish_reason: EndReason
    """`abort`: an administrator ended it"""
    stop_reason: int | str | None
    """the stop string, or the one of `stop_token_ids`, that ended it; else `null`"""
    token_ids: NotRequired[list[int]]
    """with `return_token_ids`"""
    prompt_token_ids: NotRequired[list[int]]
    """with `return_token_ids`"""
    rollout: NotRequired["RolloutFields"]
    """with `return_step_map`"""
    holes: NotRequired[list[str]]
    """with `template`: each hole's text"""


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    """`null` beside calls without text"""
    refusal: None
    tool_calls: NotRequired[list["AnswerCall"]]
    """complete calls of functions of `tools`; `arguments` are a JSON object as text"""


class AnswerCall(TypedDict):
    id: str
    type: Literal["function"]
    function: "AnswerFunction"


class AnswerFunction(TypedDict):
    name: str
    arguments: str


class Usage(TypedDict):
    prompt_tokens: int
    """each prompt once"""
    completion_tokens: int
    """of all choices; of a template those in holes"""
    total_tokens: int
    prompt_tokens_details: "CachedTokens"
    """found in the prefix cache, by each prompt's first choice"""


class UsageSoFar(TypedDict):
    """With `continuous_usage_stats`, in the events before the last."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CachedTokens(TypedDict):
    cached_tokens: int


class Measures(TypedDict):
    """Counts of the decoding, summed over the choices."""

    num_prompt_tokens: int
    num_tokens: int
    """useful tokens: before EOS"""
    num_forwards: int
    """in which blocks of the request took part"""
    num_store_forwards: int
    """of these forwards, the number that decoded none of its blocks"""
    num_prefill_forwards: int
    """that carried only its prompt, or repeated what a preemption undid; not in `num_forwards`"""
    queue_seconds: float
    """from the arrival at an engine to a batch row"""
    prompt_seconds: float
    """from there to the end of the prompt's own forwards; 0 where the prefix cache held it"""
    decode_seconds: float
    """of the forwards in `num_forwards`"""
    num_cached_tokens: int
    """of the prompt, from the prefix cache"""
    num_preemptions: int
    """how often it lost its batch row, and waited for another"""
    tpf: float
    """`num_tokens` / `num_forwards`"""
    oldest_weights: int
    """number of the weights that decoded its first tokens"""
    newest_weights: int
    """and its last ones"""
    seed: NotRequired[int]
    """where tokens were drawn"""
    speed: NotRequired[float]
    """where a speed was asked for: the point that was taken"""
    notes: NotRequired[list[str]]
    """fields of the request that have no effect, each with its reason"""


class TerminalFields(TypedDict):
    token_ids: list[int]
    step_map: list[int]
    logprobs: list[float]


class ExpertFields(TypedDict):
    """The experts of neighbouring tokens in one forward."""

    forward: int
    """its number, as in the step map; 0 for a forward that stored tokens alone"""
    start: int
    """the position of the first token, counted from the prompt's first"""
    shape: list[int]
    """tokens, layers that have experts, experts of each token"""
    ids: str
    """that many numbers as base64: a byte each, or two, the low one first, where a number is above 255"""


class RolloutFields(TypedDict):
    step_map: list[int]
    """for each token the forward, from 1, that accepted it"""
    logprobs: list[float]
    """for each token its log-probability there"""
    terminal: NotRequired[TerminalFields]
    """the rest of the answer's last block, in the whole answer and in a stream's last piece"""
    experts: NotRequired[list[ExpertFields]]
    """with `return_routed_experts`: of every forward, in order"""


class TokenFields(TypedDict, total=False):
    """Members of a choice that say more of its tokens."""

    token_ids: list[int]
    prompt_token_ids: list[int]
    rollout: RolloutFields
    holes: list[str]
    stop_reason: int | str | None


# Answers of `/v1/responses`.


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class MessageItem(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class FunctionCallItem(TypedDict):
    id: str
    type: Literal["function_call"]
    call_id: str
    """that the call's result names"""
    name: str
    arguments: str
    """a JSON object as text"""
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: "CachedTokens"
    output_tokens: int
    output_tokens_details: "ReasoningTokens"
    total_tokens: int


class ReasoningTokens(TypedDict):
    reasoning_tokens: Literal[0]


class IncompleteDetails(TypedDict):
    reason: str
    """`max_output_tokens`, or `abort`: an administrator ended it"""


class Response(TypedDict):
    id: ReplyId
    object: Literal["response"]
    created_at: Created
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    """of an answer that is `incomplete`"""
    instructions: str | None
    """as in the request"""
    max_output_tokens: int | None
    """as in the request"""
    model: str
    output: list[MessageItem | FunctionCallItem]
    """a message, calls, or both"""
    parallel_tool_calls: bool
    """as in the request"""
    previous_response_id: None
    store: Literal[False]
    """responses are not stored"""
    temperature: float | None
    """as in the request"""
    text: dict[str, Any]
    """as in the request"""
    tool_choice: str | dict[str, Any]
    """as in the request"""
    tools: list[dict[str, Any]]
    """the functions of the request"""
    top_p: float | None
    """as in the request"""
    truncation: Literal["auto", "disabled"]
    """as in the request"""
    usage: ResponseUsage | None
    """at the end"""
    user: str | None
    """as in the request"""
    metadata: dict[str, Any]
    """as in the request"""
    mbd: NotRequired[Measures]
    """at the end"""


class ResponseEvent(TypedDict):
    """An event of a streamed response; what else it has goes by its `type`, as in OpenAI's API."""

    type: str
    """the event's name too"""
    sequence_number: int
    """from 0"""


# Streams.


class Event(TypedDict):
    data: str
    """a `Chunk`, a `FrameEvent` or an `Error` as text, or `[DONE]`"""
    event: NotRequired[Literal["frame"]]
    """of a `FrameEvent`"""


class Chunk(TypedDict):
    id: ReplyId
    object: Literal["chat.completion.chunk", "text_completion"]
    created: Created
    model: str
    choices: Annotated[list["ChunkChoice"], Field(max_length=1)]
    """none in a last event with `usage`"""
    usage: NotRequired[Usage | UsageSoFar | None]
    """in the last event with `include_usage`, `null` before it, or with `continuous_usage_stats` the counts so far"""
    mbd: NotRequired[Measures]
    """in the last event"""


class ChunkChoice(TypedDict):
    index: int
    delta: NotRequired["Delta"]
    """of a chat"""
    text: NotRequired[str]
    """of a completion"""
    logprobs: Logprobs
    """of a chat, or of a completion"""
    finish_reason: EndReason | None
    """`null` before a choice's last piece"""
    stop_reason: NotRequired[int | str | None]
    """in a choice's last piece"""
    token_ids: NotRequired[list[int]]
    """with `return_token_ids` or `resumable`"""
    prompt_token_ids: NotRequired[list[int]]
    """in a choice's first piece"""
    rollout: NotRequired[RolloutFields]
    """with `return_step_map`"""
    holes: NotRequired[list[str]]
    """in a choice's last piece"""
    resume: NotRequired["ResumePlace"]
    """with `resumable`, in the last piece of each commit but a choice's last one"""


class Delta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    """in a choice's first piece"""
    content: NotRequired[str]
    """a piece of the text"""
    tool_calls: NotRequired[list[dict[str, Any]]]
    """pieces of calls, by `index`"""


class ResumePlace(TypedDict):
    id: str
    """of the stream"""
    num_tokens: int
    """of the choice, up to here"""
    forwards: int
    """that the choice has taken part in"""
    seed: NotRequired[int]
    """of the choice, where tokens are drawn"""


class FrameEvent(TypedDict):
    """What a forward left in a request's Block Buffer. Nothing in it is final but what the chunks beside it say too.

    It is a chunk without choices, so that clients which know no frames find nothing in it.
    """

    id: ReplyId
    object: Literal["mbd.frame"]
    created: Created
    model: str
    choices: Annotated[list[Any], Field(max_length=0)]
    frame: "FrameFields"


class FrameFields(TypedDict):
    index: int
    """of the choice"""
    forward: int
    """its number, from 1"""
    position: int
    """of the first slot's first token, from the answer's first; negative where the prompt's end stands in the block"""
    num_slots: int
    """of the buffer"""
    slots: list["SlotFields"]
    """those with a block"""


class SlotFields(TypedDict):
    state: Literal["ACTIVE", "TO_CACHE", "IN_CACHE"]
    """what the forward saw; `IN_CACHE`: it stored the block, which leaves"""
    tokens: list[int | None]
    """after the forward; `null` where masked"""
    texts: list[str | None]
    """after the forward; `null` where masked"""
    accepted: list[int]
    """offsets that the forward filled"""
    edited: list[int]
    """offsets that it overwrote"""


# Errors, models, the tokenizer.


class Error(TypedDict):
    error: "ErrorFields"


class ErrorFields(TypedDict):
    message: str
    """one sentence, at most 400 characters"""
    type: str
    """`invalid_request_error`, `authentication_error`, `permission_error`, `rate_limit_error` or `server_error`"""
    param: str | None
    """the field that is wrong"""
    code: str | None
    """see Errors"""


class Model(TypedDict):
    id: str
    """the name to ask for"""
    object: Literal["model"]
    created: Created
    owned_by: str
    max_model_len: int | None
    """tokens that a prompt and its answer can have together; `null` before a replica has told it"""


class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


class TokenIds(TypedDict):
    count: int
    max_model_len: int
    """tokens that a prompt and its answer can have together"""
    tokens: list[int]
    token_strs: list[str] | None
    """with `return_token_strs`"""


class TokenText(TypedDict):
    prompt: str
    """the text, special tokens included"""


class TokenizerInfo(TypedDict):
    tokenizer_class: str
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | dict[str, Any] | None


# The state of a server, and its replicas' replies to an administrator.


class Order(TypedDict):
    """What the replicas of a model have done."""

    replicas: int
    """how many did it"""
    folder: NotRequired[str]
    """of `/update_weights`"""
    version: NotRequired[int]
    """of `/update_weights`"""
    aborted: NotRequired[int]
    """requests that were ended"""
    asleep: NotRequired[bool]
    """of `/sleep` and `/wakeup`"""
    freed_bytes: NotRequired[int]
    """of `/sleep`, in all replicas"""


class Version(TypedDict):
    version: str
    """of this project"""


class Ready(TypedDict):
    ready: bool
    """whether new requests are taken: no drain has begun, and each model has a replica that answers, or may have none
    (`min: 0`)"""
    asleep: bool
    """whether an administrator has put a model to sleep"""


class Health(TypedDict):
    """The first three for everybody, the rest for whoever has a key, where the server asks for keys."""

    ready: bool
    """as in `Ready`"""
    asleep: bool
    """as in `Ready`"""
    draining: bool
    """whether this gateway shuts down: it refuses new requests and finishes those under way"""
    refused_content: NotRequired[str | None]
    """why the gateway did not take over the newest names of adapters"""
    running: NotRequired[int]
    """requests that hold a batch row, in all replicas"""
    waiting: NotRequired[int]
    """requests that wait for one"""
    models: NotRequired[list["ModelState"]]


class ModelState(TypedDict):
    name: str
    ready: bool
    replicas: list["ReplicaState"]


class ReplicaState(TypedDict):
    """Of a replica that does not answer, `error` says why, and the members that may be missing are."""

    ready: bool
    """whether it takes requests"""
    running: int
    """requests that hold a batch row"""
    waiting: int
    """requests that wait for one"""
    error: NotRequired[str]
    replica: NotRequired[str]
    """its name"""
    pid: NotRequired[int]
    """of its process"""
    asleep: NotRequired[bool]
    """whether its memory is given back"""
    weights: NotRequired[dict[str, Any]]
    """`folder` that it decodes with, null for tensors, and `version`, the number of these weights"""
    adapters: NotRequired[dict[str, Any]]
    """its LoRA adapters: folders by name"""
    refused_content: NotRequired[str | None]
    """why the newest weights or adapters were not taken over"""
    forwards: NotRequired[int]
    """so far"""
    backend: NotRequired[str]
    """device and dtype, how the weights are stored, over how many ranks"""
    tensor_parallel: NotRequired[int]
    """number of ranks"""
    rank_sums: NotRequired[dict[str, Any] | None]
    """how tensor-parallel ranks add up: its `name`, up to how many bytes of a part (`most_bytes`, of shared memory),
    and for what was `not_chosen` why; `null` of one rank"""
    attention: NotRequired[dict[str, Any]]
    """the kernel's `name`, and for each other kernel why it was `not_chosen`"""
    defaults: NotRequired[dict[str, Any]]
    """the decoding and sampling of a request that asks for nothing"""
    speed_front: NotRequired["Front | None"]
    """the measured front of accuracy and speed; `null` without one"""
    engine: NotRequired[dict[str, Any]]
    """the engine's settings; `null` left a choice to the engine"""
    max_model_len: NotRequired[int]
    """tokens that a prompt and its answer can have together"""
    kv_cache: NotRequired[dict[str, Any]]
    """`num_pages`, `page_size`, `tokens`: how many tokens' keys and values fit, and `free_pages`, those included that
    hold cached prefixes"""
    graphs: NotRequired[dict[str, Any]]
    """CUDA graphs: how many were `captured` (`not_used` says why none is), their `memory_bytes`, and static steps so
    far: `steps_replayed` as graphs, `steps_eager` without one"""
    prefix_cache: NotRequired[dict[str, Any]]
    """prompt tokens `looked_up`, and those `found`"""


class Front(TypedDict):
    tasks: list[str]
    """whose means the points are"""
    num_samples: int
    """problems of these tasks together"""
    points: list["FrontPoint"]
    """the most accurate first; each is faster and less accurate than the one before"""


class FrontPoint(TypedDict):
    speed: float
    """where it stands, from 0 to 1"""
    decoding: dict[str, Any]
    """what a request with that `speed` is decoded with"""
    accuracy: float
    """percent of the problems that were solved"""
    tpf: float
    """tokens per forward"""
