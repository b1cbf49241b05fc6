"""The emulated cluster without root: names, commands, counters, state."""

import ipaddress
import json
import os
import subprocess

import pytest

from tfscale.config import ConfigError, ExchangeError
from tfscale.launcher.mpi_command import JOB_VARIABLE, Mpi
from tools.cluster import commands, running
from tools.cluster.layout import NETWORK, make_layout, parse_rate
from tools.cluster.state import State, delete_state, read_state, state_path, write_state
from tools.cluster.wire import Delays, Quality

LAYOUT = make_layout("main", 3)


def test_each_node_has_an_address_of_its_own_in_the_network_for_measuring():
    addresses = [node.address for node in LAYOUT.nodes]
    assert len(set(addresses)) == 3
    assert all(ipaddress.ip_address(a) in NETWORK for a in addresses)
    assert NETWORK.subnet_of(ipaddress.ip_network("198.18.0.0/15"))


def test_rates():
    texts = ("1gbit", "250mbit", "2.5Gbit", "1000kbit")
    assert [parse_rate(text) for text in texts] == [1e9, 2.5e8, 2.5e9, 1e6]


def test_every_command_stays_in_namespaces_of_the_cluster():
    """Nothing touches a device or an address of the machine itself."""
    shape = commands.Shape(1e9, delay_ms=1.0)
    lines = [*commands.up_commands(LAYOUT), *commands.shape_commands(LAYOUT, shape)]
    lines += [*commands.unshape_commands(LAYOUT), *commands.down_commands(LAYOUT)]
    lines += [*commands.wire_commands(LAYOUT), *commands.unwire_commands(LAYOUT)]
    lines += [*commands.probe_commands(LAYOUT), commands.link_command(LAYOUT, 1, False)]
    for line in lines:
        is_netns = line[:2] == ["ip", "netns"] and line[2] in ("add", "del")
        named = line[3] if is_netns else line[line.index("-n") + 1]
        assert named in LAYOUT.namespaces, line


@pytest.mark.parametrize("rate", [1e6, 1e9, 1e10])
def test_both_directions_of_each_link_get_the_rate_and_room_for_the_largest_packet(rate):
    """Delay and loss are inside the rate."""
    lines = commands.shape_commands(LAYOUT, commands.Shape(rate))
    assert len(lines) == 2 * 3
    for line in lines:
        assert line[line.index("rate") + 1] == f"{rate:.0f}bit"
        assert int(line[line.index("burst") + 1]) >= 128 * 1024
    delayed = commands.shape_commands(LAYOUT, commands.Shape(rate, delay_ms=0.5, loss_percent=0.1))
    netem = [line for line in delayed if "netem" in line]
    assert len(netem) == 6 and len(delayed) == 12 and not any("netem" in line for line in lines)
    assert {line[line.index("parent") + 1] for line in netem} == {"1:1"}
    assert {line[line.index("delay") + 1] for line in netem} == {"0.5ms"}


def test_without_netem_the_rate_alone_is_the_kernels():
    delayed = commands.Shape(1e9, 5.0, 1.0, 25.0)
    lines = commands.shape_commands(LAYOUT, delayed, has_netem=False)
    assert len(lines) == 6 and not any("netem" in line for line in lines)
    assert sum("25%" in line for line in commands.shape_commands(LAYOUT, delayed)) == 6


@pytest.mark.parametrize("values", [(-1.0,), (0.0, 100.0), (1.0, 0.0, 100.0), (0.0, 0.0, 5.0)])
def test_shapes_that_cannot_be_are_refused(values):
    with pytest.raises(ConfigError, match="Received: "):
        commands.Shape(1e9, *values)


def play(n_frames, quality, step_s=0.001):
    """Return (time, frame) of all that arrives of frames that are sent one after the other."""
    delays, arrived = Delays(), []
    delays.quality = quality
    for i in range(n_frames):
        delays.accept(i % 2, bytes([i % 256]), i * step_s)
        arrived += [(i * step_s, *due) for due in delays.take_due(i * step_s)]
    while (pause_s := delays.pause_s(0.0)) is not None:
        arrived += [(pause_s, *due) for due in delays.take_due(pause_s)]
    return arrived


def test_frames_are_delayed_and_stay_in_order():
    arrived = play(100, Quality(delay_ms=20.0))
    assert [(way, frame[0]) for _, way, frame in arrived] == [(i % 2, i) for i in range(100)]
    for at_s, _, frame in arrived:
        assert at_s >= frame[0] * 0.001 + 0.02 - 1e-9


def test_frames_are_lost_and_overtake_as_often_as_asked():
    assert len(play(20000, Quality(loss_percent=5.0))) / 20000 == pytest.approx(0.95, abs=0.01)
    arrived = play(200, Quality(delay_ms=3.0, reorder_percent=25.0))
    order = [frame[0] for _, _, frame in arrived]
    assert sorted(order) == list(range(200)) != order
    late = sum(at_s > frame[0] * 0.001 for at_s, _, frame in arrived)
    assert late / 200 == pytest.approx(0.75, abs=0.1)


def test_counters_are_the_nodes_point_of_view():
    names = ["lo", "bridge0", "port0", "port1", "port2"]
    stats = [{"rx": {"bytes": 10 * i}, "tx": {"bytes": i}} for i in range(5)]
    links = [{"ifname": n, "stats64": s} for n, s in zip(names, stats, strict=True)]
    counters = commands.parse_counters(LAYOUT, json.dumps(links))
    assert counters == {f"node{i}": {"sent": 10 * (i + 2), "received": i + 2} for i in range(3)}
    after = {node: {way: n + 5 for way, n in ways.items()} for node, ways in counters.items()}
    assert commands.difference(counters, after)["node1"] == {"sent": 5, "received": 5}


def _run_script(tmp_path, *arguments):
    """Run the launcher with an `ip` that only says how it was called."""
    (tmp_path / "ip").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    (tmp_path / "launcher").write_text(commands.launcher_script(LAYOUT))
    for name in ("ip", "launcher"):
        (tmp_path / name).chmod(0o700)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    words = [str(tmp_path / "launcher"), *arguments]
    return subprocess.run(words, env={"PATH": path}, capture_output=True, text=True)


def test_the_launcher_enters_the_node_under_its_name(tmp_path):
    done = _run_script(tmp_path, "-x", "-q", LAYOUT.nodes[1].address, '"proxy"', "--port", "7")
    assert done.returncode == 0
    inner = 'hostname node1 && exec "proxy" --port 7'
    words = ["netns", "exec", "tfscale-main-node1", "unshare", "--uts", "sh", "-c", inner]
    assert done.stdout == "".join(f"{word}|" for word in words)


def test_the_launcher_runs_shell_commands_that_set_variables_first(tmp_path):
    done = _run_script(tmp_path, "-x", LAYOUT.nodes[0].address, "A=1; export A;", "prted")
    assert done.stdout.endswith("|sh|-c|hostname node0 && A=1; export A; prted|")


def test_open_mpi_runs_on_the_nodes_too(monkeypatch):
    started = {}
    monkeypatch.setattr(running, "existing", lambda name: State(LAYOUT, {}))
    monkeypatch.setattr(running, "read_bytes", lambda name: {})
    monkeypatch.setattr(running.commands, "difference", lambda before, after: {})
    monkeypatch.setattr(
        running,
        "_run_marked",
        lambda state, job, words, environ, how: started.update(words=words, environ=environ) or 0,
    )
    mpi = {"kind": "openmpi", "version": "5.0", "mpiexec": "/open/mpiexec"}
    monkeypatch.setattr(running, "find_mpi", lambda mpiexec: Mpi(**mpi))
    running.run("main", 4, ["program"], {"SEED": "7"}, n_nodes=2, mpiexec="/open/mpiexec")
    words, environ = started["words"], started["environ"]
    assert words[words.index("-H") + 1] == ",".join(f"{n.address}:2" for n in LAYOUT.nodes[:2])
    passed = {words[i + 1] for i, word in enumerate(words) if word == "-x"}
    assert {"SEED", JOB_VARIABLE} <= passed and environ["SEED"] == "7"
    assert environ["PRTE_MCA_plm_ssh_agent"].endswith("main.launcher")
    assert environ["OMPI_MCA_btl_tcp_if_include"] == commands.LINK
    mpi["kind"] = "intel"
    with pytest.raises(ConfigError, match="Received: intel"):
        running.run("main", 4, ["program"])


def test_the_launcher_refuses_other_hosts(tmp_path):
    for host in ("10.0.0.1", "example.org", "198.18.0.99", "node1"):
        done = _run_script(tmp_path, host, "true")
        assert (done.returncode, done.stdout) == (1, "")
        assert f"{host} is no node of the emulated cluster main" in done.stderr


def test_links_that_moved_nothing_are_an_error():
    busy, idle = {"sent": 10**6, "received": 10**6}, {"sent": 10**6, "received": 100}
    running.check_moved({"node0": busy, "node1": busy})
    with pytest.raises(ExchangeError, match="Received: next to none at node1"):
        running.check_moved({"node0": busy, "node1": idle})


def test_state_survives_and_goes(tmp_path):
    assert read_state("main", tmp_path) is None
    write_state(State(LAYOUT, {"abc": 17}), tmp_path)
    assert read_state("main", tmp_path) == State(LAYOUT, {"abc": 17})
    delete_state("main", tmp_path)
    delete_state("main", tmp_path)
    assert read_state("main", tmp_path) is None


@pytest.mark.parametrize(
    "change",
    [{"namespaces": [*"wxyz"]}, {"name": "other"}, {"n_nodes": 4}, {"jobs": []}, {"n_nodes": "x"}],
)
def test_a_state_file_of_someone_else_is_refused(tmp_path, change):
    write_state(State(LAYOUT, {}), tmp_path)
    path = state_path("main", tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match="must be one that tfscale wrote"):
        read_state("main", tmp_path)
