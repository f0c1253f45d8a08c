#include "timeline.h"

#include <algorithm>

#include "faults.h"

namespace ptx {

void CtaTimeline::TensorBusy(double start, double end) {
  if (!tensor_busy.empty() && start <= tensor_busy.back().end && start >= tensor_busy.back().start) {
    tensor_busy.back().end = std::max(tensor_busy.back().end, end);
  } else {
    tensor_busy.push_back({start, end});
  }
}

namespace {

std::vector<Interval> Joined(std::vector<Interval> intervals) {
  std::sort(intervals.begin(), intervals.end(), [](const Interval& a, const Interval& b) { return a.start < b.start; });
  std::vector<Interval> joined;
  for (const Interval& interval : intervals) {
    if (!joined.empty() && interval.start <= joined.back().end) {
      joined.back().end = std::max(joined.back().end, interval.end);
    } else {
      joined.push_back(interval);
    }
  }
  return joined;
}

}  // namespace

std::string ToJson(const std::vector<CtaTimeline*>& ctas, const Program& program) {
  std::string json = "{\"ctas\": [";
  double end = 0, busy_total = 0, span_total = 0;
  for (size_t i = 0; i < ctas.size(); ++i) {
    CtaTimeline& cta = *ctas[i];
    const std::vector<Interval> busy = Joined(cta.tensor_busy);
    double busy_cycles = 0;
    std::string busy_json;
    for (const Interval& interval : busy) {
      busy_cycles += interval.end - interval.start;
      busy_json += Text("%s[%.0f, %.0f]", busy_json.empty() ? "" : ", ", interval.start, interval.end);
    }
    std::sort(cta.in_flight.begin(), cta.in_flight.end());
    std::string bytes_json;
    int64_t bytes = 0;
    double area = 0, last = cta.start;
    for (size_t j = 0; j < cta.in_flight.size(); ++j) {
      area += static_cast<double>(bytes) * (cta.in_flight[j].first - last);
      last = cta.in_flight[j].first;
      bytes += cta.in_flight[j].second;
      if (j + 1 < cta.in_flight.size() && cta.in_flight[j + 1].first == last) continue;
      bytes_json += Text("%s[%.0f, %lld]", bytes_json.empty() ? "" : ", ", last, static_cast<long long>(bytes));
    }
    const double span = std::max(cta.end - cta.start, 1.0);
    end = std::max(end, cta.end);
    busy_total += busy_cycles;
    span_total += span;
    std::string warps;
    for (size_t w = 0; w < cta.waits.size(); ++w) {
      std::string waits;
      double waited = 0;
      for (const WaitInterval& wait : cta.waits[w]) {
        waited += wait.end - wait.start;
        waits += Text("%s[%.0f, %.0f, %d]", waits.empty() ? "" : ", ", wait.start, wait.end,
                      program.instructions[wait.pc].line);
      }
      warps += Text("%s{\"warp\": %zu, \"end\": %.0f, \"busy\": %.0f, \"waited\": %.0f, \"waits\": [", w ? ", " : "", w,
                    cta.ends[w], cta.issued[w], waited) +
               waits + "]}";
    }
    json += Text(
                "%s{\"cta\": [%u, %u, %u], \"start\": %.0f, \"end\": %.0f, \"tensor_busy_cycles\": %.0f, "
                "\"tensor_idle_cycles\": %.0f, \"mean_bytes_in_flight\": %.0f, \"tensor_busy\": [",
                i ? ", " : "", cta.id.x, cta.id.y, cta.id.z, cta.start, cta.end, busy_cycles, span - busy_cycles,
                area / span) +
            busy_json + "], \"bytes_in_flight\": [" + bytes_json + "], \"warps\": [" + warps + "]}";
  }
  return json + Text("], \"cycles\": %.0f, \"tensor_busy_fraction\": %.4f}", end,
                     span_total > 0 ? busy_total / span_total : 0);
}

}  // namespace ptx
