"""The parts of batches that need no gateway: the store, its fencing, the checks, the pace."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gateway_fakes import CARD
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pagemesh.gateway.batches import checks
from pagemesh.gateway.batches.batch_store import BatchStore, LeaseLost, OpenBatch, Result
from pagemesh.gateway.batches.checks import MAX_SHOWN_FAULTS, checked
from pagemesh.gateway.batches.file_store import ABANDONED_S, FileRecord, FileStore, Limits
from pagemesh.gateway.batches.finish import publish_results
from pagemesh.gateway.batches.lines import Line, raw_lines, with_fields
from pagemesh.gateway.batches.names import new_name
from pagemesh.gateway.batches.pace import BESIDE, FULL_KV, QUIET_S, STEADY_S, Pace
from pagemesh.gateway.batches.pages import page_of
from pagemesh.gateway.batches.record import BatchRecord
from pagemesh.scheduler_svc.queues import order_key
from pagemesh.shared.errors import RequestError
from pagemesh.shared.messages import LAST_PRIORITY, Capacity, EngineStats, EngineStatus

OWNER = "owner"
NOW_S = 1_000_000.0
LIMITS = Limits(file_bytes=10_000, owner_bytes=100_000, ttl_s=100.0)


def record(**fields: Any) -> BatchRecord:
    given: dict[str, Any] = {
        "id": new_name("batch_", NOW_S),
        "endpoint": "/v1/completions",
        "input_file_id": "file-1",
        "output_id": new_name("file-", NOW_S),
        "error_id": new_name("file-", NOW_S),
        "times": {"created_at": int(NOW_S), "expires_at": int(NOW_S) + 50},
    }
    return BatchRecord(**{**given, **fields})


def line(number: int) -> bytes:
    body = {"prompt": str(number)}
    asked = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}
    return msgspec.json.encode(asked)


class Stores:
    """Both on one folder, and one batch that was just created."""

    def __init__(self, folder: Path) -> None:
        self.files = FileStore(folder, LIMITS)
        self.batches = BatchStore(folder, LIMITS.ttl_s)
        self.input = self.keep(b"\n".join(map(line, (1, 2, 3))))
        self.record = record(input_file_id=self.input)
        self.batch = OpenBatch(OWNER, self.record.id)
        self.batches.create(OWNER, self.record, self.files.content(OWNER, self.input))

    def keep(self, content: bytes, expires_at_s: float = NOW_S + 100) -> str:
        name = new_name("file-", NOW_S)
        about = FileRecord(name, len(content), int(NOW_S), int(expires_at_s), "a", "batch")
        with self.files.part(OWNER) as part:
            part.write(content)
            self.files.publish(OWNER, part, about)
        return name

    def answer(self, term: int, number: int, text: str, *, ok: bool = True) -> None:
        entry = msgspec.Raw(json.dumps({"custom_id": f"r{number}", "text": text}).encode())
        self.batches.append(self.batch, term, [Result(number, ok, entry)])

    def read(self, file_id: str) -> list[Any]:
        content = self.files.content(OWNER, file_id).read_text()
        return [json.loads(each) for each in content.splitlines()]


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    return Stores(tmp_path)


def test_one_who_lost_its_lease_changes_nothing(stores: Stores) -> None:
    """It was frozen while another took over, and goes on as if nothing had happened."""
    batches, batch = stores.batches, stores.batch
    assert batches.open_batches() == [batch]
    batches.save(batch, stores.record.moved("in_progress", NOW_S), 7)
    stores.answer(7, 3, "first")
    stores.answer(7, 1, "first", ok=False)
    with (stores.batches.input(batch).parent / "results-7.jsonl").open("ab") as file:
        file.write(b'[2,true,{"cust')  # it was killed within a write
    batches.save(batch, stores.record.moved("in_progress", NOW_S + 1), 9)
    stores.answer(9, 2, "second")
    with pytest.raises(LeaseLost):
        batches.save(batch, stores.record.failed([], NOW_S), 7)
    assert batches.load(batch).status == "in_progress"
    stores.answer(9, 3, "second")
    done = publish_results(batches, stores.files, batch, batches.load(batch), (), NOW_S)
    assert (done.has_output, done.has_errors) == (True, True)
    assert stores.read(done.output_id) == [
        {"custom_id": "r2", "text": "second"},
        {"custom_id": "r3", "text": "first"},
    ]
    before = stores.read(done.error_id)
    assert [each["custom_id"] for each in before] == ["r1"]
    # Finishing twice, as after a crash, makes no other files.
    stores.answer(7, 2, "late")
    publish_results(batches, stores.files, batch, done, (), NOW_S)
    assert len(stores.files.names(OWNER)) == 3
    assert len(stores.read(done.output_id)) == 2
    batches.close(batch)
    assert batches.open_batches() == []
    assert batches.load(batch).id == batch.id


def test_what_a_full_disk_refuses_leaves_nothing(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A batch that nobody would ever run is not there."""
    before = sorted(tmp_path.rglob("*"))

    def full(path: Path, _: Path) -> Path:
        assert path.exists()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    content = stores.files.content(OWNER, stores.input)
    with pytest.raises(OSError, match="No space"):
        stores.batches.create(OWNER, record(input_file_id=stores.input), content)
    with pytest.raises(OSError, match="No space"):
        stores.batches.save(stores.batch, stores.record, 1)
    assert sorted(tmp_path.rglob("*")) == before


def test_other_users_of_the_machine_read_nothing(tmp_path: Path) -> None:
    made, shared = tmp_path / "made" / "here", tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o770)
    for folder, mode in ((made, 0o700), (shared, 0o770)):
        with FileStore(folder, LIMITS).part(OWNER):
            assert folder.stat().st_mode & 0o777 == mode


def test_what_was_not_run_in_time_is_told_line_by_line(stores: Stores) -> None:
    stores.answer(1, 2, "in time")
    missing = [Line(number, f"r{number}", "", b"") for number in (1, 3)]
    done = publish_results(
        stores.batches, stores.files, stores.batch, stores.record, missing, NOW_S
    )
    assert [each["custom_id"] for each in stores.read(done.output_id)] == ["r2"]
    late = stores.read(done.error_id)
    assert [each["custom_id"] for each in late] == ["r1", "r3"]
    assert {each["error"]["code"] for each in late} == {"batch_expired"}


def test_what_is_old_goes(stores: Stores) -> None:
    kept, late = stores.keep(b"x", NOW_S + 1e9), stores.keep(b"x", NOW_S + 1)
    abandoned = stores.files.content(OWNER, kept).with_name("1.part")
    abandoned.write_bytes(b"x")
    written_s = abandoned.stat().st_mtime
    stores.files.sweep(written_s + 1)
    assert abandoned.exists()
    assert stores.files.names(OWNER) == []  # all that expired in the test's own time
    stores.files.sweep(written_s + ABANDONED_S + 1)
    assert not abandoned.exists()
    with pytest.raises(RequestError, match="No such File"):
        stores.files.record(OWNER, late, NOW_S)
    ended = stores.record.failed([], NOW_S)
    stores.batches.save(stores.batch, ended, 1)
    stores.batches.sweep([OWNER], NOW_S + LIMITS.ttl_s)
    assert stores.batches.names(OWNER) == [stores.batch.id]
    stores.batches.sweep([OWNER], NOW_S + LIMITS.ttl_s + 1)
    assert stores.batches.names(OWNER) == []


def test_a_linked_content_counts_once_and_until_its_last_name_goes(stores: Stores) -> None:
    room_bytes = stores.files.room_bytes(OWNER)
    big = stores.keep(b"x" * 9000)
    with_big = stores.files.room_bytes(OWNER)
    assert room_bytes - with_big >= 9000
    other = record(input_file_id=big)
    stores.batches.create(OWNER, other, stores.files.content(OWNER, big))
    assert with_big - stores.files.room_bytes(OWNER) < 9000
    stores.files.delete(OWNER, big)
    assert room_bytes - stores.files.room_bytes(OWNER) >= 9000
    assert stores.batches.input(OpenBatch(OWNER, other.id)).stat().st_size == 9000


@pytest.mark.parametrize("name", ["", "..", "../owner", "file-", f"file-{'g' * 25}", "batch_/x"])
def test_only_names_of_ours_reach_the_disk(stores: Stores, name: str) -> None:
    with pytest.raises(RequestError, match="No such File"):
        stores.files.record(OWNER, name, NOW_S)
    with pytest.raises(RequestError, match="No such Batch"):
        stores.batches.load(OpenBatch(OWNER, name))


def test_inputs_of_a_wrong_size_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MAX_LINES", 200)
    empty = checked(record(), [], NOW_S)
    assert (empty.status, [fault.code for fault in empty.faults]) == ("failed", ["empty_file"])
    many = checked(record(), ((n, line(n)) for n in range(201)), NOW_S)
    assert [fault.code for fault in many.faults] == ["too_many_requests"]
    most = checked(record(), ((n, line(n)) for n in range(200)), NOW_S)
    assert (most.status, most.counts.total) == ("in_progress", 200)
    bad = checked(record(), ((n, b"no") for n in range(200)), NOW_S)
    assert len(bad.faults) == MAX_SHOWN_FAULTS


@hypothesis_settings(max_examples=40)
@given(st.lists(st.binary(max_size=12).map(lambda text: text.replace(b"\n", b"n")), max_size=8))
def test_a_line_that_is_too_long_costs_no_other(tmp_path_factory: Any, lines: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("lines") / "in"
    path.write_bytes(b"\n".join(lines))
    with path.open("rb") as file:
        found = list(raw_lines(file, 8))
    wanted = [(n, text) for n, text in enumerate(lines, 1) if text[:8].strip()]
    assert [number for number, _ in found] == [number for number, _ in wanted]
    assert [raw.rstrip(b"\n") for _, raw in found] == [text[:8] for _, text in wanted]


def test_numbers_stay_as_they_were_written() -> None:
    body = b'{"seed":9007199254740993,"temperature":1e-7,"priority":1}'
    assert with_fields(body, {"priority": 5}) == body.replace(b'"priority":1', b'"priority":5')


def test_pages_follow_each_other() -> None:
    names = [new_name("file-", NOW_S + i) for i in range(5)]
    seen: list[str] = []
    query = {"limit": "2"}
    for _ in range(3):
        page = page_of(query, most=10, default=5)
        shown = page.shown([{"id": name} for name in page.beyond(names)[:3]])
        seen += [each["id"] for each in shown["data"]]
        query["after"] = seen[-1]
    assert seen == names[::-1]
    assert not shown["has_more"]
    for bad in ("0", "11", "-1", "x", "1e1", "٣"):
        with pytest.raises(RequestError, match="limit"):
            page_of({"limit": bad}, most=10, default=5)
    with pytest.raises(RequestError, match="order"):
        page_of({"order": "up"}, most=10, default=5)


def engine(running: int = 0, waiting: int = 0, kv_usage: float = 0.0) -> EngineStatus:
    return EngineStatus(
        "e", CARD, Capacity(64, 64, 64, 100, "cpu"), EngineStats(running, waiting, kv_usage)
    )


def test_batches_make_room_for_others() -> None:
    pace = Pace()
    assert pace.room([], 32, 0.0) == 0
    assert pace.room([engine()], 32, 0.0) == 32
    pace.ours = 8
    # What just ended still counts at the engine for a moment.
    assert pace.room([engine(running=12)], 32, 0.1) == 24
    assert pace.excess([engine(running=12)], 32, 0.2) == 0
    assert pace.room([engine(running=12)], 32, 0.3 + STEADY_S) == 32 // BESIDE - 8
    pace.ours = 20
    assert pace.excess([engine(running=24)], 32, 0.4 + STEADY_S) == 20 - 32 // BESIDE
    # They may be back at once.
    assert pace.excess([engine(running=20)], 32, 0.5 + STEADY_S) == 20 - 32 // BESIDE
    assert pace.room([engine(running=20)], 32, 0.5 + STEADY_S + QUIET_S) == 12
    assert pace.room([engine(kv_usage=FULL_KV + 0.01)], 32, 20.0) == 0
    full = [engine(running=84, waiting=9)]
    assert pace.excess(full, 32, 30.0) == 19


def test_without_an_engine_nothing_is_withdrawn() -> None:
    pace = Pace()
    pace.ours = 5
    assert pace.excess([], 32, 0.0) == 0


def test_the_last_priority_is_behind_all_under_any_policy() -> None:
    for policy in ("fcfs", "priority"):
        last = order_key(policy, LAST_PRIORITY, 1.0, 1)
        assert last > order_key(policy, LAST_PRIORITY - 1, 2.0, 2)
    assert order_key("fcfs", 5, 1.0, 1) < order_key("fcfs", 0, 2.0, 2)
