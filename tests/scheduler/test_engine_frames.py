"""Whatever requests bring, the frames of an engine's steps can be sent."""

from __future__ import annotations

from scheduler_helpers import OWNER, Driver, expected_answer, make_submit

from pagemesh.shared.structured_outputs import StructuredOutputsParams
from pagemesh.shared.wire import encode

PROMPT = [3, 1, 4, 1, 5]
LARGE = StructuredOutputsParams(regex="a" * 9 * 2**20)
N_REQUESTS = 8


def test_rows_that_one_frame_cannot_hold_enter_in_several_steps() -> None:
    driver = Driver()
    for key in range(N_REQUESTS):
        driver.submit(make_submit(key, PROMPT, structured_outputs=LARGE, max_tokens=16))
    for _ in range(N_REQUESTS):
        encode(driver.step())
    assert len(driver.steps[-1].new) == 1
    driver.worker.notice_gap()
    driver.run()
    for step in driver.steps:
        encode(step)
    for key in range(N_REQUESTS):
        assert driver.seen[OWNER, key].ids == expected_answer(PROMPT, 16)
