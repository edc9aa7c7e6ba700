# SPDX-License-Identifier: Apache-2.0
"""What the experiment is made of: perf_analyzer, texts, arrivals, caveats, arithmetic, and whose the CPU time was."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from ensemble.errors import ConfigError, ServerError
from ensemble.handlers.passes import CostModel
from ensemble.launcher.server import Server
from ensemble.samples import short_samples
from perf import arithmetic, closed_loop, open_loop
from perf.experiment import caveats as experiment_caveats
from perf.experiment import perf_analyzer
from perf.experiment.workloads import read_texts
from perf.machine_load import MachineLoad, Shares
from perf.paper.roofline_model import BertShape


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ("echo Perf Analyzer Version 2.40.0", "is version 2.40.0, and 2.51.0 is wanted: it comes with"),
        ("echo libb64.so.0d: cannot open; exit 127", "does not say its version (libb64.so.0d: cannot open)"),
    ],
)
def test_another_perf_analyzer_is_refused(says: str, words: str, tmp_path: Path) -> None:
    """Another version's records may be others; one that does not run says why."""
    program = tmp_path / "perf_analyzer"
    program.write_text(f"#!/bin/sh\n{says}\n")
    program.chmod(0o755)

    with pytest.raises(ServerError) as raised, perf_analyzer.found(str(program)):
        pass

    assert words in str(raised.value) and "pip install" in str(raised.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b"", "has no text"),
        (b"\n \n", "has no text"),
        (b"fine\nnot \xff fine\n", "is not UTF-8 (line 2)"),
        (b"\x00\x01", "holds NUL characters"),
    ],
)
def test_a_broken_file_of_texts_is_refused(content: bytes | None, words: str, tmp_path: Path) -> None:
    """By its name, and with what to give instead."""
    file = tmp_path / "texts.txt"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(ConfigError) as raised:
        read_texts(file)

    assert words in str(raised.value) and str(file) in str(raised.value)


def test_texts_of_a_file_are_its_lines_each_once(tmp_path: Path) -> None:
    """Windows' line ends and blank lines are no texts."""
    (tmp_path / "texts.txt").write_bytes("one\r\n\r\ntwö\none\n".encode())

    assert read_texts(tmp_path / "texts.txt") == ["one", "twö"]


def test_an_open_loop_counts_from_the_due_time(server: Server) -> None:
    """A request that was due a second before it could be sent has waited that second."""
    messages = [closed_loop.message_of(sample.text) for sample in short_samples()[:2]]

    arrivals = open_loop.run(server.url, messages, np.array([-1.0, 0.0, 0.1]))

    assert arrivals.lag[0] >= 1 and arrivals.latencies[0] > 1 and all(arrivals.answers)
    assert (arrivals.latencies > arrivals.lag).all()


def test_a_request_of_an_open_loop_that_fails_is_counted(server: Server) -> None:
    """It has no latency and no answer, and the others have theirs."""
    messages = [closed_loop.message_of(text) for text in ("fine", "x" * 200_000)]

    arrivals = open_loop.run(server.url, messages, np.array([0.0, 0.0]))

    assert np.isnan(arrivals.latencies).tolist() == [False, True] and arrivals.answers[1] is None


def test_arrivals_are_the_seeds() -> None:
    """The same for the same seed, at the rate asked for on average."""
    due = open_loop.poisson(50, 100, seed=3)

    assert np.array_equal(due, open_loop.poisson(50, 100, seed=3)) and not np.array_equal(
        due, open_loop.poisson(50, 100, 4)
    )
    assert len(due) == 5000 and due[-1] == pytest.approx(100, rel=0.1) and (np.diff(due) > 0).all()


def names(caveats: list[dict[str, str]]) -> list[str]:
    return [one["name"] for one in caveats]


def windows(*rates: float) -> list[dict[str, float]]:
    return [{"requests_per_second": rate, "mean_ms": 10.0} for rate in rates]


def test_each_caveat_has_its_reason() -> None:
    """At its threshold, with the figure in it."""
    of = experiment_caveats
    assert names(of.of_windows(windows(100, 105, 109))) == [] and names(of.of_windows(windows(100, 120, 100))) == [
        "unstable"
    ]
    assert "100 / 120 / 100 requests/s" in of.of_windows(windows(100, 120, 100))[0]["detail"]
    assert names(of.of_windows(windows(0, 0, 0))) == ["unstable"]
    assert names(of.of_requests(99, 0)) == ["too few for a p99"] and names(of.of_requests(100, 1)) == ["errors"]
    assert names(of.of_texts(299, 300)) == ["not every text"] and of.of_texts(300, 300) == []
    assert (
        names(of.of_clients(7.1, 8)) == ["client saturated"] and of.of_clients(7.9, 8) == of.of_clients(None, 8) == []
    )
    assert names(of.of_machine(Shares(server=30, client=60, other=11))) == ["client saturated", "machine busy"]
    assert of.of_machine(Shares(90, 5, 5)) == [] and names(of.of_machine(None)) == ["utilization unknown"]
    assert names(of.of_arrivals(3.0, 20.0, 100, 90)) == ["client saturated", "cannot keep up"]
    assert of.of_arrivals(1.0, 20.0, 100, 99) == []


def test_a_reader_is_told_what_ran_where() -> None:
    """CPU figures are called that; so is an ensemble on the CPU beside handlers on a GPU; a note stands first."""
    of = experiment_caveats.general
    assert "say nothing of any GPU" in of("no driver", "onnx", None)[0]
    assert "ran on the CPU, and the others on the GPU" in of(None, "onnx", None)[0]
    assert of(None, "tensorrt", "builds ran")[0] == "builds ran" and of(None, "tensorrt", None) == list(
        experiment_caveats.GENERAL
    )


def test_padding_is_what_no_text_needs() -> None:
    """None alone; nearly all of a short row padded to 512; a little of a batch of mixed lengths."""
    shape, lengths = BertShape(6, 384, 1536), [10, 20, 30, 200]

    assert arithmetic.padded_rows(shape, [512], 512)[1] == 0 and arithmetic.padded_rows(shape, [10], 512)[1] > 0.97
    alone, no_padding = arithmetic.packed_rows(shape, lengths, 1, None)
    together, some = arithmetic.packed_rows(shape, lengths, 4, None)
    planned, less = arithmetic.packed_rows(shape, lengths, 4, CostModel(0.002, 40))
    assert no_padding == 0 < less < some < 0.5 and alone < planned < together


def test_other_processes_are_told_from_the_server(server: Server) -> None:
    """This process works, the server rests: what is used is not the server's."""
    with MachineLoad(server.pid) as used:
        began = ended = time.time()
        # However long the first look at all processes takes on a busy machine.
        while ended - began < 0.6 or (used.between(began, ended) is None and ended - began < 60):
            sum(range(10_000))
            ended = time.time()

    shares = used.between(began, ended)
    assert shares is not None and shares.server < shares.other and shares.client == 0
    assert used.between(began - 10, began - 9) is None
