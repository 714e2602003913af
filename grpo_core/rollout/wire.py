"""The wire format of an engine's `/inference/v1/generate`: token ids in; token ids, log-probs and spans out.

Pure functions between plain data and JSON objects. vLLM ignores unknown keys without a word, so requests are
built here and nowhere else; and it answers 200 with -9999 where a log-prob was NaN or infinite, so answers are
believed only after the checks here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from grpo_core.trajectory import LENGTH, Stamp, Turn, VersionSpan

# The key of the engines' generation routes comes from the environment alone.
API_KEY_VARIABLE = "VLLM_API_KEY"
# vLLM puts this prefix before the request id it was given; /abort_requests knows only the whole.
REQUEST_PREFIX = "generate-tokens-"
# vLLM reports NaN and -inf as -9999.
LOWEST_LOGPROB = -9998.0
# How a whole turn ends: the model stopped, or its tokens ran out. An abort or an error cuts it anywhere.
WHOLE = ("stop", LENGTH)
# Reasons of InvalidGeneration that are nobody's fault: a turn that was cut off before its end, and one that is sound
# but for the refit it waited through.
ABORTED, OLD_SALT = "aborted", "salt"
# Token ids and offsets are kept as 32 bits.
NATURALS = range(2**31)
# The priority of a canary under vLLM's `--scheduling-policy priority`, where less is sooner and requests have 0: it
# then waits for one running sequence to end and not for all that wait. Without that policy vLLM ignores it.
CANARY_PRIORITY = -1


class InvalidGeneration(RuntimeError):
    """An engine's answer that must not be trained on; `reason` is one word for counting."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class SamplingSettings(Protocol):
    """How tokens are drawn. Every value is sent explicitly, so no default of the engine or the model applies."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...


def generate_request(
    prompt_ids: Sequence[int],
    *,
    request_id: str,
    sampling: SamplingSettings,
    max_tokens: int,
    seed: int,
    stop_token_ids: Sequence[int],
    cache_salt: str,
    n: int = 1,
    model: str | None = None,
) -> dict[str, Any]:
    """The request for `n` independent continuations of one prompt. The same seed gives the same `n` answers.

    `logprobs: 0` asks for the log-prob of the sampled token alone, the cheapest exact form. `model` names an adapter;
    without it the policy itself answers.
    """
    return {
        **({} if model is None else {"model": model}),
        "request_id": request_id,
        "token_ids": list(prompt_ids),
        "cache_salt": cache_salt,
        "stream": False,
        "sampling_params": {
            "n": n,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "max_tokens": max_tokens,
            "min_tokens": 0,
            "seed": seed,
            "stop_token_ids": list(stop_token_ids),
            "ignore_eos": False,
            "logprobs": 0,
            "skip_special_tokens": False,
            "detokenize": False,
        },
    }


def score_request(token_ids: Sequence[int], cache_salt: str, *, model: str | None = None) -> dict[str, Any]:
    """The request for the log-probs of a given sequence, at temperature 1,
    bypassing any cached prefix and all that wait."""
    return {
        **({} if model is None else {"model": model}),
        "token_ids": list(token_ids),
        "cache_salt": cache_salt,
        "priority": CANARY_PRIORITY,
        "stream": False,
        "sampling_params": {
            "n": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "skip_special_tokens": False,
            "detokenize": False,
        },
    }


def next_token_request(token_ids: Sequence[int], cache_salt: str, *, model: str) -> dict[str, Any]:
    """The request for the log-prob of the last token given those before it, at temperature 1, by the adapter `model`.

    One step of an ordinary generation, because vLLM 0.32 on CPUs dies of a `prompt_logprobs` that shares a step with
    other requests once adapters are enabled. The engine cuts the list of log-probs behind its own token,
    so the token is named twice.
    """
    wanted = [token_ids[-1]] * 2
    request = score_request(token_ids[:-1], cache_salt, model=model)
    sampling = {key: value for key, value in request["sampling_params"].items() if key != "prompt_logprobs"}
    return {**request, "sampling_params": {**sampling, "logprobs": len(wanted), "logprob_token_ids": wanted}}


def parse_turns(
    answer: Mapping[str, Any],
    prompt_ids: Sequence[int],
    n: int,
    *,
    engine: str,
    submitted_at: float,
    finished_at: float,
    seed: int = 0,
    adapter: str | None = None,
    salt: str | None = None,
) -> list[Turn | InvalidGeneration]:
    """The `n` choices of an answer in the order of their indices: turns, and of those that cannot be believed the
    cause. Raises InvalidGeneration for an answer of which nothing can be believed.

    With an `adapter`, which is a stamp, every token is of that version: engines stamp only changes of the weights
    below. `salt` is given where engines keep their caches across refits; a turn must then begin under that version.
    """
    try:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        indices = [choice["index"] for choice in choices]
    except (KeyError, TypeError) as error:
        raise InvalidGeneration("shape", f"engine {engine} answered without usable choices: {error!r}") from error
    if indices != list(range(n)):
        raise InvalidGeneration("choices", f"engine {engine} answered choices {indices}, expected 0 to {n - 1}")
    if adapter is not None and answer.get("model") != adapter:
        raise InvalidGeneration(
            "version", f"engine {engine} answered with {answer.get('model')!r} instead of the adapter {adapter}"
        )
    unfinished = Turn(list(prompt_ids), [], [], (), "", engine, submitted_at, None, finished_at, seed)
    turns: list[Turn | InvalidGeneration] = []
    for choice in choices:
        try:
            turns.append(_turn(choice, unfinished, adapter, salt))
        except InvalidGeneration as error:
            turns.append(error)
    return turns


def check_first_span(turn: Turn, salt: str) -> None:
    """Raise InvalidGeneration for a turn that began under another version than the one it was salted with.

    When engines keep their caches across refits, a request that waited through one finds the prefixes of its salt,
    which are the old version's, and goes on from them with the new weights: its tokens match neither policy from the
    first one on. Made again with the new salt it is exact.
    """
    first = turn.spans[0]
    if str(Stamp(first.attempt, first.version)) != salt:
        raise InvalidGeneration(
            OLD_SALT,
            f"engine {turn.engine} began a turn with version {first.attempt}.{first.version} on the cache of {salt}; "
            "it is generated again",
        )


def _turn(choice: Mapping[str, Any], unfinished: Turn, adapter: str | None, salt: str | None) -> Turn:
    """`unfinished` with what a choice says. Raises InvalidGeneration."""
    engine = unfinished.engine
    try:
        ids = [_natural(token) for token in choice["token_ids"]]
        content = (choice["logprobs"] or {}).get("content") or []
        logprobs = [entry["logprob"] for entry in content]
        whole = [{"version": adapter, "start": 0, "end": len(ids)}]
        raw_spans = list(choice.get("weight_versions") or []) if adapter is None else whole
        reason = str(choice["finish_reason"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidGeneration("shape", f"engine {engine} answered a malformed choice: {error!r}") from error
    if reason not in WHOLE:
        raise InvalidGeneration(
            ABORTED, f"engine {engine} ended a turn with {reason!r} after {len(ids)} tokens; its output is discarded"
        )
    if not ids:
        raise InvalidGeneration("empty", f"engine {engine} ended a turn with {reason!r} before its first token")
    if len(logprobs) != len(ids):
        raise InvalidGeneration(
            "logprob_count", f"engine {engine} gave {len(logprobs)} log-probs for {len(ids)} tokens"
        )
    checked = [_logprob(value, engine) for value in logprobs]
    spans = parse_spans(raw_spans, len(ids), engine)
    turn = replace(unfinished, output_ids=ids, logprobs=checked, spans=spans, finish_reason=reason)
    if salt is not None:
        check_first_span(turn, salt)
    return turn


def _natural(value: Any) -> int:
    """A token id or an offset. Raises ValueError for what is none,
    on which a tokenizer or a shard would choke later."""
    if type(value) is not int or value not in NATURALS:
        raise ValueError(f"{value!r} is not a natural number below {NATURALS.stop}")
    return value


def _logprob(value: Any, engine: str) -> float:
    """A believable log-prob in nats, or InvalidGeneration."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidGeneration("logprob_missing", f"engine {engine} gave log-prob {value!r}; its output is discarded")
    # A comparison also refuses NaN and infinities, and integers beyond any float, which `isfinite` would choke on.
    if not LOWEST_LOGPROB < value <= 0.001:
        raise InvalidGeneration("logprob_value", f"engine {engine} gave log-prob {value}; its weights may be damaged")
    return float(value)


def parse_spans(raw: Sequence[Mapping[str, Any]], tokens: int, engine: str) -> tuple[VersionSpan, ...]:
    """The engine's version spans: contiguous and covering all `tokens`, or InvalidGeneration."""
    spans: list[VersionSpan] = []
    position = 0
    for span in raw:
        try:
            stamp = Stamp.parse(span["version"])
            start, end = _natural(span["start"]), _natural(span["end"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidGeneration("version", f"engine {engine} sampled with unstamped weights: {error}") from error
        if start != position or end <= start:
            raise InvalidGeneration("spans", f"engine {engine} gave span {start} to {end} where {position} was due")
        spans.append(VersionSpan(stamp.attempt, stamp.version, start, end))
        position = end
    if position != tokens:
        raise InvalidGeneration("spans", f"engine {engine} stamped {position} of {tokens} tokens")
    return tuple(spans)


def parse_scores(answer: Mapping[str, Any], token_ids: Sequence[int]) -> list[float]:
    """Log-probs (nats) of `token_ids[1:]` from the answer to a `score_request`; NaN where the engine has no value."""
    try:
        entries = answer["prompt_logprobs"][1:]
        pairs = zip(token_ids[1:], entries, strict=True)
        return [_score(entry[str(token)]["logprob"]) for token, entry in pairs]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InvalidGeneration(
            "scores", f"the engine answered no log-probs for the given tokens: {error!r}"
        ) from error


def parse_next_token(answer: Mapping[str, Any], token: int) -> float:
    """The log-prob (nats) of `token` from the answer to a `next_token_request`; NaN where the engine has no value."""
    try:
        entries = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return _score(next(entry["logprob"] for entry in entries if entry["token_id"] == token))
    except (KeyError, TypeError, IndexError, StopIteration, OverflowError) as error:
        raise InvalidGeneration("scores", f"the engine answered no log-prob for token {token}: {error!r}") from error


def _score(value: Any) -> float:
    """A log-prob (nats), or NaN for what stands for none. Raises TypeError for what is no number."""
    return float(value) if value is not None and value > LOWEST_LOGPROB else math.nan
