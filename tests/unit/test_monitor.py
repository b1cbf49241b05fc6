"""Metrics for Prometheus, and the progress of a TrainJob: pages, tokens, servers that fail."""

import http.client
import logging
import math
import socket
import time
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.certificates import write_certificate
from tests.helpers.status_server import PREFIX, status_server
from tfscale.config import ConfigError, parse_address
from tfscale.launcher import cli
from tfscale.monitor import kubeflow
from tfscale.monitor.exporter import Exporter, listen
from tfscale.monitor.kubeflow import Poster, StatusServer, status_of
from tfscale.monitor.page import Numbers, render

NUMBERS = Numbers(
    ranks=3,
    restarts=1,
    epoch=2,
    epochs=5,
    step=7,
    steps_per_epoch=10,
    steps=17,
    samples=544,
    steps_per_s=2.5,
    samples_per_s=80.0,
    step_s=0.4,
    exposed_s=0.1,
    n_bytes=1 << 40,
    waited_s=(4.0, 0.25, 3.0),
    late_s=(0.0, 3.75, 1.0),
    metrics={"loss": 0.5, 'a "b"\\\n': math.nan, "up": math.inf},
    progress=0.34,
    remaining_s=33.01,
)


def samples_of(page):
    """Values by name and labels, as Prometheus's own parser reads them."""
    families = list(text_string_to_metric_families(page))
    assert all(family.documentation and family.type != "unknown" for family in families)
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_page_is_what_prometheus_reads():
    found = samples_of(render(NUMBERS))
    assert found["tfscale_epoch",] == 2 and found["tfscale_step",] == 7
    assert found["tfscale_steps_total",] == 17 and found["tfscale_samples_total",] == 544
    assert found["tfscale_step_exposed_seconds",] == 0.1
    assert found["tfscale_exchanged_bytes_total",] == 1 << 40
    assert found["tfscale_rank_waiting_seconds_total", "1"] == 0.25
    late = {rank: found["tfscale_rank_late_seconds", str(rank)] for rank in range(3)}
    assert late == {0: 0.0, 1: 3.75, 2: 1.0}
    assert found["tfscale_metric", "loss"] == 0.5 and found["tfscale_metric", "up"] == math.inf
    assert math.isnan(found["tfscale_metric", 'a "b"\\\n'])


def test_page_leaves_out_what_is_not_known():
    found = samples_of(render(Numbers()))
    assert found["tfscale_epoch",] == 0
    names = {name for name, *_ in found}
    assert not names & {"tfscale_epochs", "tfscale_remaining_seconds", "tfscale_metric"}
    assert not any("rank_" in name for name in names)


# Addresses.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (":9464", ("127.0.0.1", 9464)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("node-1.site:65535", ("node-1.site", 65535)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_addresses(text, expected):
    assert parse_address(text, "--metrics") == expected


@pytest.mark.parametrize("text", ["9464", ":", ":0", ":65536", "a b:1", "::1:80", ":9464/metrics"])
def test_malformed_addresses(text, capsys):
    with pytest.raises(ConfigError, match="TFSCALE_METRICS must be HOST:PORT or :PORT"):
        parse_address(text, "TFSCALE_METRICS")
    assert cli.main(["run", "-np", "2", "--metrics", text, "true"]) == 2
    assert "--metrics must be HOST:PORT or :PORT" in capsys.readouterr().err


def test_addresses_at_which_rank_0_cannot_listen(capsys, monkeypatch):
    with listen(f":{free_port()}", "--metrics") as taken:
        text = f":{taken.getsockname()[1]}"
        assert cli.main(["run", "-np", "2", "--metrics", text, "true"]) == 2
        assert f"--metrics {text}: Address already in use. Choose" in capsys.readouterr().err
        monkeypatch.setenv("TFSCALE_METRICS", text)
        assert cli.main(["run", "-np", "2", "true"]) == 2
        assert "TFSCALE_METRICS must be an address at" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="Cannot assign requested address"):
        listen("192.0.2.1:9464", "--metrics")
    with pytest.raises(ConfigError, match="Name an address of this host"):
        listen("no.such.host.invalid:9464", "--metrics")

    def refuse(self, address):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(ConfigError, match="Permission denied. Choose another port"):
        listen(":80", "--metrics")


def test_options_reach_the_ranks(capsys, monkeypatch):
    monkeypatch.setenv("TFSCALE_METRICS_TOKEN", "secret")
    assert cli.main(["run", "-np", "2", "--metrics", ":9464", "--dry-run", "true"]) == 0
    shown = capsys.readouterr().out
    assert "TFSCALE_METRICS=... TFSCALE_METRICS_TOKEN=... " in shown and "secret" not in shown


# Serving.


@pytest.fixture
def serve():
    """Starts exporters; returns the port of one. All end with the test."""
    running = []

    def start(read=lambda: NUMBERS, token="", poster=None):
        listening = listen(f":{free_port()}", "--metrics")
        running.append(Exporter(read, listening, token, poster))
        return listening.getsockname()[1]

    yield start
    for exporter in running:
        exporter.close()


def get(port, path="/metrics", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_scrapes(serve):
    counts = iter(range(1000))
    port = serve(lambda: replace(NUMBERS, step=next(counts)))
    pages = [samples_of(get(port)[1])["tfscale_step",] for _ in range(3)]
    assert pages == sorted(set(pages))
    assert get(port, "/metrics?name=a")[0] == get(port, "/")[0] == 200
    assert get(port, "/secrets")[0] == 404


def test_token(serve):
    port = serve(token="töken")
    for wrong in ({}, {"Authorization": "Bearer tok"}, {"Authorization": "töken".encode()}):
        status, text = get(port, **wrong)
        assert status == 401 and "tfscale_" not in text
    assert get(port, Authorization="Bearer töken".encode())[0] == 200


def test_readers_that_misbehave(serve):
    """One that sends nothing delays others by two seconds, and what is no HTTP ends nothing."""
    port = serve()
    with socket.create_connection(("127.0.0.1", port)) as silent:
        silent.send(b"GET /met")
        assert get(port)[0] == 200
    with socket.create_connection(("127.0.0.1", port)) as confused:
        confused.send(b"\x16\x03\x01 hello\r\n\r\n")
    socket.create_connection(("127.0.0.1", port)).close()
    assert get(port)[0] == 200


def test_numbers_that_fail_give_an_empty_page(serve):
    def fail():
        raise RuntimeError("none yet")

    assert get(serve(fail)) == (200, "")


def test_the_port_is_free_again():
    listening = listen(f":{free_port()}", "--metrics")
    port = listening.getsockname()[1]
    Exporter(lambda: NUMBERS, listening).close()
    listen(f":{port}", "--metrics").close()


# Kubeflow.


def test_variables_of_the_controller(caplog):
    assert StatusServer.of({}) is None
    given = {f"{PREFIX}CA_CERT": "ca", f"{PREFIX}TOKEN": "token"}
    url = "https://host:8082/apis/trainjobs/a/status"
    server = StatusServer.of({**given, f"{PREFIX}URL": url})
    assert server == StatusServer("host", 8082, "/apis/trainjobs/a/status", "ca", "token")
    assert not caplog.records
    for bad in ("http://host/", "https://", "https://host:port/", "host"):
        assert StatusServer.of({**given, f"{PREFIX}URL": bad}) is None
    assert StatusServer.of({f"{PREFIX}URL": url}) is None
    assert [r.message.count("is not posted") for r in caplog.records] == [1] * 5


def test_status():
    status = status_of(NUMBERS)
    assert status["progressPercentage"] == 34 and status["estimatedRemainingSeconds"] == 34
    names = [metric["name"] for metric in status["metrics"]]
    assert names[:3] == ["currentEpoch", "totalEpochs", "loss"]
    assert all(isinstance(metric["value"], str) for metric in status["metrics"])
    assert status_of(Numbers(epoch=1)) == {"metrics": [{"name": "currentEpoch", "value": "1"}]}
    huge = status_of(replace(NUMBERS, progress=1.2, remaining_s=1e12))
    assert huge["progressPercentage"] == 100
    assert huge["estimatedRemainingSeconds"] == 2**31 - 1


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return write_certificate(tmp_path_factory.mktemp("tls"), "127.0.0.1")


@pytest.fixture
def receiver(certificate, tmp_path):
    """A stand-in of Kubeflow's status server."""
    (tmp_path / "token").write_text("jwt-1\n")
    with status_server(certificate, tmp_path / "token") as server:
        yield server


def test_posts(receiver, tmp_path):
    poster = Poster(receiver.target, every_s=0.0)
    poster.post(Numbers())  # no epoch has begun
    poster.post(NUMBERS)
    poster.post(NUMBERS)  # nothing has changed
    (tmp_path / "token").write_text("jwt-2\n")  # the cluster renews it
    poster.post(replace(NUMBERS, progress=1.0))
    (path, token, first), (_, renewed, second) = receiver.posts
    assert path == "/trainjobs/a/status" and token == "Bearer jwt-1" and renewed == "Bearer jwt-2"
    assert first["trainerStatus"].items() >= status_of(NUMBERS).items()
    assert time.strptime(first["trainerStatus"]["lastUpdatedTime"], "%Y-%m-%dT%H:%M:%SZ")
    assert second["trainerStatus"]["progressPercentage"] == 100 and poster.is_answered


def test_posts_have_a_rate(receiver):
    poster = Poster(receiver.target, every_s=1000.0)
    for progress in (0.1, 0.2, 0.3):
        poster.post(replace(NUMBERS, progress=progress))
    assert len(receiver.posts) == 1
    poster.post(replace(NUMBERS, progress=1.0), is_last=True)
    assert len(receiver.posts) == 2


def test_the_last_numbers_are_posted_when_the_program_ends(receiver):
    poster = Poster(receiver.target, every_s=1000.0)

    def read():
        return replace(NUMBERS, progress=1.0 if receiver.posts else 0.1)

    exporter = Exporter(read, poster=poster)
    while not receiver.posts:
        time.sleep(0.01)  # the exporter's thread posts within its turn
    exporter.close()
    percent = [body["trainerStatus"]["progressPercentage"] for *_, body in receiver.posts]
    assert percent[-1] == 100


@pytest.mark.parametrize("answer", [301, 401, 429, 500])
def test_a_server_that_refuses_is_given_up(receiver, answer, caplog):
    receiver.answer = answer
    poster = Poster(receiver.target, every_s=0.0)
    for step in range(20):
        poster.post(replace(NUMBERS, progress=step / 20))
    assert len(receiver.posts) == 8 and not poster.is_answered
    texts = [record.message for record in caplog.records]
    assert len(texts) == 2 and str(answer) in texts[0] and "No more are posted." in texts[1]


def test_after_a_failure_the_next_post_waits_longer(receiver):
    receiver.answer = 500
    poster = Poster(receiver.target, every_s=1000.0)
    for progress in (0.1, 0.2):
        poster.post(replace(NUMBERS, progress=progress))
    assert len(receiver.posts) == 1


@pytest.mark.parametrize("fault", ["dead", "no token", "no certificate", "another certificate"])
def test_faults_are_warnings(fault, receiver, tmp_path, caplog):
    target = receiver.target
    if fault == "dead":
        target = replace(target, port=free_port())
    elif fault == "another certificate":
        other = tmp_path / "other"
        other.mkdir()
        target = replace(target, ca_file=str(write_certificate(other, "127.0.0.1").chain))
    else:
        field = {"no token": "token_file", "no certificate": "ca_file"}[fault]
        target = replace(target, **{field: str(tmp_path / "missing")})
    poster = Poster(target, every_s=0.0)
    with caplog.at_level(logging.WARNING):
        poster.post(NUMBERS)
    assert "The progress of the TrainJob was not posted" in caplog.text
    assert receiver.posts == []


def test_a_server_that_never_answers_keeps_the_page_for_seconds_only(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(kubeflow, "_LIMIT_S", 0.2)
    (tmp_path / "token").write_text("jwt")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        names = {"URL": f"https://127.0.0.1:{silent.getsockname()[1]}/", "TOKEN": "token"}
        names = {**names, "TOKEN": str(tmp_path / "token")}
        certificate = write_certificate(tmp_path, "127.0.0.1")
        names["CA_CERT"] = str(certificate.chain)
        target = StatusServer.of({PREFIX + name: value for name, value in names.items()})
        assert get(serve(poster=Poster(target)))[0] == 200
