"""Tokenize and Detokenize: bounded, cancellable, and never in the way of generations."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
from scripts import card_of

from pagemesh.shared.distribution import HOP_S, Observations
from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import Detokenize, Prompt, Tokenize
from pagemesh.shared.wire import Message, pack_ids
from pagemesh.tokenizer_svc import answers as answers_module
from pagemesh.tokenizer_svc.answers import MAX_THREADS, Answers
from pagemesh.tokenizer_svc.checks import MIN_QUESTION_LIMIT
from pagemesh.tokenizer_svc.outbox import Outbox
from pagemesh.tokenizer_svc.questions import answer_to
from pagemesh.tokenizer_svc.text_model import TextModel

TOO_MANY = MIN_QUESTION_LIMIT + 1
LONG_CHAT = [{"role": "user", "content": "a" * TOO_MANY}]


@pytest.mark.parametrize(
    ("question", "param"),
    [
        (Tokenize("q", "small", Prompt(text="a" * TOO_MANY)), "prompt"),
        (Tokenize("q", "small", Prompt(messages=LONG_CHAT)), "messages"),
        (Tokenize("q", "small", Prompt(token_ids=pack_ids([5] * TOO_MANY))), "prompt"),
        (Detokenize("q", "small", pack_ids([5] * TOO_MANY)), "tokens"),
    ],
    ids=["text", "chat", "ids", "detokenize"],
)
def test_what_is_too_much_is_refused(
    byte_level: TextModel, question: Tokenize | Detokenize, param: str
) -> None:
    with pytest.raises(RequestError, match=f"at most {MIN_QUESTION_LIMIT}") as caught:
        answer_to(byte_level, question, 128)
    assert (caught.value.status, caught.value.param) == (413, param)


def test_a_model_of_long_context_takes_longer_questions(byte_level: TextModel) -> None:
    question = Detokenize("q", "small", pack_ids([5] * TOO_MANY))
    assert answer_to(byte_level, question, TOO_MANY).request_id == "q"


class OpenLink:
    """A link that keeps what is sent."""

    name = "gateway-1"

    def __init__(self) -> None:
        self.sent: asyncio.Queue[Message] = asyncio.Queue()

    def send(self, message: Message) -> None:
        self.sent.put_nowait(message)


class Gate:
    """Stands for answering: counts who began, and lets nobody end before it opens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began: list[str] = []
        self.full = threading.Semaphore(0)
        self._open = threading.Event()
        self._answer = answers_module.answer_to
        monkeypatch.setattr(answers_module, "answer_to", self._wait)

    def open(self) -> None:
        self._open.set()

    def _wait(self, model: TextModel, question: Tokenize, max_model_len: int) -> Message:
        self.began.append(question.request_id)
        self.full.release()
        assert self._open.wait(30)
        return self._answer(model, question, max_model_len)


def fail_test(_: Outbox, request_id: str, error: Exception) -> None:
    raise AssertionError(f"{request_id} was refused") from error


@pytest.fixture
async def answers(byte_level: TextModel) -> AsyncIterator[Answers]:
    running = Answers(lambda _: byte_level, lambda _: card_of(byte_level), fail_test)
    yield running
    await running.close()


@pytest.mark.parametrize("hangs_up", [False, True])
async def test_a_cancelled_question_is_neither_begun_nor_answered(
    answers: Answers, monkeypatch: pytest.MonkeyPatch, hangs_up: bool
) -> None:
    gate, link, leaving = Gate(monkeypatch), OpenLink(), OpenLink()
    box, leaving_box = (Outbox(way, Observations(HOP_S)) for way in (link, leaving))  # type: ignore[arg-type]
    names = [f"q{i}" for i in range(MAX_THREADS + 1)]
    for name in names:
        answers.ask(leaving_box, Tokenize(name, "small", Prompt(text="x")))
    for _ in range(MAX_THREADS):
        await asyncio.to_thread(gate.full.acquire)
    if hangs_up:
        answers.hang_up(leaving_box)
    else:
        for name in names:
            answers.cancel(leaving_box, name)
    await asyncio.sleep(0)  # a future tells the pool that it was cancelled one turn later
    assert answers.waiting == MAX_THREADS
    answers.ask(box, Tokenize("stays", "small", Prompt(text="x")))
    gate.open()
    assert (await link.sent.get()).request_id == "stays"  # type: ignore[union-attr]
    assert gate.began == [*names[:MAX_THREADS], "stays"]
    assert leaving.sent.empty()
