// The texts of faults.
#include <algorithm>

#include "machine.h"

namespace ptx {

void Machine::Fail(const char* kind, const Site& site, std::string message) {
  faults.push_back({kind, std::move(message), site});
  throw Stop{};
}

std::string Machine::NameAgent(const Access& access, const Cluster& cluster) const {
  const uint32_t threads = static_cast<uint32_t>((options_.block.count() + 31) / 32 * 32);
  const int line = program_.instructions[access.pc()].line;
  if (access.cluster != cluster.number) return Text("line %d in another cluster", line);
  const uint32_t ctas = static_cast<uint32_t>(cluster.ctas.size());
  if (access.base < ctas * threads) {
    const Dim3 id = cluster.ctas[access.base / threads]->id;
    return Text("line %d, CTA (%u, %u, %u) warp %u lanes %#010x", line, id.x, id.y, id.z, access.base % threads / 32,
                access.lanes);
  }
  return Text(access.has(kAsync) ? "the asynchronous operation of line %d" : "a warp at line %d", line);
}

void Machine::Race(const char* space, const Site& site, const Access& before, bool before_writes, bool now_writes,
                   uint64_t offset, const Cluster& cluster, const std::string& where) {
  if (reported_races_[{before.pc(), site.pc}]++ > 0) return;
  faults.push_back(
      {"race",
       Text("%s, byte %llu%s%s: this %s and an earlier %s are not ordered. The earlier one: %s `%s`", space,
            static_cast<unsigned long long>(offset), where.empty() ? "" : " of ", where.c_str(),
            now_writes ? "write" : "read", before_writes ? "write" : "read", NameAgent(before, cluster).c_str(),
            before.has(kAsync) ? "asynchronous proxy" : "generic proxy"),
       site});
  if (static_cast<int>(faults.size()) >= options_.max_faults) throw Stop{};
}

std::string Machine::Describe(Warp& warp, const Fragment& fragment) {
  const Dim3 id = warp.cta->id;
  std::string text = Text("\n  CTA (%u, %u, %u) warp %d lanes %#010x at line %d waits for ", id.x, id.y, id.z, warp.id,
                          fragment.mask, program_.instructions[fragment.pc].line);
  const Wait& wait = fragment.wait;
  switch (wait.kind) {
    case Wait::kMbarrier: {
      const Mbarrier& barrier = wait.cta->barriers.at(wait.number);
      text += Text(
          "parity %llu of the mbarrier at byte %u of CTA rank %u: phase %u lacks %lld of %u arrivals and %lld "
          "bytes; events:%s",
          static_cast<unsigned long long>(wait.value), wait.number - kReservedShared, wait.cta->rank, barrier.phase,
          static_cast<long long>(barrier.pending), barrier.expected, static_cast<long long>(barrier.bytes),
          History(barrier).c_str());
      break;
    }
    case Wait::kNamedBarrier: {
      const NamedBarrier& barrier = wait.cta->named[wait.number];
      text += Text("named barrier %u: %u of %u threads are there", wait.number, barrier.arrived, barrier.expected);
      break;
    }
    case Wait::kClusterBarrier:
      text += "the cluster's barrier";
      break;
    case Wait::kBulkGroups:
      text += "bulk copies";
      break;
    case Wait::kLanes:
      text += Text("lanes %#010x of its warp", wait.number & warp.live & ~fragment.mask);
      break;
    case Wait::kTmem:
      text += Text("%u columns of TMEM", wait.number);
      break;
    case Wait::kPeer:
      text += "the other CTA of its pair to allocate TMEM";
      break;
    case Wait::kRegisters:
      text += Text("%u registers, of which %u are free", wait.number, wait.cta->free_registers);
      break;
    case Wait::kNothing:
      text += "nothing";
      break;
  }
  return text;
}

void Machine::Deadlock() {
  std::string text = "nothing can go on:";
  Site site;
  for (const auto& cluster : clusters_) {
    for (const auto& cta : cluster->ctas) {
      for (Warp& warp : cta->warps) {
        for (const Fragment& fragment : warp.fragments) {
          if (site.warp < 0) site = Here(warp, fragment.pc, fragment.mask);
          text += Describe(warp, fragment);
        }
      }
    }
  }
  Fail("deadlock", site, text);
}

}  // namespace ptx
