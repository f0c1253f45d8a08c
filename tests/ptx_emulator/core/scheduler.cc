// Who runs next: warps, groups of lanes, asynchronous operations; in seeded random order, or by time.
#include <algorithm>

#include "machine.h"

namespace ptx {

bool Machine::Ready(Warp& warp, const Fragment& fragment) {
  const Wait& wait = fragment.wait;
  switch (wait.kind) {
    case Wait::kNothing:
      return true;
    case Wait::kMbarrier:
      return (wait.cta->barriers.at(wait.number).phase & 1) != wait.value;
    case Wait::kNamedBarrier:
      return wait.cta->named[wait.number].generation != wait.value;
    case Wait::kClusterBarrier:
      return warp.cta->cluster->generation != wait.value;
    case Wait::kLanes:
      return (wait.number & warp.live & ~fragment.mask) == 0;
    case Wait::kRegisters:
      return wait.cta->free_registers >= wait.number;
    case Wait::kPeer:
      return wait.cta->tmem->pair_requests >= wait.value;
    case Wait::kTmem: {
      const Tmem& tmem = *wait.cta->tmem;
      for (uint32_t base = 0; base + wait.number <= 512; base += wait.number) {
        bool free = true;
        for (uint32_t c = base; c < base + wait.number; ++c) free &= !tmem.allocated[c];
        if (free) return true;
      }
      return false;
    }
    case Wait::kBulkGroups: {
      uint32_t newer = 0;
      for (auto group = warp.groups.rbegin(); group != warp.groups.rend(); ++group) {
        if (!(group->lanes & fragment.mask) || newer++ < wait.number) continue;
        for (const auto& op : group->ops) {
          if (!(wait.value ? op->read : op->done)) return false;
        }
      }
      return true;
    }
  }
  return false;
}

// The ready group that is furthest behind: lanes come together again where they can. What it does may take a lane of
// another group to go on, as every lane does: after a while they take turns.
Fragment* Machine::PickFragment(Warp& warp) {
  constexpr uint32_t kTurn = 2048;
  const uint32_t turn = warp.apart / kTurn;
  Fragment* best = nullptr;
  uint32_t ready = 0;
  for (Fragment& fragment : warp.fragments) {
    if (turn % 2 == 0 && best != nullptr && fragment.pc >= best->pc) continue;
    if (!Ready(warp, fragment)) continue;
    best = &fragment;
    ++ready;
  }
  if (turn % 2 == 0 || ready < 2) return best;
  uint32_t skip = turn / 2 % ready;
  for (Fragment& fragment : warp.fragments) {
    if (Ready(warp, fragment) && skip-- == 0) return &fragment;
  }
  return best;
}

void Machine::MergeFragments(Warp& warp) {
  std::vector<Fragment>& fragments = warp.fragments;
  const auto free = [](const Fragment& fragment) {
    return !fragment.arrived && (fragment.wait.kind == Wait::kNothing || fragment.wait.kind == Wait::kLanes);
  };
  for (size_t a = 0; a < fragments.size(); ++a) {
    for (size_t b = a + 1; b < fragments.size();) {
      if (fragments[a].pc == fragments[b].pc && free(fragments[a]) && free(fragments[b])) {
        fragments[a].mask |= fragments[b].mask;
        fragments[a].wait = Wait{};
        fragments.erase(fragments.begin() + static_cast<ptrdiff_t>(b));
      } else {
        ++b;
      }
    }
  }
}

void Machine::RunWarp(Warp& warp, int quantum) {
  while (quantum-- > 0) {
    Fragment* fragment = warp.fragments.size() == 1 && warp.fragments[0].wait.kind == Wait::kNothing
                             ? &warp.fragments[0]
                             : PickFragment(warp);
    if (fragment == nullptr) return;
    fragment->wait.kind = Wait::kNothing;
    now_ = warp.time;
    if (fragment->pc >= program_.instructions.size()) {  // the end of the text is a return
      warp.live &= ~fragment->mask;
      warp.fragments.erase(warp.fragments.begin() + (fragment - warp.fragments.data()));
      ++progress_;
      ArriveWithout(warp);
      if (warp.done()) return FinishWarp(warp);
      continue;
    }
    const Instr& instr = program_.instructions[fragment->pc];
    uint32_t mask = fragment->mask;
    if (instr.guard >= 0) {
      const uint32_t guard = *reinterpret_cast<const uint32_t*>(warp.registers + instr.guard);
      mask &= instr.guard_negated ? ~guard : guard;
    }
    if (instr.op() == Op::bar_sync && !instr.has(k_aligned) && mask != 0 && mask != fragment->mask) {
      const Fragment others{fragment->pc + 1, fragment->mask & ~mask, {}, false};  // these do not wait here
      fragment->mask = mask;
      warp.fragments.push_back(others);
      continue;
    }
    warp.apart = warp.fragments.size() == 1 ? 0 : warp.apart + 1;
    ++instructions;
    ++executed[fragment->pc];
    if (options_.timeline) {
      Spend(warp, instr);
      now_ = warp.time;
    }
    if (instr.has(k_tracked_guard)) {
      Context context{warp, *fragment, instr, program_.operands.data() + instr.first, 0};
      TrackRegisters(context);
    }
    if (instr.op() == Op::bra) {
      const uint32_t rest = fragment->mask & ~mask;
      if (mask == 0) {
        ++fragment->pc;
      } else if (rest == 0) {
        fragment->pc = static_cast<uint32_t>(instr.target);
      } else {
        const uint32_t next = fragment->pc + 1;
        fragment->pc = static_cast<uint32_t>(instr.target);
        fragment->mask = mask;
        warp.fragments.push_back({next, rest, {}, false});
      }
      if (warp.fragments.size() > 1) MergeFragments(warp);
      continue;
    }
    if (instr.op() == Op::ret) {
      warp.live &= ~mask;
      fragment->mask &= ~mask;
      ++fragment->pc;
      ++progress_;
      if (fragment->mask == 0) warp.fragments.erase(warp.fragments.begin() + (fragment - warp.fragments.data()));
      ArriveWithout(warp);
      if (warp.done()) return FinishWarp(warp);
      continue;
    }
    if (mask != 0) {
      Context context{warp, *fragment, instr, program_.operands.data() + instr.first, mask};
      if (Execute(context) == Step::kBlocked) {
        --instructions;
        --executed[fragment->pc];
        if (fragment->blocked_since < 0) fragment->blocked_since = now_;
        if (warp.fragments.size() > 1) MergeFragments(warp);
        if (PickFragment(warp) == nullptr) return;
        continue;
      }
    }
    if (options_.timeline && fragment->blocked_since >= 0) {
      if (warp.time > fragment->blocked_since) {
        WaitInterval wait;
        wait.start = fragment->blocked_since;
        wait.end = warp.time;
        wait.pc = fragment->pc;
        warp.cta->timeline->waits[static_cast<size_t>(warp.id)].push_back(wait);
      }
      fragment->blocked_since = -1;
    }
    ++fragment->pc;
    if (warp.fragments.size() > 1) MergeFragments(warp);
  }
}

// Runs one asynchronous operation, if there is one.
bool Machine::RunAsync(Cluster& cluster) {
  size_t choices = cluster.tasks.size();
  for (const auto& queue : cluster.queues) choices += !queue.empty();
  std::vector<Warp*> multiplying;
  for (const auto& cta : cluster.ctas) {
    for (Warp& warp : cta->warps) {
      if (!warp.products.empty()) multiplying.push_back(&warp);
    }
  }
  choices += multiplying.size();
  if (choices == 0) return false;
  size_t pick = random_.Below(static_cast<uint32_t>(choices));
  if (pick < cluster.tasks.size()) {
    Task task = std::move(cluster.tasks[pick]);
    cluster.tasks[pick] = std::move(cluster.tasks.back());
    cluster.tasks.pop_back();
    task.run();
    return true;
  }
  pick -= cluster.tasks.size();
  for (auto& queue : cluster.queues) {
    if (queue.empty()) continue;
    if (pick-- == 0) {
      Task task = std::move(queue.front());
      queue.pop_front();
      task.run();
      return true;
    }
  }
  WgmmaExecute(*multiplying[pick]);
  return true;
}

// Starts clusters where there is room, and lets those go that are through. False where nothing is left.
bool Machine::StartOrFinish() {
  for (size_t i = 0; i < clusters_.size();) {
    bool alive = false;
    for (const auto& cta : clusters_[i]->ctas) {
      for (const Warp& warp : cta->warps) alive = alive || !warp.done();
    }
    if (alive) {
      ++i;
      continue;
    }
    FinishCluster(*clusters_[i]);
    for (const auto& cta : clusters_[i]->ctas) {
      if (cta->timeline == nullptr) continue;
      for (const Warp& warp : cta->warps) {
        cta->timeline->ends[static_cast<size_t>(warp.id)] = warp.time;
        cta->timeline->end = std::max(cta->timeline->end, warp.time);
      }
      now_ = cta->timeline->end;  // a cluster that takes this one's place begins here
      timelines.push_back(std::move(cta->timeline));
    }
    clusters_.erase(clusters_.begin() + static_cast<ptrdiff_t>(i));
  }
  while (!waiting_.empty() && clusters_.size() < static_cast<size_t>(options_.resident_clusters)) StartCluster();
  return !clusters_.empty();
}

void Machine::RunRandomly() {
  std::vector<Warp*> ready;
  while (StartOrFinish()) {
    ready.clear();
    for (const auto& cluster : clusters_) {
      for (const auto& cta : cluster->ctas) {
        for (Warp& warp : cta->warps) {
          if (!warp.done() && PickFragment(warp) != nullptr) ready.push_back(&warp);
        }
      }
    }
    // Asynchronous operations are late or early, at random.
    Cluster& cluster = *clusters_[random_.Below(static_cast<uint32_t>(clusters_.size()))];
    if (ready.empty()) {
      bool ran = false;
      for (const auto& other : clusters_) ran = ran || RunAsync(*other);
      if (!ran) Deadlock();
      continue;
    }
    if (random_.Below(8) < 3 && RunAsync(cluster)) continue;
    Warp& warp = *ready[random_.Below(static_cast<uint32_t>(ready.size()))];
    RunWarp(warp, 1 + static_cast<int>(random_.Below(128)));
    CheckLimit(warp);
  }
}

// Whatever is earliest runs next.
void Machine::RunByTime() {
  while (StartOrFinish()) {
    Warp* next = nullptr;
    for (const auto& cluster : clusters_) {
      for (const auto& cta : cluster->ctas) {
        for (Warp& warp : cta->warps) {
          if (!warp.done() && (next == nullptr || warp.time < next->time) && PickFragment(warp) != nullptr)
            next = &warp;
        }
      }
    }
    Cluster* of = nullptr;
    size_t task_at = 0;
    int queue_at = -1;
    double earliest = next == nullptr ? 1e300 : next->time;
    for (const auto& cluster : clusters_) {
      for (size_t t = 0; t < cluster->tasks.size(); ++t) {
        if (cluster->tasks[t].ready > earliest) continue;
        earliest = cluster->tasks[t].ready;
        of = cluster.get();
        task_at = t;
        queue_at = -1;
      }
      for (size_t q = 0; q < cluster->queues.size(); ++q) {
        if (cluster->queues[q].empty() || cluster->queues[q].front().ready > earliest) continue;
        earliest = cluster->queues[q].front().ready;
        of = cluster.get();
        queue_at = static_cast<int>(q);
      }
    }
    if (of != nullptr) {
      Task task;
      if (queue_at >= 0) {
        task = std::move(of->queues[static_cast<size_t>(queue_at)].front());
        of->queues[static_cast<size_t>(queue_at)].pop_front();
      } else {
        task = std::move(of->tasks[task_at]);
        of->tasks.erase(of->tasks.begin() + static_cast<ptrdiff_t>(task_at));
      }
      now_ = task.ready;
      task.run();
      continue;
    }
    if (next == nullptr) Deadlock();
    RunWarp(*next, 4);
    CheckLimit(*next);
  }
}

void Machine::CheckLimit(const Warp& warp) {
  if (instructions <= options_.max_instructions) return;
  const uint32_t pc = warp.done() ? 0 : warp.fragments[0].pc;
  Fail("limit", Here(warp, pc, 0),
       Text("more than %lld warp instructions", static_cast<long long>(options_.max_instructions)));
}

void Machine::Run() {
  try {
    if (options_.timeline) {
      RunByTime();
    } else {
      RunRandomly();
    }
  } catch (const Stop&) {
  }
}

}  // namespace ptx
