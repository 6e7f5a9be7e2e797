// The relay between an arena in host memory and the one that the scheduler looks at, on emulated threads, behind the
// host library's interface: the regions that a caller gives are the front ends' side, the scheduler has its own.
// BLINK_DIRECT says whose front ends reach the scheduler's by themselves, as through a network card that is played
// here.
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "fibers.h"

// After the emulation of CUDA. All of the host's interface but these four is taken as it is.
#define blink_scheduler_create blink_scheduler_create_on_host
#define blink_scheduler_destroy blink_scheduler_destroy_on_host
#define blink_scheduler_step blink_scheduler_step_on_host
#define blink_scheduler_poll blink_scheduler_poll_on_host
#include "scheduler/host.cpp"
#undef blink_scheduler_create
#undef blink_scheduler_destroy
#undef blink_scheduler_step
#undef blink_scheduler_poll
#include "chain/relay.cuh"

#ifndef BLINK_DIRECT
#define BLINK_DIRECT 0
#endif

namespace {

constexpr uint32_t kThreads = 256;

struct Relay {
  uint8_t *inbound, *outbound;              // the scheduler's
  uint8_t *front_inbound, *front_outbound;  // the front ends'
  uint8_t *host_inbound, *host_outbound;    // what the relay takes for the front ends'
  blink::layout::ChainBoard board{};
  uint64_t now_ns = 0;
  bool given = false;
};

std::map<blink_scheduler*, Relay> relays;

fibers::Block& block() {
  static fibers::Block made(kThreads, 11);
  return made;
}

// The relay takes a submission over once. The histories' front ends change prompts of submissions that wait, and their
// twin reads them when it takes them: so that both read the same, whatever waits is taken over again.
void forget_waiting(const State& state) {
  for (uint32_t c = 0; c < state.config.channels; ++c) {
    for (uint32_t slot = 0; slot < state.config.submit_slots; ++slot) blink::submit_ring(state, c)[slot].commit = 0;
  }
}

bool is_direct(uint32_t c) { return uint64_t{BLINK_DIRECT} >> c & 1; }

// What front ends wrote comes to where it belongs. In host memory a direct channel has the words of a front end that
// has come back to what is no longer its own.
void deliver(const State& state, Relay& relay) {
  const auto& layout = state.inbound_layout;
  for (uint32_t c = 0; c < state.config.channels; ++c) {
    const uint64_t at = layout.channel_offset(c), size = layout.channel_bytes;
    std::memcpy(relay.host_inbound + at, relay.front_inbound + at, size);
    if (!is_direct(c)) continue;
    std::memcpy(relay.inbound + at, relay.front_inbound + at, size);
    auto* stale = reinterpret_cast<blink::arena::ChannelIn*>(relay.host_inbound + at + layout.channel_control_offset);
    ++stale->lease, ++stale->heartbeat, ++stale->log_read;
  }
}

// What the scheduler published, from where it is read, and what was cleared of the front ends' rings.
void fetch(const State& state, Relay& relay) {
  const auto& own = state.inbound_layout;
  for (uint32_t c = 0; c < state.config.channels; ++c) {
    const uint64_t at = own.channel_offset(c);
    std::memcpy(relay.front_inbound + at, (is_direct(c) ? relay.inbound : relay.host_inbound) + at, own.channel_bytes);
  }
  const auto& layout = state.outbound_layout;
  std::memcpy(relay.front_outbound, relay.host_outbound, layout.total_bytes);
  for (uint32_t c = 0; c < state.config.channels; ++c) {
    const uint64_t at = layout.channel_offset(c);
    if (is_direct(c)) std::memcpy(relay.front_outbound + at, relay.outbound + at, layout.channel_bytes);
  }
}

// Host memory keeps the prompts and answers of earlier leases, of which the twin knows nothing: forgets them there too.
void forget_earlier(const State& state, const Relay& relay, const std::vector<blink::Channel>& before) {
  const auto& in = state.inbound_layout;
  const auto& out = state.outbound_layout;
  for (uint32_t c = 0; c < state.config.channels; ++c) {
    const bool begun = state.channels[c].lease != before[c].lease;
    if (is_direct(c) || (!begun && state.channels[c].live == before[c].live)) continue;
    const uint64_t log = out.channel_offset(c) + out.channel_log_offset, rings = in.channel_submit_offset;
    std::memset(relay.host_outbound + log, 0, out.channel_bytes - out.channel_log_offset);
    if (begun) std::memset(relay.host_inbound + in.channel_offset(c) + rings, 0, in.channel_bytes - rings);
  }
}

void pull(blink_scheduler* scheduler) {
  Relay& relay = relays.at(scheduler);
  forget_waiting(scheduler->state);
  if (BLINK_DIRECT) deliver(scheduler->state, relay);
  relay.now_ns += blink::kLongestTrustNs;  // the histories ring no bell
  block().run([&] { blink::pull(scheduler->state, relay.board, relay.now_ns); });
}

void push(blink_scheduler* scheduler) {
  Relay& relay = relays.at(scheduler);
  block().run([&] {
    const State& state = scheduler->state;
    for (uint32_t c = threadIdx.x / blink::kLanes; c < state.config.channels; c += kThreads / blink::kLanes) {
      blink::push_records(state, relay.board, c);
    }
    __syncthreads();
    if (threadIdx.x < state.config.channels) blink::push_words(state, relay.board, threadIdx.x);
    if (threadIdx.x < sizeof(blink::arena::Telemetry) / 8) blink::push_telemetry(state, relay.board, threadIdx.x);
  });
  if (BLINK_DIRECT) fetch(scheduler->state, relay);
}

uint8_t *given_inbound = nullptr, *given_outbound = nullptr;

uint8_t* zeroed(size_t bytes) {
  auto* made = static_cast<uint8_t*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
  std::memset(made, 0, bytes);
  return made;
}

}  // namespace

extern "C" {

BLINK_EXPORT blink_scheduler* blink_scheduler_create(const SchedulerConfig* config, uint8_t* inbound,
                                                     size_t inbound_bytes, uint8_t* outbound, size_t outbound_bytes) {
  const bool given = given_inbound != nullptr;
  Relay relay{given ? given_inbound : zeroed(inbound_bytes), given ? given_outbound : zeroed(outbound_bytes), inbound,
              outbound};
  relay.given = given;
  relay.host_inbound = BLINK_DIRECT ? zeroed(inbound_bytes) : relay.front_inbound;
  relay.host_outbound = BLINK_DIRECT ? zeroed(outbound_bytes) : outbound;
  relay.board.host_inbound = reinterpret_cast<uintptr_t>(relay.host_inbound);
  relay.board.host_outbound = reinterpret_cast<uintptr_t>(relay.host_outbound);
  relay.board.direct = BLINK_DIRECT;
  auto* made = blink_scheduler_create_on_host(config, relay.inbound, inbound_bytes, relay.outbound, outbound_bytes);
  if (made == nullptr) return nullptr;
  relays[made] = relay;
  return made;
}

BLINK_EXPORT void blink_scheduler_destroy(blink_scheduler* scheduler) {
  const auto found = relays.find(scheduler);
  if (found == relays.end()) return;
  blink_scheduler_destroy_on_host(scheduler);
  const Relay& relay = found->second;
  if (!relay.given) {
    for (uint8_t* memory : {relay.inbound, relay.outbound}) std::free(memory);
  }
  if (BLINK_DIRECT) {
    for (uint8_t* memory : {relay.host_inbound, relay.host_outbound}) std::free(memory);
  }
  relays.erase(found);
}

BLINK_EXPORT void blink_scheduler_step(blink_scheduler* scheduler, uint64_t now_ns, uint32_t command) {
  pull(scheduler);
  const State& state = scheduler->state;
  const std::vector<blink::Channel> before(state.channels, state.channels + state.config.channels);
  blink_scheduler_step_on_host(scheduler, now_ns, command);
  forget_earlier(state, relays.at(scheduler), before);
  push(scheduler);
}

// One pull as the chain makes it, which trusts the bell; whether the idle poll would go on waiting after it.
BLINK_EXPORT int blink_relay_pull(blink_scheduler* scheduler, uint64_t now_ns) {
  Relay& relay = relays.at(scheduler);
  block().run([&] { blink::pull(scheduler->state, relay.board, now_ns); });
  return blink::bell_of(scheduler->state, relay.board) == relay.board.bell_polled;
}

// A step without a pull in front.
BLINK_EXPORT void blink_relay_step(blink_scheduler* scheduler, uint64_t now_ns) {
  blink_scheduler_step_on_host(scheduler, now_ns, 0);
  push(scheduler);
}

// Which channels are direct from the next pull on.
BLINK_EXPORT void blink_relay_set_direct(blink_scheduler* scheduler, uint64_t direct) {
  relays.at(scheduler).board.direct = direct;
}

// Which ones the last pull left alone.
BLINK_EXPORT uint64_t blink_relay_direct_seen(blink_scheduler* scheduler) {
  return relays.at(scheduler).board.direct_seen;
}

// The scheduler's own regions, where a network card writes and reads.
BLINK_EXPORT uint8_t* blink_relay_inbound(blink_scheduler* scheduler) { return relays.at(scheduler).inbound; }
BLINK_EXPORT uint8_t* blink_relay_outbound(blink_scheduler* scheduler) { return relays.at(scheduler).outbound; }

// Whether the idle poll would go on waiting, as far as the scheduler's own regions say.
BLINK_EXPORT int blink_relay_rests(blink_scheduler* scheduler) { return !blink::has_news(scheduler->state); }

// There are no local front ends.
BLINK_EXPORT void blink_relay_all_direct(blink_scheduler* scheduler) {
  blink::layout::ChainBoard& board = relays.at(scheduler).board;
  board.host_inbound = 0;
  board.direct = board.direct_seen = ~uint64_t{0};
}

// Whether an idle chain would go on.
BLINK_EXPORT int blink_relay_is_wanted(blink_scheduler* scheduler) {
  return blink::is_wanted(scheduler->state, relays.at(scheduler).board);
}

// A step as a chain makes it: pull, scheduler, push.
BLINK_EXPORT void blink_relay_turn(blink_scheduler* scheduler, uint64_t now_ns, uint32_t command) {
  Relay& relay = relays.at(scheduler);
  if (relay.board.host_inbound != 0) block().run([&] { blink::pull(scheduler->state, relay.board, now_ns); });
  blink_scheduler_step_on_host(scheduler, now_ns, command);
  push(scheduler);
}

// The next scheduler's own regions, zeroed, on pages.
BLINK_EXPORT void blink_relay_lie_in(uint8_t* inbound, uint8_t* outbound) {
  given_inbound = inbound;
  given_outbound = outbound;
}

BLINK_EXPORT int blink_scheduler_poll(blink_scheduler* scheduler, const uint64_t* command, uint64_t expected,
                                      uint64_t timeout_ns) {
  pull(scheduler);
  return blink_scheduler_poll_on_host(scheduler, command, expected, timeout_ns);
}

}  // extern "C"
