// The scheduler's step, from the tokens that were sampled to the plan of what is computed next.
#pragma once
#include "scheduler/cancel.h"
#include "scheduler/emit.h"
#include "scheduler/harvest.h"
#include "scheduler/intake.h"
#include "scheduler/steady.h"
#include "scheduler/telemetry.h"

namespace blink {

BLINK_FN arena::DeviceState device_state_of(layout::Command command) {
  switch (command) {
    case layout::Command::DRAIN:
      return arena::DeviceState::DRAINING;
    case layout::Command::STOP:
      return arena::DeviceState::STOPPED;
    default:
      return arena::DeviceState::RUNNING;
  }
}

// harvest → publish → intake → cancel → plan → emit → launch. `launch(header)` runs on one thread as soon as it is
// known which step graph comes next: what it starts begins when this step has ended.
template <class Exec, class Launch>
BLINK_FN void full_step(const Exec& exec, State& state, uint64_t now_ns, layout::Command command, Launch launch) {
  harvest(exec, state);
  keep_prompts(exec, state);
  publish(exec, state);
  exec.leader([&] {
    state.steady = state.scoring = 0;
    state.draining = command != layout::Command::RUN;
    state.header = layout::StepHeader{};
    state.header.stopped = command == layout::Command::STOP;
  });
  watch_channels(exec, state, now_ns);
  intake(exec, state);
  cancel(exec, state);
  if (command != layout::Command::STOP) {
    plan(exec, state);
    emit(exec, state, launch);
    prepare_steady(exec, state);
  }
  write_telemetry(exec, state, device_state_of(command));
}

// A whole step, the short way where that leads to the same.
template <class Exec>
BLINK_FN void step(const Exec& exec, State& state, uint64_t now_ns, layout::Command command) {
  foresee(exec, state, now_ns);
  const auto runs = [&] { return command == layout::Command::RUN; };
  if (settle(exec, *state.foreseen, runs, [] {})) return;
  full_step(exec, state, now_ns, command, [](const layout::StepHeader&) {});
}

}  // namespace blink
