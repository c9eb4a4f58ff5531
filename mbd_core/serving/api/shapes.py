"""The shapes of every reply, as typed dicts.

The type checker checks the code that builds replies against them. The OpenAPI document and docs/reference/api.md are
made from them: a member's docstring is its description. A required member is in every reply; other members are present
if the request asked for them or if they have a value.
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
    """the stop string or the member of `stop_token_ids` that ended it; else `null`"""
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
    reasoning: NotRequired[str]
    """the thoughts before the content, if there are any"""
    reasoning_content: NotRequired[str]
    """as `reasoning`"""
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
    """tokens of all choices; with `template` the tokens in holes"""
    total_tokens: int
    prompt_tokens_details: "CachedTokens"
    """prompt tokens that each prompt's first choice found in the prefix cache"""
    completion_tokens_details: NotRequired["ReasoningTokens"]
    """if a choice of a chat has thoughts: their tokens, which `completion_tokens` counts too"""


class UsageSoFar(TypedDict):
    """With `continuous_usage_stats`, in the events before the last."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CachedTokens(TypedDict):
    cached_tokens: int


class ReasoningTokens(TypedDict):
    reasoning_tokens: int


class Measures(TypedDict):
    """Counts of the decoding, summed over the choices."""

    num_prompt_tokens: int
    num_tokens: int
    """useful tokens: before EOS"""
    num_forwards: int
    """forwards in which blocks of the request took part"""
    num_store_forwards: int
    """the number of these forwards that only stored its blocks"""
    num_prefill_forwards: int
    """forwards that carried only its prompt or repeated work lost in a preemption; not in `num_forwards`"""
    queue_seconds: float
    """from arrival at an engine to a batch row"""
    prompt_seconds: float
    """from the batch row to the end of the prompt's own forwards; 0 if the prefix cache held the prompt"""
    decode_seconds: float
    """duration of the forwards in `num_forwards`"""
    num_cached_tokens: int
    """prompt tokens from the prefix cache"""
    num_drafted_tokens: int
    """drafted tokens that a verification judged (`linear_spec`, `verify`)"""
    num_confirmed_tokens: int
    """the number of these that verifications accepted"""
    num_positions: int
    """positions that these forwards computed for it: its resident blocks, and a judgement's copies of masks"""
    num_preemptions: int
    """how often it lost its batch row, and waited for another"""
    tpf: float
    """`num_tokens` / `num_forwards`"""
    oldest_weights: int
    """version of the weights that decoded the first tokens"""
    newest_weights: int
    """version of the weights that decoded the last tokens"""
    seed: NotRequired[int]
    """if tokens were sampled"""
    speed: NotRequired[float]
    """if the request has a speed: the speed of the chosen point"""
    draft_model: NotRequired[str]
    """if another model drafted: its name"""
    notes: NotRequired[list[str]]
    """fields of the request that have no effect, each with its reason"""


class TerminalFields(TypedDict):
    token_ids: list[int]
    step_map: list[int]
    logprobs: list[float]


class ExpertFields(TypedDict):
    """The experts of neighbouring tokens in one forward."""

    forward: int
    """its number, as in the step map; 0 for a forward that only stored tokens"""
    start: int
    """the position of the first token, counted from the prompt's first"""
    shape: list[int]
    """number of tokens, of layers with experts, and of experts per token"""
    ids: str
    """the numbers of this shape as base64: one byte each, or two (little-endian) if a number is above 255"""


class RolloutFields(TypedDict):
    step_map: list[int]
    """for each token the forward, from 1, that accepted it"""
    logprobs: list[float]
    """for each token its log-probability in this forward"""
    terminal: NotRequired[TerminalFields]
    """the rest of the answer's last block, in the whole answer and in a stream's last piece"""
    experts: NotRequired[list[ExpertFields]]
    """with `return_routed_experts`: of every forward, in order"""


class TokenFields(TypedDict, total=False):
    """Optional members of a choice on its tokens."""

    token_ids: list[int]
    prompt_token_ids: list[int]
    rollout: RolloutFields
    holes: list[str]
    stop_reason: int | str | None


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
    """empty in a last event with `usage`"""
    usage: NotRequired[Usage | UsageSoFar | None]
    """with `include_usage`: in the last event; before it `null`, or with `continuous_usage_stats` the counts so far"""
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
    """with `resumable`, in the last piece of each commit except a choice's last commit"""


class Delta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    """in a choice's first piece"""
    content: NotRequired[str]
    """a piece of the text"""
    reasoning: NotRequired[str]
    """a piece of the thoughts"""
    reasoning_content: NotRequired[str]
    """as `reasoning`"""
    tool_calls: NotRequired[list[dict[str, Any]]]
    """pieces of calls, by `index`"""


class ResumePlace(TypedDict):
    id: str
    """of the stream"""
    num_tokens: int
    """tokens of the choice up to here"""
    forwards: int
    """forwards in which the choice has taken part"""
    seed: NotRequired[int]
    """seed of the choice, if tokens are sampled"""


class FrameEvent(TypedDict):
    """The content of a request's Block Buffer after a forward. It is provisional: only tokens that also appear in a
    chunk are final.

    It is a chunk without choices, which a client that does not know frames ignores.
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
    """position of the first slot's first token, counted from the answer's first; negative if the block holds the
    prompt's end"""
    num_slots: int
    """of the buffer"""
    slots: list["SlotFields"]
    """the slots with a block"""
    draft_model: NotRequired[str]
    """if another model drafts: its name"""


class SlotFields(TypedDict):
    state: Literal["ACTIVE", "TO_CACHE", "IN_CACHE"]
    """the state before the forward; `IN_CACHE`: the forward stored the block, which leaves the buffer"""
    tokens: list[int | None]
    """after the forward; `null` where masked"""
    texts: list[str | None]
    """after the forward; `null` where masked"""
    accepted: list[int]
    """offsets that the forward filled"""
    edited: list[int]
    """offsets that the forward overwrote"""
    drafted: NotRequired[list[int | None]]
    """with `verify`: drafted tokens that a later forward judges, `null` where there is none"""
    drafted_texts: NotRequired[list[str | None]]
    """the texts of these tokens"""
    judged: NotRequired[int]
    """with `verify`: number of drafted tokens that the forward judged"""
    confirmed: NotRequired[list[int]]
    """with `verify`: offsets of the judged tokens that it accepted"""
    refused: NotRequired[list[int]]
    """with `verify`: offsets where it refused the draft and put its own token"""


# Errors, models, the tokenizer.


class Error(TypedDict):
    error: "ErrorFields"


class ErrorFields(TypedDict):
    message: str
    """one sentence, at most 400 characters"""
    type: str
    """`invalid_request_error`, `authentication_error`, `permission_error`, `rate_limit_error` or `server_error`"""
    param: str | None
    """the wrong field"""
    code: str | None
    """see Errors"""


class Model(TypedDict):
    id: str
    """the name to ask for"""
    object: Literal["model"]
    created: Created
    owned_by: str
    max_model_len: int | None
    """tokens that a prompt and its answer can have together; `null` before a replica has reported it"""


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
    """The result of an order at the replicas of a model."""

    replicas: int
    """number of replicas that carried it out"""
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
    """whether the server accepts requests: no drain has begun, and each model has a replica that answers, or scales to
    zero (`min: 0`)"""
    asleep: bool
    """whether an administrator has put a model to sleep"""


class Health(TypedDict):
    """On a server with keys, a client without a key gets only the first three members."""

    ready: bool
    """as in `Ready`"""
    asleep: bool
    """as in `Ready`"""
    draining: bool
    """whether this gateway shuts down: it refuses new requests and finishes those under way"""
    refused_content: NotRequired[str | None]
    """why the gateway did not adopt the newest names of adapters"""
    running: NotRequired[int]
    """requests that hold a batch row, in all replicas"""
    waiting: NotRequired[int]
    """requests that wait for a batch row"""
    models: NotRequired[list["ModelState"]]


class ModelState(TypedDict):
    name: str
    ready: bool
    replicas: list["ReplicaState"]


class ReplicaState(TypedDict):
    """A replica's state. If the replica does not answer, `error` says why, and the optional members are missing."""

    ready: bool
    """whether it takes requests"""
    running: int
    """requests that hold a batch row"""
    waiting: int
    """requests that wait for a batch row"""
    error: NotRequired[str]
    replica: NotRequired[str]
    """its name"""
    pid: NotRequired[int]
    """of its process"""
    asleep: NotRequired[bool]
    """whether it sleeps, with its memory freed"""
    weights: NotRequired[dict[str, Any]]
    """`folder` of its weights, null if they came as tensors, and their `version`"""
    adapters: NotRequired[dict[str, Any]]
    """its LoRA adapters: folders by name"""
    refused_content: NotRequired[str | None]
    """why it did not adopt the newest weights or adapters"""
    forwards: NotRequired[int]
    """number of forwards since its start"""
    backend: NotRequired[str]
    """device, dtype, precision of the weights, and number of ranks"""
    tensor_parallel: NotRequired[int]
    """number of ranks"""
    rank_sums: NotRequired[dict[str, Any] | None]
    """how tensor-parallel ranks sum their parts: the `name`, the largest part in bytes (`most_bytes`, with shared
    memory), and the reason for each method `not_chosen`; `null` with one rank"""
    attention: NotRequired[dict[str, Any]]
    """the kernel's `name`, and the reason for each kernel `not_chosen`"""
    defaults: NotRequired[dict[str, Any]]
    """the decoding and sampling of a request without such fields"""
    speed_front: NotRequired["Front | None"]
    """the measured front of accuracy and speed; `null` without one"""
    engine: NotRequired[dict[str, Any]]
    """the engine's settings; `null`: the engine chose"""
    max_model_len: NotRequired[int]
    """tokens that a prompt and its answer can have together"""
    kv_cache: NotRequired[dict[str, Any]]
    """`num_pages`, `page_size`, `tokens` (whose keys and values fit), and `free_pages`, which include pages of cached
    prefixes"""
    graphs: NotRequired[dict[str, Any]]
    """CUDA graphs: the number `captured` (`not_used`: why there are none), their `memory_bytes`, and steps so far:
    `steps_replayed` with a graph, `steps_eager` without (static steps, and forwards of planned rows if some have a
    graph)"""
    prefix_cache: NotRequired[dict[str, Any]]
    """the numbers of prompt tokens `looked_up` and `found`"""


class Front(TypedDict):
    tasks: list[str]
    """tasks whose mean each point is"""
    num_samples: int
    """number of problems of these tasks together"""
    points: list["FrontPoint"]
    """the most accurate first; each is faster and less accurate than the one before"""


class FrontPoint(TypedDict):
    speed: float
    """its position on the front, from 0 to 1"""
    decoding: dict[str, Any]
    """the decoding of a request with this `speed`"""
    accuracy: float
    """percentage of solved problems"""
    tpf: float
    """tokens per forward"""
