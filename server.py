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
import json
import logging
import multiprocessing
import queue
import signal
import socket
import sys
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
# Invariant: whatever a client sends, the answer is a status, OpenAI's error object and one sentence.

ERROR_TYPES = {
    400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionDeniedError",
    404: "NotFoundError", 405: "MethodNotAllowedError", 408: "RequestTimeoutError",
    413: "RequestTooLargeError", 415: "UnsupportedMediaTypeError", 500: "InternalServerError",
    503: "ServiceUnavailableError"}

class Refused(Exception):
    """A request that gets an error instead of an answer; param: the field at fault, if one is."""
    def __init__(self, status, message, param=None, headers=()):
        super().__init__(message)
        self.status, self.param, self.headers = status, param, headers

    def body(self):
        message = str(self)
        message = message if len(message) <= 600 else message[:600] + " ..."
        kind = ERROR_TYPES.get(self.status, "BadRequestError")
        return {"error": {"message": message, "type": kind, "param": self.param,
                          "code": self.status}}

def check(condition, message, param=None):
    if not condition:
        raise Refused(400, message, param)

# Half of a surrogate pair is valid in JSON's escapes and in no encoding.
codecs.register_error("nanoserve", lambda error: ("\ufffd" * (error.end - error.start), error.end))

def to_json(value):
    """UTF-8 bytes, whatever the text.

    >>> to_json({"a": "\\ud800"}).decode()
    '{"a":"\ufffd"}'
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "nanoserve")

def from_json(data):
    """The object in a request's body."""
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
        "return_token_ids", "return_token_strs"}
CHAT_ONLY = {"messages", "top_logprobs", "max_completion_tokens", "add_generation_prompt"}
HARMLESS = {"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
            "parallel_tool_calls", "spaces_between_special_tokens"}
# What is not implemented and may not be skipped silently, with its values that ask for nothing.
REFUSED = {
    "suffix": (), "best_of": (1,), "use_beam_search": (False,), "tools": ([],), "functions": ([],),
    "tool_choice": ("none", "auto"), "function_call": ("none", "auto"), "prompt_embeds": (),
    "response_format": ({"type": "text"},), "structured_outputs": (), "guided_json": (),
    "guided_regex": (), "guided_choice": (), "guided_grammar": (), "modalities": (["text"],),
    "audio": (), "chat_template": (), "continue_final_message": (False,),
    "truncate_prompt_tokens": (), "return_tokens_as_token_ids": (False,)}
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
    good = is_int(value) if kind is int else isinstance(value, kind) or value is default
    check(good, f"{name} must be {words}, got {value!r}", name)
    return value

def text_of(content, where):
    """Content of a message: a string, or text parts, which are joined."""
    if isinstance(content, list):
        for part in content:
            check(isinstance(part, dict), f"{where}: a content part must be an object", "messages")
            check(part.get("type") == "text", f"{where}: content part type {part.get('type')!r} is "
                  "not supported, only 'text'", "messages")
            check(isinstance(part.get("text"), str), f"{where}: text must be a string", "messages")
        return "".join(part["text"] for part in content)
    check(isinstance(content, str), f"{where}: content must be a string or a list of text parts",
          "messages")
    return content

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

def read_sampling(front, body, chat):
    """SamplingParams, and the number of best logprobs to report."""
    given = {name: body[name] for name in PASSED if body.get(name) is not None}
    for name, most in LONGEST_LIST.items():
        value = given.get(name)
        check(isinstance(value, str) or not hasattr(value, "__len__") or len(value) <= most,
              f"{name} has {len(value or ())} entries, the most is {most}", name)
    if chat and typed(body, "max_completion_tokens", int, None) is not None:
        given["max_tokens"] = body["max_completion_tokens"]
    if chat:
        given.setdefault("max_tokens", None)  # as many as there is room for
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
