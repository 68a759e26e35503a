"""The offline workloads draw what every other engine's harness draws."""

from __future__ import annotations

import hashlib
from array import array

import pytest

from pagemesh.bench.workloads import PRESETS, Workload, fixed

# First ids; requests; input and output length of the first and last; digest of all ids.
GOLDEN = {
    ("W1", 0): ([6311, 6890, 663, 4242], 256, (964, 251), (845, 312), "3cde2ef2d78381dc"),
    ("W1", 1): ([9325, 1033, 4179, 1931], 256, (237, 381), (419, 1020), "4df264b0f7e26ace"),
    ("W2", 0): ([19185, 6403, 71782, 78386], 512, (512, 512), (256, 256), "c0d8cede0792c0f7"),
    ("W2", 1): ([20029, 82952, 80265, 29322], 512, (512, 512), (256, 256), "64f0259cbb61fecf"),
    ("W3", 0): ([56214, 98279, 29414, 64315], 64, (8192, 8192), (16, 16), "09b4df18af9f0055"),
    ("W4", 0): ([48889, 53381, 99559, 5059], 1, (128, 128), (256, 256), "e4f7e30640086fe6"),
    ("W4", 1): ([2710, 83995, 34176, 56356], 1, (128, 128), (256, 256), "fb5df7b71b92c995"),
    ("W5", 0): ([73599, 23219, 86973, 9494], 32, (128, 128), (256, 256), "f9ba67f807c12b6a"),
    ("W5", 1): ([30629, 91744, 31756, 19016], 32, (128, 128), (256, 256), "9eb661814a85a793"),
    ("PREFIX", 0): ([86028, 21463, 73443, 97808], 200, (2176, 2176), (64, 64), "0c461d60c98457ac"),
}


def digest(workload: Workload) -> str:
    ids = array("i", (token_id for prompt in workload.prompts for token_id in prompt))
    return hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()


@pytest.mark.parametrize("key", GOLDEN)
def test_presets_draw_the_golden_ids(key: tuple[str, int]) -> None:
    name, repeat = key
    workload = PRESETS[name](repeat)
    prompts, outputs = workload.prompts, workload.max_tokens
    lengths = (len(prompts[0]), len(prompts[-1])), (outputs[0], outputs[-1])
    assert (prompts[0][:4], len(prompts), *lengths, digest(workload)) == GOLDEN[key]
    assert len(outputs) == len(prompts)
    assert workload.temperature == (0.6 if name == "W1" else 0.0)


@pytest.mark.parametrize(
    ("n_requests", "input_len", "repeat", "salt", "first_ids"),
    [
        (8, 128, 1, "s1", [99534, 14102, 81157, 25642]),
        (8, 128, 1, "s2", [30315, 92952, 96055, 21364]),
        (1, 1024, 0, "p", [47174, 71377, 37139, 39876]),
        (1, 128, 0, "first", [75493, 16582, 14705, 71373]),
    ],
)
def test_salts_draw_the_golden_ids(
    n_requests: int, input_len: int, repeat: int, salt: str, first_ids: list[int]
) -> None:
    assert fixed(n_requests, input_len, 1, repeat, salt=salt).prompts[0][:4] == first_ids


def test_w1_greedy_is_w1_at_temperature_0() -> None:
    assert PRESETS["W1greedy"](3) == PRESETS["W1"](3)._replace(temperature=0.0)


def test_ids_are_taken_modulo_a_smaller_vocabulary() -> None:
    workload = Workload([[0, 99, 100, 250], [7]], [1, 2])
    assert workload.within(100) == Workload([[0, 99, 0, 50], [7]], [1, 2])
    assert (workload.input_tokens, workload.output_tokens, workload.longest_tokens) == (5, 3, 5)
