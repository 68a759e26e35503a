"""When silence counts: while we listen, and no more of it than we looked for."""

from __future__ import annotations

from pagemesh.shared.liveness import BEAT_S, SILENCE_S, Liveness


def looks_until_given_up(liveness: Liveness, period_s: float, now_s: float = 0.0) -> int:
    n_looks = 1
    while not liveness.look(now_s + n_looks * period_s, listening=True):
        n_looks += 1
    return n_looks


def test_a_silent_peer_is_given_up_after_the_silence_it_may_keep() -> None:
    assert looks_until_given_up(Liveness(0.0), BEAT_S) * BEAT_S == SILENCE_S


def test_any_frame_starts_the_silence_anew() -> None:
    liveness = Liveness(0.0)
    for look in range(1, 100):
        assert not liveness.look(look * BEAT_S, listening=True)
        if look % 5 == 0:
            liveness.heard()


def test_a_late_look_does_not_blame_the_peer() -> None:
    """The process was stopped for a minute: what was said meanwhile has yet to be read."""
    liveness = Liveness(0.0)
    assert not liveness.look(60.0, listening=True)
    liveness.heard()
    assert looks_until_given_up(liveness, BEAT_S, 60.0) * BEAT_S == SILENCE_S


def test_looks_that_are_always_a_little_late_count_in_full() -> None:
    slow_s = 1.5 * BEAT_S
    assert (looks_until_given_up(Liveness(0.0), slow_s) - 1) * slow_s < SILENCE_S


def test_who_does_not_listen_does_not_blame_the_peer() -> None:
    liveness = Liveness(0.0)
    assert not any(liveness.look(look * BEAT_S, listening=False) for look in range(1, 100))
