import contextlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from hf_cocodc.coordinator.caller import CoordinatorConnection, OpenCall
from hf_cocodc.coordinator.client import status
from hf_cocodc.coordinator.messages import (
    PROTOCOL,
    Announce,
    AskLeave,
    AskRecipe,
    AskStop,
    Beat,
    Bye,
    Claim,
    Claimed,
    Decided,
    Done,
    Heard,
    Hears,
    Here,
    LeaveNow,
    Over,
    Paired,
    Post,
    Posted,
    Promise,
    Ready,
    Report,
    Resumed,
    RunRecipe,
    Stop,
    StopAt,
    Suspect,
    Waiting,
    host_of,
)
from hf_cocodc.coordinator.server import Served, serve_in_thread
from hf_cocodc.errors import (
    HandshakeError,
    InputError,
    MeetingError,
    MeetingRefused,
    RegionLostError,
    RunOver,
)
from hf_cocodc.net.channel import line_of

from .regions import OTHER, SECRET, Region, ask, hello, meet, part, socket_of, try_to_meet, wait_until


@contextlib.contextmanager
def coordinator(**given: object) -> Iterator[Served]:
    served = serve_in_thread(**given)  # type: ignore[arg-type]
    try:
        yield served
    finally:
        served.close()


@contextlib.contextmanager
def process(*options: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """A coordinator in a process of its own, and its address."""
    command = [sys.executable, "-m", "hf_cocodc", "coordinator", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        line = started.stdout.readline()
        try:
            yield started, line.split()[3].rstrip(";,")
        finally:
            started.send_signal(signal.SIGCONT)
            started.kill()


def test_two_and_three_regions_meet_and_get_each_their_place() -> None:
    with coordinator() as served:
        for count in (2, 3):
            regions = meet(served.address, *(hello(each, count) for each in range(count)), run=f"run{count}")
            assert [each.welcome.me.region for each in regions] == list(range(count))
            assert len({each.welcome.me.ticket for each in regions}) == count
            assert len({each.welcome.run for each in regions}) == 1
            assert [host_of(place.lanes) for place in regions[0].welcome.members] == [
                f"10.0.0.{each + 1}" for each in range(count)
            ]
            part(*regions)


def test_regions_that_differ_are_both_refused_and_hear_in_what() -> None:
    with coordinator() as served:
        for error in try_to_meet(served.address, hello(0), hello(1, method="streaming")):
            assert isinstance(error, HandshakeError)
            assert "region 0 has 'diloco', region 1 has 'streaming'" in str(error)


def test_a_second_process_of_a_region_is_refused() -> None:
    with coordinator() as served:
        results = try_to_meet(served.address, hello(0), structs.replace(hello(0), token="other"), wait_s=1.0)
        refused = [each for each in results if isinstance(each, HandshakeError)]
        assert len(refused) == 1 and "another process is region 0 of run 'run' too" in str(refused[0])
        [late] = [each for each in results if isinstance(each, RegionLostError)]
        assert "region 1 did not arrive within 1 s" in str(late)


def test_two_runs_with_two_secrets_have_one_name_and_never_see_each_other() -> None:
    with coordinator(secrets=[SECRET, OTHER]) as served:
        ours = meet(served.address, hello(0), hello(1), keys=SECRET)
        theirs = meet(served.address, hello(0, 3), hello(1, 3), hello(2, 3), keys=OTHER)
        [run] = status(served.address, SECRET)
        assert run["count"] == 2 and len(run["members"]) == 2
        [run] = status(served.address, OTHER, "run")
        assert run["count"] == 3
        part(*ours, *theirs)


def test_a_region_with_another_secret_is_refused_with_the_reason() -> None:
    with coordinator(secrets=[SECRET]) as served:
        for keys, why in ((OTHER, "another secret"), (None, "has a secret, and the caller has none")):
            with pytest.raises(MeetingError, match=why):
                status(served.address, keys)
    with coordinator() as served, pytest.raises(MeetingError, match="the coordinator has none"):
        status(served.address, SECRET)


def test_another_protocol_is_refused_at_both_ends_naming_both_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with coordinator() as served:
        host, port = served.address.split(":")
        with socket.create_connection((host, int(port))) as caller:
            caller.sendall(b'{"hf_cocodc": 99, "version": "9.9", "key": null, "new": [1]}\n')
            answer = caller.recv(4096)
        assert (
            b"9.9 (protocol 99)" in answer
            and f"(protocol {PROTOCOL})".encode() in answer
            and b"refused" in answer
        )
        monkeypatch.setattr(
            "hf_cocodc.coordinator.caller.versions", lambda: {"hf_cocodc": 13, "version": "0.0.9"}
        )
        with pytest.raises(MeetingError, match=r"0\.0\.9 \(protocol 13\)"):
            status(served.address, None)


def test_a_joiner_is_paired_ready_announced_and_a_member_once_others_say_so() -> None:
    with coordinator() as served:
        a, b = meet(served.address, hello(0, elastic=True), hello(1, elastic=True))
        [c] = meet(served.address, hello(2, elastic=True, join=True))
        assert c.welcome.joins and [place.member.region for place in c.welcome.members] == [0, 1]
        assert a.wait_for(Here).place.member == c.client.me
        for member in (a, b):
            member.client.send(Paired(member=c.client.me))
            c.client.send(Paired(member=member.client.me))
        c.client.send(Ready())
        for region in (a, b, c):
            change = region.wait_for(Announce).change
            assert (change.kind, change.member, change.number) == ("join", c.client.me, 1)
        members = (a.client.me, b.client.me, c.client.me)
        a.client.send(Beat(changes=1, members=members, step=7))
        wait_until(lambda: len(status(served.address, None)[0]["members"]) == 3)
        [run] = status(served.address, None)
        assert run["epoch"] == 1 and run["phase"] == "trains" and run["newcomers"] == []
        part(a, b, c)


def test_a_loss_is_decided_from_the_reports_of_the_others() -> None:
    with coordinator() as served:
        a, b, c = meet(served.address, *(hello(each, 3, elastic=True) for each in range(3)))
        c.step = 120
        wait_until(lambda: status(served.address, None)[0]["members"][2]["step"] == 120)
        c.client.close()
        members = tuple(place.member for place in a.welcome.members)
        for each in (a, b):
            report = Report(
                number=0,
                member=each.client.me,
                first=1,
                done=4,
                has=each is a,
                lost=(c.client.me,),
                whys=("the connection broke",),
                members=members,
            )
            each.client.send(report)
        decided = a.wait_for(Decided)
        assert decided == b.wait_for(Decided)
        assert decided.decision.members == (a.client.me, b.client.me) and decided.decision.done == 4
        assert decided.whys == ("the connection broke",)
        [lost] = status(served.address, None)[0]["lost"]
        assert lost.pop("since_s") >= 0
        assert lost == {"region": 2, "step": 120, "why": "the connection broke"}
        part(a, b)


def test_regions_agree_on_a_step_at_which_all_stop() -> None:
    with coordinator() as served:
        a, b = meet(served.address, hello(0), hello(1))
        a.client.send(Stop(why="SIGTERM"))
        for region, at in ((a, 11), (b, 14)):
            region.client.send(Promise(number=region.wait_for(AskStop).number, step=at))
        for region in (a, b):
            assert region.wait_for(StopAt) == StopAt(number=1, step=14, whys={"0": "SIGTERM"})
        part(a, b)


def test_commands_ask_a_region_to_leave_and_claim_numbers() -> None:
    with coordinator() as served:
        a, b = meet(served.address, hello(0, elastic=True), hello(1, elastic=True))
        answers: list[object] = []
        asking = threading.Thread(
            target=lambda: answers.append(ask(served.address, "run", AskLeave(region=1)))
        )
        asking.start()
        b.wait_for(LeaveNow)
        assert not answers
        b.client.send(Heard())
        asking.join()
        assert answers == [Done()]
        with pytest.raises(InputError, match="Its members are: 0, 1"):
            ask(served.address, "run", AskLeave(region=5))
        claims = [CoordinatorConnection(served.address, "run", "command", None) for _ in range(2)]
        for connection, region in zip(claims, (2, 3), strict=True):
            connection.send(Claim())
            assert connection.receive(5.0) == Claimed(region=region)
        claims[0].close()
        wait_until(lambda: ask(served.address, "run", Claim()) == Claimed(region=2))
        claims[1].close()
        part(a, b)


def test_a_run_keeps_the_recipe_of_the_region_that_opened_it(tmp_path: Path) -> None:
    """Also when that is lost, when the coordinator is started again, and whatever others tell; nobody has it before the run
    trains, or after its end.
    """
    told = [{"text": f"of region {region}"} for region in range(3)]
    state = tmp_path / "state"
    first = serve_in_thread(state=state, secrets=[SECRET])
    with pytest.raises(MeetingError, match="run 'run' does not train"):
        ask(first.address, "run", AskRecipe(), keys=SECRET)
    a, b = meet(
        first.address, *(hello(each, elastic=True, recipe=told[each]) for each in (1, 0)), keys=SECRET
    )
    [c] = meet(first.address, hello(2, elastic=True, join=True, recipe=told[2]), keys=SECRET)
    assert ask(first.address, "run", AskRecipe(), keys=SECRET) == RunRecipe(recipe=told[0])
    b.client.close()
    with pytest.raises(MeetingRefused, match="the caller has none"):
        ask(first.address, "run", AskRecipe())
    first.close()
    with coordinator(port=first.port, state=state, secrets=[SECRET]) as second:
        assert ask(second.address, "run", AskRecipe(), keys=SECRET) == RunRecipe(recipe=told[0])
        a.wait_for(Resumed, 8.0)
        a.client.close(Bye(how="finished", step=9))
        wait_until(lambda: status(second.address, SECRET)[0]["phase"] == "ended")
        with pytest.raises(MeetingError, match="run 'run' does not train"):
            ask(second.address, "run", AskRecipe(), keys=SECRET)
    part(c)


@pytest.mark.parametrize(
    ("elastic", "recipe", "said"),
    [
        (True, {}, "was started by a script, which has no recipe. Start the same script here"),
        (True, {"recipe": "text"}, "was started by a script"),
        (False, {"recipe": {"text": "x"}}, "ends when a region is lost: nobody can join it"),
    ],
)
def test_a_run_without_a_recipe_or_that_nobody_joins_says_so(
    elastic: bool, recipe: dict[str, object], said: str
) -> None:
    with coordinator() as served:
        regions = meet(served.address, *(hello(each, elastic=elastic, **recipe) for each in (0, 1)))
        with pytest.raises(InputError, match=said):
            ask(served.address, "run", AskRecipe())
        part(*regions)


def test_a_run_that_has_ended_says_so_to_newcomers_and_joiners() -> None:
    with coordinator() as served:
        a, b = meet(served.address, hello(0, elastic=True), hello(1, elastic=True))
        [c] = meet(served.address, hello(2, elastic=True, join=True))
        a.client.close(Bye(how="finished", step=100, place="out/model"))
        assert c.wait_for(Over) == Over(how="finished", step=100, place="out/model")
        with pytest.raises(RunOver, match="has finished at step 100: .*out/model"):
            meet(served.address, hello(3, elastic=True, join=True))
        assert status(served.address, None)[0]["ended"]["place"] == "out/model"
        part(b, c)


def test_status_shows_steps_lags_and_who_is_not_connected() -> None:
    with coordinator() as served:
        a, b = meet(served.address, hello(0), hello(1))
        a.step, b.step = 50, 40
        wait_until(lambda: [each["step"] for each in status(served.address, None)[0]["members"]] == [50, 40])
        wait_until(lambda: status(served.address, None)[0]["members"][1]["behind"] == 10)
        b.client.close()
        wait_until(lambda: "not connected" in status(served.address, None)[0]["members"][1]["doing"])
        [run] = status(served.address, None)
        assert run["members"][1]["step"] == 40 and run["members"][1]["heard_s"] < 5
        assert run["name"] == "run" and run["losses"] == 0 and run["ended"] is None
        part(a)


@pytest.mark.parametrize("cut", [True, False])
def test_members_hear_whether_a_connection_was_closed_or_cut(
    cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a process closes it; a router that is cut off or restarts does not."""
    with coordinator() as served:
        a, b = meet(served.address, hello(0), hello(1))
        if cut:  # a reset
            monkeypatch.setattr(OpenCall, "finish", drop)
            socket_of(b).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        b.client.close()
        assert a.wait_for(Hears) == Hears(member=b.client.me, hears=False, cut=cut)
        part(a)


async def drop(call: OpenCall) -> None:
    call.drop()


def test_the_log_has_a_line_for_each_event(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hf_cocodc.coordinator.server")
    with coordinator() as served:
        a, b = meet(served.address, hello(0), hello(1))
        b.client.close()
        a.client.close(Bye(how="finished", step=9))
        wait_until(lambda: "ended at step 9 (finished)" in caplog.text)
    for line in (
        "run 'run': regions 0, 1 have met",
        "region 1 has no connection to this coordinator any more",
        "ended at step 9 (finished)",
    ):
        assert caplog.text.count(line) == 1


def test_a_coordinator_that_is_started_again_goes_on_with_the_run(tmp_path: Path) -> None:
    state = tmp_path / "state"
    first = serve_in_thread(state=state)
    a, b, c = meet(first.address, *(hello(each, 3, elastic=True) for each in range(3)))
    first.close()
    wait_until(lambda: not a.client.is_connected and not b.client.is_connected)
    a.client.send(Stop(why="it is dropped while nobody hears it"))
    with coordinator(port=first.port, state=state) as second:
        for region in (a, b, c):
            assert region.wait_for(Resumed, 8.0).generation.number == 2
        [run] = status(second.address, None)
        assert run["phase"] == "trains" and len(run["members"]) == 3
        c.client.close()
        for each in (a, b):
            members = tuple(place.member for place in a.welcome.members)
            each.client.send(
                Report(
                    number=0,
                    member=each.client.me,
                    first=1,
                    done=1,
                    has=False,
                    lost=(c.client.me,),
                    whys=("gone",),
                    members=members,
                )
            )
        assert a.wait_for(Decided).generation.number == 2
        assert b.wait_for(Decided).decision.lost == (c.client.me,)
        part(a, b)


def test_without_its_file_a_coordinator_decides_nothing(tmp_path: Path) -> None:
    """Regions hear so, and train on; once it has the file again, it decides."""
    first = serve_in_thread(state=tmp_path / "state")
    a, b = meet(first.address, hello(0, elastic=True), hello(1, elastic=True))
    first.close()
    with coordinator(port=first.port) as second:
        for region in (a, b):
            assert "does not know run 'run'" in region.wait_for(Waiting, 8.0).why
        assert not phases(second.address)
    with coordinator(port=first.port, state=tmp_path / "state"):
        for region in (a, b):
            region.wait_for(Resumed, 8.0)
        part(a, b)


def phases(address: str) -> list[str]:
    return [run["phase"] for run in status(address, None)]


@pytest.mark.slow
def test_a_coordinator_that_stands_still_makes_nobody_late() -> None:
    with process() as (started, address):
        terms = structs.replace(hello(0).terms, timeout_s=2.0)
        hellos = [structs.replace(hello(each), terms=terms) for each in (0, 1)]
        a, b = meet(address, *hellos, period_s=0.2)
        a.waits_for, b.waits_for = 1, 0
        time.sleep(0.5)
        started.send_signal(signal.SIGSTOP)
        time.sleep(3.0)
        started.send_signal(signal.SIGCONT)
        time.sleep(1.0)
        assert a.client.is_connected and b.client.is_connected
        for region in (a, b):
            assert not any(isinstance(each, Suspect) for each in region.heard)
        part(a, b)


def test_the_command_says_where_it_listens_and_ends_well_at_a_signal() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with process() as (started, address):
            regions: list[Region] = meet(address, hello(0), hello(1))
            part(*regions)
            started.send_signal(number)
            assert started.wait(5.0) == 0
            assert started.stdout is not None
            assert "run 'run': regions 0, 1 have met" in started.stdout.read()


def test_messages_reach_another_process_of_the_run() -> None:
    with coordinator() as served:
        a, b = meet(served.address, hello(0), hello(1))
        a.client.send(Post(to=b.client.me, topic="room", content={"bytes": 5}))
        assert b.wait_for(Posted) == Posted(sender=a.client.me, topic="room", content={"bytes": 5})
        part(a, b)


def test_what_regions_compare_may_be_large() -> None:
    with coordinator(secrets=[SECRET]) as served:
        many = {f"layers.{each}.weight": [1024, 1024] for each in range(60_000)}
        a, b = meet(served.address, hello(0, model=many), hello(1, model=many), keys=SECRET)
        assert not a.welcome.differences and len(line_of(a.welcome)) < 1000, (
            "nobody is sent what all have said"
        )
        part(a, b)


def test_a_port_that_is_taken_is_an_error_with_a_way_out() -> None:
    with coordinator() as served, pytest.raises(InputError, match="Choose another --host or --port"):
        serve_in_thread(port=served.port)


def test_server_and_client_need_no_torch() -> None:
    code = "import hf_cocodc.coordinator.server, hf_cocodc.coordinator.client, sys; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_a_forked_process_does_not_keep_connections_open() -> None:
    with coordinator() as served:
        b = CoordinatorConnection(served.address, "run", "region", None)
        b.send(hello(1))
        [a] = meet(served.address, hello(0))
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        try:
            b.drop()
            wait_until(lambda: "not connected" in status(served.address, None)[0]["members"][1]["doing"])
            part(a)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_waiting_names_the_absent() -> None:
    with coordinator() as served:
        connection = CoordinatorConnection(served.address, "run", "region", None)
        connection.send(hello(1, 3))
        assert connection.receive(5.0) == Waiting(absent=(0, 2))
        connection.close()
