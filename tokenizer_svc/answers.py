"""Questions as they come from gateways: asked, cancelled, answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import (
    Detokenize,
    Detokenized,
    ModelCard,
    Render,
    Rendered,
    Tokenize,
    Tokenized,
)
from pagemesh.tokenizer_svc.encoder_pool import EncoderPool
from pagemesh.tokenizer_svc.outbox import Outbox
from pagemesh.tokenizer_svc.questions import answer_to, rendered
from pagemesh.tokenizer_svc.tasks import Tasks
from pagemesh.tokenizer_svc.text_model import TextModel

MAX_THREADS: Final = 2

Question = Tokenize | Detokenize | Render


class Answers:
    """Owner of the questions in progress and of the threads that answer them.

    Those threads are not the ones of generations: however much text somebody wants counted, the
    prompts that wait for an engine do not queue behind it.
    """

    def __init__(
        self,
        find_model: Callable[[str], TextModel],
        known_card: Callable[[str], ModelCard | None],
        refuse: Callable[[Outbox, str, Exception], object],
    ) -> None:
        """`find_model` raises RequestError for a name it does not know."""
        self._find_model = find_model
        self._known_card = known_card
        self._refuse = refuse
        self._pool = EncoderPool("questions", max_threads=MAX_THREADS)
        self._tasks = Tasks()
        self._asked: dict[tuple[Outbox, str], asyncio.Task[None]] = {}

    @property
    def waiting(self) -> int:
        """Questions that are being answered or wait for a thread."""
        return self._pool.waiting

    def ask(self, outbox: Outbox, question: Question) -> None:
        """Answer over `outbox`. Asked again under the same id, the later question counts."""
        place = (outbox, question.request_id)
        self.cancel(*place)
        work = self._answer(outbox, question)
        self._asked[place] = self._tasks.spawn(work, name=f"answer-{question.request_id}")

    def cancel(self, outbox: Outbox, request_id: str) -> None:
        """Nobody waits for the answer any more: a question in the queue is not even begun."""
        task = self._asked.pop((outbox, request_id), None)
        if task is not None:
            task.cancel()

    def hang_up(self, outbox: Outbox) -> None:
        """The gateway is gone, and its questions with it."""
        for place in [place for place in self._asked if place[0] is outbox]:
            self.cancel(*place)

    async def close(self) -> None:
        await self._tasks.close()
        self._pool.close()

    async def _answer(self, outbox: Outbox, question: Question) -> None:
        try:
            outbox.send(await self._reply(question))
        except Exception as error:
            self._refuse(outbox, question.request_id, error)
        self._asked.pop((outbox, question.request_id), None)

    async def _reply(self, question: Question) -> Tokenized | Detokenized | Rendered:
        model = self._find_model(question.model)
        card = self._known_card(question.model)
        if isinstance(question, Render):
            if card is None:
                raise RequestError("no engine of this model is alive", status=503)
            return await self._pool.run(rendered, model, question, card)
        max_model_len = card.max_model_len if card else model.prepared.max_position_tokens
        return await self._pool.run(answer_to, model, question, max_model_len)
