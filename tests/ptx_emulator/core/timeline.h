// A simple cost model: when what is busy. It ranks designs; it does not predict microseconds. All times are cycles.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "program.h"

namespace ptx {

// Rates and latencies, of one multiprocessor. costs.py has what each is and where its default comes from.
struct Costs {
  double instruction = 0, shared_load = 0, global_load = 0, shuffle = 0, barrier = 0, tma_latency = 0,
         store_latency = 0;
  double memory_bytes = 0, l2_bytes = 0, shared_bytes = 0;  // a cycle
  double wgmma_products = 0, tcgen05_products = 0;          // multiply-adds a cycle
};

struct Interval {
  double start = 0, end = 0;
};

struct WaitInterval : Interval {
  uint32_t pc = 0;
};

// What happened in one CTA.
struct CtaTimeline {
  Dim3 id;
  double start = 0, end = 0;
  double schedulers[4] = {};                          // when each may issue again
  double tensor_cores[4] = {};                        // when each is free
  double memory = 0, stores = 0;                      // when the CTA's share of memory, and its bulk stores, are free
  std::vector<Interval> tensor_busy;                  // overlapping ones are joined
  std::vector<std::pair<double, int64_t>> in_flight;  // (time, change of the bytes that loads are waiting for)
  std::vector<std::vector<WaitInterval>> waits;       // by warp
  std::vector<double> issued;                         // cycles that each warp spent on instructions
  std::vector<double> ends;

  void TensorBusy(double start, double end);
};

std::string ToJson(const std::vector<CtaTimeline*>& ctas, const Program& program);

}  // namespace ptx
