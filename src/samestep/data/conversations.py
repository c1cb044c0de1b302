"""Conversations, prompts with completions, texts and pairs of answers, as tokens of which some count in the loss.

From the top: the format of a row, what the assistant's part of a rendered conversation is, and the encoder. A
template with generation marks says itself what the assistant wrote. For one without, the conversation is rendered up
to before and behind each of the assistant's messages; where these don't begin as the whole does, that is refused.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from samestep.data.records import Row, Rows, missing_column
from samestep.errors import UserError, closest, one_line
from samestep.input_files import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TrainOn = Literal["assistant", "completion", "all"]

_ASSISTANT = "assistant"


class Format(Enum):
    """What a row has; the value says it in words."""

    MESSAGES = "conversations (messages)"
    SHARED = "conversations (from and value)"
    COMPLETION = "prompts and completions"
    INSTRUCTION = "instructions and outputs"
    TEXT = "texts"
    PREFERENCE = "pairs of a chosen and a rejected answer"


# The columns of each format; the first whose columns a row has is taken.
COLUMNS: Mapping[Format, tuple[str, ...]] = {
    Format.PREFERENCE: ("chosen", "rejected"),
    Format.MESSAGES: ("messages",),
    Format.SHARED: ("conversations",),
    Format.COMPLETION: ("prompt", "completion"),
    Format.INSTRUCTION: ("instruction", "output"),
    Format.TEXT: ("text",),
}


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A row as tokens, and which of them count in the loss: both [tokens]."""

    ids: NDArray[np.int32]
    counts: NDArray[np.bool_]


def what_counts(form: Format, choice: TrainOn | None, where: str) -> TrainOn:
    """What of a row counts in the loss. Raises UserError where its format has no such part."""
    if form is Format.TEXT:
        if choice not in (None, "all"):
            raise UserError(f"{where} is {choice}, and the rows are {form.value}, of which all counts; leave it out")
        return "all"
    return choice or ("completion" if form is Format.COMPLETION else _ASSISTANT)


def format_of(rows: Rows, source: str) -> Format:
    """The format of the first row. Raises UserError where it has none."""
    row = rows[0]
    for form, columns in COLUMNS.items():
        if all(column in row for column in columns):
            return form
    formats = "; ".join(" and ".join(columns) for columns in COLUMNS.values())
    raise UserError(
        f"{rows.place(0)} has the columns {', '.join(map(str, row)) or 'none'}, which are no format of {source}; "
        f"known are {formats}; name yours in recipe.data.columns, as messages: my_column"
    )


# What shared conversations call the roles.
_ROLES = {"human": "user", "gpt": _ASSISTANT, "bot": _ASSISTANT, "model": _ASSISTANT, "function": "tool"}


@dataclass(frozen=True, kw_only=True)
class _Conversation:
    """Messages, those from `first` on to be learnt, and the tools that the template is told of."""

    messages: Sequence[Mapping[str, Any]]
    first: int = 0
    tools: Any = None


def messages_of(value: Any, column: str, place: str) -> list[dict[str, Any]]:
    """The messages in a column. Raises UserError for what is no list of messages with a role."""
    if isinstance(value, str) and value.lstrip().startswith("["):  # of a CSV
        try:
            value = parse_json(value)
        except ValueError as error:
            raise UserError(f"{place}: {column} is not JSON: {error}") from None
    if not isinstance(value, list):
        raise UserError(f"{place}: {column} is a {type(value).__name__}; it must be a list of messages")
    if not value:
        raise UserError(f"{place}: {column} is empty; a conversation needs a message, so remove the row")
    return [_message(each, f"{place}: {column}[{number}]") for number, each in enumerate(value)]


def _message(value: Any, where: str) -> dict[str, Any]:
    """A message with role and content; `datasets` fills what other messages have with None."""
    if not isinstance(value, Mapping):
        raise UserError(f"{where} is a {type(value).__name__}; a message is an object with role and content")
    message = {key: inner for key, inner in value.items() if inner is not None}
    if "from" in message and "value" in message:
        role = str(message["from"])
        return {"role": _ROLES.get(role, role), "content": message["value"]}
    if "role" not in message:
        raise UserError(f"{where} has {', '.join(map(str, message)) or 'nothing'}; a message needs role and content")
    return message


def _conversation(row: Row, form: Format, place: str) -> _Conversation | None:
    """The conversation of a row; None for plain text."""
    tools = row.get("tools") or None
    if isinstance(tools, str):
        try:
            tools = parse_json(tools)
        except ValueError as error:
            raise UserError(f"{place}: tools is not JSON: {error}") from None
    if form in (Format.MESSAGES, Format.SHARED):
        column = COLUMNS[form][0]
        return _Conversation(messages=messages_of(row[column], column, place), tools=tools)
    if form is Format.INSTRUCTION:
        question = "\n".join(filter(None, (_text(row, "instruction", place), str(row.get("input") or ""))))
        answer = {"role": _ASSISTANT, "content": _text(row, "output", place)}
        return _Conversation(messages=[{"role": "user", "content": question}, answer], first=1)
    if form is Format.COMPLETION and not isinstance(row["prompt"], str):
        prompt = messages_of(row["prompt"], "prompt", place)
        completion = messages_of(row["completion"], "completion", place)
        return _Conversation(messages=[*prompt, *completion], first=len(prompt), tools=tools)
    return None


def _text(row: Row, column: str, place: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise UserError(f"{place}: {column} is a {type(value).__name__}; it must be text")
    return value


@dataclass(frozen=True, kw_only=True)
class Template:
    """A chat template that ships with samestep, with the tokens that it writes."""

    text: str
    end: str  # the token behind a message
    tokens: Sequence[str]


_CHATML = """{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}{{- message['content'] + '<|im_end|>' -}}{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

TEMPLATES: Mapping[str, Template] = {
    "chatml": Template(text=_CHATML, end="<|im_end|>", tokens=("<|im_start|>", "<|im_end|>"))
}


def put_template(tokenizer: "PreTrainedTokenizerBase", named: str | None, where: str) -> None:
    """Give a tokenizer the chat template that a job names: one of TEMPLATES, or a file of Jinja.

    A template of TEMPLATES adds its tokens where they are missing. Raises UserError for an unknown one.
    """
    if named is None:
        return
    if named in TEMPLATES:
        template = TEMPLATES[named]
        vocabulary = tokenizer.get_vocab()
        tokenizer.add_tokens([token for token in template.tokens if token not in vocabulary], special_tokens=True)
        tokenizer.eos_token = template.end
        tokenizer.chat_template = template.text
        return
    path = Path(named).expanduser()
    if not path.is_file():
        raise UserError(f'{where} is "{named}"; {closest(named, TEMPLATES)}, or a file with a template of Jinja')
    tokenizer.chat_template = path.read_text(encoding="utf-8")


_MARKS = re.compile(r"\{%-?\s*generation\b")


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Makes tokens of rows, by a tokenizer and its chat template."""

    tokenizer: "PreTrainedTokenizerBase"
    form: Format
    train_on: TrainOn

    def key(self) -> Sequence[str]:
        """What decides the tokens of a row besides the row."""
        rules: Any = self.tokenizer.backend_tokenizer
        rules.no_padding()
        rules.no_truncation()
        special = str(sorted(self.tokenizer.special_tokens_map.items(), key=str))
        return rules.to_str(), str(self.tokenizer.chat_template), special, self.form.name, self.train_on

    def encode(self, row: Row, place: str) -> Tokens:
        """The tokens of a row. Raises UserError for one of another format, or that the template refuses."""
        for column in COLUMNS[self.form]:
            if column not in row:
                raise missing_column(column, row, place)
        conversation = _conversation(row, self.form, place)
        if conversation is not None:
            return self._of_conversation(conversation, place)
        if self.form is Format.TEXT:
            return self._of_text(_text(row, "text", place), 0)
        prompt, completion = (_text(row, column, place) for column in ("prompt", "completion"))
        return self._of_text(prompt + completion, 0 if self.train_on == "all" else len(prompt))

    def encode_pair(self, row: Row, place: str) -> tuple[Tokens, Tokens]:
        """The tokens of the chosen and of the rejected answer, each behind its prompt; the answers count."""
        for column in COLUMNS[Format.PREFERENCE]:
            if column not in row:
                raise missing_column(column, row, place)
        if isinstance(row["chosen"], str):
            prompt = _text(row, "prompt", place) if "prompt" in row else ""
            answers = [_text(row, column, place) for column in COLUMNS[Format.PREFERENCE]]
            chosen, rejected = (self._of_text(prompt + answer, len(prompt)) for answer in answers)
            return chosen, rejected
        sides = [messages_of(row[column], column, place) for column in COLUMNS[Format.PREFERENCE]]
        prompt_messages = row.get("prompt")
        if isinstance(prompt_messages, str) and prompt_messages:
            prompt_messages = [{"role": "user", "content": prompt_messages}]
        before = messages_of(prompt_messages, "prompt", place) if prompt_messages else []
        common = next((n for n, (a, b) in enumerate(zip(*sides, strict=False)) if a != b), min(map(len, sides)))
        if common == max(map(len, sides)):
            raise UserError(
                f"{place}: chosen and rejected are the same, and no loss can tell them apart; remove the row"
            )
        chosen, rejected = (
            self._of_conversation(_Conversation(messages=[*before, *side], first=len(before) + common), place)
            for side in sides
        )
        return chosen, rejected

    def prompt(self, messages: Sequence[Mapping[str, Any]], place: str) -> list[int]:
        """The tokens of a conversation to which the assistant is to answer."""
        text = self._rendered(messages, None, place, prompt=True)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def runs(self, tokens: Tokens) -> Iterator[tuple[list[int], bool]]:
        """Each run of tokens that count, or don't."""
        edges = [0, *(np.flatnonzero(np.diff(tokens.counts)) + 1).tolist(), len(tokens.ids)]
        for start, stop in pairwise(edges):
            if start < stop:
                yield tokens.ids[start:stop].tolist(), bool(tokens.counts[start])

    def _of_text(self, text: str, first: int) -> Tokens:
        """A text with the token that ends a document; what stands from character `first` on counts."""
        encoded = self.tokenizer(text, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        counts = [stop > start and start >= first for start, stop in encoded["offset_mapping"]]
        end = self.tokenizer.eos_token_id
        if end is not None and ids[-1:] != [end]:
            ids.append(end)
            counts.append(False)
        counts[-1:] = [True] if end is not None and ids else counts[-1:]
        return Tokens(ids=np.array(ids, dtype=np.int32), counts=np.array(counts, dtype=np.bool_))

    def _of_conversation(self, chat: _Conversation, place: str) -> Tokens:
        if self.tokenizer.chat_template is None:
            raise UserError(
                f"{place} is a conversation, and the tokenizer has no chat template; use recipe.data.chat_template: "
                f"{' or '.join(TEMPLATES)}, or a file with a template of Jinja"
            )
        full = self._rendered(chat.messages, chat.tools, place)
        encoded = self.tokenizer(full, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.array(encoded["input_ids"], dtype=np.int32)
        starts = np.array([start for start, _ in encoded["offset_mapping"]], dtype=np.int64)
        if self.train_on == "all" and not chat.first:
            return Tokens(ids=ids, counts=np.ones(len(ids), dtype=np.bool_))
        if self.train_on == "completion" and not chat.first:
            answers = [number for number, each in enumerate(chat.messages) if each["role"] == _ASSISTANT]
            chat = replace(chat, first=answers[-1] if answers else 0)
        if not any(each["role"] == _ASSISTANT for each in chat.messages[chat.first :]):
            raise UserError(
                f"{place} has no message of the assistant that could be learnt (its roles are "
                f"{', '.join(str(each['role']) for each in chat.messages[:8])}); remove the row, or use "
                "recipe.data.train_on: all"
            )
        if _MARKS.search(str(self.tokenizer.chat_template)):
            counts = self._marked(chat, place, len(ids))
            if chat.first:
                learnt = range(chat.first, len(chat.messages))
                number = next(n for n in learnt if chat.messages[n]["role"] == _ASSISTANT)
                counts &= starts >= self._begin(chat, number, full, place)
        else:
            counts = np.zeros(len(ids), dtype=np.bool_)
            for start, stop in self._spans(chat, full, place):
                counts |= (starts >= start) & (starts < stop)
        return Tokens(ids=ids, counts=counts)

    def _marked(self, chat: _Conversation, place: str, length: int) -> NDArray[np.bool_]:
        """What counts by the template's generation marks, [tokens]."""
        encoded: Any = self.tokenizer.apply_chat_template(
            [dict(message) for message in chat.messages],
            tools=chat.tools,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        counts = np.array(encoded["assistant_masks"], dtype=np.bool_)
        assert len(counts) == length, f"{place}: {len(counts)} marks and {length} tokens"
        return counts

    def _spans(self, chat: _Conversation, full: str, place: str) -> Iterator[tuple[int, int]]:
        """The characters that the assistant wrote, by rendering up to before and behind each of its messages."""
        for number, message in enumerate(chat.messages):
            if message["role"] != _ASSISTANT or number < chat.first:
                continue
            start = self._begin(chat, number, full, place)
            behind = self._rendered(chat.messages[: number + 1], chat.tools, place)
            if not full.startswith(behind):
                raise _no_prefix(place, number + 1)
            yield start, start + len(_without_blank(behind[start:], self.tokenizer.all_special_tokens))

    def _begin(self, chat: _Conversation, number: int, full: str, place: str) -> int:
        """The character at which message `number`, the assistant's, begins to be written."""
        before = self._rendered(chat.messages[:number], chat.tools, place, prompt=True) if number else ""
        if not full.startswith(before):
            raise _no_prefix(place, number)
        return len(before)

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, place: str, *, prompt: bool = False
    ) -> str:
        """A conversation as the template writes it. Raises UserError where it refuses."""
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tools=tools, tokenize=False, add_generation_prompt=prompt
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise UserError(
                f"{place}: the chat template refuses the conversation: {one_line(error)}; change the row, or use "
                "another template by recipe.data.chat_template"
            ) from None
        assert isinstance(text, str)
        return text


def _without_blank(text: str, special: Sequence[str]) -> str:
    """A message without the blanks behind the token that ends it, which the assistant doesn't write."""
    stripped = text.rstrip()
    return stripped if any(stripped.endswith(token) for token in special) else text


def _no_prefix(place: str, number: int) -> UserError:
    return UserError(
        f"{place}: the chat template writes the first {number} messages otherwise when others follow, so that what "
        "the assistant wrote can't be told; use recipe.data.train_on: all, or a template with marks of generation, "
        f"such as recipe.data.chat_template: {next(iter(TEMPLATES))}"
    )
