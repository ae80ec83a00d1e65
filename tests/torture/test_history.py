"""What was written down is read, but for what a kill has cut short."""

from pathlib import Path

from postbus.torture.history import INVOKE, OK, History, read


def test_a_line_that_was_cut_short_spoils_no_other(tmp_path: Path):
    """Whether it ends the file, or another process's line follows on it; what it looks like does not matter."""
    history = History(tmp_path / "h", "w")
    lines: list[str] = []
    for number in range(3):
        history.path.unlink(missing_ok=True)
        history.note("handle", INVOKE, delivery={"at": number, "said": '{"at": 1, "who": "x"}'})
        lines.append(history.path.read_text())
    first, second, third = lines
    for cut in range(1, len(first) - 1):
        history.path.write_text(second + first[:cut] + third + first[:cut])
        assert [each.told["delivery"]["at"] for each in read([history.path])] == [1, 2], first[:cut]
    history.path.write_text("")
    history.note("publish", OK, uids=["a"])
    assert [each.told for each in read([history.path])] == [{"uids": ["a"]}]
