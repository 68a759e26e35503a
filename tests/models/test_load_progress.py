"""How far the weights are, where there is no terminal."""

from __future__ import annotations

import re

from structlog.testing import capture_logs

from pagemesh.worker_svc.load_progress import loading_bar


def test_lines_go_to_the_log_and_to_who_asks() -> None:
    told: list[str] = []
    with capture_logs() as logs, loading_bar("tiny", 2000, told.append, period_s=0) as bar:
        bar.update(500)
        bar.update(1500)
    lines = [entry["progress"] for entry in logs]
    assert [re.match(r"\d+%", line).group() for line in lines] == ["0%", "25%", "100%"]
    assert "% of 2.00kB, " in lines[1]
    assert lines[1].endswith("left")
    assert told == [f"loading the weights of tiny: {line}" for line in lines]


def test_what_is_over_soon_says_nothing() -> None:
    told: list[str] = []
    with capture_logs() as logs, loading_bar("tiny", 2000, told.append) as bar:
        bar.update(2000)
    assert logs == told == []
