"""The channel protocol against a scripted device, step by step, over shared memory."""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from blink_proto import arena
from blink_proto.arena import Finish, RecordKind
from dpu_service.channel.client import ChannelClient, LeaseState
from dpu_service.channel.errors import ChannelError, LeaseLostError
from dpu_service.channel.geometry import Geometry
from dpu_service.channel.news import News
from dpu_service.channel.prompt import SharedPrompt
from dpu_service.channel.rings import Sampling
from dpu_service.transport.base import TransportError
from dpu_service.transport.shm import ShmTransport
from tests.replay import ReplayDevice, Script

SIZES = arena.Sizes(channels=2, submit_slots=4, cancel_slots=2, log_slots=8, heap_tokens=64)
beats = itertools.count(1)


@pytest.fixture
def device() -> Iterator[ReplayDevice]:
    made = ReplayDevice(SIZES, vocab_size=100, window=50)
    made.turn()
    yield made
    made.close()


def geometry(device: ReplayDevice) -> Geometry:
    sizes = device.sizes
    return Geometry(
        layout_hash=arena.LAYOUT_HASH,
        version=arena.VERSION,
        channels=sizes.channels,
        submit_slots=sizes.submit_slots,
        cancel_slots=sizes.cancel_slots,
        log_slots=sizes.log_slots,
        heap_tokens=sizes.heap_tokens,
        inbound_bytes=len(device.inbound),
        outbound_bytes=len(device.outbound),
        nonce=device.nonce,
        epoch=device.epoch,
        vocab_size=device.vocab_size,
        max_model_tokens=device.window,
        max_sequence_tokens=device.window,
    )


def transport(device: ReplayDevice) -> ShmTransport:
    return ShmTransport(device.blob(), len(device.inbound), len(device.outbound))


def attach(device: ReplayDevice, channel: int = 0) -> ChannelClient:
    client = ChannelClient(transport(device), geometry(device), channel)
    client.ask_lease(next(beats))
    assert not client.take_lease()
    device.turn()
    assert client.take_lease()
    return client


def ask(client: ChannelClient, prompt: list[int], max_tokens: int = 10) -> int | None:
    return client.submit(SharedPrompt(prompt, 1), Sampling(max_tokens))


def poll_until_over(client: ChannelClient, device: ReplayDevice, sequences: int) -> dict[int, list[News]]:
    news: dict[int, list[News]] = {}
    over = 0
    for _ in range(500):
        time.sleep(0.0002)
        device.turn()
        for item in client.poll():
            news.setdefault(item.position, []).append(item)
            over += item.finish is not Finish.NONE
        if over == sequences:
            return news
    raise AssertionError("the sequences did not end")


def test_tokens_come_back_in_order_through_a_log_much_smaller_than_they_are(device: ReplayDevice) -> None:
    device.script = lambda s: Script([(s.prompt[0] + i) % 100 for i in range(40)], Finish.STOP)
    client = attach(device)
    first, second = ask(client, [1, 2, 3], 50), ask(client, [50], 50)
    news = poll_until_over(client, device, 2)
    assert first is not None
    assert second is not None
    assert [t for item in news[first] for t in item.tokens] == [1 + i for i in range(40)]
    assert [t for item in news[second] for t in item.tokens] == [(50 + i) % 100 for i in range(40)]
    assert news[first][-1].finish is Finish.STOP
    assert client.tracked == 0
    assert client.heap.used_tokens == 0
    assert device.channels[0].protocol_errors == 0


def test_the_first_token_tells_how_much_of_the_prompt_was_cached(device: ReplayDevice) -> None:
    """Blocks have 16 tokens; of a prompt of 33 two can be cached, of one of 32 just one."""
    device.script = lambda s: Script([7, 8, 9], found=2)
    client = attach(device)
    whole, short = ask(client, [1] * 33), client.submit(SharedPrompt([1] * 30, 1), Sampling(1))
    news = poll_until_over(client, device, 2)
    assert whole is not None
    assert short is not None
    assert sum(item.cached for item in news[whole]) == 32
    assert [token for item in news[whole] for token in item.tokens] == [7, 8, 9]
    assert [item.fault for item in news[short]] == ["more cached tokens than the prompt has"]


@pytest.mark.parametrize("size", [0, 4097, 2**32 - 1])
def test_blocks_of_an_impossible_size_are_refused(device: ReplayDevice, size: int) -> None:
    at = arena.OutboundLayout(SIZES).header_offset + arena.ARENA_HEADER_OFFSETS["block_tokens"]
    device.outbound[at : at + 4] = struct.pack("<I", size)
    with pytest.raises(ChannelError, match="impossible size"):
        attach(device)


def test_a_full_submit_ring_refuses_until_the_device_takes(device: ReplayDevice) -> None:
    client = attach(device)
    device.taking = False
    assert [ask(client, [i]) for i in range(1, 6)] == [0, 1, 2, 3, None]
    device.turn()
    client.poll()
    assert ask(client, [9]) is None
    device.taking = True
    device.turn()
    client.poll()
    assert ask(client, [9]) == 4


def test_a_full_heap_refuses_until_a_sequence_has_ended(device: ReplayDevice) -> None:
    device.script = lambda s: Script([1], Finish.NONE)
    client = attach(device)
    position = ask(client, [1] * 40)
    assert ask(client, [2] * 30) is None
    device.turn()
    client.poll()
    assert ask(client, [2] * 30) is None, "taken, but not ended"
    assert position is not None
    client.cancel(position)
    poll_until_over(client, device, 1)
    assert ask(client, [2] * 30) is not None


def test_one_prompt_serves_several_sequences_until_the_last_has_ended(device: ReplayDevice) -> None:
    device.script = lambda s: Script([s.seed], Finish.STOP)
    client = attach(device)
    prompt = SharedPrompt([1, 2, 3], users=2)
    client.submit(prompt, Sampling(5, seed=1))
    device.turn()
    assert client.poll()[0].finish is Finish.STOP
    assert client.heap.used_tokens == 3
    client.submit(prompt, Sampling(5, seed=2))
    device.turn()
    client.poll()
    assert client.heap.used_tokens == 0
    assert [s.prompt for s in device.submissions] == [(1, 2, 3)] * 2


def test_a_cancel_is_held_back_until_its_submission_is_taken(device: ReplayDevice) -> None:
    device.script = lambda s: Script([1], Finish.NONE)
    device.taking = False
    client = attach(device)
    positions = [ask(client, [1]) for _ in range(4)]
    for position in positions:
        assert position is not None
        client.cancel(position)
        client.cancel(position)
    assert client.cancels_held == 4
    device.turn()
    assert client.poll() == []
    device.taking = True
    news = poll_until_over(client, device, 4)
    assert [items[-1].finish for items in news.values()] == [Finish.CANCELLED] * 4
    assert sorted(device.cancelled) == [(0, p) for p in range(4)]
    assert device.channels[0].protocol_errors == 0
    assert client.cancels_held == 0


def test_a_new_worker_takes_the_channel_and_hears_nothing_of_the_old_one(device: ReplayDevice) -> None:
    device.script = lambda s: Script([7], Finish.NONE)
    old = attach(device)
    ask(old, [1])
    device.turn()
    new = attach(device)
    assert new.poll() == []
    assert device.playing == 0
    with pytest.raises(LeaseLostError):
        old.poll()
    assert old.state is LeaseState.VACANT
    device.script = lambda s: Script([8], Finish.STOP)
    assert ask(new, [2]) == 1
    device.turn()
    assert [item.tokens for item in new.poll()] == [[8]]


def test_an_expired_lease_is_noticed_and_taken_again(device: ReplayDevice) -> None:
    client = attach(device)
    device.lease_timeout = -1.0
    device.turn()
    with pytest.raises(LeaseLostError):
        client.poll()
    device.lease_timeout = 10.0
    client.ask_lease(next(beats))
    device.turn()
    assert client.take_lease()
    assert device.channels[0].lease == 2


def test_giving_back_ends_the_sequences(device: ReplayDevice) -> None:
    device.script = lambda s: Script([7], Finish.NONE)
    client = attach(device)
    ask(client, [1])
    device.turn()
    client.give_back()
    device.turn()
    assert device.playing == 0
    assert not device.channels[0].live
    assert device.channels[0].protocol_errors == 0


def test_channels_do_not_disturb_each_other(device: ReplayDevice) -> None:
    device.script = lambda s: Script([s.prompt[0]], Finish.STOP)
    clients = [attach(device, 0), attach(device, 1)]
    for i, client in enumerate(clients):
        ask(client, [10 + i])
    device.turn()
    assert [client.poll()[0].tokens for client in clients] == [[10], [11]]


def test_records_of_unknown_sequences_are_counted_and_skipped(device: ReplayDevice) -> None:
    device.script = lambda s: Script([5], Finish.STOP, delay=0.05)
    client = attach(device)
    position = ask(client, [1])
    device.turn()
    device.write_record(0, arena.pack_token_head(0, 1, 0, 77), arena.pack_token_body(0, 0, 3))
    news = poll_until_over(client, device, 1)
    assert position is not None
    assert news[position][-1].tokens == [5]
    assert client.unknown_records == 1


def test_an_impossible_record_ends_its_sequence_alone(device: ReplayDevice) -> None:
    device.script = lambda s: Script([5] * 3, Finish.STOP, delay=0.05)
    client = attach(device)
    bad, good = ask(client, [1]), ask(client, [2])
    device.turn()
    device.write_record(0, arena.pack_token_head(0, 1, 0, 0), arena.pack_token_body(0, 0, 100))
    news = poll_until_over(client, device, 2)
    assert bad is not None
    assert good is not None
    assert news[bad][-1].fault
    assert not news[good][-1].fault


@pytest.mark.parametrize("field", ["nonce", "epoch", "vocab_size", "max_model_tokens"])
def test_an_arena_that_is_not_the_sessions_is_refused(device: ReplayDevice, field: str) -> None:
    told = geometry(device)
    other = msgspec.structs.replace(told, **{field: getattr(told, field) + 1})
    with pytest.raises(ChannelError, match=field):
        ChannelClient(transport(device), other, 0)


@pytest.mark.parametrize("change", [{"layout_hash": 1}, {"submit_slots": 3}, {"channels": 0}, {"inbound_bytes": 64}])
def test_impossible_geometries_are_refused(device: ReplayDevice, change: dict[str, int]) -> None:
    with pytest.raises(ChannelError):
        msgspec.structs.replace(geometry(device), **change).check()
    assert replace(SIZES) == geometry(device).sizes


def test_shm_transport_refuses_what_it_cannot_trust(device: ReplayDevice) -> None:
    sizes = (len(device.inbound), len(device.outbound))
    for blob in (
        b"",
        b"[]",
        b'{"inbound":"/../etc/passwd","outbound":"/x"}',
        b'{"inbound":"/gone","outbound":"/gone"}',
    ):
        with pytest.raises(TransportError):
            ShmTransport(blob, *sizes)
    with pytest.raises(TransportError, match="size"):
        ShmTransport(device.blob(), sizes[0] + 4096, sizes[1])
    shm = transport(device)
    for offset, size in ((-8, 8), (4, 8), (sizes[1], 8), (0, 12)):
        with pytest.raises(TransportError):
            shm.read(offset, size)
    with pytest.raises(TransportError):
        shm.write(sizes[0] - 4, b"12345")
    with pytest.raises(TransportError):
        shm.commit(4, 1)
    shm.close()
    with pytest.raises(TransportError):
        shm.read(0, 8)


def logprob_words(token: int, logprob: float, rank: int) -> tuple[int, int]:
    bits = int.from_bytes(struct.pack("<f", logprob), "little")
    head = arena.pack_logprob_head(0, RecordKind.LOGPROB, rank & 0xFF, bits)
    return head, arena.pack_logprob_body(0, rank >> 8, token)


def token_words(token: int, position: int, finish: Finish = Finish.NONE) -> tuple[int, int]:
    return arena.pack_token_head(0, RecordKind.TOKEN, finish, position), arena.pack_token_body(0, 0, token)


def wanting_logprobs(device: ReplayDevice, count: int) -> ChannelClient:
    """A client whose submission 0 wants log-probabilities, on a device that says nothing by itself."""
    device.script = lambda s: Script([], Finish.NONE)
    client = attach(device)
    assert client.submit(SharedPrompt([1, 2], 1), Sampling(10, logprobs=count)) == 0
    device.turn()
    return client


def test_log_probabilities_come_with_their_tokens(device: ReplayDevice) -> None:
    """Two sequences through a log of 8 records; one wants two log-probabilities a token, the other none."""
    device.script = lambda s: Script([10, 20, 30], Finish.STOP)
    client = attach(device)
    first = client.submit(SharedPrompt([1], 1), Sampling(5, logprobs=2))
    second = ask(client, [2])
    news = poll_until_over(client, device, 2)
    assert first is not None
    assert second is not None
    assert [t for item in news[first] for t in item.tokens] == [10, 20, 30]
    assert [entries for item in news[first] for entries in item.logprobs] == [
        [(token, -0.5, 3), (token + 1, -1.0, 1)] for token in (10, 20, 30)
    ]
    assert [entries for item in news[second] for entries in item.logprobs] == []
    assert client.unknown_records == 0


def test_a_token_waits_for_its_log_probabilities(device: ReplayDevice) -> None:
    """The device's cursor and records may be seen between a token and what belongs to it."""
    client = wanting_logprobs(device, 2)
    device.write_record(0, *token_words(5, 0))
    device.write_record(0, *logprob_words(5, -1.5, 300))
    device.turn()
    assert client.poll() == []
    device.write_record(0, *logprob_words(7, -0.25, 1))
    device.turn()
    (news,) = client.poll()
    assert (news.tokens, news.logprobs) == ([5], [[(5, -1.5, 300), (7, -0.25, 1)]])


def test_log_probabilities_of_the_last_token(device: ReplayDevice) -> None:
    client = wanting_logprobs(device, 1)
    for words in (token_words(5, 0), logprob_words(5, -1, 1), token_words(6, 0, Finish.STOP), logprob_words(6, -2, 2)):
        device.write_record(0, *words)
    device.turn()
    (news,) = client.poll()
    assert (news.tokens, news.logprobs) == ([5, 6], [[(5, -1, 1)], [(6, -2, 2)]])
    assert (news.finish, client.tracked) == (Finish.STOP, 0)


@pytest.mark.parametrize(
    "records",
    [
        [token_words(5, 0), token_words(6, 0), logprob_words(6, -1, 1)],
        [token_words(5, 0), logprob_words(5, -1, 1), logprob_words(5, -1, 1), token_words(5, 0)],
        [token_words(5, 0), logprob_words(100, -1, 1)],
        [token_words(5, 0), logprob_words(5, 0.5, 1)],
        [token_words(5, 0), logprob_words(5, float("nan"), 1)],
    ],
)
def test_impossible_log_probabilities_are_faults(device: ReplayDevice, records: list[tuple[int, int]]) -> None:
    client = wanting_logprobs(device, 1)
    for words in records:
        device.write_record(0, *words)
    device.turn()
    (news,) = client.poll()
    assert news.finish is Finish.ERROR
    assert "log-probab" in news.fault


def test_log_probabilities_of_no_token_are_counted(device: ReplayDevice) -> None:
    client = wanting_logprobs(device, 1)
    device.write_record(0, *logprob_words(5, -1, 1))
    device.turn()
    assert client.poll() == []
    assert client.unknown_records == 1


def prompt_words(token: int, position: int, finish: Finish = Finish.NONE) -> tuple[int, int]:
    return arena.pack_token_head(0, RecordKind.PROMPT_TOKEN, finish, position), arena.pack_token_body(0, 0, token)


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_log_probabilities_of_a_prompt(device: ReplayDevice, max_tokens: int) -> None:
    """Through a log of 8 records, of which a token of the prompt takes three; beside a sequence that wants none."""
    device.script = lambda s: Script([40, 50], Finish.STOP)
    client = attach(device)
    sampling = Sampling(max_tokens, logprobs=2, prompt_logprobs=True)
    first = client.submit(SharedPrompt([1, 20, 30, 4, 5], 1), sampling)
    second = ask(client, [2, 3])
    news = poll_until_over(client, device, 2)
    assert first is not None
    assert second is not None
    assert [entries for item in news[first] for entries in item.prompt_logprobs] == [
        [(token, -0.5, 3), (token + 1, -1.0, 1)] for token in (20, 30, 4, 5)
    ]
    said = [token for item in news[first] for token in item.tokens]
    assert said == ([40, 50] if max_tokens else [])
    assert len([entries for item in news[first] for entries in item.logprobs]) == len(said)
    assert news[first][-1].finish is (Finish.STOP if max_tokens else Finish.LENGTH)
    assert [item.prompt_logprobs for item in news[second]] == [[]] * len(news[second])
    assert (client.unknown_records, client.tracked, client.heap.used_tokens) == (0, 0, 0)


def scoring(device: ReplayDevice, prompt: list[int], max_tokens: int = 9) -> ChannelClient:
    """A client whose submission 0 wants one log-probability for each token of the prompt, on a silent device."""
    device.taking = False
    client = attach(device)
    assert client.submit(SharedPrompt(prompt, 1), Sampling(max_tokens, logprobs=1, prompt_logprobs=True)) == 0
    return client


def test_a_token_of_the_prompt_waits_for_its_log_probabilities(device: ReplayDevice) -> None:
    client = scoring(device, [1, 2, 3])
    for words in (prompt_words(2, 0), logprob_words(2, -1, 7), prompt_words(3, 0)):
        device.write_record(0, *words)
    device.turn()
    (news,) = client.poll()
    assert (news.prompt_logprobs, news.tokens, news.finish) == ([[(2, -1, 7)]], [], Finish.NONE)
    device.write_record(0, *logprob_words(3, float("-inf"), 8))
    device.turn()
    (news,) = client.poll()
    assert news.prompt_logprobs == [[(3, float("-inf"), 8)]]


GOOD = [prompt_words(2, 0), logprob_words(2, -1, 7)]


@pytest.mark.parametrize(
    "records",
    [
        [prompt_words(3, 0), logprob_words(3, -1, 7)],
        [prompt_words(2, 0), token_words(5, 0), logprob_words(5, -1, 1)],
        [*GOOD, *GOOD],
        [*GOOD, logprob_words(2, -1, 7), prompt_words(3, 0)],
        [*GOOD, token_words(5, 0), logprob_words(5, -1, 1)],
        [prompt_words(2, 0, Finish.STOP), logprob_words(2, -1, 7)],
        [*GOOD, (arena.pack_token_head(0, RecordKind.END, Finish.LENGTH, 0), 0)],
        [*GOOD, prompt_words(3, 0), logprob_words(3, -1, 7), prompt_words(3, 0), logprob_words(3, -1, 7)],
        [prompt_words(2, 0), logprob_words(100, -1, 7)],
    ],
)
def test_impossible_records_of_a_prompt_are_faults(device: ReplayDevice, records: list[tuple[int, int]]) -> None:
    client = scoring(device, [1, 2, 3])
    for words in records:
        device.write_record(0, *words)
    device.turn()
    (news,) = client.poll()
    assert (news.finish, bool(news.fault), client.tracked) == (Finish.ERROR, True, 0)


def test_a_sequence_that_wants_none_gets_no_token_of_its_prompt(device: ReplayDevice) -> None:
    client = wanting_logprobs(device, 1)
    for words in (prompt_words(2, 0), logprob_words(2, -1, 7)):
        device.write_record(0, *words)
    device.turn()
    (news,) = client.poll()
    assert "nobody asked" in news.fault


def test_bias_entries_stand_behind_the_prompt(device: ReplayDevice) -> None:
    device.script = lambda s: Script([1], Finish.STOP)
    client = attach(device)
    prompt = SharedPrompt([7, 8, 9], 1, bias=[(3, -100.0), (50, 1.5)])
    assert client.submit(prompt, Sampling(5, min_p=0.5, min_tokens=2)) == 0
    assert client.heap.used_tokens == 7
    device.turn()
    (submission,) = device.submissions
    assert submission.prompt == (7, 8, 9)
    assert submission.bias == ((3, -100.0), (50, 1.5))
    assert (submission.min_p, submission.min_tokens, submission.repetition_penalty) == (0.5, 2, 1)


def test_banned_sequences_stand_behind_the_bias(device: ReplayDevice) -> None:
    device.script = lambda s: Script([1], Finish.STOP)
    client = attach(device)
    first = SharedPrompt([7, 8, 9], 1, bias=[(3, -100.0)], bans=[(4, 5), (6, 7, 8)])
    client.submit(first, Sampling(5))
    client.submit(SharedPrompt([7], 1, bans=[(4, 5)]), Sampling(5))
    assert client.heap.used_tokens == (3 + 2 + 3 + 4) + (1 + 3)
    device.turn()
    both, bans_alone = device.submissions
    assert (both.bias, both.bans) == (((3, -100.0),), ((4, 5), (6, 7, 8)))
    assert (bans_alone.bias, bans_alone.bans) == ((), ((4, 5),))
