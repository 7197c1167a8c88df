"""The front end of `nanoserve.py serve`: HTTP, OpenAI's requests and answers, metrics, a chat page.

    python nanoserve.py serve --model toy --port 8000
    curl localhost:8000/v1/completions -H "Content-Type: application/json" -d '{"prompt": "Hello"}'

CONTENTS (find section N in any editor with the pattern "# N  ")
     1  Errors
     2  Requests
     3  Answers
     4  Metrics
     5  The core
     6  Routes
     7  Connections
     8  Start and end

One process, one event loop (asyncio), one task per request being answered.  h11 knows HTTP,
nanoserve.FrontEnd knows text; what is here knows OpenAI's shapes and who may wait for how long.
"""

import asyncio
import codecs
import contextlib
import functools
import hmac
import http
import json
import logging
import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
import urllib.parse
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

import h11

import nanoserve as ns
from checkpoints import is_int

log = logging.getLogger("nanoserve.server")
PAGE = Path(__file__).with_name("page.html")


# ==================================================================================================
# 1  Errors
# ==================================================================================================
# Invariant: whatever a client sends, it gets a status, OpenAI's error object and one sentence.

class Refused(Exception):
    """A request that gets an error instead of an answer; param: the field at fault, if one is."""
    def __init__(self, status, message, param=None, headers=()):
        super().__init__(message)
        self.status, self.param, self.headers = status, param, headers

    def body(self):
        message = str(self) if len(str(self)) <= 600 else str(self)[:600] + " ..."
        kind = http.HTTPStatus(self.status).phrase.replace(" ", "").removesuffix("Error") + "Error"
        return {"error": {"message": message, "type": kind, "param": self.param,
                          "code": self.status}}

def check(condition, message, param=None):
    if not condition:
        raise Refused(400, message, param)

# Half of a surrogate pair is valid in JSON's escapes and in no encoding.
codecs.register_error(
    "nanoserve", lambda error: ("\ufffd".encode() * (error.end - error.start), error.end))

def to_json(value):
    """UTF-8 bytes, whatever the text.

    >>> to_json({"a": "\\ud800"}).decode()
    '{"a":"\ufffd"}'
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "nanoserve")

MOST_BRACKETS = 100_000  # reading a million lists would hold up everybody

def from_json(data):
    """The object in a request's body."""
    brackets = data.count(b"[") + data.count(b"{")
    check(brackets <= MOST_BRACKETS, f"the body has {brackets} brackets, over {MOST_BRACKETS}")
    def refuse(word):
        raise ValueError(f"{word} is not a JSON number")
    try:
        body = json.loads(data.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not valid JSON: {error}") from None
    check(isinstance(body, dict), "the body must be a JSON object")
    return body


# ==================================================================================================
# 2  Requests
# ==================================================================================================
# A body becomes SamplingParams by one rule: fields that exist there pass under their own name and
# are checked there; null means not given; the few names that only OpenAI has are translated.
#
# Invariant: a field that would change the answer is obeyed or refused; others are ignored, logged.

PASSED = {f.name for f in fields(ns.SamplingParams)} - {"logprobs", "detokenize"}
OURS = {"model", "stream", "stream_options", "logprobs", "echo", "add_special_tokens",
        "return_token_ids"}
CHAT_ONLY = {"messages", "top_logprobs", "max_completion_tokens", "add_generation_prompt",
             "chat_template_kwargs"}
HARMLESS = {"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
            "parallel_tool_calls", "spaces_between_special_tokens"}
# What is not implemented and may not be skipped silently, with its values that ask for nothing.
REFUSED = {
    "suffix": (), "best_of": (1,), "use_beam_search": (False,), "tools": ([],), "functions": ([],),
    "tool_choice": ("none", "auto"), "function_call": ("none", "auto"), "prompt_embeds": (),
    "response_format": ({"type": "text"},), "structured_outputs": (), "guided_json": (),
    "guided_regex": (), "guided_choice": (), "guided_grammar": (), "modalities": (["text"],),
    "audio": (), "chat_template": (), "continue_final_message": (False,), "documents": ([],),
    "reasoning_effort": ("none",), "thinking_token_budget": (), "repetition_detection": (),
    "logits_processors": ([],), "prediction": (), "truncate_prompt_tokens": (),
    "return_tokens_as_token_ids": (False,)}
LONGEST_LIST = {"stop": 64, "bad_words": 1024, "stop_token_ids": 1024, "logit_bias": 1024}
MOST_LOGPROBS = 20
ROLES = ("system", "developer", "user", "assistant", "tool")

@dataclass
class Job:
    """A request that was understood: what to compute and how to say it."""
    id: str
    chat: bool
    model: str
    created: int
    checked: list  # (RequestOutput, [EngineCoreRequest]) per prompt
    stream: bool = False
    usage: bool = False  # in a last chunk of the stream
    running_usage: bool = False  # in every chunk
    echo: bool = False
    only_echo: bool = False  # max_tokens 0: the prompt, and its logprobs
    top_logprobs: int | None = None
    prompt_logprobs: bool = False
    token_ids: bool = False
    pendings: list = ()

def typed(body, name, kind, default):
    """A field that must be of this type if it is given."""
    value = body.get(name)
    value = default if value is None else value
    words = {bool: "true or false", int: "an integer", str: "a string", list: "a list",
             dict: "an object"}[kind]
    good = is_int(value) if kind is int else isinstance(value, kind)
    check(good or value is default, f"{name} must be {words}, got {value!r}", name)
    return value

def warn_of_unknown(body, known):
    if unknown := sorted(set(body) - known):
        log.warning({"ignored_fields": [name[:100] for name in unknown[:20]]})

def text_of(content, where):
    """Content of a message: a string, or text parts, which are joined."""
    if isinstance(content, str):
        return content
    check(isinstance(content, list), f"{where}: content must be a string or a list of text parts",
          "messages")
    for part in content:
        check(isinstance(part, dict) and part.get("type") == "text"
              and isinstance(part.get("text"), str), f"{where}: content parts must be of type "
              f"'text' and hold a text, got {part!r}", "messages")
    return "".join(part["text"] for part in content)

def read_messages(body):
    """The conversation as the chat template takes it."""
    messages, conversation = body.get("messages"), []
    check(isinstance(messages, list) and messages, "messages must be a list that is not empty",
          "messages")
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        check(isinstance(message, dict), f"{where} must be an object", "messages")
        role, content = message.get("role"), message.get("content")
        check(role in ROLES, f"{where}: role must be one of {', '.join(ROLES)}, got {role!r}",
              "messages")
        if content is None and role == "assistant" and message.get("tool_calls"):
            content = ""  # an answer that was only a call
        role = "system" if role == "developer" else role
        conversation.append({**message, "role": role, "content": text_of(content, where)})
    return conversation

def read_prompts(body):
    """Prompts of a completion: a text, texts, token ids, or lists of token ids."""
    prompt = body.get("prompt")
    check(prompt is not None, "prompt is missing", "prompt")
    check(isinstance(prompt, (str, list)), "prompt must be a string or a list", "prompt")
    check(prompt != [], "prompt is empty", "prompt")
    if isinstance(prompt, str) or not isinstance(prompt[0], (str, list)):
        return [prompt]
    same = all(type(p) is type(prompt[0]) for p in prompt)
    check(same, "prompt must hold only strings or only lists of token ids", "prompt")
    return prompt

def read_limit(body, chat):
    """(field, its value): how long the answer may become; a chat has a newer name for it."""
    name = "max_tokens"
    if chat and body.get("max_completion_tokens") is not None:
        name = "max_completion_tokens"
    asked, least = typed(body, name, int, None), int(chat)  # 0: a completion only echoes
    check(asked is None or asked >= least, f"{name} must be at least {least}, got {asked}", name)
    return name, asked

def read_sampling(front, body, chat):
    """SamplingParams, and the number of best logprobs to report."""
    given = {name: body[name] for name in PASSED if body.get(name) is not None}
    for name, most in LONGEST_LIST.items():
        count = len(given[name]) if isinstance(given.get(name), (list, dict)) else 0
        check(count <= most, f"{name} has {count} entries, the most is {most}", name)
    if chat:
        _, given["max_tokens"] = read_limit(body, chat)  # None: as many as there is room for
        top = typed(body, "top_logprobs", int, 0)
        wanted = typed(body, "logprobs", bool, False)
        check(wanted or not top, "top_logprobs needs logprobs to be true", "top_logprobs")
        name, top = "top_logprobs", top if wanted else None
    else:
        name, top = "logprobs", typed(body, "logprobs", int, None)
        if typed(body, "echo", bool, False):
            given.setdefault("prompt_logprobs", top)
    for field, value in ((name, top), ("prompt_logprobs", given.get("prompt_logprobs"))):
        check(value is None or not is_int(value) or 0 <= value <= MOST_LOGPROBS,
              f"{field} must be between 0 and {MOST_LOGPROBS}, got {value}", field)
    if not chat and body.get("echo") and given.get("max_tokens") == 0:
        given["max_tokens"] = 1  # computed and not shown
    return front.default_sampling_params(**given, logprobs=top), top

def understand(engine, body, chat):
    """Body of a completion or a chat -> Job. Refused, or ValueError with one sentence, if it cannot
    be. Tokenises, so it runs in a thread of its own."""
    model = engine.check_model(body)
    for name, harmless in REFUSED.items():
        check(body.get(name) is None or body[name] in harmless, f"{name} is not supported", name)
    warn_of_unknown(body, PASSED | OURS | HARMLESS | {*REFUSED} | (
        CHAT_ONLY if chat else {"prompt"}))
    options = typed(body, "stream_options", dict, {})
    stream = typed(body, "stream", bool, False)
    check(stream or not options, "stream_options needs stream to be true", "stream_options")
    params, top = read_sampling(engine.front, body, chat)
    echo = typed(body, "echo", bool, False)
    check(not (chat and echo), "echo is not supported in a chat", "echo")
    explicit = body.get("prompt_logprobs") is not None
    check(not (stream and explicit), "prompt_logprobs cannot be streamed", "prompt_logprobs")
    job = Job(("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex, chat, model, int(time.time()),
              [], stream, typed(options, "include_usage", bool, False),
              typed(options, "continuous_usage_stats", bool, False), echo,
              echo and body.get("max_tokens") == 0, top, explicit,
              typed(body, "return_token_ids", bool, False))
    prompts = [engine.chat_ids(body)] if chat else read_prompts(body)
    choices, most = len(prompts) * params.n, engine.options.max_choices
    check(choices <= most, f"{choices} completions in one request: the most is {most}", "n")
    limit, asked = read_limit(body, chat)
    adds, longest = typed(body, "add_special_tokens", bool, True), engine.front.max_model_len
    for i, prompt in enumerate(prompts):
        text = prompt if isinstance(prompt, str) else None
        ids = prompt if text is None else engine.encode(text, adds)
        check(len(ids) <= longest, f"the prompt has {len(ids)} tokens, max_model_len is {longest}",
              "prompt")
        parent, messages = engine.front.make_requests(ids, params, f"{job.id}-{i}")
        parent.prompt = text
        check(len(ids) + (asked or 0) <= longest, f"{limit} {asked} and a prompt of {len(ids)} "
              f"tokens exceed max_model_len {longest}", limit)
        job.checked.append((parent, messages))
    return job


# ==================================================================================================
# 3  Answers
# ==================================================================================================
# Invariant: the pieces of a stream join to the answer that the same request without stream gets.

def log_of(entry):
    return max(entry.logprob, -9999.0)  # JSON has no infinity

def chat_logprobs(job, tokenizer, token_ids, rows):
    """OpenAI's logprobs of a chat: an object per token, with its bytes and the best others."""
    def spell(token_id, entry):
        return {"token": entry.decoded_token, "logprob": log_of(entry),
                "bytes": list(tokenizer.token_bytes(token_id))}
    content = []
    for token_id, row in zip(token_ids, rows):
        best = sorted(row.items(), key=lambda item: item[1].rank)[: job.top_logprobs]
        content.append({**spell(token_id, row[token_id]),
                        "top_logprobs": [spell(*item) for item in best]})
    return {"content": content}

def text_logprobs(token_ids, rows, offset):
    """OpenAI's logprobs of a completion: parallel lists. A prompt's first token has none."""
    result = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token_id, row in zip(token_ids, rows):
        text = row[token_id].decoded_token if row else ""
        result["text_offset"].append(offset)
        result["token_logprobs"].append(log_of(row[token_id]) if row else None)
        result["tokens"].append(text)
        result["top_logprobs"].append(
            {e.decoded_token: log_of(e) for e in row.values()} if row else None)
        offset += len(text)
    return result

def logprobs_of(job, tokenizer, parent, completion, rows, first, offset):
    """Of these tokens; first: an echoed prompt goes in front."""
    if job.top_logprobs is None:
        return None
    if job.chat:
        return chat_logprobs(job, tokenizer, completion.token_ids, rows)
    token_ids, rows = list(completion.token_ids), list(rows)
    if job.only_echo:
        token_ids, rows = [], []
    if job.echo and first and parent.prompt_logprobs:
        token_ids, rows = parent.prompt_token_ids + token_ids, parent.prompt_logprobs + rows
    return text_logprobs(token_ids, rows, offset)

def prompt_text(tokenizer, parent):
    return tokenizer.decode(parent.prompt_token_ids) if parent.prompt is None else parent.prompt

def usage_of(parents):
    """Token counts of the request. A prompt counts once, however many completions it has."""
    prompt = sum(len(parent.prompt_token_ids) for parent in parents)
    output = sum(len(c.token_ids) for parent in parents for c in parent.outputs)
    cached = sum(parent.num_cached_tokens for parent in parents)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached}}

def frame(job, kind, choices):
    return {"id": job.id, "object": kind, "created": job.created, "model": job.model,
            "choices": choices}

def whole_answer(job, tokenizer):
    """The answer without stream, as JSON's objects."""
    choices, parents = [], [parent for parent, _ in job.checked]
    for parent in parents:
        for completion in parent.outputs:
            choice = {"index": len(choices), "finish_reason": completion.finish_reason,
                      "stop_reason": completion.stop_reason}
            choice["logprobs"] = logprobs_of(
                job, tokenizer, parent, completion, completion.logprobs or (), True, 0)
            if job.chat:
                choice["message"] = {"role": "assistant", "content": completion.text}
            else:
                shown = "" if job.only_echo else completion.text
                choice["text"] = (prompt_text(tokenizer, parent) if job.echo else "") + shown
            if job.prompt_logprobs:
                choice["prompt_logprobs"] = [
                    row and {str(i): {"logprob": log_of(e), "rank": e.rank,
                                      "decoded_token": e.decoded_token} for i, e in row.items()}
                    for row in parent.prompt_logprobs]
            if job.token_ids:
                choice["token_ids"] = completion.token_ids
                choice["prompt_token_ids"] = parent.prompt_token_ids
            choices.append(choice)
    kind = "chat.completion" if job.chat else "text_completion"
    return {**frame(job, kind, choices), "usage": usage_of(parents)}

class Pieces:
    """The answer as a stream: server-sent events, each a chunk of one choice."""
    def __init__(self, job, tokenizer):
        self.job, self.tokenizer, self.begun = job, tokenizer, False
        self.parents = [parent for parent, _ in job.checked]
        self.kind = "chat.completion.chunk" if job.chat else "text_completion"
        self.num_shown = [0] * len(job.pendings)  # characters, for text_offset

    def event(self, choices, **more):
        if self.job.running_usage and self.job.usage and choices:
            more["usage"] = usage_of(self.parents)
        return b"data: " + to_json({**frame(self.job, self.kind, choices), **more}) + b"\n\n"

    def take(self):
        """Events for all that is new."""
        events, job = [], self.job
        if job.chat and not self.begun:
            events += [self.event([{"index": i, "delta": {"role": "assistant", "content": ""},
                                    "logprobs": None, "finish_reason": None}])
                       for i in range(len(job.pendings))]
        self.begun = True
        for index, pending in enumerate(job.pendings):
            first = pending.num_taken == 0
            delta = pending.take_delta()
            if delta and (delta.text or delta.finish_reason or job.token_ids or first and job.echo
                          or job.top_logprobs is not None):
                events.append(self.event([self.choice(index, pending.parent, delta, first)]))
        return b"".join(events)

    def choice(self, index, parent, delta, first):
        job, rows = self.job, ()
        echoed = prompt_text(self.tokenizer, parent) if job.echo and first else ""
        if delta.logprobs and delta.token_ids:
            rows = delta.logprobs[-len(delta.token_ids) :]
        logprobs = logprobs_of(
            job, self.tokenizer, parent, delta, rows, first, self.num_shown[index])
        text = echoed + ("" if job.only_echo else delta.text)
        self.num_shown[index] += len(text)
        body = {"delta": {"content": text} if text else {}} if job.chat else {"text": text}
        choice = {"index": index, **body, "logprobs": logprobs,
                  "finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        if job.token_ids:
            choice["token_ids"] = delta.token_ids
            if first:
                choice["prompt_token_ids"] = parent.prompt_token_ids
        return choice

    def end(self):
        usage = self.event([], usage=usage_of(self.parents)) if self.job.usage else b""
        return usage + b"data: [DONE]\n\n"


# ==================================================================================================
# 4  Metrics
# ==================================================================================================
# Prometheus text format under vLLM's names, so that dashboards made for it fit.

LATENCIES = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
INTERVALS = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
FIRST = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
HISTOGRAMS = {
    "time_to_first_token_seconds": (FIRST, "From arrival to the first token."),
    "inter_token_latency_seconds": (INTERVALS, "Between two results of one completion."),
    "e2e_request_latency_seconds": (LATENCIES, "From arrival to the end."),
    "request_queue_time_seconds": (LATENCIES, "From arrival to the first scheduling."),
    "request_prefill_time_seconds": (LATENCIES, "From scheduling to the first token."),
    "request_decode_time_seconds": (LATENCIES, "From the first token to the end."),
    "request_prompt_tokens": (COUNTS, "Prompt tokens of a request."),
    "request_generation_tokens": (COUNTS, "Output tokens of a request."),
    "iteration_tokens_total": (COUNTS, "Tokens computed in a step.")}
# name: (type, key in EngineCore.stats(), help)
FROM_CORE = {
    "num_requests_running": ("gauge", "running", "Requests that own KV blocks."),
    "num_requests_waiting": ("gauge", "waiting", "Requests in the queue."),
    "kv_cache_usage_perc": ("gauge", "kv_usage", "Share of the KV blocks in use, 0 to 1."),
    "prefix_cache_queries_total": ("counter", "prefix_queries", "Prompt tokens looked up."),
    "prefix_cache_hits_total": ("counter", "prefix_hits", "Prompt tokens found."),
    "num_preemptions_total": ("counter", "preemptions", "Requests that lost their blocks."),
    "prompt_tokens_total": ("counter", "prompt_tokens", "Prompt tokens of admitted requests."),
    "generation_tokens_total": ("counter", "generation_tokens", "Tokens generated."),
    "spec_decode_num_drafts_total": ("counter", "spec_rounds", "Drafts verified."),
    "spec_decode_num_draft_tokens_total": ("counter", "spec_drafted", "Tokens drafted."),
    "spec_decode_num_accepted_tokens_total": (
        "counter", "spec_accepted", "Drafted tokens accepted.")}

class Histogram:
    def __init__(self, bounds):
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value):
        self.counts[next((i for i, b in enumerate(self.bounds) if value <= b), -1)] += 1
        self.sum += value

class Metrics:
    """What happened since the start."""
    def __init__(self, model):
        self.model, self.stats, self.finished = model, {}, {"stop": 0, "length": 0}
        self.histograms = {name: Histogram(row[0]) for name, row in HISTOGRAMS.items()}

    def observe(self, name, value):
        self.histograms[name].observe(value)

    def new_stats(self, stats):
        if stats.get("steps", 0) > self.stats.get("steps", 0):
            before = self.stats.get("scheduled_tokens", 0)
            self.observe("iteration_tokens_total", stats["scheduled_tokens"] - before)
        self.stats = stats

    def finish(self, parent):
        """A prompt's completions have all ended, in whatever way."""
        m, outputs = parent.metrics, parent.outputs
        for completion in outputs:
            reason = completion.finish_reason
            self.finished[reason] = self.finished.get(reason, 0) + 1
        self.observe("e2e_request_latency_seconds", m.finished_time - m.arrival_time)
        self.observe("request_prompt_tokens", len(parent.prompt_token_ids))
        self.observe("request_generation_tokens", sum(len(c.token_ids) for c in outputs))
        if m.first_scheduled_time and m.first_token_time:
            self.observe("request_queue_time_seconds", m.queue_time)
            self.observe("request_prefill_time_seconds",
                         m.first_token_time - m.first_scheduled_time)
            self.observe("request_decode_time_seconds", m.finished_time - m.first_token_time)

    def text(self):
        escaped = self.model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        label, lines = f'model_name="{escaped}",engine="0"', []
        def head(name, kind, words):
            lines.append(f"# HELP vllm:{name} {words}\n# TYPE vllm:{name} {kind}")
        for name, (kind, key, words) in FROM_CORE.items():
            head(name, kind, words)
            lines.append(f"vllm:{name}{{{label}}} {self.stats.get(key, 0)}")
        head("request_success_total", "counter", "Completions by the reason of their end.")
        lines += [f'vllm:request_success_total{{{label},finished_reason="{reason}"}} {count}'
                  for reason, count in self.finished.items()]
        for name, histogram in self.histograms.items():
            head(name, "histogram", HISTOGRAMS[name][1])
            total = 0
            for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts):
                total += count
                lines.append(f'vllm:{name}_bucket{{{label},le="{bound}"}} {total}')
            lines += [f"vllm:{name}_count{{{label}}} {total}",
                      f"vllm:{name}_sum{{{label}}} {histogram.sum}"]
        return "\n".join(lines) + "\n"


# ==================================================================================================
# 5  The core
# ==================================================================================================
# Invariant: a job that is left, for whatever reason, is aborted in the core and forgotten here.
# Invariant: if the core dies, every open job fails with a sentence, and none can be submitted.

@dataclass(eq=False)
class Watch:
    """A job in the core, as seen by the task that waits for it."""
    job: Job
    news: asyncio.Event
    left: int  # completions still running
    last: dict  # request_id -> time of its latest token
    refusal: str | None = None  # the core's sentence, if it could never run

class Engine:
    """The core process from outside, and the text around it."""
    def __init__(self, engine_options, options):
        config = ns.EngineConfig(**engine_options)  # refuse what is wrong before a process starts
        self.options, self.engine_options = options, engine_options
        checkpoint = ns.open_checkpoint(config.model)
        vocab_size = ns.read_model_config(checkpoint).vocab_size
        self.front = ns.FrontEnd(
            checkpoint.tokenizer(), checkpoint.generation_config, vocab_size, config.max_model_len)
        self.tokenizer, self.parsers = self.front.tokenizer, ThreadPoolExecutor(2)
        self.model = options.served_model_name or config.model or Path(checkpoint.name).stem
        self.longest_token = max(
            (len(self.tokenizer.token_bytes(i)) for i in range(self.tokenizer.vocab_size)))
        self.metrics, self.watches = Metrics(self.model), {}
        self.process, self.dead, self.answers = None, None, {"view": [], "reset": []}

    def start(self):
        """Start the core and wait until its model is loaded. Returns what it says about itself."""
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=ns.run_core, args=(self.engine_options, theirs), name="core", daemon=True)
        self.process.start()
        theirs.close()
        try:
            kind, content = self.pipe.recv()
        except EOFError:
            raise ValueError("the core process died while it started") from None
        ns.require(kind == "ready", content)
        self.front.max_model_len = content["max_model_len"]
        self.outbox = queue.SimpleQueue()  # a full pipe must stop a thread, not the event loop
        threading.Thread(target=self._post, daemon=True).start()
        return content["report"]

    def _post(self):
        with contextlib.suppress(OSError):  # the core is dead, as _receive() will see
            while True:
                self.pipe.send(self.outbox.get())

    def listen(self, on_death):
        self.on_death = on_death
        asyncio.get_running_loop().add_reader(self.pipe.fileno(), self._receive)

    def stop(self):
        """End the core, which keeps nothing. Left alone it waits for mail, and Python for it."""
        if self.process:
            self.process.kill()
            self.process.join()

    def check_model(self, body):
        model = typed(body, "model", str, self.model)
        if model != self.model:
            raise Refused(404, f"the model {model[:100]!r} does not exist; there is {self.model!r}",
                          "model")
        return model

    def encode(self, text, add_special_tokens):
        """Ids of a text. What is too long for sure is refused before time is spent on it."""
        most = self.front.max_model_len * self.longest_token
        check(len(text) <= most, f"a text of {len(text)} characters has more tokens than "
              f"max_model_len {self.front.max_model_len}")
        return self.tokenizer.encode(text, add_special_tokens)

    def chat_ids(self, body):
        """Ids of the conversation. The template writes BOS, so that encoding adds no second one."""
        messages = read_messages(body)
        variables = typed(body, "chat_template_kwargs", dict, {})
        taken = {"self", "messages", "add_generation_prompt"} & set(variables)
        check(not taken, f"chat_template_kwargs may not hold {sorted(taken)}",
              "chat_template_kwargs")
        text = self.tokenizer.apply_chat_template(
            messages, typed(body, "add_generation_prompt", bool, True), **variables)
        return self.encode(text, typed(body, "add_special_tokens", bool, False))

    @contextlib.contextmanager
    def running(self, job):
        """The job runs in the core while this context is open; whoever leaves aborts the rest."""
        if self.dead:
            raise Refused(503, self.dead)
        watch, mail = Watch(job, asyncio.Event(), 0, {}), []
        job.pendings = []
        for parent, messages in job.checked:
            for message, pending in zip(messages, self.front.register(parent, messages)):
                self.watches[message.request_id] = watch, pending
                job.pendings.append(pending)
            mail += messages
        watch.left = len(mail)
        self.outbox.put(("add", mail))
        try:
            yield watch
        finally:
            left = [m.request_id for m in mail if m.request_id in self.front.pending]
            for request_id in left:
                _, pending = self.watches.pop(request_id)
                self.front.end(request_id, "error" if watch.refusal or self.dead else "abort")
                if pending.parent.finished:
                    self.metrics.finish(pending.parent)
            if left:
                self.outbox.put(("abort", left))
            self._log(job)

    def _log(self, job):
        parents = [parent for parent, _ in job.checked]
        first, usage = parents[0].metrics, usage_of(parents)
        ttft = first.first_token_time and first.first_token_time - first.arrival_time
        row = {"request": job.id, "prompt_tokens": usage["prompt_tokens"],
               "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
               "output_tokens": usage["completion_tokens"], "ttft": ttft and round(ttft, 4),
               "e2e": round(time.monotonic() - first.arrival_time, 4),
               "finish": [c.finish_reason for parent in parents for c in parent.outputs][:16]}
        if self.options.log_prompts:
            row["prompts"] = [self.tokenizer.decode(p.prompt_token_ids, False) for p in parents]
        log.info(row)

    async def wait(self, watch):
        """Until there is news of the job. Refused if it failed."""
        await watch.news.wait()
        watch.news.clear()
        if watch.refusal:
            raise Refused(400, watch.refusal)
        for parent, _ in watch.job.checked:
            if parent.error:
                raise Refused(500, parent.error)
        if self.dead and watch.left:
            raise Refused(500, self.dead)

    async def ask(self, kind):
        """A question to the core, which answers between two steps; equal questions share it."""
        if self.dead:
            raise Refused(503, self.dead)
        future = asyncio.get_running_loop().create_future()
        self.answers[kind].append(future)
        if len(self.answers[kind]) == 1:
            self.outbox.put((kind, None))
        return await future

    def _receive(self):
        """A message of the core has arrived."""
        try:
            kind, content = self.pipe.recv()
        except (EOFError, OSError):
            kind, content = "crashed", "it was killed"
        if kind == "news":
            entries, stats = content
            self.metrics.new_stats(stats)
            if stopped := self.front.process(entries):
                self.outbox.put(("stop", stopped))
            now = time.monotonic()
            for entry in entries:
                if entry.request_id in self.watches:
                    self._tell(entry, now)
        elif kind == "refused":
            request_id, sentence = content
            if request_id in self.watches:
                watch, _ = self.watches[request_id]
                watch.refusal = sentence
                watch.news.set()
        elif kind in self.answers:
            waiting, self.answers[kind] = self.answers[kind], []
            for future in waiting:
                if not future.done():
                    future.set_result(content)
        else:
            log.error({"core": "crashed", "error": content})
            self.fail_all(f"the engine has stopped: {content}")
            self.on_death()

    def _tell(self, entry, now):
        """Wake the task that waits for this news, and time it."""
        request_id = entry.request_id
        watch, pending = self.watches[request_id]
        if entry.new_token_ids:
            before = watch.last.get(request_id)
            name = "inter_token_latency_seconds" if before else "time_to_first_token_seconds"
            self.metrics.observe(name, now - (before or pending.parent.metrics.arrival_time))
            watch.last[request_id] = now
        if request_id not in self.front.pending:
            del self.watches[request_id]
            watch.left -= 1
            if pending.parent.finished:
                self.metrics.finish(pending.parent)
        if watch.job.stream or not watch.left or entry.error:
            watch.news.set()

    def fail_all(self, sentence):
        """Nothing more will be computed: every open job and question gets this sentence."""
        self.dead = self.dead or sentence
        asyncio.get_running_loop().remove_reader(self.pipe.fileno())
        for watch, _ in self.watches.values():
            watch.news.set()
        for futures in self.answers.values():
            for future in futures:
                if not future.done():
                    future.set_exception(Refused(503, self.dead))


# ==================================================================================================
# 6  Routes
# ==================================================================================================
# Invariant: only GET pages that tell nothing of the requests are open to those without the key.

@dataclass
class Request:
    """What a client sent."""
    method: str
    path: str
    headers: dict
    body: bytes = b""

@dataclass
class Response:
    """A whole answer."""
    body: bytes
    content_type: str = "application/json"
    status: int = 200
    headers: tuple = ()

OPEN = {"/", "/health", "/metrics", "/version"}
SHUTTING_DOWN = "the server is shutting down"

class Routes:
    """What each path does. A handler returns a Response, or an async iterator of events."""
    def __init__(self, engine, options):
        self.engine, self.options, self.draining = engine, options, False
        self.started = int(time.time())
        self.table = {
            "/": {"GET": self.page}, "/health": {"GET": self.health},
            "/metrics": {"GET": self.metrics}, "/version": {"GET": self.version},
            "/engine": {"GET": self.look}, "/v1/models": {"GET": self.models},
            "/v1/models/" + urllib.parse.quote(engine.model): {"GET": self.models},
            "/v1/completions": {"POST": functools.partial(self.complete, chat=False)},
            "/v1/chat/completions": {"POST": functools.partial(self.complete, chat=True)},
            "/tokenize": {"POST": self.tokenize}, "/detokenize": {"POST": self.detokenize},
            "/reset_prefix_cache": {"POST": self.reset}}

    async def __call__(self, request):
        path = request.path if request.path in self.table else urllib.parse.quote(
            urllib.parse.unquote(request.path))
        methods = self.table.get(path)
        if methods is None:
            raise Refused(404, f"there is nothing at {request.path[:200]!r}")
        allow = ", ".join([*methods, *(["HEAD"] if "GET" in methods else []), "OPTIONS"])
        if request.method == "OPTIONS":
            asked = request.headers.get("access-control-request-headers", "*")
            return Response(b"", status=204, headers=(
                ("Allow", allow), ("Access-Control-Allow-Methods", allow),
                ("Access-Control-Allow-Headers", asked)))
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            raise Refused(405, f"{request.path} takes {allow}, not {request.method[:20]}",
                          headers=(("Allow", allow),))
        if path not in OPEN:
            self.check_key(request)
        if request.method == "POST" and self.draining:
            raise Refused(503, SHUTTING_DOWN)
        return await handler(request)

    def allowed_origin(self, request):
        """Headers that let the page at Origin read the answer. Refused if it is a stranger's."""
        origin = request.headers.get("origin")
        if origin is None or origin.partition("://")[2] == request.headers.get("host"):
            return ()
        known = self.options.allowed_origins or []
        if origin not in known and "*" not in known:
            raise Refused(403, f"pages of {origin[:200]!r} may not call this server; "
                          "--allowed-origins lets them")
        return ("Access-Control-Allow-Origin", origin), ("Vary", "Origin")

    def check_key(self, request):
        if (key := self.options.api_key) is None:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("latin-1"), key.encode())
        if kind.lower() != "bearer" or not same:
            raise Refused(401, "the API key is missing or wrong",
                          headers=(("WWW-Authenticate", "Bearer"),))

    async def read(self, request, function):
        """function(the body's object), in a thread: a long text takes long to tokenise."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refused(415, f"Content-Type must be application/json, got {kind[:100]!r}")
        body = {}
        def call():
            body.update(from_json(request.body))
            return function(body)
        try:
            return await asyncio.get_running_loop().run_in_executor(self.engine.parsers, call)
        except ValueError as error:
            word = str(error).partition(" ")[0]
            raise Refused(400, str(error), word if word in body else None) from None

    async def complete(self, request, chat):
        engine = self.engine
        job = await self.read(request, lambda body: understand(engine, body, chat))
        if job.stream:
            return self.stream(job)
        with engine.running(job) as watch:
            while watch.left:
                await engine.wait(watch)
        return Response(to_json(whole_answer(job, engine.tokenizer)))

    async def stream(self, job):
        """Events of a job. It begins to run when the first is asked for."""
        pieces = None
        try:
            with self.engine.running(job) as watch:
                pieces = Pieces(job, self.engine.tokenizer)
                while watch.left:
                    await self.engine.wait(watch)
                    if events := pieces.take():
                        yield events
                yield pieces.take() + pieces.end()
        except Refused as error:
            if pieces is None or not pieces.begun:
                raise
            yield b"data: " + to_json(error.body()) + b"\n\ndata: [DONE]\n\n"

    async def page(self, request):
        return Response(PAGE.read_bytes(), "text/html; charset=utf-8", headers=(
            ("Content-Security-Policy", "default-src 'self' 'unsafe-inline'"),))

    async def health(self, request):
        return Response(b"", "text/plain", 503 if self.engine.dead or self.draining else 200)

    async def metrics(self, request):
        return Response(self.engine.metrics.text().encode("utf-8", "nanoserve"),
                        "text/plain; version=0.0.4; charset=utf-8")

    async def version(self, request):
        return Response(to_json({"version": ns.__version__}))

    async def look(self, request):
        return Response(to_json(await self.engine.ask("view")))

    async def models(self, request):
        card = {"id": self.engine.model, "object": "model", "created": self.started,
                "owned_by": "nanoserve", "max_model_len": self.engine.front.max_model_len}
        whole = request.path == "/v1/models"
        return Response(to_json({"object": "list", "data": [card]} if whole else card))

    async def reset(self, request):
        return Response(to_json({"reset": await self.engine.ask("reset")}))

    async def tokenize(self, request):
        engine = self.engine
        def call(body):
            engine.check_model(body)
            warn_of_unknown(body, CHAT_ONLY | {"model", "prompt", "add_special_tokens",
                                               "return_token_strs"})
            if "messages" in body:
                ids = engine.chat_ids(body)
            else:
                prompt = typed(body, "prompt", str, None)
                check(prompt is not None, "prompt is missing, and so is messages", "prompt")
                ids = engine.encode(prompt, typed(body, "add_special_tokens", bool, True))
            texts = None
            if typed(body, "return_token_strs", bool, False):
                texts = [engine.tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids]
            return {"count": len(ids), "max_model_len": engine.front.max_model_len, "tokens": ids,
                    "token_strs": texts}
        return Response(to_json(await self.read(request, call)))

    async def detokenize(self, request):
        def call(body):
            self.engine.check_model(body)
            warn_of_unknown(body, {"model", "tokens"})
            ids = typed(body, "tokens", list, None)
            check(ids is not None, "tokens is missing", "tokens")
            self.engine.front.check_ids("tokens", ids)
            return {"prompt": self.engine.tokenizer.decode(ids, skip_special_tokens=False)}
        return Response(to_json(await self.read(request, call)))


# ==================================================================================================
# 7  Connections
# ==================================================================================================
# Invariant: headers, bodies, unsent answers, connections and the time for each of them are bounded.
# Why: end of input means that the client has left: an ordinary client that closes shows nothing
#   else, and its request would run on. A client that shuts only its sending half gets no answer.

MOST_HEADER_BYTES = 32 << 10
MOST_BYTES_AHEAD = 64 << 10  # sent before the previous answer has ended
MOST_UNSENT_BYTES = 64 << 10

class Connection(asyncio.Protocol):
    """One client: bytes in, requests one after the other, bytes out."""
    def __init__(self, server):
        self.server, self.options = server, server.options
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEADER_BYTES)
        self.request, self.task, self.timer = None, None, None
        self.num_ahead, self.leaving, self.extra_headers = 0, False, ()
        self.writable = asyncio.Event()
        self.writable.set()

    def connection_made(self, transport):
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_UNSENT_BYTES)
        transport.set_write_buffer_limits(MOST_UNSENT_BYTES)
        self.server.connections.add(self)
        if self.server.routes.draining:
            self.refuse(Refused(503, SHUTTING_DOWN))
        elif len(self.server.connections) > self.options.max_connections:
            self.refuse(Refused(503, f"{self.options.max_connections} connections are open: no "
                                "more are taken"))
        else:
            self.set_timer(self.options.request_timeout, self.too_slow)

    def connection_lost(self, error):
        self.server.connections.discard(self)
        self.server.changed.set()
        self.set_timer(None)
        self.writable.set()
        if self.task:
            self.task.cancel()

    def set_timer(self, seconds, action=None):
        if self.timer:
            self.timer.cancel()
        loop = asyncio.get_running_loop()
        self.timer = None if seconds is None else loop.call_later(seconds, action)

    def too_slow(self):
        seconds = self.options.request_timeout
        self.refuse(Refused(408, f"the request did not arrive within {seconds:g} seconds"))

    def pause_writing(self):
        self.writable.clear()

    def resume_writing(self):
        self.writable.set()

    def data_received(self, data):
        if self.leaving:
            return
        if self.task:  # the next request, sent ahead
            self.num_ahead += len(data)
            if self.num_ahead > MOST_BYTES_AHEAD:
                return self.transport.abort()
        elif self.http.their_state is h11.IDLE and self.timer and not self.http.trailing_data[0]:
            self.set_timer(self.options.request_timeout, self.too_slow)
        self.http.receive_data(data)
        if not self.task:
            self.advance()

    def advance(self):
        """Read events up to the end of one request, and then answer it."""
        try:
            while (event := self.http.next_event()) is not h11.PAUSED:
                if event is h11.NEED_DATA:
                    if self.http.they_are_waiting_for_100_continue:
                        go_on = h11.InformationalResponse(status_code=100, headers=[])
                        self.transport.write(self.http.send(go_on))
                    return
                if isinstance(event, h11.Request):
                    self.begin(event)
                elif isinstance(event, h11.Data):
                    self.request.body += event.data
                    self.check_size(len(self.request.body))
                elif isinstance(event, h11.EndOfMessage):
                    self.set_timer(None)
                    self.task = asyncio.get_running_loop().create_task(self.answer())
                    return
                elif isinstance(event, h11.ConnectionClosed):
                    return self.leave()
        except h11.RemoteProtocolError as error:
            self.refuse(Refused(error.error_status_hint, f"this is not valid HTTP: {error}"))
        except Refused as error:
            self.refuse(error)

    def begin(self, event):
        headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
        path = event.target.decode("latin-1").partition("?")[0]
        self.request = Request(event.method.decode(), path, headers, bytearray())
        if "transfer-encoding" in headers and "content-length" in headers:
            raise Refused(400, "a request has either Content-Length or Transfer-Encoding")
        self.check_size(int(headers.get("content-length", 0)))

    def check_size(self, size):
        if size > self.options.max_body_bytes:
            raise Refused(413, f"the body has more than {self.options.max_body_bytes} bytes")

    async def answer(self):
        """Answer one request; whatever goes wrong, the client hears of it in one sentence."""
        self.extra_headers, request, routes = (), self.request, self.server.routes
        try:
            self.extra_headers = routes.allowed_origin(request)
            result = await routes(request)
            if isinstance(result, Response):
                await self.write(*self.events_of(result))
            else:
                async with contextlib.aclosing(result) as events:
                    first = await anext(events)  # an error before it still has a status of its own
                    await self.write(self.head(200, [
                        ("Content-Type", "text/event-stream; charset=utf-8"),
                        ("Cache-Control", "no-cache")]), h11.Data(first))
                    async for event in events:
                        await self.write(h11.Data(event))
                await self.write(h11.EndOfMessage())
        except ConnectionError:
            return  # nobody is there to be told
        except Refused as error:
            await self.write_error(error)
        except Exception as error:
            log.exception({"path": request.path[:200], "status": 500})
            if self.http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # half an answer is out
                return self.transport.abort()
            await self.write_error(Refused(500, f"a {type(error).__name__} inside the server"))
        self.task = None
        self.next_request()

    def next_request(self):
        """Keep the connection for another request if both sides want to."""
        states = self.http.our_state, self.http.their_state
        if states != (h11.DONE, h11.DONE) or self.server.routes.draining:
            return self.leave()
        self.http.start_next_cycle()
        self.num_ahead = 0
        ahead = self.http.trailing_data[0]
        self.set_timer(*((self.options.request_timeout, self.too_slow) if ahead else
                         (self.options.keep_alive_timeout, self.leave)))
        if ahead:
            self.advance()

    def head(self, status, headers):
        if self.server.routes.draining:
            headers = [*headers, ("Connection", "close")]
        return h11.Response(status_code=status, headers=[*headers, *self.extra_headers],
                            reason=http.HTTPStatus(status).phrase)

    async def write(self, *events):
        """Send piece by piece, and wait while the client has not read enough of those before."""
        data = b"".join(self.http.send(event) or b"" for event in events)
        try:
            for start in range(0, len(data), MOST_UNSENT_BYTES):
                self.transport.write(data[start : start + MOST_UNSENT_BYTES])
                if not self.writable.is_set():
                    await asyncio.wait_for(self.writable.wait(), self.options.write_timeout)
        except asyncio.TimeoutError:
            log.info({"path": self.request.path[:200], "error": "the client does not read"})
            self.transport.abort()
            raise ConnectionAbortedError from None

    def events_of(self, response):
        head = self.head(response.status, [("Content-Type", response.content_type),
                                           ("Content-Length", str(len(response.body))),
                                           *response.headers])
        silent = self.request is not None and self.request.method == "HEAD" or not response.body
        return [head, *([] if silent else [h11.Data(response.body)]), h11.EndOfMessage()]

    async def write_error(self, error):
        with contextlib.suppress(ConnectionError):
            await self.write(*self.events_of(self.error_response(error)))

    def error_response(self, error, *headers):
        """It goes into the log, too, but a 400 without its sentence: that may quote the client."""
        row = {"status": error.status, "param": error.param}
        if error.status != 400 or self.options.log_prompts:
            row["error"] = str(error)[:300]
        log.info({"path": self.request.path[:200], **row} if self.request else row)
        return Response(to_json(error.body()), status=error.status,
                        headers=(*error.headers, *headers))

    def refuse(self, error):
        """Answer what cannot be read to its end, and hang up: where the next request would begin
        is not known. What still arrives is thrown away, so that the answer is not lost."""
        idle = (error.status == 408 and self.http.their_state is h11.IDLE
                and not self.http.trailing_data[0])  # it never began: nothing to answer
        if self.http.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not idle:
            response = self.error_response(error, ("Connection", "close"))
            data = [self.http.send(event) or b"" for event in self.events_of(response)]
            self.transport.write(b"".join(data))
        self.leaving = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.set_timer(1, self.transport.abort)

    def leave(self):
        """Close once all is sent, or the client has had its time to read it."""
        self.leaving = True
        self.transport.close()
        self.set_timer(self.options.write_timeout, self.transport.abort)


# ==================================================================================================
# 8  Start and end
# ==================================================================================================
# Invariant: SIGTERM ends with 0 within drain_timeout and a few seconds; a dead core ends with 1.

class JsonLines(logging.Formatter):
    """A log line is a JSON object."""
    def format(self, record):
        row = record.msg if isinstance(record.msg, dict) else {"message": record.getMessage()}
        row = {"time": round(record.created, 3), "level": record.levelname.lower(), **row}
        if record.exc_info:
            row["traceback"] = self.formatException(record.exc_info)
        return json.dumps(row)

class Server:
    """All connections, and the end of them."""
    def __init__(self, engine, options):
        self.engine, self.options, self.connections = engine, options, set()
        self.routes = Routes(engine, options)
        self.num_signals, self.died = 0, False
        self.changed = asyncio.Event()  # a signal came, the core died or a connection ended

    async def run(self, listening):
        """Serve until a signal or the core's death. Returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.on_signal)
        self.engine.listen(self.on_death)
        self.listener = await loop.create_server(
            lambda: Connection(self), sock=listening, backlog=2048)
        host, port = listening.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        ns.say(f"serving {self.engine.model} on http://{host}:{port}")
        await self.until(lambda: self.num_signals or self.died)
        if not self.died:
            await self.drain()
        if self.died:
            await asyncio.sleep(2)  # long enough for /health to be asked
        self.listener.close()
        for connection in [*self.connections]:
            connection.transport.abort()
        return 1 if self.died else 0

    def on_signal(self):
        self.num_signals += 1
        self.changed.set()

    def on_death(self):
        self.died = True
        self.changed.set()

    async def until(self, condition, seconds=None):
        """Wait for what a signal, the core's death or the end of a connection brings about."""
        async def wait():
            while not condition():
                self.changed.clear()
                await self.changed.wait()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(wait(), seconds)

    async def drain(self):
        """No new requests; those that run end, or are ended at the deadline or a second signal."""
        log.info("draining: no new requests, waiting for those that run")
        self.routes.draining = True
        self.listener.close()
        for connection in [*self.connections]:
            if not connection.task:
                connection.leave()
        await self.until(lambda: not self.connections or self.died or self.num_signals > 1,
                         self.options.drain_timeout)
        if self.connections and not self.died:
            self.engine.fail_all(SHUTTING_DOWN)
            await self.until(lambda: not self.connections, 1)  # time to read why

def serve(engine_options, server_options):
    """Load the model, listen, and serve. Returns the exit code."""
    options = ns.ServerConfig(**server_options)
    listening = socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with ns.explained(f"cannot listen on {options.host}:{options.port}", OSError):
        listening.bind((options.host, options.port))
    engine = Engine(engine_options, options)
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    with contextlib.suppress(ImportError, ValueError, OSError):  # a descriptor per connection
        import resource
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        ns.say("\n".join(engine.start()))
        ns.say(f"front end: process {os.getpid()}; core: process {engine.process.pid}")
        return asyncio.run(Server(engine, options).run(listening))
    finally:
        engine.stop()
