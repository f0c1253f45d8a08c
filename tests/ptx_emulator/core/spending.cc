// What things cost by the cost model of timeline.h.
#include <algorithm>

#include "machine.h"

namespace ptx {

// The time of an instruction: its scheduler's turn, and what the warp's next instruction waits for.
void Machine::Spend(Warp& warp, const Instr& instr) {
  CtaTimeline& cta = *warp.cta->timeline;
  double& scheduler = cta.schedulers[warp.id % 4];
  const double issue = std::max(warp.time, scheduler);
  scheduler = issue + 1;
  double latency = costs.instruction;
  switch (instr.op()) {
    case Op::ld:
      latency = instr.space() == Space::shared  ? costs.shared_load
                : instr.space() == Space::param ? costs.instruction
                                                : costs.global_load;
      break;
    case Op::shfl:
    case Op::vote:
      latency = costs.shuffle;
      break;
    case Op::tc_ld:
      latency = costs.shared_load;
      break;
    case Op::st:
      if (instr.space() == Space::global) {
        const double bytes = 32.0 * instr.bits / 8 * instr.count;
        cta.memory = std::max(cta.memory, issue) + bytes / costs.memory_bytes;
      }
      break;
    default:
      break;
  }
  warp.time = issue + latency;
  cta.issued[static_cast<size_t>(warp.id)] += latency;
}

// How long a bulk load takes what one multiprocessor has of memory, or of L2, which gives what it gave before.
double Machine::LoadCycles(uint64_t bytes, uint64_t address) {
  if (!options_.timeline) return 0;
  return static_cast<double>(bytes) / (fetched_.insert(address).second ? costs.memory_bytes : costs.l2_bytes);
}

// When a bulk load that starts now has come, of whose cycles this CTA pays so many.
double Machine::LoadReady(Cta& cta, uint64_t bytes, double cycles) {
  if (!options_.timeline) return 0;
  CtaTimeline& timeline = *cta.timeline;
  timeline.memory = std::max(timeline.memory, now_) + cycles;
  const double ready = std::max(timeline.memory, now_) + costs.tma_latency;
  timeline.in_flight.emplace_back(now_, static_cast<int64_t>(bytes));
  timeline.in_flight.emplace_back(ready, -static_cast<int64_t>(bytes));
  return ready;
}

// When a bulk store that starts now has read shared memory. It also takes its share of memory.
double Machine::StoreReady(Cta& cta, uint64_t bytes) {
  if (!options_.timeline) return 0;
  CtaTimeline& timeline = *cta.timeline;
  timeline.memory = std::max(timeline.memory, now_) + static_cast<double>(bytes) / costs.memory_bytes;
  timeline.stores = std::max(timeline.stores, now_) + static_cast<double>(bytes) / costs.shared_bytes;
  return timeline.stores + costs.store_latency;
}

double Machine::TensorReady(Cta& cta, int core, double products, double rate, double earliest) {
  CtaTimeline& timeline = *cta.timeline;
  const double start = std::max(timeline.tensor_cores[core], earliest), end = start + products / rate;
  timeline.tensor_cores[core] = end;
  timeline.TensorBusy(start, end);
  return end;
}

}  // namespace ptx
