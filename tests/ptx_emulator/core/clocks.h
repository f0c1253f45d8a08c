// Who knows of what: vector clocks. An agent is a thread, or one lane of work of an asynchronous engine.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace ptx {

// `seen`: what happened before, to be relied on by generic accesses and, of asynchronous accesses, by all.
// `fenced`: the generic accesses that a proxy fence lies behind, so that asynchronous accesses may rely on them.
struct Clocks {
  std::vector<uint32_t> seen, fenced;

  void Resize(size_t agents) {
    seen.assign(agents, 0);
    fenced.assign(agents, 0);
  }
  void Know(uint32_t agent, uint32_t clock) {
    if (agent >= seen.size()) return;
    seen[agent] = std::max(seen[agent], clock);
    fenced[agent] = std::max(fenced[agent], clock);
  }
};

inline void JoinInto(std::vector<uint32_t>& to, const std::vector<uint32_t>& from) {
  uint32_t* a = to.data();
  const uint32_t* b = from.data();
  const size_t n = std::min(to.size(), from.size());
  for (size_t i = 0; i < n; ++i) a[i] = a[i] > b[i] ? a[i] : b[i];
}

inline void Join(Clocks& to, const Clocks& from) {
  JoinInto(to.seen, from.seen);
  JoinInto(to.fenced, from.fenced);
}

inline bool Knows(const Clocks& clocks, const std::vector<uint32_t>& of) {
  bool all = true;
  for (size_t i = 0; i < of.size(); ++i) all &= clocks.seen[i] >= of[i];
  return all;
}

// What both know.
inline void Meet(Clocks& to, const Clocks& from) {
  for (size_t i = 0; i < to.seen.size(); ++i) {
    to.seen[i] = std::min(to.seen[i], from.seen[i]);
    to.fenced[i] = std::min(to.fenced[i], from.fenced[i]);
  }
}

}  // namespace ptx
