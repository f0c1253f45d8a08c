// mbarriers, fences, and what they tell whom.
#include <algorithm>

#include "machine.h"

namespace ptx {

// What lanes know goes into a synchronising object. What they do from now on is later than that.
void Machine::Release(Warp& warp, uint32_t lanes, Clocks& to) {
  if (!options_.races) return;
  for (uint32_t left = lanes; left != 0; left &= left - 1) Join(to, warp.lanes[__builtin_ctz(left)]);
}

// The next access of the warp's lanes is behind everything that was released so far.
void Machine::Tick(Warp& warp) {
  if (!options_.races) return;
  ++warp.clock;
  for (int l = 0; l < 32; ++l) warp.lanes[l].seen[warp.agent + l] = warp.clock;
}

void Machine::Acquire(Warp& warp, uint32_t lanes, const Clocks& from) {
  if (!options_.races) return;
  for (uint32_t left = lanes; left != 0; left &= left - 1) Join(warp.lanes[__builtin_ctz(left)], from);
}

// What follows a thing that someone did follows his CTA's beginning, also where nothing was released or acquired.
void Machine::TellBegun(const Cluster& cluster, const Clocks& from, Clocks& to) const {
  for (uint32_t rank = 0; rank < cluster.ctas.size(); ++rank) {
    const uint32_t agent = cluster.first_begun + rank;
    if (from.seen[agent] != 0) to.Know(agent, 1);
  }
}

// The CTAs of a cluster are there at the same time, and begin when they like. Until one has, its shared memory may be
// somebody else's.
void Machine::CheckBegun(const Site& site, const Cta& cta, const Clocks& clocks) {
  if (clocks.seen[cta.cluster->first_begun + cta.rank] != 0) return;
  Fail(
      "protocol", site,
      Text(
          "CTA (%u, %u, %u) may not have begun: nothing orders that before this access to its shared memory. A barrier "
          "of the cluster would",
          cta.id.x, cta.id.y, cta.id.z));
}

Mbarrier& Machine::Barrier(const Site& site, Cluster& cluster, uint32_t address, SharedPlace* place) {
  *place = Shared(site, cluster, address, 8, 8);
  const auto found = place->cta->barriers.find(place->offset);
  if (found == place->cta->barriers.end() || !found->second.live) {
    Fail("barrier", site,
         Text("no mbarrier was initialised at byte %u of shared memory of CTA rank %u", place->offset - kReservedShared,
              place->cta->rank));
  }
  return found->second;
}

// The init of a barrier must be known to who uses it.
void Machine::CheckBarrierUse(const Site& site, Mbarrier& barrier, const Clocks& clocks, bool async, uint32_t offset) {
  if (!options_.races) return;
  Access now;
  now.cluster = barrier.init.cluster;
  if (!Ordered(barrier.init, now, clocks)) {
    Fail("race", site,
         Text("the mbarrier at byte %u is used, and nothing orders its init (line %d) before", offset - kReservedShared,
              program_.instructions[barrier.init.pc()].line));
  }
  if (async && !barrier.init_fenced) {
    Fail("race", site,
         Text("the mbarrier at byte %u is used by the asynchronous proxy, and no fence.mbarrier_init or "
              "fence.proxy.async is between that and its init (line %d)",
              offset - kReservedShared, program_.instructions[barrier.init.pc()].line));
  }
}

// Whoever used a barrier must be known to who puts an end to it.
void Machine::CheckBarrierEnd(const Site& site, const Mbarrier& barrier, const Clocks& clocks, const Cluster& cluster,
                              uint32_t offset) {
  if (!options_.races) return;
  int64_t latest = -1;  // phase that anyone saw: its arrivals are over, also those that released nothing
  for (const int64_t phase : barrier.observed) latest = std::max(latest, phase);
  for (uint32_t agent = 0; agent < barrier.uses.size(); ++agent) {
    const BarrierUse& use = barrier.uses[agent];
    if (clocks.seen[agent] >= use.clock || (use.released_by >= 0 && use.released_by <= latest)) continue;
    Access access;
    access.cluster = barrier.init.cluster;
    access.base = static_cast<uint16_t>(agent / 32 * 32);
    access.lanes = 1u << agent % 32;
    access.pc_flags = use.pc | (agent >= cluster.first_begun ? kAsync : 0);
    Fail("race", site,
         Text("mbarrier.inval of the mbarrier at byte %u, and nothing orders a use of it before: %s",
              offset - kReservedShared, NameAgent(access, cluster).c_str()));
  }
}

void Machine::Note(Mbarrier& barrier, const char* what, const Site& site, int64_t value) {
  if (!barrier.events.empty()) {
    BarrierEvent& last = barrier.events.back();
    if (last.pc == site.pc && last.warp == site.warp && last.cta.x == site.cta.x && last.cta.y == site.cta.y &&
        last.cta.z == site.cta.z && last.value == value && last.phase == barrier.phase) {
      ++last.times;
      return;
    }
  }
  if (barrier.events.size() >= 16) barrier.events.pop_front();
  barrier.events.push_back({what, site.pc, site.cta, site.warp, value, barrier.phase, 1});
}

std::string Machine::History(const Mbarrier& barrier) const {
  std::string text;
  for (const BarrierEvent& event : barrier.events) {
    const std::string times = event.times > 1 ? Text(" (%d times)", event.times) : "";
    text += Text("\n    phase %u: %s %lld%s by CTA (%u, %u, %u) warp %d, line %d", event.phase, event.what,
                 static_cast<long long>(event.value), times.c_str(), event.cta.x, event.cta.y, event.cta.z, event.warp,
                 program_.instructions[event.pc].line);
  }
  return text;
}

void Machine::FinishPhase(const Site& site, Mbarrier& barrier, uint32_t offset) {
  if (barrier.pending < 0) {
    Fail("barrier", site,
         Text("more arrivals than the %u that a phase of the mbarrier at byte %u expects (phase %u); events:%s",
              barrier.expected, offset - kReservedShared, barrier.phase, History(barrier).c_str()));
  }
  if (barrier.pending != 0) return;
  if (barrier.bytes < 0) {
    Fail("barrier", site,
         Text("%lld bytes more than expected came to the mbarrier at byte %u (phase %u); events:%s",
              static_cast<long long>(-barrier.bytes), offset - kReservedShared, barrier.phase,
              History(barrier).c_str()));
  }
  if (barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.time = now_ + costs.barrier;
  barrier.pending = barrier.expected;
  if (options_.races) {
    barrier.previous = barrier.complete.seen;
    Join(barrier.complete, barrier.current);
    barrier.current.Clear();
  }
}

void Machine::Arrive(const Site& site, Mbarrier& barrier, uint32_t count, uint32_t offset) {
  Note(barrier, "arrive", site, count);
  barrier.pending -= count;
  ++progress_;
  FinishPhase(site, barrier, offset);
}

void Machine::CompleteBytes(const Site& site, Mbarrier& barrier, int64_t bytes, uint32_t offset) {
  Note(barrier, "bytes came:", site, bytes);
  barrier.bytes -= bytes;
  ++progress_;
  if (barrier.bytes < -(1 << 20) || barrier.bytes > (1 << 20)) {
    Fail("barrier", site,
         Text("the transaction count of the mbarrier at byte %u leaves its range; events:%s", offset - kReservedShared,
              History(barrier).c_str()));
  }
  // Bytes may come before they are expected, but not after all arrivals.
  FinishPhase(site, barrier, offset);
}

void Machine::MbarrierInit(Context& c) {
  const Site site = c.site(*this);
  Cluster& cluster = *c.warp.cta->cluster;
  for (int l = 0; l < 32; ++l) {
    if (!(c.mask >> l & 1)) continue;
    const SharedPlace place = Shared(site, cluster, static_cast<uint32_t>(Address(c, 0, l)), 8, 8);
    if (place.cta != c.warp.cta) Fail("barrier", site, "an mbarrier of another CTA");
    Mbarrier& barrier = place.cta->barriers[place.offset];
    if (c.instr.op() == Op::mbarrier_inval) {
      if (!barrier.live) Fail("barrier", site, "mbarrier.inval of what is no mbarrier");
      if (options_.races) CheckBarrierUse(site, barrier, c.warp.lanes[l], false, place.offset);
      CheckBarrierEnd(site, barrier, options_.races ? c.warp.lanes[l] : barrier.current, cluster, place.offset);
      barrier.live = false;
      place.cta->barrier_words[place.offset / 8] = 0;
      const uint8_t nothing[8] = {};  // from now on these bytes are data, and this was a write to them
      WriteShared(site, *place.cta, place.offset, 8, LaneActor(c, l), nothing);
      std::memset(place.cta->shared_written.data() + place.offset, 0, 8);
      continue;
    }
    if (barrier.live) Fail("barrier", site, "an mbarrier is initialised again without mbarrier.inval");
    const uint32_t count = static_cast<uint32_t>(Value(c, 1, l));
    if (count == 0 || count >= 1u << 20) {
      Fail("barrier", site, Text("an mbarrier for %u arrivals: from 1 to 2^20 - 1 are possible", count));
    }
    // The bytes of a barrier are no data.
    const uint8_t nothing[8] = {};
    WriteShared(site, *place.cta, place.offset, 8, LaneActor(c, l), nothing);
    std::memset(place.cta->shared_written.data() + place.offset, 0, 8);
    barrier = Mbarrier{};
    barrier.live = true;
    barrier.expected = count;
    barrier.pending = count;
    barrier.init = LaneActor(c, l).access;
    place.cta->barrier_words[place.offset / 8] = 1;
    if (options_.races) {
      barrier.current.Resize(cluster.agents, fences_);
      barrier.complete.Resize(cluster.agents, fences_);
      barrier.uses.resize(cluster.agents);
    }
    Note(barrier, "init", site, count);
  }
}

void Machine::MbarrierArrive(Context& c) {
  const Instr& i = c.instr;
  const bool arrives = i.op() == Op::mbarrier_arrive;
  const Site site = c.site(*this);
  Cluster& cluster = *c.warp.cta->cluster;
  const int address_at = arrives ? 1 : 0;
  uint32_t released = 0;
  for (int l = 0; l < 32; ++l) {
    if (!(c.mask >> l & 1)) continue;
    SharedPlace place;
    Site lane_site = site;
    lane_site.lanes = 1u << l;
    Mbarrier& barrier = Barrier(lane_site, cluster, static_cast<uint32_t>(Address(c, address_at, l)), &place);
    if (options_.races) CheckBarrierUse(lane_site, barrier, c.warp.lanes[l], false, place.offset);
    CheckWindow(c, lane_site, place);
    const uint32_t value = static_cast<uint32_t>(Value(c, address_at + 1, l));
    const uint64_t state = barrier.phase;
    if (options_.races) {
      const bool releases_nothing = arrives && i.has(k_relaxed);
      barrier.uses[c.warp.agent + static_cast<uint32_t>(l)] = {c.warp.clock, c.fragment.pc,
                                                               releases_nothing ? barrier.phase : int64_t{-1}};
    }
    if (options_.races && place.cta != c.warp.cta) {
      if (i.has(k_relaxed)) {
        barrier.relaxed = LaneActor(c, l).access;
        barrier.relaxed_phase = barrier.phase;
        CheckBegun(lane_site, *place.cta, c.warp.lanes[l]);
      } else {
        Use(lane_site, *place.cta, LaneActor(c, l));
      }
    }
    if (i.op() == Op::mbarrier_complete_tx) {
      CompleteBytes(lane_site, barrier, value, place.offset);
    } else if (!arrives || i.has(k_expect_tx)) {
      Note(barrier, "bytes expected:", lane_site, value);
      barrier.bytes += value;
      if (barrier.bytes > (1 << 20) - 1) {
        Fail("barrier", lane_site, Text("%u bytes are expected: up to 2^20 - 1 are possible", value));
      }
      ++progress_;
    }
    if (arrives) {
      if (!i.has(k_relaxed)) {
        Release(c.warp, 1u << l, barrier.current);
        released |= 1u << l;
      } else if (options_.races) {
        TellBegun(cluster, c.warp.lanes[l], barrier.current);
      }
      const uint32_t count = i.has(k_expect_tx) ? 1 : value;
      if (count == 0 || count >= 1u << 20) Fail("barrier", lane_site, Text("%u arrivals at once", count));
      if (i.has(k_no_complete) && barrier.pending - count == 0) {
        Fail("barrier", lane_site, "an arrival with .noComplete completes the phase");
      }
      if (i.has(k_drop)) barrier.expected -= std::min(count, barrier.expected);
      Arrive(lane_site, barrier, count, place.offset);
      Put(c, 0, l, state);
    }
  }
  if (released != 0) Tick(c.warp);
}

// Whether a wait that may give up does so. In another order of events the phase would not have been over yet, unless
// some lane knows that it is. Each wait of a warp gives up at first: nobody must rely on what it did not wait for.
bool Machine::AsksTooEarly(Context& c, uint32_t passed) {
  if (!c.instr.has(k_suspends) || options_.timeline) return false;
  if (c.warp.asked.count(c.fragment.pc) != 0 && random_.Below(8) != 0) return false;
  if (passed != 0 && !options_.races) return false;
  Cluster& cluster = *c.warp.cta->cluster;
  for (uint32_t left = passed; left != 0; left &= left - 1) {
    const int l = __builtin_ctz(left);
    SharedPlace place;
    const Mbarrier& barrier = Barrier(c.site(*this), cluster, static_cast<uint32_t>(Address(c, 1, l)), &place);
    if (Knows(c.warp.lanes[l], barrier.complete.seen)) return false;
  }
  c.warp.asked.insert(c.fragment.pc);
  return true;
}

Step Machine::MbarrierWait(Context& c) {
  const Site site = c.site(*this);
  Cluster& cluster = *c.warp.cta->cluster;
  uint32_t passed = 0;
  Wait wait;
  for (int l = 0; l < 32; ++l) {
    if (!(c.mask >> l & 1)) continue;
    SharedPlace place;
    Mbarrier& barrier = Barrier(site, cluster, static_cast<uint32_t>(Address(c, 1, l)), &place);
    if (place.cta != c.warp.cta) Fail("protocol", site, "a wait at an mbarrier of another CTA");
    const uint32_t parity = static_cast<uint32_t>(Value(c, 2, l)) & 1;
    if (options_.races) barrier.uses[c.warp.agent + static_cast<uint32_t>(l)] = {c.warp.clock, c.fragment.pc, -1};
    if ((barrier.phase & 1) != parity) {
      passed |= 1u << l;
    } else {
      wait = {Wait::kMbarrier, place.cta, place.offset, parity};
    }
  }
  if (AsksTooEarly(c, passed)) {
    passed = 0;
  } else if (wait.kind != Wait::kNothing) {
    bool suspended = c.instr.has(k_suspends) && passed == 0;
    // A poll may fail. Where nothing has changed since this one began to, there is no use in going on with it.
    if (c.warp.polled_at == progress_ && c.warp.polled_pc == c.fragment.pc) {
      suspended = suspended || ++c.warp.failed_polls > 64;
    } else {
      c.warp.failed_polls = 0;
    }
    if (suspended) {
      c.warp.failed_polls = 0;
      c.fragment.wait = wait;
      return Step::kBlocked;
    }
    c.warp.polled_pc = c.fragment.pc;
    c.warp.polled_at = progress_;
  }
  for (int l = 0; l < 32; ++l) {
    if (!(c.mask >> l & 1)) continue;
    Put(c, 0, l, passed >> l & 1);
    if (!(passed >> l & 1)) continue;
    SharedPlace place;
    Mbarrier& barrier = Barrier(site, cluster, static_cast<uint32_t>(Address(c, 1, l)), &place);
    if (options_.races) CheckBarrierUse(site, barrier, c.warp.lanes[l], false, place.offset);
    // The first phase of this parity behind the last one that this thread saw would have let it pass as well. It must
    // know that the one before the latest is over, or else it might have passed too early.
    const size_t thread = c.warp.agent + static_cast<size_t>(l);
    if (barrier.observed.size() <= thread) barrier.observed.resize(thread + 1, -2);
    const int64_t complete = static_cast<int64_t>(barrier.phase) - 1;
    int64_t& last = barrier.observed[thread];
    int64_t first = last + 1;
    if ((first & 1) != (complete & 1)) ++first;
    if (options_.races && complete >= first + 2 && !Knows(c.warp.lanes[l], barrier.previous)) {
      Fail("barrier", site,
           Text("lane %d waits for parity %llu of the mbarrier at byte %u. Since it last did, phases %lld and %lld of "
                "this parity came to pass, and it cannot tell which one it sees; events:%s",
                l, static_cast<unsigned long long>(complete & 1), place.offset - kReservedShared,
                static_cast<long long>(first), static_cast<long long>(complete), History(barrier).c_str()));
    }
    last = complete;
    if (!c.instr.has(k_relaxed)) {
      Acquire(c.warp, 1u << l, barrier.complete);
    } else if (options_.races) {
      TellBegun(cluster, barrier.complete, c.warp.lanes[l]);
    }
    if (options_.timeline && barrier.time > c.warp.time) c.warp.time = barrier.time;
  }
  return Step::kNext;
}

// Generic accesses that these lanes know of may from now on be relied on by the asynchronous proxy, in the spaces that
// the fence is for.
void Machine::FenceAsync(Context& c) {
  if (!options_.races) return;
  std::array<bool, kSpaceClasses> covered{};
  for (int space = 0; space < kSpaceClasses; ++space) {
    if (c.instr.extra >> space & 1) covered[static_cast<size_t>(fence_of_[static_cast<size_t>(space)])] = true;
  }
  for (int l = 0; l < 32; ++l) {
    if (!(c.mask >> l & 1)) continue;
    Clocks& clocks = c.warp.lanes[l];
    for (size_t i = 0; i < covered.size(); ++i) {
      if (covered[i]) JoinInto(clocks.fenced[i], clocks.seen);
    }
  }
  if (c.instr.extra >> kOwnShared & 1) {
    FenceMbarrierInit(c);
  } else {
    FenceThread(c);
  }
}

void Machine::FenceMbarrierInit(Context& c) {
  if (!options_.races) return;
  for (const auto& cta : c.warp.cta->cluster->ctas) {
    for (auto& [offset, barrier] : cta->barriers) {
      // A fence covers the inits that happened before it.
      if (!barrier.live || barrier.init_fenced) continue;
      for (int l = 0; l < 32; ++l) {
        Access now;
        now.cluster = barrier.init.cluster;
        if (c.mask >> l & 1 && Ordered(barrier.init, now, c.warp.lanes[l])) barrier.init_fenced = true;
      }
    }
  }
  FenceThread(c);
}

void Machine::FenceThread(Context& c) {
  if (!options_.races) return;
  if (!c.warp.pending.empty()) {
    for (int l = 0; l < 32; ++l) {
      if (c.mask >> l & 1) Join(c.warp.lanes[l], c.warp.pending[l]);
    }
  }
  if (c.warp.fences.empty()) {
    c.warp.fences.resize(32);
    for (Clocks& clocks : c.warp.fences) clocks.Resize(c.warp.cta->cluster->agents, fences_);
  }
  for (int l = 0; l < 32; ++l) {
    if (c.mask >> l & 1) Join(c.warp.fences[l], c.warp.lanes[l]);
  }
  Tick(c.warp);
}

}  // namespace ptx
