"""An engine at work: what the shell around the core does when things go wrong."""

from __future__ import annotations

import pytest
from scheduler_helpers import OWNER, Ledger, Seen, expected_answer, make_capacity, make_card
from scheduler_helpers import make_submit as submit
from structlog.typing import EventDict
from worker_model import EPOCH, WorkerModel

from pagemesh.scheduler_svc import engine_host
from pagemesh.scheduler_svc.engine import Engine
from pagemesh.scheduler_svc.engine_host import EngineHost
from pagemesh.shared.engine_messages import NeedSnapshot, Step, StepResult
from pagemesh.shared.errors import LinkClosed, SettingsError
from pagemesh.shared.settings import SchedulerSettings
from pagemesh.shared.wire import Message

PROMPT = [3, 4, 5, 6, 7]


class ScriptedLink:
    """Stands in for the link to a worker: computes at once, answers when told to."""

    def __init__(self) -> None:
        self.worker = WorkerModel(make_card(), make_capacity())
        self.results: list[StepResult | NeedSnapshot] = []
        self.closed = False

    def send(self, message: Message) -> None:
        assert isinstance(message, Step)
        if self.closed:
            raise LinkClosed("worker-1", "it died")
        self.results.append(self.worker.execute(message))


def make_engine(**capacity: int) -> Engine:
    return Engine(
        "worker-1",
        make_card(),
        make_capacity(**capacity),
        SchedulerSettings(),
        epoch=EPOCH,
        prefix_caching=True,
    )


class Host(EngineHost):
    """A host with its surroundings, driven without an event loop's help."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.link = ScriptedLink()
        self.settlings = 0
        super().__init__(make_engine(), self.link, self.ledger.note, self.count, 60.0)  # type: ignore[arg-type]

    def count(self) -> None:
        self.settlings += 1

    def ask(self, key: int) -> Seen:
        self.submit(OWNER, submit(key, PROMPT))
        return self.ledger.seen.setdefault((OWNER, key), Seen())

    def run(self) -> None:
        """Pump, and land what comes back, until nothing does."""
        self._pump()
        while self.link.results:
            result = self.link.results.pop(0)
            assert isinstance(result, StepResult)
            self.on_result(result)


async def test_an_idle_engine_is_audited_once_and_faults_are_logged(
    monkeypatch: pytest.MonkeyPatch, log_lines: list[EventDict]
) -> None:
    host = Host()
    monkeypatch.setattr(engine_host, "AUDIT_AFTER_S", 0.0)
    host.ask(1)
    host.run()
    host.engine._residents.blocks.take(1)
    for _ in range(2):
        host.audit_if_idle()
    [line] = [line for line in log_lines if line["event"] == "audit_failed"]
    assert line["log_level"] == "error"
    assert host.engine.counters.audit_findings == len(line["repaired"]) > 0
    host.ask(2)
    host.run()
    host.audit_if_idle()
    assert host.engine.stats().kv_usage == 0


async def test_a_busy_engine_is_not_audited(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    monkeypatch.setattr(engine_host, "AUDIT_AFTER_S", 0.0)
    host.ask(1)
    host._pump()
    monkeypatch.setattr(host.engine, "audit", lambda: pytest.fail("audited while busy"))
    host.audit_if_idle()


@pytest.mark.parametrize("call", ["plan", "submit", "end", "snapshot", "drop_owner"])
async def test_whatever_breaks_inside_the_engine_fails_its_requests_and_no_more(
    monkeypatch: pytest.MonkeyPatch, log_lines: list[EventDict], call: str
) -> None:
    host = Host()
    running = host.ask(1)
    entering = host.ledger.seen.setdefault((OWNER, 2), Seen())
    host._pump()

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(host.engine, call, broken)
        match call:
            case "plan":
                host._pump()
            case "submit":
                host.submit(OWNER, submit(2, PROMPT))
            case "end":
                host.end(OWNER, [1], "abort")
            case "snapshot":
                host.on_gap(NeedSnapshot(EPOCH, 0))
            case _:
                assert host.drop_owner("nobody") == 0
    assert running.error == "engine_failure"
    assert entering.error == ("engine_failure" if call == "submit" else None)
    assert any(line["event"] == "engine_failed" for line in log_lines)
    again = host.ask(3)
    host.run()
    assert again.ids == expected_answer(PROMPT, 8)


async def test_a_step_for_a_worker_that_just_died_is_no_failure() -> None:
    host = Host()
    host.link.closed = True
    host.ask(1)
    host._pump()
    assert host.engine.counters.failures == 0
    assert host.engine.lost() == {OWNER: [1]}


async def test_the_shell_hears_whenever_the_engine_may_be_idle() -> None:
    host = Host()
    host.ask(1)
    host.run()
    before = host.settlings
    host.end(OWNER, [1], "abort")
    host._pump()
    assert host.settlings > before


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(SettingsError, match="no block"):
        make_engine(num_blocks=1)
