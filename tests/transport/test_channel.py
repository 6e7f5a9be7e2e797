"""Contract of transports, the channel's part: the protocol of leases, rings and token logs over each of them."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from blink_proto import arena
from blink_proto.arena import Finish, RecordKind
from dpu_service.channel.client import ChannelClient
from dpu_service.channel.errors import ChannelError
from dpu_service.channel.rings import Sampling, cancel_payload, submit_payload
from dpu_service.transport.base import Range, Transport
from tests.replay import Script
from tests.transport.site import PATIENCE, WORD, Site, ask, poll_until_over, tokens_of

LONG_TOKENS = 40
"""Five times what the log holds."""


def test_tokens_come_in_order_through_a_log_that_wraps(site: Site) -> None:
    site.device.script = lambda s: Script([(s.prompt[0] + i) % 100 for i in range(LONG_TOKENS)], Finish.STOP)
    client = site.client()
    first, second = ask(client, [1, 2, 3], 50), ask(client, [50], 50)
    news = poll_until_over(site, client, 2)
    assert first is not None
    assert second is not None
    assert tokens_of(news[first]) == [1 + i for i in range(LONG_TOKENS)]
    assert tokens_of(news[second]) == [(50 + i) % 100 for i in range(LONG_TOKENS)]
    assert site.device.channels[0].protocol_errors == 0


def test_submissions_go_through_a_ring_that_wraps_and_wait_while_it_is_full(site: Site) -> None:
    site.device.script = lambda s: Script([s.prompt[-1]], Finish.STOP)
    client = site.client()
    site.device.taking = False
    assert [ask(client, [7, i]) for i in range(5)] == [0, 1, 2, 3, None]
    site.device.taking = True
    poll_until_over(site, client, 4)
    for start in range(4, 16, 4):
        assert [ask(client, [7, start + i]) for i in range(4)] == [start + i for i in range(4)]
        news = poll_until_over(site, client, 4)
        assert {position: tokens_of(items) for position, items in news.items()} == {
            start + i: [start + i] for i in range(4)
        }
    assert [s.prompt for s in site.device.submissions[4:]] == [(7, i) for i in range(4, 16)]


def test_nothing_is_said_while_the_front_end_does_not_read(site: Site) -> None:
    site.device.script = lambda s: Script(list(range(LONG_TOKENS)), Finish.STOP)
    client = site.client()
    position = ask(client, [1], 50)
    site.until(lambda: site.step() and site.device.channels[0].log_next > 0)
    for _ in range(20):
        site.step()
    assert site.device.channels[0].log_next == site.device.sizes.log_slots, "the log is full and nothing was lost"
    assert tokens_of(poll_until_over(site, client, 1)[position or 0]) == list(range(LONG_TOKENS))


def test_a_long_prompt_arrives_before_its_record(site: Site) -> None:
    prompt = [i % 97 for i in range(100_000)]
    client = site.client()
    ask(client, prompt)
    poll_until_over(site, client, 1)
    assert site.device.submissions[0].prompt == tuple(prompt)


def test_a_torn_token_record_waits_until_it_is_whole(site: Site) -> None:
    site.device.script = lambda s: Script([1], Finish.NONE)
    client = site.client()
    position = ask(client, [1])
    site.until(lambda: site.step(client) and client.poll() != [])
    channel = site.device.channels[0]
    at = site.log() + channel.log_next % site.device.sizes.log_slots * 16
    lap = 1 + channel.log_next // site.device.sizes.log_slots
    site.publish(at, arena.pack_token_head(lap, RecordKind.TOKEN, Finish.STOP, position or 0))
    channel.log_next += 1  # the cursor is there before the record's second half
    for _ in range(30):
        site.step(client)
        assert client.poll() == []
    site.publish(at + 8, arena.pack_token_body(lap, 0, 42))
    (news,) = poll_until_over(site, client, 1)[position or 0]
    assert (news.tokens, news.finish) == ([42], Finish.STOP)


def test_a_torn_submission_is_not_taken(site: Site) -> None:
    client = site.client()
    entrance = site.enter()
    ring = site.inbound.channel_offset(0) + site.inbound.channel_submit_offset
    entrance.transport.write(ring, bytes(range(120)))
    entrance.transport.commit(site.heap(), 1)  # carries the payload over; the record's own word stays out
    entrance.transport.flush(20)
    for _ in range(10):
        site.step(client)
    assert site.device.submissions == []
    assert ask(client, [5]) == 0
    poll_until_over(site, client, 1)
    assert [s.prompt for s in site.device.submissions] == [(5,)]


def test_late_writes_of_an_earlier_lease_change_nothing(site: Site) -> None:
    entrance = site.enter()
    late = site.lease(entrance)
    site.device.lease_timeout = 0.0
    site.until(lambda: site.step() and not site.device.channels[0].live)
    site.device.lease_timeout = 60.0
    client = site.client()
    assert ask(late, [66]) == 0
    late.cancel(0)
    entrance.transport.flush(PATIENCE)  # still later they would be in the next holder's way
    for _ in range(20):
        site.step(client)
    assert [s.prompt for s in site.device.submissions] == []
    assert ask(client, [5]) == 0
    poll_until_over(site, client, 1)
    assert [s.prompt for s in site.device.submissions] == [(5,)]


def plant(site: Site, transport: Transport, lease: int) -> None:
    """Fills both rings of channel 0 with records under a lease: a prompt of one token, and cancels of everything."""
    base, layout, sizes = site.inbound.channel_offset(0), site.inbound, site.device.sizes
    transport.write(site.heap(), struct.pack("<I", 66))
    for slots, offset, record in (
        (sizes.submit_slots, layout.channel_submit_offset, submit_payload(0, 1, Sampling(10))),
        (sizes.cancel_slots, layout.channel_cancel_offset, cancel_payload(0)),
    ):
        for slot in range(slots):
            at = base + offset + slot * (len(record) + WORD)
            transport.write(at, record)
            transport.commit(at + len(record), arena.pack_commit_word(1, lease))
    transport.flush(PATIENCE)


@pytest.mark.parametrize("held", [False, True], ids=["never held", "held"])
def test_what_an_earlier_holder_left_under_the_next_lease_is_not_taken(site: Site, held: bool) -> None:
    """Whether it had a lease or only the keys, and whatever it left for leases that come later."""
    site.device.script = lambda s: Script([s.prompt[0]], Finish.STOP)
    entrance = site.enter()
    if held:
        site.lease(entrance)
    for lease in (1, 2):
        plant(site, entrance.transport, site.device.channels[0].lease + lease)
        entrance.registration.revoke()
        client = site.client()
        for _ in range(20):
            site.step(client)
            assert client.poll() == []
        assert (site.device.submissions, site.device.cancelled) == ([], [])
        entrance = site.enter()
    client = site.client()
    assert ask(client, [5]) == 0
    assert tokens_of(poll_until_over(site, client, 1)[0]) == [5]
    assert [s.prompt for s in site.device.submissions] == [(5,)]
    assert site.device.channels[0].protocol_errors == 0


def end_lease(site: Site, client: ChannelClient, ends: str) -> None:
    """Of channel 0."""
    if ends == "given back":
        client.give_back()
    else:
        site.device.lease_timeout = 0.0
    site.until(lambda: site.step() and not site.device.channels[0].live)
    site.device.lease_timeout = 60.0


def log_of(site: Site, transport: Transport) -> bytes:
    """All of channel 0's log, as a front end sees it."""
    whole = Range(site.log(), 16 * site.device.sizes.log_slots)
    ticket = transport.fetch(whole)
    site.until(lambda: transport.fetched(ticket))
    return transport.read(whole.offset, whole.size)


@pytest.mark.parametrize("ends", ["given back", "expired"])
def test_a_new_holder_reads_nothing_of_an_earlier_ones_answers(site: Site, ends: str) -> None:
    """Nor does one that has the keys and asks for no lease; whether they were read or not."""
    site.device.script = lambda s: Script([s.prompt[0] + i for i in range(20)], Finish.STOP)
    earlier = site.enter()
    client = site.lease(earlier)
    ask(client, [10], 50)
    poll_until_over(site, client, 1)
    ask(client, [30], 50)
    site.until(lambda: site.step() and site.device.channels[0].log_next >= 28)
    assert any(log_of(site, earlier.transport))
    end_lease(site, client, ends)
    earlier.registration.revoke()
    later = site.enter()
    assert not any(log_of(site, later.transport))
    client = site.lease(later)
    assert not any(log_of(site, later.transport))
    position = ask(client, [50], 50)
    assert tokens_of(poll_until_over(site, client, 1)[position or 0]) == list(range(50, 70))


@pytest.mark.parametrize("ends", ["given back", "expired"])
def test_an_old_prompt_cannot_be_told(site: Site, ends: str) -> None:
    """Nor one that was written when its lease had ended already."""
    earlier = site.enter()
    client = site.lease(earlier)
    ask(client, [41, 42, 43])
    poll_until_over(site, client, 1)
    end_lease(site, client, ends)
    earlier.transport.write(site.heap() + 4, struct.pack("<2I", 44, 45))
    earlier.transport.flush(PATIENCE)
    earlier.registration.revoke()
    later = site.enter()
    site.lease(later)
    record, second = submit_payload(0, 3, Sampling(0, logprobs=1, prompt_logprobs=True)), 128
    ring = site.inbound.channel_offset(0) + site.inbound.channel_submit_offset + second
    later.transport.write(ring, record)
    later.transport.commit(ring + len(record), arena.pack_commit_word(1, 2))
    site.until(lambda: site.step() and len(site.device.submissions) == 2)
    assert [s.prompt for s in site.device.submissions] == [(41, 42, 43), (0, 0, 0)]


def test_a_front_end_commits_nothing_before_it_sees_its_lease(site: Site) -> None:
    entrance = site.enter()
    client = ChannelClient(entrance.transport, site.geometry(), 0)
    client.fetch()
    client.ask_lease(1)
    ring = site.inbound.channel_offset(0) + site.inbound.channel_submit_offset
    commits = [ring + slot * 128 + 120 for slot in range(site.device.sizes.submit_slots)]
    assert ask(client, [5]) is None
    entrance.transport.flush(PATIENCE)
    assert [site.written(at) for at in commits] == [0] * len(commits)
    site.until(lambda: site.step(client) and client.take_lease())
    assert ask(client, [5]) == 0
    poll_until_over(site, client, 1)
    assert [s.prompt for s in site.device.submissions] == [(5,)]


def test_two_front_ends_on_one_runtime_do_not_meet(site: Site) -> None:
    site.device.script = lambda s: Script([s.prompt[0] + i for i in range(20)], Finish.STOP)
    clients = [site.client(0), site.client(1)]
    positions = [ask(client, [10 + 50 * i], 50) for i, client in enumerate(clients)]
    for i, client in enumerate(clients):
        news = poll_until_over(site, client, 1)
        assert tokens_of(news[positions[i] or 0]) == [10 + 50 * i + k for k in range(20)]
    assert sorted(s.channel for s in site.device.submissions) == [0, 1]


def test_one_front_end_on_two_runtimes(new_site: Callable[..., Site]) -> None:
    sites = [new_site(epoch=1), new_site(epoch=7)]
    clients = []
    for i, site in enumerate(sites):
        site.device.script = lambda s, i=i: Script([10 * i + k for k in range(5)], Finish.STOP)  # type: ignore[misc]
        clients.append(site.client())
    for i, (site, client) in enumerate(zip(sites, clients, strict=True)):
        position = ask(client, [1], 50)
        news = poll_until_over(site, client, 1)
        assert tokens_of(news[position or 0]) == [10 * i + k for k in range(5)]
        assert len(site.device.submissions) == 1


def test_a_new_epoch_has_a_new_arena_and_is_not_mistaken_for_the_old_one(new_site: Callable[..., Site]) -> None:
    old, new = new_site(epoch=1), new_site(epoch=2)
    entrance = new.enter()
    with pytest.raises(ChannelError):
        ChannelClient(entrance.transport, old.geometry(), 0)
    client = new.lease(entrance)
    assert ask(client, [1]) == 0
    poll_until_over(new, client, 1)
    assert old.device.submissions == []


def test_the_telemetry_page_is_kept_up_to_date(site: Site) -> None:
    client = site.client()

    def beats() -> bool:
        client.beat(struct.unpack("<Q", struct.pack("<Q", site.device._beats + 1000))[0])
        site.device.turn()
        return client.telemetry()["heartbeat"] > before

    before = client.telemetry()["heartbeat"]
    site.until(beats)
