// Who knows of what: vector clocks. An agent is a thread, or one lane of work of an asynchronous engine.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace ptx {

// What a proxy fence may or may not be for: shared memory of its CTA, of other CTAs, global memory, tensor maps in it.
enum SpaceClass : int { kOwnShared, kOtherShared, kGlobalSpace, kTensorMaps, kSpaceClasses };
constexpr int kNoProxies = -2;  // instead of the number of a fence, where there are no proxies to tell apart
constexpr int kOfPlace = -3;    // the fence that is for the place

// `seen`: what happened before, to be relied on by generic accesses and, of asynchronous accesses, by all.
// `fenced`: the generic accesses that a proxy fence lies behind, so that asynchronous accesses may rely on them; one
// for all spaces that the same fences of the program are for, so mostly one.
struct Clocks {
  std::vector<uint32_t> seen;
  std::array<std::vector<uint32_t>, kSpaceClasses> fenced;

  void Resize(size_t agents, int fences) {
    seen.assign(agents, 0);
    for (int i = 0; i < fences; ++i) fenced[static_cast<size_t>(i)].assign(agents, 0);
  }
  void Clear() {
    std::fill(seen.begin(), seen.end(), 0);
    for (auto& of : fenced) std::fill(of.begin(), of.end(), 0);
  }
  void Know(uint32_t agent, uint32_t clock) {
    if (agent >= seen.size()) return;
    seen[agent] = std::max(seen[agent], clock);
    for (auto& of : fenced) {
      if (!of.empty()) of[agent] = std::max(of[agent], clock);
    }
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
  for (size_t i = 0; i < to.fenced.size(); ++i) JoinInto(to.fenced[i], from.fenced[i]);
}

inline bool Knows(const Clocks& clocks, const std::vector<uint32_t>& of) {
  constexpr size_t kBlock = 32;
  for (size_t at = 0; at < of.size(); at += kBlock) {
    const size_t end = std::min(at + kBlock, of.size());
    bool all = true;
    for (size_t i = at; i < end; ++i) all &= clocks.seen[i] >= of[i];
    if (!all) return false;
  }
  return true;
}

// What both know.
inline void Meet(Clocks& to, const Clocks& from) {
  const auto meet = [](std::vector<uint32_t>& a, const std::vector<uint32_t>& b) {
    for (size_t i = 0; i < a.size(); ++i) a[i] = std::min(a[i], b[i]);
  };
  meet(to.seen, from.seen);
  for (size_t i = 0; i < to.fenced.size(); ++i) meet(to.fenced[i], from.fenced[i]);
}

}  // namespace ptx
