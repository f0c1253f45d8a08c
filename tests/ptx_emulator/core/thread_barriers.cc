// The barriers that threads meet at: the named ones of a CTA, and that of a cluster.
#include <algorithm>

#include "machine.h"

namespace ptx {

// A warp arrives at a named barrier: with all lanes that have not ended.
void Machine::ArriveNamed(Warp& warp, const Warp::Arrival& arrival) {
  NamedBarrier& barrier = warp.cta->named[arrival.id];
  barrier.of_all = arrival.of_all && (barrier.arrived == 0 || barrier.of_all);
  if (barrier.arrived != 0 && barrier.expected != arrival.expected) {
    Fail("protocol", arrival.site,
         Text("named barrier %u is for %u threads here, and for %u where others arrived", arrival.id, arrival.expected,
              barrier.expected));
  }
  barrier.expected = arrival.expected;
  barrier.arrived += 32;
  barrier.last = arrival.site;
  if (warp.time + costs.barrier > barrier.time) barrier.time = warp.time + costs.barrier;
  ++progress_;
  if (barrier.arrived > barrier.expected) {
    Fail("protocol", arrival.site, Text("more threads at named barrier %u than its %u", arrival.id, arrival.expected));
  }
  FinishNamedPhase(barrier);
}

// Lanes have ended: barriers do not wait for those.
void Machine::ArriveWithout(Warp& warp) {
  for (size_t i = 0; i < warp.arrivals.size();) {
    const Warp::Arrival arrival = warp.arrivals[i];
    if ((warp.live & ~arrival.lanes) != 0) {
      ++i;
      continue;
    }
    warp.arrivals.erase(warp.arrivals.begin() + static_cast<ptrdiff_t>(i));
    ArriveNamed(warp, arrival);
  }
}

Step Machine::BarSync(Context& c, bool waits) {
  Warp& warp = c.warp;
  Cta& cta = *warp.cta;
  const int lane = __builtin_ctz(c.mask);
  const Site site = c.site(*this);
  const uint32_t id = static_cast<uint32_t>(Value(c, 0, lane));
  if (id >= cta.named.size()) Fail("protocol", site, Text("named barrier %u: there are 16", id));
  NamedBarrier& barrier = cta.named[id];
  if (!c.fragment.arrived) {
    if (c.instr.has(k_aligned) && !Converged(c, ~0u)) return Step::kBlocked;
    Warp::Arrival arrival{id, c.mask, 0, c.instr.operands == 1, site};
    if (!arrival.of_all) {
      arrival.expected = static_cast<uint32_t>(Value(c, 1, lane));
      if (arrival.expected % 32 != 0 || arrival.expected == 0) {
        Fail("protocol", site, Text("named barrier %u for %u threads: not a multiple of 32", id, arrival.expected));
      }
    } else {
      for (const Warp& other : cta.warps) arrival.expected += other.done() ? 0 : 32;
    }
    Release(warp, c.mask, barrier.current);
    Tick(warp);
    c.fragment.wait.value = barrier.generation;
    c.fragment.arrived = true;
    const auto begun = std::find_if(warp.arrivals.begin(), warp.arrivals.end(),
                                    [&](const Warp::Arrival& other) { return other.id == id; });
    if (begun != warp.arrivals.end()) {
      if (begun->lanes & c.mask) Fail("protocol", site, Text("lanes %#010x are at named barrier %u", begun->lanes, id));
      if (begun->expected != arrival.expected && !arrival.of_all) {
        Fail("protocol", site,
             Text("named barrier %u is for %u threads here, and for %u where other lanes arrived", id, arrival.expected,
                  begun->expected));
      }
      arrival.lanes |= begun->lanes;
      warp.arrivals.erase(begun);
    }
    if ((warp.live & ~arrival.lanes) == 0) {
      ArriveNamed(warp, arrival);
    } else {
      warp.arrivals.push_back(arrival);  // until the others come
    }
  }
  if (waits && barrier.generation == c.fragment.wait.value) {
    c.fragment.wait = {Wait::kNamedBarrier, &cta, id, barrier.generation};
    return Step::kBlocked;
  }
  c.fragment.arrived = false;
  if (waits) {
    Acquire(warp, c.mask, barrier.complete);
    if (options_.timeline && barrier.time > warp.time) warp.time = barrier.time;
  }
  return Step::kNext;
}

void Machine::FinishNamedPhase(NamedBarrier& barrier) {
  if (barrier.arrived == 0 || barrier.arrived != barrier.expected) return;
  barrier.arrived = 0;
  ++barrier.generation;
  if (!options_.races) return;
  Join(barrier.complete, barrier.current);
  barrier.current.Clear();
}

void Machine::ClusterArrive(Context& c) {
  Warp& warp = c.warp;
  Cluster& cluster = *warp.cta->cluster;
  const Site site = c.site(*this);
  if ((warp.live & ~c.mask) != 0) Fail("protocol", site, "a part of a warp arrives at the cluster's barrier");
  if (warp.cluster_arrived) Fail("protocol", site, "a second arrival at the cluster's barrier without a wait");
  if (options_.races) {
    if (c.instr.has(k_relaxed)) {
      for (int l = 0; l < 32; ++l) TellBegun(cluster, warp.lanes[l], cluster.barrier_current);
      if (!warp.fences.empty()) {
        for (int l = 0; l < 32; ++l) Join(cluster.barrier_current, warp.fences[l]);
      }
    } else {
      Release(warp, c.mask, cluster.barrier_current);
    }
    Tick(warp);
  }
  warp.cluster_arrived = true;
  warp.cluster_generation = cluster.generation;
  ++progress_;
  ++cluster.arrived_warps;
  FinishClusterPhase(cluster);
}

// Warps that have ended are not waited for. They may have arrived before.
void Machine::FinishClusterPhase(Cluster& cluster) {
  if (cluster.arrived_warps == 0) return;
  uint32_t expected = 0;
  for (const auto& cta : cluster.ctas) {
    for (const Warp& other : cta->warps) {
      expected += !other.done() || (other.cluster_arrived && other.cluster_generation == cluster.generation);
    }
  }
  if (cluster.arrived_warps != expected) return;
  cluster.arrived_warps = 0;
  ++cluster.generation;
  cluster.time = now_ + costs.barrier;
  if (options_.races) Join(cluster.barrier_complete, cluster.barrier_current);
}

Step Machine::ClusterWait(Context& c) {
  Warp& warp = c.warp;
  Cluster& cluster = *warp.cta->cluster;
  if (!warp.cluster_arrived) Fail("protocol", c.site(*this), "a wait at the cluster's barrier without an arrival");
  if (cluster.generation == warp.cluster_generation) {
    c.fragment.wait = {Wait::kClusterBarrier, warp.cta, 0, cluster.generation};
    return Step::kBlocked;
  }
  if (!Converged(c, ~0u)) return Step::kBlocked;
  warp.cluster_arrived = false;
  if (options_.timeline && cluster.time > warp.time) warp.time = cluster.time;
  Acquire(warp, c.mask, cluster.barrier_complete);
  return Step::kNext;
}

}  // namespace ptx
