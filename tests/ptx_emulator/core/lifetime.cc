// How warps, CTAs and clusters end: what must be over by then.
#include <algorithm>

#include "machine.h"

namespace ptx {

// What a warp must not leave behind.
void Machine::FinishWarp(Warp& warp) {
  const auto check = [&](const BulkGroup& group) {
    for (const auto& op : group.ops) {
      if (op->waited) continue;
      Fail(
          "protocol", Here(warp, op->pc, group.lanes),
          "the thread ends, and has not waited until this copy has read shared memory (cp.async.bulk.wait_group.read)");
    }
  };
  for (const BulkGroup& group : warp.groups) check(group);
  check(warp.open_group);
  if (warp.early) Fail("protocol", warp.early_site, "an accumulator is used, and no wgmma.wait_group follows");
  Cta& cta = *warp.cta;
  for (NamedBarrier& barrier : cta.named) {  // who is there waits for one warp less
    if (barrier.arrived == 0 || !barrier.of_all) continue;
    barrier.expected -= 32;
    FinishNamedPhase(barrier);
  }
  if (std::all_of(cta.warps.begin(), cta.warps.end(), [](const Warp& other) { return other.done(); })) FinishCta(cta);
  FinishClusterPhase(*cta.cluster);
}

// Others than its threads touch the shared memory of a CTA: other CTAs, and asynchronous operations.
void Machine::NoteUse(const Site& site, Cta& cta, const Actor& actor) {
  if (cta.ended) {
    Fail("protocol", site, Text("CTA (%u, %u, %u) has ended: its shared memory is gone", cta.id.x, cta.id.y, cta.id.z));
  }
  if (!options_.races) return;
  const uint32_t base = actor.access.base;
  Access& last = cta.last_use;  // an operation mostly goes on with what it began
  if (last.base == base && last.clock == actor.access.clock && last.lanes == actor.access.lanes) return;
  last = actor.access;
  CheckBegun(site, cta, *actor.clocks);
  for (uint32_t lanes = actor.access.lanes; lanes != 0; lanes &= lanes - 1) {
    const uint32_t lane = static_cast<uint32_t>(__builtin_ctz(lanes));
    Access& use = cta.uses[base + lane];
    if (use.clock > actor.access.clock) continue;
    use = actor.access;
    use.lanes = 1u << lane;
  }
}

// What the four warps of a warpgroup must do alike.
void Machine::CheckWarpgroups(const Cta& cta) {
  for (size_t group = 0; group < cta.warpgroups.size(); ++group) {
    for (const auto& [serial, product] : cta.warpgroups[group].tiles) {
      if (product.users == 4) continue;
      Fail("protocol", {product.pc, cta.id, static_cast<int>(4 * group), ~0u},
           Text("%d of the 4 warps of warpgroup %zu issue this product", product.users, group));
    }
  }
  for (const Warp& warp : cta.warps) {
    const Warp& first = cta.warps[static_cast<size_t>(warp.id) / 4 * 4];
    for (size_t i = 0; i < std::max(warp.requests.size(), first.requests.size()); ++i) {
      const Warp& one = i < warp.requests.size() ? warp : first;
      const Warp& other = i < warp.requests.size() ? first : warp;
      if (i < other.requests.size() && other.requests[i].registers == one.requests[i].registers) continue;
      Fail(
          "protocol", {one.requests[i].pc, cta.id, one.id, ~0u},
          Text("warp %d of the same warpgroup does not ask for %u registers too", other.id, one.requests[i].registers));
    }
  }
}

// What a CTA must not leave behind. Its threads know of all that was over before it ended.
void Machine::FinishCta(Cta& cta) {
  cta.ended = true;
  for (size_t id = 0; id < cta.named.size(); ++id) {
    const NamedBarrier& barrier = cta.named[id];
    if (barrier.arrived == 0) continue;
    Fail("protocol", barrier.last,
         Text("the CTA ends, and only %u of %u threads are at named barrier %zu", barrier.arrived, barrier.expected,
              id));
  }
  CheckWarpgroups(cta);
  if (!options_.races) return;
  std::vector<uint32_t> known(cta.cluster->agents);
  for (const Warp& warp : cta.warps) {
    for (const Clocks& clocks : warp.lanes) JoinInto(known, clocks.seen);
  }
  const auto check = [&](const Access& use, uint32_t agent, const char* what) {
    if (use.lanes == 0 || known[agent] >= use.clock) return;
    Fail("protocol", {use.pc(), cta.id, -1, 0},
         Text("CTA (%u, %u, %u) ends, and nothing orders before that %s: by %s", cta.id.x, cta.id.y, cta.id.z, what,
              NameAgent(use, *cta.cluster).c_str()));
  };
  for (uint32_t agent = 0; agent < cta.uses.size(); ++agent) {
    check(cta.uses[agent], agent, "an access to its shared memory");
  }
  for (const auto& [offset, barrier] : cta.barriers) {
    // Who waited for the phase of an arrival was behind it, even if that released nothing.
    const uint32_t first = cta.first_agent;
    bool observed = false;
    for (size_t agent = first; agent < std::min<size_t>(barrier.observed.size(), first + cta.agents); ++agent) {
      observed = observed || barrier.observed[agent] >= static_cast<int64_t>(barrier.relaxed_phase);
    }
    if (observed || barrier.relaxed.lanes == 0) continue;
    check(barrier.relaxed, barrier.relaxed.base + static_cast<uint32_t>(__builtin_ctz(barrier.relaxed.lanes)),
          "an arrival at its mbarrier");
  }
}

void Machine::FinishCluster(Cluster& cluster) {
  while (RunAsync(cluster)) {
  }
  for (const auto& cta : cluster.ctas) {
    for (const auto& [offset, barrier] : cta->barriers) {
      if (!barrier.live || barrier.bytes == 0) continue;
      Fail("barrier", {barrier.init.pc(), cta->id, -1, 0},
           Text("at the end of the CTA %lld bytes are still expected by the mbarrier at byte %u; events:%s",
                static_cast<long long>(barrier.bytes), offset - kReservedShared, History(barrier).c_str()));
    }
    if (cta->tmem != nullptr && !cta->tmem->allocations.empty()) {
      Fail(
          "protocol", {static_cast<uint32_t>(program_.instructions.size() - 1), cta->id, -1, 0},
          Text("%u columns of TMEM are still allocated at the end of the CTA", cta->tmem->allocations.begin()->second));
    }
  }
}

}  // namespace ptx
