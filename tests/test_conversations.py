"""What counts of a conversation, a completion or a text: by marks of the template and by rendering prefixes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_jobs import chat_task, save_model, say, shown, write_rows

from samestep.errors import UserError

ASKED, ANSWERED = say("user", "Say hello to Ada in French."), say("assistant", "Bonjour, Ada!")
SECOND = [say("user", "And in German?"), say("assistant", "Hallo, Ada!")]
CHAT = [say("system", "You greet people."), ASKED, ANSWERED, *SECOND]

# Writes an assistant's messages without their thoughts, unless it is the last one: as Qwen's.
FORGETS = """{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' and not loop.last -%}{{- message['content'].split('!')[0] -}}
{%- else -%}{{- message['content'] -}}{%- endif -%}{{- '<|im_end|>\\n' -}}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

REFUSES = "{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('no system here') }}{%- endif -%}"
TOOLS = "{%- if tools -%}{{- tools | tojson + '\\n' -}}{%- endif -%}" + FORGETS.replace(
    " and not loop.last", " and 0"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def task_of(model: Path, tmp_path: Path) -> Callable[..., Any]:
    def task(*rows: Any, template: str | None = None, **data: Any) -> Any:
        source = write_rows(tmp_path / "rows.jsonl", rows)
        if template is not None:
            (tmp_path / "own.jinja").write_text(template, encoding="utf-8")
            data["chat_template"] = str(tmp_path / "own.jinja")
        return chat_task(model, source, **{"length": 200, **data})

    return task


def learnt(task: Any, index: int = 0) -> list[str]:
    return [text for text, counts in shown(task, index) if counts]


def mistake(task: Any) -> str:
    with pytest.raises(UserError) as caught:
        task.check()
    return str(caught.value)


def test_marks_and_prefixes_tell_the_same_tokens(task_of: Callable[..., Any]) -> None:
    by_prefixes, by_marks = (task_of({"messages": CHAT}, chat_template=template) for template in (None, "chatml"))
    assert learnt(by_prefixes) == ["Bonjour, Ada!<|im_end|>", "Hallo, Ada!<|im_end|>"]
    assert shown(by_marks) == shown(by_prefixes)
    text = "".join(text for text, _ in shown(by_prefixes))
    assert text.startswith("<|im_start|>system\nYou greet people.<|im_end|>\n<|im_start|>user\nSay hello")
    for part in zip(by_marks.train_set()[0], by_prefixes.train_set()[0], strict=True):
        assert (part[0] == part[1]).all()


def test_the_targets_are_the_next_tokens_that_count(task_of: Callable[..., Any]) -> None:
    task = task_of({"messages": CHAT})
    sample = task.train_set()[0]
    ids = task.tokenizer.apply_chat_template(CHAT)["input_ids"]
    assert sample.inputs.tolist() == ids[:-1]
    kept = [number for number in sample.targets.tolist() if number != -100]
    assert task.tokenizer.decode(kept) == "Bonjour, Ada!<|im_end|>Hallo, Ada!<|im_end|>"
    where = sample.targets != -100
    assert sample.targets[where].tolist() == [ids[number + 1] for number in where.nonzero()[0]]


@pytest.mark.parametrize("template", [None, "chatml"])
def test_of_a_completion_the_last_answer_counts(template: str | None, task_of: Callable[..., Any]) -> None:
    task = task_of({"messages": CHAT}, train_on="completion", chat_template=template)
    assert learnt(task) == ["Hallo, Ada!<|im_end|>"]
    task = task_of({"prompt": CHAT[:3], "completion": CHAT[3:]}, chat_template=template)
    assert learnt(task) == ["Hallo, Ada!<|im_end|>"]
    assert len(shown(task_of({"messages": CHAT}, train_on="all", chat_template=template))) == 1


def test_the_other_formats(task_of: Callable[..., Any]) -> None:
    task = task_of({"prompt": "two and two is ", "completion": "four"}, {"prompt": "", "completion": "all"})
    assert learnt(task) == ["four<|im_end|>"]
    assert task.reading().facts["format"] == "prompts and completions"
    task = task_of({"text": "any text"})
    assert shown(task) == [("any text<|im_end|>", True)]
    shared = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hallo, Ada!"}]
    task = task_of({"conversations": shared})
    assert learnt(task) == ["Hallo, Ada!<|im_end|>"]
    assert "<|im_start|>user\nHi" in shown(task)[0][0]
    task = task_of({"instruction": "Greet", "input": "Ada", "output": "Hallo, Ada!"})
    assert shown(task)[0][0] == "<|im_start|>user\nGreet\nAda<|im_end|>\n<|im_start|>assistant\n"
    task = task_of({"chat": CHAT}, columns={"messages": "chat"})
    assert len(learnt(task)) == 2


def test_tools_reach_the_template_and_empty_keys_do_not(task_of: Callable[..., Any]) -> None:
    tools = [{"type": "function", "function": {"name": "clock"}}]
    messages = [{**message, "tool_calls": None} for message in CHAT]
    task = task_of({"messages": messages, "tools": tools}, template=TOOLS, train_on="assistant")
    assert shown(task)[0][0].startswith('[{"type": "function"')
    assert learnt(task) == ["Bonjour, Ada!<|im_end|>", "Hallo, Ada!<|im_end|>"] or learnt(task)[-1].startswith(
        "Hallo"
    )


def test_cut_and_dropped_rows_are_counted(task_of: Callable[..., Any]) -> None:
    rows = [{"messages": CHAT}, {"messages": CHAT[1:3]}]
    lengths = task_of(*rows).reading().lengths
    task = task_of(*rows, length=lengths[0] - 5)
    assert {name: task.reading().facts[name] for name in ("cut", "dropped")} == {"cut": 1, "dropped": 0}
    assert len(task.train_set()[0].inputs) == lengths[0] - 5
    task = task_of(*rows, length=lengths[0] - 5, too_long="drop")
    assert {name: task.reading().facts[name] for name in ("cut", "dropped")} == {"cut": 0, "dropped": 1}
    assert len(task.train_set()) == 1


@pytest.mark.parametrize(
    ("rows", "data", "told"),
    [
        ([{"messages": []}], {}, "rows.jsonl:1: messages is empty"),
        ([{"messages": CHAT}, {"text": "a"}], {}, 'rows.jsonl:2 has no column "messages" (it has text)'),
        ([{"question": "a"}], {}, "which are no format of"),
        ([{"messages": [ASKED]}], {}, "has no message of the assistant that could be learnt (its roles are user)"),
        ([{"messages": "hello"}], {}, "messages is a str; it must be a list of messages"),
        ([{"messages": [ASKED, "yes"]}], {}, "rows.jsonl:1: messages[1] is a str"),
        ([{"messages": [{"content": "a"}]}], {}, "messages[0] has content; a message needs role and content"),
        ([{"messages": CHAT}], {"length": 8}, "nothing counts in any of its 1 rows within recipe.data.length 8"),
        ([{"messages": CHAT}], {"chat_template": "chatlm"}, 'recipe.data.chat_template is "chatlm"; did you mean'),
        ([{"messages": CHAT}], {"template": REFUSES}, "the chat template refuses the conversation: no system here"),
        ([{"messages": CHAT}], {"template": FORGETS}, "writes the first 3 messages otherwise when others follow"),
        ([{"text": "a b"}], {"train_on": "assistant"}, "recipe.data.train_on is assistant, and the rows are texts"),
        ([{"text": 3}], {}, "rows.jsonl:1: text is a int; it must be text"),
        ([{"chosen": "a", "rejected": "b"}], {}, "pairs of a chosen and a rejected answer"),
        ([{"messages": CHAT}], {"length": 400}, None),
    ],
)
def test_bad_rows_are_told_in_a_sentence(
    rows: list[Any], data: dict[str, Any], told: str | None, task_of: Callable[..., Any]
) -> None:
    if told is None:
        task_of(*rows, **data).check()
        return
    message = mistake(task_of(*rows, **data))
    assert told in message
    assert "\n" not in message


def test_the_advice_for_a_template_that_forgets_helps(task_of: Callable[..., Any]) -> None:
    for data in ({"chat_template": "chatml"}, {"template": FORGETS, "train_on": "all"}):
        assert len(task_of({"messages": CHAT}, **data).train_set()) == 1
    # One turn has nothing behind its answer.
    assert learnt(task_of({"messages": CHAT[1:3]}, template=FORGETS)) == ["Bonjour, Ada!<|im_end|>"]


def test_a_token_beyond_the_table_is_named(model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    other = tmp_path / "model"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([f"<new{number}>" for number in range(20)], special_tokens=True)
    tokenizer.save_pretrained(other)
    source = write_rows(tmp_path / "rows.jsonl", [{"text": "a <new19> b"}])
    message = mistake(chat_task(other, source))
    assert 'the data has token 389 ("<new19>")' in message
    assert "embeddings for 384" in message
    chat_task(other, source, named={"new_tokens": ["<new19>"]}).check()  # as advised
