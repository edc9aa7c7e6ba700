# SPDX-License-Identifier: Apache-2.0
"""`python -m ensemble classify`: what it reads, what it prints, how it exits."""

from __future__ import annotations

import argparse
import io
import json
import signal
import subprocess
import sys

import pytest

from ensemble import classify

# The command as a process of its own, without the rest of `python -m ensemble`.
COMMAND = """
import argparse, sys
from ensemble import classify
parser = argparse.ArgumentParser()
classify.add_arguments(parser)
sys.exit(classify.run(parser.parse_args()))
"""


@pytest.fixture
def command(triton, capsys, monkeypatch):
    """command(*arguments, stdin=bytes): (exit status, stdout, stderr)."""

    def call(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        parser = argparse.ArgumentParser()
        classify.add_arguments(parser)
        status = classify.run(parser.parse_args(["--url", triton.url, *arguments]))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def start(*arguments: str, **options) -> subprocess.Popen[bytes]:
    # A job that a shell runs in the background ignores Ctrl-C, and so would its children.
    options.setdefault("preexec_fn", lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    return subprocess.Popen([sys.executable, "-c", COMMAND, *arguments], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, **options)  # fmt: skip


def test_arguments_as_json_lines(command):
    """Off a terminal every text becomes one JSON object with label, probability, scores, tokens and time."""
    status, out, _ = command("a good film", "非常好 👍")
    first, second = map(json.loads, out.splitlines())

    assert status == 0
    assert first.pop("seconds") > 0
    assert first == {
        "text": "a good film",
        "label": "positive",
        "probability": 0.75,
        "scores": {"negative": 0.25, "positive": 0.75},
        "num_tokens": 5,
        "truncated": False,
    }
    assert second["text"] == "非常好 👍"


def test_stdin_lines(command):
    """Without arguments every line of standard input is a text, blank ones too, without its line ending."""
    _, out, _ = command(stdin=b"one\r\n\ntwo")

    assert [json.loads(line)["text"] for line in out.splitlines()] == ["one", "", "two"]


def test_empty_stdin(command):
    """No line is no answer and no error."""
    assert command() == (0, "", "")


def test_bad_lines_fail_alone(command):
    """A line that is not UTF-8 or that the server refuses gets an error with its number; the others are answered."""
    status, out, _ = command(stdin=b"good\nb\xffd\nBAD\ngood\n")
    objects = [json.loads(line) for line in out.splitlines()]

    assert status == 1
    assert [sorted(each) == ["error", "text"] for each in objects] == [False, True, True, False]
    assert objects[1]["error"].startswith("line 2: is not UTF-8 at byte 1")
    assert objects[2]["error"] == "line 3: row 0 is bad"


def test_lone_surrogate_argument(command):
    """An argument that is not UTF-8 fails alone too, and the JSON stays JSON."""
    status, out, _ = command("a\udcff", "good")
    objects = [json.loads(line) for line in out.splitlines()]

    assert status == 1
    assert objects[0]["error"].startswith("text 1: has a lone surrogate")
    assert objects[1]["label"] == "positive"


def test_several_servers(command, triton):
    """--url takes several servers, and one that is not there is left out."""
    status, out, _ = command("--url", f"{triton.url},127.0.0.1:9", "a good film")

    assert (status, json.loads(out)["label"]) == (0, "positive")


def test_long_stdin_is_read_in_batches(command, triton, monkeypatch):
    """Standard input is held a batch at a time, and the numbering runs on."""
    sizes = []
    batches = classify._batches
    monkeypatch.setattr(
        classify, "_batches", lambda texts: (sizes.append(len(batch)) or batch for batch in batches(texts))
    )
    lines = [f"{i}" for i in range(600)]
    lines[599] = "BAD"
    status, out, _ = command(stdin="\n".join(lines).encode())
    objects = [json.loads(line) for line in out.splitlines()]

    assert status == 1
    assert sizes == [256, 256, 88]
    assert [each["text"] for each in objects] == lines
    assert objects[599]["error"].startswith("line 600: ")


def test_table(command, monkeypatch):
    """A table has a row a text with label, probability, tokens and latency; cut texts are marked, markup is text."""
    monkeypatch.setenv("COLUMNS", "160")
    status, out, _ = command("--format", "table", "a good film", "word " * 600, "BAD [b]x[/b]\x1b[31m")

    assert status == 1
    assert all(name in out for name in ("text", "label", "probability", "tokens", "latency"))
    assert "positive" in out
    assert "0.7500" in out
    assert "602 (cut)" in out
    assert "text 3: row 0 is bad" in out
    assert "BAD [b]x[/b]·[31m" in out


def test_table_is_for_other_commands_too(triton):
    """table() takes classifications and failures and needs no server."""
    drawn = classify.table([classify.Failure("a", "no")])

    assert [column.header for column in drawn.columns] == ["text", "label", "probability", "tokens", "latency"]
    assert drawn.row_count == 1


def test_terminal_gets_a_table(command, monkeypatch):
    """The default on a terminal is the table."""
    monkeypatch.setattr(classify.sys.stdout, "isatty", lambda: True, raising=False)
    _, out, _ = command("a")

    assert "latency" in out


def test_nobody_there(command, triton):
    """No server is status 2 and one message with the address, not an error a text."""
    triton.stop()
    status, out, err = command("a", "b")

    assert (status, out) == (2, "")
    assert err.startswith(f"error: no server answers at {triton.url}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [("--timeout-seconds", "0"), ("--timeout-seconds", "nan"), ("--model", ""),
                                       ("--server-name", ""), ("--root-certificates", "missing.pem")])  # fmt: skip
def test_nonsense(command, triton, arguments):
    """A senseless option is status 2 and names the option's field; nothing is sent."""
    status, out, err = command(*arguments, "a")

    assert (status, out) == (2, "")
    assert arguments[0].strip("-").replace("-", "_") in err
    assert triton.requests == []


def test_closed_pipe(triton):
    """A reader that goes away, such as head, ends the command quietly."""
    with start("--url", triton.url, stdin=subprocess.PIPE) as process:
        process.stdout.close()
        process.stdin.write(b"a\n" * 600)
        process.stdin.close()
        complaint = process.stderr.read()

    assert (process.returncode, complaint) == (0, b"")


def test_interrupt(triton):
    """Ctrl-C ends a waiting command with status 130 and no traceback."""
    triton.open.clear()
    with start("--url", triton.url, "a") as process:
        triton.wait_until(lambda: triton.in_flight == 1)
        process.send_signal(signal.SIGINT)
        complaint = process.stderr.read()

    assert (process.returncode, complaint) == (130, b"")


def test_help_tells_the_exit_status():
    """--help says which format is the default where, and what the exit status means."""
    parser = argparse.ArgumentParser()
    classify.add_arguments(parser)
    text = parser.format_help()

    assert "table on a terminal, jsonl into a file or pipe" in " ".join(text.split())
    assert "Exit status" in text


def test_import_needs_no_rich(triton):
    """JSON lines are printed without rich."""
    block = "import sys; sys.modules['rich'] = None\n"
    done = subprocess.run([sys.executable, "-c", block + COMMAND, "--url", triton.url, "a"], capture_output=True,
                          timeout=60)  # fmt: skip

    assert (done.returncode, done.stderr) == (0, b"")
