"""The random histories have teeth: a twin with one wrong rule is found out within a few hundred of them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from blink_proto import arena
from blink_proto.arena import ErrorCode, Finish, RecordKind
from gpu_runtime.scheduler import layout
from tests.property.histories import MIXES, draw_history, draw_limits
from tests.property.limits import Inbound, Limits
from tests.property.twin import Block, Plan, Row, SchedulerTwin, Sequence, Stage
from tests.property.world import World

HISTORIES = 600


class RoomOffByOne(SchedulerTwin):
    """May sample one token more than the log has room for."""

    def log_room(self, channel: int) -> int:
        return super().log_room(channel) + 1


class EndingForgotten(SchedulerTwin):
    """Gives room away that is due to ending sequences."""

    def log_room(self, channel: int) -> int:
        return self.log_free(channel)


class NoLapCheck(SchedulerTwin):
    """Takes records of any lap."""

    def is_committed(self, at: int, position: int, slots: int, lease: int) -> bool:
        lap, holder = arena.unpack_commit_word(self.inbound.words[at // 8])
        return bool(lap != 0 and holder == lease)


class NoLeaseCheck(SchedulerTwin):
    """Takes records of any lease."""

    def is_committed(self, at: int, position: int, slots: int, lease: int) -> bool:
        lap, _ = arena.unpack_commit_word(self.inbound.words[at // 8])
        return bool(lap == 1 + position // slots)


class ForgetsToForget(SchedulerTwin):
    """Leaves all that was written before the lease; others only parts of it."""

    def kept(self, channel: int) -> list[slice]:
        """Bytes of the region."""
        layout, start = self.inbound.layout, self.inbound.layout.channel_offset(channel)
        return [slice(start + layout.channel_submit_offset, start + layout.channel_bytes)]

    def wipe_inbound(self, channel: int) -> None:
        before = [(part, self.inbound.bytes[part].copy()) for part in self.kept(channel)]
        super().wipe_inbound(channel)
        for part, found in before:
            self.inbound.bytes[part] = found


class KeepsCancels(ForgetsToForget):
    """Leaves the cancel ring."""

    def kept(self, channel: int) -> list[slice]:
        start = self.inbound.cancel_at(channel, 0)
        return [slice(start, start + 16 * self.limits.cancel_slots)]


class KeepsPrompts(ForgetsToForget):
    """Leaves the heap."""

    def kept(self, channel: int) -> list[slice]:
        start = 4 * self.inbound.heap_at(channel)
        return [slice(start, start + 4 * self.limits.heap_tokens)]


class KeepsLastPrompt(ForgetsToForget):
    """Leaves the last word of the heap."""

    def kept(self, channel: int) -> list[slice]:
        end = 4 * (self.inbound.heap_at(channel) + self.limits.heap_tokens)
        return [slice(end - 4, end)]


class KeepsRecords(ForgetsToForget):
    """Wipes only the commit words of submissions: the rest could be committed again, salts included."""

    def kept(self, channel: int) -> list[slice]:
        starts = [self.inbound.submit_at(channel, slot) for slot in range(self.limits.submit_slots)]
        return [slice(start, start + 120) for start in starts]


class WipesNextSlots(SchedulerTwin):
    """Wipes only the commit words of the records that would be taken first."""

    def wipe_inbound(self, channel: int) -> None:
        state = self.channels[channel]
        self.inbound.words[self.inbound.submit_commit_at(channel, state.submit_read)] = 0
        self.inbound.words[self.inbound.cancel_commit_at(channel, state.cancel_read)] = 0


class WipesAfterTelling(SchedulerTwin):
    """Wipes when the front end may already have written."""

    def __init__(self, limits: Limits, inbound: Inbound) -> None:
        super().__init__(limits, inbound)
        self.told = set[int]()

    def wipe_inbound(self, channel: int) -> None:
        self.told.add(channel)

    def intake(self, now_ns: int, command: int) -> None:
        for channel in self.told:
            super().wipe_inbound(channel)
        self.told.clear()
        super().intake(now_ns, command)


class WipesWhenLeasesEnd(SchedulerTwin):
    """Wipes prompts when a lease ends, and not what is written behind that."""

    def drop_channel(self, channel: int) -> None:
        if self.channels[channel].live:
            super().wipe_inbound(channel)
        super().drop_channel(channel)

    def wipe_inbound(self, channel: int) -> None:
        pass


class KeepsAnswers(SchedulerTwin):
    """Leaves the log of a lease that has ended."""

    def wipe_log(self, channel: int) -> None:
        pass


class KeepsAnswersForTheNext(SchedulerTwin):
    """Wipes the log only when the next lease begins: whoever has the keys may have read it by then."""

    def wipe_log(self, channel: int) -> None:
        if self.inbound.words[self.inbound.control_at(channel, "lease")] == self.channels[channel].lease + 1:
            super().wipe_log(channel)


class KeepsAnswersUnread(SchedulerTwin):
    """Wipes the records that were read."""

    def wipe_log(self, channel: int) -> None:
        state = self.channels[channel]
        unread = {self.outbound.log_at(channel, at) for at in range(state.log_read, len(state.history))}
        for slot in range(self.limits.log_slots):
            if (at := self.outbound.log_at(channel, slot)) not in unread:
                self.outbound.words[at] = self.outbound.words[at + 1] = 0


class ForgetsPlaces(SchedulerTwin):
    """Begins the log anew with each lease."""

    def wipe_inbound(self, channel: int) -> None:
        super().wipe_inbound(channel)
        self.channels[channel].history.clear()


class NoReservation(SchedulerTwin):
    """Admits what fits now."""

    def reservation(self, sequence: Sequence) -> int:
        return self.blocks_for(len(sequence.tokens))


class ReservesLastToken(SchedulerTwin):
    """Keeps a position for the last token, which is never computed."""

    def reservation(self, sequence: Sequence) -> int:
        return self.blocks_for(sequence.prompt + sequence.max_tokens)


class AdmitsOutOfOrder(SchedulerTwin):
    """Lets a small sequence pass one that does not fit."""

    def admit(self) -> list[Sequence]:
        running = [each for each in self.arrived if each.stage is Stage.RUNNING]
        for sequence in [each for each in self.arrived if each.stage is Stage.WAITING]:
            if len(running) < self.limits.max_running and self.try_to_admit(sequence):
                running.append(sequence)
        return [each for each in self.arrived if each.stage is Stage.RUNNING]


class DecodesWait(SchedulerTwin):
    """Serves strictly in order of arrival, decodes not first."""

    def share_out(self, running: list[Sequence]) -> tuple[list[Sequence], list[tuple[Sequence, int]]]:
        decodes, chunks = super().share_out(running)
        ones = [(each, 1) for each in decodes]
        return [], sorted(ones + chunks, key=lambda share: running.index(share[0]))


class CapsTheOldest(SchedulerTwin):
    """Gives the log's room to the newest sequences."""

    def capped(self, running: list[Sequence]) -> list[Sequence]:
        return super().capped(running[::-1])


class IgnoresFlag(SchedulerTwin):
    """The model's stop tokens always stop."""

    def is_stop(self, sequence: Sequence, token: int) -> bool:
        return token in sequence.stops or token in self.limits.eos_tokens


class FlagCoversStops(SchedulerTwin):
    """IGNORE_EOS switches the submission's own stop tokens off too."""

    def is_stop(self, sequence: Sequence, token: int) -> bool:
        return not sequence.ignore_eos and super().is_stop(sequence, token)


class TakesBadSample(SchedulerTwin):
    """Believes the token that equals the vocabulary's size."""

    def spoils(self, row: Row, token: int) -> bool:
        return super().spoils(row, token - (token == self.limits.vocab_size))


class TurnStays(SchedulerTwin):
    """The first channel always comes first."""

    def intake(self, now_ns: int, command: int) -> None:
        self.turn = 0
        super().intake(now_ns, command)


class TakesWhileDraining(SchedulerTwin):
    """Goes on taking submissions."""

    def intake(self, now_ns: int, command: int) -> None:
        super().intake(now_ns, layout.Command.RUN)


class LateExpiry(SchedulerTwin):
    """A lease lives one nanosecond too long."""

    def __init__(self, limits: Limits, inbound: Inbound) -> None:
        super().__init__(replace(limits, lease_timeout_ns=limits.lease_timeout_ns + 1), inbound)


class KeepsSequencesOfLostLease(SchedulerTwin):
    """A lost lease leaves the sequences alone."""

    def drop_channel(self, channel: int) -> None:
        self.channels[channel].live = False


class CountsErrorEachStep(SchedulerTwin):
    """Counts a bad cursor in every step."""

    def see_log_read(self, channel: int) -> None:
        self.channels[channel].log_read_word = 2**64
        super().see_log_read(channel)


class BelievesAnyCursor(SchedulerTwin):
    """A read cursor may go back."""

    def see_log_read(self, channel: int) -> None:
        super().see_log_read(channel)
        state = self.channels[channel]
        if state.live:
            state.log_read = min(state.log_read_word, len(state.history))


class WrongErrorOrder(SchedulerTwin):
    """Checks the sampling before all else."""

    def validate(self, channel: int, record: np.void) -> ErrorCode:
        if not self.sampling_is_sound(record):
            return ErrorCode.BAD_SAMPLING
        return super().validate(channel, record)


class PromptRangeWraps(SchedulerTwin):
    """Checks the prompt's range in 32 bits."""

    def validate(self, channel: int, record: np.void) -> ErrorCode:
        error = super().validate(channel, record)
        end = (int(record["prompt_offset"]) + int(record["prompt_tokens"])) % 2**32
        passes = error is ErrorCode.BAD_PROMPT_RANGE and 0 < end <= self.limits.heap_tokens
        return ErrorCode.CONTEXT_LENGTH if passes else error


class BiasRangeWraps(SchedulerTwin):
    """Checks the range of the bias entries in 32 bits."""

    def bias_is_sound(self, channel: int, record: np.void) -> bool:
        end = (int(record["bias_offset"]) + 2 * int(record["bias_count"])) % 2**32
        beyond = int(record["bias_offset"]) > self.limits.heap_tokens
        return (beyond and end <= self.limits.heap_tokens) or super().bias_is_sound(channel, record)


class BiasInAnyOrder(SchedulerTwin):
    """Takes bias entries that name a token twice."""

    def bias_is_sound(self, channel: int, record: np.void) -> bool:
        entries = self.bias(channel, record) if 0 < int(record["bias_count"]) * 2 <= self.limits.heap_tokens else []
        repeated = bool(entries) and all(entry == (0, 1.0) for entry in entries)
        return repeated or super().bias_is_sound(channel, record)


class BanRangeWraps(SchedulerTwin):
    """Checks the range of the banned sequences in 32 bits."""

    def bans_are_sound(self, channel: int, record: np.void) -> bool:
        place = int(record["bias_offset"]) + 2 * int(record["bias_count"])
        beyond = bool(record["ban_words"]) and place > self.limits.heap_tokens
        wrapped = (place + int(record["ban_words"])) % 2**32 <= self.limits.heap_tokens
        return (beyond and wrapped) or super().bans_are_sound(channel, record)


class BansOfOneToken(SchedulerTwin):
    """Takes a banned sequence of a single token."""

    def bans_are_sound(self, channel: int, record: np.void) -> bool:
        words = self.readable_bans(channel, record)
        return (len(words) == 2 and words[0] == 2**31 + 1) or super().bans_are_sound(channel, record)

    def readable_bans(self, channel: int, record: np.void) -> list[int]:
        """The words, where they lie in the heap."""
        end = int(record["bias_offset"]) + 2 * int(record["bias_count"]) + int(record["ban_words"])
        return self.ban_words(channel, record) if end <= self.limits.heap_tokens else []


class BansThatEndEarly(BansOfOneToken):
    """Takes a banned sequence that is longer than what is left."""

    def bans_are_sound(self, channel: int, record: np.void) -> bool:
        words = self.readable_bans(channel, record)
        cut = len(words) > 1 and words[0] - 2**31 >= len(words) and max(words[1:]) < self.limits.vocab_size
        return cut or SchedulerTwin.bans_are_sound(self, channel, record)


class LogprobsTakeNoRoom(SchedulerTwin):
    """Keeps room for the token alone."""

    def records_of(self, sequence: Sequence) -> int:
        return 1


class LightPassesHeavy(SchedulerTwin):
    """A sequence whose records fit passes one whose records do not."""

    def capped(self, running: list[Sequence]) -> list[Sequence]:
        found, due = [], [0] * self.limits.channels
        for sequence in running:
            if due[sequence.channel] + self.records_of(sequence) > self.log_room(sequence.channel):
                found.append(sequence)
            else:
                due[sequence.channel] += self.records_of(sequence)
        return found


class BadSampleBringsLogprobs(SchedulerTwin):
    """Writes log-probabilities after an END too."""

    def append(self, sequence: Sequence, kind: RecordKind, token: int) -> None:
        super().append(sequence, kind, token)
        if sequence.detail is ErrorCode.BAD_SAMPLE:
            self.append_logprobs(sequence, [(1, 2, 3)])


class MinTokensOffByOne(SchedulerTwin):
    """Masks stop tokens for one token longer."""

    def new_sequence(self, channel: int, record: np.void) -> Sequence:
        sequence = super().new_sequence(channel, record)
        sequence.min_tokens += sequence.min_tokens > 0
        return sequence


class ReadsBiasLate(SchedulerTwin):
    """Reads the bias entries from the heap when the sequence samples."""

    def __init__(self, limits: Limits, inbound: Inbound) -> None:
        super().__init__(limits, inbound)
        self.records: dict[Sequence, np.void] = {}

    def new_sequence(self, channel: int, record: np.void) -> Sequence:
        sequence = super().new_sequence(channel, record)
        self.records[sequence] = record
        return sequence

    def sample_row(self, sequence: Sequence, token_index: int, position: int) -> Row:
        if sequence.extras is not None:
            entries = self.bias(sequence.channel, self.records[sequence])
            sequence.extras = replace(sequence.extras, bias=entries)
        return super().sample_row(sequence, token_index, position)


class ReadsBansLate(ReadsBiasLate):
    """Reads the banned sequences from the heap when the sequence samples."""

    def sample_row(self, sequence: Sequence, token_index: int, position: int) -> Row:
        if sequence.extras is not None:
            sequence.extras = replace(sequence.extras, bans=self.bans(sequence.channel, self.records[sequence]))
        return SchedulerTwin.sample_row(self, sequence, token_index, position)


class NoClasses(SchedulerTwin):
    """Queues by arrival alone."""

    def enter(self, sequence: Sequence) -> None:
        self.arrived.append(sequence)


class PassesItsOwnClass(SchedulerTwin):
    """The last come of a class is the first served."""

    def enter(self, sequence: Sequence) -> None:
        sequence.priority -= 1
        super().enter(sequence)
        sequence.priority += 1


class UnsignedClasses(SchedulerTwin):
    """Takes a negative class for the last one."""

    def new_sequence(self, channel: int, record: np.void) -> Sequence:
        sequence = super().new_sequence(channel, record)
        sequence.priority %= 2**32
        return sequence


class EndTakesNoRoom(SchedulerTwin):
    """Keeps no room for the END record of a prompt that is only scored."""

    def records_of(self, sequence: Sequence) -> int:
        return 1 + sequence.logprobs


class FirstScoresAll(SchedulerTwin):
    """Gives all rows that are left to the first sequence that scores its prompt."""

    def scored(self, running: list[Sequence], capped: list[Sequence]) -> dict[int, int]:
        found = super().scored(running, capped)
        alone = {} if not found else super().scored(running, [each for each in running if id(each) != min(found)])
        return dict.fromkeys(found, 1) | alone


class ScoresBeyondTheLog(SchedulerTwin):
    """Looks at the rows that are left alone, not at the log."""

    def scored(self, running: list[Sequence], capped: list[Sequence]) -> dict[int, int]:
        rows = self.limits.max_running - len(running)
        found = super().scored(running, capped)
        return {key: 1 + rows // len(found) for key in found}


class NeverScoresAlone(SchedulerTwin):
    """Wants a token generated even where the prompt is scored."""

    def validate(self, channel: int, record: np.void) -> ErrorCode:
        error = super().validate(channel, record)
        none = int(record["max_tokens"]) == 0 and error in (ErrorCode.NONE, *list(ErrorCode)[4:])
        return ErrorCode.BAD_MAX_TOKENS if none else error


class PromptTokensEnd(SchedulerTwin):
    """Says how a sequence ended with its last scored token too."""

    def append_prompt_token(self, sequence: Sequence, token: int) -> None:
        self.append(sequence, RecordKind.PROMPT_TOKEN, token)


class BelievesScores(SchedulerTwin):
    """Takes the log-probabilities of a known token even where the step came to no token."""

    def spoils(self, row: Row, token: int) -> bool:
        return not row.known and super().spoils(row, token)


class ScoresTheFirstToken(SchedulerTwin):
    """Has a row for each token of the prompt but the last, where it should be the first that has none."""

    def has_row(self, sequence: Sequence, position: int) -> bool:
        return super().has_row(sequence, position) and position != sequence.prompt - 1


class CancelsOnce(SchedulerTwin):
    """Takes one cancel record a channel and step."""

    def cancel_target(self, channel: int, target: int) -> bool:
        if self.cancelled_in[channel] == self.count["heartbeat"]:
            return False
        self.cancelled_in[channel] = self.count["heartbeat"]
        return super().cancel_target(channel, target)

    def __init__(self, limits: Limits, inbound: Inbound) -> None:
        super().__init__(limits, inbound)
        self.cancelled_in = [-1] * limits.channels


class CancelTargetCut(SchedulerTwin):
    """Looks at the low half of a cancel's target."""

    def cancel_target(self, channel: int, target: int) -> bool:
        return super().cancel_target(channel, target % 2**32)


class LengthOffByOne(SchedulerTwin):
    """Generates a token too many."""

    def new_sequence(self, channel: int, record: np.void) -> Sequence:
        sequence = super().new_sequence(channel, record)
        sequence.max_tokens += 1
        return sequence


class ReadsPromptLate(SchedulerTwin):
    """Reads the prompt from the heap when it is computed, not when the submission is taken."""

    def __init__(self, limits: Limits, inbound: Inbound) -> None:
        super().__init__(limits, inbound)
        self.records: dict[Sequence, np.void] = {}

    def new_sequence(self, channel: int, record: np.void) -> Sequence:
        sequence = super().new_sequence(channel, record)
        self.records[sequence] = record
        return sequence

    def admit(self) -> list[Sequence]:
        running = super().admit()
        for each in running:
            each.tokens[: each.prompt] = self.prompt(each.channel, self.records[each])
        return running


class TokensAreEnough(SchedulerTwin):
    """Takes a cached block for its own tokens, whatever comes before it."""

    def cached(self, sequence: Sequence, index: int, parent: Block | None) -> Block | None:
        tokens = self.block_tokens(sequence, index)
        return next((each for each in self.cache if each.tokens == tokens and each.salt == sequence.salt), None)


class SaltForgotten(SchedulerTwin):
    """Shares blocks whatever the salt."""

    def new_sequence(self, channel: int, record: np.void) -> Sequence:
        return replace(super().new_sequence(channel, record), salt=0)


class WholePromptFound(SchedulerTwin):
    """Finds the prompt's last token too."""

    def look_up(self, sequence: Sequence) -> list[Block]:
        sequence.prompt += 1
        found = super().look_up(sequence)
        sequence.prompt -= 1
        return found


class ScoredPromptsFound(SchedulerTwin):
    """Looks up prompts whose log-probabilities are wanted."""

    def look_up(self, sequence: Sequence) -> list[Block]:
        return super().look_up(replace(sequence, prompt_logprobs=False))


class SharedCountTwice(SchedulerTwin):
    """Reserves a shared block for everybody who holds it."""

    def needed_in_all(self) -> int:
        return sum(self.reservation(each) for each in self.holding)


class IdleAreFree(SchedulerTwin):
    """Forgets that what an admitted sequence has found is no longer there for others."""

    def needed_in_all(self) -> int:
        return super().needed_in_all() - sum(block in self.idle for block in self.holding[-1].shared)


class PromptsKeptAtTheEnd(SchedulerTwin):
    """Shares nothing of what still runs."""

    def keep_prompts(self) -> None:
        pass


class AnswersForgotten(SchedulerTwin):
    """Keeps prompts alone."""

    def keep(self, sequence: Sequence, blocks: int) -> None:
        super().keep(sequence, min(blocks, sequence.prompt // self.limits.block_tokens))


class CancelledForgotten(SchedulerTwin):
    """Keeps no answers that were cancelled."""

    def keep(self, sequence: Sequence, blocks: int) -> None:
        if sequence.finish is not Finish.CANCELLED:
            super().keep(sequence, blocks)


class FailedKept(SchedulerTwin):
    """Keeps what led to no token."""

    def let_go(self) -> None:
        failed = [each for each in self.holding if each.finish is Finish.ERROR]
        for each in failed:
            self.keep(each, each.computed // self.limits.block_tokens)
        super().let_go()


class KeepsItsOwn(SchedulerTwin):
    """Does not take the block that is there already."""

    def keep(self, sequence: Sequence, blocks: int) -> None:
        for index in range(len(sequence.shared), blocks if self.limits.prefix_cache else 0):
            if self.cached(sequence, index, sequence.shared[-1] if sequence.shared else None) is not None:
                return
            super().keep(sequence, index + 1)


class ParentsFirst(SchedulerTwin):
    """Evicts a prompt's beginning before its end."""

    def is_held(self, block: Block) -> bool:
        held = super().is_held(block)
        if not held:
            self.idle.insert(0, block)
        return True


class NewestFirst(SchedulerTwin):
    """Evicts what was used last."""

    def evict(self, plan: Plan) -> None:
        self.idle.reverse()
        super().evict(plan)
        self.idle.reverse()


class EvictsTheLeast(SchedulerTwin):
    """Evicts only what the plan needs at once."""

    def evict(self, plan: Plan) -> None:
        short = self.new_blocks(plan) - (self.limits.blocks - 1 - self.held() - len(self.idle))
        evicted, self.idle = self.idle[: max(0, short)], self.idle[max(0, short) :]
        self.cache = [each for each in self.cache if each not in evicted]


class FoundIsForgotten(SchedulerTwin):
    """Does not tell what was found."""

    def append(self, sequence: Sequence, kind: RecordKind, token: int) -> None:
        found, sequence.found = sequence.found, 0
        super().append(sequence, kind, token)
        sequence.found = found


def mutants() -> list[type[SchedulerTwin]]:
    """All of this file."""
    kinds = [each for each in globals().values() if isinstance(each, type) and issubclass(each, SchedulerTwin)]
    return [each for each in kinds if each is not SchedulerTwin]


def disagrees(twin_type: type[SchedulerTwin], seed: int) -> bool:
    """Whether one history shows a difference."""
    rng = Random(seed)
    world = World(draw_limits(rng.randint), twin_type)
    try:
        for action in draw_history(rng.randint, world.limits, 60, MIXES[seed % len(MIXES)]):
            world.apply(action)
        world.finish()
    except (AssertionError, StopIteration, IndexError):
        return True
    return False


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.__name__)
def test_mutant_is_found(mutant: type[SchedulerTwin]) -> None:
    assert any(disagrees(mutant, seed) for seed in range(HISTORIES)), mutant.__doc__


def test_the_twin_itself_is_not() -> None:
    assert not any(disagrees(SchedulerTwin, seed) for seed in range(200))
