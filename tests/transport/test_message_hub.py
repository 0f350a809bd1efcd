from __future__ import annotations

import multiprocessing
import threading
import time

from freerun.transport.message_hub import MessageHub


def test_hub_hears_messages_and_the_end_of_a_sender() -> None:
    hub: MessageHub[str] = MessageHub()
    pipes = {name: multiprocessing.Pipe() for name in "ab"}
    for name, (ours, _) in pipes.items():
        hub.add(ours, name)
    assert hub.ready(timeout_seconds=0) == []
    pipes["b"][1].send(1)
    assert hub.ready() == ["b"]
    assert pipes["b"][0].recv() == 1
    pipes["a"][1].close()
    assert hub.ready() == ["a"]
    hub.remove(pipes["a"][0])
    assert hub.ready(timeout_seconds=0) == []
    hub.close()


def test_hub_can_be_woken_from_another_thread_any_number_of_times() -> None:
    hub: MessageHub[str] = MessageHub()
    threading.Timer(0.05, hub.wake).start()
    started = time.monotonic()
    assert hub.ready(timeout_seconds=30) == []
    assert time.monotonic() - started < 20
    for _ in range(100_000):
        hub.wake()
    for _ in range(100):  # more than enough to read all wake-ups that the pipe has taken
        assert hub.ready(timeout_seconds=0) == []
    hub.close()
