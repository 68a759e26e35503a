"""What a scripted gateway and a scripted scheduler say to each other through the service."""

from __future__ import annotations

from neighbours import ScriptedGateway, ScriptedScheduler
from scripts import tokens

from pagemesh.shared.engine_messages import Submit
from pagemesh.shared.messages import Delta, Generate, Prompt, Tokenize
from pagemesh.tokenizer_svc.text_model import TextModel

STORY = " once upon a time there was a 世界 of pages 😀 and it was good"


def ids_of(model: TextModel, text: str) -> list[int]:
    return model.encode(Prompt(text=text))


async def placed(
    gateway: ScriptedGateway, scheduler: ScriptedScheduler, request: Generate
) -> Submit:
    gateway.ask(request)
    await gateway.accepted(request.request_id)
    return await scheduler.submits.get()


async def say(
    gateway: ScriptedGateway, scheduler: ScriptedScheduler, submit: Submit, token_id: int
) -> Delta:
    """One token from the engine, followed to the gateway."""
    scheduler.send(tokens({submit.key: [token_id]}, engine_id=submit.engine_id))
    return await gateway.delta(submit.request_id)


async def until_engines(gateway: ScriptedGateway, count: int) -> None:
    while len((await gateway.engines.get()).engines) != count:
        pass


async def idle(gateway: ScriptedGateway) -> None:
    """Return when the service has handled everything sent to it before this."""
    gateway.ask(Tokenize("idle", "small", Prompt(text="x")))
    await gateway.next("idle")
