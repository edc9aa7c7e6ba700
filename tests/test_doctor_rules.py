# SPDX-License-Identifier: Apache-2.0
"""The doctor's rules where no server here can show what they are about: a GPU's utilization, and chance."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from perf.doctor import clients, counts, examination
from perf.doctor.batching import taken_apart
from perf.doctor.counts import Batches, Counts, Metrics
from perf.doctor.diagnosis import diagnose
from perf.doctor.inputs import InputMaker, Text
from perf.doctor.load import Load
from perf.doctor.padding import Sample
from perf.doctor.seen import PHASES, WATCHED, Examination, Limits, Phase
from perf.doctor.target import Leaf, Target
from perf.doctor.verdict import Verdict

# As Triton 24.10 writes it on a machine with two GPUs.
METRICS = """# HELP nv_inference_exec_count Number of model executions performed (does not include cached requests)
# TYPE nv_inference_exec_count counter
nv_inference_exec_count{model="m",version="1"} 12
# HELP nv_gpu_utilization GPU utilization rate [0.0 - 1.0)
# TYPE nv_gpu_utilization gauge
nv_gpu_utilization{gpu_uuid="GPU-4c8d0f1e-1111-2222-3333-444455556666"} 0.030000
nv_gpu_utilization{gpu_uuid="GPU-9a7b6c5d-7777-8888-9999-000011112222"} %s
# HELP nv_gpu_memory_used_bytes GPU used memory, in bytes
# TYPE nv_gpu_memory_used_bytes gauge
nv_gpu_memory_used_bytes{gpu_uuid="GPU-4c8d0f1e-1111-2222-3333-444455556666"} 1610612736.000000
"""


@contextmanager
def endpoint(text: str) -> Iterator[str]:
    """A Prometheus endpoint that says that; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/metrics"
        server.shutdown()
        thread.join()


def target(kind: str = "KIND_GPU", instances: int = 1) -> Target:
    config = text_format.Parse(
        f'name: "m" backend: "python" max_batch_size: 64 dynamic_batching {{ }} '
        f"instance_group {{ kind: {kind} count: {instances} }} "
        'input { name: "input_ids" data_type: TYPE_INT64 dims: 16 }',
        model_config_pb2.ModelConfig(),
    )
    return Target("host:8001", "m", config, {"m": Leaf("m", config)})


def counted(rows: int, executions: int, infer: float, wait: float = 0.0) -> Counts:
    """Requests of one row, in batches of one size that take `infer` seconds."""
    sizes = {rows // executions: Batches(executions, 1000, int(executions * infer * 1e9), 1000)}
    return Counts(requests=rows, rows=rows, executions=executions, queue=int(rows * wait * 1e9), sizes=sizes)


def loaded(where: Target, utilization: float | None) -> Examination:
    """A batch takes as many times as long as it has rows, whether of many requests or of one."""
    made = {
        "alone": (1, 1, counted(20, 20, 0.01)),
        "alike": (32, 1, counted(320, 20, 0.16, wait=0.16)),
        "rows": (1, 16, counted(320, 20, 0.16)),
        "mixed": (32, 1, counted(320, 20, 0.16, wait=0.16)),
    }
    phases = [
        Phase(
            name, flight, rows, Load(4.5, (0.1,) * 20, 0, ()), {"m": one}, {}, utilization if name == "mixed" else None
        )
        for name, (flight, rows, one) in made.items()
    ]
    return Examination(where, Limits(9, 6000, 32), phases)


@pytest.mark.parametrize(
    ("kind", "percent", "fault"),
    [("KIND_GPU", "0.180000", True), ("KIND_GPU", "0.970000", False), ("KIND_CPU", "0.180000", False)],
)
def test_a_loop_on_a_gpu_is_told_from_a_gpu_at_its_ceiling(kind: str, percent: str, fault: bool) -> None:
    """Time in step with the rows, and the busiest GPU by Triton's own metrics hardly busy; on a CPU it says nothing."""
    with endpoint(METRICS % percent) as url:
        used = counts.utilization(Metrics(url).read())
    where = target(kind)

    found = taken_apart(loaded(where, used), where.leaves["m"], probed=None)

    assert used == float(percent) and isinstance(found, Verdict)
    assert (found.name, found.kind) == (("batches taken apart", "fault") if fault else ("cannot tell", "unknown"))
    assert any("GPU utilization was at most 18%" in line for line in found.evidence) is fault


def test_without_gpu_metrics_nothing_is_concluded_from_them() -> None:
    """A server without GPUs, or one that was started without their metrics."""
    where = target()

    found = taken_apart(loaded(where, counts.utilization("nv_inference_count 3\n")), where.leaves["m"], probed=None)

    assert isinstance(found, Verdict) and found.name == "cannot tell"


@pytest.mark.parametrize(
    ("kind", "seconds", "long"), [("KIND_GPU", 9.0, 1), ("KIND_GPU", 3.0, 0), ("KIND_CPU", 9.0, 0)]
)
def test_a_gpu_is_looked_at_after_a_phase_longer_than_its_interval(
    kind: str, seconds: float, long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, at the end, within the seconds there are; else its utilization would be that of several phases."""
    sent: list[float] = []

    def drive(url: str, messages: list, flight: int, wanted: float, most: int, **more: object) -> Load:
        sent.append(wanted)
        return Load(wanted, (0.1,), 0, ())

    monkeypatch.setattr(examination, "drive", drive)
    monkeypatch.setattr(examination, "read", lambda client, where: {"m": counted(320, 20, 0.16)})
    monkeypatch.setattr(examination, "connect", lambda url: endpoint(""))
    monkeypatch.setattr(Metrics, "check", lambda *args: None)
    monkeypatch.setattr(examination, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(examination, "QUIET_SECONDS", 0.0)
    where = target(kind)

    with endpoint(METRICS % "0.5") as url:
        found = examination.examine(
            where, InputMaker(where.config, [Text("a", 7)]), Limits(seconds, 6000, 32), Metrics(url)
        )

    assert [phase.gpu for phase in found.phases if phase.gpu is not None] == [0.5] * long
    assert sum(sent) <= seconds + 1e-6 and {phase.name for phase in found.phases} <= set(PHASES)


def watched(where: Target, one: Counts, seconds: float = 10.0) -> Examination:
    return Examination(
        where, Limits(seconds, 0, 0), [Phase(WATCHED, 0, 0, Load(seconds, (), 0, ()), {"m": one}, {}, None)]
    )


@pytest.mark.parametrize(
    ("what", "one", "instances", "alone"),
    [
        ("one client, 80 % busy", counted(800, 800, 0.01, wait=0.0001), 1, True),
        ("one client on a slow machine", counted(40, 40, 0.2, wait=0.002), 1, True),
        ("two clients that take turns", counted(980, 980, 0.01, wait=0.009), 1, False),
        ("independent clients, 50 % busy", counted(500, 500, 0.01, wait=0.005), 1, False),
        ("seldom", counted(100, 100, 0.01), 1, False),
        ("one client, eight instances", counted(900, 900, 0.01), 8, False),
        ("batches", counted(1600, 100, 0.08, wait=0.08), 1, False),
        ("one client that sends many rows", counted(1600, 100, 0.08), 1, False),
    ],
)
def test_one_at_a_time_is_told_from_little_and_from_much(what: str, one: Counts, instances: int, alone: bool) -> None:
    """By waiting that is missing though the model is busy; not by any speed."""
    found = clients.one_at_a_time(watched(target(instances=instances), one))

    assert (found is not None) is alone, what


def test_the_waiting_of_independent_requests_is_as_the_books_have_it() -> None:
    """M/D/1: rho / 2 (1 - rho) executions; half of M/M/2 for two instances; near none for many that idle."""
    assert clients._independent(0.5, 1) == pytest.approx(0.5) and clients._independent(0.9, 1) == pytest.approx(4.5)
    assert clients._independent(1.0, 2) == pytest.approx(1 / 3 / 2) and clients._independent(1.0, 8) < 1e-4


def test_a_watched_batch_that_grows_in_step_is_no_verdict_and_a_flat_one_is_sound() -> None:
    """Sizes that differ in the user's own traffic tell how time grows with the rows."""
    small, large = counted(60, 60, 0.01), counted(320, 40, 0.011, wait=0.02)
    grown = counted(320, 40, 0.08, wait=0.02)

    flat = diagnose(watched(target("KIND_CPU"), small.plus(large)), None, {})
    in_step = diagnose(watched(target("KIND_CPU"), small.plus(grown)), None, {})

    assert [one.kind for one in flat] == ["healthy", "note"]
    assert [one.kind for one in in_step] == ["unknown", "note"] and "--repository" in in_step[0].fix


def test_padding_is_proved_only_where_it_was_counted() -> None:
    """Lengths that are ours are likely ones."""
    from perf.doctor import padding

    assert padding.verdict(Sample("what t makes of the texts", "m", [8] * 4, 2048)).certainty == "proved"
    assert padding.verdict(Sample("the requests", "m", [8] * 4, 2048)).certainty == "likely"
