"""What a terminal shows of a long run, and what a log keeps."""

import io

import pytest

from launch.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("launch.progress.time.monotonic", lambda: now[0])
    return now


def test_log_gets_whole_lines_now_and_then(clock: list[float]) -> None:
    log = io.StringIO()
    with Progress(log) as shown:
        shown.show("round 1", begins=True)
        for second in range(40):
            clock[0] = 100.0 + second
            shown.show(f"{second} s")
        shown.show("round 2", begins=True)
    assert log.getvalue() == "round 1\n15 s\n30 s\nround 2\n"


def test_terminal_shows_one_line(clock: list[float]) -> None:
    terminal = Terminal()
    with Progress(terminal) as shown:
        shown.show("a long text")
        clock[0] += 1
        shown.show("short")
        shown.show("too soon to be read")
    assert terminal.getvalue() == "\ra long text\x1b[K\rshort\x1b[K\n"
